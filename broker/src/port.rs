//! The port of the broker.

use async_trait::async_trait;
use shardcron_domain::messages::{ShardMessage, ShardRun, TriggerReply, TriggerRequest};
use std::sync::Arc;
use tokio::sync::watch;

/// A broker's answer.
pub type Result<T> = std::result::Result<T, BrokerError>;

/// A fault of the broker, sorted by what the caller does about it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokerError {
    /// It is away; trying again later is right.
    #[error("the broker is not reachable: {0}")]
    Unavailable(String),
    /// It refuses what is asked, and will go on refusing: wrong rights, a queue with other arguments. Says what to do.
    #[error("the broker refused: {0}")]
    Refused(String),
}

/// What became of one published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The broker has it, on disk.
    Confirmed,
    /// The broker took it and had no queue for it; declare the topology and publish again.
    Unroutable,
    /// Unknown; publish it again. A double is harmless, its attempt number tells it.
    Failed(String),
    /// No message was sent, as the broker is away: workers find the shard in the ledger once it is noted there as left to them.
    Left,
}

impl Published {
    /// The answer for a whole of which each part has one: the first that is not good, else whether any part was left.
    fn of_all(parts: impl Iterator<Item = Published>) -> Published {
        let mut whole = None;
        for part in parts {
            match part {
                Published::Unroutable | Published::Failed(_) => return part,
                Published::Left => whole = Some(Published::Left),
                Published::Confirmed => whole = whole.or(Some(Published::Confirmed)),
            }
        }
        whole.unwrap_or_else(|| Published::Failed("the broker did not answer".into()))
    }
}

/// How what is published reaches the workers now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As always.
    Broker,
    /// The broker is away, and what is published is left in the ledger ([`Published::Left`]).
    Ledger,
    /// Not at all: the broker is away or takes no messages.
    Closed,
}

/// Where a message that can't be processed is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptIn {
    /// In the broker's queue of dead messages.
    Queue,
    /// In the ledger.
    Ledger,
}

/// How a connection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerState {
    /// Works.
    Up,
    /// The broker accepts nothing for now (memory or disk alarm), with its reason.
    Blocked(String),
    /// Not connected, with the last error.
    Away(String),
}

/// A look at a tier's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Shards that no consumer holds: messages, and where some hold several, as many as they hold if they were published from here.
    /// Without a queue of its own: shards that are handed out and not begun, if that is known.
    pub ready: u32,
    /// Consumers on the queue, of all processes.
    pub consumers: u32,
    /// The transport has no queue of its own (the ledger is polled): how fast it drains and who consumes is not known.
    pub unbounded: bool,
}

/// The generation of what was found by polling the ledger: no channel, so none that is renewed. The greatest, so that no renewal of
/// a broker's channel voids it where a consumer hears both.
pub const POLLED: u64 = u64::MAX;

/// What a delivery is acked by. Valid for the consumer that it came from; never a key of anything, since numbers come again after
/// a reconnection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Grows with each new channel of the consumer; a tag of an earlier one is void, its message comes again. [`POLLED`] is never
    /// void.
    pub generation: u64,
    /// A number within it. Each delivery has its own, also those that came in one message.
    pub number: u64,
}

/// A shard to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The message.
    pub message: ShardMessage,
    /// The broker has delivered it before, to somebody.
    pub redelivered: bool,
    /// What to ack it by.
    pub tag: Tag,
}

/// A trigger as it came, unread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriggerDelivery {
    /// The bytes.
    pub payload: Vec<u8>,
    /// The job's name from the routing key, if it came by the trigger exchange.
    pub routed_to: Option<String>,
    /// Where the sender wants the reply, with its correlation id.
    pub reply_to: Option<(String, Option<String>)>,
    /// A stable identity of this message where the transport has one of its own; a redelivery has the same, so it can serve as the
    /// request id of a request without one.
    pub transport_id: Option<String>,
    /// What to settle it by.
    pub tag: Tag,
}

/// What a consumer of shards hears.
#[derive(Clone, Debug)]
pub enum Arrival {
    /// Some deliveries, at least one: as many as had arrived.
    Shards(Vec<Delivery>),
    /// The channel was lost and made anew: all tags of earlier generations are void.
    Renewed {
        /// The new generation.
        generation: u64,
    },
}

/// The receiving end of a consumer. Reconnects by itself, for ever, with backoff.
#[async_trait]
pub trait Deliveries: Send {
    /// Waits for the next arrivals. `None` after [`Acker::stop`], when everything that had arrived has been handed over.
    async fn next(&mut self) -> Option<Arrival>;

    /// Whether the broker serves this consumer: false from the loss of its channel until it consumes again. `None`: it is never lost.
    fn served(&self) -> Option<watch::Receiver<bool>> {
        None
    }
}

/// The other end: acks and flow.
#[async_trait]
pub trait Acker: Send + Sync {
    /// Settles deliveries whose effects are committed. Void tags are ignored. Uses one `multiple` where all lower tags are settled.
    async fn ack(&self, tags: &[Tag]);
    /// Gives deliveries back to the queue, to be handed to somebody else.
    async fn requeue(&self, tags: &[Tag]);
    /// Asks for another number of unacked deliveries. A transport whose messages hold several rounds up to whole ones.
    async fn set_prefetch(&self, prefetch: u16);
    /// Takes no more deliveries. Those that are held can still be acked.
    async fn stop(&self);
}

/// A consumer of one tier.
pub struct Consumer {
    /// Receives.
    pub deliveries: Box<dyn Deliveries>,
    /// Settles.
    pub acker: Arc<dyn Acker>,
}

/// The receiving end of the triggers.
#[async_trait]
pub trait Triggers: Send {
    /// Waits for the next triggers, at least one. `None` when the broker is closed.
    async fn next(&mut self) -> Option<Vec<TriggerDelivery>>;
    /// Settles a trigger whose firing (or refusal) is in the ledger, and answers its sender.
    async fn settle(&mut self, trigger: &TriggerDelivery, reply: &TriggerReply);
    /// Stops receiving; what was not settled is handed to the next leader.
    async fn stop(&mut self);
}

/// The transport.
#[async_trait]
pub trait Broker: Send + Sync + 'static {
    /// Makes sure that queues and exchanges exist. Says which queue has other arguments than wanted, and what to do.
    ///
    /// # Errors
    /// Away or refused.
    async fn declare(&self, tiers: &[String]) -> Result<()>;

    /// Publishes, with confirms in flight by the hundred; the answers are in the messages' order. Returns within a bounded time.
    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published>;

    /// Publishes runs of shards, each in one message where the transport has messages; the answers are in the runs' order. A run is
    /// taken as a whole or not at all.
    async fn publish_runs(&self, tier: &str, runs: &[ShardRun]) -> Vec<Published> {
        let messages: Vec<ShardMessage> = runs.iter().flat_map(|run| run.shards()).collect();
        let mut answers = self.publish(tier, &messages).await.into_iter();
        runs.iter().map(|run| Published::of_all(answers.by_ref().take(run.count as usize))).collect()
    }

    /// Looks at a tier's queue.
    ///
    /// # Errors
    /// Away or refused.
    async fn depth(&self, tier: &str) -> Result<Depth>;

    /// Begins to consume a tier. Waits until the broker is there.
    ///
    /// # Errors
    /// Refused for good.
    async fn consume(&self, tier: &str, prefetch: u16) -> Result<Consumer>;

    /// Begins to take triggers; for the leader. Waits until the broker is there.
    ///
    /// # Errors
    /// Refused for good.
    async fn triggers(&self) -> Result<Box<dyn Triggers>>;

    /// Sends a trigger, as the command line does.
    ///
    /// # Errors
    /// Away or refused.
    async fn send_trigger(&self, request: &TriggerRequest) -> Result<()>;

    /// Keeps a message that can't be processed where people look for it, with the reason. What stands in the ledger already needs
    /// no copy of the caller there.
    ///
    /// # Errors
    /// Away or refused.
    async fn put_dead(&self, payload: &[u8], reason: &str) -> Result<KeptIn>;

    /// How what is published travels now.
    fn way(&self) -> Way {
        match *self.state().borrow() {
            BrokerState::Up => Way::Broker,
            BrokerState::Blocked(_) | BrokerState::Away(_) => Way::Closed,
        }
    }

    /// How the connection is, now and from now on.
    fn state(&self) -> watch::Receiver<BrokerState>;

    /// What it is, for people: product and version.
    ///
    /// # Errors
    /// Away.
    async fn server_version(&self) -> Result<String>;

    /// Closes connections; consumers end.
    async fn close(&self);
}
