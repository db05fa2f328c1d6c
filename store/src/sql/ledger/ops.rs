//! The port of operations over SQL.

use super::too_many;
use crate::error::Result;
use crate::ops_port::OpsLedger;
use crate::ops_rows::*;
use crate::rows::{AttemptRow, DeadRow};
use crate::sql::SqlLedger;
use crate::sql::fault::with_retries;
use async_trait::async_trait;
use shardcron_domain::limits::{DEAD_BATCH, REOPEN_BATCH};
use shardcron_domain::reopen::Refused;
use shardcron_domain::{ExecutionId, ShardRef};

#[async_trait]
impl OpsLedger for SqlLedger {
    async fn reopen(&self, wanted: &Reopen, now_ms: i64) -> Result<std::result::Result<Reopened, Refused>> {
        if let ReopenShards::These(indexes) = &wanted.shards
            && indexes.len() > REOPEN_BATCH
        {
            return Err(too_many("shards", indexes.len(), REOPEN_BATCH));
        }
        with_retries!(self.write_reopening(wanted, now_ms))
    }

    async fn reopenings(&self, execution: ExecutionId) -> Result<Vec<ReopeningRow>> {
        with_retries!(self.read_reopenings(execution))
    }

    async fn attempts_of(&self, shard: ShardRef, limit: usize) -> Result<Vec<AttemptRow>> {
        with_retries!(self.read_attempts_of(shard, limit))
    }

    async fn dead_letters(&self, query: &DeadQuery, limit: usize) -> Result<Vec<DeadRow>> {
        with_retries!(self.read_dead(query, limit))
    }

    async fn settle_dead(&self, settled: &DeadSettled, now_ms: i64) -> Result<Vec<i64>> {
        if settled.ids.len() > DEAD_BATCH {
            return Err(too_many("dead letters", settled.ids.len(), DEAD_BATCH));
        }
        if settled.ids.is_empty() {
            return Ok(Vec::new());
        }
        with_retries!(self.delete_dead(settled, now_ms))
    }
}
