//! What people and metrics look at.

use super::rows::{checkpoint_from, execution_phase, shard_phase, unsigned};
use super::supervise::ANY_OWNER;
use crate::rows::{AttemptRow, ExecutionRow, Overview, ShardRow, TierOverview};
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::{Row, Value, hex};
use shardcron_domain::invariants::Tally;
use shardcron_domain::limits::DEAD_LETTERS_COUNTED;
use shardcron_domain::plan::ADDRESSED;
use shardcron_domain::{Epoch, ExecutionId, Incarnation, execution};
use std::collections::{BTreeMap, HashMap};

const EXECUTION: &str = "e.id, j.name, e.version, e.fire_key, e.nominal_ms, e.fired_ms, e.ended_ms, e.epoch, e.state, e.tier, \
                         e.shards_total, e.succeeded, e.failed, e.cancelled";

fn execution_row(row: &Row) -> Outcome<ExecutionRow> {
    Ok(ExecutionRow {
        id: row.id(0, ExecutionId::from_slice)?,
        job: row.opt_text(1)?.unwrap_or_default(),
        version: row.count(2)?,
        fire_key: row.text(3)?,
        nominal_ms: row.int(4)?,
        fired_ms: row.int(5)?,
        ended_ms: row.opt_int(6)?,
        epoch: Epoch(row.int(7)?),
        phase: execution_phase(row.int(8)?)?,
        tier: row.text(9)?.trim_start_matches(ADDRESSED).to_owned(),
        shards_total: row.count(10)?,
        succeeded: row.count(11)?,
        failed: row.count(12)?,
        cancelled: row.count(13)?,
        running: None,
    })
}

impl SqlLedger {
    pub(super) async fn read_overview(&self) -> Outcome<Overview> {
        let sql = format!("SELECT execution_id, COUNT(*) FROM shards WHERE owner >= {ANY_OWNER} GROUP BY execution_id");
        let mut running: HashMap<ExecutionId, u64> = HashMap::new();
        for row in self.db.raw_rows(&sql).await? {
            running.insert(row.id(0, ExecutionId::from_slice)?, unsigned(row.int(1)?));
        }
        let sql =
            "SELECT id, tier, shards_total - succeeded - failed - cancelled, fired_ms FROM executions WHERE state = 0";
        let mut tiers: BTreeMap<String, TierOverview> = BTreeMap::new();
        for row in self.db.raw_rows(sql).await? {
            let runs = running.get(&row.id(0, ExecutionId::from_slice)?).copied().unwrap_or(0);
            let name = row.text(1)?.trim_start_matches(ADDRESSED).to_owned();
            // The two looks are not one snapshot: a shard may have ended in between.
            let waits = unsigned(row.int(2)?).saturating_sub(runs);
            let tier = tiers.entry(name.clone()).or_insert_with(|| TierOverview {
                tier: name,
                executions: 0,
                waiting: 0,
                running: 0,
                oldest_waiting_ms: None,
            });
            tier.executions += 1;
            tier.running += runs;
            tier.waiting += waits;
            if waits > 0 {
                let fired = row.int(3)?;
                tier.oldest_waiting_ms = Some(tier.oldest_waiting_ms.map_or(fired, |oldest| oldest.min(fired)));
            }
        }
        // The supervisor asks this with every sweep; nobody clears dead letters for it, so the whole table must not be counted.
        let dead =
            format!("SELECT COUNT(*) FROM (SELECT id FROM dead_letters LIMIT {DEAD_LETTERS_COUNTED}) AS bounded");
        let dead = self.db.raw_rows(&dead).await?;
        let dead = dead.first().map_or(Ok(0), |row| row.int(0))?;
        Ok(Overview { tiers: tiers.into_values().collect(), dead: unsigned(dead) })
    }

    pub(super) async fn read_executions(
        &self,
        job: Option<&str>,
        before: Option<ExecutionId>,
        limit: usize,
    ) -> Outcome<Vec<ExecutionRow>> {
        let mut wheres = Vec::new();
        let mut args: Vec<Value> = Vec::new();
        if let Some(job) = job {
            wheres.push("e.job_id = (SELECT id FROM jobs WHERE name = ?)");
            args.push(job.into());
        }
        if let Some(before) = before {
            wheres.push("e.id < ?");
            args.push(before.as_bytes().into());
        }
        let filter = if wheres.is_empty() { String::new() } else { format!(" WHERE {}", wheres.join(" AND ")) };
        args.push(limit.into());
        let sql = format!(
            "SELECT {EXECUTION} FROM executions e LEFT JOIN jobs j ON j.id = e.job_id{filter} ORDER BY e.id DESC LIMIT ?"
        );
        self.db.rows(&sql, &args).await?.iter().map(execution_row).collect()
    }

    pub(super) async fn read_execution(&self, id: ExecutionId) -> Outcome<Option<ExecutionRow>> {
        let sql = format!("SELECT {EXECUTION} FROM executions e LEFT JOIN jobs j ON j.id = e.job_id WHERE e.id = ?");
        let rows = self.db.rows(&sql, &[id.as_bytes().into()]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut found = execution_row(row)?;
        let sql = format!("SELECT COUNT(*) FROM shards WHERE owner >= {ANY_OWNER} AND execution_id = ?");
        let rows = self.db.rows(&sql, &[id.as_bytes().into()]).await?;
        found.running = rows.first().map(|row| row.count(0)).transpose()?;
        Ok(Some(found))
    }

    pub(super) async fn read_shards(&self, id: ExecutionId, from: u32, limit: usize) -> Outcome<Vec<ShardRow>> {
        let sql = "SELECT s.shard_index, s.state, s.attempt, s.failures, s.owner, s.progress, COALESCE(r.row_count, s.rows_done) \
                   FROM shards s LEFT JOIN results r ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index \
                   WHERE s.execution_id = ? AND s.shard_index >= ? ORDER BY s.shard_index LIMIT ?";
        let rows = self.db.rows(sql, &[id.as_bytes().into(), from.into(), limit.into()]).await?;
        rows.iter()
            .map(|row| {
                Ok(ShardRow {
                    index: row.count(0)?,
                    phase: shard_phase(row.int(1)?)?,
                    attempt: row.count(2)?,
                    failures: row.count(3)?,
                    owner: row.opt_id(4, Incarnation::from_slice)?,
                    checkpoint: row.opt_text(5)?.map(|text| checkpoint_from(&text)).transpose()?,
                    rows_done: unsigned(row.int(6)?),
                })
            })
            .collect()
    }

    pub(super) async fn read_attempts(&self, id: ExecutionId, limit: usize) -> Outcome<Vec<AttemptRow>> {
        let bad = "SELECT shard_index, attempt, outcome, owner, started_ms, ended_ms, message FROM attempts \
                   WHERE execution_id = ? ORDER BY shard_index, attempt LIMIT ?";
        let good = "SELECT shard_index, attempt, 'success', owner, started_ms, ended_ms, summary FROM results \
                    WHERE execution_id = ? ORDER BY shard_index LIMIT ?";
        let mut rows = self.db.rows(bad, &[id.as_bytes().into(), limit.into()]).await?;
        let left = limit.saturating_sub(rows.len());
        if left > 0 {
            rows.extend(self.db.rows(good, &[id.as_bytes().into(), left.into()]).await?);
        }
        rows.iter()
            .map(|row| {
                Ok(AttemptRow {
                    index: row.count(0)?,
                    attempt: row.count(1)?,
                    outcome: row.text(2)?,
                    owner: row.id(3, Incarnation::from_slice)?,
                    started_ms: row.int(4)?,
                    ended_ms: row.int(5)?,
                    message: row.opt_text(6)?,
                })
            })
            .collect()
    }

    pub(super) async fn read_tally(&self, id: ExecutionId) -> Outcome<(Tally, u64)> {
        let hex = hex(id.as_bytes());
        let int = self.db.dialect().integer();
        let sql = format!(
            "SELECT state, shards_total, materialized, succeeded, failed, cancelled FROM executions WHERE id = {hex}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        let Some(row) = rows.first() else { return Err(Fault::invalid(format!("there is no execution {id}"))) };
        let cancelled = execution_phase(row.int(0)?)? == execution::Phase::Cancelled;
        let (total, materialized, succeeded) = (unsigned(row.int(1)?), unsigned(row.int(2)?), unsigned(row.int(3)?));
        let counted = succeeded + unsigned(row.int(4)?) + unsigned(row.int(5)?);
        // A claim sets claimed_ms and a way back to pending clears it, so the current attempt counts exactly if it has begun.
        let sql = format!(
            "SELECT COALESCE(CAST(SUM(CASE WHEN state >= 2 THEN 1 ELSE 0 END) AS {int}), 0), \
             COALESCE(CAST(SUM(CASE WHEN state = 2 THEN 1 ELSE 0 END) AS {int}), 0), \
             COALESCE(CAST(SUM(attempt - CASE WHEN claimed_ms = 0 THEN 1 ELSE 0 END) AS {int}), 0) \
             FROM shards WHERE execution_id = {hex}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        let Some(row) = rows.first() else { return Err(Fault::corrupt("a sum without a row".into())) };
        let (ended, well, started) = (unsigned(row.int(0)?), unsigned(row.int(1)?), unsigned(row.int(2)?));
        let rows = self.db.raw_rows(&format!("SELECT COUNT(*) FROM results WHERE execution_id = {hex}")).await?;
        let results = unsigned(rows.first().map_or(Ok(0), |row| row.int(0))?);
        let unwritten = if cancelled { total.saturating_sub(materialized) } else { 0 };
        let tally = Tally {
            shards_total: total,
            terminal: ended + unwritten,
            results,
            // The primary key keeps a second row out; a second count or a result without its shard's end would show here.
            recorded_twice: succeeded.saturating_sub(well).max(results.saturating_sub(well)),
            counted,
        };
        Ok((tally, started))
    }

    pub(super) async fn read_rows_done(&self, id: ExecutionId) -> Outcome<u64> {
        let int = self.db.dialect().integer();
        let sql = format!(
            "SELECT COALESCE(CAST(SUM(COALESCE(r.row_count, s.rows_done)) AS {int}), 0) FROM shards s \
             LEFT JOIN results r ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index \
             WHERE s.execution_id = {}",
            hex(id.as_bytes())
        );
        let rows = self.db.raw_rows(&sql).await?;
        Ok(unsigned(rows.first().map_or(Ok(0), |row| row.int(0))?))
    }
}
