//! Random faults of the matrix, one after another, for long: the same counts, and nothing grows.

use super::cell::{self, SCHEDULERS, Tally, WORKERS};
use super::inject;
use super::links::Links;
use super::load::{self, Load};
use super::matrix::{Cell, Timings};
use super::resources::{Report, Resources};
use crate::services::ServiceArgs;
use crate::session::{Session, Voice, now_ms};
use anyhow::{Context, Result};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
#[command(after_help = "Example:\n  loadtest soak --minutes 30 --json --seed 7\n\n\
    Exit code 0 only if nothing was lost, doubled or missed, and nothing grew.")]
pub struct SoakArgs {
    /// How long to put faults on it
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=24 * 60))]
    minutes: u64,
    /// Repeats the choice of faults; chosen and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

/// From the beginning of a fault to that of the next.
const EVERY: Duration = Duration::from_secs(10);
/// What is left at least from a heal to the next fault: a service that takes long to start moves the next fault.
const CALM: Duration = Duration::from_secs(3);
/// At the end, everything must be decided and must end within this time.
const QUIET_PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What it came to.
#[derive(Debug, Serialize)]
struct Answer {
    minutes: u64,
    seed: u64,
    faults: u64,
    faults_by_kind: BTreeMap<String, u64>,
    executions: u64,
    shards: u64,
    firings: u64,
    lost: u64,
    recorded_twice: u64,
    firings_missed: u64,
    firings_doubled: u64,
    taken_over: u64,
    flat: bool,
    resources: Report,
    problems: Vec<String>,
    ok: bool,
}

/// Runs it. True: there were faults, and everything held.
///
/// # Errors
/// Something did not start, did not answer, or ended by itself.
pub async fn run(args: SoakArgs) -> Result<bool> {
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let voice = Voice::new(args.json);
    voice.note(&format!("seed {seed}"));
    let mut session = Session::open(ServiceArgs::default(), cell::options(Timings::SOAK), voice).await?;
    let mut soak =
        Soak { random: StdRng::seed_from_u64(seed), faults: BTreeMap::new(), resources: Resources::default() };
    let result = soak.run(&mut session, Duration::from_secs(args.minutes * 60)).await;
    let ok = result.as_ref().is_ok_and(|tally| tally.problems.is_empty()) && soak.resources.report().flat;
    if !ok {
        let logs = session.cluster.keep_folder();
        session.voice.note(&format!("the logs of the processes are in {}", logs.display()));
    }
    let closed = session.close(&load::TIERS).await;
    let tally = result.with_context(|| format!("with seed {seed}"))?;
    closed?;
    let answer = answer(&args, seed, soak, tally);
    if args.json {
        crate::report::json(&answer)?;
    } else {
        print(&answer);
    }
    Ok(answer.ok)
}

struct Soak {
    random: StdRng,
    faults: BTreeMap<String, u64>,
    resources: Resources,
}

impl Soak {
    async fn run(&mut self, session: &mut Session, time: Duration) -> Result<Tally> {
        let links = cell::wire(session)?;
        load::prepare(&session.ledger).await?;
        session.start(SCHEDULERS, WORKERS).await?;
        let (amqp_url, prefix) = (session.services.amqp_url.clone(), session.services.prefix.clone());
        // RabbitMQ's data is among what is lost, so a request is repeated until it is decided.
        let load = Load::start(session.ledger.clone(), &amqp_url, &prefix, true)?;
        let after_ms = cell::warm(session).await?;
        session.voice.phase("putting faults on it");
        let began = Instant::now();
        while began.elapsed() < time {
            self.fault(session, &links).await?;
        }
        session.voice.phase("letting the rest end");
        let until_ms = now_ms() + 3_000;
        cell::decided_until(session, until_ms, QUIET_PATIENCE).await?;
        let due = load.finish(QUIET_PATIENCE, (after_ms, until_ms)).await?;
        load::pause(&session.ledger).await?;
        cell::ended(session, QUIET_PATIENCE).await?;
        cell::tally(session, &due).await
    }

    /// One fault, its heal, the calm after it, and a sample at the end of the calm.
    async fn fault(&mut self, session: &mut Session, links: &Links) -> Result<()> {
        let began = Instant::now();
        let cells = Cell::all();
        let cell = cells.get(self.random.random_range(0..cells.len())).context("the matrix is empty")?;
        session.voice.phase(&format!("fault {}: {cell}", self.faults.values().sum::<u64>() + 1));
        let rule = cell.rule(Timings::SOAK);
        let mut active = inject::strike(session, links, *cell).await.with_context(|| format!("putting on {cell}"))?;
        *self.faults.entry(cell.to_string()).or_default() += 1;
        active.last(session, links, &rule).await.with_context(|| format!("under {cell}"))?;
        active.heal(session, links).await.with_context(|| format!("taking off {cell}"))?;
        let until = (Instant::now() + CALM).max(began + EVERY);
        while Instant::now() < until {
            session.cluster.check().with_context(|| format!("after {cell}"))?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.resources.sample(session).await.with_context(|| format!("after {cell}"))
    }
}

fn answer(args: &SoakArgs, seed: u64, soak: Soak, tally: Tally) -> Answer {
    let resources = soak.resources.report();
    let faults = soak.faults.values().sum();
    Answer {
        minutes: args.minutes,
        seed,
        faults,
        faults_by_kind: soak.faults,
        executions: tally.executions,
        shards: tally.shards,
        firings: tally.firings,
        lost: tally.lost,
        recorded_twice: tally.recorded_twice,
        firings_missed: tally.firings_missed,
        firings_doubled: tally.firings_doubled,
        taken_over: tally.taken_over,
        flat: resources.flat,
        ok: tally.problems.is_empty() && resources.flat && faults > 0,
        resources,
        problems: tally.problems,
    }
}

fn print(answer: &Answer) {
    println!("{} faults in {} minutes (seed {})", answer.faults, answer.minutes, answer.seed);
    for (kind, count) in &answer.faults_by_kind {
        println!("  {kind:<20}{count:>5}");
    }
    println!("{} executions, {} shards, {} taken over", answer.executions, answer.shards, answer.taken_over);
    println!(
        "lost {}, recorded twice {}, firings missed {} and doubled {} of {}",
        answer.lost, answer.recorded_twice, answer.firings_missed, answer.firings_doubled, answer.firings
    );
    println!("{} process lives judged; everything flat: {}", answer.resources.lives_judged, answer.flat);
    for (name, said) in &answer.resources.services {
        println!("  {name:<22}{}", said.words());
    }
    for (name, life) in &answer.resources.processes {
        println!("  {name:<14}memory, MiB {}", life.rss_mib.words());
        println!("  {:<14}handles     {}", "", life.handles.words());
        println!("  {:<14}threads     {}", "", life.threads.words());
    }
    for problem in &answer.problems {
        println!("{problem}");
    }
}
