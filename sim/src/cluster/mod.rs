//! Whole clusters of the real actors on the real SQL, in virtual time, from one seed.
//!
//! One thread holds all processes of a life. Each process is a `LocalSet` with the program's own `Scheduler` or `Worker` in it,
//! over ports that are this crate's: the ledger is the program's SQL on a SQLite of its own ([`host`]), lease and presence are the
//! ledger's adapters or a Redis in a few lines (drawn), the broker is a queue that does all that a broker may do ([`queue`]), and
//! the network between them loses, delays and cuts ([`life`]). Tokio's paused clock is the only time; a call of the real ledger
//! stops it. Everything is drawn from the seed, and which classes of faults a life has is drawn first.
//!
//! Which kinds of jobs a seed has is drawn first ([`jobs`]); half of the seeds have ranges only. The others have maps, broadcasts,
//! lists, remainders, cuts by the last run, a second tier, handlers with transactions, and handlers whose records are done once.
//!
//! The oracle ([`oracle`]) hears every answer of the ledger in the ledger's own order. It holds F1, S1, S2, S3, S4, L1, A1 and O1
//! at the call or the ack that could break them, L2 at each firing, and at the end F2, the counts (S1) and P1: after the chaos the
//! faults stop, and all that was due must be decided, run and ended within [`SETTLE_MS`]. S5 it holds where a map grows, where a
//! shard is claimed, and at the end ([`sharding`]); there it also counts the effects: each record of a shard that ended well once, or
//! given up, and of any other at most once. It also holds the SQL to the domain's
//! machines: an answer that `shard::apply` would not have given is a failure.
//!
//! # Faults
//! A killed process: its `LocalSet` is dropped between two polls, its calls under way are never answered, its connection is lost. A
//! pause (SIGSTOP): the set is not polled; its timers and answers wait, and all come at once, while its lease, its heartbeat and
//! its connections go on or run out at the services. An orderly end: `shut_down` and `drain`, as after a SIGTERM. Errors before and
//! after the effect, an effect that comes seconds after its error, slow calls, cuts between a process and a service (refused at once or
//! swallowed), services away, wall clocks that jump, a store that forgets, and a queue that loses, doubles, reorders, is purged,
//! deleted, blocked or misread. Handlers that fail, panic, do not listen, or take their process with them.
//!
//! # What is not covered
//! A handler's transaction takes no virtual time between its beginning and its commit, so that nobody stands still with its lock
//! ([0033](../../../docs/decisions/0033-what-the-simulator-runs.md)). Pauses begin between two polls, never in the middle of a synchronous step. Lapin, Redis and MySQL themselves, and what the
//! adapters make of them: the conformance suites and the tests on real services do that. Handlers of the kinds `sql`, `exec` and
//! `http`, files and queries, backfills, jobs that follow others, materializing in chunks, the polled ledger as the broker. Clocks jump by seconds, not by hours: the waits of
//! retries are wall-clock instants, so a clock that is an hour ahead delays a retry by an hour, which no bound on P1 could hold.

mod broker;
mod closing;
mod effects;
mod fate;
mod handler;
mod host;
mod jobs;
mod ledger;
mod life;
mod oracle;
mod plan;
mod process;
mod queue;
mod sharding;
mod stores;

pub use host::Host;
pub use oracle::Broken;

use crate::guard::Mutation;
use crate::world::Dice;
use fate::Control;
use life::{Life, LifeId, Port};
use oracle::{Checked, Oracle};
use plan::Plan;
use process::Order;
use queue::Queues;
use shardcron_domain::conformance;
use shardcron_domain::trace::{TraceEvent, TraceLine};
use shardcron_store::sql::SqlLedger;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use stores::Redis;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

pub(crate) use crate::world::BEGIN_MS;

/// How long after the faults everything may take.
pub const SETTLE_MS: i64 = 240_000;

/// How to live a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The guard that is missing.
    pub mutation: Option<Mutation>,
    /// Keep a line for each call.
    pub trace: bool,
}

/// What became of a seed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The first thing that must not be, and when.
    pub broken: Option<(Broken, i64)>,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
    /// Calls and deliveries, and a hash over all of them with their times and answers.
    pub calls: (u64, u64),
    /// Executions that were made.
    pub executions: usize,
    /// Results that were recorded.
    pub results: u64,
    /// Writes that the ledger refused.
    pub refused: u64,
    /// Faults that were injected, but for those of single calls.
    pub faults: u64,
    /// How long after the faults everything had ended.
    pub settled_ms: i64,
}

/// Who can't reach what, and whose clock is off.
pub(crate) struct Net {
    cuts: BTreeSet<(usize, Port)>,
    away: BTreeSet<Port>,
    offsets: Vec<i64>,
    /// When a node last went on after a pause: what it does at this very instant it had begun before.
    resumed: Vec<i64>,
}

impl Net {
    fn is_cut(&self, node: usize, port: Port) -> bool {
        self.away.contains(&port) || self.cuts.contains(&(node, port))
    }

    fn offset(&self, node: usize) -> i64 {
        self.offsets.get(node).copied().unwrap_or_default()
    }
}

#[derive(Default)]
struct Notes {
    lines: Vec<String>,
    count: u64,
    hash: u64,
}

/// An effect that comes later than its error.
type Late = (i64, Box<dyn FnOnce() + Send>);

/// Everything that the processes share. Locked by one thread only, and never across an await: the locks are for the compiler.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) options: Options,
    origin: Instant,
    /// The instant of the real call under way: in its runtime, tokio's clock is the host's.
    held_ms: Arc<AtomicI64>,
    chaos: AtomicBool,
    dice: Mutex<Dice>,
    net: Mutex<Net>,
    oracle: Mutex<Oracle>,
    queues: Mutex<Queues>,
    redis: Mutex<Redis>,
    notes: Mutex<Notes>,
    /// What the processes say of themselves.
    said: Mutex<(BTreeMap<LifeId, u64>, Vec<TraceLine>)>,
    broken: Mutex<Option<(Broken, i64)>>,
    real: Handle,
    sql: SqlLedger,
    pub(crate) orders: mpsc::UnboundedSender<Order>,
    late: mpsc::UnboundedSender<Late>,
}

fn with<T, R>(lock: &Mutex<T>, look: impl FnOnce(&mut T) -> R) -> R {
    look(&mut lock.lock().unwrap_or_else(PoisonError::into_inner))
}

impl World {
    pub(crate) fn now_ms(&self) -> i64 {
        BEGIN_MS + i64::try_from(self.origin.elapsed().as_millis()).unwrap_or(i64::MAX)
    }

    fn hold_clock(&self) {
        self.held_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(crate) fn chaos(&self) -> bool {
        self.chaos.load(Ordering::Relaxed)
    }

    pub(crate) fn end_chaos(&self) {
        self.chaos.store(false, Ordering::Relaxed);
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> u64 {
        with(&self.notes, |notes| notes.count)
    }

    pub(crate) fn sql(&self) -> &SqlLedger {
        &self.sql
    }

    pub(crate) fn dice<R>(&self, draw: impl FnOnce(&mut Dice) -> R) -> R {
        with(&self.dice, draw)
    }

    pub(crate) fn net<R>(&self, look: impl FnOnce(&mut Net) -> R) -> R {
        with(&self.net, look)
    }

    pub(crate) fn oracle<R>(&self, tell: impl FnOnce(&mut Oracle) -> R) -> R {
        with(&self.oracle, tell)
    }

    pub(crate) fn redis<R>(&self, call: impl FnOnce(&mut Redis) -> R) -> R {
        with(&self.redis, call)
    }

    pub(crate) fn queues<R>(&self, call: impl FnOnce(&mut Queues, &mut Dice) -> R) -> R {
        with(&self.queues, |queues| with(&self.dice, |dice| call(queues, dice)))
    }

    /// Keeps the first thing that must not be.
    pub(crate) fn check(&self, checked: Checked) {
        if let Err(seen) = checked {
            let at = self.now_ms() - BEGIN_MS;
            self.note(|| format!("BROKEN: {seen}"));
            with(&self.broken, |broken| broken.get_or_insert((seen, at)).clone());
            let _ = self.orders.send(Order::Look);
        }
    }

    pub(crate) fn witness(&self, life: LifeId, event: TraceEvent) {
        with(&self.said, |(numbers, lines)| {
            let seq = numbers.entry(life).or_default();
            *seq += 1;
            lines.push(TraceLine { life: format!("{}.{}", life.node, life.number), seq: *seq, event });
        });
    }

    /// What they said, held to the rules, as the traces of real processes are.
    pub(crate) fn conforms(&self) -> Checked {
        let lines = with(&self.said, |(_, lines)| std::mem::take(lines));
        conformance::check(&lines).map(drop).map_err(|deviation| Broken::Trace(deviation.to_string()))
    }

    pub(crate) fn is_broken(&self) -> bool {
        with(&self.broken, |broken| broken.is_some())
    }

    /// A process dies as soon as nobody is in the middle of a step.
    pub(crate) fn kill(&self, life: LifeId) {
        let _ = self.orders.send(Order::Kill(life, "by itself"));
    }

    pub(crate) fn later(&self, after_ms: i64, effect: impl FnOnce() + Send + 'static) {
        let _ = self.late.send((after_ms, Box::new(effect)));
    }

    pub(crate) fn note(&self, line: impl FnOnce() -> String) {
        let ms = self.now_ms() - BEGIN_MS;
        with(&self.notes, |notes| {
            let text = line();
            let mut hasher = DefaultHasher::new();
            (notes.hash, ms, &text).hash(&mut hasher);
            (notes.hash, notes.count) = (hasher.finish(), notes.count + 1);
            if self.options.trace {
                notes.lines.push(format!("{:>4}.{:03}  {text}", ms / 1_000, ms % 1_000));
            }
        });
    }
}

impl Life {
    /// A call and its answer.
    pub(crate) fn note(&self, what: &str, answer: &impl Debug) {
        self.world.note(|| {
            let node = self.id.node;
            let schedulers = self.world.plan.schedulers;
            let who = if node < schedulers { ("scheduler", node) } else { ("worker", node - schedulers) };
            format!("{}-{}.{} {what}: {answer:?}", who.0, who.1, self.id.number)
        });
    }

    /// The process is about to act as the leader. What it had begun before a pause it can't take back.
    pub(crate) fn acts(&self) {
        let (world, now) = (&self.world, self.world.now_ms());
        self.note("fires", &());
        if world.net(|net| net.resumed[self.id.node]) < now {
            world.check(world.oracle(|o| o.acts(self.id, now, world.plan.lease_ttl_ms)));
        }
    }
}

/// Lives one seed through.
///
/// # Errors
/// The ledger's file could not be made.
pub fn run(host: &Host, seed: u64, options: Options) -> io::Result<Report> {
    let mut dice = Dice::of_seed(seed);
    let plan = Plan::draw(&mut dice);
    let held_ms = Arc::new(AtomicI64::new(BEGIN_MS));
    let clock = held_ms.clone();
    let (sql, file) = host.ledger(Arc::new(move || clock.load(Ordering::Relaxed)))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let report = runtime.block_on(async {
        let (orders, ordered) = mpsc::unbounded_channel();
        let (late, lates) = mpsc::unbounded_channel();
        let nodes = plan.nodes();
        let reorders = plan.has(plan::Class::Reorder);
        let world = Arc::new(World {
            origin: Instant::now(),
            held_ms,
            chaos: AtomicBool::new(true),
            dice: Mutex::new(dice),
            net: Mutex::new(Net {
                cuts: BTreeSet::new(),
                away: BTreeSet::new(),
                offsets: vec![0; nodes],
                resumed: vec![i64::MIN; nodes],
            }),
            oracle: Mutex::new(Oracle::new(plan.ack_horizon_ms)),
            queues: Mutex::new(Queues::new(reorders)),
            redis: Mutex::default(),
            notes: Mutex::default(),
            said: Mutex::default(),
            broken: Mutex::default(),
            real: host.handle().clone(),
            sql,
            orders,
            late,
            options,
            plan,
        });
        world.note(|| format!("{:?}", world.plan));
        let (faults, settled_ms) = Control::new(&world, ordered, lates).live().await;
        report(&world, seed, faults, settled_ms)
    });
    drop(runtime);
    host.forget(&file);
    Ok(report)
}

fn report(world: &World, seed: u64, faults: u64, settled_ms: i64) -> Report {
    let (executions, results, refused) = world.oracle(|o| (o.runs.len(), o.results, o.refused));
    let (trace, calls) = with(&world.notes, |n| (std::mem::take(&mut n.lines), (n.count, n.hash)));
    let broken = with(&world.broken, Option::take);
    Report { seed, broken, trace, calls, executions, results, refused, faults, settled_ms }
}
