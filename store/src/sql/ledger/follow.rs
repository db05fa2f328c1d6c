//! Which executions jobs follow, and what those came to.

use super::leader::check_fence;
use super::rows::{execution_phase, unsigned};
use crate::firing_rows::{ResultSummary, WatchRow};
use crate::sql::SqlLedger;
use crate::sql::fault::Outcome;
use crate::sql::value::{hex, number_list};
use shardcron_domain::{Epoch, ExecutionId, JobId};

impl SqlLedger {
    pub(super) async fn read_watches(&self, limit: usize) -> Outcome<Vec<WatchRow>> {
        // Jobs with an end to look at only: what merely runs is nobody's concern yet.
        let sql = format!(
            "SELECT w.id, w.job_id, d.name, u.name, w.execution_id, e.nominal_ms, e.state FROM watches w \
             JOIN executions e ON e.id = w.execution_id JOIN jobs d ON d.id = w.job_id JOIN jobs u ON u.id = w.upstream_id \
             WHERE w.job_id IN (SELECT x.job_id FROM watches x JOIN executions y ON y.id = x.execution_id WHERE y.state <> 0) \
             ORDER BY w.id LIMIT {limit}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        rows.iter()
            .map(|row| {
                Ok(WatchRow {
                    id: row.int(0)?,
                    job: JobId(row.int(1)?),
                    job_name: row.text(2)?,
                    upstream: row.text(3)?,
                    execution: row.id(4, ExecutionId::from_slice)?,
                    nominal_ms: row.int(5)?,
                    phase: execution_phase(row.int(6)?)?,
                })
            })
            .collect()
    }

    pub(super) async fn delete_watches(&self, epoch: Epoch, ids: &[i64]) -> Outcome<()> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        tx.raw(&format!("DELETE FROM watches WHERE id IN ({})", number_list(ids))).await?;
        tx.commit().await
    }

    pub(super) async fn read_result_summary(
        &self,
        id: ExecutionId,
        summary_bytes: usize,
    ) -> Outcome<Option<ResultSummary>> {
        let hex = hex(id.as_bytes());
        let sql = format!("SELECT shards_total, failed FROM executions WHERE id = {hex}");
        let rows = self.db.raw_rows(&sql).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let (shards, failed) = (row.count(0)?, row.count(1)?);
        let int = self.db.dialect().integer();
        let sql = format!("SELECT CAST(SUM(row_count) AS {int}) FROM results WHERE execution_id = {hex}");
        let rows = self.db.raw_rows(&sql).await?;
        let sum = rows.first().map(|row| row.opt_int(0)).transpose()?.flatten().map(unsigned);
        let sql = format!("SELECT summary FROM results WHERE execution_id = {hex} AND shard_index = 0");
        let rows = self.db.raw_rows(&sql).await?;
        let summary = rows.first().map(|row| row.opt_text(0)).transpose()?.flatten();
        Ok(Some(ResultSummary { shards, failed, rows: sum, summary: summary.filter(|s| s.len() <= summary_bytes) }))
    }
}
