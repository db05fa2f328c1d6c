//! The rows of records that are worked on once. Everybody who writes them holds the lock on their shard's row, so that no two
//! attempts write those of one shard at a time, and inserts of different shards never wait for each other (case I-04).

use super::effects::check_running;
use super::record::{To, change_of, event_of, write_changes};
use super::rows::{Held, read_shards_of};
use crate::effects_port::RecordsEnd;
use crate::rows::{AttemptOutcome, Ended};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, hex, push_hex};
use shardcron_domain::effects::StepEnd;
use shardcron_domain::limits::{RECORD_MESSAGE_BYTES, RECORDS_REPORTED, RESULT_BYTES};
use shardcron_domain::once::{Known, RecordRow, RecordState, RecordWrite, key_text};
use shardcron_domain::shard::{Phase, Rejection, apply};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation, ShardRef};
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

type Answer<T> = std::result::Result<T, Rejection>;

const COLUMNS: &str = "shard_index, record_key, state, attempt, tries, message";

fn of_shard(shard: ShardRef) -> String {
    format!("execution_id = {} AND shard_index = {}", hex(shard.execution.as_bytes()), shard.index)
}

fn key_list<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut list = String::new();
    for key in keys {
        if !list.is_empty() {
            list.push(',');
        }
        push_hex(&mut list, key);
    }
    list
}

fn state_of(row: &Row, column: usize) -> Outcome<RecordState> {
    let code = row.int(column)?;
    RecordState::from_code(code).ok_or_else(|| Fault::corrupt(format!("a record's state is {code}")))
}

fn record(row: &Row) -> Outcome<RecordRow> {
    Ok(RecordRow {
        shard: row.count(0)?,
        key: row.bytes(1)?.to_vec(),
        state: state_of(row, 2)?,
        attempt: row.count(3)?,
        tries: row.count(4)?,
        message: row.opt_text(5)?,
    })
}

/// Adds rows; `tail` says what becomes of those that are there.
fn insert<'a>(
    attempt: AttemptRef,
    rows: impl IntoIterator<Item = (&'a [u8], RecordState, u32, Option<&'a str>)>,
    dialect: crate::sql::dialect::Dialect,
    tail: String,
) -> Vec<String> {
    let head =
        "INSERT INTO once_records (execution_id, shard_index, record_key, state, attempt, tries, message) VALUES ";
    let shard = format!("{},{},", hex(attempt.execution.as_bytes()), attempt.index);
    let mut bulk = Bulk::new(head, tail);
    for (key, state, tries, message) in rows {
        bulk.push(|text| {
            text.push_str(&shard);
            push_hex(text, key);
            // Writing to a String can't fail.
            let _ = write!(text, ",{},{},{tries},", state.code(), attempt.attempt);
            match message {
                Some(message) => text.push_str(&dialect.text(&kept(message, RECORD_MESSAGE_BYTES))),
                None => text.push_str("NULL"),
            }
        });
    }
    bulk.into_statements()
}

/// What is known of keys, in their order; `note` adds rows for those of which nothing is known.
pub(super) async fn known(
    tx: &mut Tx,
    attempt: AttemptRef,
    keys: &[Vec<u8>],
    note: bool,
) -> Outcome<Vec<Option<Known>>> {
    let dialect = tx.dialect();
    let mut seen = HashSet::with_capacity(keys.len());
    let distinct: Vec<&[u8]> = keys.iter().map(Vec::as_slice).filter(|key| seen.insert(*key)).collect();
    let started = |keys: &[&[u8]]| {
        let rows = keys.iter().map(|key| (*key, RecordState::Started, 0, None));
        insert(attempt, rows.collect::<Vec<_>>(), dialect, String::new())
    };
    // A first attempt that was never interrupted meets only new keys: then one statement is all. A duplicate, and nothing but a
    // duplicate, says that some are known; it undoes its own statement only, so one batch must be one statement.
    if note {
        let statements = started(&distinct);
        if let [statement] = statements.as_slice() {
            match tx.raw(statement).await {
                Ok(_) => return Ok(vec![None; keys.len()]),
                Err(Fault::Server { kind: Kind::Duplicate, .. }) => {}
                Err(other) => return Err(other),
            }
        }
    }
    let mut found: HashMap<Vec<u8>, Known> = HashMap::new();
    for some in distinct.chunks(1_000) {
        let sql = format!(
            "SELECT record_key, state, tries FROM once_records WHERE {} AND record_key IN ({})",
            of_shard(attempt.shard()),
            key_list(some.iter().copied())
        );
        for row in tx.raw_rows(&sql).await? {
            found.insert(row.bytes(0)?.to_vec(), Known { state: state_of(&row, 1)?, tries: row.count(2)? });
        }
    }
    if note {
        let new: Vec<&[u8]> = distinct.into_iter().filter(|key| !found.contains_key(*key)).collect();
        tx.raw_batch(&started(&new)).await?;
    }
    Ok(keys.iter().map(|key| found.get(key).copied()).collect())
}

pub(super) async fn skipped(tx: &mut Tx, shard: ShardRef) -> Outcome<u32> {
    let skipped = RecordState::Skipped.code();
    let sql = format!("SELECT COUNT(*) FROM once_records WHERE {} AND state = {skipped}", of_shard(shard));
    tx.raw_rows(&sql).await?.first().map_or(Ok(0), |row| row.count(0))
}

/// What a step says of records.
pub(super) async fn write(tx: &mut Tx, attempt: AttemptRef, end: &StepEnd) -> Outcome<()> {
    let dialect = tx.dialect();
    let tail = dialect.upsert("execution_id, shard_index, record_key", &["state", "attempt", "tries", "message"]);
    let delete = dialect.delete_by_key("once_records");
    let mut statements = Vec::new();
    let shard = of_shard(attempt.shard());
    for some in end.erased.chunks(1_000) {
        let keys = key_list(some.iter().map(Vec::as_slice));
        statements.push(format!("{delete} WHERE {shard} AND record_key IN ({keys})"));
    }
    let rows = end.writes.iter().map(|w: &RecordWrite| (w.key.as_slice(), w.state, w.tries, w.message.as_deref()));
    statements.extend(insert(attempt, rows, dialect, tail));
    tx.raw_batch(&statements).await.map(drop)
}

/// Whether a row says what this attempt was about to write.
pub(super) async fn stands(tx: &mut Tx, attempt: AttemptRef, write: &RecordWrite) -> Outcome<bool> {
    let sql = format!(
        "SELECT COUNT(*) FROM once_records WHERE {} AND record_key = {} AND state = {} AND attempt = {} AND tries = {}",
        of_shard(attempt.shard()),
        hex(&write.key),
        write.state.code(),
        attempt.attempt,
        write.tries
    );
    Ok(tx.raw_rows(&sql).await?.first().map_or(Ok(0), |row| row.int(0))? > 0)
}

impl SqlLedger {
    pub(super) async fn read_open_records(&self, before: AttemptRef, limit: usize) -> Outcome<Vec<RecordRow>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM once_records WHERE {} AND state IN ({}, {}) AND attempt < {} ORDER BY record_key LIMIT {limit}",
            of_shard(before.shard()),
            RecordState::Started.code(),
            RecordState::Retry.code(),
            before.attempt
        );
        self.db.raw_rows(&sql).await?.iter().map(record).collect()
    }

    pub(super) async fn read_record_report(&self, execution: ExecutionId, limit: usize) -> Outcome<Vec<RecordRow>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM once_records WHERE execution_id = {} AND state IN ({}, {}) \
             ORDER BY shard_index, record_key LIMIT {limit}",
            hex(execution.as_bytes()),
            RecordState::Retry.code(),
            RecordState::Skipped.code()
        );
        self.db.raw_rows(&sql).await?.iter().map(record).collect()
    }

    pub(super) async fn write_records_end(
        &self,
        owner: Incarnation,
        ended: &Ended,
        now_ms: i64,
    ) -> Outcome<Answer<RecordsEnd>> {
        let attempt = ended.attempt;
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let held = read_shards_of(&mut tx, [attempt.shard()], lock).await?;
        let Some(Held { shard, .. }) = held.get(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        // Nobody else ends a shard under this attempt's number: the answer to an earlier call was lost.
        if shard.phase == Phase::Success && shard.attempt == attempt.attempt {
            return Ok(Ok(RecordsEnd::Before));
        }
        if let Err(rejection) = check_running(shard, owner, attempt) {
            return Ok(Err(rejection));
        }
        let mut ended = ended.clone();
        match close_records(&mut tx, &mut ended).await? {
            Closed::NoRecords => return Ok(Ok(RecordsEnd::NoRecords)),
            Closed::Gone => {}
            Closed::Open(open) => {
                drop(tx);
                let some =
                    self.read_open_records(AttemptRef { attempt: u32::MAX, ..attempt }, RECORDS_REPORTED).await?;
                return Ok(Ok(RecordsEnd::Open(open, some)));
            }
        }
        let (next, effect) = match apply(shard, &event_of(&ended, owner), &ended.retry, now_ms) {
            Ok(step) => step,
            Err(rejection) => return Ok(Err(rejection)),
        };
        let change = change_of(&ended, owner, To::from_step(&next, effect)?);
        let recorded = write_changes(&mut tx, &[change], now_ms).await?.pop().ok_or(Fault::Moved)?;
        tx.commit().await?;
        Ok(Ok(RecordsEnd::Recorded(recorded)))
    }
}

/// What became of the rows of a shard's records at its good end.
pub(super) enum Closed {
    /// There were none.
    NoRecords,
    /// They are deleted, with the end; those that were given up stand in the result.
    Gone,
    /// So many are still to be done; nothing was changed.
    Open(u64),
}

/// Ends the records of a shard with its good end, in the same transaction.
pub(super) async fn close_records(tx: &mut Tx, ended: &mut Ended) -> Outcome<Closed> {
    let shard_rows = of_shard(ended.attempt.shard());
    let count = format!("SELECT state, COUNT(*) FROM once_records WHERE {shard_rows} GROUP BY state");
    let mut counts: HashMap<i64, i64> = HashMap::new();
    for row in tx.raw_rows(&count).await? {
        counts.insert(row.int(0)?, row.int(1)?);
    }
    if counts.is_empty() {
        return Ok(Closed::NoRecords);
    }
    let of = |states: &[RecordState]| -> i64 { states.iter().filter_map(|s| counts.get(&s.code())).sum() };
    let open = of(&[RecordState::Started, RecordState::Retry]);
    if open > 0 {
        return Ok(Closed::Open(u64::try_from(open).unwrap_or(0)));
    }
    let skipped = of(&[RecordState::Skipped]);
    if skipped > 0 {
        let sql = format!(
            "SELECT {COLUMNS} FROM once_records WHERE {shard_rows} AND state = {} ORDER BY record_key LIMIT {RECORDS_REPORTED}",
            RecordState::Skipped.code()
        );
        let rows = tx.raw_rows(&sql).await?.iter().map(record).collect::<Outcome<Vec<_>>>()?;
        report(&mut ended.outcome, skipped, &rows);
    }
    let delete = tx.dialect().delete_by_key("once_records");
    tx.raw(&format!("{delete} WHERE {shard_rows}")).await?;
    Ok(Closed::Gone)
}

/// Puts what was given up into the result: `{"summary": …, "skipped_records": {"count": …, "first": […]}}`.
fn report(outcome: &mut AttemptOutcome, skipped: i64, rows: &[RecordRow]) {
    let AttemptOutcome::Success { summary, .. } = outcome else { return };
    let first: Vec<_> =
        rows.iter().map(|row| serde_json::json!({ "key": key_text(&row.key), "why": row.message })).collect();
    let own: Option<serde_json::Value> = summary.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let skipped = serde_json::json!({ "count": skipped, "first": first });
    let whole = serde_json::json!({ "summary": own, "skipped_records": skipped }).to_string();
    // The handler's own summary may be as large as a result can be; then the report goes first.
    let text = if whole.len() <= RESULT_BYTES {
        whole
    } else {
        serde_json::json!({ "summary_dropped": true, "skipped_records": skipped }).to_string()
    };
    *summary = Some(text);
}
