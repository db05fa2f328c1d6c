//! Take-overs: running → running at another owner, under the next attempt, in one transaction.

use super::record::{Change, To, write_changes};
use super::rows::{Held, read_shards_of};
use crate::ledger::Verdicts;
use crate::rows::{TakeOver, TakenOver};
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::hex;
use shardcron_domain::shard::{Event, Phase, Rejection, TAKEN_OVER, apply};
use shardcron_domain::{AttemptRef, Incarnation};

/// An entry's answer before the changes are written.
enum Answer {
    Refused(Rejection),
    /// An earlier call did it.
    Mine(TakenOver),
    /// The next change in the list is it; this is where it goes on if it does.
    Changed(TakenOver),
    /// The next change in the list ends the shard.
    Last,
}

impl SqlLedger {
    pub(super) async fn write_take_overs(
        &self,
        owner: Incarnation,
        wanted: &[TakeOver],
        now_ms: i64,
    ) -> Outcome<Verdicts<TakenOver>> {
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let mut rows = read_shards_of(&mut tx, wanted.iter().map(|w| w.message.shard()), lock).await?;
        let (mut changes, mut answers) = (Vec::new(), Vec::with_capacity(wanted.len()));
        for entry in wanted {
            let Some(held) = rows.get_mut(&entry.message.shard()) else {
                answers.push(Answer::Refused(Rejection::NoSuchShard));
                continue;
            };
            let (answer, change) = take(&mut tx, owner, entry, held, now_ms).await?;
            answers.push(answer);
            changes.extend(change);
        }
        let mut recorded = write_changes(&mut tx, &changes, now_ms).await?.into_iter();
        tx.commit().await?;
        let mut next = || recorded.next().ok_or(Fault::Moved);
        answers
            .into_iter()
            .map(|answer| match answer {
                Answer::Refused(rejection) => Ok(Err(rejection)),
                Answer::Mine(taken) => Ok(Ok(taken)),
                Answer::Changed(taken) => next().map(|_| Ok(taken)),
                Answer::Last => next().map(|recorded| Ok(TakenOver::Ended(recorded))),
            })
            .collect()
    }
}

async fn take<'a>(
    tx: &mut Tx,
    by: Incarnation,
    entry: &TakeOver,
    held: &mut Held,
    now_ms: i64,
) -> Outcome<(Answer, Option<Change<'a>>)> {
    let shard = &held.shard;
    let current = AttemptRef { attempt: shard.attempt, ..entry.message };
    let going_on = |attempt, held: &Held| TakenOver::Running { attempt, checkpoint: held.shard.checkpoint.clone() };
    let (Phase::Running, Some(owner)) = (shard.phase, shard.owner) else {
        let refusal = if shard.phase.is_terminal() { Rejection::Terminal(shard.phase) } else { Rejection::NotRunning };
        return Ok((Answer::Refused(refusal), None));
    };
    if !stands_for(tx, entry.message, shard.attempt).await? {
        let (named, current) = (entry.message.attempt, shard.attempt);
        return Ok((Answer::Refused(Rejection::StaleAttempt { named, current }), None));
    }
    if owner == by && current.attempt > entry.message.attempt {
        return Ok((Answer::Mine(going_on(current, held)), None));
    }
    if entry.from.is_some_and(|from| from != owner) {
        return Ok((Answer::Refused(Rejection::NotOwner(owner)), None));
    }
    let event = Event::TakeOver { attempt: current.attempt, owner, by, reason: entry.reason };
    let (next, effect) = match apply(shard, &event, &entry.retry, now_ms) {
        Ok(step) => step,
        Err(rejection) => return Ok((Answer::Refused(rejection), None)),
    };
    let change = Change {
        at: current,
        owner,
        to: To::from_step(&next, effect)?,
        outcome: TAKEN_OVER,
        started_ms: held.claimed_ms,
        ended_ms: now_ms,
        rows: None,
        message: Some(entry.reason.sentence()),
    };
    held.shard = next;
    let answer = match change.to {
        To::Running { .. } => {
            Answer::Changed(going_on(AttemptRef { attempt: held.shard.attempt, ..entry.message }, held))
        }
        _ => Answer::Last,
    };
    Ok((answer, Some(change)))
}

/// Whether a message of an earlier attempt stands for the one that runs: each between the two was taken over, so that none of them
/// had a message of its own.
async fn stands_for(tx: &mut Tx, message: AttemptRef, current: u32) -> Outcome<bool> {
    let Some(between) = current.checked_sub(message.attempt) else { return Ok(false) };
    if between == 0 {
        return Ok(true);
    }
    let sql = format!(
        "SELECT COUNT(*) FROM attempts WHERE execution_id = {} AND shard_index = {} AND attempt >= {} AND attempt < {current} \
         AND outcome = '{TAKEN_OVER}'",
        hex(message.execution.as_bytes()),
        message.index,
        message.attempt
    );
    let rows = tx.raw_rows(&sql).await?;
    Ok(rows.first().map_or(Ok(0), |row| row.int(0))? == i64::from(between))
}
