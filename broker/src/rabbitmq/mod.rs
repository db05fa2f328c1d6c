//! RabbitMQ. Reconnects by its own loops: lapin's automatic recovery does not cover channel errors, after which a consumer is
//! silent for ever, and it hides that delivery tags begin again.
//!
//! Two connections, as the server blocks those that publish when it is short of memory or disk: acks must still go through then.
//! So nothing is ever published on the consuming connection.

mod acks;
mod conn;
mod declare;
mod error;
mod link;
mod probe;
mod publisher;
mod settler;
mod shards;
mod subscription;
mod triggers;
mod url;

use crate::codec;
use crate::groups::Backlog;
use crate::health::Health;
use crate::metric_definitions as m;
use crate::port::*;
use crate::topology::{DEFAULT_PREFIX, Names};
use async_trait::async_trait;
use link::{Closing, Link, LinkOptions};
use publisher::{Outgoing, Publisher};
use shardcron_domain::messages::{ShardMessage, ShardRun, TriggerRequest};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, watch};

/// A bound on every single request to the server that is answered at once when all is well.
const RPC_TIMEOUT: Duration = Duration::from_secs(5);

/// Tiers whose backlog is kept: far more than anybody serves.
const BACKLOGS_MAX: usize = 256;

const PUBLISHING: usize = 0;
const CONSUMING: usize = 1;

/// How to connect.
#[derive(Clone, Debug)]
pub struct RabbitOptions {
    /// The prefix of all names in RabbitMQ.
    pub prefix: String,
    /// This process, as the management UI shows its connections and consumers.
    pub name: String,
    /// The runtime that all I/O runs on; the current one where none is given. Never an actor's.
    pub runtime: Option<Handle>,
}

impl Default for RabbitOptions {
    fn default() -> Self {
        Self { prefix: DEFAULT_PREFIX.into(), name: "shardcron".into(), runtime: None }
    }
}

/// The broker on RabbitMQ.
pub struct RabbitMq {
    inner: Arc<Inner>,
}

/// What consumers share with the broker, so that they live on when the handle is dropped.
pub(crate) struct Inner {
    names: Names,
    name: String,
    runtime: Handle,
    address: url::Address,
    publishing: Link,
    consuming: Link,
    publisher: Publisher,
    health: Arc<Health>,
    version: OnceCell<String>,
    closing: watch::Sender<bool>,
    backlogs: Mutex<HashMap<String, Backlog>>,
}

impl RabbitMq {
    /// Begins to connect, in the background: the server need not be there yet.
    ///
    /// # Errors
    /// Refused, when the address or the prefix can't be one, or there is no runtime.
    pub fn connect(url: &str, options: RabbitOptions) -> Result<Self> {
        let names = Names::new(&options.prefix)?;
        let address = url::Address::parse(url)?;
        let runtime = match options.runtime {
            Some(handle) => handle,
            None => Handle::try_current().map_err(|_| {
                BrokerError::Refused("connecting to RabbitMQ needs a tokio runtime; none is running".into())
            })?,
        };
        let health = Arc::new(Health::new("rabbitmq", 2, BrokerState::Away("not connected yet".into())));
        let closing = watch::Sender::new(false);
        let open = |part, kind| {
            let options = LinkOptions {
                part,
                kind,
                name: format!("{} ({kind})", options.name),
                address: address.clone(),
                health: health.clone(),
                closing: Closing::new(&closing),
            };
            Link::open(&runtime, options)
        };
        let publishing = open(PUBLISHING, "publish");
        let consuming = open(CONSUMING, "consume");
        let publisher = Publisher::new(publishing.clone(), names.clone());
        let version = OnceCell::new();
        let inner = Inner {
            names,
            name: options.name,
            runtime,
            address,
            publishing,
            consuming,
            publisher,
            health,
            version,
            closing,
            backlogs: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The address without its password, for people.
    #[must_use]
    pub fn address(&self) -> &str {
        self.inner.address.masked()
    }
}

#[async_trait]
impl Broker for RabbitMq {
    async fn declare(&self, tiers: &[String]) -> Result<()> {
        let connection = self.inner.publishing.now()?;
        declare::declare(&connection, &self.inner.names.topology(tiers)).await
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        let runs: Vec<ShardRun> = messages.iter().map(|m| ShardRun::new(m.attempt, 1, m.epoch)).collect();
        self.publish_runs(tier, &runs).await
    }

    async fn publish_runs(&self, tier: &str, runs: &[ShardRun]) -> Vec<Published> {
        let queue = self.inner.names.shards(tier);
        let outgoing = runs.iter().map(|run| Outgoing::shards(&queue, run)).collect();
        let outcomes = self.inner.publisher.shards(outgoing).await;
        publisher::count(tier, &outcomes);
        let confirmed = runs.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Published::Confirmed);
        self.inner.backlog(tier, |backlog| confirmed.for_each(|(run, _)| backlog.published(run.count)));
        outcomes
    }

    async fn depth(&self, tier: &str) -> Result<Depth> {
        let depth = self.inner.publisher.depth(&self.inner.names.shards(tier)).await?;
        Ok(Depth { ready: self.inner.backlog(tier, |backlog| backlog.shards(depth.ready)), ..depth })
    }

    async fn consume(&self, tier: &str, prefetch: u16) -> Result<Consumer> {
        shards::consume(&self.inner, tier, prefetch).await
    }

    async fn triggers(&self) -> Result<Box<dyn Triggers>> {
        triggers::consume(&self.inner).await
    }

    async fn send_trigger(&self, request: &TriggerRequest) -> Result<()> {
        let payload = codec::encode_trigger(request).map_err(|e| BrokerError::Refused(e.to_string()))?;
        self.inner.publisher.trigger(&request.job, payload).await
    }

    async fn put_dead(&self, payload: &[u8], reason: &str) -> Result<KeptIn> {
        self.inner.put_dead(payload, reason).await?;
        Ok(KeptIn::Queue)
    }

    fn state(&self) -> watch::Receiver<BrokerState> {
        self.inner.health.watch()
    }

    async fn server_version(&self) -> Result<String> {
        self.inner.publishing.now()?;
        let version = self.inner.version.get_or_try_init(|| probe::server_version(&self.inner.address)).await?;
        Ok(version.clone())
    }

    async fn close(&self) {
        self.inner.closing.send_replace(true);
        let closed = async {
            self.inner.publishing.closed().await;
            self.inner.consuming.closed().await;
        };
        // Each says goodbye within its own bound; this one is for a runtime that is being torn down.
        let _ = tokio::time::timeout(RPC_TIMEOUT, closed).await;
    }
}

impl Inner {
    /// What was published to a tier's queue from here.
    fn backlog<T>(&self, tier: &str, with: impl FnOnce(&mut Backlog) -> T) -> T {
        let mut backlogs = self.backlogs.lock().unwrap_or_else(PoisonError::into_inner);
        // Jobs may name any number of tiers. Without a backlog messages count as a shard each.
        if backlogs.len() >= BACKLOGS_MAX && !backlogs.contains_key(tier) {
            backlogs.clear();
        }
        with(backlogs.entry(tier.to_owned()).or_default())
    }

    fn closing(&self) -> Closing {
        Closing::new(&self.closing)
    }

    async fn put_dead(&self, payload: &[u8], reason: &str) -> Result<()> {
        self.publisher.dead(payload, reason).await?;
        metrics::counter!(m::DEAD).increment(1);
        Ok(())
    }
}
