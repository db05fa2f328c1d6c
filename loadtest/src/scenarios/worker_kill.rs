//! Workers die at random under load, without a word, and are replaced. Nothing may be lost or recorded twice by it.

use crate::cluster::{ClusterOptions, Role};
use crate::oracle;
use crate::report::{self, WorkerKill};
use crate::services::ServiceArgs;
use crate::session::{Session, TIER, Voice};
use anyhow::{Context, Result};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shardcron_store::Ledger;
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct WorkerKillArgs {
    /// How long to kill
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..=24 * 60))]
    minutes: Option<u64>,
    /// How long to kill, for short runs [default: 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=24 * 3_600))]
    seconds: Option<u64>,
    /// Worker processes at a time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Repeats the choice of victims and moments; chosen and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

const JOB: &str = "nap";
/// Many tries: a shard may meet death several times, and that must not be what fails it.
const JOB_FILE: &str = r#"
[job.nap]
shards  = { count = 1000 }
handler = { rust = "nap" }
overlap = "allow"
retry   = { attempts = 1000, first = "50ms", factor = 1.0, max = "50ms", jitter = 0.0 }
"#;
/// Executions under way at a time: there is always more work than hands.
const ACTIVE: usize = 3;
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Between two kills: shorter and longer than a worker's death takes to be noticed, so that both cases come.
const SOONEST_MS: u64 = 300;
const LATEST_MS: u64 = 3_000;

/// The liveness of a test: who is silent for a second and a half is lost.
fn options() -> ClusterOptions {
    let variables = [
        ("SHARDCRON_WORKER_LOST_AFTER", "1500ms"),
        ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms"),
        ("SHARDCRON_SCHEDULER_LEASE_TTL", "2s"),
        ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "2s"),
    ];
    ClusterOptions { variables: variables.map(|(k, v)| (k, v.to_owned())).to_vec(), ..ClusterOptions::default() }
}

/// Runs it. True: there were kills, and nothing was lost, recorded twice or failed.
///
/// # Errors
/// Something did not start or did not answer.
pub async fn run(args: WorkerKillArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    voice.note(&format!("seed {seed}"));
    let seconds = args.minutes.map(|m| m * 60).or(args.seconds).unwrap_or(60);
    let mut session = Session::open(args.services, options(), voice).await?;
    let run = load(&mut session, Duration::from_secs(seconds), (args.workers, seed)).await;
    let closed = session.close(&[TIER]).await;
    let (answer, clean) = run.with_context(|| format!("with seed {seed}"))?;
    closed?;
    if args.json {
        report::json(&answer)?;
    } else {
        answer.print();
    }
    Ok(clean && answer.kills > 0)
}

async fn load(session: &mut Session, time: Duration, (workers, seed): (u32, u64)) -> Result<(WorkerKill, bool)> {
    let mut random = StdRng::seed_from_u64(seed);
    session.apply(JOB_FILE).await?;
    session.start(1, workers as usize).await?;
    session.voice.phase("killing workers");
    let began = Instant::now();
    let (mut kills, mut fired) = (0, 0);
    let mut next_kill = began + pause(&mut random);
    while began.elapsed() < time {
        session.cluster.check()?;
        // What was sent and is not yet in the ledger is at most one look's worth.
        let active = session.ledger.active_executions().await?.len();
        for _ in active..ACTIVE {
            session.fire(JOB).await?;
            fired += 1;
        }
        if Instant::now() >= next_kill {
            kill_one(session, &mut random)?;
            kills += 1;
            next_kill = Instant::now() + pause(&mut random);
            session.voice.phase(&format!("killing workers: {kills} so far, {fired} executions"));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    session.voice.phase("letting the rest end");
    session.settle().await?;
    let seconds = began.elapsed().as_secs_f64();
    let count = oracle::count(&session.ledger, fired).await?;
    let answer = WorkerKill {
        kills,
        taken_over: count.taken_over,
        lost: count.lost,
        recorded_twice: count.recorded_twice,
        failed: count.failed,
        seconds: (seconds * 10.0).round() / 10.0,
        executions: count.executions,
        shards: count.shards,
        seed,
    };
    Ok((answer, count.clean()))
}

fn pause(random: &mut StdRng) -> Duration {
    Duration::from_millis(random.random_range(SOONEST_MS..=LATEST_MS))
}

/// Its replacement starts at once: the dead one's shards are taken over from it, not by its coming back.
fn kill_one(session: &mut Session, random: &mut StdRng) -> Result<()> {
    let workers = session.cluster.names(Role::Worker);
    let victim = workers.get(random.random_range(0..workers.len().max(1))).context("no worker runs")?;
    session.cluster.kill(victim)?;
    session.cluster.start(Role::Worker)?;
    Ok(())
}
