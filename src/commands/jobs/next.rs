//! `shardcron jobs next`

use super::{files, unknown};
use crate::commands::{Misuse, connect_to_look, now_ms};
use crate::config::Config;
use crate::output::{Out, line, table};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use shardcron_domain::JobSpec;
use shardcron_domain::hints::hints;
use shardcron_domain::job::check_name;
use shardcron_domain::limits::{COMING_MAX, INSTANTS_WALKED, JOB_NAME_BYTES};
use shardcron_domain::schedule::{Coming, coming, local_time};
use shardcron_domain::units::{parse_instant, rfc3339};
use std::path::Path;
use std::process::ExitCode;

/// Reads `--count`.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=COMING_MAX).contains(&count) => Ok(count),
        _ => Err(format!("a whole number from 1 to {COMING_MAX} is possible")),
    }
}

/// What comes of one job.
struct Answer {
    spec: JobSpec,
    coming: Vec<Coming>,
    /// What the list does not say.
    note: Option<String>,
    /// What in the schedule is hardly ever meant: who looks at its instants should be told.
    hints: Vec<String>,
}

pub async fn run(target: &Path, from: Option<&str>, count: usize, (config, out): (&Config, Out)) -> Result<ExitCode> {
    let from_ms = from.map_or_else(|| Ok(now_ms()), |t| parse_instant(t).map_err(Misuse))?;
    let jobs = jobs_of(target, config).await?;
    let answers: Vec<Answer> = jobs.into_iter().map(|spec| answer(spec, from_ms, count)).collect::<Result<_>>()?;
    let values: Vec<Value> = answers.iter().map(value).collect();
    out.answer(&values, || answers.iter().for_each(print));
    Ok(ExitCode::SUCCESS)
}

async fn jobs_of(target: &Path, config: &Config) -> Result<Vec<JobSpec>> {
    let name = target.to_str().filter(|name| check_name(name, JOB_NAME_BYTES).is_ok());
    match name {
        Some(name) if !target.exists() => {
            let wired = connect_to_look(config).await.with_context(|| {
                format!("there is no file '{name}', and whether there is a job of that name could not be found out")
            })?;
            let Some(job) = wired.ports.ledger.job(name).await? else { return Err(unknown(&wired, name).await?) };
            Ok(vec![job.spec.map_err(|e| anyhow::anyhow!("job '{name}' can't be read: {e}"))?])
        }
        _ => Ok(files::load(target)?.into_specs()),
    }
}

fn answer(spec: JobSpec, from_ms: i64, count: usize) -> Result<Answer> {
    let of_job = || format!("job '{}'", spec.name);
    // Whether other keys stand in a file is nothing that is asked here.
    let hints = hints(&spec, from_ms, &|_| false).into_iter().map(|hint| format!("{}: {}", hint.key, hint.message));
    let hints = hints.collect();
    let Some(schedule) = spec.compiled_schedule().with_context(of_job)? else {
        let note = Some("no schedule: it is fired by hand".into());
        return Ok(Answer { spec, coming: Vec::new(), note, hints });
    };
    let (coming, given_up) = coming(&schedule, from_ms, count).with_context(of_job)?;
    let delay = spec.schedule.as_ref().and_then(|schedule| schedule.delay);
    let note = match delay {
        Some(delay) => Some(format!("{delay} after the end of its last execution; at once if it never ran")),
        None if given_up => Some(format!("given up: the next {INSTANTS_WALKED} instants are all excepted")),
        None if coming.is_empty() => Some("never".into()),
        None => None,
    };
    Ok(Answer { spec, coming, note, hints })
}

fn zone(spec: &JobSpec) -> &str {
    spec.schedule.as_ref().and_then(|schedule| schedule.timezone.as_deref()).unwrap_or("UTC")
}

fn value(answer: &Answer) -> Value {
    let (mut next, mut marks) = (Vec::new(), Vec::new());
    for one in &answer.coming {
        match one {
            Coming::Fires { nominal_ms, due_ms, clock_change } => {
                let at = rfc3339(*nominal_ms);
                if let Some(text) = clock_change {
                    marks.push(json!({ "at": at, "mark": "clock_change", "text": text }));
                }
                if due_ms != nominal_ms {
                    marks.push(json!({ "at": at, "mark": "jitter", "fires": rfc3339(*due_ms) }));
                }
                next.push(at);
            }
            Coming::Lost { at_ms, clock_change } => {
                marks.push(json!({ "at": rfc3339(*at_ms), "mark": "clock_change", "text": clock_change }));
            }
            Coming::Skipped { first_ms, last_ms, count, exception } => marks.push(json!({
                "at": rfc3339(*first_ms), "until": rfc3339(*last_ms), "instants": count,
                "mark": "skipped_exception", "text": exception
            })),
        }
    }
    json!({ "job": answer.spec.name, "zone": zone(&answer.spec), "next": next, "marks": marks, "note": answer.note, "hints": answer.hints })
}

fn print(answer: &Answer) {
    let zone = zone(&answer.spec);
    line(&format!("{} ({zone})", answer.spec.name));
    let local = |ms| local_time(Some(zone), ms);
    let rows = answer.coming.iter().map(|one| match one {
        Coming::Fires { nominal_ms, due_ms, clock_change } => {
            let mut marks: Vec<String> = clock_change.iter().cloned().collect();
            if due_ms != nominal_ms {
                marks.push(format!("jitter: fires {}", rfc3339(*due_ms)));
            }
            vec![String::new(), local(*nominal_ms), rfc3339(*nominal_ms), marks.join("; ")]
        }
        Coming::Lost { at_ms, clock_change } => vec![String::new(), "-".into(), rfc3339(*at_ms), clock_change.clone()],
        Coming::Skipped { first_ms, last_ms, count, exception } => {
            let run = if *count > 1 { format!(" ({count} instants, to {})", local(*last_ms)) } else { String::new() };
            vec![String::new(), local(*first_ms), rfc3339(*first_ms), format!("skipped: {exception}{run}")]
        }
    });
    if !answer.coming.is_empty() {
        table(&["", "in the job's zone", "UTC", ""], rows);
    }
    if let Some(note) = &answer.note {
        line(&format!("  {note}"));
    }
    for hint in &answer.hints {
        line(&format!("  hint: {hint}"));
    }
}
