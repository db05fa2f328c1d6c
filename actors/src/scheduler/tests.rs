//! A leader's window ends while it works (L2): between its looks and its write, and between two writes. Its looks are made on a real
//! ledger; the end of the window is tied to what it does, and not to how long that takes.

use super::dispatcher::DispatcherActor;
use super::external::Pump;
use super::supervisor::{RECLAIM_BATCH, SupervisorActor};
use super::turns::Turns;
use super::{Deposed, SchedulerOptions, TermChanged};
use crate::heads::Heads;
use crate::leadership::{Leading, Term};
use crate::ledger_time::LedgerTime;
use crate::modes::Modes;
use crate::{Clock, Entropy, Io, Ports, SystemClock, SystemEntropy, Trace};
use actix::{Actor, Addr};
use shardcron_broker::LedgerBroker;
use shardcron_domain::backfill::BackfillRequest;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::limits::FIRINGS_PER_WRITE;
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::plan::{Addressee, ShardPlan};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};
use shardcron_store::sql::{LedgerLease, LedgerPresence, SqlLedger, SqlOptions};
use shardcron_store::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const BOUND: Duration = Duration::from_secs(30);
/// When the window ends, by the clock below: what no look reaches.
const END: i64 = 1 << 40;

/// When the leader's window ends.
#[derive(Clone, Copy)]
enum Ends {
    Never,
    /// When it draws its n-th id: it has looked, and has not written yet.
    AtDraw(u32),
    /// When it first asks for the hour after that, which is what it does for the write that its window has just allowed.
    AtTheWriteAfter(u32),
}

/// A clock that goes on by a millisecond with each look until the window ends, and dice that tell it when.
struct Hands {
    ends: Ends,
    mono_ms: AtomicI64,
    draws: AtomicU32,
    ended: AtomicBool,
    /// Looks at the clock since then.
    looks: AtomicU32,
}

impl Clock for Hands {
    fn now_ms(&self) -> i64 {
        if let Ends::AtTheWriteAfter(draws) = self.ends
            && self.draws.load(Ordering::SeqCst) >= draws
        {
            self.ended.store(true, Ordering::SeqCst);
        }
        SystemClock::default().now_ms()
    }

    fn mono_ms(&self) -> i64 {
        if !self.ended.load(Ordering::SeqCst) {
            return self.mono_ms.fetch_add(1, Ordering::SeqCst);
        }
        self.looks.fetch_add(1, Ordering::SeqCst);
        END
    }
}

impl Entropy for Hands {
    fn draw(&self) -> u64 {
        SystemEntropy.draw()
    }

    fn id(&self) -> Uuid {
        let draws = self.draws.fetch_add(1, Ordering::SeqCst) + 1;
        if let Ends::AtDraw(at) = self.ends
            && draws >= at
        {
            self.ended.store(true, Ordering::SeqCst);
        }
        SystemEntropy.id()
    }
}

async fn until(what: &str, mut met: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !met().await {
        assert!(began.elapsed() < BOUND, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

struct World {
    ledger: SqlLedger,
    epoch: Epoch,
    _folder: tempfile::TempDir,
}

/// A leader's part in one term, with all that it reaches.
struct Part {
    ports: Ports,
    hands: Arc<Hands>,
    stop: CancellationToken,
}

impl Part {
    /// Waits until the round in which the window ended is over: whoever works on has looked at the clock again and again since.
    async fn out_of_trust(&self) {
        until("the window has ended", async || self.hands.looks.load(Ordering::SeqCst) > 3).await;
        self.stop.cancel();
    }
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("ledger.db").display());
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        let epoch = ledger.begin_epoch("test", now_ms()).await.unwrap();
        World { ledger, epoch, _folder: folder }
    }

    fn part(&self, ends: Ends) -> Part {
        let (draws, ended, looks) = (AtomicU32::new(0), AtomicBool::new(false), AtomicU32::new(0));
        let hands = Arc::new(Hands { ends, mono_ms: AtomicI64::new(0), draws, ended, looks });
        let ledger: Arc<dyn Ledger> = Arc::new(self.ledger.clone());
        let ports = Ports {
            broker: Arc::new(LedgerBroker::new(ledger.clone(), Duration::from_millis(20))),
            ledger,
            lease: Arc::new(LedgerLease { ledger: self.ledger.clone(), name: "trigger".into() }),
            presence: Arc::new(LedgerPresence { ledger: self.ledger.clone() }),
            idempotency: Arc::new(NoIdempotency),
            clock: hands.clone(),
            ledger_time: LedgerTime::default(),
            entropy: hands.clone(),
            modes: Modes::default(),
            trace: Trace::off(),
            io: Io::here(),
            handlers: Io::here(),
        };
        Part { ports, hands, stop: CancellationToken::new() }
    }

    fn deposed(&self) -> Deposed {
        Deposed(tokio::sync::mpsc::channel(1).0)
    }

    fn turns(&self, part: &Part) -> tokio::task::JoinHandle<()> {
        let options = SchedulerOptions::named("test");
        let turns = Turns {
            dispatcher: DispatcherActor::new(part.ports.clone(), options, self.deposed()).start(),
            ports: part.ports.clone(),
            deposed: self.deposed(),
            term: Term::until(self.epoch, END),
            scope: None,
            lost_after: Duration::from_secs(15),
            stop: part.stop.clone(),
        };
        tokio::task::spawn_local(turns.run())
    }

    /// A supervisor that takes who is silent for longer than three looks at the clock for lost, and who has not been heard of at all here.
    fn supervise(&self, part: &Part) -> Addr<SupervisorActor> {
        let (lost_after, sweep_every) = (Duration::from_millis(3), Duration::from_millis(2));
        let options = SchedulerOptions { lost_after, sweep_every, ..SchedulerOptions::named("test") };
        let dispatcher = DispatcherActor::new(part.ports.clone(), options.clone(), self.deposed()).start();
        let heads = Heads::new(part.ports.ledger.clone());
        let supervisor = SupervisorActor::new(part.ports.clone(), options, heads, dispatcher, self.deposed()).start();
        supervisor.do_send(TermChanged(Leading(Some(Term::until(self.epoch, END)))));
        supervisor
    }

    async fn apply(&self, name: &str, more: &str) -> JobId {
        let text = format!("[job.{name}]\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n{more}");
        let spec = shardcron_domain::jobfile::parse(&text).unwrap().remove(0);
        self.ledger.apply_jobs(&[(spec, None)], "test", now_ms()).await.unwrap();
        self.ledger.job(name).await.unwrap().unwrap().id
    }

    /// A firing that waits for its turn.
    async fn wait_for_turn(&self, job: JobId) {
        let new = NewBackfill {
            job,
            request_id: "fill".into(),
            from_ms: 0,
            to_ms: 9,
            forced: false,
            who: "test".into(),
            already: 0,
            instants: vec![("0".into(), 0)],
            request: FiringRequest::default(),
        };
        assert!(self.ledger.begin_backfill(self.epoch, &new, now_ms()).await.unwrap());
    }

    async fn count(&self, of: &str) -> i64 {
        let rows = self.ledger.query(&format!("SELECT COUNT(*) FROM {of}"), &[]).await.unwrap();
        match rows[0][0] {
            SqlArg::Int(count) => count,
            ref other => panic!("{other:?}"),
        }
    }

    /// An execution, fired.
    async fn fire(&self, job: JobId, plan: ShardPlan) -> ExecutionId {
        let id = ExecutionId(SystemEntropy.id());
        let new = NewExecution {
            id,
            plan,
            params: Params::new(),
            tier: "core".into(),
            timeout_ms: None,
            stall_ms: None,
            overlap: OverlapPolicy::Allow,
        };
        let intent = FireIntent {
            job,
            version: 1,
            fire_key: id.to_string(),
            nominal_ms: now_ms(),
            scheduled: true,
            action: FireAction::Fire(new),
            next_fire_ms: None,
            extra: FireExtra::default(),
        };
        self.ledger.fire(self.epoch, &[intent], now_ms()).await.unwrap();
        id
    }

    /// An execution of one shard, ended well.
    async fn run(&self, job: JobId) -> ExecutionId {
        let id = self.fire(job, ShardPlan::Modulo { total: 1 }).await;
        self.ledger.materialize(self.epoch, id, 1).await.unwrap();
        let (me, attempt) = (Incarnation(SystemEntropy.id()), AttemptRef { execution: id, index: 0, attempt: 1 });
        assert!(self.ledger.claim(me, &[attempt], now_ms()).await.unwrap()[0].is_ok());
        let ended = Ended {
            attempt,
            outcome: AttemptOutcome::Success { rows: None, summary: None },
            started_ms: now_ms(),
            ended_ms: now_ms(),
            retry: Default::default(),
            seed: 1,
        };
        assert!(self.ledger.record(me, &[ended], now_ms()).await.unwrap()[0].is_ok());
        id
    }
}

fn now_ms() -> i64 {
    SystemClock::default().now_ms()
}

fn on_a_system(test: impl Future<Output = ()>) {
    actix_rt::System::new().block_on(test);
}

#[test]
fn a_window_that_ends_during_the_looks_leaves_what_waits() {
    on_a_system(async {
        let world = World::new().await;
        let job = world.apply("job", "").await;
        world.wait_for_turn(job).await;
        let part = world.part(Ends::AtDraw(1));
        let turns = world.turns(&part);
        part.out_of_trust().await;
        turns.await.unwrap();
        assert_eq!((world.count("executions").await, world.count("waiting").await), (0, 1), "fired out of trust");
        // Whoever leads then finds it.
        let part = world.part(Ends::Never);
        let turns = world.turns(&part);
        until("it is fired", async || world.count("executions").await == 1).await;
        part.stop.cancel();
        turns.await.unwrap();
        assert_eq!(world.count("waiting").await, 0);
    });
}

#[test]
fn a_window_that_ends_between_two_writes_leaves_the_second() {
    on_a_system(async {
        let world = World::new().await;
        let all = FIRINGS_PER_WRITE + 1;
        for n in 0..all {
            let job = world.apply(&format!("job-{n}"), "").await;
            world.wait_for_turn(job).await;
        }
        let part = world.part(Ends::AtTheWriteAfter(u32::try_from(all).unwrap()));
        let turns = world.turns(&part);
        part.out_of_trust().await;
        turns.await.unwrap();
        let first = i64::try_from(FIRINGS_PER_WRITE).unwrap();
        assert_eq!((world.count("executions").await, world.count("waiting").await), (first, 1), "fired out of trust");
    });
}

#[test]
fn a_window_that_ends_during_the_looks_drops_no_watch() {
    on_a_system(async {
        let world = World::new().await;
        let up = world.apply("up", "").await;
        // In the order of their ids: the first one's firing is drawn, and then the second one's watch is found to be useless.
        for name in ["follows", "followed"] {
            world.apply(name, "after = [\"up\"]\n").await;
        }
        world.run(up).await;
        let mut spec = world.ledger.job("followed").await.unwrap().unwrap().spec.unwrap();
        spec.after = None;
        world.ledger.apply_jobs(&[(spec, None)], "test", now_ms()).await.unwrap();
        assert_eq!(world.ledger.watches(10).await.unwrap().len(), 2);
        let part = world.part(Ends::AtDraw(1));
        let turns = world.turns(&part);
        part.out_of_trust().await;
        turns.await.unwrap();
        assert_eq!(world.ledger.watches(10).await.unwrap().len(), 2, "dropped out of trust");
        assert_eq!(world.count("executions").await, 1, "fired out of trust");
        let part = world.part(Ends::Never);
        let turns = world.turns(&part);
        until("both are seen to", async || world.ledger.watches(10).await.unwrap().is_empty()).await;
        part.stop.cancel();
        turns.await.unwrap();
        assert_eq!(world.count("executions").await, 2);
    });
}

#[test]
fn a_window_that_ends_during_the_looks_begins_no_backfill() {
    on_a_system(async {
        let world = World::new().await;
        world.apply("daily", "schedule = { cron = \"0 0 * * *\" }\n").await;
        let part = world.part(Ends::AtDraw(2));
        let fill = BackfillRequest {
            from: "2026-03-01T00:00:00Z".into(),
            to: "2026-03-04T00:00:00Z".into(),
            force: false,
            max: None,
        };
        let request = TriggerRequest { job: "daily".into(), backfill: Some(fill), ..TriggerRequest::default() };
        part.ports.broker.send_trigger(&request).await.unwrap();
        let pump = |part: &Part| {
            let options = SchedulerOptions::named("test");
            let pump = Pump {
                dispatcher: DispatcherActor::new(part.ports.clone(), options, world.deposed()).start(),
                ports: part.ports.clone(),
                deposed: world.deposed(),
                term: Term::until(world.epoch, END),
                stop: part.stop.clone(),
            };
            tokio::task::spawn_local(pump.run())
        };
        let running = pump(&part);
        let looks = || part.hands.looks.load(Ordering::SeqCst);
        // Who begins it does not look at the clock again.
        until("the window has ended", async || looks() > 3 || world.count("backfills").await > 0).await;
        part.stop.cancel();
        running.await.unwrap();
        assert_eq!((world.count("backfills").await, world.count("waiting").await), (0, 0), "begun out of trust");
        let part = world.part(Ends::Never);
        let running = pump(&part);
        until("it is begun", async || world.count("backfills").await == 1).await;
        part.stop.cancel();
        running.await.unwrap();
        assert_eq!(world.count("waiting").await, 3);
    });
}

/// A supervisor sweeps on beside what it writes: it has looked so often since the window ended that a second write would have come long ago.
const LOOKS: u32 = 100;

#[test]
fn a_window_that_ends_between_two_batches_takes_no_second_one_back() {
    on_a_system(async {
        let world = World::new().await;
        let job = world.apply("job", "").await;
        let all = u32::try_from(RECLAIM_BATCH).unwrap() + 1;
        let id = world.fire(job, ShardPlan::Modulo { total: all }).await;
        world.ledger.materialize(world.epoch, id, all).await.unwrap();
        let attempts: Vec<_> = (0..all).map(|index| AttemptRef { execution: id, index, attempt: 1 }).collect();
        let gone = Incarnation(SystemEntropy.id());
        assert!(world.ledger.claim(gone, &attempts, now_ms()).await.unwrap().iter().all(|claim| claim.is_ok()));
        let running = async || world.ledger.running(attempts.len()).await.unwrap().len();
        let part = world.part(Ends::AtTheWriteAfter(0));
        let supervisor = world.supervise(&part);
        until("the first batch is taken back", async || running().await < attempts.len()).await;
        until("more sweeps", async || part.hands.looks.load(Ordering::SeqCst) > LOOKS).await;
        assert_eq!(running().await, 1, "taken back out of trust");
        drop(supervisor);
        // Whoever leads then takes it back.
        let part = world.part(Ends::Never);
        let _supervisor = world.supervise(&part);
        until("it is taken back", async || running().await == 0).await;
    });
}

#[test]
fn a_window_that_ends_between_two_lost_workers_ends_no_shard_of_the_second() {
    on_a_system(async {
        let world = World::new().await;
        let job = world.apply("job", "").await;
        let lost = || Addressee { name: "w".into(), incarnation: Incarnation(SystemEntropy.id()) };
        world.fire(job, ShardPlan::Broadcast { workers: vec![lost(), lost()] }).await;
        let waited_for = async || world.ledger.addressees().await.unwrap().len();
        assert_eq!(waited_for().await, 2);
        let part = world.part(Ends::AtTheWriteAfter(0));
        let supervisor = world.supervise(&part);
        until("the first one's is ended", async || waited_for().await < 2).await;
        until("more sweeps", async || part.hands.looks.load(Ordering::SeqCst) > LOOKS).await;
        assert_eq!(waited_for().await, 1, "ended out of trust");
        drop(supervisor);
        let part = world.part(Ends::Never);
        let _supervisor = world.supervise(&part);
        until("both are ended", async || waited_for().await == 0).await;
    });
}
