//! The lease as a key that expires.

use super::{config, millis, unavailable};
use crate::error::Result;
use crate::lease::{LeaseAnswer, LeaseStore};
use async_trait::async_trait;
use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{self, RedisError, Script};
use shardcron_domain::fallback::STAND_IN_PREFIX;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::sync::Mutex;

/// Takes what is free, the caller's own, or a stand-in's if the caller is none (ARGV[3]); answers with the owner.
static ACQUIRE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local owner = redis.call('GET', KEYS[1]) \
         if not owner or owner == ARGV[1] or \
           (string.sub(owner, 1, #ARGV[3]) == ARGV[3] and string.sub(ARGV[1], 1, #ARGV[3]) ~= ARGV[3]) then \
           redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) return ARGV[1] \
         end \
         return owner",
    )
});
/// Compares and extends in one step, so that a late renewal can't touch a successor's lease (case E-07). Answers with the owner.
static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local owner = redis.call('GET', KEYS[1]) \
         if owner == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end \
         return owner",
    )
});
static RELEASE: LazyLock<Script> = LazyLock::new(|| {
    Script::new("if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0")
});

/// A named lease in Redis. It has a connection of its own: a renewal must not wait behind a batch of other keys.
pub struct RedisLease {
    client: redis::Client,
    key: String,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl std::fmt::Debug for RedisLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisLease").field("key", &self.key).finish_non_exhaustive()
    }
}

impl RedisLease {
    pub(super) fn new(client: redis::Client, key: String) -> Self {
        RedisLease { client, key, connection: Mutex::new(None) }
    }

    async fn connected(&self) -> std::result::Result<MultiplexedConnection, RedisError> {
        let mut kept = self.connection.lock().await;
        if let Some(connection) = kept.as_ref() {
            return Ok(connection.clone());
        }
        let new = self.client.get_multiplexed_async_connection_with_config(&config()).await?;
        *kept = Some(new.clone());
        Ok(new)
    }

    /// After any error the connection is thrown away: what is still under way on it can't be told apart from what is not.
    async fn forget<T>(&self, answer: std::result::Result<T, RedisError>) -> std::result::Result<T, RedisError> {
        if answer.is_err() {
            *self.connection.lock().await = None;
        }
        answer
    }

    async fn take(&self, token: &str, ttl: Duration) -> std::result::Result<Option<String>, RedisError> {
        let mut connection = self.connected().await?;
        let mut call = ACQUIRE.key(&self.key);
        call.arg(token).arg(millis(ttl)).arg(STAND_IN_PREFIX);
        call.invoke_async(&mut connection).await
    }

    async fn extend(&self, token: &str, ttl: Duration) -> std::result::Result<Option<String>, RedisError> {
        let mut connection = self.connected().await?;
        RENEW.key(&self.key).arg(token).arg(millis(ttl)).invoke_async(&mut connection).await
    }

    async fn owner(&self) -> std::result::Result<Option<String>, RedisError> {
        let mut connection = self.connected().await?;
        redis::cmd("GET").arg(&self.key).query_async(&mut connection).await
    }

    async fn delete(&self, token: &str) -> std::result::Result<i64, RedisError> {
        let mut connection = self.connected().await?;
        RELEASE.key(&self.key).arg(token).invoke_async(&mut connection).await
    }
}

fn answer(owner: Option<String>, token: &str) -> LeaseAnswer {
    match owner {
        Some(owner) if owner == token => LeaseAnswer::Mine,
        Some(owner) => LeaseAnswer::HeldBy(owner),
        None => LeaseAnswer::Nobody,
    }
}

#[async_trait]
impl LeaseStore for RedisLease {
    async fn acquire(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        match self.forget(self.take(token, ttl).await).await {
            Ok(owner) => Ok(answer(owner, token)),
            // The command may have been carried out although its answer did not come.
            Err(error) => match self.forget(self.owner().await).await {
                Ok(Some(owner)) if owner == token => Ok(LeaseAnswer::Mine),
                _ => Err(unavailable(&error)),
            },
        }
    }

    async fn renew(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        let owner = self.forget(self.extend(token, ttl).await).await.map_err(|e| unavailable(&e))?;
        Ok(answer(owner, token))
    }

    async fn holder(&self) -> Result<Option<String>> {
        self.forget(self.owner().await).await.map_err(|e| unavailable(&e))
    }

    async fn release(&self, token: &str) -> Result<()> {
        self.forget(self.delete(token).await).await.map(drop).map_err(|e| unavailable(&e))
    }
}
