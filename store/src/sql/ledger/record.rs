//! Ends of attempts: guarded updates, results, history, redispatches, dead letters and counters, in one transaction.

use super::rows::{execution_phase, read_shards_of};
use crate::ledger::Verdicts;
use crate::rows::{AttemptOutcome, Ended, Recorded};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::dialect::Dialect;
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, Value, hex, id_list, number_list};
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::limits::{ERROR_BYTES, RESULT_BYTES};
use shardcron_domain::shard::{Effect, Event, FailureClass, Phase, Shard, apply};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;

/// An accepted end, ready to be written.
pub(super) struct Change<'a> {
    pub(super) at: AttemptRef,
    pub(super) owner: Incarnation,
    pub(super) to: To,
    /// The word in the history.
    pub(super) outcome: &'static str,
    pub(super) started_ms: i64,
    pub(super) ended_ms: i64,
    pub(super) rows: Option<u64>,
    /// The summary or the error.
    pub(super) message: Option<&'a str>,
}

/// Where a shard goes.
#[derive(Clone, Copy)]
pub(super) enum To {
    Success,
    Failed {
        failures: u32,
    },
    Pending {
        failures: u32,
        not_before_ms: i64,
    },
    /// Running on, at another owner and under the next attempt.
    Running {
        failures: u32,
        by: Incarnation,
    },
}

impl To {
    /// From what the domain made of the shard.
    pub(super) fn from_step(next: &Shard, effect: Option<Effect>) -> Outcome<Self> {
        match (next.phase, effect) {
            (Phase::Running, None) => match next.owner {
                Some(by) => Ok(To::Running { failures: next.failures, by }),
                None => Err(Fault::corrupt("a shard runs without an owner".into())),
            },
            (Phase::Success, _) => Ok(To::Success),
            (Phase::Failed, _) => Ok(To::Failed { failures: next.failures }),
            (Phase::Pending, Some(Effect::Redispatch { not_before_ms })) => {
                Ok(To::Pending { failures: next.failures, not_before_ms })
            }
            (phase, _) => Err(Fault::corrupt(format!("an attempt's end left its shard {}", phase.word()))),
        }
    }

    fn phase(self) -> Phase {
        match self {
            To::Success => Phase::Success,
            To::Failed { .. } => Phase::Failed,
            To::Pending { .. } => Phase::Pending,
            To::Running { .. } => Phase::Running,
        }
    }
}

/// Only successes and no shard twice: the guarded updates alone can say whether all are accepted.
pub(crate) fn all_plain(ends: &[Ended]) -> bool {
    let mut seen = HashSet::with_capacity(ends.len());
    ends.iter().all(|e| matches!(e.outcome, AttemptOutcome::Success { .. }) && seen.insert(e.attempt.shard()))
}

/// The event that an end is, for the domain.
pub(super) fn event_of(end: &Ended, owner: Incarnation) -> Event {
    let attempt = end.attempt.attempt;
    match &end.outcome {
        AttemptOutcome::Success { .. } => Event::Succeed { attempt, owner },
        AttemptOutcome::Failure { class, .. } => Event::Fail { attempt, owner, class: *class, seed: end.seed },
        AttemptOutcome::HandBack => Event::HandBack { attempt, owner },
    }
}

/// The change that an end makes once it is accepted.
pub(super) fn change_of(end: &Ended, owner: Incarnation, to: To) -> Change<'_> {
    let (outcome, rows, message) = match &end.outcome {
        AttemptOutcome::Success { rows, summary } => ("success", *rows, summary.as_deref()),
        AttemptOutcome::Failure { class: FailureClass::Timeout, message } => ("timeout", None, Some(message.as_str())),
        AttemptOutcome::Failure { class: FailureClass::Stalled, message } => ("stalled", None, Some(message.as_str())),
        AttemptOutcome::Failure { message, .. } => ("failed", None, Some(message.as_str())),
        AttemptOutcome::HandBack => ("handed_back", None, None),
    };
    let (started_ms, ended_ms) = (end.started_ms, end.ended_ms);
    Change { at: end.attempt, owner, to, outcome, started_ms, ended_ms, rows, message }
}

impl SqlLedger {
    /// `plain`: take the short way, which a refused entry turns into [`Fault::Moved`]; the next try takes the long one.
    pub(super) async fn write_ends(
        &self,
        owner: Incarnation,
        ends: &[Ended],
        now_ms: i64,
        plain: bool,
    ) -> Outcome<Verdicts<Recorded>> {
        let mut tx = self.db.begin().await?;
        if plain {
            let changes: Vec<Change> = ends.iter().map(|end| change_of(end, owner, To::Success)).collect();
            let recorded = write_changes(&mut tx, &changes, now_ms).await?;
            tx.commit().await?;
            return Ok(recorded.into_iter().map(Ok).collect());
        }
        let lock = tx.dialect().for_update();
        let mut rows = read_shards_of(&mut tx, ends.iter().map(|end| end.attempt.shard()), lock).await?;
        let mut changes = Vec::with_capacity(ends.len());
        let mut verdicts = Vec::with_capacity(ends.len());
        for end in ends {
            let Some(held) = rows.get_mut(&end.attempt.shard()) else {
                verdicts.push(Err(shardcron_domain::shard::Rejection::NoSuchShard));
                continue;
            };
            match apply(&held.shard, &event_of(end, owner), &end.retry, now_ms) {
                Ok((next, effect)) => {
                    changes.push(change_of(end, owner, To::from_step(&next, effect)?));
                    // The batch's next entry for this shard meets what this one made of it.
                    held.shard = next;
                    verdicts.push(Ok(()));
                }
                Err(rejection) => verdicts.push(Err(rejection)),
            }
        }
        let recorded = write_changes(&mut tx, &changes, now_ms).await?;
        tx.commit().await?;
        let mut recorded = recorded.into_iter();
        verdicts
            .into_iter()
            .map(|verdict| match verdict {
                Ok(()) => recorded.next().map(Ok).ok_or(Fault::Moved),
                Err(rejection) => Ok(Err(rejection)),
            })
            .collect()
    }
}

/// Writes accepted changes; answers in their order. The counters come last: their row is the one that every worker of an
/// execution wants, and it is held only until the commit that follows.
pub(super) async fn write_changes(tx: &mut Tx, changes: &[Change<'_>], now_ms: i64) -> Outcome<Vec<Recorded>> {
    if changes.is_empty() {
        return Ok(Vec::new());
    }
    let settled = settled(changes);
    let mut statements = shard_updates(changes, now_ms);
    let guarded = statements.len();
    statements.extend(traces(tx.dialect(), changes, now_ms));
    statements.extend(counter_writes(&settled, now_ms));
    // One round trip. If a guard did not match, everything behind it is rolled back with it; and a result that is already there
    // is the work of an end that was recorded before.
    let (matched, counters) = tx.raw_batch(&statements).await.map_err(|fault| match fault {
        Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
        other => other,
    })?;
    if matched[..guarded].iter().sum::<u64>() != changes.len() as u64 {
        return Err(Fault::Moved);
    }
    let (ended, let_go) = check_counters(&settled, &counters)?;
    let freed = let_go_writes(&let_go, now_ms);
    if !freed.is_empty() {
        tx.raw_batch(&freed).await?;
    }
    let mut last_of: BTreeMap<ExecutionId, usize> = BTreeMap::new();
    for (position, change) in changes.iter().enumerate() {
        if change.to.phase().is_terminal() {
            last_of.insert(change.at.execution, position);
        }
    }
    Ok(changes
        .iter()
        .enumerate()
        .map(|(position, change)| Recorded {
            phase: change.to.phase(),
            redispatch_at_ms: match change.to {
                To::Pending { not_before_ms, .. } => Some(not_before_ms),
                To::Success | To::Failed { .. } | To::Running { .. } => None,
            },
            // Said once, with the shard that was the last.
            execution_ended: ended
                .get(&change.at.execution)
                .copied()
                .filter(|_| last_of.get(&change.at.execution) == Some(&position)),
        })
        .collect())
}

/// Guarded updates, in the primary key's order: one for each (attempt, owner, next state) and set of shards, over all executions
/// of which these are the shards that end. With many small executions that is one for the whole batch.
fn shard_updates(changes: &[Change<'_>], now_ms: i64) -> Vec<String> {
    type Kind = (u32, Incarnation, i64, Option<u32>, Option<Incarnation>);
    let mut groups: BTreeMap<(ExecutionId, Kind), BTreeMap<u32, i64>> = BTreeMap::new();
    for Change { at, owner, to, .. } in changes {
        let (failures, not_before_ms, by) = match to {
            To::Success => (None, 0, None),
            To::Failed { failures } => (Some(*failures), 0, None),
            To::Pending { failures, not_before_ms } => (Some(*failures), *not_before_ms, None),
            To::Running { failures, by } => (Some(*failures), 0, Some(*by)),
        };
        let kind = (at.attempt, *owner, to.phase().code(), failures, by);
        groups.entry((at.execution, kind)).or_default().insert(at.index, not_before_ms);
    }
    let mut alike: BTreeMap<(Kind, BTreeMap<u32, i64>), Vec<ExecutionId>> = BTreeMap::new();
    for ((execution, kind), rows) in groups {
        alike.entry((kind, rows)).or_default().push(execution);
    }
    let mut updates = Vec::with_capacity(alike.len());
    for (((attempt, owner, state, failures, by), rows), executions) in &alike {
        let mut set = match by {
            Some(by) => {
                let next = attempt.saturating_add(1);
                format!("state = {state}, owner = {}, attempt = {next}, claimed_ms = {now_ms}", hex(by.as_bytes()))
            }
            None => format!("state = {state}, owner = NULL"),
        };
        if let Some(failures) = failures {
            // Writing to a String can't fail.
            let _ = write!(set, ", failures = {failures}");
        }
        if *state == Phase::Pending.code() {
            let _ = write!(set, ", attempt = {}, claimed_ms = 0, not_before_ms = ", attempt.saturating_add(1));
            push_instants(&mut set, rows);
        }
        updates.push(format!(
            "UPDATE shards SET {set} WHERE execution_id IN ({}) AND shard_index IN ({}) AND attempt = {attempt} AND state = 1 \
             AND owner = {}",
            id_list(executions.iter().map(ExecutionId::as_bytes)),
            number_list(rows.keys()),
            hex(owner.as_bytes())
        ));
    }
    updates
}

fn push_instants(set: &mut String, rows: &BTreeMap<u32, i64>) {
    let first = rows.values().next().copied().unwrap_or(0);
    // Writing to a String can't fail.
    if rows.values().all(|ms| *ms == first) {
        let _ = write!(set, "{first}");
        return;
    }
    set.push_str("CASE shard_index");
    for (index, ms) in rows {
        let _ = write!(set, " WHEN {index} THEN {ms}");
    }
    set.push_str(" END");
}

/// Results, history, redispatches and dead letters.
fn traces(dialect: Dialect, changes: &[Change<'_>], now_ms: i64) -> Vec<String> {
    let mut results = Bulk::new(
        "INSERT INTO results (execution_id, shard_index, attempt, owner, started_ms, ended_ms, row_count, summary) VALUES ",
        "",
    );
    let mut history = Bulk::new(
        "INSERT INTO attempts (execution_id, shard_index, attempt, outcome, owner, started_ms, ended_ms, message) VALUES ",
        "",
    );
    // An earlier attempt's row may still be there: its publish was confirmed, the note of it is under way.
    let tail = dialect.upsert("execution_id, shard_index", &["attempt", "not_before_ms"]);
    let mut again =
        Bulk::new("INSERT INTO redispatch (execution_id, shard_index, attempt, not_before_ms) VALUES ", tail);
    let mut dead =
        Bulk::new("INSERT INTO dead_letters (kind, at_ms, reason, execution_id, shard_index, body) VALUES ", "");
    let mut sorted: Vec<&Change> = changes.iter().collect();
    sorted.sort_unstable_by_key(|change| change.at);
    for change in sorted {
        let Change { at, owner, started_ms, ended_ms, .. } = change;
        let execution = || Value::from(at.execution.as_bytes());
        let (started, ended) = (Value::Int(*started_ms), Value::Int(*ended_ms));
        if matches!(change.to, To::Success) {
            let summary = change.message.map(kept_summary);
            let rows = change.rows.map(super::rows::signed);
            let owner = owner.as_bytes().into();
            let row =
                [execution(), at.index.into(), at.attempt.into(), owner, started, ended, rows.into(), summary.into()];
            results.push_row(dialect, &row);
            continue;
        }
        let message = change.message.map(|text| kept(text, ERROR_BYTES));
        let reason = message.clone().unwrap_or_else(|| change.outcome.to_owned());
        let (outcome, owner) = (change.outcome.into(), owner.as_bytes().into());
        let row = [execution(), at.index.into(), at.attempt.into(), outcome, owner, started, ended, message.into()];
        history.push_row(dialect, &row);
        match change.to {
            To::Pending { not_before_ms, .. } => {
                let next = at.attempt.saturating_add(1);
                again.push_row(dialect, &[execution(), at.index.into(), next.into(), not_before_ms.into()]);
            }
            To::Failed { .. } => {
                let row = ["shard".into(), now_ms.into(), reason.into(), execution(), at.index.into(), Value::Null];
                dead.push_row(dialect, &row);
            }
            To::Running { .. } | To::Success => {}
        }
    }
    [results, history, again, dead].into_iter().flat_map(Bulk::into_statements).collect()
}

/// A summary that is too long would be no JSON any more if it were cut.
fn kept_summary(summary: &str) -> String {
    if summary.len() <= RESULT_BYTES {
        return kept(summary, RESULT_BYTES);
    }
    format!("{{\"truncated\":true,\"bytes\":{}}}", summary.len())
}

/// Shards that ended, well and badly, by their execution.
pub(super) type Settled = BTreeMap<ExecutionId, (u32, u32)>;

fn settled(changes: &[Change<'_>]) -> Settled {
    let mut settled = Settled::new();
    for change in changes {
        match change.to {
            To::Success => settled.entry(change.at.execution).or_default().0 += 1,
            To::Failed { .. } => settled.entry(change.at.execution).or_default().1 += 1,
            To::Pending { .. } | To::Running { .. } => {}
        }
    }
    settled
}

/// Adds to the counters, ends what had its last shard, and reads the rows back: one statement for neighbours that settle the same
/// numbers, so that rows are locked in the order of their ids and two batches never wait for each other in a circle. All in the
/// same round trip as everything else: the row that every worker wants stays locked for the commit only. In MySQL an assignment
/// sees those to its left, hence the counters come last.
pub(super) fn counter_writes(settled: &Settled, now_ms: i64) -> Vec<String> {
    let (success, failed_state) = (execution::Phase::Success.code(), execution::Phase::Failed.code());
    let mut statements = Vec::new();
    let all: Vec<(&ExecutionId, &(u32, u32))> = settled.iter().collect();
    for alike in all.chunk_by(|(_, one), (_, next)| one == next) {
        let Some((_, (succeeded, failed))) = alike.first() else { continue };
        let ids = id_list(alike.iter().map(|(id, _)| id.as_bytes()));
        let last = format!("succeeded + failed + cancelled + {} = shards_total", succeeded + failed);
        let end = format!("CASE WHEN failed + {failed} = 0 THEN {success} ELSE {failed_state} END");
        statements.push(format!(
            "UPDATE executions SET state = CASE WHEN {last} THEN {end} ELSE state END, \
             ended_ms = CASE WHEN {last} THEN {now_ms} ELSE ended_ms END, \
             succeeded = succeeded + {succeeded}, failed = failed + {failed} WHERE id IN ({ids}) AND state = 0"
        ));
    }
    if !settled.is_empty() {
        statements.push(format!(
            "SELECT id, state, shards_total, succeeded, failed, cancelled, held FROM executions WHERE id IN ({})",
            id_list(settled.keys().map(ExecutionId::as_bytes))
        ));
    }
    statements
}

/// Executions that ended, and those whose held shards are to be let go, as they are then.
pub(super) type Checked = (BTreeMap<ExecutionId, execution::Phase>, Vec<(ExecutionId, Execution)>);

/// Holds what the statements did against what the domain says, before it is committed. Returns the executions that ended.
pub(super) fn check_counters(settled: &Settled, counters: &[Row]) -> Outcome<Checked> {
    if counters.len() != settled.len() {
        return Err(Fault::corrupt("there are shards whose execution is gone".into()));
    }
    let (mut ended, mut let_go) = (BTreeMap::new(), Vec::new());
    for row in counters {
        let id = row.id(0, ExecutionId::from_slice)?;
        let (succeeded, failed) = settled.get(&id).copied().unwrap_or_default();
        let after = Execution {
            phase: execution_phase(row.int(1)?)?,
            shards_total: row.count(2)?,
            succeeded: row.count(3)?,
            failed: row.count(4)?,
            cancelled: row.count(5)?,
            held: row.count(6)?,
        };
        let before = Execution {
            phase: execution::Phase::Running,
            succeeded: after.succeeded.saturating_sub(succeeded),
            failed: after.failed.saturating_sub(failed),
            ..after
        };
        let expected = execution::apply(&before, execution::Event::Settled { succeeded, failed })
            .map_err(|e| Fault::corrupt(format!("execution {id}: {e}")))?;
        // What is held back is let go, or cancelled, by a statement of its own: only maps have any.
        if after.held > 0 && expected.held == 0 {
            let unheld = Execution { held: after.held, phase: after.phase, cancelled: after.cancelled, ..expected };
            if unheld == after {
                let_go.push((id, expected));
                if expected.phase.is_terminal() {
                    ended.insert(id, expected.phase);
                }
                continue;
            }
        }
        if expected != after {
            return Err(Fault::corrupt(format!("the counters of execution {id} are {after:?} and not {expected:?}")));
        }
        if after.phase.is_terminal() {
            ended.insert(id, after.phase);
        }
    }
    Ok((ended, let_go))
}

/// The statements behind [`check_counters`] for executions whose last shard was held back: it may be handed out, or it never will be.
pub(super) fn let_go_writes(let_go: &[(ExecutionId, Execution)], now_ms: i64) -> Vec<String> {
    let mut statements = Vec::new();
    for (id, after) in let_go {
        let id = hex(id.as_bytes());
        let Execution { phase, shards_total, cancelled, .. } = *after;
        if !phase.is_terminal() {
            statements.push(format!("UPDATE executions SET held = 0 WHERE id = {id}"));
            continue;
        }
        let last = shards_total.saturating_sub(1);
        let state = shardcron_domain::shard::Phase::Cancelled.code();
        statements
            .push(format!("INSERT INTO shards (execution_id, shard_index, state) VALUES ({id}, {last}, {state})"));
        statements.push(format!(
            "UPDATE executions SET held = 0, materialized = {shards_total}, cancelled = {cancelled}, state = {}, \
             ended_ms = {now_ms} WHERE id = {id}",
            phase.code()
        ));
    }
    statements
}
