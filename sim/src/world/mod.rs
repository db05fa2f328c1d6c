//! A large world with time: any number of schedulers and workers, a ledger, a broker and a Redis, all from one seed.
//!
//! Virtual time is a queue of events. Nodes talk to the ports by calls that take time, get lost on the way there or back, are
//! late, or end at a cut; a node that is paused gets everything later, one that crashed gets nothing, and what it had sent still
//! arrives. Which classes of faults a seed has is drawn first (a swarm: a world where everything goes wrong at once hides what
//! a single fault does), then everything else. After the chaos the faults stop, and all that was due before must be decided,
//! run and ended within [`SETTLE_MS`].
//!
//! The domain's own: `schedule::next_after`, `wheel`, `firing::due` and `decide`, `dispatch::pick` and `window`, `flow::Pace`,
//! `shard::apply`, `execution::apply`, `liveness`, `recovery::reconcile`, `retry`, the limits, and the invariants: F1, F2, S1,
//! S2, S3, S4, L1, L2, A1, O1 and P1, each looked at in the transaction or at the ack that could break it.
//!
//! # What is not covered
//! The actix actors and the SQL: when which call is made follows the actors, written down a second time (`scheduler`,
//! `dispatch`, `worker`). Triggers by hand, changes of a job's specification, materializing in chunks (shards are few here),
//! several tiers, polling instead of RabbitMQ, a lease in the ledger, the drain at shutdown, and S5 (the domain's own
//! tests). A worker reads an execution's head at once and without fault. The fleet is never overloaded for ever: once the faults
//! stop, the handlers are quick enough for it to be a quarter busy. Clocks jump by seconds, not by hours: the waits of retries are wall-clock instants, so a clock that is an hour ahead
//! delays a retry by an hour, which no bound on P1 could hold.

mod broker;
mod dispatch;
mod fate;
mod ledger;
mod net;
pub(crate) mod plan;
mod redis;
mod scheduler;
mod worker;

use crate::guard::Mutation;
use broker::Broker;
use ledger::Ledger;
use net::{Event, Node, Timer};
use plan::Plan;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use redis::Redis;
use scheduler::Scheduler;
use shardcron_domain::invariants::{InvariantId, Violation};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use worker::Worker;

/// When the world begins; a Monday, shortly before a full hour.
pub(crate) const BEGIN_MS: i64 = 1_767_603_590_000;
/// How long after the faults everything may take; the slowest of some ten thousand seeds took 106.5 s. The longest parts are the
/// dispatcher's patience with what seems to be under way, which doubles up to two minutes, and the grace of hung attempts.
pub const SETTLE_MS: i64 = 150_000;
/// Events of one world; beyond it something turns in a circle.
const EVENTS_MAX: u64 = 5_000_000;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The guard that is missing.
    pub mutation: Option<Mutation>,
    /// Keep a line for each thing that happens.
    pub trace: bool,
}

/// What became of a seed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The first invariant that was broken, and when.
    pub broken: Option<(Violation, i64)>,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
    /// Events that were worked off.
    pub events: u64,
    /// Executions that were made.
    pub executions: usize,
    /// Results that were recorded.
    pub results: u64,
    /// Writes that the ledger refused: late, double or of a deposed leader.
    pub refused: u64,
    /// Faults that were injected.
    pub faults: u64,
    /// How long after the faults everything had ended.
    pub settled_ms: i64,
}

/// The draws of a world. The algorithm is fixed by name, so that a seed means the same world as long as the code does.
pub(crate) struct Dice(Xoshiro256PlusPlus);

impl Dice {
    pub(crate) fn of_seed(seed: u64) -> Self {
        Dice(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// A number of `from..=to`.
    pub(crate) fn of(&mut self, from: i64, to: i64) -> i64 {
        let width = to.abs_diff(from).saturating_add(1);
        from.saturating_add_unsigned(self.0.next_u64() % width.max(1))
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        (self.0.next_u64() % (len.max(1) as u64)) as usize
    }

    pub(crate) fn percent(&mut self, chance: i64) -> bool {
        self.of(0, 99) < chance
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// Everything.
pub(crate) struct World {
    pub(crate) now: i64,
    pub(crate) dice: Dice,
    pub(crate) plan: Plan,
    pub(crate) options: Options,
    queue: BinaryHeap<Reverse<(i64, u64)>>,
    events: BTreeMap<u64, Event>,
    pub(crate) sequence: u64,
    pub(crate) ledger: Ledger,
    pub(crate) broker: Broker,
    pub(crate) redis: Redis,
    pub(crate) schedulers: Vec<Scheduler>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) chaos: bool,
    pub(crate) cut: fate::Cuts,
    pub(crate) broken: Option<Violation>,
    pub(crate) faults: u64,
    trace: Vec<String>,
}

/// Lives one world through.
#[must_use]
pub fn run(seed: u64, options: Options) -> Report {
    let mut dice = Dice::of_seed(seed);
    let plan = Plan::draw(&mut dice);
    let ledger = Ledger::new(&plan, options.mutation);
    let (schedulers, workers) = (plan.schedulers, plan.workers);
    let mut world = World {
        now: BEGIN_MS,
        dice,
        options,
        queue: BinaryHeap::new(),
        events: BTreeMap::new(),
        sequence: 0,
        ledger,
        broker: Broker::new(workers),
        redis: Redis::default(),
        schedulers: (0..schedulers).map(Scheduler::new).collect(),
        workers: (0..workers).map(Worker::new).collect(),
        chaos: true,
        cut: fate::Cuts::default(),
        broken: None,
        faults: 0,
        trace: Vec::new(),
        plan,
    };
    if options.trace {
        let text = format!("{:?}", world.plan);
        world.note(|| text);
    }
    let (events, settled_ms) = world.live();
    Report {
        seed,
        broken: world.broken.map(|violation| (violation, world.now - BEGIN_MS)),
        trace: world.trace,
        events,
        executions: world.ledger.executions.len(),
        results: world.ledger.results,
        refused: world.ledger.refused,
        faults: world.faults,
        settled_ms,
    }
}

impl World {
    fn live(&mut self) -> (u64, i64) {
        for s in 0..self.schedulers.len() {
            let delay = self.dice.of(0, 2_000);
            self.timer(Node::Scheduler(s), delay, Timer::Start);
        }
        for w in 0..self.workers.len() {
            let delay = self.dice.of(0, 2_000);
            self.timer(Node::Worker(w), delay, Timer::Start);
        }
        self.push(BEGIN_MS + 500, Event::Chaos);
        let stop = BEGIN_MS + self.plan.chaos_ms;
        self.push(stop, Event::Calm);
        let mut events = 0;
        while let Some(Reverse((at, sequence))) = self.queue.pop() {
            let Some(event) = self.events.remove(&sequence) else { continue };
            self.now = at;
            events += 1;
            match event {
                Event::Look if self.finished(stop) => {
                    self.close(stop);
                    break;
                }
                Event::Look if at > stop + SETTLE_MS => {
                    let left = self.ledger.unfinished(stop);
                    let (queue, workers) = (format!("{:?}", self.broker), format!("{:?}", self.workers));
                    self.note(|| format!("{queue}\n{workers}"));
                    self.violate(InvariantId::P1, left);
                }
                Event::Look => self.push(at + 500, Event::Look),
                Event::Calm => {
                    self.calm();
                    self.push(at + 500, Event::Look);
                }
                other => self.happen(other),
            }
            if events > EVENTS_MAX {
                self.violate(InvariantId::P1, format!("no end after {EVENTS_MAX} events"));
            }
            if let Some(violation) = &self.broken {
                let text = violation.to_string();
                self.note(|| text);
                break;
            }
        }
        (events, self.now - stop)
    }

    fn finished(&self, stop: i64) -> bool {
        self.ledger.unfinished(stop).is_empty()
    }

    /// The last look, by the oracle's counts.
    fn close(&mut self, stop: i64) {
        if let Err(violation) = self.ledger.check_all(stop) {
            self.broken = Some(violation);
        }
    }

    pub(crate) fn violate(&mut self, id: InvariantId, seen: String) {
        self.broken.get_or_insert(Violation { id, seen });
    }

    /// Keeps the first violation.
    pub(crate) fn check<T>(&mut self, result: Result<T, Violation>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(violation) => {
                self.broken.get_or_insert(violation);
                None
            }
        }
    }

    pub(crate) fn push(&mut self, at: i64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.options.trace {
            let ms = self.now - BEGIN_MS;
            self.trace.push(format!("{:>4}.{:03}  {}", ms / 1_000, ms % 1_000, line()));
        }
    }
}
