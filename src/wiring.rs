//! Puts the concrete adapters behind the ports, as the configuration says.

use crate::config::{Config, LedgerConfig};
use anyhow::{Context, Result};
use shardcron_actors::ledger_time::LedgerTime;
use shardcron_actors::modes::Modes;
use shardcron_actors::{Io, Ports, SystemClock, SystemEntropy, Trace, TraceFile};
use shardcron_broker::ledger::LedgerBroker;
use shardcron_broker::rabbitmq::{RabbitMq, RabbitOptions};
use shardcron_broker::{Broker, fallback};
use shardcron_domain::address::masked;
use shardcron_domain::modes::Mode;
use shardcron_store::fallback::{Fallback, FallbackOptions};
use shardcron_store::redis::RedisStores;
use shardcron_store::sql::{LedgerLease, LedgerPresence, SqlLedger, SqlOptions};
use shardcron_store::{IdempotencyStore, LeaseStore, Ledger, NoIdempotency, Presence, SharedCache};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Why a part is away, while it is.
pub type Fault = watch::Receiver<Option<String>>;

/// The name of the trigger role's lease.
const LEASE: &str = "trigger";
/// How long the tables are tried to be made while somebody else has the file.
const MIGRATION_PATIENCE: Duration = Duration::from_secs(30);

/// What a process is connected to.
pub struct Wired {
    /// The ports for the actors.
    pub ports: Ports,
    /// The ledger as what it is, for the demo's own tables.
    pub sql: SqlLedger,
    /// Redis as what it is, for the doctor.
    pub redis: Option<RedisStores>,
    /// Where lease and presence are rows.
    live: SqlLedger,
    /// The level of caches that all workers share.
    pub cache: Option<Arc<dyn SharedCache>>,
    /// What leads to the degraded modes; see [`Wired::follow_faults`].
    pub faults: Vec<(Mode, Fault)>,
}

impl Wired {
    /// Reads the rows that lease and presence fall back to, and says who holds the lease there.
    ///
    /// # Errors
    /// They can't be read.
    pub async fn fallback_rows(&self) -> shardcron_store::Result<Option<String>> {
        LedgerPresence { ledger: self.live.clone() }.workers().await?;
        LedgerLease { ledger: self.live.clone(), name: LEASE.into() }.holder().await
    }

    /// Enters and leaves the degraded modes from now on, as the parts go away and come back.
    pub fn follow_faults(&self) {
        for (mode, fault) in self.faults.clone() {
            self.ports.io.spawn(self.ports.modes.clone().follow(mode, fault));
        }
    }
}

/// Connects to everything; the ledger is waited for, the others may come later.
///
/// # Errors
/// A URL that can't be read.
pub async fn connect(config: &Config, name: &str) -> Result<Wired> {
    let sql = wait_for_ledger(&config.ledger).await?;
    let ledger: Arc<dyn Ledger> = Arc::new(sql.clone());
    let redis = match &config.redis.url {
        Some(url) => Some(redis(url, config)?),
        None => None,
    };
    let live = live_rows(config, &sql).await?;
    let mut faults: Vec<(Mode, Fault)> = sql.fault().map(|fault| (Mode::LedgerAway, fault)).into_iter().collect();
    let mut cache: Option<Arc<dyn SharedCache>> = None;
    let (lease, presence, idempotency): (Arc<dyn LeaseStore>, Arc<dyn Presence>, Arc<dyn IdempotencyStore>) =
        match &redis {
            Some(stores) => {
                let options = FallbackOptions {
                    lost_after: config.worker.lost_after.as_std(),
                    lease_ttl: config.scheduler.lease_ttl.as_std(),
                    idempotency_ttl: config.redis.idempotency_ttl.as_std(),
                };
                let both = Fallback::new(stores.clone(), live.clone(), options);
                faults.push((Mode::RedisAway, both.fault()));
                cache = Some(Arc::new(both.cache()));
                (Arc::new(both.lease(LEASE)), Arc::new(both.presence()), Arc::new(both.idempotency()))
            }
            None => (
                Arc::new(LedgerLease { ledger: live.clone(), name: LEASE.into() }),
                Arc::new(LedgerPresence { ledger: live.clone() }),
                Arc::new(NoIdempotency),
            ),
        };
    let (broker, fault) = broker(config, name, ledger.clone())?;
    faults.extend(fault.map(|fault| (Mode::BrokerAway, fault)));
    let ports = Ports {
        ledger,
        broker,
        lease,
        presence,
        idempotency,
        clock: Arc::new(SystemClock::default()),
        ledger_time: LedgerTime::default(),
        entropy: Arc::new(SystemEntropy),
        modes: Modes::default(),
        trace: Trace::off(),
        io: Io::on(tokio::runtime::Handle::current()),
        handlers: Io::on(tokio::runtime::Handle::current()),
    };
    let ports = match &config.log.trace_file {
        Some(path) => {
            let life = format!("{name}/{}", ports.entropy.id());
            let file = TraceFile::open(path, life).with_context(|| format!("log.trace_file {}", path.display()))?;
            ports.traced(Trace::to(Arc::new(file)))
        }
        None => ports,
    };
    Ok(Wired { ports, sql, redis, live, cache, faults })
}

fn redis(url: &str, config: &Config) -> Result<RedisStores> {
    RedisStores::open(url, &config.redis.prefix).with_context(|| format!("redis.url {}", masked(url)))
}

/// The transport, and where it can be done without, why it is.
fn broker(config: &Config, name: &str, ledger: Arc<dyn Ledger>) -> Result<(Arc<dyn Broker>, Option<Fault>)> {
    let Some(url) = &config.broker.url else {
        return Ok((Arc::new(LedgerBroker::new(ledger, config.broker.poll.as_std())), None));
    };
    let options =
        RabbitOptions { prefix: config.broker.prefix.clone(), name: name.to_owned(), ..RabbitOptions::default() };
    let rabbit = Arc::new(RabbitMq::connect(url, options).with_context(|| format!("broker.url {}", masked(url)))?);
    if !config.broker.fallback {
        return Ok((rabbit, None));
    }
    let options = fallback::FallbackOptions {
        after: config.broker.fallback_after.as_std(),
        poll: config.broker.poll.as_std(),
        runtime: None,
    };
    let broker = fallback::Fallback::new(rabbit, ledger, options).context("broker.fallback")?;
    let fault = broker.fault();
    Ok((Arc::new(broker), Some(fault)))
}

/// Where lease and presence are rows. SQLite has one writer for each file: in the ledger's own file a job's long statement would
/// keep every heartbeat and the lease waiting, and workers and leaders would give themselves up. So they have a file beside it.
async fn live_rows(config: &Config, ledger: &SqlLedger) -> Result<SqlLedger> {
    if ledger.dialect_name() != "sqlite" {
        return Ok(ledger.clone());
    }
    let path = config.ledger.url.split('?').next().unwrap_or(&config.ledger.url);
    let own = LedgerConfig { url: format!("{path}.live"), ..config.ledger.clone() };
    let live = wait_for_ledger(&own).await.context("the file for lease and presence")?;
    migrate(&live).await.context("the file for lease and presence")?;
    Ok(live)
}

/// Brings the tables to this program's version. Of two processes that make one SQLite file at the same moment, SQLite turns one away
/// without waiting; that one tries again.
pub(crate) async fn migrate(ledger: &dyn Ledger) -> Result<(), shardcron_store::StoreError> {
    let until = tokio::time::Instant::now() + MIGRATION_PATIENCE;
    loop {
        match ledger.migrate().await {
            Err(e) if e.is_transient() && tokio::time::Instant::now() < until => {
                tracing::debug!(error = %e, "the tables could not be made yet");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            other => return other.map(drop),
        }
    }
}

/// Reaches a database and says what it is.
///
/// # Errors
/// The store's words, without the URL.
pub async fn version_of(url: &str) -> Result<String> {
    // A file that is not there would be made by opening it.
    if let Some(path) = url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:")) {
        let path = path.split('?').next().unwrap_or(path);
        anyhow::ensure!(std::path::Path::new(path).exists(), "there is no file {path}");
    }
    let options = SqlOptions { max_connections: 1, ..SqlOptions::default() };
    Ok(SqlLedger::connect(url, options).await?.server_version().await?)
}

/// A server that is not up yet is waited for, and said so in one line (case D-07).
async fn wait_for_ledger(LedgerConfig { url, call_timeout, .. }: &LedgerConfig) -> Result<SqlLedger> {
    let (own, call_timeout) = (SqlOptions::default(), Duration::from_millis(call_timeout.0));
    let options = SqlOptions { call_timeout, acquire_timeout: own.acquire_timeout.min(call_timeout), ..own };
    let mut wait = Duration::from_millis(100);
    let mut said = false;
    loop {
        match SqlLedger::connect(url, options).await {
            Ok(ledger) => {
                if said {
                    tracing::info!("the ledger is there");
                }
                return Ok(ledger);
            }
            Err(e) if e.is_transient() => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(ledger = %masked(url), error = %e, "waiting for the ledger");
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_secs(5));
            }
            Err(e) => return Err(e).with_context(|| format!("the ledger {}", masked(url))),
        }
    }
}
