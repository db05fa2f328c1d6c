//! What the model consists of: the ledger, the network, two leaders, two workers, and what is left of the faults.

use super::ledger::Ledger;
use crate::guard::Mutation;
use shardcron_domain::Incarnation;
use shardcron_domain::invariants::InvariantId;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::ReclaimReason;
use shardcron_domain::units::Span;
use std::collections::BTreeMap;
use uuid::Uuid;

/// How large the world is.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Instants of the one job.
    pub instants: u8,
    /// Shards of each execution.
    pub shards: u8,
    /// Tries at a shard.
    pub attempts: u8,
    /// Whether handlers set a checkpoint on their way.
    pub checkpoints: bool,
    /// Faults in one life of the world, of any kinds.
    pub faults: u8,
    /// The guard that is missing.
    pub mutation: Option<Mutation>,
}

impl Bounds {
    /// Tries without a wait: there is no time in this world, so every wait may have passed.
    #[must_use]
    pub fn retry(&self) -> RetryPolicy {
        RetryPolicy { attempts: self.attempts.into(), first: Span(0), factor: 1.0, max: Span(0), jitter: 0.0 }
    }
}

/// "Run this attempt".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// The execution, by its instant.
    pub instant: u8,
    /// The shard.
    pub index: u8,
    /// The attempt.
    pub attempt: u8,
}

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The other scheduler becomes the leader although this one lives; this one doesn't know.
    TakeOver,
    /// A leader forgets all it knew.
    LeaderCrash,
    /// A worker process ends; another one starts in its place.
    WorkerCrash,
    /// A worker's heartbeat is not heard. It may stop itself, go on, or come back.
    Silence,
    /// A worker's connection to the broker ends: all its deliveries are delivered again.
    Disconnect,
    /// The broker loses a message.
    Lose,
    /// The broker delivers a message twice.
    Duplicate,
    /// A committed transaction's answer is lost.
    LostAnswer,
    /// A handler ends badly.
    Fail,
    /// A worker gives a shard back.
    HandBack,
    /// An attempt runs past its limit, so that it is taken from a worker that lives.
    Hang,
}

/// All of them.
pub const FAULTS: [Fault; 11] = [
    Fault::TakeOver,
    Fault::LeaderCrash,
    Fault::WorkerCrash,
    Fault::Silence,
    Fault::Disconnect,
    Fault::Lose,
    Fault::Duplicate,
    Fault::LostAnswer,
    Fault::Fail,
    Fault::HandBack,
    Fault::Hang,
];

/// One shard to be taken back: what [`shardcron_domain::recovery::Reclaim`] says, so that it can be hashed.
pub type Taken = (Message, Incarnation, ReclaimReason);

/// A scheduler. What it holds is what it knew when it last looked; it acts on it whenever its turn comes, deposed or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Leader {
    /// The epoch under which it believes to lead.
    pub epoch: Option<u8>,
    /// The next instant, as it knows it.
    pub next: u8,
    /// What it is handing out, and whether the broker has taken it.
    pub in_hand: Option<(Message, bool)>,
    /// What it is about to take back.
    pub plan: Vec<Taken>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Well.
    Success,
    /// Badly.
    Failure,
    /// It is given back.
    HandBack,
}

/// Where a delivery is at its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Not claimed.
    Held,
    /// Claimed or not: the ledger has been asked and has not answered.
    Claiming,
    /// The handler runs, from this checkpoint (0 for none).
    Running(u8),
    /// The handler has ended; the ledger may not know.
    Ended(Outcome),
    /// The ledger knows, or does not want it.
    Settled,
}

/// A delivery, or several of the same attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Where it is.
    pub step: Step,
    /// Deliveries that wait for their ack.
    pub tags: u8,
}

/// A worker's place; its processes come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// How many processes have ended here.
    pub life: u8,
    /// Nobody hears its heartbeat.
    pub silent: bool,
    /// What it has at hand.
    pub entries: BTreeMap<Message, Entry>,
}

/// The incarnation of a worker's present process.
#[must_use]
pub fn incarnation(worker: usize, life: u8) -> Incarnation {
    Incarnation(Uuid::from_u128(((worker as u128 + 1) << 8) | u128::from(life)))
}

/// Turns the first worker's incarnations into the second one's, and back.
const SWAP: u128 = (1 ^ 2) << 8;

/// One state of the world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// The truth.
    pub ledger: Ledger,
    /// What is in the queue, in no order, with the number of copies.
    pub queue: BTreeMap<Message, u8>,
    /// The schedulers.
    pub leaders: [Leader; 2],
    /// The workers.
    pub workers: [Worker; 2],
    /// Faults that have been.
    pub faults: u8,
    /// The invariant that the last step broke.
    pub broken: Option<InvariantId>,
}

impl State {
    /// Before anything.
    #[must_use]
    pub fn new(bounds: &Bounds) -> Self {
        State {
            ledger: Ledger::new(bounds),
            queue: BTreeMap::new(),
            leaders: [Leader::default(), Leader::default()],
            workers: [Worker::default(), Worker::default()],
            faults: 0,
            broken: None,
        }
    }

    /// Puts a message into the queue.
    pub fn enqueue(&mut self, message: Message, copies: u8) {
        if copies > 0 {
            *self.queue.entry(message).or_default() += copies;
        }
    }

    /// Takes one copy out of it.
    pub fn dequeue(&mut self, message: Message) {
        if let Some(copies) = self.queue.get_mut(&message) {
            *copies -= 1;
            if *copies == 0 {
                self.queue.remove(&message);
            }
        }
    }

    /// Whether a copy is somewhere on its way to a claim.
    #[must_use]
    pub fn on_its_way(&self, message: Message) -> bool {
        let held = |w: &Worker| {
            w.entries.get(&message).is_some_and(|e| e.tags > 0 || matches!(e.step, Step::Held | Step::Claiming))
        };
        let about = |l: &Leader| l.in_hand == Some((message, false));
        self.queue.contains_key(&message) || self.workers.iter().any(held) || self.leaders.iter().any(about)
    }

    /// The same state under other names: schedulers and workers are interchangeable, so only one naming is explored.
    pub fn rename(&mut self) {
        let order = |l: &Leader| (l.epoch, l.next, l.in_hand, l.plan.len());
        if order(&self.leaders[1]) < order(&self.leaders[0]) {
            self.leaders.swap(0, 1);
        }
        if self.workers[1] >= self.workers[0] {
            return;
        }
        self.workers.swap(0, 1);
        let swap = |owner: &mut Incarnation| *owner = Incarnation(Uuid::from_u128(owner.0.as_u128() ^ SWAP));
        let rows = self.ledger.runs.iter_mut().flat_map(|run| &mut run.rows);
        rows.filter_map(|row| row.shard.owner.as_mut()).for_each(swap);
        self.leaders.iter_mut().flat_map(|l| &mut l.plan).for_each(|(_, owner, _)| swap(owner));
    }
}
