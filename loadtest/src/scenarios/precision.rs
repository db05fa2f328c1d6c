//! How late firings are when one scheduler holds many jobs, and what a midnight with thousands of jobs in one second does to the
//! jobs beside it.

use crate::cluster::{self, ClusterOptions};
use crate::report::{self, Burst, Lateness, Precision};
use crate::services::ServiceArgs;
use crate::session::{Session, Voice, now_ms};
use crate::{peers, procfs, rows};
use anyhow::{Context, Result};
use clap::Args;
use shardcron_domain::JobSpec;
use shardcron_domain::job::{HandlerSpec, OverlapPolicy};
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::units::{Span, rfc3339};
use shardcron_store::{Ledger, SqlArg};
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct PrecisionArgs {
    /// Jobs that fire once a minute, spread evenly over it
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    jobs: u32,
    /// How long to measure
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=3_600))]
    seconds: u32,
    /// Then so many other jobs that are all due in the same second; 0 leaves it out
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=50_000))]
    burst: u32,
    /// Worker processes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Then measure celery beat, APScheduler and tokio-cron-scheduler, which are installed for it, with up to 1,000 such jobs
    #[arg(long)]
    peers: bool,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// Jobs that fire every second beside the others.
const TICKS: u32 = 10;
/// Jobs of a peer at most: each holds them in one process without a ledger, and some take a second for a thousand.
const PEER_JOBS: u32 = 1_000;
const PERIOD_MS: i64 = 60_000;
/// Jobs of one call to the ledger.
const APPLY: usize = 2_000;
/// Firings that are not counted: connections are opened, queues declared, pages read.
const WARM_UP_MS: i64 = 10_000;
const BURST_PATIENCE: Duration = Duration::from_secs(60);

fn job(name: String, schedule: ScheduleSpec) -> JobSpec {
    let handler = HandlerSpec::Rust { name: "noop".into() };
    JobSpec::minimal(name, handler).with_schedule(schedule).with_overlap(OverlapPolicy::Allow)
}

fn spread(at: u32, of: u32, from_ms: i64) -> (JobSpec, Option<i64>) {
    let first = from_ms + i64::from(at) * PERIOD_MS / i64::from(of);
    let every = ScheduleSpec { every: Some(Span::mins(1)), anchor: Some(rfc3339(first)), ..ScheduleSpec::default() };
    (job(format!("spread-{at}"), every), Some(first))
}

fn tick(at: u32, from_ms: i64) -> (JobSpec, Option<i64>) {
    let cron = ScheduleSpec { cron: Some("* * * * * *".into()), ..ScheduleSpec::default() };
    (job(format!("tick-{at}"), cron), Some(from_ms))
}

fn once(at: u32, when_ms: i64) -> (JobSpec, Option<i64>) {
    let schedule = ScheduleSpec { at: Some(rfc3339(when_ms)), ..ScheduleSpec::default() };
    (job(format!("burst-{at}"), schedule), Some(when_ms))
}

/// Runs it. True: nothing was missed and nothing doubled.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: PrecisionArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let options =
        ClusterOptions { variables: vec![("SHARDCRON_LOG_FILTER", "warn".to_owned())], ..ClusterOptions::default() };
    let mut session = Session::open(args.services.clone(), options, voice).await?;
    let mut measured = measure(&mut session, &args).await;
    if let (Ok(answer), true) = (&mut measured, args.peers) {
        session.cluster.kill_all();
        let load = peers::Load { jobs: args.jobs.min(PEER_JOBS), seconds: args.seconds };
        answer.peers = peers::measure(load, &session.services.redis_url, |what| session.voice.phase(what)).await?;
    }
    let closed = session.close(&[crate::session::TIER]).await;
    let answer = measured?;
    closed?;
    if args.json {
        report::json(&answer)?;
    } else {
        answer.print();
    }
    Ok(answer.missed == 0 && answer.doubled == 0)
}

async fn apply(session: &Session, jobs: &[(JobSpec, Option<i64>)]) -> Result<()> {
    for chunk in jobs.chunks(APPLY) {
        session.ledger.apply_jobs(chunk, "loadtest", now_ms()).await.context("the scenario's jobs")?;
    }
    Ok(())
}

async fn measure(session: &mut Session, args: &PrecisionArgs) -> Result<Precision> {
    session.voice.phase("writing jobs");
    let began = Instant::now();
    // Far enough ahead that all jobs are written and loaded before the first is due.
    let from = next_second(now_ms() + 15_000 + i64::from(args.jobs) / 2);
    let jobs: Vec<_> = (0..args.jobs).map(|at| spread(at, args.jobs, from)).collect();
    apply(session, &jobs).await?;
    let ticks: Vec<_> = (0..TICKS).map(|at| tick(at, from)).collect();
    apply(session, &ticks).await?;
    let apply_seconds = began.elapsed().as_secs_f64();
    session.start(1, args.workers as usize).await?;
    let scheduler = session.pids().into_iter().find(|(name, _)| name.starts_with("scheduler"));
    let scheduler = scheduler.context("no scheduler runs")?.1;

    let (t0, t1) = (from + WARM_UP_MS, from + WARM_UP_MS + i64::from(args.seconds) * 1_000);
    session.voice.phase("warming up");
    until(session, t0).await?;
    session.voice.phase("measuring lateness");
    let (cpu, parts, wall) = (procfs::cpu_seconds(scheduler), cluster::cpu(&session.pids()), Instant::now());
    until(session, t1).await?;
    let seconds = wall.elapsed().as_secs_f64();
    let spent = procfs::cpu_seconds(scheduler).zip(cpu).map_or(0.0, |(after, before)| after - before);
    let cores = cluster::cpu(&session.pids())
        .into_iter()
        .map(|(part, after)| (part.clone(), round2((after - parts.get(&part).copied().unwrap_or(0.0)) / seconds)))
        .collect();
    let rss = procfs::peak_rss_mib(scheduler).unwrap_or(0.0);
    let burst = if args.burst > 0 { Some(burst(session, args.burst).await?) } else { None };
    session.voice.phase("counting");
    // What fell due at the end has to be worked off before it is counted. The jobs go on; so a window is counted, not everything.
    tokio::time::sleep(Duration::from_secs(3)).await;

    let expected: u64 = jobs.iter().chain(&ticks).map(|(spec, _)| due_within(spec, t0, t1)).sum::<Result<u64>>()?;
    let window = [SqlArg::Int(t0), SqlArg::Int(t1)];
    let counted = rows::numbers(&session.ledger, COUNTED, &window).await?;
    let (fired, distinct) = (counted[0], counted[1]);
    let late = rows::pairs(&session.ledger, LATE, &window).await?;
    let ticks_late = rows::pairs(&session.ledger, &format!("{LATE} AND j.name LIKE 'tick-%'"), &window).await?;
    Ok(Precision {
        jobs: u64::from(args.jobs + TICKS),
        seconds: round2(seconds),
        fired,
        missed: expected.saturating_sub(distinct),
        doubled: (fired - distinct) + distinct.saturating_sub(expected),
        lateness_ms: Lateness::of(late.iter().map(|(decided, _)| *decided)),
        start_lateness_ms: Lateness::of(late.iter().map(|(_, started)| *started)),
        per_second_start_ms: Lateness::of(ticks_late.iter().map(|(_, started)| *started)),
        cpu_cores: round2(spent / seconds),
        cores,
        rss_mib: (rss * 10.0).round() / 10.0,
        apply_seconds: round2(apply_seconds),
        burst,
        peers: Vec::new(),
        optimised: !cfg!(debug_assertions),
    })
}

/// Executions of scheduled instants in the window, and how many different (job, instant) they are.
const COUNTED: &str = "SELECT COUNT(*), COUNT(DISTINCT job_id, nominal_ms) FROM executions \
                       WHERE nominal_ms >= ? AND nominal_ms < ?";
/// When the decision was written and when the handler started, each after the nominal instant, in milliseconds.
const LATE: &str = "SELECT e.fired_ms - e.nominal_ms, r.started_ms - e.nominal_ms FROM executions e \
                    JOIN results r ON r.execution_id = e.id JOIN jobs j ON j.id = e.job_id \
                    WHERE e.nominal_ms >= ? AND e.nominal_ms < ?";
/// Executions of jobs from a number on, and how many of them have been published. By the primary key, which begins with the time, since
/// it is asked again and again beside what is measured.
const BURST: &str = "SELECT COUNT(*), COALESCE(SUM(CASE WHEN dispatched > 0 THEN 1 ELSE 0 END), 0) FROM executions \
                     WHERE id > UNHEX(?) AND job_id >= ?";
/// How often; what is measured may be this much shorter.
const LOOK_EVERY: Duration = Duration::from_millis(40);

/// Everything due at once, with the per-second jobs beside it.
async fn burst(session: &mut Session, jobs: u32) -> Result<Burst> {
    session.voice.phase("a burst: writing its jobs");
    let when = next_second(now_ms() + 10_000 + i64::from(jobs) / 2);
    let all: Vec<_> = (0..jobs).map(|at| once(at, when)).collect();
    apply(session, &all).await?;
    session.voice.phase("a burst");
    until(session, when).await?;
    let (mut recorded_ms, mut published_ms) = (None, None);
    let first = rows::numbers(&session.ledger, "SELECT MIN(id) FROM jobs WHERE name LIKE 'burst-%'", &[]).await?[0];
    let looked = [SqlArg::Text(format!("{:012x}", when.max(0))), SqlArg::Int(i64::try_from(first)?)];
    let began = Instant::now();
    while published_ms.is_none() && began.elapsed() < BURST_PATIENCE {
        let counts = rows::numbers(&session.ledger, BURST, &looked).await?;
        let now = now_ms() - when;
        if counts[0] >= u64::from(jobs) {
            recorded_ms.get_or_insert(now);
        }
        if counts[1] >= u64::from(jobs) {
            published_ms = Some(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let beside = [SqlArg::Int(when - 1), SqlArg::Int(when + 5_000)];
    until(session, when + 6_000).await?;
    let ticks = rows::pairs(&session.ledger, &format!("{LATE} AND j.name LIKE 'tick-%'"), &beside).await?;
    Ok(Burst {
        jobs: jobs.into(),
        recorded_ms: recorded_ms.context("not all firings of the burst were recorded within a minute")?,
        published_ms: published_ms.context("not all first shards of the burst were published within a minute")?,
        per_second_lateness_ms: Lateness::of(ticks.iter().map(|(decided, _)| *decided)),
        per_second_start_ms: Lateness::of(ticks.iter().map(|(_, started)| *started)),
    })
}

/// How many instants a job has in `t0..t1`, by its schedule.
fn due_within(spec: &JobSpec, t0: i64, t1: i64) -> Result<u64> {
    let schedule = spec.schedule.as_ref().context("a job without a schedule")?.compile()?;
    let (mut at, mut count) = (t0 - 1, 0);
    while let Some(next) = schedule.next_after(at)?.filter(|next| *next < t1) {
        (at, count) = (next, count + 1);
    }
    Ok(count)
}

fn next_second(ms: i64) -> i64 {
    (ms / 1_000 + 1) * 1_000
}

fn round2(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

async fn until(session: &mut Session, at_ms: i64) -> Result<()> {
    while now_ms() < at_ms {
        session.cluster.check()?;
        let left = (at_ms - now_ms()).clamp(1, 1_000).unsigned_abs();
        tokio::time::sleep(Duration::from_millis(left)).await;
    }
    Ok(())
}
