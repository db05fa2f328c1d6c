//! The decision at a nominal instant, or on a trigger: fire, or why not.
//!
//! Two steps. [`due`] looks at a schedule and the clock and says what each instant that has come should become (misfire
//! policy). [`decide`] runs inside the firing transaction, on what the ledger holds there and then (pause, overlap,
//! duplicates), so that two leaders or two clicks can't both pass (F1, O1).

use crate::ids::ExecutionId;
use crate::job::{Misfire, MisfirePolicy, OverlapPolicy};
use crate::limits::{INSTANTS_WALKED, MISSED_INSTANTS};
use crate::schedule::{Schedule, ScheduleError, ScheduleSpec};
use crate::units::rfc3339;
use serde::{Deserialize, Serialize};

/// What was decided. Recorded for every instant, fired or not (F2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionKind {
    /// An execution was made.
    Fired,
    /// The previous execution still ran.
    SkippedOverlap,
    /// The instant had passed by more than the grace, and the policy is to let it go.
    SkippedMisfire,
    /// The job was paused.
    SkippedPaused,
    /// Missed, and made up for by a later instant's firing.
    Coalesced,
    /// The schedule could not be computed.
    InvalidSchedule,
    /// An exception of the schedule names the instant.
    SkippedException,
    /// It waits: for the job to become free, or for its instant. Becomes one of the others.
    Waiting,
    /// What it was to follow did not end as it must.
    SkippedUpstream,
    /// Its shards could not be planned.
    InvalidPlan,
    /// There was nothing to cut into shards: no rows, or only empty files.
    SkippedEmpty,
}

impl DecisionKind {
    const ALL: [(DecisionKind, i64, &'static str); 11] = [
        (DecisionKind::Fired, 0, "fired"),
        (DecisionKind::SkippedOverlap, 1, "skipped_overlap"),
        (DecisionKind::SkippedMisfire, 2, "skipped_misfire"),
        (DecisionKind::SkippedPaused, 3, "skipped_paused"),
        (DecisionKind::Coalesced, 4, "coalesced"),
        (DecisionKind::InvalidSchedule, 5, "invalid_schedule"),
        (DecisionKind::SkippedException, 6, "skipped_exception"),
        (DecisionKind::Waiting, 10, "waiting"),
        (DecisionKind::SkippedUpstream, 11, "skipped_upstream"),
        (DecisionKind::InvalidPlan, 12, "invalid_plan"),
        (DecisionKind::SkippedEmpty, 13, "skipped_empty"),
    ];

    /// The number in the ledger.
    #[must_use]
    pub fn code(self) -> i64 {
        Self::ALL.iter().find(|(k, ..)| *k == self).map_or(-1, |(_, code, _)| *code)
    }

    /// From the number in the ledger.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        Self::ALL.iter().find(|(_, c, _)| *c == code).map(|(k, ..)| *k)
    }

    /// The word that people and metrics see.
    #[must_use]
    pub fn word(self) -> &'static str {
        Self::ALL.iter().find(|(k, ..)| *k == self).map_or("unknown", |(.., word)| *word)
    }
}

/// What to do about one instant that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Fire it, if the ledger lets it.
    Fire {
        /// The instant.
        nominal_ms: i64,
    },
    /// Record that it did not fire.
    Record {
        /// The instant.
        nominal_ms: i64,
        /// Why not.
        kind: DecisionKind,
        /// In a sentence.
        reason: String,
    },
}

impl Intent {
    /// The instant that it is about.
    #[must_use]
    pub fn nominal_ms(&self) -> i64 {
        match self {
            Intent::Fire { nominal_ms } | Intent::Record { nominal_ms, .. } => *nominal_ms,
        }
    }
}

/// What a look at a schedule found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// The instants that have come, oldest first, each with what should become of it.
    pub intents: Vec<Intent>,
    /// The job's next instant; `None` if there is none ever.
    pub next_fire_ms: Option<i64>,
}

/// An instant that has come.
struct Come {
    nominal_ms: i64,
    /// When it was to fire: later than the instant, if the schedule has a jitter.
    due_ms: i64,
    excepted: bool,
}

/// What has come of a schedule between its recorded next instant and now.
///
/// If more have come than [`MISSED_INSTANTS`] and those that the policy may still fire, the oldest [`MISSED_INSTANTS`] are decided
/// and the rest is found by the next call, from the returned next instant. The look goes further than the decision, so that what
/// is decided does not depend on where it was cut: as many instants as may fire are known to come after it. Only where more than
/// [`INSTANTS_WALKED`] excepted ones follow is it cut before that.
///
/// # Errors
/// The calendar could not be computed.
pub fn due(schedule: &Schedule, policy: &MisfirePolicy, next_fire_ms: i64, now_ms: i64) -> Result<Due, ScheduleError> {
    let may_fire = match policy.policy {
        Misfire::FireAll => policy.limit as usize,
        Misfire::FireOnce => 1,
        Misfire::Skip => 0,
    };
    let (mut come, mut beyond) = (Vec::<Come>::new(), 0);
    let mut next = Some(next_fire_ms);
    while let Some(nominal_ms) = next {
        let enough = come.len() >= MISSED_INSTANTS && (beyond >= may_fire || come.len() >= INSTANTS_WALKED);
        let due_ms = schedule.due_at(nominal_ms)?;
        if enough || due_ms > now_ms {
            break;
        }
        let excepted = schedule.is_excepted(nominal_ms);
        beyond += usize::from(come.len() >= MISSED_INSTANTS && !excepted);
        come.push(Come { nominal_ms, due_ms, excepted });
        next = match schedule.next_after(nominal_ms)? {
            // An engine that returns an instant that is not later would spin here for ever (case S-05).
            Some(later) if later <= nominal_ms => {
                return Err(ScheduleError(format!(
                    "the instant after {} was computed as {}",
                    rfc3339(nominal_ms),
                    rfc3339(later)
                )));
            }
            other => other,
        };
    }
    let more = next.map(|n| schedule.due_at(n)).transpose()?.is_some_and(|due_ms| due_ms <= now_ms);
    let mut intents = judge(schedule, &come, policy, now_ms);
    let most = if more { MISSED_INSTANTS } else { MISSED_INSTANTS.saturating_add(may_fire) };
    if intents.len() > most {
        next = come.get(MISSED_INSTANTS).map(|come| come.nominal_ms);
        intents.truncate(MISSED_INSTANTS);
    }
    Ok(Due { intents, next_fire_ms: next })
}

/// The next instant of a job that is changed, and whether its old schedule still owes decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AfterChange {
    /// The next instant.
    pub next_fire_ms: Option<i64>,
    /// The old schedule decides about the instants up to and including this one, from the next one on.
    pub owed_upto_ms: Option<i64>,
}

/// A job before it is changed.
#[derive(Clone, Copy, Debug)]
pub struct BeforeChange<'s> {
    /// Its schedule.
    pub schedule: Option<&'s ScheduleSpec>,
    /// Its next instant.
    pub next_fire_ms: Option<i64>,
    /// Whether that is of a still earlier schedule, which owes decisions.
    pub owes: bool,
}

/// The next instant of a job that is changed, out of the one that it had and the one that its new schedule has after now.
///
/// Instants of the old schedule that have come and have no decision yet stay its own (F2, docs/decisions/0015): it decides about
/// all of them up to now, by the new version's policies, and the new schedule is evaluated from now (case S-10).
#[must_use]
pub fn next_after_change(
    before: BeforeChange<'_>,
    new: Option<&ScheduleSpec>,
    fresh_next: Option<i64>,
    now_ms: i64,
) -> AfterChange {
    let BeforeChange { schedule: old, next_fire_ms: old_next, owes } = before;
    if old == new {
        // None although there is a schedule: it has no instant any more, or could not be computed and may be now.
        let next_fire_ms = old_next.or(fresh_next.filter(|_| new.is_some()));
        return AfterChange { next_fire_ms, owed_upto_ms: None };
    }
    match old_next.filter(|due| *due <= now_ms && (owes || old.is_some())) {
        Some(due) => AfterChange { next_fire_ms: Some(due), owed_upto_ms: old.map(|_| now_ms) },
        None => AfterChange { next_fire_ms: fresh_next.filter(|_| new.is_some()), owed_upto_ms: None },
    }
}

/// What should become of each. Right for all but as many of the last ones as may fire, if later instants have come, too. Excepted
/// instants neither fire nor stand for others.
fn judge(schedule: &Schedule, come: &[Come], policy: &MisfirePolicy, now_ms: i64) -> Vec<Intent> {
    let missed = |come: &Come| now_ms.saturating_sub(come.due_ms) > policy.grace.as_ms();
    let firable = come.iter().filter(|c| !c.excepted).count();
    let late = come.iter().filter(|c| !c.excepted).take_while(|c| missed(c)).count();
    // With everything else missed too, the newest missed instant is the one that fires; else a later one stands for it.
    let fires_once = if late == firable { late.checked_sub(1) } else { None };
    let first_of_all = late.saturating_sub(policy.limit as usize);
    let mut rank = 0;
    come.iter()
        .map(|&Come { nominal_ms, due_ms, excepted }| {
            let lateness_s = now_ms.saturating_sub(due_ms) / 1_000;
            let record = |kind, reason: String| Intent::Record { nominal_ms, kind, reason };
            if excepted {
                let by = schedule.exception(nominal_ms).unwrap_or_default();
                return record(DecisionKind::SkippedException, format!("excepted by '{by}'"));
            }
            let i = rank;
            rank += 1;
            if i >= late {
                return Intent::Fire { nominal_ms };
            }
            match policy.policy {
                Misfire::FireOnce if fires_once == Some(i) => Intent::Fire { nominal_ms },
                Misfire::FireOnce => record(
                    DecisionKind::Coalesced,
                    format!("missed by {lateness_s} s (grace {}); made up for by a later instant", policy.grace),
                ),
                Misfire::Skip => record(
                    DecisionKind::SkippedMisfire,
                    format!("missed by {lateness_s} s, more than the grace of {}", policy.grace),
                ),
                Misfire::FireAll if i >= first_of_all => Intent::Fire { nominal_ms },
                Misfire::FireAll => record(
                    DecisionKind::SkippedMisfire,
                    format!("missed by {lateness_s} s, and beyond the {} latest that fire_all runs", policy.limit),
                ),
            }
        })
        .collect()
}

/// What the ledger holds of a job inside the firing transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobNow {
    /// Who paused it, if it is paused.
    pub paused_by: Option<String>,
    /// Its executions that have not ended.
    pub active: Vec<ExecutionId>,
    /// The execution that this fire key already has.
    pub existing: Option<ExecutionId>,
    /// Whether this fire key already has a decision without an execution that stands in the way. One that says "waiting" does not
    /// where this is the waiting one itself, and none does where a backfill asks again.
    pub decided: bool,
    /// Firings of the job that wait for it to become free.
    pub waiting: usize,
    /// Whether this is the first of those, or a backfill's next one: it fires when the job is free, and waits on while it is not.
    pub turn: bool,
}

/// The verdict inside the transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Make the execution.
    Fire,
    /// Cancel these executions and make the new one.
    Replace(Vec<ExecutionId>),
    /// Keep it until the job is free: the sentence, and the execution that it waits for, unless only others wait before it.
    Wait(String, Option<ExecutionId>),
    /// It waits already, and the job is not free yet: nothing is written.
    NotYet,
    /// Record a decision without one.
    Skip(DecisionKind, String, Option<ExecutionId>),
    /// It has been decided before; nothing is written (F1).
    Duplicate(Option<ExecutionId>),
}

/// Whether a firing may be made. `scheduled` is false for a person's trigger, which a pause does not stop.
#[must_use]
pub fn decide(overlap: OverlapPolicy, now: &JobNow, scheduled: bool) -> Verdict {
    if now.existing.is_some() || now.decided {
        return Verdict::Duplicate(now.existing);
    }
    if let (true, Some(who)) = (scheduled, &now.paused_by) {
        return Verdict::Skip(DecisionKind::SkippedPaused, format!("the job is paused by {who}"), None);
    }
    match (overlap, now.active.first()) {
        (OverlapPolicy::Allow, _) => Verdict::Fire,
        (_, None) if now.turn => Verdict::Fire,
        (_, Some(_)) if now.turn => Verdict::NotYet,
        (OverlapPolicy::Skip, Some(blocking)) => {
            let reason = format!("execution {blocking} of the job still runs, and its overlap policy is skip");
            Verdict::Skip(DecisionKind::SkippedOverlap, reason, Some(*blocking))
        }
        (OverlapPolicy::CancelRunning, Some(_)) => Verdict::Replace(now.active.clone()),
        // In order: a free job whose waiting firings have not had their turn is not free for a later one.
        (OverlapPolicy::Queue { limit }, blocking) if blocking.is_some() || now.waiting > 0 => {
            queue(limit, now.waiting, blocking.copied())
        }
        (OverlapPolicy::Skip | OverlapPolicy::CancelRunning | OverlapPolicy::Queue { .. }, _) => Verdict::Fire,
    }
}

fn queue(limit: u32, waiting: usize, blocking: Option<ExecutionId>) -> Verdict {
    let runs = blocking.map_or_else(
        || "the job is about to run what waits before it".to_owned(),
        |id| format!("execution {id} of the job still runs"),
    );
    if waiting >= limit as usize {
        let reason = format!("{runs}, and its queue is full: {waiting} of {limit} wait already");
        return Verdict::Skip(DecisionKind::SkippedOverlap, reason, blocking);
    }
    Verdict::Wait(format!("{runs}; it waits, {} in the queue", ordinal(waiting)), blocking)
}

fn ordinal(before: usize) -> String {
    match before {
        0 => "first".into(),
        n => format!("number {}", n + 1),
    }
}

/// The fire key of a scheduled instant.
#[must_use]
pub fn schedule_key(nominal_ms: i64) -> String {
    rfc3339(nominal_ms)
}

/// The fire key of a past instant that is run again although it ran: the instant's own, and which request asked for it.
#[must_use]
pub fn again_key(nominal_ms: i64, request_id: &str) -> String {
    format!("{}/again:{request_id}", rfc3339(nominal_ms))
}

/// The fire key of a request by a person or a program.
#[must_use]
pub fn request_key(request_id: &str) -> String {
    format!("request:{request_id}")
}

#[cfg(test)]
mod tests;
