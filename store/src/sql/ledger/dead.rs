//! Dead letters: looking at them, and settling what a person has decided about.

use crate::ops_rows::{DeadQuery, DeadSettled};
use crate::rows::{AttemptRow, DeadRow};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::Outcome;
use crate::sql::value::{Row, Value, number_list};
use shardcron_domain::limits::ERROR_BYTES;
use shardcron_domain::{ExecutionId, Incarnation, ShardRef};

const LETTER: &str = "d.id, d.kind, d.at_ms, d.reason, d.execution_id, d.shard_index, d.body, j.name FROM dead_letters d \
                      LEFT JOIN executions e ON e.id = d.execution_id LEFT JOIN jobs j ON j.id = e.job_id";

fn letter(row: &Row) -> Outcome<DeadRow> {
    let execution = row.opt_id(4, ExecutionId::from_slice)?;
    Ok(DeadRow {
        id: row.int(0)?,
        kind: row.text(1)?,
        at_ms: row.int(2)?,
        reason: row.text(3)?,
        shard: execution.map(|id| row.count(5).map(|index| (id, index))).transpose()?,
        text: row.opt_text(6)?,
        job: row.opt_text(7)?,
    })
}

impl SqlLedger {
    pub(super) async fn read_dead(&self, query: &DeadQuery, limit: usize) -> Outcome<Vec<DeadRow>> {
        let mut wheres = Vec::new();
        let mut args: Vec<Value> = Vec::new();
        if !query.ids.is_empty() {
            let one = |(from, to): &(i64, i64)| format!("d.id BETWEEN {from} AND {to}");
            wheres.push(format!("({})", query.ids.iter().map(one).collect::<Vec<_>>().join(" OR ")));
        }
        if let Some(job) = &query.job {
            wheres.push("j.name = ?".to_owned());
            args.push(job.as_str().into());
        }
        if let Some(kind) = query.kind {
            wheres.push("d.kind = ?".to_owned());
            args.push(kind.word().into());
        }
        if let Some(after) = query.after {
            wheres.push(format!("d.id > {after}"));
        }
        let filter = if wheres.is_empty() { String::new() } else { format!(" WHERE {}", wheres.join(" AND ")) };
        let order = if query.after.is_some() { "" } else { " DESC" };
        args.push(limit.into());
        let sql = format!("SELECT {LETTER}{filter} ORDER BY d.id{order} LIMIT ?");
        self.db.rows(&sql, &args).await?.iter().map(letter).collect()
    }

    pub(super) async fn delete_dead(&self, settled: &DeadSettled, now_ms: i64) -> Outcome<Vec<i64>> {
        let mut tx = self.db.begin().await?;
        let list = number_list(&settled.ids);
        let lock = tx.dialect().for_update();
        // Locked before they are read: two who settle the same letter leave one row in the audit.
        tx.raw_rows(&format!("SELECT id FROM dead_letters WHERE id IN ({list}) ORDER BY id{lock}")).await?;
        let rows = tx.raw_rows(&format!("SELECT {LETTER} WHERE d.id IN ({list}) ORDER BY d.id")).await?;
        let letters: Vec<DeadRow> = rows.iter().map(letter).collect::<Outcome<_>>()?;
        let ids: Vec<i64> = letters.iter().map(|letter| letter.id).collect();
        if ids.is_empty() {
            return Ok(ids);
        }
        let mut audit =
            Bulk::new("INSERT INTO audit (at_ms, who, action, subject, before_text, after_text) VALUES ", "");
        let (who, why) = (kept(&settled.who, 255), kept(&settled.why, ERROR_BYTES));
        for DeadRow { id, shard, reason, text, .. } in letters {
            let subject = match shard {
                Some((execution, index)) => format!("dead letter {id}: shard {execution}/{index}"),
                None => format!("dead letter {id}: message"),
            };
            let before = text.map_or_else(|| reason.clone(), |text| format!("{reason}\n{text}"));
            let row = [
                now_ms.into(),
                who.as_str().into(),
                settled.action.into(),
                subject.into(),
                before.into(),
                why.as_str().into(),
            ];
            audit.push_row(tx.dialect(), &row);
        }
        audit.send(&mut tx).await?;
        tx.raw(&format!("DELETE FROM dead_letters WHERE id IN ({})", number_list(&ids))).await?;
        tx.commit().await?;
        Ok(ids)
    }

    pub(super) async fn read_attempts_of(&self, shard: ShardRef, limit: usize) -> Outcome<Vec<AttemptRow>> {
        let sql = "SELECT attempt, outcome, owner, started_ms, ended_ms, message, 0 FROM attempts \
                   WHERE execution_id = ? AND shard_index = ? \
                   UNION ALL SELECT attempt, 'success', owner, started_ms, ended_ms, summary, 1 FROM results \
                   WHERE execution_id = ? AND shard_index = ? ORDER BY 7, 1 LIMIT ?";
        let (id, index) = (shard.execution.as_bytes(), shard.index);
        let args: [Value; 5] = [id.into(), index.into(), id.into(), index.into(), limit.into()];
        let rows = self.db.rows(sql, &args).await?;
        rows.iter()
            .map(|row| {
                Ok(AttemptRow {
                    index,
                    attempt: row.count(0)?,
                    outcome: row.text(1)?,
                    owner: row.id(2, Incarnation::from_slice)?,
                    started_ms: row.int(3)?,
                    ended_ms: row.int(4)?,
                    message: row.opt_text(5)?,
                })
            })
            .collect()
    }
}
