//! What a seed's world is made of: drawn before anything happens.

use super::{BEGIN_MS, Dice};
use shardcron_domain::job::{
    HandlerSpec, JobSpec, Misfire, MisfirePolicy, OverlapPolicy, RangeSpec, RetryPolicy, ShardsSpec, Timeout,
};
use shardcron_domain::schedule::{Schedule, ScheduleSpec};
use shardcron_domain::units::Span;

/// A class of faults. A seed has each of them or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    CrashWorker,
    CrashScheduler,
    PauseWorker,
    PauseScheduler,
    Slow,
    Clock,
    LostCalls,
    CutLedger,
    CutBroker,
    CutRedis,
    LedgerAway,
    RedisAway,
    Purge,
    Reconnect,
    Duplicate,
    LoseMessages,
    Reorder,
    FlushRedis,
    FailHandlers,
    ForgetfulHandlers,
    Poison,
    Cancel,
    PauseJob,
}

const CLASSES: [Class; 23] = [
    Class::CrashWorker,
    Class::CrashScheduler,
    Class::PauseWorker,
    Class::PauseScheduler,
    Class::Slow,
    Class::Clock,
    Class::LostCalls,
    Class::CutLedger,
    Class::CutBroker,
    Class::CutRedis,
    Class::LedgerAway,
    Class::RedisAway,
    Class::Purge,
    Class::Reconnect,
    Class::Duplicate,
    Class::LoseMessages,
    Class::Reorder,
    Class::FlushRedis,
    Class::FailHandlers,
    Class::ForgetfulHandlers,
    Class::Poison,
    Class::Cancel,
    Class::PauseJob,
];

/// One job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) spec: JobSpec,
    pub(crate) schedule: Schedule,
    pub(crate) first_ms: i64,
    /// How long a handler takes, at most.
    pub(crate) work_ms: i64,
}

/// The whole world.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) schedulers: usize,
    pub(crate) workers: usize,
    pub(crate) concurrency: usize,
    pub(crate) chaos_ms: i64,
    /// The wait between two faults, at most.
    pub(crate) fault_every_ms: i64,
    pub(crate) ack_horizon_ms: i64,
    /// How long a handler takes, at most, once the faults have stopped: a fleet that is too small for its jobs never finishes,
    /// and that would be nobody's fault.
    pub(crate) calm_work_ms: i64,
    pub(crate) classes: Vec<Class>,
    pub(crate) jobs: Vec<Job>,
}

impl Plan {
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        // From quiet worlds to wild ones.
        let density = dice.of(5, 60);
        let classes: Vec<Class> = CLASSES.into_iter().filter(|_| dice.percent(density)).collect();
        let jobs: Vec<Job> = (0..dice.of(1, 4)).filter_map(|n| Job::draw(dice, n)).collect();
        let (workers, concurrency) = (dice.of(1, 4), dice.of(1, 4));
        let shards_per_second: f64 = jobs.iter().map(Job::shards_per_second).sum();
        let quarter_busy_ms = (workers * concurrency) as f64 * 250.0 / shards_per_second.max(0.01);
        Plan {
            schedulers: dice.of(1, 3) as usize,
            workers: workers as usize,
            concurrency: concurrency as usize,
            calm_work_ms: (quarter_busy_ms as i64).clamp(1, 2_000),
            chaos_ms: dice.of(30_000, 120_000),
            fault_every_ms: dice.of(1_000, 10_000),
            ack_horizon_ms: if dice.percent(30) { 3_000 } else { 600_000 },
            jobs,
            classes,
        }
    }

    pub(crate) fn has(&self, class: Class) -> bool {
        self.classes.contains(&class)
    }
}

impl Job {
    pub(crate) fn shards_per_second(&self) -> f64 {
        let second = self.schedule.next_after(self.first_ms).ok().flatten().unwrap_or(i64::MAX);
        let period_s = second.saturating_sub(self.first_ms) as f64 / 1_000.0;
        f64::from(self.spec.shards.count.unwrap_or(1)) / period_s
    }

    pub(crate) fn draw(dice: &mut Dice, number: i64) -> Option<Self> {
        let seconds = |dice: &mut Dice, from, to| Span::secs(dice.of(from, to).unsigned_abs());
        let schedule = if dice.percent(30) {
            let pattern = ["*/10 * * * * *", "0 * * * * *", "5,35 * * * * *"][dice.index(3)];
            ScheduleSpec { cron: Some(pattern.into()), ..ScheduleSpec::default() }
        } else {
            ScheduleSpec { every: Some(seconds(dice, 4, 40)), ..ScheduleSpec::default() }
        };
        let shards = dice.of(1, 12);
        let range = RangeSpec { from: 1, to: dice.of(shards, 1_000) };
        let retry = RetryPolicy {
            attempts: dice.of(1, 4) as u32,
            first: Span(dice.of(0, 3_000).unsigned_abs()),
            factor: 2.0,
            max: Span::secs(10),
            jitter: 0.2,
        };
        let misfire = MisfirePolicy {
            policy: [Misfire::FireOnce, Misfire::Skip, Misfire::FireAll][dice.index(3)],
            grace: seconds(dice, 1, 60),
            limit: dice.of(1, 5) as u32,
        };
        let spec = JobSpec {
            name: format!("job-{number}"),
            schedule: Some(schedule.clone()),
            after: None,
            shards: ShardsSpec { range: Some(range), count: Some(shards as u32), ..ShardsSpec::default() },
            handler: HandlerSpec::Rust { name: "sim".into() },
            tier: "core".into(),
            timeout: if dice.percent(80) { Timeout::After(seconds(dice, 10, 30)) } else { Timeout::Never },
            stall_timeout: None,
            takeover: shardcron_domain::job::Takeover::Lease,
            retry,
            overlap: if dice.percent(70) { OverlapPolicy::Skip } else { OverlapPolicy::Allow },
            misfire,
            params: Default::default(),
            preload: Vec::new(),
        };
        let schedule = schedule.compile().ok()?;
        let first_ms = schedule.next_after(BEGIN_MS).ok()??;
        let longest = [50, 500, 5_000, 20_000][dice.index(4)];
        Some(Job { spec, schedule, first_ms, work_ms: dice.of(10, longest) })
    }
}
