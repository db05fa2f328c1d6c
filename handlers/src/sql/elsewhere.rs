//! A job's statements in another named database: there first, with the inbox's row, then the checkpoint or the result in the ledger.
//!
//! | dies | what follows |
//! | --- | --- |
//! | before the commit there | the next attempt does the step |
//! | between the two commits | the next attempt asks for the step again; the inbox says that it is done, and only the ledger moves |
//! | after both | the next attempt goes on behind it |

use super::port::ShardLedger;
use async_trait::async_trait;
use shardcron_domain::shard::Rejection;
use shardcron_domain::{ExecutionId, Incarnation};
use shardcron_store::sql::Inbox;
use shardcron_store::{Result, ShardRow, SqlDone, SqlStep};
use std::sync::Arc;

/// The ledger, with the statements of its steps sent elsewhere.
pub(crate) struct Elsewhere {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) ledger: Arc<dyn ShardLedger>,
}

#[async_trait]
impl ShardLedger for Elsewhere {
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>> {
        let rows = match self.inbox.apply(step, now_ms).await? {
            Ok(rows) => rows,
            Err(rejection) => return Ok(Err(rejection)),
        };
        let here = SqlStep { statements: Vec::new(), rows_elsewhere: rows, ..step.clone() };
        self.ledger.run_sql(owner, &here, now_ms).await
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.ledger.shards(id, from, limit).await
    }
}
