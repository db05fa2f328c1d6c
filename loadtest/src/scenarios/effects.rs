//! Each record adds 1 to a counter while workers are killed at random: at the end every counter is 1, and nothing is left of the
//! rows that saw to it.

use crate::cluster::{ClusterOptions, Role};
use crate::count::COUNTERS;
use crate::report;
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use anyhow::{Context, Result, bail};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use shardcron_store::sql::SqlLedger;
use shardcron_store::{Ledger, SqlArg};
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct EffectsArgs {
    /// Records, each of which adds 1 to a counter of its own
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    records: u32,
    /// Worker processes at a time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Milliseconds between two kills
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    every_ms: u64,
    /// Repeats the choice of victims; chosen and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// What came of it.
#[derive(Serialize)]
struct Effects {
    records: u64,
    kills: u32,
    /// Counters that are not 1.
    wrong_counters: u64,
    dedup_rows_left: u64,
    /// The most rows that were seen at once, looking twenty times a second.
    dedup_rows_peak: u64,
    taken_over: u64,
    succeeded: bool,
    seconds: f64,
    seed: u64,
}

const SHARD_RECORDS: u32 = 1_000;
const LOOK_EVERY: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(600);

fn options() -> ClusterOptions {
    let variables = [
        ("SHARDCRON_WORKER_LOST_AFTER", "1500ms"),
        ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms"),
        ("SHARDCRON_SCHEDULER_LEASE_TTL", "2s"),
        ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "2s"),
    ];
    ClusterOptions { variables: variables.map(|(k, v)| (k, v.to_owned())).to_vec(), ..ClusterOptions::default() }
}

fn job(records: u32) -> String {
    format!(
        "[job.count]\nshards = {{ range = {{ from = 1, to = {records} }}, count = {} }}\nhandler = {{ rust = \"count\" }}\n\
         takeover = \"immediate\"\n\
         retry = {{ attempts = 1000, first = \"50ms\", factor = 1.0, max = \"50ms\", jitter = 0.0 }}\n",
        records.div_ceil(SHARD_RECORDS)
    )
}

/// Runs it. True: there were kills, every counter is 1, and no row of a record is left.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: EffectsArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    voice.note(&format!("seed {seed}"));
    let mut session = Session::open(args.services.clone(), options(), voice).await?;
    let run = load(&mut session, &args, seed).await;
    let closed = session.close(&[TIER]).await;
    let answer = run.with_context(|| format!("with seed {seed}"))?;
    closed?;
    if args.json {
        report::json(&answer)?;
    } else {
        print(&answer);
    }
    Ok(answer.succeeded && answer.kills > 0 && answer.wrong_counters == 0 && answer.dedup_rows_left == 0)
}

async fn load(session: &mut Session, args: &EffectsArgs, seed: u64) -> Result<Effects> {
    let mut random = StdRng::seed_from_u64(seed);
    session.voice.phase("making the counters");
    session
        .ledger
        .execute_script(&format!(
            "CREATE TABLE {COUNTERS} (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL) ENGINE=InnoDB"
        ))
        .await?;
    let rows = (1..=i64::from(args.records)).map(|id| vec![SqlArg::Int(id), SqlArg::Int(0)]).collect();
    session.ledger.insert_rows(COUNTERS, &["id", "n"], rows).await?;
    session.apply(&job(args.records)).await?;
    session.start(1, args.workers as usize).await?;
    let (execution, _) = session.fire("count").await?;
    session.voice.phase("killing workers");
    let began = Instant::now();
    let every = Duration::from_millis(args.every_ms);
    let (mut next_kill, mut kills, mut peak) = (began + every, 0, 0);
    let row = loop {
        session.cluster.check()?;
        peak = peak.max(number(&session.ledger, "SELECT COUNT(*) FROM once_records").await?);
        let row = session.ledger.execution(execution).await?.context("the execution is not in the ledger")?;
        if row.phase.is_terminal() {
            break row;
        }
        if began.elapsed() > PATIENCE {
            bail!("not done within {} s: {} of {} shards", PATIENCE.as_secs(), row.succeeded, row.shards_total);
        }
        if Instant::now() >= next_kill {
            let workers = session.cluster.names(Role::Worker);
            let victim = workers.get(random.random_range(0..workers.len().max(1))).context("no worker runs")?;
            session.cluster.kill(victim)?;
            session.cluster.start(Role::Worker)?;
            kills += 1;
            next_kill = Instant::now() + every;
            session
                .voice
                .phase(&format!("{kills} workers killed, {} of {} shards done", row.succeeded, row.shards_total));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let seconds = began.elapsed().as_secs_f64();
    let right = number(&session.ledger, &format!("SELECT COUNT(*) FROM {COUNTERS} WHERE n = 1")).await?;
    let attempts = "SELECT COUNT(*) FROM attempts WHERE outcome IN ('worker_lost', 'taken_over')";
    Ok(Effects {
        records: args.records.into(),
        kills,
        wrong_counters: u64::from(args.records).abs_diff(right),
        dedup_rows_left: number(&session.ledger, "SELECT COUNT(*) FROM once_records").await?,
        dedup_rows_peak: peak,
        taken_over: number(&session.ledger, attempts).await?,
        succeeded: row.succeeded == row.shards_total,
        seconds: (seconds * 10.0).round() / 10.0,
        seed,
    })
}

async fn number(ledger: &SqlLedger, sql: &str) -> Result<u64> {
    match ledger.query(sql, &[]).await?.first().and_then(|row| row.first()) {
        Some(SqlArg::Int(n)) => Ok(u64::try_from(*n).unwrap_or(0)),
        other => bail!("{sql}: {other:?}"),
    }
}

fn print(answer: &Effects) {
    println!(
        "{} records in {:.1} s, {} workers killed (seed {})",
        answer.records, answer.seconds, answer.kills, answer.seed
    );
    println!("  {} shards taken over from the dead", answer.taken_over);
    println!("  {} counters are not 1", answer.wrong_counters);
    println!("  rows of records: at most {}, {} left", answer.dedup_rows_peak, answer.dedup_rows_left);
}
