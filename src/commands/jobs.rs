//! `shardcron jobs …`

mod apply;
mod diff;
pub mod files;
mod next;
mod unserved;
mod validate;
mod versions;

use super::{Misuse, connect_to_look, now_ms};
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use anyhow::{Context, Result};
use clap::Subcommand;
use serde_json::json;
use shardcron_domain::JobSpec;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::units::rfc3339;
use shardcron_store::StoreError;
use std::path::PathBuf;
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum JobsCommand {
    /// Create or update the jobs of a file or a directory; what is unchanged stays untouched
    #[command(
        after_help = "Shows what changes, key by key. Asks nothing; refuses if somebody else changed a job since it was read.\n\n\
                      Examples:\n  shardcron jobs apply jobs.toml --dry-run\n  shardcron jobs apply jobs.d/ --prune --source reports\n  \
                      shardcron jobs apply settle.toml --expect-version 4"
    )]
    Apply(apply::ApplyArgs),
    /// Check a file or a directory without applying it; needs no service
    #[command(
        after_help = "Shows every fault with its line, key and remedy, and hints at what is probably not meant. Hints do not change the \
                      exit code.\n\nExamples:\n  shardcron jobs validate jobs.toml\n  shardcron jobs validate jobs.d/ --json"
    )]
    Validate {
        /// The job file, or a directory of them
        file: PathBuf,
    },
    /// List jobs
    List,
    /// Show one job
    Show {
        /// Its name
        job: String,
        /// An earlier version of it
        #[arg(long)]
        version: Option<u32>,
    },
    /// List a job's versions: when, by whom, what was changed
    Versions {
        /// Its name
        job: String,
    },
    /// Delete a job. What it did stays in the ledger, and what runs goes on
    #[command(after_help = "Example:\n  shardcron jobs delete settle --expect-version 4")]
    Delete {
        /// Its name
        job: String,
        /// Refuse unless the job is at this version
        #[arg(long, value_name = "VERSION")]
        expect_version: Option<u32>,
    },
    /// Show the coming firings of a file's jobs, which needs no service, or of an applied job
    #[command(
        after_help = "Days on which clocks change and instants that an exception skips are marked.\n\nExamples:\n  \
                      shardcron jobs next jobs.toml\n  shardcron jobs next settle --count 20\n  \
                      shardcron jobs next jobs.toml --from 2027-03-13T00:00:00Z --count 3 --json"
    )]
    Next {
        /// The job file, a directory of them, or the name of an applied job
        target: PathBuf,
        /// Strictly after this instant (RFC 3339); now if absent
        #[arg(long, value_name = "INSTANT")]
        from: Option<String>,
        /// How many firings of each job, 1 to 10000
        #[arg(long, default_value_t = 5, value_parser = next::count)]
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
        JobsCommand::Apply(args) => apply::run(args, &config, out).await,
        JobsCommand::Validate { file } => validate::run(&file, out),
        JobsCommand::List => list(&config, out).await,
        JobsCommand::Show { job, version: Some(version) } => versions::show(&job, version, &config, out).await,
        JobsCommand::Show { job, version: None } => show(&job, &config, out).await,
        JobsCommand::Versions { job } => versions::list(&job, &config, out).await,
        JobsCommand::Delete { job, expect_version } => versions::delete(&job, expect_version, &config, out).await,
        JobsCommand::Next { target, from, count } => next::run(&target, from.as_deref(), count, (&config, out)).await,
        JobsCommand::Pause(args) => super::pause::run(args, true, &config, out).await,
        JobsCommand::Resume(args) => super::pause::run(args, false, &config, out).await,
    }
}

/// The jobs with the next instant that each schedule has from now.
pub fn with_next(jobs: Vec<JobSpec>, now_ms: i64) -> Result<Vec<(JobSpec, Option<i64>)>> {
    jobs.into_iter()
        .map(|job| {
            let next = match &job.schedule {
                Some(schedule) => schedule
                    .compile_for(&job.name)
                    .and_then(|s| s.next_after(now_ms))
                    .with_context(|| format!("job '{}'", job.name))?,
                None => None,
            };
            Ok((job, next))
        })
        .collect()
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
        (Ok(spec), ..) if spec.compiled_schedule().is_err() => {
            format!("invalid: {}", spec.compiled_schedule().err().map(|e| e.to_string()).unwrap_or_default())
        }
        (_, Some(who), _) => format!("paused by {who}"),
        _ if around(job).is_some() => {
            around(job).map(|p| format!("paused by {} ({})", p.paused_by, p.scope)).unwrap_or_default()
        }
        // A next instant that has passed would be a lie (case A-05).
        (Ok(spec), _, Some(next)) if spec.due_at(next) < now - 5_000 => "overdue: no scheduler fires".into(),
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
    let plan = ShardPlan::from_spec(&spec.shards).ok();
    let shards = plan.as_ref().map_or_else(
        || "-".to_owned(),
        |plan| {
            let cut =
                if spec.shards.balance.is_some() { "; cut anew by the durations of the last good run" } else { "" };
            if plan.is_later() { format!("{plan}{cut}") } else { format!("{} ({plan}{cut})", plan.count()) }
        },
    );
    let plan = plan.map(|plan| plan.to_string());
    out.answer(&json!({ "job": spec, "plan": plan, "version": job.version, "next": job.next_fire_ms.map(rfc3339), "paused_by": job.paused_by }), || {
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

/// What the ledger says of a change that can't be is about what was asked for: misuse, as a fault in the file is.
pub fn refused(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Invalid(sentence) => Misuse(sentence).into(),
        other => other.into(),
    }
}

/// The error for a name that no job has, with the nearest one.
pub async fn unknown(wired: &crate::wiring::Wired, name: &str) -> Result<anyhow::Error> {
    let jobs = wired.ports.ledger.jobs().await?;
    Ok(Misuse(shardcron_domain::trigger::unknown_job(name, jobs.iter().map(|j| j.name.as_str())).0).into())
}
