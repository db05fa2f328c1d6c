//! RabbitMQ, and the ledger where RabbitMQ is away: work goes on slower and comes back by itself.
//!
//! Each process sees its own connections only, so there are three cases:
//!
//! - **Away for all.** The leader hands out through the ledger ([`Published::Left`]; the dispatcher notes that in the ledger, where
//!   workers read it), workers poll it.
//! - **The leader alone is cut off.** Its note in the ledger tells the connected workers within [`NOTE_EVERY`] that there are shards
//!   without messages; they poll beside consuming.
//! - **One worker alone is cut off.** It polls, and claims shards whose messages stand in RabbitMQ. That does no harm: a claim is
//!   fenced by the shard's state and attempt, so whoever gets the message later has its claim refused, and acks it.
//!
//! The way back needs nothing from here but to publish again: the leader sends messages for everything that is handed out and
//! pending, and takes its note away (`actors/src/scheduler/round.rs`).

mod consumer;
mod outlook;
mod triggers;

use crate::ledger::LedgerBroker;
use crate::port::*;
use async_trait::async_trait;
use outlook::Outlook;
use shardcron_domain::messages::{ShardMessage, TriggerRequest};
use shardcron_store::Ledger;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// How often a process that consumes reads whether the leader hands out through the ledger.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// Triggers in the ledger are looked for at this interval at most, also while RabbitMQ is there: who left them may have been cut off.
const TRIGGERS_EVERY: Duration = Duration::from_millis(500);

/// When to fall back.
#[derive(Clone, Debug)]
pub struct FallbackOptions {
    /// How long the broker has to be away. Shorter interruptions are waited out: a reconnection is quicker than a change of the way.
    pub after: Duration,
    /// How often the ledger is polled then, at most, when nothing is there.
    pub poll: Duration,
    /// The runtime that all I/O runs on; the current one where none is given.
    pub runtime: Option<Handle>,
}

/// A broker with the ledger behind it.
pub struct Fallback {
    inner: Arc<Inner>,
}

struct Inner {
    broker: Arc<dyn Broker>,
    polled: LedgerBroker,
    triggers: LedgerBroker,
    outlook: Arc<Outlook>,
    runtime: Handle,
}

impl Fallback {
    /// Puts the ledger behind a broker.
    ///
    /// # Errors
    /// Refused, when there is no runtime.
    pub fn new(broker: Arc<dyn Broker>, ledger: Arc<dyn Ledger>, options: FallbackOptions) -> Result<Self> {
        let runtime = match options.runtime {
            Some(handle) => handle,
            None => Handle::try_current()
                .map_err(|_| BrokerError::Refused("falling back needs a tokio runtime; none is running".into()))?,
        };
        let outlook = Arc::new(Outlook::new());
        runtime.spawn(outlook::watch_broker(outlook.clone(), broker.state(), options.after));
        let polled = LedgerBroker::new(ledger.clone(), options.poll);
        let triggers = LedgerBroker::new(ledger, options.poll.max(TRIGGERS_EVERY));
        Ok(Self { inner: Arc::new(Inner { broker, polled, triggers, outlook, runtime }) })
    }

    /// Why this process does without the broker, in a sentence, while it does; for who tells people.
    #[must_use]
    pub fn fault(&self) -> watch::Receiver<Option<String>> {
        self.inner.outlook.fault()
    }
}

#[async_trait]
impl Broker for Fallback {
    async fn declare(&self, tiers: &[String]) -> Result<()> {
        // Nothing to declare in the ledger; consumers and the first publish declare what they need once the broker is back.
        if self.inner.outlook.fallen() { Ok(()) } else { self.inner.broker.declare(tiers).await }
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        if self.inner.outlook.fallen() {
            // Pollers of this process need not wait for their interval; the mark follows in a moment.
            self.inner.polled.nudge();
            return vec![Published::Left; messages.len()];
        }
        self.inner.broker.publish(tier, messages).await
    }

    /// While the ledger is the queue its length bounds what is handed out, as RabbitMQ's would: what has no message when the broker
    /// is back is then never more than a window.
    async fn depth(&self, tier: &str) -> Result<Depth> {
        if !self.inner.outlook.fallen() {
            return self.inner.broker.depth(tier).await;
        }
        match self.inner.polled.ledger().outstanding(tier).await {
            Ok(ready) => Ok(Depth { ready, consumers: 0, unbounded: true }),
            Err(error) => Err(BrokerError::Unavailable(error.to_string())),
        }
    }

    async fn consume(&self, tier: &str, prefetch: u16) -> Result<Consumer> {
        consumer::consume(&self.inner, tier, prefetch).await
    }

    async fn triggers(&self) -> Result<Box<dyn Triggers>> {
        triggers::consume(&self.inner).await
    }

    /// Into the ledger also while the broker takes no messages: a person waits, and the leader looks there in any case.
    async fn send_trigger(&self, request: &TriggerRequest) -> Result<()> {
        if self.away_or_blocked() {
            return self.inner.triggers.send_trigger(request).await;
        }
        self.inner.broker.send_trigger(request).await
    }

    async fn put_dead(&self, payload: &[u8], reason: &str) -> Result<KeptIn> {
        if self.away_or_blocked() {
            return self.inner.polled.put_dead(payload, reason).await;
        }
        self.inner.broker.put_dead(payload, reason).await
    }

    fn way(&self) -> Way {
        if self.inner.outlook.fallen() { Way::Ledger } else { self.inner.broker.way() }
    }

    /// That of the broker: it is away although work goes on.
    fn state(&self) -> watch::Receiver<BrokerState> {
        self.inner.broker.state()
    }

    async fn server_version(&self) -> Result<String> {
        self.inner.broker.server_version().await
    }

    async fn close(&self) {
        self.inner.outlook.close();
        self.inner.polled.close().await;
        self.inner.triggers.close().await;
        self.inner.broker.close().await;
    }
}

impl Fallback {
    fn away_or_blocked(&self) -> bool {
        self.inner.outlook.fallen() || matches!(*self.inner.broker.state().borrow(), BrokerState::Blocked(_))
    }
}
