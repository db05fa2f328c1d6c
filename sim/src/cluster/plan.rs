//! What a seed's cluster is made of: drawn before anything happens.

use super::jobs::{Job, KINDS, Kind};
use crate::world::Dice;

/// A class of faults. A seed has each of them or not: a life where everything goes wrong at once hides what a single fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// A process is gone from one moment to the next, and another one starts in its place later.
    Crash,
    /// Nothing of a process runs for a while, and then everything that was due meanwhile.
    Pause,
    /// A process is told to end in order, and another one starts.
    Restart,
    /// A process's wall clock is set.
    Clock,
    /// Calls and answers take long.
    Slow,
    /// Calls fail before or after they have had their effect.
    LostCalls,
    /// Calls fail, and have their effect seconds later.
    LateCalls,
    /// A process can't reach a service.
    Cut,
    /// Nobody can reach a service.
    Away,
    /// The store of lease, presence and keys forgets everything. Only where it is a Redis.
    Flush,
    /// What waits in the queues is gone.
    Purge,
    /// A queue is deleted.
    DeleteQueue,
    /// The broker takes no messages.
    Block,
    /// A process loses its connection to the broker.
    Reconnect,
    /// Messages are lost although their publish was confirmed.
    LoseMessages,
    /// Messages come twice.
    Duplicate,
    /// Messages overtake each other.
    Reorder,
    /// The broker says that a queue is empty and has no consumer.
    BlindDepth,
    /// Handlers fail, transiently or for good.
    FailHandlers,
    /// Handlers panic.
    PanicHandlers,
    /// Handlers don't stop when they are told to.
    ForgetfulHandlers,
    /// Handlers take their process with them.
    Poison,
    /// People cancel executions.
    Cancel,
    /// People pause and resume jobs.
    PauseJob,
    /// People send failed shards back.
    Retry,
}

/// Those that strike at an instant; the others are drawn where they strike.
pub(crate) const CLASSES: [Class; 25] = [
    Class::Crash,
    Class::Pause,
    Class::Restart,
    Class::Clock,
    Class::Slow,
    Class::LostCalls,
    Class::LateCalls,
    Class::Cut,
    Class::Away,
    Class::Flush,
    Class::Purge,
    Class::DeleteQueue,
    Class::Block,
    Class::Reconnect,
    Class::LoseMessages,
    Class::Duplicate,
    Class::Reorder,
    Class::BlindDepth,
    Class::FailHandlers,
    Class::PanicHandlers,
    Class::ForgetfulHandlers,
    Class::Poison,
    Class::Cancel,
    Class::PauseJob,
    Class::Retry,
];

/// The whole cluster.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) schedulers: usize,
    pub(crate) workers: usize,
    pub(crate) concurrency: usize,
    /// How long faults are injected.
    pub(crate) chaos_ms: i64,
    /// The wait between two faults, at most.
    pub(crate) fault_every_ms: i64,
    pub(crate) ack_horizon_ms: i64,
    pub(crate) lease_ttl_ms: i64,
    pub(crate) lost_after_ms: i64,
    /// A call that is not answered ends after this long at most.
    pub(crate) call_limit_ms: i64,
    /// Lease, presence and keys are in a Redis; else in the ledger, by its own adapters.
    pub(crate) redis: bool,
    /// The wait between two triggers by people, at most; 0: nobody triggers.
    pub(crate) trigger_every_ms: i64,
    /// How long a handler takes, at most, once the faults have stopped: a fleet that is too small for its jobs never finishes,
    /// and that would be nobody's fault.
    pub(crate) calm_work_ms: i64,
    pub(crate) classes: Vec<Class>,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) tiers: Vec<String>,
    pub(crate) jobs: Vec<Job>,
}

impl Plan {
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        // From quiet lives to wild ones.
        let density = dice.of(5, 50);
        let classes: Vec<Class> = CLASSES.into_iter().filter(|_| dice.percent(density)).collect();
        let kinds_density = if dice.percent(50) { 0 } else { dice.of(20, 60) };
        let kinds: Vec<Kind> = KINDS.into_iter().filter(|_| dice.percent(kinds_density)).collect();
        let jobs: Vec<Job> = (0..dice.of(1, 3)).filter_map(|n| Job::draw(dice, n, &kinds)).collect();
        let bulk = kinds.contains(&Kind::Bulk).then_some("bulk");
        let tiers = ["core"].into_iter().chain(bulk).map(str::to_owned).collect();
        let (workers, concurrency) = (dice.of(1, 3), dice.of(1, 4));
        let shards_per_second: f64 = jobs.iter().map(Job::shards_per_second).sum();
        let quarter_busy_ms = (workers * concurrency) as f64 * 250.0 / shards_per_second.max(0.01);
        Plan {
            schedulers: dice.of(1, 2) as usize,
            workers: workers as usize,
            concurrency: concurrency as usize,
            calm_work_ms: (quarter_busy_ms as i64).clamp(1, 2_000),
            chaos_ms: dice.of(15_000, 60_000),
            fault_every_ms: dice.of(1_000, 8_000),
            ack_horizon_ms: if dice.percent(30) { 3_000 } else { 600_000 },
            lease_ttl_ms: if dice.percent(50) { 2_000 } else { 5_000 },
            lost_after_ms: if dice.percent(50) { 4_000 } else { 15_000 },
            call_limit_ms: [1_000, 5_000, 30_000][dice.index(3)],
            redis: dice.percent(60),
            trigger_every_ms: if dice.percent(40) { dice.of(1_000, 15_000) } else { 0 },
            jobs,
            kinds,
            tiers,
            classes,
        }
    }

    pub(crate) fn has(&self, class: Class) -> bool {
        self.classes.contains(&class)
    }

    /// Schedulers come first, workers after them.
    pub(crate) fn nodes(&self) -> usize {
        self.schedulers + self.workers
    }
}
