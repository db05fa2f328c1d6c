//! The flights of New York by their carriers: two of sixteen hold nine tenths of the unmatched flights, and so nine tenths of the
//! work. The first run has a shard for each carrier. The next ones are cut by the durations of the run before: small carriers
//! together, large ones in parts by the flights' ids.

use crate::cluster::ClusterOptions;
use crate::report;
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_store::SqlArg;

/// What can be said.
#[derive(Args)]
pub struct SkewArgs {
    /// How often the job runs; each run after the first is cut by the durations of the one before
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=20))]
    runs: u32,
    /// Attempts at the same time: more than the machine has processors makes all durations longer, and less alike
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    concurrency: u32,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

const JOB: &str = "flights-by-carrier";
/// The work is in what is found: each unmatched flight gets a seal that takes some tenths of a millisecond to compute, as a call
/// to another service would.
const JOB_FILE: &str = r#"
[job.flights-by-carrier]
timeout = "10m"

[job.flights-by-carrier.shards]
list    = ["9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV"]
count   = 16
balance = "last"
split   = true

[job.flights-by-carrier.handler]
sql = """
INSERT INTO skew_unmatched (flight_id, carrier, seal)
SELECT f.id, f.carrier, SHA2(REPEAT(CONCAT(f.tailnum, f.id), 16000), 512)
FROM JSON_TABLE(:items, '$[*]' COLUMNS (carrier VARCHAR(8) PATH '$')) c
JOIN skew_flights f ON f.carrier = CONVERT(c.carrier USING utf8mb4) COLLATE utf8mb4_bin
LEFT JOIN demo_planes p ON p.tailnum = f.tailnum
WHERE f.id % :item_parts = :item_part AND p.tailnum IS NULL
"""
"#;
const TABLES: &str = "
DROP TABLE IF EXISTS skew_flights;
DROP TABLE IF EXISTS skew_unmatched;
CREATE TABLE skew_flights (id BIGINT NOT NULL PRIMARY KEY, carrier VARCHAR(8) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    tailnum VARCHAR(16) NOT NULL, KEY skew_flights_carrier (carrier));
CREATE TABLE skew_unmatched (flight_id BIGINT NOT NULL, carrier VARCHAR(8) NOT NULL, seal CHAR(128) NOT NULL);
INSERT INTO skew_flights (id, carrier, tailnum) SELECT id, carrier, tailnum FROM demo_flights;
";
/// The published answer of the data set.
const UNMATCHED: i64 = 52_606;
/// What an even run is held to.
const EVEN: f64 = 1.5;

/// What it found, by run.
#[derive(Debug, Default, Serialize)]
pub struct Skew {
    /// The longest shard's duration over the mean of all.
    pub longest_over_mean: Vec<f64>,
    /// From the fire to the end, in seconds.
    pub seconds: Vec<f64>,
    /// Shards.
    pub shards: Vec<u64>,
    /// Unmatched flights that were found.
    pub unmatched: Vec<i64>,
    /// Flights that were found twice.
    pub twice: Vec<i64>,
    /// Milliseconds of each shard, in their order.
    pub took_ms: Vec<Vec<f64>>,
}

/// Runs it. True: each run found exactly what there is, and each after the first was even.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: SkewArgs) -> Result<bool> {
    let options = ClusterOptions { tiers: format!("core={}", args.concurrency), ..ClusterOptions::default() };
    let mut session = Session::open(args.services, options, Voice::new(args.json)).await?;
    let measured = measure(&mut session, args.runs).await;
    let closed = session.close(&[TIER]).await;
    let found = measured?;
    closed?;
    if args.json {
        report::json(&found)?;
    } else {
        found.print();
    }
    let exact = found.unmatched.iter().all(|n| *n == UNMATCHED) && found.twice.iter().all(|n| *n == 0);
    Ok(exact && found.longest_over_mean.iter().skip(1).all(|ratio| *ratio <= EVEN))
}

async fn measure(session: &mut Session, runs: u32) -> Result<Skew> {
    session.voice.phase("loading the flights");
    shardcron::load_example(&session.ledger).await?;
    session.ledger.execute_script(TABLES).await.context("the tables of this scenario")?;
    session.apply(JOB_FILE).await?;
    session.start(1, 1).await?;
    let mut found = Skew::default();
    for run in 1..=runs {
        session.ledger.execute_script("DELETE FROM skew_unmatched").await?;
        session.voice.phase(&format!("run {run} of {runs}"));
        let (execution, _) = session.fire(JOB).await?;
        let row = session.watch(execution, &format!("run {run} of {runs}")).await?;
        ensure!(row.phase == Phase::Success, "run {run} ended as {}", row.phase.word());
        let took = durations(session, execution).await?;
        let mean = took.iter().sum::<f64>() / took.len().max(1) as f64;
        let longest = took.iter().copied().fold(0.0, f64::max);
        found.longest_over_mean.push(round(longest / mean.max(1.0), 2));
        found.took_ms.push(took);
        found.seconds.push(round((row.ended_ms.unwrap_or(row.fired_ms) - row.fired_ms) as f64 / 1_000.0, 1));
        found.shards.push(row.shards_total.into());
        let count = |what: &'static str| number(session, what);
        let all = count("SELECT COUNT(*) FROM skew_unmatched").await?;
        let distinct = count("SELECT COUNT(DISTINCT flight_id) FROM skew_unmatched").await?;
        found.unmatched.push(distinct);
        found.twice.push(all - distinct);
    }
    Ok(found)
}

/// Milliseconds of each shard's attempt that ended well.
async fn durations(session: &Session, execution: ExecutionId) -> Result<Vec<f64>> {
    let hex = execution.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let sql = format!("SELECT ended_ms - started_ms FROM results WHERE execution_id = x'{hex}' ORDER BY shard_index");
    let rows = session.ledger.query(&sql, &[]).await?;
    rows.into_iter()
        .map(|row| match row.first() {
            Some(SqlArg::Int(ms)) => Ok(*ms as f64),
            other => anyhow::bail!("a duration is {other:?}"),
        })
        .collect()
}

async fn number(session: &Session, sql: &str) -> Result<i64> {
    match session.ledger.query(sql, &[]).await?.first().and_then(|row| row.first().cloned()) {
        Some(SqlArg::Int(n)) => Ok(n),
        other => anyhow::bail!("{sql} gave {other:?}"),
    }
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

impl Skew {
    fn print(&self) {
        println!("run   shards   longest / mean   seconds   unmatched flights   twice");
        for (run, ratio) in self.longest_over_mean.iter().enumerate() {
            println!(
                "{:>3}   {:>6}   {ratio:>14.2}   {:>7.1}   {:>17}   {:>5}",
                run + 1,
                self.shards[run],
                self.seconds[run],
                self.unmatched[run],
                self.twice[run]
            );
        }
        println!("even: {EVEN} or less; the published answer: {UNMATCHED} unmatched flights");
    }
}
