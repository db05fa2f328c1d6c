//! Puts the concrete adapters behind the ports, as the configuration says.

use crate::config::{Config, masked};
use anyhow::{Context, Result};
use shardcron_actors::{Io, Ports, SystemClock, SystemEntropy};
use shardcron_broker::Broker;
use shardcron_broker::ledger::LedgerBroker;
use shardcron_broker::rabbitmq::{RabbitMq, RabbitOptions};
use shardcron_store::redis::RedisStores;
use shardcron_store::sql::{LedgerLease, LedgerPresence, SqlLedger, SqlOptions};
use shardcron_store::{IdempotencyStore, LeaseStore, Ledger, NoIdempotency, Presence};
use std::sync::Arc;
use std::time::Duration;

/// What a process is connected to.
pub struct Wired {
    /// The ports for the actors.
    pub ports: Ports,
    /// The ledger as what it is, for the demo's own tables.
    pub sql: SqlLedger,
    /// Redis as what it is, for the doctor.
    pub redis: Option<RedisStores>,
}

/// Connects to everything; the ledger is waited for, the others may come later.
///
/// # Errors
/// A URL that can't be read.
pub async fn connect(config: &Config, name: &str) -> Result<Wired> {
    let sql = wait_for_ledger(&config.ledger.url).await?;
    let ledger: Arc<dyn Ledger> = Arc::new(sql.clone());
    let redis = match &config.redis.url {
        Some(url) => Some(redis(url, config)?),
        None => None,
    };
    let (lease, presence, idempotency): (Arc<dyn LeaseStore>, Arc<dyn Presence>, Arc<dyn IdempotencyStore>) =
        match &redis {
            Some(stores) => (
                Arc::new(stores.lease("trigger")),
                Arc::new(stores.presence()),
                Arc::new(stores.idempotency(config.redis.idempotency_ttl.as_std())),
            ),
            None => {
                let live = live_rows(config, &sql).await?;
                (
                    Arc::new(LedgerLease { ledger: live.clone(), name: "trigger".into() }),
                    Arc::new(LedgerPresence { ledger: live }),
                    Arc::new(NoIdempotency),
                )
            }
        };
    let broker = broker(config, name, ledger.clone())?;
    let ports = Ports {
        ledger,
        broker,
        lease,
        presence,
        idempotency,
        clock: Arc::new(SystemClock::default()),
        entropy: Arc::new(SystemEntropy),
        io: Io::on(tokio::runtime::Handle::current()),
    };
    Ok(Wired { ports, sql, redis })
}

fn redis(url: &str, config: &Config) -> Result<RedisStores> {
    RedisStores::open(url, &config.redis.prefix).with_context(|| format!("redis.url {}", masked(url)))
}

fn broker(config: &Config, name: &str, ledger: Arc<dyn Ledger>) -> Result<Arc<dyn Broker>> {
    Ok(match &config.broker.url {
        Some(url) => {
            let options = RabbitOptions {
                prefix: config.broker.prefix.clone(),
                name: name.to_owned(),
                ..RabbitOptions::default()
            };
            Arc::new(RabbitMq::connect(url, options).with_context(|| format!("broker.url {}", masked(url)))?)
        }
        None => Arc::new(LedgerBroker::new(ledger, config.broker.poll.as_std())),
    })
}

/// Where lease and presence are rows. SQLite has one writer for each file: in the ledger's own file a job's long statement would
/// keep every heartbeat and the lease waiting, and workers and leaders would give themselves up. So they have a file beside it.
async fn live_rows(config: &Config, ledger: &SqlLedger) -> Result<SqlLedger> {
    if ledger.dialect_name() != "sqlite" {
        return Ok(ledger.clone());
    }
    let path = config.ledger.url.split('?').next().unwrap_or(&config.ledger.url);
    let live = SqlLedger::connect(&format!("{path}.live"), SqlOptions::default())
        .await
        .context("the file for lease and presence")?;
    live.migrate().await.context("the file for lease and presence")?;
    Ok(live)
}

/// A server that is not up yet is waited for, and said so in one line (case D-07).
async fn wait_for_ledger(url: &str) -> Result<SqlLedger> {
    let mut wait = Duration::from_millis(100);
    let mut said = false;
    loop {
        match SqlLedger::connect(url, SqlOptions::default()).await {
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
