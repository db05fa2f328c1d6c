//! A job of very many tiny shards, each in a message of its own and then as the dispatcher sends them, with small jobs beside it: what
//! grouping is worth, and that nobody waits longer for it.

use crate::cluster::ClusterOptions;
use crate::oracle;
use crate::report::{self, Percentiles};
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::limits::SHARDS_MAX;
use shardcron_store::{ExecutionRow, Ledger};
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct GroupsArgs {
    /// Shards of the large execution
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1_000..=i64::from(SHARDS_MAX)))]
    shards: u32,
    /// Worker processes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// Small jobs are fired this often. A prime, so that it keeps no step with anybody's interval.
const EVERY: Duration = Duration::from_millis(211);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// An execution that has not moved for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// What grouping may add to the wait of a small job: a quarter, and what a busy machine adds to anything.
const WORSE_BY: (f64, f64) = (1.25, 50.0);

/// What was found.
#[derive(Debug, Serialize)]
struct Groups {
    shards: u64,
    /// Each shard in a message of its own (`group = 1`).
    singly: Way,
    /// As many in a message as the dispatcher finds right.
    grouped: Way,
    lost: u64,
    recorded_twice: u64,
    failed: u64,
}

#[derive(Debug, Serialize)]
struct Way {
    shards_per_second: f64,
    /// From the firing of a job of ten shards beside the large one to its recorded end.
    small_job_ms: Percentiles,
    small_jobs: u64,
    longest_ms: i64,
    seconds: f64,
}

fn jobs(shards: u32) -> String {
    let job = |name: &str, shards: &str| {
        format!("[job.{name}]\nshards = {{ {shards} }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n")
    };
    [
        job("singly", &format!("count = {shards}, group = 1")),
        job("grouped", &format!("count = {shards}")),
        job("small", "count = 10"),
    ]
    .concat()
}

/// Runs it. True: nothing was lost or recorded twice, and small jobs did not wait notably longer beside groups.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: GroupsArgs) -> Result<bool> {
    let mut session = Session::open(args.services, ClusterOptions::default(), Voice::new(args.json)).await?;
    let measured = measure(&mut session, args.shards, args.workers as usize).await;
    let closed = session.close(&[TIER]).await;
    let answer = measured?;
    closed?;
    if args.json {
        report::json(&answer)?;
    } else {
        answer.print();
    }
    let most = answer.singly.small_job_ms.p99 * WORSE_BY.0 + WORSE_BY.1;
    Ok((answer.lost, answer.recorded_twice, answer.failed) == (0, 0, 0) && answer.grouped.small_job_ms.p99 <= most)
}

async fn measure(session: &mut Session, shards: u32, workers: usize) -> Result<Groups> {
    session.apply(&jobs(shards)).await?;
    session.start(1, workers).await?;
    // Queues are declared, connections opened, heads read, prefetches found.
    for _ in 0..20 {
        session.send("small").await?;
        tokio::time::sleep(EVERY / 4).await;
    }
    session.settle().await?;
    let singly = way(session, "singly").await?;
    session.settle().await?;
    let grouped = way(session, "grouped").await?;
    session.settle().await?;
    session.voice.phase("counting");
    let executions = 20 + 2 + singly.small_jobs + grouped.small_jobs;
    let count = oracle::count(&session.ledger, executions).await?;
    Ok(Groups {
        shards: shards.into(),
        singly,
        grouped,
        lost: count.lost,
        recorded_twice: count.recorded_twice,
        failed: count.failed,
    })
}

async fn way(session: &mut Session, job: &str) -> Result<Way> {
    let (large, _) = session.fire(job).await?;
    session.voice.phase(&format!("running {job}, and small jobs beside it"));
    let mut small: Vec<String> = Vec::new();
    let (mut next, mut last, mut moved) = (Instant::now() + EVERY, 0, Instant::now());
    let row = loop {
        let row = session.ledger.execution(large).await?.context("the execution is not in the ledger")?;
        if row.phase.is_terminal() {
            break row;
        }
        if row.succeeded != last {
            (last, moved) = (row.succeeded, Instant::now());
        }
        if moved.elapsed() > STUCK_AFTER {
            bail!("{job} stands still at {} of {} shards", row.succeeded, row.shards_total);
        }
        session.cluster.check()?;
        if Instant::now() >= next {
            small.push(session.send("small").await?);
            next += EVERY;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    if row.phase != Phase::Success {
        bail!("{job} ended as {}", row.phase.word());
    }
    let id = session.job("small").await?;
    session.settle().await?;
    let mut waits = Vec::new();
    for request in &small {
        let key = shardcron_domain::firing::request_key(request);
        let decision = session.ledger.decision(id, &key).await?.context("a small job was not decided")?;
        let execution: ExecutionId = decision.execution.context("a small job did not fire")?;
        let row = session.ledger.execution(execution).await?.context("a small execution is not in the ledger")?;
        waits.push(milliseconds(&row)?);
    }
    let seconds = milliseconds(&row)? as f64 / 1_000.0;
    Ok(Way {
        shards_per_second: (f64::from(row.succeeded) / seconds.max(0.001)).round(),
        small_jobs: waits.len() as u64,
        longest_ms: waits.iter().max().copied().unwrap_or(0),
        small_job_ms: Percentiles::of(waits),
        seconds,
    })
}

fn milliseconds(row: &ExecutionRow) -> Result<i64> {
    Ok(row.ended_ms.context("an execution did not end")? - row.fired_ms)
}

impl Groups {
    fn print(&self) {
        println!("{} tiny shards of one execution", self.shards);
        println!("           shards/s   small jobs   from fire to end, ms: p50      p99      max");
        for (name, way) in [("singly", &self.singly), ("grouped", &self.grouped)] {
            let ms = &way.small_job_ms;
            println!(
                "{name:<8}{:>11.0}{:>13}{:>29.0}{:>9.0}{:>9}",
                way.shards_per_second, way.small_jobs, ms.p50, ms.p99, way.longest_ms
            );
        }
        println!("lost {}, recorded twice {}, failed {}", self.lost, self.recorded_twice, self.failed);
    }
}
