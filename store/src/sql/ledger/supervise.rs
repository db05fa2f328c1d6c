//! What the leader takes back, and what people cancel.

use super::cancel::cancel_statements;
use super::leader::check_fence;
use super::record::{Change, To, write_changes};
use super::rows::{checkpoint_from, execution_phase, read_shards_of, unsigned};
use crate::ledger::Verdicts;
use crate::rows::{Recorded, RunningRow};
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::hex;
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Event, Rejection, apply};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation};

/// Every id of an owner is at least this: a range on the index of owners, which holds running shards only.
pub(super) const ANY_OWNER: &str = "x'00000000000000000000000000000000'";

impl SqlLedger {
    pub(super) async fn read_running(&self, limit: usize) -> Outcome<Vec<RunningRow>> {
        let sql = format!(
            "SELECT s.execution_id, s.shard_index, s.attempt, s.owner, s.claimed_ms, e.timeout_ms, s.rows_done, s.progress, e.stall_ms \
             FROM shards s JOIN executions e ON e.id = s.execution_id WHERE s.owner >= {ANY_OWNER} LIMIT {limit}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        rows.iter()
            .map(|row| {
                let execution = row.id(0, ExecutionId::from_slice)?;
                Ok(RunningRow {
                    attempt: AttemptRef { execution, index: row.count(1)?, attempt: row.count(2)? },
                    owner: row.id(3, Incarnation::from_slice)?,
                    claimed_ms: row.int(4)?,
                    timeout_ms: row.opt_int(5)?,
                    rows_done: unsigned(row.int(6)?),
                    stall_ms: row.opt_int(8)?,
                    checkpoint: row.opt_text(7)?.map(|text| checkpoint_from(&text)).transpose()?,
                })
            })
            .collect()
    }

    pub(super) async fn write_reclaims(
        &self,
        epoch: Epoch,
        reclaims: &[(Reclaim, RetryPolicy)],
        now_ms: i64,
    ) -> Outcome<Verdicts<Recorded>> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let lock = tx.dialect().for_update();
        let mut rows = read_shards_of(&mut tx, reclaims.iter().map(|(r, _)| r.attempt.shard()), lock).await?;
        let mut changes = Vec::new();
        let mut refused = Vec::with_capacity(reclaims.len());
        for (Reclaim { attempt, owner, reason }, policy) in reclaims {
            let Some(held) = rows.get_mut(&attempt.shard()) else {
                refused.push(Some(Rejection::NoSuchShard));
                continue;
            };
            let event = Event::Reclaim { attempt: attempt.attempt, owner: *owner, reason: *reason };
            match apply(&held.shard, &event, policy, now_ms) {
                Ok((next, effect)) => {
                    changes.push(Change {
                        at: *attempt,
                        owner: *owner,
                        to: To::from_step(&next, effect)?,
                        outcome: reason.word(),
                        started_ms: held.claimed_ms,
                        ended_ms: now_ms,
                        rows: None,
                        message: Some(reason.sentence()),
                    });
                    held.shard = next;
                    refused.push(None);
                }
                Err(rejection) => refused.push(Some(rejection)),
            }
        }
        let mut recorded = write_changes(&mut tx, &changes, now_ms).await?.into_iter();
        tx.commit().await?;
        refused
            .into_iter()
            .map(|refusal| match refusal {
                Some(rejection) => Ok(Err(rejection)),
                None => recorded.next().map(Ok).ok_or(Fault::Moved),
            })
            .collect()
    }

    pub(super) async fn write_cancel(
        &self,
        id: ExecutionId,
        (who, why, now_ms): (&str, &str, i64),
    ) -> Outcome<Option<execution::Phase>> {
        let hex = hex(id.as_bytes());
        let mut tx = self.db.begin().await?;
        // The execution first: with its row locked, no chunk of new shards can be written behind the cancel's back.
        let lock = tx.dialect().for_update();
        let sql = format!(
            "SELECT state, shards_total, succeeded, failed, cancelled, held FROM executions WHERE id = {hex}{lock}"
        );
        let rows = tx.raw_rows(&sql).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let before = Execution {
            phase: execution_phase(row.int(0)?)?,
            shards_total: row.count(1)?,
            succeeded: row.count(2)?,
            failed: row.count(3)?,
            cancelled: row.count(4)?,
            held: row.count(5)?,
        };
        let Ok(after) = execution::apply(&before, execution::Event::Cancel) else { return Ok(Some(before.phase)) };
        // A million rows may be changed here; a slow disk must not make an execution impossible to cancel.
        let limit = tx.limit(None);
        tx.limit(limit.map(|limit| limit * 10));
        tx.raw_batch(&cancel_statements(tx.dialect(), id, (who, why, now_ms))).await?;
        tx.limit(limit);
        tx.commit().await?;
        Ok(Some(after.phase))
    }
}
