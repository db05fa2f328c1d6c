//! Why a job did or did not run: from facts that the ledger keeps to sentences for a person who was woken up.
//!
//! Facts in, sentences out; who collects the facts is the command line. Nothing here guesses: what is not recorded is said to be
//! not recorded, and an instant that should have a decision and has none is said to be a fault (invariant F2).

use crate::execution::Phase;
use crate::firing::{DecisionKind, schedule_key};
use crate::ids::ExecutionId;
use crate::schedule::{Schedule, ScheduleError, local_time};
use crate::units::rfc3339;
use serde::Serialize;

/// Later than this is late, and has a reason.
const LATE_MS: i64 = 1_000;
/// A leader that was seen this long after an instant has had its chance to decide it.
const DECIDED_WITHIN_MS: i64 = 10_000;
/// Attempts that are told one by one.
const ATTEMPTS_TOLD: usize = 10;

/// The job.
#[derive(Clone, Debug, Default)]
pub struct JobFacts {
    /// Its name.
    pub name: String,
    /// The zone of its schedule.
    pub zone: Option<String>,
    /// When its first version was applied.
    pub since_ms: Option<i64>,
    /// Who has it paused now.
    pub paused_by: Option<String>,
    /// Decisions about earlier instants are deleted by retention.
    pub kept_since_ms: Option<i64>,
}

/// One epoch of leadership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochFacts {
    /// Its number.
    pub epoch: i64,
    /// The scheduler that led.
    pub holder: String,
    /// When it began.
    pub from_ms: i64,
    /// When it was last seen to lead.
    pub seen_ms: i64,
}

/// A decision.
#[derive(Clone, Debug)]
pub struct DecisionFacts {
    /// The firing's identity.
    pub fire_key: String,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// When it was to fire: later than the instant, if the schedule has a jitter.
    pub due_ms: i64,
    /// What was decided.
    pub kind: DecisionKind,
    /// Why.
    pub reason: Option<String>,
    /// When.
    pub decided_ms: i64,
    /// Under which epoch.
    pub epoch: i64,
    /// The execution that was made, or the one in the way.
    pub execution: Option<ExecutionFacts>,
}

/// An execution.
#[derive(Clone, Debug)]
pub struct ExecutionFacts {
    /// Which.
    pub id: ExecutionId,
    /// The job's version that it runs.
    pub version: u32,
    /// Where it is.
    pub phase: Phase,
    /// Shards of its plan.
    pub shards: u32,
    /// Ended well.
    pub succeeded: u32,
    /// Ended badly.
    pub failed: u32,
    /// When it was fired.
    pub fired_ms: i64,
    /// When it ended.
    pub ended_ms: Option<i64>,
    /// Why it was cancelled.
    pub cancelled: Option<String>,
    /// Attempts that have ended, bad ones first.
    pub attempts: Vec<AttemptFacts>,
}

/// An attempt that has ended.
#[derive(Clone, Debug)]
pub struct AttemptFacts {
    /// The shard.
    pub shard: u32,
    /// The attempt.
    pub attempt: u32,
    /// `success`, `failed`, `timeout`, `worker_lost`, `hung`, `handed_back`.
    pub outcome: String,
    /// How long it took.
    pub took_ms: i64,
    /// The error.
    pub message: Option<String>,
}

/// What the schedule says of an instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is one of its instants.
    Due,
    /// It is one, and an exception names it.
    Excepted(String),
    /// It is none; the nearest ones.
    Beside(Option<i64>, Option<i64>),
    /// The job has no instants that can be named: fired by hand, by others' ends, or after its own.
    Unknown(String),
}

/// What is asked about one instant.
#[derive(Clone, Debug)]
pub struct InstantFacts {
    /// The instant.
    pub nominal_ms: i64,
    /// What the schedule, as it was then, says of it.
    pub place: Place,
    /// What a change of the clock does on its day.
    pub clock_change: Option<String>,
    /// What was decided about it.
    pub decisions: Vec<DecisionFacts>,
}

/// The answer about one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The instant.
    pub instant: String,
    /// What happened, in a word: a decision's, or `future`, `not_due`, `before_the_job`, `forgotten`, `undecided`, `no_leader` or `fault`.
    pub what: String,
    /// In sentences; those after the first begin where it needs more.
    pub sentences: Vec<String>,
}

/// The instants of a schedule around one: the last before it and the first after it.
///
/// # Errors
/// The calendar could not be computed.
pub fn neighbours(schedule: &Schedule, at_ms: i64) -> Result<(Option<i64>, Option<i64>), ScheduleError> {
    let after = schedule.next_after(at_ms)?;
    for days in [1.0 / 1_440.0, 1.0 / 24.0, 1.0, 8.0, 32.0, 400.0, 3_000.0] {
        let mut last = None;
        let mut at = at_ms.saturating_sub((days * 86_400_000.0) as i64);
        while let Some(next) = schedule.next_after(at)?.filter(|next| *next < at_ms) {
            (last, at) = (Some(next), next);
        }
        if last.is_some() {
            return Ok((last, after));
        }
    }
    Ok((None, after))
}

/// Explains one instant.
#[must_use]
pub fn explain(job: &JobFacts, instant: &InstantFacts, epochs: &[EpochFacts], now_ms: i64) -> Explanation {
    let at = instant.nominal_ms;
    let local = job.zone.as_deref().filter(|zone| *zone != "UTC").map(|zone| local_time(Some(zone), at));
    let name = local.map_or_else(|| rfc3339(at), |local| format!("{} ({local})", rfc3339(at)));
    let mut sentences = Vec::new();
    let what = match instant.decisions.as_slice() {
        [] => undecided(job, instant, epochs, now_ms, &name, &mut sentences),
        decisions => {
            // The instant's own decision first; triggers that were made for it by hand follow.
            let own = schedule_key(at);
            let mut sorted: Vec<&DecisionFacts> = decisions.iter().collect();
            sorted.sort_by_key(|d| (d.fire_key != own, d.decided_ms));
            for decision in &sorted {
                decided(decision, epochs, &name, &mut sentences);
            }
            sorted.first().map_or("undecided", |d| d.kind.word()).to_owned()
        }
    };
    sentences.extend(instant.clock_change.as_ref().map(|change| format!("On that day the clock changes: {change}.")));
    Explanation { instant: rfc3339(at), what, sentences }
}

fn undecided(
    job: &JobFacts,
    instant: &InstantFacts,
    epochs: &[EpochFacts],
    now_ms: i64,
    name: &str,
    out: &mut Vec<String>,
) -> String {
    let at = instant.nominal_ms;
    match &instant.place {
        Place::Unknown(why) => {
            out.push(format!("Nothing is recorded for {name}. The job {why}."));
            return "not_due".into();
        }
        Place::Beside(before, after) => {
            let words = |ms: &Option<i64>, none: &str| ms.map_or_else(|| none.to_owned(), rfc3339);
            out.push(format!(
                "{name} is not an instant of the schedule. The nearest are {} before it and {} after it.",
                words(before, "none"),
                words(after, "none")
            ));
            return "not_due".into();
        }
        Place::Due | Place::Excepted(_) => {}
    }
    if at > now_ms {
        out.push(format!("{name} is in the future: {} from now.", span(at - now_ms)));
        if let Place::Excepted(why) = &instant.place {
            out.push(format!("It will be skipped: {why}."));
        }
        out.extend(
            job.paused_by
                .as_ref()
                .map(|who| format!("The job is paused by {who}; unless it is resumed before, it will not fire.")),
        );
        return "future".into();
    }
    if let Some(since) = job.since_ms.filter(|since| *since > at) {
        out.push(format!(
            "{name} was before the job: its first version was applied at {}. Nothing was due.",
            rfc3339(since)
        ));
        return "before_the_job".into();
    }
    if let Some(kept) = job.kept_since_ms.filter(|kept| *kept > at) {
        out.push(format!(
            "Nothing is recorded about {name} any more: decisions about instants before {} are deleted (retention.decisions).",
            rfc3339(kept)
        ));
        return "forgotten".into();
    }
    match epochs.iter().max_by_key(|e| e.epoch) {
        None => {
            out.push(format!(
                "Nothing is decided about {name}: no scheduler has ever led. Start one: shardcron scheduler."
            ));
            "no_leader".into()
        }
        Some(last) if last.seen_ms < at => {
            out.push(format!(
                "Nothing is decided about {name} yet: nobody has led since {} ({}, epoch {}). The next leader decides it by the \
                 job's misfire policy. Is a scheduler running? shardcron doctor says what is wrong.",
                rfc3339(last.seen_ms),
                person(&last.holder),
                last.epoch
            ));
            "no_leader".into()
        }
        Some(last) if last.seen_ms < at.saturating_add(DECIDED_WITHIN_MS) => {
            out.push(format!(
                "Nothing is decided about {name} yet; {} leads (epoch {}), seen {} after it. Ask again in a moment.",
                person(&last.holder),
                last.epoch,
                span(last.seen_ms - at)
            ));
            "undecided".into()
        }
        Some(last) => {
            out.push(format!(
                "FAULT: nothing is recorded about {name}, an instant of the schedule, although {} led (epoch {}) and was seen {} \
                 after it. Each instant has one decision (invariant F2); please report this with the schedulers' logs of that time.",
                person(&last.holder),
                last.epoch,
                span(last.seen_ms - at)
            ));
            "fault".into()
        }
    }
}

fn decided(decision: &DecisionFacts, epochs: &[EpochFacts], name: &str, out: &mut Vec<String>) {
    let late_ms = decision.decided_ms - decision.due_ms;
    let by = epochs.iter().find(|e| e.epoch == decision.epoch);
    let who = by.map_or_else(
        || format!("under epoch {}", decision.epoch),
        |e| format!("by {} under epoch {}", person(&e.holder), e.epoch),
    );
    let own = decision.fire_key == schedule_key(decision.nominal_ms);
    let subject = if own { name.to_owned() } else { format!("{name}, as {}", decision.fire_key) };
    let verb = match decision.kind {
        DecisionKind::Fired => "fired",
        DecisionKind::SkippedOverlap => "not fired, because another execution was in its way",
        DecisionKind::SkippedMisfire => "not fired, because it was missed",
        DecisionKind::SkippedPaused => "not fired, because of a pause",
        DecisionKind::Coalesced => "not fired by itself, because it was missed and a later instant stands for it",
        DecisionKind::InvalidSchedule => "not fired, because it could not be computed",
        DecisionKind::SkippedException => "not fired, because of an exception",
        DecisionKind::Waiting => "waits",
        DecisionKind::SkippedUpstream => "not fired, because of what it follows",
        DecisionKind::InvalidPlan => "not fired, because its shards could not be planned",
        DecisionKind::SkippedEmpty => "not fired, because there was nothing to do",
    };
    let by_schedule = own && decision.decided_ms >= decision.due_ms;
    let lateness = if by_schedule { format!(", {} after it was due", span(late_ms)) } else { String::new() };
    out.push(format!("{subject}: {verb}. Decided at {}{lateness}, {who}.", rfc3339(decision.decided_ms)));
    if let Some(reason) = &decision.reason {
        out.push(format!("Why: {reason}."));
    }
    if by_schedule && late_ms > LATE_MS {
        out.extend(why_late(decision, by, epochs));
    }
    if let Some(execution) = &decision.execution {
        if decision.kind == DecisionKind::Fired {
            told(execution, out);
        } else {
            out.push(format!(
                "In its way: execution {}, fired at {}, {}.",
                execution.id,
                rfc3339(execution.fired_ms),
                how_it_is(execution)
            ));
        }
    }
}

/// A late decision: nobody led when it was due, or whoever led was slow, or it had to wait.
fn why_late(decision: &DecisionFacts, by: Option<&EpochFacts>, epochs: &[EpochFacts]) -> Option<String> {
    let by = by?;
    if by.from_ms <= decision.due_ms {
        // What waited or was decided before says so itself.
        return decision.reason.is_none().then(|| {
            format!(
                "It was late although {} led from {} on: the scheduler or the ledger was slow. The scheduler's log of that minute says more.",
                person(&by.holder),
                rfc3339(by.from_ms)
            )
        });
    }
    // The latest leader that was there before this one: several may have come and gone between.
    let earlier = epochs.iter().filter(|e| e.epoch < by.epoch).max_by_key(|e| e.epoch);
    Some(match earlier {
        Some(e) if e.from_ms <= decision.due_ms && e.seen_ms >= decision.due_ms => format!(
            "It was late because of a fail-over: {} led (epoch {}) and was last seen at {}; {} took over at {}.",
            person(&e.holder),
            e.epoch,
            rfc3339(e.seen_ms),
            person(&by.holder),
            rfc3339(by.from_ms)
        ),
        Some(e) => format!(
            "It was late because there was no leader: nobody led from {} (the last sign of {}, epoch {}) to {}.",
            rfc3339(e.seen_ms),
            person(&e.holder),
            e.epoch,
            rfc3339(by.from_ms)
        ),
        None => format!(
            "It was late because there was no leader before {}, when {} began.",
            rfc3339(by.from_ms),
            person(&by.holder)
        ),
    })
}

fn told(execution: &ExecutionFacts, out: &mut Vec<String>) {
    out.push(format!("Execution {} (version {}): {}.", execution.id, execution.version, how_it_is(execution)));
    out.extend(execution.cancelled.as_ref().map(|why| format!("Cancelled: {why}.")));
    for attempt in execution.attempts.iter().take(ATTEMPTS_TOLD) {
        let message = attempt.message.as_ref().filter(|_| attempt.outcome != "success");
        let why = message.map_or(String::new(), |m| format!(": {}", m.trim_end_matches('.')));
        let outcome = match attempt.outcome.as_str() {
            "success" => "ended well",
            "failed" => "failed",
            "timeout" => "timed out",
            "worker_lost" => "was taken from a lost worker",
            "hung" => "was taken back as hung",
            "handed_back" => "was handed back at a shutdown",
            other => other,
        };
        out.push(format!(
            "Shard {}, attempt {} {outcome} after {}{why}.",
            attempt.shard,
            attempt.attempt,
            span(attempt.took_ms)
        ));
    }
    if execution.attempts.len() > ATTEMPTS_TOLD {
        out.push(format!("There are more attempts; all of them: shardcron executions show {} --shards.", execution.id));
    }
}

fn how_it_is(execution: &ExecutionFacts) -> String {
    let shards = if execution.shards == 1 { "shard" } else { "shards" };
    let failed = if execution.failed > 0 { format!(", {} failed", execution.failed) } else { String::new() };
    let took = match execution.ended_ms {
        Some(ended) => format!(", ended at {} after {}", rfc3339(ended), span(ended - execution.fired_ms)),
        None => String::new(),
    };
    format!("{}, {} of {} {shards} well{failed}{took}", execution.phase.word(), execution.succeeded, execution.shards)
}

/// A holder is a scheduler's name and its process life; people know the name.
fn person(holder: &str) -> &str {
    holder.split('/').next().filter(|name| !name.is_empty()).unwrap_or("a scheduler")
}

/// A span for people.
fn span(ms: i64) -> String {
    match ms {
        ..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        7_200_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} days", ms / 86_400_000),
    }
}
