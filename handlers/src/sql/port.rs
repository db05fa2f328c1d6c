//! The little of the ledger that the sql handler needs.

use async_trait::async_trait;
use shardcron_domain::shard::Rejection;
use shardcron_domain::{ExecutionId, Incarnation};
use shardcron_store::{Ledger, Result, ShardRow, SqlDone, SqlStep};
use std::sync::Arc;

/// Runs steps of one shard, and says how the shard stands. A narrow port, so that its tests can lose answers on purpose without
/// being a whole ledger.
#[async_trait]
pub trait ShardLedger: Send + Sync + 'static {
    /// See [`Ledger::run_sql`].
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>>;
    /// See [`Ledger::shards`].
    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>>;
}

/// The ledger itself.
pub(crate) struct Whole(pub(crate) Arc<dyn Ledger>);

#[async_trait]
impl ShardLedger for Whole {
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>> {
        self.0.run_sql(owner, step, now_ms).await
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.0.shards(id, from, limit).await
    }
}
