//! Output of attempts: added in bulk, thinned out in the middle, read in the order in which it came in.

use crate::output_rows::{OutputQuery, OutputRow, OutputWrite};
use crate::sql::SqlLedger;
use crate::sql::bulk::Bulk;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::hex;
use shardcron_domain::output::{Chunk, Stream};

impl SqlLedger {
    /// Repeated after a lost answer, it changes nothing: chunks have numbers, and what was deleted is not among those that are added.
    pub(super) async fn write_output(&self, writes: &[OutputWrite], now_ms: i64) -> Outcome<()> {
        let dialect = self.db.dialect();
        let mut statements = Vec::new();
        let (head, tail) = dialect.insert_ignore("output_chunks", "execution_id, shard_index, attempt, seq");
        let columns = "(execution_id, shard_index, attempt, seq, at_ms, stream, position, body) VALUES ";
        let mut rows = Bulk::new(format!("{head} {columns}"), tail);
        for OutputWrite { attempt: at, write } in writes {
            if let Some((from, below)) = write.delete {
                statements.push(format!(
                    "DELETE FROM output_chunks WHERE execution_id = {} AND shard_index = {} AND attempt = {} AND seq >= {from} AND \
                     seq < {below}",
                    hex(at.execution.as_bytes()),
                    at.index,
                    at.attempt
                ));
            }
            for Chunk { seq, stream, position, bytes } in &write.add {
                let position = i64::try_from(*position).unwrap_or(i64::MAX);
                rows.push_row(
                    dialect,
                    &[
                        at.execution.as_bytes().into(),
                        at.index.into(),
                        at.attempt.into(),
                        (*seq).into(),
                        now_ms.into(),
                        stream.code().into(),
                        position.into(),
                        bytes.as_slice().into(),
                    ],
                );
            }
        }
        statements.extend(rows.into_statements());
        if statements.is_empty() {
            return Ok(());
        }
        let mut tx = self.db.begin().await?;
        // One by one: together they may be larger than a packet of the server (case B-02).
        for statement in &statements {
            tx.raw(statement).await?;
        }
        tx.commit().await
    }

    pub(super) async fn read_output(&self, query: &OutputQuery, limit: usize) -> Outcome<Vec<OutputRow>> {
        let only = |column: &str, value: Option<u32>| value.map(|n| format!(" AND {column} = {n}")).unwrap_or_default();
        let sql = format!(
            "SELECT id, at_ms, shard_index, attempt, seq, stream, position, body FROM output_chunks \
             WHERE execution_id = {} AND id > {}{}{} ORDER BY id LIMIT {limit}",
            hex(query.execution.as_bytes()),
            query.after,
            only("shard_index", query.shard),
            only("attempt", query.attempt),
        );
        let rows = self.db.raw_rows(&sql).await?;
        rows.iter()
            .map(|row| {
                let stream = Stream::from_code(row.int(5)?);
                let stream = stream
                    .ok_or_else(|| Fault::corrupt("a stream of output that this version does not know".into()))?;
                let position = u64::try_from(row.int(6)?).unwrap_or(0);
                Ok(OutputRow {
                    id: row.int(0)?,
                    at_ms: row.int(1)?,
                    shard: row.count(2)?,
                    attempt: row.count(3)?,
                    chunk: Chunk { seq: row.count(4)?, stream, position, bytes: row.bytes(7)?.to_vec() },
                })
            })
            .collect()
    }
}
