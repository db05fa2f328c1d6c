//! What pollers read: the ledger as a queue, in a cluster without a broker or while it is away.

use super::leader::check_fence;
use super::rows::unsigned;
use super::supervise::ANY_OWNER;
use crate::ledger::PollCursor;
use crate::rows::{Polling, Redispatch};
use crate::sql::SqlLedger;
use crate::sql::fault::Outcome;
use crate::sql::value::{hex, id_list};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, ShardRef};

/// Shard rows that one look of a poller passes over at most. Without it, each look at an execution of a million shards whose last
/// one still runs would read the million.
const POLL_ROWS: u32 = 20_000;
/// Executions that one look takes into view.
const POLL_EXECUTIONS: usize = 512;
/// Executions up to this many shards are looked at together, by one statement: ten thousand of one shard must not be ten thousand
/// questions.
const SMALL: u32 = 256;

/// What a poller may find something in: more is handed out than has ended. An attempt that was handed out above the watermark (its
/// leader died before it noted that) is found once the next leader has noted it.
const PROMISING: &str = "state = 0 AND dispatched > succeeded + failed + cancelled";
/// A shard that waits for nobody but a worker. Behind `s`, its redispatch as `r`.
const DUE: &str = "s.state = 0 AND s.not_before_ms <= ? AND r.execution_id IS NULL";
const JOIN_REDISPATCH: &str =
    "LEFT JOIN redispatch r ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index";

/// An execution in a poller's view.
#[derive(Clone, Copy)]
struct Seen {
    id: ExecutionId,
    dispatched: u32,
    materialized: u32,
}

/// A stretch of an execution's shards that is looked at.
#[derive(Clone, Copy)]
struct Leg {
    seen: Seen,
    from: u32,
    to: u32,
}

impl Leg {
    /// Whether all rows of the execution are meant, so that the statement needs no bounds.
    fn small(&self) -> bool {
        self.from == 0 && self.to == self.seen.materialized && self.to == self.seen.dispatched && self.to <= SMALL
    }

    fn rows(&self) -> u32 {
        self.to.saturating_sub(self.from)
    }
}

impl SqlLedger {
    /// Pending shards of `from..upto` that are due and have been handed out: a first attempt below the watermark, a later one
    /// without a row in `redispatch`.
    pub(super) async fn read_handed_out(
        &self,
        execution: ExecutionId,
        (from, upto): (u32, u32),
        now_ms: i64,
        limit: usize,
    ) -> Outcome<Vec<AttemptRef>> {
        let sql = format!(
            "SELECT s.shard_index, s.attempt FROM executions e JOIN shards s ON s.execution_id = e.id {JOIN_REDISPATCH} \
             WHERE e.id = ? AND s.execution_id = ? AND s.shard_index >= ? AND s.shard_index < ? AND {DUE} \
             AND (s.attempt > 1 OR s.shard_index < e.dispatched) ORDER BY s.shard_index LIMIT ?"
        );
        let id = execution.as_bytes();
        let args = [id.into(), id.into(), from.into(), upto.into(), now_ms.into(), limit.into()];
        let rows = self.db.rows(&sql, &args).await?;
        rows.iter().map(|row| Ok(AttemptRef { execution, index: row.count(0)?, attempt: row.count(1)? })).collect()
    }

    pub(super) async fn read_claimable(
        &self,
        tier: &str,
        cursor: PollCursor,
        now_ms: i64,
        limit: usize,
    ) -> Outcome<(Vec<AttemptRef>, PollCursor)> {
        let legs = self.legs(tier, cursor).await?;
        let (mut found, mut budget, mut moved) = (Vec::new(), POLL_ROWS, cursor);
        let mut at = 0;
        while at < legs.len() && budget > 0 && found.len() < limit {
            let left = limit - found.len();
            let together = together(&legs[at..], budget);
            let (some, reached) = if together > 1 {
                self.look_at_small(&legs[at..at + together], now_ms, left).await?
            } else {
                let leg = legs[at];
                let upto = leg.to.min(leg.from.saturating_add(budget));
                let some = self.read_handed_out(leg.seen.id, (leg.from, upto), now_ms, left).await?;
                let filled = some.last().filter(|_| some.len() == left);
                let index = filled.map_or(upto, |last| last.index + 1);
                (some, PollCursor { execution: Some(leg.seen.id), index })
            };
            budget = budget.saturating_sub(legs[at..at + together].iter().map(Leg::rows).sum());
            found.extend(some);
            moved = reached;
            at += together;
        }
        Ok((found, moved))
    }

    /// The executions in view, each with what of it is to be looked at: from the cursor on, and round to it again. What lies before
    /// the cursor in its own execution comes last, so that one look is one whole round where it fits.
    async fn legs(&self, tier: &str, cursor: PollCursor) -> Outcome<Vec<Leg>> {
        let mut view = Vec::new();
        let begin = cursor.execution.unwrap_or(ExecutionId(uuid::Uuid::nil()));
        self.view(tier, (">=", begin), &mut view).await?;
        if cursor.execution.is_some() && view.len() < POLL_EXECUTIONS {
            self.view(tier, ("<", begin), &mut view).await?;
        }
        let whole = |seen: &Seen| Leg { seen: *seen, from: 0, to: seen.dispatched };
        let mut legs: Vec<Leg> = view.iter().map(whole).collect();
        let resumes = legs.first().copied().filter(|first| Some(first.seen.id) == cursor.execution && cursor.index > 0);
        if let Some(first) = resumes {
            let middle = cursor.index.min(first.to);
            legs[0].from = middle;
            legs.push(Leg { to: middle, ..first });
        }
        Ok(legs)
    }

    async fn view(&self, tier: &str, (side, at): (&str, ExecutionId), view: &mut Vec<Seen>) -> Outcome<()> {
        let sql = format!(
            "SELECT id, dispatched, materialized FROM executions \
             WHERE {PROMISING} AND tier = ? AND id {side} ? ORDER BY id LIMIT ?"
        );
        let room = POLL_EXECUTIONS - view.len();
        let rows = self.db.rows(&sql, &[tier.into(), at.as_bytes().into(), room.into()]).await?;
        for row in rows {
            let id = row.id(0, ExecutionId::from_slice)?;
            view.push(Seen { id, dispatched: row.count(1)?, materialized: row.count(2)? });
        }
        Ok(())
    }

    /// Small executions, all of whose shards have been handed out, by one statement over the shards alone, which the primary key
    /// answers in its order.
    async fn look_at_small(&self, legs: &[Leg], now_ms: i64, limit: usize) -> Outcome<(Vec<AttemptRef>, PollCursor)> {
        let ids = id_list(legs.iter().map(|leg| leg.seen.id.as_bytes()));
        let sql = format!(
            "SELECT s.execution_id, s.shard_index, s.attempt FROM shards s {JOIN_REDISPATCH} \
             WHERE s.execution_id IN ({ids}) AND {} ORDER BY s.execution_id, s.shard_index LIMIT {limit}",
            due(now_ms)
        );
        let mut found = Vec::new();
        for row in self.db.raw_rows(&sql).await? {
            let execution = row.id(0, ExecutionId::from_slice)?;
            found.push(AttemptRef { execution, index: row.count(1)?, attempt: row.count(2)? });
        }
        let last = legs.last().map(|leg| PollCursor { execution: Some(leg.seen.id), index: leg.to });
        let filled = found.last().filter(|_| found.len() == limit);
        let reached = filled.map(|last| PollCursor { execution: Some(last.execution), index: last.index + 1 });
        Ok((found, reached.or(last).unwrap_or_default()))
    }

    /// Everything that is handed out and pending, a page at a time.
    pub(super) async fn read_all_handed_out(
        &self,
        after: Option<ShardRef>,
        now_ms: i64,
        limit: usize,
    ) -> Outcome<Vec<Redispatch>> {
        // Two statements, as no server reads "behind this pair" from an index over two tables.
        let mut found = Vec::new();
        if let Some(ShardRef { execution, index }) = after {
            let id = hex(execution.as_bytes());
            let here = format!("e.id = {id} AND s.execution_id = {id} AND s.shard_index > {index}");
            found = self.page(&here, now_ms, limit).await?;
        }
        if found.len() < limit {
            let behind =
                after.map_or_else(|| "e.state = 0".into(), |a| format!("e.id > {}", hex(a.execution.as_bytes())));
            found.extend(self.page(&behind, now_ms, limit - found.len()).await?);
        }
        Ok(found)
    }

    async fn page(&self, and: &str, now_ms: i64, limit: usize) -> Outcome<Vec<Redispatch>> {
        let sql = format!(
            "SELECT s.execution_id, s.shard_index, s.attempt, e.tier \
             FROM executions e JOIN shards s ON s.execution_id = e.id {JOIN_REDISPATCH} \
             WHERE e.state = 0 AND e.dispatched > 0 AND {} AND (s.attempt > 1 OR s.shard_index < e.dispatched) AND {and} \
             ORDER BY s.execution_id, s.shard_index LIMIT {limit}",
            due(now_ms)
        );
        let rows = self.db.raw_rows(&sql).await?;
        rows.iter()
            .map(|row| {
                let execution = row.id(0, ExecutionId::from_slice)?;
                let attempt = AttemptRef { execution, index: row.count(1)?, attempt: row.count(2)? };
                Ok(Redispatch { attempt, tier: row.text(3)? })
            })
            .collect()
    }

    pub(super) async fn read_outstanding(&self, tier: &str) -> Outcome<u32> {
        let int = self.db.dialect().integer();
        // By the counters and not by the rows, of which a large execution has a million that have ended.
        let sql = format!(
            "SELECT (SELECT COALESCE(CAST(SUM(dispatched - succeeded - failed - cancelled) AS {int}), 0) \
                     FROM executions WHERE state = 0 AND tier = ?) \
                  - (SELECT COUNT(*) FROM shards s JOIN executions e ON e.id = s.execution_id \
                     WHERE s.owner >= {ANY_OWNER} AND e.state = 0 AND e.tier = ?) \
                  - (SELECT COUNT(*) FROM redispatch r JOIN executions e ON e.id = r.execution_id \
                     WHERE e.state = 0 AND e.tier = ?)"
        );
        let rows = self.db.rows(&sql, &[tier.into(), tier.into(), tier.into()]).await?;
        let count = unsigned(rows.first().map_or(Ok(0), |row| row.int(0))?);
        Ok(u32::try_from(count).unwrap_or(u32::MAX))
    }

    pub(super) async fn read_polling(&self) -> Outcome<Option<Polling>> {
        let rows = self.db.raw_rows("SELECT since_ms, marks FROM polling WHERE id = 1").await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let marks = row.int(1)?;
        Ok(row.opt_int(0)?.map(|since_ms| Polling { since_ms, marks }))
    }

    pub(super) async fn write_polling_ended(&self, epoch: Epoch, seen: &Polling) -> Outcome<bool> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let matched =
            tx.raw(&format!("UPDATE polling SET since_ms = NULL WHERE id = 1 AND marks = {}", seen.marks)).await?;
        tx.commit().await?;
        Ok(matched > 0)
    }
}

/// The same for a statement whose text is another each time, and so nothing to prepare.
fn due(now_ms: i64) -> String {
    DUE.replace('?', &now_ms.to_string())
}

/// How many legs at the beginning are looked at together: one, or a run of small ones within the budget. A run does not go round
/// from the last execution to the first: its answer comes in the order of ids.
fn together(legs: &[Leg], budget: u32) -> usize {
    let (mut rows, mut last) = (0, None);
    let fits = |leg: &&Leg| {
        rows += leg.rows();
        leg.small() && rows <= budget && last.replace(leg.seen.id).is_none_or(|last| last < leg.seen.id)
    };
    legs.iter().take_while(fits).count().max(1)
}
