//! `shardcron explain JOB`: collects what the ledger knows; what it means is said by `shardcron_domain::explain`.

use super::{Misuse, connect_to_look, jobs::unknown, now_ms};
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use crate::wiring::Wired;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use shardcron_domain::explain::{
    AttemptFacts, DecisionFacts, EpochFacts, ExecutionFacts, Explanation, InstantFacts, JobFacts, Place, explain,
    neighbours,
};
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::schedule::{Schedule, ScheduleSpec};
use shardcron_domain::units::{Span, parse_instant, rfc3339};
use shardcron_domain::{Epoch, ExecutionId, JobSpec};
use shardcron_store::{DecisionRow, JobRecord, VersionRow};
use std::process::ExitCode;

/// Decisions of one answer.
const DECISIONS: usize = 1_000;
/// Attempts that are read of one execution.
const ATTEMPTS: usize = 12;
/// Epochs that are looked through.
const EPOCHS: usize = 1_000;
/// Instants without a decision that a range looks for.
const WALKED: usize = 10_000;

/// What can be said.
#[derive(Args)]
pub struct ExplainArgs {
    /// The job's name
    job: String,
    /// The instant to explain: RFC 3339 with its zone, or a local time of the job's zone; the latest decision if absent
    #[arg(long, conflicts_with = "since")]
    at: Option<String>,
    /// All decisions since this instant, or since this long ago (such as 2h)
    #[arg(long)]
    since: Option<String>,
}

/// Runs it.
pub async fn run(args: ExplainArgs, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    let Some(record) = wired.ports.ledger.job(&args.job).await? else { return Err(unknown(&wired, &args.job).await?) };
    let look = Look::new(wired, record, config.retention.decisions).await?;
    match (&args.at, &args.since) {
        (_, Some(since)) => look.since(since, out).await,
        (Some(at), None) => look.one(at, out).await,
        (None, None) => look.latest(out).await,
    }
}

struct Look {
    wired: Wired,
    record: JobRecord,
    versions: Vec<VersionRow>,
    facts: JobFacts,
    epochs: Vec<EpochFacts>,
    now_ms: i64,
}

impl Look {
    async fn new(wired: Wired, record: JobRecord, kept: Span) -> Result<Self> {
        let now_ms = now_ms();
        let ledger = &wired.ports.ledger;
        let versions = ledger.job_versions(&record.name, EPOCHS).await?;
        let epochs = ledger.epochs(None, EPOCHS).await?;
        let pauses = ledger.pauses().await?;
        let tier = record.spec.as_ref().map(|spec| format!("tier:{}", spec.tier)).unwrap_or_default();
        let around = pauses.into_iter().find(|p| p.scope == "all" || p.scope == tier);
        let facts = JobFacts {
            name: record.name.clone(),
            zone: record.spec.as_ref().ok().and_then(|s| s.schedule.as_ref()).and_then(|s| s.timezone.clone()),
            since_ms: versions.last().map(|v| v.created_ms),
            kept_since_ms: Some(now_ms.saturating_sub(kept.as_ms())),
            paused_by: record.paused_by.clone().or_else(|| around.map(|p| format!("{} ({})", p.paused_by, p.scope))),
        };
        let epochs = epochs
            .into_iter()
            .map(|e| EpochFacts { epoch: e.epoch.0, holder: e.holder, from_ms: e.from_ms, seen_ms: e.seen_ms })
            .collect();
        Ok(Look { wired, record, versions, facts, epochs, now_ms })
    }

    /// The specification that the job had at an instant: a later one says nothing of what was due before it.
    fn spec_at(&self, at_ms: i64) -> Option<&JobSpec> {
        let then = self.versions.iter().find(|v| v.created_ms <= at_ms).or(self.versions.last());
        then.map(|v| &v.spec).unwrap_or(&self.record.spec).as_ref().ok()
    }

    async fn one(&self, at: &str, out: Out) -> Result<ExitCode> {
        let nominal_ms = match parse_instant(at) {
            Ok(ms) => ms,
            Err(why) => match self.local(at, &why)? {
                Ok(ms) => ms,
                Err(explanation) => {
                    tell(&[explanation], out);
                    return Ok(ExitCode::SUCCESS);
                }
            },
        };
        let decisions = self.wired.ports.ledger.decisions(self.record.id, nominal_ms, nominal_ms, DECISIONS).await?;
        let explanation = self.explain(nominal_ms, decisions, ATTEMPTS).await?;
        tell(&[explanation], out);
        Ok(ExitCode::SUCCESS)
    }

    /// A local time of the job's zone; one that the clock jumped over is an answer, not an error.
    fn local(&self, at: &str, why: &str) -> Result<std::result::Result<i64, Explanation>> {
        let Some(zone) = self.facts.zone.clone() else { return Err(Misuse(why.to_owned()).into()) };
        let spec = ScheduleSpec { at: Some(at.into()), timezone: Some(zone), ..ScheduleSpec::default() };
        match spec.compile() {
            Ok(once) => match once.next_after(0)? {
                Some(ms) => Ok(Ok(ms)),
                None => Err(Misuse(why.to_owned()).into()),
            },
            Err(gap) if gap.to_string().contains("does not exist") => {
                // As if it were UTC: near enough to find the day.
                let near = parse_instant(&format!("{at}Z")).or_else(|_| parse_instant(&format!("{at}:00Z"))).ok();
                let mut sentences = vec![format!("{gap}.")];
                let schedule = near.and_then(|ms| self.spec_at(ms)).and_then(|s| s.compiled_schedule().ok().flatten());
                if let (Some(near), Some(schedule)) = (near, schedule) {
                    let (before, after) = neighbours(&schedule, near + 86_400_000 / 2)?;
                    let change = [before, after].into_iter().flatten().find_map(|ms| schedule.clock_change(ms));
                    sentences.extend(change.map(|change| format!("What the schedule makes of it: {change}.")));
                    let named: Vec<String> = [before, after].into_iter().flatten().map(rfc3339).collect();
                    sentences.push(format!(
                        "Its instants around that time are {}; ask about one of them.",
                        named.join(" and ")
                    ));
                }
                Ok(Err(Explanation { instant: at.to_owned(), what: "no_such_time".into(), sentences }))
            }
            Err(_) => Err(Misuse(why.to_owned()).into()),
        }
    }

    async fn latest(&self, out: Out) -> Result<ExitCode> {
        let Some(last) = self.wired.ports.ledger.latest_decision(self.record.id).await? else {
            let next = self.record.next_fire_ms;
            let sentence = match next {
                Some(next) => format!(
                    "Nothing has been decided about job '{}' yet; its next instant is {}.",
                    self.record.name,
                    rfc3339(next)
                ),
                None => format!("Nothing has been decided about job '{}' yet.", self.record.name),
            };
            let instant = next.map_or_else(String::new, rfc3339);
            tell(&[Explanation { instant, what: "undecided".into(), sentences: vec![sentence] }], out);
            return Ok(ExitCode::SUCCESS);
        };
        let at = last.nominal_ms;
        let explanation = self.explain(at, vec![last], ATTEMPTS).await?;
        tell(&[explanation], out);
        Ok(ExitCode::SUCCESS)
    }

    async fn since(&self, since: &str, out: Out) -> Result<ExitCode> {
        let from_ms = match (Span::parse(since), parse_instant(since)) {
            (Ok(ago), _) => self.now_ms.saturating_sub(ago.as_ms()),
            (_, Ok(ms)) => ms,
            (_, Err(why)) => return Err(Misuse(format!("{why}; or how long ago, such as 2h")).into()),
        };
        let rows = self.wired.ports.ledger.decisions(self.record.id, from_ms, self.now_ms, DECISIONS).await?;
        let upto =
            if rows.len() == DECISIONS { rows.last().map_or(self.now_ms, |r| r.nominal_ms) } else { self.now_ms };
        let missing = self.without_decision(from_ms, upto, &rows)?;
        let mut faults = Vec::new();
        for nominal_ms in missing {
            faults.push(self.explain(nominal_ms, Vec::new(), 0).await?);
        }
        out.answer(&json!({ "decisions": rows, "undecided": faults }), || {
            table(
                &["instant", "fire key", "decision", "after", "epoch", "why"],
                rows.iter().map(|r| {
                    vec![
                        instant(Some(r.nominal_ms)),
                        r.fire_key.clone(),
                        r.kind.word().into(),
                        crate::output::seconds(r.decided_ms - r.nominal_ms),
                        r.epoch.to_string(),
                        short(r),
                    ]
                }),
            );
            if rows.len() == DECISIONS {
                line(&format!("the first {DECISIONS}; go on with --since {}", rfc3339(upto)));
            }
            for fault in &faults {
                fault.sentences.iter().for_each(|sentence| line(sentence));
            }
        });
        Ok(ExitCode::SUCCESS)
    }

    /// Instants of the range that should have a decision and have none.
    fn without_decision(&self, from_ms: i64, upto_ms: i64, rows: &[DecisionRow]) -> Result<Vec<i64>> {
        let decided: std::collections::BTreeSet<&str> = rows.iter().map(|r| r.fire_key.as_str()).collect();
        let mut missing = Vec::new();
        let known = self.facts.since_ms.max(self.facts.kept_since_ms).unwrap_or(from_ms);
        let mut at = from_ms.max(known).saturating_sub(1);
        for _ in 0..WALKED {
            let Some(schedule) = self.spec_at(at + 1).and_then(|s| s.compiled_schedule().ok().flatten()) else { break };
            let Some(next) = schedule.next_after(at)?.filter(|next| *next <= upto_ms) else { break };
            // The version that was there then may have no such instant.
            let still = self.spec_at(next).and_then(|s| s.compiled_schedule().ok().flatten());
            let due = still.as_ref().is_some_and(|s| s.next_after(next - 1).ok().flatten() == Some(next));
            if due && !decided.contains(rfc3339(next).as_str()) {
                missing.push(next);
                if missing.len() >= 20 {
                    break;
                }
            }
            at = next;
        }
        Ok(missing)
    }

    async fn explain(&self, nominal_ms: i64, decisions: Vec<DecisionRow>, attempts: usize) -> Result<Explanation> {
        let spec = self.spec_at(nominal_ms);
        let schedule = spec.and_then(|spec| spec.compiled_schedule().ok().flatten());
        let place = place(spec, schedule.as_ref(), nominal_ms)?;
        let mut facts = Vec::with_capacity(decisions.len());
        let mut epochs = self.epochs.clone();
        for row in decisions {
            // Older than what was read at the beginning: its own epoch and those before it.
            if epochs.iter().all(|e| e.epoch != row.epoch.0) {
                let older = self.wired.ports.ledger.epochs(Some(Epoch(row.epoch.0)), 3).await?;
                epochs.extend(older.into_iter().map(|e| EpochFacts {
                    epoch: e.epoch.0,
                    holder: e.holder,
                    from_ms: e.from_ms,
                    seen_ms: e.seen_ms,
                }));
            }
            let execution = match row.execution {
                Some(id) => self.execution(id, if row.kind == DecisionKind::Fired { attempts } else { 0 }).await?,
                None => None,
            };
            facts.push(DecisionFacts {
                due_ms: schedule.as_ref().and_then(|s| s.due_at(row.nominal_ms).ok()).unwrap_or(row.nominal_ms),
                fire_key: row.fire_key,
                nominal_ms: row.nominal_ms,
                kind: row.kind,
                reason: row.reason,
                decided_ms: row.decided_ms,
                epoch: row.epoch.0,
                execution,
            });
        }
        let clock_change = schedule.as_ref().and_then(|s| match &place {
            Place::Beside(before, after) => [*before, *after]
                .into_iter()
                .flatten()
                .filter(|ms| (ms - nominal_ms).abs() < 86_400_000)
                .find_map(|ms| s.clock_change(ms)),
            _ => s.clock_change(nominal_ms),
        });
        let instant = InstantFacts { nominal_ms, place, clock_change, decisions: facts };
        Ok(explain(&self.facts, &instant, &epochs, self.now_ms))
    }

    async fn execution(&self, id: ExecutionId, attempts: usize) -> Result<Option<ExecutionFacts>> {
        let ledger = &self.wired.ports.ledger;
        let Some(row) = ledger.execution(id).await? else { return Ok(None) };
        let cancelled = ledger.cancellation(id).await?.map(|c| c.reason);
        let attempts = if attempts == 0 { Vec::new() } else { ledger.attempts(id, attempts).await? };
        Ok(Some(ExecutionFacts {
            id,
            version: row.version,
            phase: row.phase,
            shards: row.shards_total,
            succeeded: row.succeeded,
            failed: row.failed,
            fired_ms: row.fired_ms,
            ended_ms: row.ended_ms,
            cancelled,
            attempts: attempts
                .into_iter()
                .map(|a| AttemptFacts {
                    shard: a.index,
                    attempt: a.attempt,
                    outcome: a.outcome,
                    took_ms: a.ended_ms - a.started_ms,
                    message: a.message,
                })
                .collect(),
        }))
    }
}

fn place(spec: Option<&JobSpec>, schedule: Option<&Schedule>, nominal_ms: i64) -> Result<Place> {
    let Some(schedule) = schedule else {
        let why = match spec.and_then(|s| s.after.as_ref()) {
            Some(after) => format!("has no schedule of its own: it fires after {}", after.jobs.join(" and ")),
            None if spec.is_none() => "can't be read; apply it again".into(),
            None => "has no schedule: it is fired by hand".into(),
        };
        return Ok(Place::Unknown(why));
    };
    if schedule.delay_ms().is_some() {
        return Ok(Place::Unknown(
            "fires a fixed delay after its own last end, so its instants are not known before".into(),
        ));
    }
    if schedule.next_after(nominal_ms.saturating_sub(1))? == Some(nominal_ms) {
        return Ok(schedule.exception(nominal_ms).map_or(Place::Due, Place::Excepted));
    }
    let (before, after) = neighbours(schedule, nominal_ms)?;
    Ok(Place::Beside(before, after))
}

fn short(row: &DecisionRow) -> String {
    let text = row.reason.clone().or_else(|| row.execution.map(|id| format!("execution {id}"))).unwrap_or_default();
    match text.char_indices().nth(120) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

fn tell(explanations: &[Explanation], out: Out) {
    out.answer(&explanations, || {
        for explanation in explanations {
            explanation.sentences.iter().for_each(|sentence| line(sentence));
        }
    });
}
