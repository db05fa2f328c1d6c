//! The part of the ledger's port that is about work that went wrong: failed shards, dead letters.

use crate::error::Result;
use crate::ops_rows::*;
use crate::rows::{AttemptRow, DeadRow};
use async_trait::async_trait;
use shardcron_domain::reopen::Refused;
use shardcron_domain::{ExecutionId, ShardRef};

/// Like [`Ledger`](crate::Ledger), whose rules hold here: each method is one transaction at most and may be called again.
#[async_trait]
#[allow(missing_docs, reason = "each method is documented where it stands")]
pub trait OpsLedger: Send + Sync + 'static {
    /// Sends failed shards back, as `shard::Event::Reopen` says, and with the first of them lets an execution that had ended run again:
    /// shards, redispatches, counters, the round, settled dead letters, followers and the audit, in one transaction. Called again
    /// after a lost answer it finds what is failed then, so that nothing is done twice.
    async fn reopen(&self, wanted: &Reopen, now_ms: i64) -> Result<std::result::Result<Reopened, Refused>>;
    /// The times that failed shards of an execution were sent back, oldest first.
    async fn reopenings(&self, execution: ExecutionId) -> Result<Vec<ReopeningRow>>;
    /// Ended attempts at one shard, the bad ones first.
    async fn attempts_of(&self, shard: ShardRef, limit: usize) -> Result<Vec<AttemptRow>>;
    /// Dead letters.
    async fn dead_letters(&self, query: &DeadQuery, limit: usize) -> Result<Vec<DeadRow>>;
    /// Takes dead letters away that are done with, each with its row in the audit; returns those that were still there.
    async fn settle_dead(&self, settled: &DeadSettled, now_ms: i64) -> Result<Vec<i64>>;
}
