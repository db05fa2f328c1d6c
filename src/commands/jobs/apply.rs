//! `shardcron jobs apply`: shows what changes, key by key, and changes it, unless somebody else was faster.

use super::files::{self, Found};
use super::validate::{hints_of, print as print_hints};
use super::{diff, unserved};
use crate::commands::{Misuse, connect_migrated, connect_to_look, now_ms, who};
use crate::config::Config;
use crate::output::{Out, counted, instant, line, table};
use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};
use shardcron_domain::JobSpec;
use shardcron_store::{Expected, JobChange, JobChanges, JobRecord};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What can be said.
#[derive(Args)]
pub struct ApplyArgs {
    /// The job file, or a directory of them
    file: PathBuf,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Delete the jobs that this source applied before and does not name any more. Jobs of other sources stay
    #[arg(long)]
    prune: bool,
    /// The name under which these jobs are known to --prune; the path if absent
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Refuse unless the job is at this version; 0: there is none yet. With several jobs: JOB=VERSION, may be repeated
    #[arg(long, value_name = "[JOB=]VERSION")]
    expect_version: Vec<String>,
}

/// What will become of one job.
struct Planned {
    spec: JobSpec,
    next_fire_ms: Option<i64>,
    expected: Expected,
    outcome: &'static str,
    version: u32,
    changes: Vec<diff::Change>,
}

pub async fn run(args: ApplyArgs, config: &Config, out: Out) -> Result<ExitCode> {
    let source = source_of(&args)?;
    let loaded = files::load(&args.file)?;
    let hints = hints_of(&loaded.jobs);
    let wired = if args.dry_run { connect_to_look(config).await? } else { connect_migrated(config).await? };
    let ledger = &wired.ports.ledger;
    let stored: HashMap<String, JobRecord> =
        ledger.jobs().await?.into_iter().map(|job| (job.name.clone(), job)).collect();
    let wanted = wanted_versions(&args.expect_version, &loaded.jobs)?;
    let now = now_ms();
    let planned: Vec<Planned> =
        loaded.jobs.into_iter().map(|found| plan(found, &stored, &wanted, now)).collect::<Result<_>>()?;
    let delete = match (&source, args.prune) {
        (Some(source), true) => {
            let mut of_source = ledger.jobs_of_source(source).await?;
            of_source.retain(|(name, _)| planned.iter().all(|job| job.spec.name != *name));
            of_source
        }
        _ => Vec::new(),
    };
    let apply = |job: &Planned| JobChange {
        spec: job.spec.clone(),
        next_fire_ms: job.next_fire_ms,
        expected: Some(job.expected),
    };
    let mut next_of = HashMap::new();
    if !args.dry_run {
        let changes = JobChanges { apply: planned.iter().map(apply).collect(), delete: delete.clone(), source };
        ledger.change_jobs(&changes, &who(), now).await.map_err(super::refused)?;
        // As the ledger has them: a changed job may owe an instant that is due.
        next_of = ledger.jobs().await?.into_iter().map(|job| (job.name, job.next_fire_ms)).collect();
    }
    unserved::warn(&wired, planned.iter().map(|job| &job.spec), config.worker.lost_after.as_ms()).await;
    let mut values: Vec<Value> = planned.iter().map(|job| value(job, args.dry_run)).collect();
    values.extend(delete.iter().map(
        |(name, version)| json!({ "name": name, "version": version, "outcome": "deleted", "dry_run": args.dry_run }),
    ));
    out.answer(&values, || {
        print(&planned, &delete, &next_of, args.dry_run);
        print_hints(&hints);
    });
    Ok(ExitCode::SUCCESS)
}

/// The name of where the jobs come from. Standard input has none of its own.
fn source_of(args: &ApplyArgs) -> Result<Option<String>> {
    if let Some(source) = &args.source {
        return Ok(Some(source.clone()));
    }
    let regular = args.file.is_dir() || args.file.is_file();
    if !regular {
        let none = "standard input is no source that could have applied jobs before; name one with --source NAME";
        return if args.prune { Err(Misuse(none.into()).into()) } else { Ok(None) };
    }
    let path: PathBuf = Path::new(&args.file).canonicalize().with_context(|| format!("{}", args.file.display()))?;
    Ok(Some(path.display().to_string()))
}

/// The versions that the caller wants to change, by job.
fn wanted_versions(texts: &[String], jobs: &[Found]) -> Result<BTreeMap<String, u32>> {
    let mut wanted = BTreeMap::new();
    for text in texts {
        let (name, version) = match (text.split_once('='), jobs) {
            (Some((name, version)), _) => (name.to_owned(), version),
            (None, [one]) => (one.placed.spec.name.clone(), text.as_str()),
            (None, _) => {
                let many = counted(jobs.len() as u64, "job");
                return Err(Misuse(format!("--expect-version {text}: there are {many}; write JOB=VERSION")).into());
            }
        };
        let version =
            version.parse().map_err(|_| Misuse(format!("--expect-version {text}: '{version}' is no version")))?;
        if jobs.iter().all(|found| found.placed.spec.name != name) {
            return Err(Misuse(format!("--expect-version {text}: there is no job '{name}' in what is applied")).into());
        }
        wanted.insert(name, version);
    }
    Ok(wanted)
}

fn plan(
    found: Found,
    stored: &HashMap<String, JobRecord>,
    wanted: &BTreeMap<String, u32>,
    now_ms: i64,
) -> Result<Planned> {
    let spec = found.placed.spec.clone();
    let old = stored.get(&spec.name);
    let expected = match (wanted.get(&spec.name), old) {
        (Some(0), _) | (None, None) => Expected::Absent,
        (Some(version), _) => Expected::Version(*version),
        (None, Some(old)) => Expected::Version(old.version),
    };
    let old_spec = old.and_then(|old| old.spec.as_ref().ok());
    let unchanged = old_spec.is_some_and(|old| old.canonical_json() == spec.canonical_json());
    let (outcome, version) = match old {
        Some(old) if unchanged => ("unchanged", old.version),
        Some(old) => ("updated", old.version.saturating_add(1)),
        None => ("created", 1),
    };
    if old_spec.and_then(|old| old.schedule.as_ref()) != spec.schedule.as_ref() {
        check_not_past(&found, &spec, now_ms)?;
    }
    let schedule = spec.compiled_schedule().with_context(|| format!("job '{}'", spec.name))?;
    let next = schedule.map(|schedule| schedule.next_after(now_ms)).transpose();
    let next_fire_ms = next.with_context(|| format!("job '{}'", spec.name))?.flatten();
    let changes = match old {
        Some(_) if !unchanged => diff::changes(old_spec, &spec),
        _ => Vec::new(),
    };
    Ok(Planned { spec, next_fire_ms, expected, outcome, version, changes })
}

/// A one-shot that is made for a time that has passed would wait for ever (case S-14). One that has fired may be applied again.
fn check_not_past(found: &Found, spec: &JobSpec, now_ms: i64) -> Result<()> {
    let Some(at) = spec.schedule.as_ref().and_then(|schedule| schedule.at.as_ref()) else { return Ok(()) };
    let next = spec.compiled_schedule().ok().flatten().and_then(|schedule| schedule.next_after(now_ms).ok().flatten());
    if next.is_some() {
        return Ok(());
    }
    Err(Misuse(format!(
        "{}, line {}: job '{}': schedule.at: '{at}' is in the past, and the job would never fire; choose a time to come, or leave \
         the schedule out and fire it with: shardcron trigger {}",
        found.file.display(),
        found.placed.line_of("schedule.at"),
        spec.name,
        spec.name
    ))
    .into())
}

fn value(job: &Planned, dry_run: bool) -> Value {
    json!({ "name": job.spec.name, "version": job.version, "outcome": job.outcome, "changes": job.changes, "dry_run": dry_run })
}

fn print(planned: &[Planned], deleted: &[(String, u32)], next_of: &HashMap<String, Option<i64>>, dry_run: bool) {
    let rows = planned.iter().map(|job| {
        let next = next_of.get(&job.spec.name).copied().unwrap_or(job.next_fire_ms);
        vec![job.spec.name.clone(), job.version.to_string(), job.outcome.into(), instant(next)]
    });
    let gone =
        deleted.iter().map(|(name, version)| vec![name.clone(), version.to_string(), "deleted".into(), "-".into()]);
    table(&["job", "version", "what", "next"], rows.chain(gone));
    for job in planned.iter().filter(|job| !job.changes.is_empty()) {
        line(&format!("{}:", job.spec.name));
        for change in &job.changes {
            line(&format!("  {change}"));
        }
    }
    if dry_run {
        line("nothing was changed: --dry-run");
    }
}
