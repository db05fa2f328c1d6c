//! Heartbeats as rows of the ledger, by the database's clock.

use super::SqlLedger;
use super::fault::{Fault, Outcome, with_retries};
use super::lease::millis;
use crate::error::Result;
use crate::presence::{Presence, SeenWorker, WorkerBeat};
use async_trait::async_trait;
use shardcron_domain::Incarnation;
use std::time::Duration;

/// The workers' presence in the ledger.
#[derive(Clone, Debug)]
pub struct LedgerPresence {
    /// Where the rows are.
    pub ledger: SqlLedger,
}

/// A dead worker is remembered for this long at least, so that a leader who was away sees it as dead and not as unknown.
const REMEMBERED_MS: i64 = 3_600_000;

impl LedgerPresence {
    async fn note(&self, beat: &WorkerBeat, lost_after: Duration) -> Outcome<()> {
        let db = &self.ledger.db;
        let now = self.ledger.now_ms();
        let text = serde_json::to_string(beat).map_err(|e| Fault::invalid(e.to_string()))?;
        let keep = millis(lost_after).saturating_mul(10).max(REMEMBERED_MS);
        let tail = db.dialect().upsert("incarnation", &["beat", "beat_ms", "keep_until_ms"]);
        let upsert = format!(
            "INSERT INTO presence (incarnation, beat, beat_ms, keep_until_ms) VALUES (?, ?, {now}, {now} + ?){tail}"
        );
        db.run(&upsert, &[beat.incarnation.as_bytes().into(), text.into(), keep.into()]).await?;
        Ok(())
    }

    async fn read(&self) -> Outcome<Vec<SeenWorker>> {
        let db = &self.ledger.db;
        let now = self.ledger.now_ms();
        let rows = db
            .rows(
                &format!("SELECT beat, {now} - beat_ms FROM presence WHERE keep_until_ms > {now} ORDER BY incarnation"),
                &[],
            )
            .await?;
        let mut seen = Vec::with_capacity(rows.len());
        for row in rows {
            // A beat of another version that can't be read is skipped: its worker is unknown, and unknown is never reclaimed.
            if let Ok(beat) = serde_json::from_str(&row.text(0)?) {
                seen.push(SeenWorker { beat, age_ms: row.int(1)?.max(0) });
            }
        }
        Ok(seen)
    }

    async fn forget_old(&self) -> Outcome<u64> {
        let now = self.ledger.now_ms();
        self.ledger.db.run(&format!("DELETE FROM presence WHERE keep_until_ms <= {now}"), &[]).await
    }
}

#[async_trait]
impl Presence for LedgerPresence {
    async fn beat(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()> {
        with_retries!(self.note(beat, lost_after))
    }

    async fn leave(&self, who: Incarnation) -> Result<()> {
        with_retries!(self.ledger.db.run("DELETE FROM presence WHERE incarnation = ?", &[who.as_bytes().into()]))?;
        // A good moment: it is rare, and nobody waits for it.
        with_retries!(self.forget_old()).map(drop)
    }

    async fn workers(&self) -> Result<Vec<SeenWorker>> {
        with_retries!(self.read())
    }
}
