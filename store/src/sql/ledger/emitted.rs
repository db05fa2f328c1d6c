//! Shards that a shard makes: staged under its attempt, and made the execution's with the end of that attempt.

use super::once::{Closed, close_records};
use super::record::{To, change_of, event_of, write_changes};
use super::rows::{Held, execution_phase, read_shards_of};
use crate::rows::{Ended, Recorded};
use crate::sharding_port::{Growth, SubResult};
use crate::sql::SqlLedger;
use crate::sql::bulk::Bulk;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::hex;
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::shard::{Phase, Rejection, Shard, apply};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};

type Answer<T> = std::result::Result<T, Rejection>;

/// Why an attempt may not emit; `None`: it may.
fn refused(shard: &Shard, owner: Incarnation, attempt: AttemptRef) -> Option<Rejection> {
    let (named, current) = (attempt.attempt, shard.attempt);
    match (shard.phase, shard.owner) {
        (phase, _) if phase.is_terminal() => Some(Rejection::Terminal(phase)),
        _ if named < current => Some(Rejection::StaleAttempt { named, current }),
        _ if named > current => Some(Rejection::UnknownAttempt { named, current }),
        (Phase::Running, Some(who)) if who == owner => None,
        (Phase::Running, Some(who)) => Some(Rejection::NotOwner(who)),
        _ => Some(Rejection::NotRunning),
    }
}

impl SqlLedger {
    pub(super) async fn write_emitted(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: u32,
        payloads: &[String],
    ) -> Outcome<Answer<()>> {
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let held = read_shards_of(&mut tx, [attempt.shard()], lock).await?;
        let Some(Held { shard, .. }) = held.get(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        if let Some(rejection) = refused(shard, owner, attempt) {
            return Ok(Err(rejection));
        }
        let tail = tx.dialect().upsert("execution_id, attempt, shard_index", &["payload"]);
        let mut rows = Bulk::new("INSERT INTO emitted (execution_id, attempt, shard_index, payload) VALUES ", tail);
        for (index, payload) in (from..).zip(payloads) {
            let id = attempt.execution.as_bytes();
            rows.push_row(tx.dialect(), &[id.into(), attempt.attempt.into(), index.into(), payload.as_str().into()]);
        }
        rows.send(&mut tx).await?;
        tx.commit().await?;
        Ok(Ok(()))
    }

    pub(super) async fn write_map_end(
        &self,
        owner: Incarnation,
        ended: &Ended,
        growth: Growth,
        now_ms: i64,
    ) -> Outcome<Answer<Recorded>> {
        let AttemptRef { execution, attempt, .. } = ended.attempt;
        let id = hex(execution.as_bytes());
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let held = read_shards_of(&mut tx, [ended.attempt.shard()], lock).await?;
        let Some(Held { shard, .. }) = held.get(&ended.attempt.shard()) else {
            return Ok(Err(Rejection::NoSuchShard));
        };
        let (next, effect) = match apply(shard, &event_of(ended, owner), &ended.retry, now_ms) {
            Ok(done) => done,
            Err(rejection) => return Ok(Err(rejection)),
        };
        tx.raw(&format!(
            "DELETE FROM emitted WHERE execution_id = {id} AND (attempt <> {attempt} OR shard_index > {})",
            growth.emitted
        ))
        .await?;
        let staged = tx.raw_rows(&format!("SELECT COUNT(*) FROM emitted WHERE execution_id = {id}")).await?;
        let staged = staged.first().map_or(Ok(0), |row| row.count(0))?;
        if staged != growth.emitted {
            return Err(Fault::corrupt(format!(
                "{} shards of execution {execution} were emitted and {staged} are kept",
                growth.emitted
            )));
        }
        let sql = format!(
            "SELECT state, shards_total, succeeded, failed, cancelled, held FROM executions WHERE id = {id}{lock}"
        );
        let rows = tx.raw_rows(&sql).await?;
        let Some(row) = rows.first() else { return Err(Fault::corrupt("a shard's execution is gone".into())) };
        let before = Execution {
            phase: execution_phase(row.int(0)?)?,
            shards_total: row.count(1)?,
            succeeded: row.count(2)?,
            failed: row.count(3)?,
            cancelled: row.count(4)?,
            held: row.count(5)?,
        };
        let grown =
            execution::apply(&before, execution::Event::Grow { emitted: growth.emitted, reduce: growth.reduce })
                .map_err(|e| Fault::corrupt(format!("execution {execution}: {e}")))?;
        tx.raw(&format!(
            "UPDATE executions SET shards_total = {}, held = {} WHERE id = {id}",
            grown.shards_total, grown.held
        ))
        .await?;
        let mut ended = ended.clone();
        if let Closed::Open(open) = close_records(&mut tx, &mut ended).await? {
            return Err(Fault::invalid(format!("records of shard {execution}/0 are still to be done: {open}")));
        }
        let change = change_of(&ended, owner, To::from_step(&next, effect)?);
        let recorded = write_changes(&mut tx, &[change], now_ms).await?;
        tx.commit().await?;
        recorded.into_iter().next().map(Ok).ok_or(Fault::Moved)
    }

    pub(super) async fn read_emitted(&self, execution: ExecutionId, index: u32) -> Outcome<Option<String>> {
        let sql =
            "SELECT payload FROM emitted WHERE execution_id = ? AND shard_index = ? ORDER BY attempt DESC LIMIT 1";
        let rows = self.db.rows(sql, &[execution.as_bytes().into(), index.into()]).await?;
        rows.first().map(|row| row.text(0)).transpose()
    }

    pub(super) async fn count_emitted(&self, execution: ExecutionId) -> Outcome<u32> {
        let sql = "SELECT COUNT(*) FROM emitted WHERE execution_id = ?";
        let rows = self.db.rows(sql, &[execution.as_bytes().into()]).await?;
        rows.first().map_or(Ok(0), |row| row.count(0))
    }

    pub(super) async fn read_sub_results(
        &self,
        execution: ExecutionId,
        from: u32,
        limit: usize,
    ) -> Outcome<Vec<SubResult>> {
        let sql = "SELECT shard_index, row_count, summary FROM results WHERE execution_id = ? AND shard_index >= ? \
                   ORDER BY shard_index LIMIT ?";
        let rows = self.db.rows(sql, &[execution.as_bytes().into(), from.into(), limit.into()]).await?;
        rows.iter()
            .map(|row| {
                let rows = row.opt_int(1)?.map(super::rows::unsigned);
                Ok(SubResult { index: row.count(0)?, rows, summary: row.opt_text(2)? })
            })
            .collect()
    }
}
