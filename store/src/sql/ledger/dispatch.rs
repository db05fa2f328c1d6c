//! Handing shards out: the outbox, and what the dispatcher reads of it.

use super::fire::push_shards;
use super::leader::check_fence;
use super::rows::execution_phase;
use crate::rows::{ActiveExecution, ExecutionHead, Redispatch};
use crate::sql::SqlLedger;
use crate::sql::bulk::Bulk;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::{Row, Value, hex, id_list};
use shardcron_domain::limits::SHARD_ROWS_PER_WRITE;
use shardcron_domain::plan::ADDRESSED;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, JobId};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Rows of one materializing transaction: few enough that a firing never waits long for the leader's row.
const MATERIALIZE_ROWS: u32 = SHARD_ROWS_PER_WRITE * 5;

impl SqlLedger {
    pub(super) async fn read_active(&self) -> Outcome<Vec<ActiveExecution>> {
        let sql = "SELECT id, tier, shards_total - held, materialized, dispatched, succeeded + failed + cancelled \
                   FROM executions WHERE state = 0 AND tier NOT LIKE '@%' ORDER BY id";
        let rows = self.db.raw_rows(sql).await?;
        rows.iter()
            .map(|row| {
                Ok(ActiveExecution {
                    id: row.id(0, ExecutionId::from_slice)?,
                    tier: row.text(1)?,
                    shards_total: row.count(2)?,
                    materialized: row.count(3)?,
                    dispatched: row.count(4)?,
                    ended: row.count(5)?,
                })
            })
            .collect()
    }

    /// One transaction's worth; how far the rows reach now, and whether there is more to do.
    pub(super) async fn materialize_some(
        &self,
        epoch: Epoch,
        execution: ExecutionId,
        upto: u32,
    ) -> Outcome<(u32, bool)> {
        let id = hex(execution.as_bytes());
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        // Locked, so that a cancel can't pass between this look and the new rows.
        let lock = tx.dialect().for_update();
        let sql = format!("SELECT state, shards_total - held, materialized FROM executions WHERE id = {id}{lock}");
        let rows = tx.raw_rows(&sql).await?;
        let Some(row) = rows.first() else {
            return Err(Fault::invalid(format!("there is no execution {execution}")));
        };
        let (phase, total, reached) = (execution_phase(row.int(0)?)?, row.count(1)?, row.count(2)?);
        let goal = upto.min(total);
        if phase.is_terminal() || reached >= goal {
            return Ok((reached, false));
        }
        let end = goal.min(reached.saturating_add(MATERIALIZE_ROWS));
        let mut bulk = Bulk::new("INSERT INTO shards (execution_id, shard_index) VALUES ", "");
        push_shards(&mut bulk, execution, reached..end);
        bulk.send(&mut tx).await?;
        tx.raw(&format!("UPDATE executions SET materialized = {end} WHERE id = {id}")).await?;
        tx.commit().await?;
        Ok((end, end < goal))
    }

    /// `left_ms`: no message was sent, so the same transaction tells the pollers to look.
    pub(super) async fn write_dispatched(
        &self,
        epoch: Epoch,
        firsts: &[(ExecutionId, u32)],
        again: &[AttemptRef],
        left_ms: Option<i64>,
    ) -> Outcome<()> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        if let Some(now_ms) = left_ms {
            let set = format!("since_ms = COALESCE(since_ms, {now_ms}), marks = marks + 1");
            tx.raw(&format!("UPDATE polling SET {set} WHERE id = 1")).await?;
        }
        let greatest = tx.dialect().greatest();
        let mut sorted = again.to_vec();
        sorted.sort_unstable();
        for chunk in sorted.chunks(200) {
            let mut rows = String::new();
            for AttemptRef { execution, index, attempt } in chunk {
                let or = if rows.is_empty() { "" } else { " OR " };
                let id = hex(execution.as_bytes());
                // Only the attempt that was published: a later one that waits has its own turn. Writing to a String can't fail.
                let _ = write!(rows, "{or}(execution_id = {id} AND shard_index = {index} AND attempt = {attempt})");
            }
            tx.raw(&format!("DELETE FROM redispatch WHERE {rows}")).await?;
        }
        let mut marks: BTreeMap<ExecutionId, u32> = BTreeMap::new();
        for (execution, below) in firsts {
            let mark = marks.entry(*execution).or_default();
            *mark = (*mark).max(*below);
        }
        if let Some(first) = marks.values().next() {
            // Many small executions are all marked alike; a CASE over them would be looked through for each.
            let mark = if marks.values().all(|below| below == first) {
                first.to_string()
            } else {
                let mut cases = String::from("CASE id");
                for (execution, below) in &marks {
                    // Writing to a String can't fail.
                    let _ = write!(cases, " WHEN {} THEN {below}", hex(execution.as_bytes()));
                }
                cases + " END"
            };
            let list = id_list(marks.keys().map(ExecutionId::as_bytes));
            let set = format!("dispatched = {greatest}(dispatched, {mark})");
            tx.raw(&format!("UPDATE executions SET {set} WHERE id IN ({list})")).await?;
        }
        tx.commit().await
    }

    pub(super) async fn read_redispatch(
        &self,
        now_ms: i64,
        without: &[String],
        limit: usize,
    ) -> Outcome<Vec<Redispatch>> {
        let others = match without.len() {
            0 => String::new(),
            n => format!("AND e.tier NOT IN ({}) ", vec!["?"; n].join(", ")),
        };
        let sql = format!(
            "SELECT r.execution_id, r.shard_index, r.attempt, e.tier FROM redispatch r \
             JOIN executions e ON e.id = r.execution_id \
             WHERE r.not_before_ms <= ? AND e.tier NOT LIKE '{ADDRESSED}%' {others}ORDER BY r.not_before_ms LIMIT ?"
        );
        let mut args: Vec<Value> = vec![now_ms.into()];
        args.extend(without.iter().map(|tier| tier.as_str().into()));
        args.push(limit.into());
        let rows = self.db.rows(&sql, &args).await?;
        rows.iter()
            .map(|row| {
                let execution = row.id(0, ExecutionId::from_slice)?;
                let attempt = AttemptRef { execution, index: row.count(1)?, attempt: row.count(2)? };
                Ok(Redispatch { attempt, tier: row.text(3)? })
            })
            .collect()
    }

    pub(super) async fn read_heads(&self, executions: &[ExecutionId]) -> Outcome<Vec<ExecutionHead>> {
        if executions.is_empty() {
            return Ok(Vec::new());
        }
        let sql = format!(
            "SELECT e.job_id, e.version, e.plan, e.params, e.fire_key, e.nominal_ms, v.spec, e.id FROM executions e \
             LEFT JOIN job_versions v ON v.job_id = e.job_id AND v.version = e.version WHERE e.id IN ({})",
            id_list(executions.iter().map(ExecutionId::as_bytes))
        );
        self.db.raw_rows(&sql).await?.iter().map(head_row).collect()
    }
}

fn head_row(row: &Row) -> Outcome<ExecutionHead> {
    let execution = row.id(7, ExecutionId::from_slice)?;
    let unreadable = |what: &str, e: serde_json::Error| Fault::corrupt(format!("{what} of execution {execution}: {e}"));
    let version = row.count(1)?;
    let Some(spec) = row.opt_text(6)? else {
        return Err(Fault::invalid(format!("version {version} of the job of execution {execution} is gone")));
    };
    Ok(ExecutionHead {
        id: execution,
        job: JobId(row.int(0)?),
        spec: serde_json::from_str(&spec).map_err(|e| unreadable("the specification", e))?,
        version,
        plan: serde_json::from_str(&row.text(2)?).map_err(|e| unreadable("the plan", e))?,
        params: serde_json::from_str(&row.text(3)?).map_err(|e| unreadable("the parameters", e))?,
        fire_key: row.text(4)?,
        nominal_ms: row.int(5)?,
    })
}
