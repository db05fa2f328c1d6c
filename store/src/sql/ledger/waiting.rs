//! Firings that wait, and backfills, which are many of them.

use super::leader::check_fence;
use super::too_many;
use crate::error::Result;
use crate::firing_rows::{BackfillRow, FiringRequest, NewBackfill, WaitingKind, WaitingRef, WaitingRow};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::Value;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::limits::BACKFILL_INSTANTS;
use shardcron_domain::{Epoch, JobId};

/// More would fill the ledger with what nobody can follow.
pub(crate) fn check_backfill(new: &NewBackfill) -> Result<()> {
    if new.instants.len() > BACKFILL_INSTANTS {
        return Err(too_many("instants", new.instants.len(), BACKFILL_INSTANTS));
    }
    Ok(())
}

impl SqlLedger {
    pub(super) async fn read_waiting_heads(&self, now_ms: i64, limit: usize) -> Outcome<Vec<WaitingRow>> {
        // Of each job and kind the first only: a backfill of ten thousand instants must not hide another job's queue.
        let sql = format!(
            "SELECT w.id, w.kind, w.job_id, j.name, w.fire_key, w.nominal_ms, w.scheduled, w.request, \
             (SELECT COUNT(*) FROM executions e WHERE e.state = 0 AND e.job_id = w.job_id) \
             FROM waiting w JOIN jobs j ON j.id = w.job_id \
             WHERE w.id IN (SELECT MIN(h.id) FROM waiting h WHERE h.not_before_ms <= {now_ms} GROUP BY h.job_id, h.kind) \
             ORDER BY w.id LIMIT {limit}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        rows.iter()
            .map(|row| {
                let code = row.int(1)?;
                let kind = WaitingKind::from_code(code)
                    .ok_or_else(|| Fault::corrupt(format!("the kind of a waiting firing is {code}")))?;
                let request: FiringRequest = serde_json::from_str(&row.text(7)?)
                    .map_err(|e| Fault::corrupt(format!("the request of a waiting firing: {e}")))?;
                Ok(WaitingRow {
                    at: WaitingRef { id: row.int(0)?, kind },
                    job: JobId(row.int(2)?),
                    job_name: row.text(3)?,
                    fire_key: row.text(4)?,
                    nominal_ms: row.int(5)?,
                    scheduled: row.int(6)? != 0,
                    request,
                    active: row.count(8)?,
                })
            })
            .collect()
    }

    pub(super) async fn read_waiting_count(&self, job: JobId) -> Outcome<u32> {
        let rows = self.db.rows("SELECT COUNT(*) FROM waiting WHERE job_id = ?", &[job.0.into()]).await?;
        rows.first().map_or(Ok(0), |row| row.count(0))
    }

    pub(super) async fn write_backfill(&self, epoch: Epoch, new: &NewBackfill, now_ms: i64) -> Outcome<bool> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let lock = tx.dialect().for_update();
        // The job's row orders two backfills of it.
        let sql = format!("SELECT id FROM jobs WHERE id = {}{lock}", new.job);
        if tx.raw_rows(&sql).await?.is_empty() {
            return Err(Fault::invalid(format!("there is no job {}", new.job)));
        }
        let sql = "SELECT at_ms FROM backfills WHERE job_id = ? AND request_id = ?";
        let id = || new.request_id.as_str().into();
        if !tx.rows(sql, &[new.job.0.into(), id()]).await?.is_empty() {
            return Ok(false);
        }
        let sql = "INSERT INTO backfills (job_id, request_id, from_ms, to_ms, forced, who, at_ms, epoch, instants, already) \
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let args = [
            new.job.0.into(),
            id(),
            new.from_ms.into(),
            new.to_ms.into(),
            i64::from(new.forced).into(),
            kept(&new.who, 255).into(),
            now_ms.into(),
            epoch.0.into(),
            new.instants.len().into(),
            new.already.into(),
        ];
        tx.run(sql, &args).await?;
        let request = serde_json::to_string(&new.request)
            .map_err(|e| Fault::invalid(format!("the backfill can't be written as JSON: {e}")))?;
        // An instant that waits already, by an earlier backfill of the same range, waits on there.
        let (head, tail) = tx.dialect().insert_ignore("waiting", "job_id, fire_key");
        let columns = "(job_id, fire_key, nominal_ms, kind, scheduled, not_before_ms, request, batch, put_ms) VALUES ";
        let mut bulk = Bulk::new(format!("{head} {columns}"), tail);
        for (fire_key, nominal_ms) in &new.instants {
            bulk.push_row(
                tx.dialect(),
                &[
                    new.job.0.into(),
                    fire_key.as_str().into(),
                    (*nominal_ms).into(),
                    WaitingKind::Backfill.code().into(),
                    0_i64.into(),
                    now_ms.into(),
                    request.as_str().into(),
                    id(),
                    now_ms.into(),
                ],
            );
        }
        bulk.send(&mut tx).await?;
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn read_ran(&self, job: JobId, fire_keys: &[String]) -> Outcome<Vec<String>> {
        let holes = vec!["?"; fire_keys.len()].join(",");
        // By the decision, too: retention keeps it for longer than the execution.
        let sql = format!(
            "SELECT fire_key FROM executions WHERE job_id = ? AND fire_key IN ({holes}) \
             UNION SELECT fire_key FROM decisions WHERE job_id = ? AND fire_key IN ({holes}) AND kind = {}",
            DecisionKind::Fired.code()
        );
        let one: Vec<Value> =
            std::iter::once(job.0.into()).chain(fire_keys.iter().map(|key| key.as_str().into())).collect();
        let args = [one.clone(), one].concat();
        self.db.rows(&sql, &args).await?.iter().map(|row| row.text(0)).collect()
    }

    pub(super) async fn read_backfill(&self, job: JobId, request_id: &str) -> Outcome<Option<BackfillRow>> {
        let sql = "SELECT b.request_id, b.from_ms, b.to_ms, b.forced, b.who, b.at_ms, b.instants, b.already, \
                   (SELECT COUNT(*) FROM waiting w WHERE w.job_id = b.job_id AND w.batch = b.request_id) \
                   FROM backfills b WHERE b.job_id = ? AND b.request_id = ?";
        let rows = self.db.rows(sql, &[job.0.into(), request_id.into()]).await?;
        rows.first()
            .map(|row| {
                Ok(BackfillRow {
                    request_id: row.text(0)?,
                    from_ms: row.int(1)?,
                    to_ms: row.int(2)?,
                    forced: row.int(3)? != 0,
                    who: row.text(4)?,
                    at_ms: row.int(5)?,
                    instants: row.count(6)?,
                    already: row.count(7)?,
                    left: row.count(8)?,
                })
            })
            .transpose()
    }
}
