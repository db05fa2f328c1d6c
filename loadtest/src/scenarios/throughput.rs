//! How many durable no-op shards per second go through the whole, and what bounds it.

use crate::cluster::{self, ClusterOptions};
use crate::report::{self, Machine, Percentiles, Throughput};
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use crate::{ceilings, oracle, procfs};
use anyhow::{Context, Result};
use clap::Args;
use shardcron_broker::Broker;
use shardcron_domain::limits::SHARDS_MAX;
use shardcron_store::{ExecutionRow, Ledger};
use std::collections::BTreeMap;
use std::time::Duration;

/// What can be said.
#[derive(Args)]
pub struct ThroughputArgs {
    /// Shards of the execution
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(SHARDS_MAX)))]
    shards: u32,
    /// Worker processes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Firings from which the latency is taken
    #[arg(long, default_value_t = 200)]
    samples: u32,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

const BIG: &str = "throughput";
const SMALL: &str = "latency";
/// Firings before those that are measured: queues are declared, connections opened, heads read.
const WARM_UP: u32 = 20;
const WARM_UP_JOB: &str = "warm-up";
/// Between two firings for the latency. A prime, so that it keeps no step with anybody's interval.
const PAUSE: Duration = Duration::from_millis(47);
/// What the ceilings are measured with, at most.
const CEILING_MESSAGES: u32 = 60_000;
const CEILING_SHARDS: u32 = 40_000;

fn jobs(shards: u32) -> String {
    let job = |name: &str, count: u32| {
        format!("[job.{name}]\nshards = {{ count = {count} }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n")
    };
    [job(BIG, shards), job(SMALL, 1), job(WARM_UP_JOB, 1)].concat()
}

/// Runs it. True: nothing was lost, recorded twice or failed.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: ThroughputArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let mut session = Session::open(args.services, ClusterOptions::default(), voice).await?;
    let measured = measure(&mut session, args.shards, (args.workers, args.samples)).await;
    let closed = session.close(&[TIER]).await;
    let (answer, clean) = measured?;
    closed?;
    if args.json {
        report::json(&answer)?;
    } else {
        answer.print();
    }
    Ok(clean)
}

async fn measure(session: &mut Session, shards: u32, (workers, samples): (u32, u32)) -> Result<(Throughput, bool)> {
    session.voice.phase("measuring RabbitMQ alone");
    let queue = format!("{}.ceiling", session.services.prefix);
    let messages = shards.min(CEILING_MESSAGES);
    let broker_ceiling = ceilings::broker::measure(&session.services.amqp_url, &queue, messages).await?;
    session.voice.phase("measuring the database alone");
    let ledger_ceiling = ceilings::ledger::measure(&session.services.sql_url, shards.min(CEILING_SHARDS)).await?;

    session.apply(&jobs(shards)).await?;
    session.start(1, workers as usize).await?;
    trickle(session, samples).await?;

    let before = cluster::cpu(&session.pids());
    let (execution, fire_seconds) = session.fire(BIG).await?;
    let row = session.watch(execution, "running no-op shards").await?;
    let after = cluster::cpu(&session.pids());
    let rss_mib = cluster::memory(&session.pids());
    session.voice.phase("counting");
    let count = oracle::count(&session.ledger, u64::from(WARM_UP + samples) + 1).await?;
    let waits = oracle::fire_to_start_ms(&session.ledger, SMALL).await?;

    let seconds = seconds_of(&row);
    let cpu_us_per_shard = per_shard(&before, &after, shards);
    let rate = round(if seconds > 0.0 { f64::from(row.succeeded) / seconds } else { 0.0 }, 0);
    let answer = Throughput {
        shards: shards.into(),
        workers: workers.into(),
        seconds,
        shards_per_second: rate,
        broker_ceiling_per_second: round(broker_ceiling, 0),
        ledger_ceiling_per_second: round(ledger_ceiling, 0),
        broker_ratio: round(rate / broker_ceiling, 3),
        ledger_ratio: round(rate / ledger_ceiling, 3),
        fire_ms: round(fire_seconds * 1_000.0, 1),
        fire_to_start_samples: waits.len() as u64,
        fire_to_start_ms: Percentiles::of(waits),
        cpu_bound_per_second: cpu_bound(&cpu_us_per_shard, session.services.all_ours()),
        cpu_us_per_shard,
        rss_mib,
        lost: count.lost,
        recorded_twice: count.recorded_twice,
        failed: count.failed,
        machine: machine(session).await?,
    };
    Ok((answer, count.clean()))
}

/// Single shards at a low rate, for the latency.
async fn trickle(session: &mut Session, samples: u32) -> Result<()> {
    session.voice.phase("firing single shards at a low rate");
    for n in 0..WARM_UP + samples {
        session.send(if n < WARM_UP { WARM_UP_JOB } else { SMALL }).await?;
        tokio::time::sleep(PAUSE).await;
    }
    session.settle().await
}

fn seconds_of(row: &ExecutionRow) -> f64 {
    row.ended_ms.map_or(0.0, |ended| (ended - row.fired_ms) as f64 / 1_000.0)
}

fn per_shard(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>, shards: u32) -> BTreeMap<String, f64> {
    let spent = |part: &String, seconds: &f64| seconds - before.get(part).copied().unwrap_or(0.0);
    after.iter().map(|(part, s)| (part.clone(), round(spent(part, s) * 1e6 / f64::from(shards), 1))).collect()
}

/// Every processor busy with nothing but this.
fn cpu_bound(cpu_us_per_shard: &BTreeMap<String, f64>, all_known: bool) -> Option<f64> {
    let us: f64 = cpu_us_per_shard.values().sum();
    (all_known && us > 0.0).then(|| round(procfs::processors() as f64 * 1e6 / us, 0))
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

async fn machine(session: &Session) -> Result<Machine> {
    Ok(Machine {
        processors: procfs::processors() as u64,
        broker: session.broker.server_version().await.context("RabbitMQ's version")?,
        ledger: session.ledger.server_version().await.context("the database's version")?,
        optimised: !cfg!(debug_assertions),
    })
}
