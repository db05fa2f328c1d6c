//! `shardcron jobs …`

use super::{Misuse, connect_migrated, connect_to_look, now_ms, who};
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use anyhow::{Context, Result};
use clap::Subcommand;
use serde_json::json;
use shardcron_domain::JobSpec;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::units::{parse_instant, rfc3339};
use shardcron_store::ApplyOutcome;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum JobsCommand {
    /// Create or update the jobs of a file
    Apply {
        /// The job file
        file: PathBuf,
    },
    /// Check a file without applying it
    Validate {
        /// The job file
        file: PathBuf,
    },
    /// List jobs
    List,
    /// Show one job
    Show {
        /// Its name
        job: String,
    },
    /// Show the coming instants of a file's jobs; needs no service
    Next {
        /// The job file
        file: PathBuf,
        /// Strictly after this instant (RFC 3339); now if absent
        #[arg(long)]
        from: Option<String>,
        /// How many
        #[arg(long, default_value_t = 5)]
        count: usize,
    },
    /// Stop a job, a tier or everything from firing by itself
    #[command(
        after_help = "Examples:\n  shardcron jobs pause settle\n  shardcron jobs pause --tier bulk\n  shardcron jobs pause --all\n\nEach instant that passes is recorded as skipped, with who paused. A pause of all or of a tier leaves the jobs' own pauses as they are."
    )]
    Pause(super::pause::PauseArgs),
    /// Let a job, a tier or everything fire by itself again
    Resume(super::pause::PauseArgs),
}

/// Runs one.
pub async fn run(command: JobsCommand, config: Config, out: Out) -> Result<ExitCode> {
    match command {
        JobsCommand::Apply { file } => apply(&file, &config, out).await,
        JobsCommand::Validate { file } => validate(&file, out),
        JobsCommand::List => list(&config, out).await,
        JobsCommand::Show { job } => show(&job, &config, out).await,
        JobsCommand::Next { file, from, count } => next(&file, from.as_deref(), count, out),
        JobsCommand::Pause(args) => super::pause::run(args, true, &config, out).await,
        JobsCommand::Resume(args) => super::pause::run(args, false, &config, out).await,
    }
}

/// Reads a job file; its faults are misuse, with the file's name before the line.
pub fn read(file: &Path) -> Result<Vec<JobSpec>> {
    let text = std::fs::read_to_string(file).map_err(|e| Misuse(format!("{} can't be read: {e}", file.display())))?;
    shardcron_domain::jobfile::parse(&text).map_err(|e| Misuse(format!("{}, {e}", file.display())).into())
}

/// The jobs with the next instant that each schedule has from now.
pub fn with_next(jobs: Vec<JobSpec>, now_ms: i64) -> Result<Vec<(JobSpec, Option<i64>)>> {
    jobs.into_iter()
        .map(|job| {
            let next = match &job.schedule {
                Some(schedule) => schedule
                    .compile()
                    .and_then(|s| s.next_after(now_ms))
                    .with_context(|| format!("job '{}'", job.name))?,
                None => None,
            };
            Ok((job, next))
        })
        .collect()
}

async fn apply(file: &Path, config: &Config, out: Out) -> Result<ExitCode> {
    let jobs = with_next(read(file)?, now_ms())?;
    let wired = connect_migrated(config).await?;
    let applied = wired.ports.ledger.apply_jobs(&jobs, &who(), now_ms()).await?;
    // As the ledger has them: a changed job keeps an instant that is due.
    let stored = wired.ports.ledger.jobs().await?;
    out.answer(&applied, || {
        table(
            &["job", "version", "what", "next"],
            applied.iter().map(|a| {
                let next = stored.iter().find(|j| j.name == a.name).and_then(|j| j.next_fire_ms);
                let what = match a.outcome {
                    ApplyOutcome::Created => "created",
                    ApplyOutcome::Updated => "updated",
                    ApplyOutcome::Unchanged => "unchanged",
                };
                vec![a.name.clone(), a.version.to_string(), what.into(), instant(next)]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}

fn validate(file: &Path, out: Out) -> Result<ExitCode> {
    let jobs = read(file)?;
    let names: Vec<&str> = jobs.iter().map(|j| j.name.as_str()).collect();
    out.answer(&json!({ "valid": names }), || {
        line(&format!("{}: {} valid ({})", file.display(), plural(names.len(), "job"), names.join(", ")))
    });
    Ok(ExitCode::SUCCESS)
}

fn plural(n: usize, word: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") }
}

async fn list(config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let jobs = wired.ports.ledger.jobs().await?;
    let leader = wired.ports.ledger.leadership().await?;
    let pauses = wired.ports.ledger.pauses().await?;
    let around = |job: &shardcron_store::JobRecord| {
        let tier = job.spec.as_ref().map(|s| format!("tier:{}", s.tier)).unwrap_or_default();
        pauses.iter().find(|p| p.scope == "all" || p.scope == tier)
    };
    let now = now_ms();
    let state = |job: &shardcron_store::JobRecord| match (&job.spec, &job.paused_by, job.next_fire_ms) {
        (Err(fault), ..) => format!("invalid: {fault}"),
        (_, Some(who), _) => format!("paused by {who}"),
        _ if around(job).is_some() => {
            around(job).map(|p| format!("paused by {} ({})", p.paused_by, p.scope)).unwrap_or_default()
        }
        // A next instant that has passed would be a lie (case A-05).
        (_, _, Some(next)) if next < now - 5_000 => "overdue: no scheduler fires".into(),
        _ => "ok".into(),
    };
    let rows: Vec<serde_json::Value> = jobs
        .iter()
        .map(|j| {
            json!({ "job": j.name, "version": j.version, "state": state(j), "next": j.next_fire_ms.map(rfc3339),
                    "tier": j.spec.as_ref().ok().map(|s| s.tier.clone()) })
        })
        .collect();
    out.answer(&json!({ "jobs": rows, "epoch": leader.epoch, "leader": leader.holder }), || {
        table(
            &["job", "version", "tier", "next", "state"],
            jobs.iter().map(|j| {
                let tier = j.spec.as_ref().map_or("-", |s| s.tier.as_str());
                vec![j.name.clone(), j.version.to_string(), tier.into(), instant(j.next_fire_ms), state(j)]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}

async fn show(name: &str, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let Some(job) = wired.ports.ledger.job(name).await? else { return Err(unknown(&wired, name).await?) };
    let spec = job.spec.map_err(|e| anyhow::anyhow!("job '{name}' can't be read: {e}"))?;
    let shards = ShardPlan::from_spec(&spec.shards).map(|p| p.count()).unwrap_or(0);
    out.answer(&json!({ "job": spec, "version": job.version, "next": job.next_fire_ms.map(rfc3339), "paused_by": job.paused_by }), || {
        line(&format!("job      {} (version {})", job.name, job.version));
        line(&format!("next     {}", instant(job.next_fire_ms)));
        line(&format!("shards   {shards}"));
        line(&format!("tier     {}", spec.tier));
        if let Some(who) = &job.paused_by {
            line(&format!("paused   by {who}"));
        }
        line(&format!("spec     {}", spec.canonical_json()));
    });
    Ok(ExitCode::SUCCESS)
}

/// The error for a name that no job has, with the nearest one.
pub async fn unknown(wired: &crate::wiring::Wired, name: &str) -> Result<anyhow::Error> {
    let jobs = wired.ports.ledger.jobs().await?;
    Ok(Misuse(shardcron_domain::trigger::unknown_job(name, jobs.iter().map(|j| j.name.as_str())).0).into())
}

fn next(file: &Path, from: Option<&str>, count: usize, out: Out) -> Result<ExitCode> {
    let from_ms = from.map_or_else(|| Ok(now_ms()), |t| parse_instant(t).map_err(Misuse))?;
    let mut answers = Vec::new();
    for job in read(file)? {
        let zone = job.schedule.as_ref().and_then(|s| s.timezone.clone()).unwrap_or_else(|| "UTC".into());
        let mut instants = Vec::new();
        if let Some(schedule) = &job.schedule {
            let schedule = schedule.compile().with_context(|| format!("job '{}'", job.name))?;
            let mut at = from_ms;
            while instants.len() < count.min(10_000) {
                let Some(next) = schedule.next_after(at).with_context(|| format!("job '{}'", job.name))? else { break };
                instants.push(rfc3339(next));
                at = next;
            }
        }
        answers.push(json!({ "job": job.name, "zone": zone, "next": instants }));
    }
    out.answer(&answers, || {
        for answer in &answers {
            line(&format!("{} ({})", answer["job"].as_str().unwrap_or(""), answer["zone"].as_str().unwrap_or("")));
            match answer["next"].as_array().filter(|n| !n.is_empty()) {
                Some(instants) => instants.iter().for_each(|i| line(&format!("  {}", i.as_str().unwrap_or("")))),
                None => line("  never by itself"),
            }
        }
    });
    Ok(ExitCode::SUCCESS)
}
