//! Retention: deletes what has ended long enough ago, in bounded statements that stand alone. An execution is marked before the first of
//! its rows goes, so that nobody sends its shards back meanwhile, and goes last itself, so that a pass that is interrupted finds the mark.
//! How many rows a statement takes is learnt for each table (`domain/src/prune.rs`), so that none keeps its locks for long.

use super::rows::{execution_phase, unsigned};
use crate::rows::{PruneBefore, PruneCursor, Pruned};
use crate::sql::SqlLedger;
use crate::sql::dialect::Dialect;
use crate::sql::fault::Outcome;
use crate::sql::value::{hex, id_list, number_list, push_hex};
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::limits::PRUNE_ROWS;
use shardcron_domain::prune::PrunePace;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Executions that one look passes over.
const LOOK: usize = 2_000;
/// Keys in one statement, in bytes.
const LIST_BYTES: usize = 400 * 1024;
/// The tables of an execution's shards, with their keys.
const PARTS: [(&str, &str); 11] = [
    ("output_chunks", "id"),
    ("once_records", "execution_id, shard_index, record_key"),
    ("redispatch", "execution_id, shard_index"),
    ("watches", "id"),
    ("emitted", "execution_id, attempt, shard_index"),
    ("addressed", "incarnation, execution_id, shard_index"),
    ("cancellations", "execution_id"),
    ("reopenings", "execution_id, round"),
    ("attempts", "execution_id, shard_index, attempt"),
    ("results", "execution_id, shard_index"),
    ("shards", "execution_id, shard_index"),
];

/// Deletes rows of a table by a condition, so many at most. MySQL's DELETE takes a LIMIT; SQLite's takes a list of keys.
fn delete_some(dialect: Dialect, (table, key): (&str, &str), condition: &str, rows: u64) -> String {
    match dialect {
        Dialect::MySql => format!("DELETE FROM {table} WHERE {condition} LIMIT {rows}"),
        Dialect::Sqlite => {
            format!("DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {condition} LIMIT {rows})")
        }
    }
}

/// The decisions of a job that are old; what waits is not decided yet, however long ago it was asked for.
fn old_decisions(job: i64, before_ms: i64) -> String {
    let waiting = DecisionKind::Waiting.code();
    format!("job_id = {job} AND nominal_ms < {before_ms} AND decided_ms < {before_ms} AND kind <> {waiting}")
}

/// The keys of some of them, by the index of their instants. A DELETE takes no hint, and MariaDB walked through the job's primary key instead,
/// over all that is young, with each statement.
fn old_decisions_first(condition: &str, rows: u64) -> String {
    format!(
        "SELECT fire_key FROM decisions FORCE INDEX (decisions_nominal) WHERE {condition} ORDER BY nominal_ms LIMIT {rows}"
    )
}

/// A condition for the first of these keys, and how many they are: what a packet of 1 MB holds with ease.
fn these_decisions(job: i64, keys: &[Vec<u8>]) -> (String, usize) {
    let mut condition = format!("job_id = {job} AND fire_key IN (");
    let mut count = 0;
    for key in keys {
        if condition.len() >= LIST_BYTES {
            break;
        }
        if count > 0 {
            condition.push(',');
        }
        push_hex(&mut condition, key);
        count += 1;
    }
    condition.push(')');
    (condition, count)
}

/// The paces of the tables, learnt while the process lives.
pub(in crate::sql) type Paces = Arc<Mutex<BTreeMap<&'static str, PrunePace>>>;

/// What a statement left of what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// As far as this statement could see, nothing.
    Nothing,
    /// It deleted as many rows as it might; there may be more.
    Perhaps,
}

/// The smallest id that an execution of this instant can have: ids begin with their milliseconds.
fn first_id_of(ms: i64) -> ExecutionId {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&ms.max(0).to_be_bytes()[2..]);
    ExecutionId(uuid::Uuid::from_bytes(bytes))
}

impl SqlLedger {
    fn pace(&self, table: &'static str) -> PrunePace {
        self.paces.lock().unwrap_or_else(PoisonError::into_inner).get(table).copied().unwrap_or_default()
    }

    /// Deletes some rows of a table, at its pace, and notes what it took.
    async fn delete(&self, pruned: &mut Pruned, of: (&'static str, &str), condition: &str) -> Outcome<Left> {
        let pace = self.pace(of.0);
        let statement = delete_some(self.db.dialect(), of, condition, pace.rows());
        let began = Instant::now();
        let gone = self.db.raw(&statement).await?;
        let took = began.elapsed();
        if gone == 0 {
            return Ok(Left::Nothing);
        }
        let of_this = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        *pruned += Pruned { rows: gone, most_rows: gone, longest_ms: of_this, ..Pruned::default() };
        // A simulation must not go by what the machine beside it does.
        if self.goes_by_the_database() {
            let next = pace.after(gone, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
            self.paces.lock().unwrap_or_else(PoisonError::into_inner).insert(of.0, next);
        }
        Ok(if gone < pace.rows() { Left::Nothing } else { Left::Perhaps })
    }

    pub(super) async fn prune_some(&self, before: &PruneBefore, cursor: PruneCursor) -> Outcome<(Pruned, PruneCursor)> {
        match cursor {
            PruneCursor::Executions { after } => self.prune_executions(before, after).await,
            PruneCursor::Decisions { job } => self.prune_decisions(before, job).await,
            PruneCursor::DeadLetters => self.prune_dead_letters(before).await,
            PruneCursor::Backfills => self.prune_backfills(before).await,
            PruneCursor::Done => Ok((Pruned::default(), PruneCursor::Done)),
        }
    }

    /// One step: chooses and marks some, unless others are marked already, and deletes rows of what is marked.
    async fn prune_executions(
        &self,
        before: &PruneBefore,
        after: Option<ExecutionId>,
    ) -> Outcome<(Pruned, PruneCursor)> {
        let (mut marked, mut next) = (self.read_marked().await?, PruneCursor::Executions { after });
        if marked.is_empty() {
            next = self.mark_some(before, after).await?;
            marked = self.read_marked().await?;
        }
        if marked.is_empty() {
            return Ok((Pruned::default(), next));
        }
        let list = id_list(marked.iter().map(ExecutionId::as_bytes));
        let condition = format!("execution_id IN ({list})");
        let mut pruned = Pruned::default();
        // There is more of it: the marks tell the next step.
        let seen = if let PruneCursor::Executions { after } = next { after } else { after };
        for of in PARTS {
            if self.delete(&mut pruned, of, &condition).await? == Left::Perhaps {
                return Ok((pruned, PruneCursor::Executions { after: seen }));
            }
        }
        let before = pruned.rows;
        let left = self.delete(&mut pruned, ("executions", "id"), &format!("id IN ({list})")).await?;
        pruned.executions = pruned.rows - before;
        Ok((pruned, if left == Left::Perhaps { PruneCursor::Executions { after: seen } } else { next }))
    }

    /// Those whose deletion has begun: by the step before this one, by one that was interrupted, or by another process. They go whatever the
    /// retention says by now, for some of their rows are gone.
    async fn read_marked(&self) -> Outcome<Vec<ExecutionId>> {
        let sql = format!(
            "SELECT id, shards_total FROM executions WHERE pruning_ms IS NOT NULL ORDER BY pruning_ms, id LIMIT {LOOK}"
        );
        let (mut batch, mut shards) = (Vec::new(), 0);
        for row in self.db.raw_rows(&sql).await? {
            shards += unsigned(row.int(1)?);
            if !batch.is_empty() && shards > PRUNE_ROWS {
                break;
            }
            batch.push(row.id(0, ExecutionId::from_slice)?);
        }
        Ok(batch)
    }

    /// Marks what has ended and is old among the next executions, as many as a step deletes, and says where the pass goes on.
    async fn mark_some(&self, before: &PruneBefore, after: Option<ExecutionId>) -> Outcome<PruneCursor> {
        let floor = first_id_of(before.success_ms.max(before.failed_ms));
        let from = after.unwrap_or_else(|| first_id_of(0));
        let sql = format!(
            "SELECT id, state, ended_ms, shards_total FROM executions WHERE id > {} AND id < {} ORDER BY id LIMIT {LOOK}",
            hex(from.as_bytes()),
            hex(floor.as_bytes())
        );
        let rows = self.db.raw_rows(&sql).await?;
        let (mut batch, mut shards, mut seen, mut all) = (Vec::new(), 0, after, true);
        for row in &rows {
            let id = row.id(0, ExecutionId::from_slice)?;
            let limit = match execution_phase(row.int(1)?)? {
                Phase::Running => None,
                Phase::Success => Some(before.success_ms),
                Phase::Failed | Phase::Cancelled => Some(before.failed_ms),
            };
            let old = row.opt_int(2)?.zip(limit).is_some_and(|(ended, limit)| ended < limit);
            if old {
                let more = unsigned(row.int(3)?);
                if !batch.is_empty() && shards + more > PRUNE_ROWS {
                    all = false;
                    break;
                }
                shards += more;
                batch.push(id);
            }
            seen = Some(id);
        }
        if !batch.is_empty() {
            self.db.raw(&self.mark(before, &batch)).await?;
        }
        Ok(if all && rows.len() < LOOK {
            PruneCursor::Decisions { job: 0 }
        } else {
            PruneCursor::Executions { after: seen }
        })
    }

    /// Asks again what the look saw: a person may have sent shards back since then, and that takes the same row's lock.
    fn mark(&self, before: &PruneBefore, batch: &[ExecutionId]) -> String {
        let (ok, failed, cancelled) = (Phase::Success.code(), Phase::Failed.code(), Phase::Cancelled.code());
        format!(
            "UPDATE executions SET pruning_ms = {} WHERE id IN ({}) AND pruning_ms IS NULL AND \
             ((state = {ok} AND ended_ms < {}) OR (state IN ({failed}, {cancelled}) AND ended_ms < {}))",
            self.now_ms(),
            id_list(batch.iter().map(ExecutionId::as_bytes)),
            before.success_ms,
            before.failed_ms
        )
    }

    /// By the instant that they are for, of which there is an index; one that was decided late stays for that much longer.
    async fn prune_decisions(&self, before: &PruneBefore, job: i64) -> Outcome<(Pruned, PruneCursor)> {
        let rows = self.db.raw_rows(&format!("SELECT id FROM jobs WHERE id > {job} ORDER BY id LIMIT {LOOK}")).await?;
        for row in &rows {
            let id = row.int(0)?;
            let mut pruned = Pruned::default();
            let left = self.delete_decisions(&mut pruned, id, before.decisions_ms).await?;
            if pruned.rows > 0 {
                pruned.decisions = pruned.rows;
                // There may be more of this job.
                let job = if left == Left::Perhaps { id - 1 } else { id };
                return Ok((pruned, PruneCursor::Decisions { job }));
            }
        }
        match rows.last() {
            Some(last) if rows.len() == LOOK => Ok((Pruned::default(), PruneCursor::Decisions { job: last.int(0)? })),
            _ => Ok((Pruned::default(), PruneCursor::DeadLetters)),
        }
    }

    async fn delete_decisions(&self, pruned: &mut Pruned, job: i64, before_ms: i64) -> Outcome<Left> {
        const OF: (&str, &str) = ("decisions", "job_id, fire_key");
        let condition = old_decisions(job, before_ms);
        if self.db.dialect() == Dialect::Sqlite {
            return self.delete(pruned, OF, &condition).await;
        }
        let most = self.pace(OF.0).rows();
        let rows = self.db.raw_rows(&old_decisions_first(&condition, most)).await?;
        let keys = rows.iter().map(|row| row.bytes(0).map(<[u8]>::to_vec)).collect::<Outcome<Vec<_>>>()?;
        if keys.is_empty() {
            return Ok(Left::Nothing);
        }
        let (these, count) = these_decisions(job, &keys);
        self.delete(pruned, OF, &these).await?;
        Ok(if count < keys.len() || keys.len() as u64 >= most { Left::Perhaps } else { Left::Nothing })
    }

    /// Dead letters are numbered in the order of time, so the old ones are the first.
    async fn prune_dead_letters(&self, before: &PruneBefore) -> Outcome<(Pruned, PruneCursor)> {
        let sql = format!("SELECT id, at_ms FROM dead_letters ORDER BY id LIMIT {PRUNE_ROWS}");
        let mut old = Vec::new();
        for row in self.db.raw_rows(&sql).await? {
            if row.int(1)? >= before.failed_ms {
                break;
            }
            old.push(row.int(0)?);
        }
        if old.is_empty() {
            return Ok((Pruned::default(), PruneCursor::Backfills));
        }
        let mut pruned = Pruned::default();
        let condition = format!("id IN ({})", number_list(&old));
        let left = self.delete(&mut pruned, ("dead_letters", "id"), &condition).await?;
        pruned.dead_letters = pruned.rows;
        let more = left == Left::Perhaps || old.len() as u64 >= PRUNE_ROWS;
        Ok((pruned, if more { PruneCursor::DeadLetters } else { PruneCursor::Backfills }))
    }

    /// Requests to fill in past instants, as long as decisions after all their instants have had their turn.
    async fn prune_backfills(&self, before: &PruneBefore) -> Outcome<(Pruned, PruneCursor)> {
        let condition = format!(
            "at_ms < {} AND NOT EXISTS (SELECT 1 FROM waiting w WHERE w.job_id = backfills.job_id AND w.batch = backfills.request_id)",
            before.decisions_ms
        );
        let mut pruned = Pruned::default();
        let left = self.delete(&mut pruned, ("backfills", "job_id, request_id"), &condition).await?;
        pruned.backfills = pruned.rows;
        Ok((pruned, if left == Left::Perhaps { PruneCursor::Backfills } else { PruneCursor::Done }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ledger as _;
    use crate::sql::SqlOptions;
    use crate::sql::value::Value;

    /// Old ones among many young ones, whose keys come first: the statement must not read those.
    #[tokio::test(flavor = "multi_thread")]
    async fn b_06_old_decisions_are_found_by_their_instant() {
        let url = tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.expect("a database");
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.expect("connect");
        ledger.migrate().await.expect("migrate");
        let digit = "(SELECT 0 AS n UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 \
                     UNION SELECT 8 UNION SELECT 9)";
        for (key, at) in [("a", 9_000_000), ("b", 0)] {
            let fill = format!(
                "INSERT INTO decisions (job_id, fire_key, nominal_ms, kind, decided_ms, epoch) SELECT 1, CONCAT('{key}-', i), {at} + i, 0, \
                 {at} + i, 1 FROM (SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n AS i FROM {digit} a, {digit} b, {digit} c, {digit} d) x"
            );
            ledger.execute_script(&fill).await.expect("fill");
        }
        ledger.execute_script("ANALYZE TABLE decisions").await.expect("analyze");
        let look = old_decisions_first(&old_decisions(1, 1_000_000), 1_000);
        let rows = ledger.db.raw_rows(&look).await.expect("the keys");
        let keys: Vec<Vec<u8>> = rows.iter().map(|row| row.bytes(0).expect("a key").to_vec()).collect();
        assert!(keys.len() == 1_000 && keys[0] == b"b-0" && keys[999] == b"b-999", "the oldest first");
        let (these, count) = these_decisions(1, &keys);
        assert_eq!(count, 1_000);
        let delete = delete_some(Dialect::MySql, ("decisions", "job_id, fire_key"), &these, PRUNE_ROWS);
        for (statement, index) in [(look, "decisions_nominal"), (delete, "PRIMARY")] {
            let plan = ledger.db.raw_rows(&format!("EXPLAIN {statement}")).await.expect("explain");
            let texts: Vec<String> = plan
                .iter()
                .flat_map(|row| &row.0)
                .map(|value| match value {
                    Value::Text(text) => text.clone(),
                    Value::Int(n) => n.to_string(),
                    _ => String::new(),
                })
                .collect();
            assert!(texts.iter().any(|text| text == index), "{texts:?}");
            // The ids, the length of the key and the estimate are numbers; the estimate is of what goes, not of all that is there.
            let most = texts.iter().filter_map(|text| text.parse::<u64>().ok()).max();
            assert!(index != "PRIMARY" || most.is_some_and(|most| most <= 2_000), "{texts:?}");
        }
        let long: Vec<Vec<u8>> = vec![vec![b'k'; 180]; 5_000];
        let (text, count) = these_decisions(1, &long);
        assert!(count < 5_000 && text.len() < 512 * 1024, "{count} keys in {} bytes", text.len());
        let before = PruneBefore { success_ms: 0, failed_ms: 0, decisions_ms: 1_000_000 };
        let mut pruned = Pruned::default();
        while ledger.delete_decisions(&mut pruned, 1, before.decisions_ms).await.expect("delete") == Left::Perhaps {}
        assert_eq!(pruned.rows, 10_000);
        let left = ledger.db.raw_rows("SELECT COUNT(*) FROM decisions").await.expect("count");
        assert_eq!(left[0].int(0).expect("a number"), 10_000, "and nothing else is gone");
    }
}
