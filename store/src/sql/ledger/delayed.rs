//! Jobs with a fixed delay: since when they are idle, and their next instant.

use super::leader::check_fence;
use crate::rows::Arming;
use crate::sql::SqlLedger;
use crate::sql::fault::Outcome;
use crate::sql::value::number_list;
use shardcron_domain::limits::DELAYED_BATCH;
use shardcron_domain::{Epoch, JobId};

impl SqlLedger {
    pub(super) async fn read_idle(&self, jobs: &[JobId]) -> Outcome<Vec<(JobId, Option<i64>)>> {
        let mut found = Vec::new();
        for few in jobs.chunks(DELAYED_BATCH) {
            let list = number_list(few.iter().map(|job| job.0));
            let sql = format!(
                "SELECT j.id, \
                 (SELECT e.ended_ms FROM executions e WHERE e.job_id = j.id ORDER BY e.id DESC LIMIT 1), \
                 (SELECT d.decided_ms FROM decisions d WHERE d.job_id = j.id ORDER BY d.nominal_ms DESC LIMIT 1) \
                 FROM jobs j WHERE j.id IN ({list}) AND j.next_fire_ms IS NULL \
                 AND NOT EXISTS (SELECT 1 FROM executions a WHERE a.job_id = j.id AND a.state = 0) \
                 AND NOT EXISTS (SELECT 1 FROM waiting w WHERE w.job_id = j.id AND w.scheduled = 1)"
            );
            for row in self.db.raw_rows(&sql).await? {
                found.push((JobId(row.int(0)?), row.opt_int(1)?.max(row.opt_int(2)?)));
            }
        }
        Ok(found)
    }

    pub(super) async fn write_arming(&self, epoch: Epoch, arming: &[Arming]) -> Outcome<Vec<Arming>> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let mut armed = Vec::new();
        let mut arming = arming.to_vec();
        // In the order of the ids, as firings lock them.
        arming.sort_unstable_by_key(|one| one.job);
        for one in arming {
            let update = "UPDATE jobs SET next_fire_ms = ? WHERE id = ? AND version = ? AND next_fire_ms IS NULL";
            let args = [one.next_fire_ms.into(), one.job.0.into(), one.version.into()];
            if tx.run(update, &args).await? == 1 {
                armed.push(one);
            }
        }
        tx.commit().await?;
        Ok(armed)
    }
}
