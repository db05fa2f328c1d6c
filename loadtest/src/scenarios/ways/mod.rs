//! reconcile-flights in every way in which a job can be written, each with workers killed at random in the middle. Every way has to
//! find the same flights; where "once" is promised, none of them twice.

mod answer;
mod handlers;
mod jobs;
mod kills;
mod service;
mod target;

pub use handlers::with_ways;

use crate::cluster::ClusterOptions;
use crate::oracle::{self, Count};
use crate::procfs;
use crate::report;
use crate::rows::numbers;
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use answer::{Answer, print};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use jobs::{Place, SLOTS, WORKERS, Way};
use kills::Kill;
use service::Service;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_store::SqlArg;
use std::future::Future;
use std::time::{Duration, Instant};
use target::{FOUND, File, Keys, UNMATCHED};

/// What can be said.
#[derive(Args)]
pub struct WaysArgs {
    /// Workers killed in each way; the work is made as long as they need
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=50))]
    kills: u32,
    /// Repeats the choice of victims and moments; chosen and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Only these ways
    #[arg(long, visible_alias = "only", num_args = 1.., value_name = "NAME")]
    way: Vec<Way>,
    /// Cancel a way that has not ended after so many seconds; if absent, two minutes and ten seconds for each kill
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    bound: Option<u64>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// What a way may take that nobody is killed in, and once more for each kill.
const BOUND: Duration = Duration::from_secs(120);
const BOUND_PER_KILL: Duration = Duration::from_secs(10);
/// Between two looks for what goes on after an execution's end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// What goes on for longer is a fault. A request takes its pause and its insert, a program dies of its closed output at the next step.
const LATE_PATIENCE: Duration = Duration::from_secs(60);
/// The variable by which each process of an attempt can be known, as the `exec` handler documents it: `<execution>/<shard>/<attempt>`.
const MARK: &str = "SHARDCRON_ATTEMPT_ID";

/// Runs it. True: every way had all its kills, found what there is, and kept its promise.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: WaysArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    voice.note(&format!("seed {seed}"));
    let ways: Vec<Way> =
        Way::value_variants().iter().copied().filter(|way| args.way.is_empty() || args.way.contains(way)).collect();
    let folder = tempfile::Builder::new().prefix("shardcron-ways-").tempdir().context("a folder for the ways")?;
    let mut place = Place { folder, service: None };
    voice.phase("starting the service that is called");
    let service = ways.iter().any(|way| way.needs_service()).then(|| Service::start(&place)).transpose()?;
    place.service = service.as_ref().map(|service| service.url.clone());
    let mut session = Session::open(args.services.clone(), options(&place), voice).await?;
    let run = all(&mut session, &args, &ways, &place, seed).await;
    let closed = session.close(&[TIER]).await;
    let answers = run.with_context(|| format!("with seed {seed}"))?;
    closed?;
    if args.json {
        report::json(&answers)?;
    } else {
        print(&answers, seed);
    }
    Ok(answers.iter().all(|answer| answer.ok))
}

/// The liveness of a test, and what the examples ask of a worker.
fn options(place: &Place) -> ClusterOptions {
    let variables = [
        ("SHARDCRON_CONFIG", place.config().display().to_string()),
        ("SHARDCRON_WORKER_LOST_AFTER", "1500ms".into()),
        ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms".into()),
        ("SHARDCRON_SCHEDULER_LEASE_TTL", "2s".into()),
        ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "2s".into()),
        ("SHARDCRON_WORKER_ALLOW_EXEC", "python3".into()),
        ("SHARDCRON_WORKER_WORK_DIR", jobs::examples().display().to_string()),
        ("SHARDCRON_WORKER_LEFTOVERS", "kill".into()),
        ("SHARDCRON_WORKER_ALLOW_HTTP", place.service.clone().unwrap_or_default()),
    ];
    ClusterOptions { tiers: format!("{TIER}={SLOTS}"), variables: variables.to_vec() }
}

async fn all(session: &mut Session, args: &WaysArgs, ways: &[Way], place: &Place, seed: u64) -> Result<Vec<Answer>> {
    session.voice.phase("loading the flights");
    target::load(&session.ledger).await?;
    let (other, url) = session.services.another_database("other").await?;
    std::fs::write(place.config(), format!("[databases]\nother = \"{url}\"\n"))
        .context("the workers' configuration")?;
    session.ledger.execute_script(&target::elsewhere(&other)).await.context("the tables in another database")?;
    session.start(1, WORKERS as usize).await?;
    let mut answers = Vec::new();
    let mut before = Count::default();
    for (fired, way) in (1..).zip(ways) {
        let plan = kills::plan(*way, args.kills, seed);
        let mut answer = Answer::new(*way);
        // What one way comes to keeps no other from running.
        let ended = one(session, &mut answer, &plan, (args, place, &other)).await.unwrap_or_else(|e| {
            answer.faults.push(format!("{e:#}"));
            false
        });
        let count = oracle::count(&session.ledger, fired).await?;
        answer.lost = count.lost.saturating_sub(before.lost);
        answer.recorded_twice = count.recorded_twice.saturating_sub(before.recorded_twice);
        answer.dedup_rows_left = numbers(&session.ledger, "SELECT COUNT(*) FROM once_records", &[]).await?[0];
        before = count;
        answer.judge(&plan, ended);
        answer.ok = answer.faults.is_empty();
        answer.faults.iter().for_each(|fault| session.voice.note(&format!("{}: {fault}", way.name())));
        answers.push(answer);
        session.cluster.restart_ended()?;
    }
    Ok(answers)
}

/// Runs one way and counts what it left. False: it was cancelled.
async fn one(
    session: &mut Session,
    answer: &mut Answer,
    plan: &[Kill],
    (args, place, other): (&WaysArgs, &Place, &str),
) -> Result<bool> {
    let way = answer.way;
    target::empty(&session.ledger).await?;
    session.apply(&way.job_file(args.kills, place)).await?;
    session.voice.phase(way.name());
    let began = Instant::now();
    let (execution, _) = session.fire(&way.job()).await?;
    let bound = args.bound.map_or(BOUND + BOUND_PER_KILL * args.kills, Duration::from_secs);
    let course = match kills::run(session, way, execution, plan, bound).await {
        Ok(course) => course,
        Err(e) => {
            let why = format!("the load test could not watch it: {e:#}");
            let given_up = kills::give_up(session, execution, &why).await;
            answer.faults.extend(given_up.unwrap_or_else(|e| vec![format!("{why}; and could not cancel it: {e:#}")]));
            return Err(e);
        }
    };
    answer.seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    answer.shards = course.row.shards_total.into();
    answer.killed(course.kills);
    let ended = course.stuck.is_empty();
    answer.faults.extend(course.stuck);
    if ended && (course.row.phase != Phase::Success || course.row.succeeded != course.row.shards_total) {
        let (word, well, shards) = (course.row.phase.word(), course.row.succeeded, course.row.shards_total);
        answer.faults.push(format!("it is {word}: {well} of {shards} shards ended well"));
    }
    session.voice.phase(&format!("{}: counting", way.name()));
    answer.taken_over = of_execution(session, TAKEN_OVER, execution).await?;
    if ended && way == Way::Map {
        let total = reduced(session, execution).await?;
        if total != Some(UNMATCHED) {
            answer.faults.push(format!("the reducing shard came to {total:?} flights"));
        }
    }
    if let Some(keys) = look(session, answer, execution, (place, other)).await? {
        answer.keys(keys, if ended { Some(way.shards(args.kills)) } else { None });
    }
    Ok(ended)
}

/// Counts in the way's target; what is in a file is copied beside the truth for that. Effects of the dead may come after the execution's
/// end: nothing is counted before the last of its programs is gone and the last of its requests has ended. Gives under which keys those
/// were asked.
async fn look(
    session: &Session,
    answer: &mut Answer,
    execution: ExecutionId,
    (place, other): (&Place, &str),
) -> Result<Option<Keys>> {
    let (ledger, way) = (&session.ledger, answer.way);
    let (file, table, findings) = match way {
        Way::Exec => {
            let open = || async { Ok(procfs::with_variable(MARK, &format!("{execution}/"))) };
            until_none("programs of it still run", answer, open).await?;
            let sql = "SELECT flight, tailnum, times FROM unmatched WHERE key LIKE ?";
            (File::open(&place.of_programs()).await?, "starts", sql)
        }
        Way::Http | Way::HttpKey => {
            let file = File::open(&place.of_service()).await?;
            until_none("requests of it have not ended", answer, || file.open_requests(execution)).await?;
            (file, "calls", "SELECT flight, tailnum, 1 FROM unmatched WHERE key LIKE ?")
        }
        Way::SqlElsewhere => {
            answer.found(target::count(ledger, &format!("{other}.{FOUND}")).await?);
            return Ok(None);
        }
        _ => {
            answer.found(target::count(ledger, FOUND).await?);
            return Ok(None);
        }
    };
    file.copy(ledger, findings, execution).await?;
    answer.found(target::count(ledger, FOUND).await?);
    Ok(Some(file.keys(table, execution).await?))
}

/// Waits until nothing is open any more, and notes how much was at first. What is open for too long is a fault, and the count goes on.
async fn until_none<F: Future<Output = Result<Vec<String>>>>(
    what: &str,
    answer: &mut Answer,
    open: impl Fn() -> F,
) -> Result<()> {
    let until = Instant::now() + LATE_PATIENCE;
    loop {
        let found = open().await?;
        answer.open_at_end.get_or_insert(found.len() as u64);
        if found.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            answer.faults.push(format!("after {} s {what}: {}", LATE_PATIENCE.as_secs(), found.join(", ")));
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

const TAKEN_OVER: &str =
    "SELECT COUNT(*) FROM attempts WHERE outcome IN ('worker_lost', 'taken_over') AND HEX(execution_id) = ?";

async fn of_execution(session: &Session, sql: &str, execution: ExecutionId) -> Result<u64> {
    Ok(numbers(&session.ledger, sql, &[SqlArg::Text(kills::hex(execution))]).await?[0])
}

/// What the reducing shard added up to.
async fn reduced(session: &Session, execution: ExecutionId) -> Result<Option<u64>> {
    let sql = "SELECT summary FROM results WHERE HEX(execution_id) = ? AND summary LIKE '%\"total\"%'";
    let rows = oracle::rows_of(&session.ledger, sql, &[SqlArg::Text(kills::hex(execution))]).await?;
    let Some(text) = rows.into_iter().next().and_then(|row| row.into_iter().next()) else { return Ok(None) };
    let summary: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("the summary {text}"))?;
    Ok(summary.get("total").and_then(serde_json::Value::as_u64))
}
