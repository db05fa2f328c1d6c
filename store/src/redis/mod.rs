//! Redis: the lease, the workers' presence and the idempotency keys of a cluster.
//!
//! Nothing here is the truth: each of the three can lose its memory at any time, and the ledger still decides rightly.

mod cache;
mod idempotency;
mod lease;
mod presence;

pub use cache::RedisCache;
pub use idempotency::RedisIdempotency;
pub use lease::RedisLease;
pub use presence::RedisPresence;

use crate::error::{Result, StoreError};
use deadpool_redis::redis::{self, AsyncConnectionConfig, RedisError};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime};
use std::time::Duration;

/// How long one command may take. The client's own default of half a second cuts off a Redis that saves to a slow disk.
const RESPONSE: Duration = Duration::from_secs(2);
/// How long a new connection may take.
const CONNECT: Duration = Duration::from_secs(2);
/// Connections of the pool. Commands are pipelined, so that few are enough.
const POOL: usize = 4;

/// What the three adapters share. Clones share the pool.
#[derive(Clone)]
pub struct RedisStores {
    client: redis::Client,
    pool: Pool,
    prefix: String,
}

impl std::fmt::Debug for RedisStores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the client: its address holds the password.
        f.debug_struct("RedisStores").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

pub(crate) fn unavailable(error: &RedisError) -> StoreError {
    StoreError::Unavailable { store: "redis", detail: error.to_string() }
}

fn pool_error(error: &PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => unavailable(error),
        other => StoreError::Unavailable { store: "redis", detail: other.to_string() },
    }
}

impl RedisStores {
    /// Stores at `redis://[:password@]host:port[/database]`. All keys begin with `prefix` and a colon. Connections are made when
    /// they are needed, so a server that is not up yet is no reason not to start (case D-07); each call says if it is away.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a URL that can't be read (it is not quoted).
    pub fn open(url: &str, prefix: &str) -> Result<Self> {
        let unreadable = |_| {
            StoreError::Invalid("the URL of Redis can't be read; it looks like redis://:password@host:6379/0".into())
        };
        let client = redis::Client::open(url).map_err(unreadable)?;
        let manager = Manager::new_with_config(url, config()).map_err(unreadable)?;
        let pool = Pool::builder(manager)
            .max_size(POOL)
            .wait_timeout(Some(RESPONSE))
            .create_timeout(Some(CONNECT))
            .recycle_timeout(Some(RESPONSE))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|e| StoreError::Unavailable { store: "redis", detail: e.to_string() })?;
        Ok(RedisStores { client, pool, prefix: prefix.to_owned() })
    }

    /// A lease of this name, on a connection of its own.
    #[must_use]
    pub fn lease(&self, name: &str) -> RedisLease {
        RedisLease::new(self.client.clone(), self.key(&format!("lease:{name}")))
    }

    /// The workers' presence.
    #[must_use]
    pub fn presence(&self) -> RedisPresence {
        RedisPresence::new(self.clone())
    }

    /// The idempotency keys, each kept for `ttl`: longer than a broker may hold a delivery before it comes again.
    #[must_use]
    pub fn idempotency(&self, ttl: Duration) -> RedisIdempotency {
        RedisIdempotency::new(self.clone(), ttl)
    }

    /// The level of caches that all workers share.
    #[must_use]
    pub fn cache(&self) -> RedisCache {
        RedisCache::new(self.clone())
    }

    /// The server in one line for people.
    ///
    /// # Errors
    /// The server did not answer.
    pub async fn server_version(&self) -> Result<String> {
        let info = self.info("server").await?;
        Ok(format!("Redis {}", field(&info, "redis_version").unwrap_or("of an unknown version")))
    }

    /// What must hold at the server and does not: each a sentence with its remedy (case E-06).
    ///
    /// # Errors
    /// The server did not answer.
    pub async fn check_server(&self) -> Result<Vec<String>> {
        let mut faults = Vec::new();
        let memory = self.info("memory").await?;
        match field(&memory, "maxmemory_policy") {
            Some("noeviction") | None => {}
            Some(policy) => faults.push(format!(
                "maxmemory-policy of Redis is '{policy}': when memory is short, it drops leases and heartbeats. \
                 Set it to noeviction, or give Shardcron a Redis of its own"
            )),
        }
        let replication = self.info("replication").await?;
        if field(&replication, "role") == Some("slave") {
            faults.push("this Redis is a replica and takes no writes. Connect to its primary".into());
        }
        Ok(faults)
    }

    /// Whether it takes writes.
    ///
    /// # Errors
    /// It did not answer, or refused.
    pub async fn probe(&self) -> Result<()> {
        let mut connection = self.connection().await?;
        let mut set = redis::cmd("SET");
        set.arg(self.key("probe")).arg(1).arg("PX").arg(1_000);
        set.query_async(&mut connection).await.map_err(|e| unavailable(&e))
    }

    async fn info(&self, section: &str) -> Result<String> {
        let mut connection = self.connection().await?;
        redis::cmd("INFO").arg(section).query_async(&mut connection).await.map_err(|e| unavailable(&e))
    }

    pub(crate) async fn connection(&self) -> Result<Connection> {
        self.pool.get().await.map_err(|e| pool_error(&e))
    }

    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}:{name}", self.prefix)
    }
}

pub(crate) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT)).set_response_timeout(Some(RESPONSE))
}

pub(crate) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX / 4)
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}
