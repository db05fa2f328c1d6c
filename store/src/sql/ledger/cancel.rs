//! Cancelling executions, by a person or by a firing that takes the place of what runs.

use crate::firing_rows::CancellationRow;
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::dialect::Dialect;
use crate::sql::fault::Outcome;
use crate::sql::value::hex;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::limits::ERROR_BYTES;

/// Who cancels in the name of an overlap policy.
pub(super) const CANCELLED_BY: &str = "the overlap policy";

/// The statements that cancel an execution which has not ended. Its row must be locked, or have been made by the same transaction:
/// with it held, no chunk of new shards can be written behind the cancel's back, and no end be counted between them.
pub(super) fn cancel_statements(
    dialect: Dialect,
    id: ExecutionId,
    (who, reason, now_ms): (&str, &str, i64),
) -> Vec<String> {
    let hex = hex(id.as_bytes());
    let mut why = Bulk::new("INSERT INTO cancellations (execution_id, at_ms, who, reason) VALUES ", "");
    let (who, reason) = (kept(who, 255), kept(reason, ERROR_BYTES));
    why.push_row(dialect, &[id.as_bytes().into(), now_ms.into(), who.as_str().into(), reason.as_str().into()]);
    let mut audit = Bulk::new("INSERT INTO audit (at_ms, who, action, subject, before_text, after_text) VALUES ", "");
    let subject = id.to_string();
    let phases = (Phase::Running.word(), Phase::Cancelled.word());
    audit.push_row(
        dialect,
        &[now_ms.into(), who.into(), "cancel".into(), subject.into(), phases.0.into(), phases.1.into()],
    );
    let mut statements = vec![
        format!("UPDATE shards SET state = 4, owner = NULL WHERE execution_id = {hex} AND state IN (0, 1)"),
        format!("DELETE FROM redispatch WHERE execution_id = {hex}"),
        format!(
            "UPDATE executions SET state = {}, cancelled = shards_total - succeeded - failed, held = 0, ended_ms = {now_ms} \
             WHERE id = {hex} AND state = 0",
            Phase::Cancelled.code()
        ),
    ];
    statements.extend(why.into_statements());
    statements.extend(audit.into_statements());
    statements
}

impl SqlLedger {
    pub(super) async fn read_cancelled(&self, among: &[ExecutionId]) -> Outcome<Vec<ExecutionId>> {
        let list: Vec<String> = among.iter().map(|id| hex(id.as_bytes())).collect();
        let sql = format!(
            "SELECT id FROM executions WHERE id IN ({}) AND state = {}",
            list.join(","),
            Phase::Cancelled.code()
        );
        self.db.raw_rows(&sql).await?.iter().map(|row| row.id(0, ExecutionId::from_slice)).collect()
    }

    pub(super) async fn read_cancellation(&self, id: ExecutionId) -> Outcome<Option<CancellationRow>> {
        let sql = "SELECT at_ms, who, reason FROM cancellations WHERE execution_id = ?";
        let rows = self.db.rows(sql, &[id.as_bytes().into()]).await?;
        rows.first()
            .map(|row| Ok(CancellationRow { at_ms: row.int(0)?, who: row.text(1)?, reason: row.text(2)? }))
            .transpose()
    }
}
