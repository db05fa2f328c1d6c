//! reconcile-flights in every way in which a job can be written, each with workers killed at random in the middle. Every way has to
//! find the same flights; where "once" is promised, none of them twice.

mod handlers;
mod jobs;
mod kills;
mod service;
mod target;

pub use handlers::with_ways;

use crate::cluster::ClusterOptions;
use crate::oracle::{self, Count};
use crate::report;
use crate::rows::numbers;
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use jobs::{Place, Promise, SLOTS, WORKERS, Way};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use service::Service;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_store::SqlArg;
use std::time::{Duration, Instant};
use target::{FOUND, File, Found, Keys, UNMATCHED};

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
    #[arg(long, num_args = 1.., value_name = "NAME")]
    way: Vec<Way>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// What came of one way.
#[derive(Debug, Serialize)]
struct Answer {
    way: Way,
    promise: Promise,
    kills: u32,
    /// Attempts that were taken over from the dead.
    taken_over: u64,
    shards: u64,
    /// Flights found, each counted once.
    rows: u64,
    /// Flights that were not found, and findings that are none.
    wrong: u64,
    /// Findings that were made again.
    duplicates: u64,
    /// Whether the sums by carrier are the published ones.
    by_carrier: bool,
    /// The most keys that a program or a service saw for one shard.
    /// Absent (null) where no key is shown to anybody.
    keys_per_shard_max: Option<u64>,
    /// The most attempts that it saw of one shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts_per_shard_max: Option<u64>,
    /// Rows of records that were to be worked on once, at the end.
    dedup_rows_left: u64,
    lost: u64,
    recorded_twice: u64,
    seconds: f64,
    ok: bool,
}

/// What one look for the end of late requests waits.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const LATE_PATIENCE: Duration = Duration::from_secs(20);

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
        // Each way draws the same, whichever others are run.
        let mut random = StdRng::seed_from_u64(seed.wrapping_mul(1_000).wrapping_add(*way as u64));
        target::empty(&session.ledger).await?;
        session.apply(&way.job_file(args.kills, place)).await?;
        session.voice.phase(way.name());
        let began = Instant::now();
        let (execution, _) = session.fire(&way.job()).await?;
        let (row, kills) = kills::run(session, *way, execution, args.kills, &mut random).await?;
        let seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        session.voice.phase(&format!("{}: counting", way.name()));
        let (found, keys) = look(session, *way, execution, place, &other).await?;
        let count = oracle::count(&session.ledger, fired).await?;
        let mut answer = Answer {
            way: *way,
            promise: way.promise(),
            kills,
            taken_over: of_execution(session, TAKEN_OVER, execution).await?,
            shards: row.shards_total.into(),
            rows: found.rows,
            wrong: found.wrong,
            duplicates: found.duplicates,
            by_carrier: found.by_carrier,
            keys_per_shard_max: keys.map(|keys| keys.most),
            attempts_per_shard_max: keys.map(|keys| keys.attempts),
            dedup_rows_left: numbers(&session.ledger, "SELECT COUNT(*) FROM once_records", &[]).await?[0],
            lost: count.lost.saturating_sub(before.lost),
            recorded_twice: count.recorded_twice.saturating_sub(before.recorded_twice),
            seconds,
            ok: false,
        };
        let ended_well = row.phase == Phase::Success && row.succeeded == row.shards_total;
        let reduced = *way != Way::Map || reduced(session, execution).await? == Some(UNMATCHED);
        let keys_kept = keys.is_none_or(|keys| keys_kept(keys, way.shards(args.kills)));
        answer.ok = ended_well && reduced && keys_kept && kept(&answer, args.kills);
        answers.push(answer);
        before = count;
    }
    Ok(answers)
}

/// What must hold of every way, and of those that promise "once".
fn kept(answer: &Answer, kills: u32) -> bool {
    let exact = answer.rows == UNMATCHED && answer.wrong == 0 && answer.by_carrier;
    let killed = answer.kills == kills && answer.taken_over > 0;
    let recorded = answer.lost == 0 && answer.recorded_twice == 0 && answer.dedup_rows_left == 0;
    exact && killed && recorded && (answer.promise == Promise::AtLeastOnce || answer.duplicates == 0)
}

/// One key for each shard, no two shards with the same, and some shard that was asked for more than once: else nothing was shown.
fn keys_kept(keys: Keys, shards: u64) -> bool {
    keys.shards == shards && keys.keys == shards && keys.most == 1 && keys.attempts > 1
}

/// Counts in the way's target; what is in a file is copied beside the truth for that.
async fn look(
    session: &Session,
    way: Way,
    execution: ExecutionId,
    place: &Place,
    other: &str,
) -> Result<(Found, Option<Keys>)> {
    let ledger = &session.ledger;
    let (file, table, findings) = match way {
        Way::Exec => {
            let sql = "SELECT flight, tailnum, times FROM unmatched WHERE key LIKE ?";
            (File::open(&place.of_programs()).await?, "starts", sql)
        }
        Way::Http | Way::HttpKey => {
            let sql = "SELECT flight, tailnum, 1 FROM unmatched WHERE key LIKE ?";
            (File::open(&place.of_service()).await?, "calls", sql)
        }
        Way::SqlElsewhere => return Ok((target::count(ledger, &format!("{other}.{FOUND}")).await?, None)),
        _ => return Ok((target::count(ledger, FOUND).await?, None)),
    };
    if way == Way::Http {
        let until = Instant::now() + LATE_PATIENCE;
        while !file.all_requests_ended(execution).await? {
            anyhow::ensure!(Instant::now() < until, "the service has not ended all requests within {LATE_PATIENCE:?}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
    file.copy(ledger, findings, execution).await?;
    Ok((target::count(ledger, FOUND).await?, Some(file.keys(table, execution).await?)))
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

fn print(answers: &[Answer], seed: u64) {
    println!("reconcile-flights in {} ways, seed {seed}; the published answer: {UNMATCHED} flights", answers.len());
    println!(
        "{:<17}{:<15}{:>5}  {:>10}  {:>7}  {:>5}  {:>10}  {:>14}  {:>7}",
        "way", "promise", "kills", "taken over", "rows", "wrong", "duplicates", "keys per shard", "seconds"
    );
    for answer in answers {
        let keys = answer.keys_per_shard_max.map_or_else(|| "-".to_owned(), |keys| keys.to_string());
        println!(
            "{:<17}{:<15}{:>5}  {:>10}  {:>7}  {:>5}  {:>10}  {keys:>14}  {:>7.1}  {}",
            answer.way.name(),
            answer.promise.words(),
            answer.kills,
            answer.taken_over,
            answer.rows,
            answer.wrong,
            answer.duplicates,
            answer.seconds,
            if answer.ok { "ok" } else { "NOT OK" }
        );
    }
    for answer in answers.iter().filter(|answer| !answer.ok) {
        println!("{}: {answer:?}", answer.way.name());
    }
}
