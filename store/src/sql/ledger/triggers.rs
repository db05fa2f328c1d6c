//! Triggers and dead messages without a broker.

use crate::rows::StoredTrigger;
use crate::sql::SqlLedger;
use crate::sql::bulk::kept;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::value::number_list;
use shardcron_domain::limits::{ERROR_BYTES, REJECTED_TEXT_BYTES};

impl SqlLedger {
    pub(super) async fn write_trigger(&self, payload: &[u8], now_ms: i64) -> Outcome<()> {
        let insert = "INSERT INTO stored_triggers (payload, put_ms) VALUES (?, ?)";
        self.db.run(insert, &[payload.into(), now_ms.into()]).await.map(drop).map_err(Fault::once)
    }

    pub(super) async fn read_triggers(&self, limit: usize) -> Outcome<Vec<StoredTrigger>> {
        let rows = self.db.rows("SELECT id, payload FROM stored_triggers ORDER BY id LIMIT ?", &[limit.into()]).await?;
        rows.iter().map(|row| Ok(StoredTrigger { id: row.int(0)?, payload: row.bytes(1)?.to_vec() })).collect()
    }

    pub(super) async fn delete_triggers(&self, ids: &[i64]) -> Outcome<()> {
        self.db.raw(&format!("DELETE FROM stored_triggers WHERE id IN ({})", number_list(ids))).await.map(drop)
    }

    pub(super) async fn write_dead_message(&self, reason: &str, payload: &[u8], now_ms: i64) -> Outcome<()> {
        let insert = "INSERT INTO dead_letters (kind, at_ms, reason, body) VALUES ('message', ?, ?, ?)";
        let body = kept(&String::from_utf8_lossy(payload), REJECTED_TEXT_BYTES);
        self.db.run(insert, &[now_ms.into(), kept(reason, ERROR_BYTES).into(), body.into()]).await.map(drop)
    }
}
