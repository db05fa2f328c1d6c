//! How shards and executions stand in their rows.

use crate::error::{Result, StoreError};
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, hex, number_list};
use shardcron_domain::limits::CHECKPOINT_BYTES;
use shardcron_domain::shard::{self, Checkpoint, Shard};
use shardcron_domain::{ExecutionId, Incarnation, ShardRef, execution};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A shard's row, locked or just read.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) shard: Shard,
    pub(crate) claimed_ms: i64,
    pub(crate) rows_done: i64,
}

/// The columns of [`held`], in its order.
const COLUMNS: &str = "shard_index, state, attempt, failures, owner, claimed_ms, not_before_ms, rows_done, progress";

fn held(row: &Row) -> Outcome<(u32, Held)> {
    let shard = Shard {
        phase: shard_phase(row.int(1)?)?,
        attempt: row.count(2)?,
        failures: row.count(3)?,
        owner: row.opt_id(4, Incarnation::from_slice)?,
        not_before_ms: row.int(6)?,
        checkpoint: row.opt_text(8)?.map(|text| checkpoint_from(&text)).transpose()?,
    };
    Ok((row.count(0)?, Held { shard, claimed_ms: row.int(5)?, rows_done: row.int(7)? }))
}

/// Reads shards, one statement for each execution, in the order of the primary key. `tail` locks them, or is empty.
pub(crate) async fn read_shards_of(
    tx: &mut Tx,
    wanted: impl IntoIterator<Item = ShardRef>,
    tail: &str,
) -> Outcome<HashMap<ShardRef, Held>> {
    let mut by_execution: BTreeMap<ExecutionId, BTreeSet<u32>> = BTreeMap::new();
    for shard in wanted {
        by_execution.entry(shard.execution).or_default().insert(shard.index);
    }
    let mut found = HashMap::new();
    for (execution, indexes) in by_execution {
        let sql = format!(
            "SELECT {COLUMNS} FROM shards WHERE execution_id = {} AND shard_index IN ({}) ORDER BY shard_index{tail}",
            hex(execution.as_bytes()),
            number_list(indexes)
        );
        for row in tx.raw_rows(&sql).await? {
            let (index, held) = held(&row)?;
            found.insert(ShardRef { execution, index }, held);
        }
    }
    Ok(found)
}

pub(crate) fn shard_phase(code: i64) -> Outcome<shard::Phase> {
    shard::Phase::from_code(code).ok_or_else(|| Fault::corrupt(format!("a shard's state is {code}")))
}

pub(crate) fn execution_phase(code: i64) -> Outcome<execution::Phase> {
    execution::Phase::from_code(code).ok_or_else(|| Fault::corrupt(format!("an execution's state is {code}")))
}

/// A checkpoint's text in its column. JSON, so that 1 and "1" differ and any character survives.
pub(crate) fn checkpoint_text(checkpoint: &Checkpoint) -> Outcome<String> {
    serde_json::to_string(checkpoint).map_err(|e| Fault::corrupt(format!("a checkpoint can't be written: {e}")))
}

pub(crate) fn checkpoint_from(text: &str) -> Outcome<Checkpoint> {
    serde_json::from_str(text).map_err(|e| Fault::corrupt(format!("a shard's checkpoint: {e}")))
}

/// A checkpoint that is too long is refused: cut, it would resume at the wrong place.
pub(crate) fn check_checkpoint(to: &Checkpoint) -> Result<()> {
    match to {
        Checkpoint::Text(text) if text.len() > CHECKPOINT_BYTES => Err(StoreError::Invalid(format!(
            "a checkpoint of {} bytes; at most {CHECKPOINT_BYTES} are kept. Store the rest with the data and keep its key here",
            text.len()
        ))),
        _ => Ok(()),
    }
}

/// For columns that hold counts.
pub(crate) fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// For counts out of columns.
pub(crate) fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
