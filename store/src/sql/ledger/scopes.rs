//! Who led and when, and pauses of more than one job.

use super::jobs::Audit;
use crate::firing_rows::{EpochRow, PauseRow};
use crate::sql::SqlLedger;
use crate::sql::bulk::kept;
use crate::sql::fault::{Fault, Kind, Outcome};
use shardcron_domain::Epoch;

impl SqlLedger {
    pub(super) async fn write_seen(&self, epoch: Epoch, now_ms: i64) -> Outcome<()> {
        let sql = format!("UPDATE epochs SET seen_ms = {now_ms} WHERE epoch = {epoch} AND seen_ms < {now_ms}");
        self.db.raw(&sql).await.map(drop)
    }

    pub(super) async fn read_epochs(&self, upto: Option<Epoch>, limit: usize) -> Outcome<Vec<EpochRow>> {
        let upto = upto.map_or(i64::MAX, |epoch| epoch.0);
        let sql = "SELECT epoch, holder, from_ms, seen_ms FROM epochs WHERE epoch <= ? ORDER BY epoch DESC LIMIT ?";
        let rows = self.db.rows(sql, &[upto.into(), limit.into()]).await?;
        rows.iter()
            .map(|row| {
                let (from_ms, seen_ms) = (row.int(2)?, row.int(3)?);
                Ok(EpochRow { epoch: Epoch(row.int(0)?), holder: row.text(1)?, from_ms, seen_ms })
            })
            .collect()
    }

    pub(super) async fn write_scope_paused(
        &self,
        scope: &str,
        paused_by: Option<&str>,
        who: &str,
        now_ms: i64,
    ) -> Outcome<bool> {
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let sql = format!("SELECT paused_by FROM pauses WHERE scope = ?{lock}");
        let rows = tx.rows(&sql, &[scope.into()]).await?;
        let before = rows.first().map(|row| row.text(0)).transpose()?;
        let action = match (&before, paused_by) {
            (Some(_), Some(_)) | (None, None) => return Ok(false),
            (None, Some(by)) => {
                let insert = "INSERT INTO pauses (scope, paused_by, at_ms) VALUES (?, ?, ?)";
                // Another has just paused it, too.
                tx.run(insert, &[scope.into(), kept(by, 255).into(), now_ms.into()]).await.map_err(
                    |fault| match fault {
                        Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
                        other => other,
                    },
                )?;
                "pause"
            }
            (Some(_), None) => {
                tx.run("DELETE FROM pauses WHERE scope = ?", &[scope.into()]).await?;
                "resume"
            }
        };
        let mut audit = Audit::new(who, now_ms);
        audit.note(&tx, action, scope, (before.as_deref(), paused_by));
        audit.write(&mut tx).await?;
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn read_pauses(&self) -> Outcome<Vec<PauseRow>> {
        let rows = self.db.raw_rows("SELECT scope, paused_by, at_ms FROM pauses ORDER BY scope").await?;
        rows.iter()
            .map(|row| Ok(PauseRow { scope: row.text(0)?, paused_by: row.text(1)?, at_ms: row.int(2)? }))
            .collect()
    }
}
