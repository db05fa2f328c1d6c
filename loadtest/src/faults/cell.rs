//! One cell: a cluster under load, the fault in the middle of it, the heal, the quiet, the count.

use super::inject::{self, Injected};
use super::links::Links;
use super::load::{self, Load};
use super::matrix::{Cell, Fault, Part, Rule, Timings};
use super::measure;
use crate::cluster::ClusterOptions;
use crate::handlers::ENDS_FILE;
use crate::oracle::firings::Due;
use crate::oracle::{self, rows_of};
use crate::services::ServiceArgs;
use crate::session::{Session, Voice, now_ms};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Schedulers of each cluster.
pub const SCHEDULERS: usize = 2;
/// Workers of each cluster.
pub const WORKERS: usize = 3;
const WARM_PATIENCE: Duration = Duration::from_secs(60);
/// What is left of the load after the heal, so that it is seen to go on.
const AFTERWARDS_MS: i64 = 3_000;
/// After the heal, all that is due must have been decided within this time beyond the bound, and everything must end within it again;
/// else it is missed, or lost.
const QUIET_PATIENCE: Duration = Duration::from_secs(40);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What the oracle counted over a whole ledger.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Executions.
    pub executions: u64,
    /// Shards that must have a result.
    pub shards: u64,
    /// Instants and requests that had to fire.
    pub firings: u64,
    /// Shards and effects without a record.
    pub lost: u64,
    /// Shards and effects with more than one.
    pub recorded_twice: u64,
    /// F2.
    pub firings_missed: u64,
    /// F1.
    pub firings_doubled: u64,
    /// Shards taken over from lost workers.
    pub taken_over: u64,
    /// What is wrong, in words: which shard, which instant.
    pub problems: Vec<String>,
}

/// What a cell came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Which.
    pub cell: Cell,
    /// What it promises.
    pub rule: Rule,
    /// The time to recover; `None`: it did not.
    pub recovered: Option<Duration>,
    /// How late the latest firing was that came after the fault.
    pub latest_firing: Duration,
    /// From the heal until everything had ended.
    pub quiet: Duration,
    /// What the oracle counted.
    pub tally: Tally,
    /// Late ends of a woken worker that the ledger holds nothing of.
    pub late_ends_refused: u64,
    /// What is wrong, in words. Empty: the cell is green.
    pub problems: Vec<String>,
    /// Where the logs are, if something is wrong.
    pub logs: Option<PathBuf>,
}

impl Outcome {
    /// Nothing yet.
    pub fn new(cell: Cell, rule: Rule) -> Self {
        Outcome {
            cell,
            rule,
            recovered: None,
            latest_firing: Duration::ZERO,
            quiet: Duration::ZERO,
            tally: Tally::default(),
            late_ends_refused: 0,
            problems: Vec::new(),
            logs: None,
        }
    }

    /// Green.
    pub fn ok(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Runs it once. Faults of the set-up are problems of the outcome, too.
pub async fn run(cell: Cell, timings: Timings, mut services: ServiceArgs) -> Outcome {
    let mut outcome = Outcome::new(cell, cell.rule(timings));
    if cell.owns_service() {
        match cell.part {
            Part::RabbitMq => services.amqp_url = None,
            Part::Redis => services.redis_url = None,
            Part::MySql => services.sql_url = None,
            Part::Leader | Part::Worker => {}
        }
    }
    let mut session = match Session::open(services, options(timings), Voice::silent()).await {
        Ok(session) => session,
        Err(e) => {
            outcome.problems.push(format!("{e:#}"));
            return outcome;
        }
    };
    if let Err(e) = play(&mut session, &mut outcome).await {
        outcome.problems.push(format!("{e:#}"));
    }
    if !outcome.ok() {
        outcome.logs = Some(session.cluster.keep_folder());
    }
    if let Err(e) = session.close(&load::TIERS).await {
        outcome.problems.push(format!("cleaning up: {e:#}"));
    }
    outcome
}

/// What the processes are told: nothing beyond the defaults but their addresses, unless the run has to be short.
pub fn options(timings: Timings) -> ClusterOptions {
    let mut variables = Vec::new();
    if !timings.defaults {
        let span = |d: Duration| format!("{}ms", d.as_millis());
        variables.extend([
            ("SHARDCRON_WORKER_LOST_AFTER", span(timings.lost_after)),
            ("SHARDCRON_SCHEDULER_LEASE_TTL", span(timings.lease_ttl)),
            ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms".into()),
            ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "1s".into()),
        ]);
    }
    ClusterOptions { tiers: "core=8,bulk=4".into(), variables }
}

async fn play(session: &mut Session, outcome: &mut Outcome) -> Result<()> {
    let (cell, rule) = (outcome.cell, outcome.rule);
    let links = wire(session)?;
    load::prepare(&session.ledger).await?;
    session.start(SCHEDULERS, WORKERS).await?;
    let forgetful = (cell.part, cell.fault) == (Part::RabbitMq, Fault::Wiped);
    let (amqp_url, prefix) = (session.services.amqp_url.clone(), session.services.prefix.clone());
    let load = Load::start(session.ledger.clone(), &amqp_url, &prefix, forgetful)?;
    let after_ms = warm(session).await?;

    let mut active = inject::strike(session, &links, cell).await?;
    active.last(session, &links, &rule).await?;
    active.heal(session, &links).await?;
    let injected = active.injected;

    let until_ms = now_ms() + AFTERWARDS_MS;
    decided_until(session, until_ms, rule.bound + QUIET_PATIENCE).await?;
    let due = load.finish(QUIET_PATIENCE, (after_ms, until_ms)).await?;
    load::pause(&session.ledger).await?;
    ended(session, QUIET_PATIENCE).await?;
    outcome.quiet = since(injected.back_ms);
    judge(session, outcome, &injected, &due).await
}

/// Lays the wires, and gives each worker a file for what its handlers have ended.
pub fn wire(session: &mut Session) -> Result<Links> {
    let links = Links::new(&session.services)?;
    let (laid, ends) = (links.clone(), ends_file(session));
    session.cluster.give_each(Box::new(move |name| {
        let mut variables = laid.join(name)?;
        variables.push((ENDS_FILE, ends.to_string_lossy().into_owned()));
        Ok(variables)
    }));
    Ok(links)
}

fn ends_file(session: &Session) -> PathBuf {
    session.cluster.folder().join("ends")
}

/// Until every job has run; gives the moment from which on every instant counts.
pub async fn warm(session: &mut Session) -> Result<i64> {
    let sql = "SELECT COUNT(DISTINCT e.job_id) FROM executions e WHERE e.succeeded > 0";
    let began = Instant::now();
    loop {
        session.cluster.check()?;
        let jobs = rows_of(&session.ledger, sql, &[]).await?;
        if jobs.first().is_some_and(|row| row == &["5"]) {
            return Ok(now_ms());
        }
        if began.elapsed() > WARM_PATIENCE {
            bail!("not every job ran within {} s of the start", WARM_PATIENCE.as_secs());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Until every schedule has been decided up to an instant, or patience is over: the oracle then says what is missing.
pub async fn decided_until(session: &mut Session, until_ms: i64, patience: Duration) -> Result<()> {
    let sql = "SELECT MIN(last), COUNT(*) FROM (SELECT MAX(nominal_ms) AS last FROM decisions \
               WHERE fire_key NOT LIKE 'request:%' GROUP BY job_id) d";
    let began = Instant::now();
    while began.elapsed() < patience {
        session.cluster.check()?;
        // The ledger may be the one that has just come back.
        if let Ok(rows) = rows_of(&session.ledger, sql, &[]).await {
            let last = rows.first().and_then(|row| row.first()?.parse::<i64>().ok());
            if last.is_some_and(|last| last >= until_ms) {
                return Ok(());
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

/// Until no execution is active, or patience is over.
pub async fn ended(session: &mut Session, patience: Duration) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < patience {
        session.cluster.check()?;
        let rows = rows_of(&session.ledger, "SELECT COUNT(*) FROM executions WHERE state = 0", &[]).await?;
        if rows.first().is_some_and(|row| row == &["0"]) {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn since(ms: i64) -> Duration {
    millis(now_ms() - ms)
}

fn millis(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Counts, measures, and says what is wrong.
async fn judge(session: &Session, outcome: &mut Outcome, injected: &Injected, due: &Due) -> Result<()> {
    let ledger = &session.ledger;
    outcome.tally = tally(session, due).await?;
    outcome.problems.extend(outcome.tally.problems.iter().cloned());
    outcome.latest_firing = millis(measure::latest_firing(ledger, injected.at_ms, due.until_ms).await?.unwrap_or(0));
    let recovered = measure::recovered(ledger, outcome.rule.measure, injected, due.until_ms).await?;
    outcome.recovered = recovered.map(millis);
    let zombie = (outcome.cell.part, outcome.cell.fault) == (Part::Worker, Fault::Frozen);
    if zombie {
        outcome.late_ends_refused = measure::refused(ledger, injected, &ends_file(session)).await?;
        // Handlers on threads of their own come to their end even where the woken worker fences itself first.
        if outcome.late_ends_refused == 0 {
            let why = "the woken worker came to no late end: the cell has not shown that one is refused";
            outcome.problems.push(why.into());
        }
    }
    if outcome.cell.part == Part::Worker && injected.held.is_empty() {
        outcome.problems.push("the worker had nothing in hand: the cell has shown nothing".into());
    }
    let bound = outcome.rule.bound;
    match outcome.recovered {
        Some(time) if time <= bound => {}
        Some(time) => outcome.problems.push(format!(
            "recovered after {:.2} s; the bound is {:.0} s",
            time.as_secs_f64(),
            bound.as_secs_f64()
        )),
        None => outcome.problems.push("it did not recover".into()),
    }
    Ok(())
}

/// Counts.
///
/// # Errors
/// The ledger does not answer.
pub async fn tally(session: &Session, due: &Due) -> Result<Tally> {
    let ledger = &session.ledger;
    let fired = "SELECT COUNT(*) FROM decisions WHERE execution_id IS NOT NULL";
    let fired = rows_of(ledger, fired, &[]).await?;
    let fired = fired.first().and_then(|row| row.first()?.parse().ok()).context("the count of firings")?;
    let count = oracle::count(ledger, fired).await?;
    let firings = oracle::firings::firings(ledger, due).await?;
    let effects = load::effects(ledger).await?;
    let mut tally = Tally {
        executions: count.executions,
        shards: count.shards,
        firings: firings.due,
        lost: count.lost + count.unended + effects.lost,
        recorded_twice: count.recorded_twice + effects.twice,
        firings_missed: firings.missed.len() as u64,
        firings_doubled: firings.doubled.len() as u64,
        taken_over: count.taken_over,
        problems: Vec::new(),
    };
    if !count.clean() {
        tally.problems.push(format!("{count:?}"));
        tally.problems.extend(oracle::open_ends(ledger).await?);
    }
    tally.problems.extend(effects.words);
    tally.problems.extend(firings.missed.into_iter().map(|what| format!("missed: {what}")));
    tally.problems.extend(firings.doubled.into_iter().map(|what| format!("doubled: {what}")));
    Ok(tally)
}
