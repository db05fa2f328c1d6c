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
use outlook::{Outlook, Side};
use shardcron_domain::messages::{ShardMessage, ShardRun, TriggerRequest};
use shardcron_store::Ledger;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// How often a process that consumes reads whether the leader hands out through the ledger.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// The loss of a connection is known within this time of the fault that it caused.
const NOTICED_WITHIN: Duration = Duration::from_millis(300);
/// For how long a queue at least does not answer, or a consumer has no channel, before it is done without: a busy server takes its time
/// to declare a queue, and a polled ledger helps nobody who is about to be served.
const SILENCE: Duration = Duration::from_secs(3);
/// How often a queue that does not answer is looked at.
const PROBE_EVERY: Duration = Duration::from_millis(500);
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
    /// How long a queue may not answer while the broker is there.
    silence: Duration,
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
        let silence = options.after.max(SILENCE);
        Ok(Self { inner: Arc::new(Inner { broker, polled, triggers, outlook, runtime, silence }) })
    }

    /// Why this process does without the broker, in a sentence, while it does; for who tells people.
    #[must_use]
    pub fn fault(&self) -> watch::Receiver<Option<String>> {
        self.inner.outlook.fault()
    }
}

impl Fallback {
    /// Whether what is published is left in the ledger now.
    fn leaves(&self, tier: &str) -> bool {
        let leaves = self.inner.outlook.fallen() || self.inner.outlook.is_silent(tier, Side::Publishing);
        if leaves {
            // Pollers of this process need not wait for their interval; the mark follows in a moment.
            self.inner.polled.nudge();
        }
        leaves
    }

    async fn or_left(&self, tier: &str, mut answers: Vec<Published>) -> Vec<Published> {
        let failed = |answer: &Published| matches!(answer, Published::Failed(_));
        // Nothing of it was answered although the broker is there: its queue is dead, and nobody is to wait for that.
        if !answers.is_empty() && answers.iter().all(failed) && self.inner.stays_up().await {
            self.inner.leave_to_pollers(tier);
            answers.fill(Published::Left);
        }
        answers
    }
}

#[async_trait]
impl Broker for Fallback {
    async fn declare(&self, tiers: &[String]) -> Result<()> {
        // Nothing to declare in the ledger; consumers and the first publish declare what they need once the broker is back.
        if self.inner.outlook.fallen() { Ok(()) } else { self.inner.broker.declare(tiers).await }
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        match self.leaves(tier) {
            true => vec![Published::Left; messages.len()],
            false => self.or_left(tier, self.inner.broker.publish(tier, messages).await).await,
        }
    }

    async fn publish_runs(&self, tier: &str, runs: &[ShardRun]) -> Vec<Published> {
        match self.leaves(tier) {
            true => vec![Published::Left; runs.len()],
            false => self.or_left(tier, self.inner.broker.publish_runs(tier, runs).await).await,
        }
    }

    /// While the ledger is the queue its length bounds what is handed out, as RabbitMQ's would: what has no message when the broker
    /// is back is then never more than a window.
    async fn depth(&self, tier: &str) -> Result<Depth> {
        if !self.inner.outlook.fallen() && !self.inner.outlook.is_silent(tier, Side::Publishing) {
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

impl Inner {
    /// Whether the broker is up and does not turn out to be away, which takes a moment to be noticed.
    async fn stays_up(&self) -> bool {
        let mut state = self.broker.state();
        let turned = state.wait_for(|state| *state != BrokerState::Up);
        tokio::time::timeout(NOTICED_WITHIN, turned).await.is_err()
    }

    /// From now on a tier's shards are left in the ledger, until its queue answers again and has a consumer.
    fn leave_to_pollers(self: &Arc<Self>, tier: &str) {
        if !self.outlook.set_silent(tier, Side::Publishing, true) {
            return;
        }
        tracing::warn!(
            tier,
            "the tier's queue confirms nothing; its shards are left in the ledger, and workers poll it"
        );
        let (inner, tier) = (self.clone(), tier.to_owned());
        self.runtime.spawn(async move {
            let mut changes = inner.outlook.changes();
            let answers = async {
                loop {
                    tokio::time::sleep(PROBE_EVERY).await;
                    // A queue that is slow to answer is said to be empty and without consumers.
                    match inner.broker.depth(&tier).await {
                        Ok(depth) if depth.consumers > 0 => return,
                        Ok(_) => {}
                        Err(error) => tracing::debug!(tier, %error, "the queue does not answer yet"),
                    }
                }
            };
            tokio::select! {
                () = answers => {
                    inner.outlook.set_silent(&tier, Side::Publishing, false);
                    tracing::info!(tier, "the tier's queue answers again");
                }
                () = changes.closed() => {}
            }
        });
    }
}

impl Fallback {
    fn away_or_blocked(&self) -> bool {
        self.inner.outlook.fallen() || matches!(*self.inner.broker.state().borrow(), BrokerState::Blocked(_))
    }
}
