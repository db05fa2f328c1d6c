//! The ledger as the broker: workers poll it. For one process on SQLite, for a cluster without RabbitMQ, and for one whose RabbitMQ
//! is away. A publish in the same process wakes the pollers; one from another process is found within the poll interval.

mod consumer;
mod spread;
mod triggers;
mod turns;

use crate::codec;
use crate::health::Health;
use crate::metric_definitions as m;
use crate::port::*;
use async_trait::async_trait;
pub(crate) use consumer::{LedgerAcker, LedgerDeliveries};
use shardcron_domain::limits;
use shardcron_domain::messages::{ShardMessage, TriggerRequest};
use shardcron_store::{Ledger, StoreError};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// The first pause when nothing was there: a publish is marked in the ledger a moment after the wake-up.
const IDLE_FIRST: Duration = Duration::from_millis(2);
/// The pauses while the ledger is away.
const AWAY_FIRST: Duration = Duration::from_millis(100);
const AWAY_MAX: Duration = Duration::from_secs(5);

/// Gives the time in milliseconds UTC.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// The broker that polls the ledger.
pub struct LedgerBroker {
    inner: Arc<Inner>,
}

struct Inner {
    ledger: Arc<dyn Ledger>,
    poll_interval: Duration,
    clock: Clock,
    health: Health,
    /// Counts what may have made something claimable, or is of interest to who waits.
    wake: watch::Sender<u64>,
    turns: turns::Turns,
    closing: watch::Sender<bool>,
}

impl LedgerBroker {
    /// Polls at most at this interval when nothing is there.
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, poll_interval: Duration) -> Self {
        Self::with_clock(ledger, poll_interval, Arc::new(system_now_ms))
    }

    /// The same with a clock of the caller, for simulations.
    #[must_use]
    pub fn with_clock(ledger: Arc<dyn Ledger>, poll_interval: Duration, clock: Clock) -> Self {
        let inner = Inner {
            ledger,
            poll_interval: poll_interval.max(IDLE_FIRST),
            clock,
            // There is nothing to connect to: the dispatcher may begin before anybody has polled.
            health: Health::new("ledger", 1, BrokerState::Up),
            wake: watch::Sender::new(0),
            turns: turns::Turns::default(),
            closing: watch::Sender::new(false),
        };
        Self { inner: Arc::new(inner) }
    }
}

/// For a broker that polls only at times: the ends of a consumer whose limit it sets itself.
impl LedgerBroker {
    pub(crate) fn poll(&self, tier: &str) -> (LedgerDeliveries, LedgerAcker) {
        consumer::open(self.inner.clone(), tier, 0)
    }

    pub(crate) fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.inner.ledger
    }

    /// What has to be said once it is marked in the ledger is said before, as with a publish.
    pub(crate) fn nudge(&self) {
        self.inner.wake();
    }
}

fn system_now_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

impl Inner {
    fn now_ms(&self) -> i64 {
        (self.clock)()
    }

    fn wake(&self) {
        self.wake.send_modify(|n| *n = n.wrapping_add(1));
    }

    fn closed(&self) -> bool {
        *self.closing.borrow()
    }

    /// Draws the state from an answer of the ledger, and sorts its error.
    fn heard<T>(&self, answer: shardcron_store::Result<T>) -> Result<T> {
        match answer {
            Ok(value) => {
                self.health.set(0, BrokerState::Up);
                Ok(value)
            }
            Err(error @ StoreError::Unavailable { .. }) => {
                let reason = error.to_string();
                self.health.set(0, BrokerState::Away(reason.clone()));
                Err(BrokerError::Unavailable(reason))
            }
            // It answered; what it says of this call is no matter of its reachability.
            Err(error) if error.is_transient() => Err(BrokerError::Unavailable(error.to_string())),
            Err(error) => Err(BrokerError::Refused(error.to_string())),
        }
    }
}

#[async_trait]
impl Broker for LedgerBroker {
    async fn declare(&self, _tiers: &[String]) -> Result<()> {
        Ok(())
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        // The shard's row is the message.
        metrics::counter!(m::PUBLISHED, "tier" => tier.to_owned(), "outcome" => "confirmed")
            .increment(messages.len() as u64);
        self.inner.wake();
        vec![Published::Confirmed; messages.len()]
    }

    async fn depth(&self, _tier: &str) -> Result<Depth> {
        Ok(Depth { ready: 0, consumers: 0, unbounded: true })
    }

    async fn consume(&self, tier: &str, prefetch: u16) -> Result<Consumer> {
        Ok(consumer::consume(self.inner.clone(), tier, prefetch))
    }

    async fn triggers(&self) -> Result<Box<dyn Triggers>> {
        Ok(triggers::consume(self.inner.clone()))
    }

    async fn send_trigger(&self, request: &TriggerRequest) -> Result<()> {
        let payload = codec::encode_trigger(request).map_err(|e| BrokerError::Refused(e.to_string()))?;
        self.inner.heard(self.inner.ledger.put_trigger(&payload, self.inner.now_ms()).await)?;
        self.inner.wake();
        Ok(())
    }

    async fn put_dead(&self, payload: &[u8], reason: &str) -> Result<KeptIn> {
        let kept = codec::dead_payload(payload);
        self.inner.heard(self.inner.ledger.put_dead_message(reason, kept, self.inner.now_ms()).await)?;
        metrics::counter!(m::DEAD).increment(1);
        Ok(KeptIn::Ledger)
    }

    fn state(&self) -> watch::Receiver<BrokerState> {
        self.inner.health.watch()
    }

    async fn server_version(&self) -> Result<String> {
        self.inner.heard(self.inner.ledger.server_version().await)
    }

    async fn close(&self) {
        self.inner.closing.send_replace(true);
        self.inner.wake();
    }
}

fn clamp(prefetch: u16) -> u16 {
    prefetch.clamp(1, limits::PREFETCH_MAX)
}
