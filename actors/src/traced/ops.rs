//! Failed shards that a person sends back.

use super::ledger::Traced;
use async_trait::async_trait;
use shardcron_domain::reopen::Refused;
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{ExecutionId, ShardRef};
use shardcron_store::*;

#[async_trait]
impl OpsLedger for Traced {
    async fn reopen(&self, wanted: &Reopen, now_ms: i64) -> Result<std::result::Result<Reopened, Refused>> {
        self.trace.say(|| TraceEvent::Reopening { execution: wanted.execution });
        let answer = self.inner.reopen(wanted, now_ms).await?;
        if let Ok(reopened) = &answer {
            self.trace.say_all(&reopened.shards, |at| TraceEvent::Reopened { at: *at });
        }
        Ok(answer)
    }
    async fn reopenings(&self, execution: ExecutionId) -> Result<Vec<ReopeningRow>> {
        self.inner.reopenings(execution).await
    }
    async fn attempts_of(&self, shard: ShardRef, limit: usize) -> Result<Vec<AttemptRow>> {
        self.inner.attempts_of(shard, limit).await
    }
    async fn dead_letters(&self, query: &DeadQuery, limit: usize) -> Result<Vec<DeadRow>> {
        self.inner.dead_letters(query, limit).await
    }
    async fn settle_dead(&self, settled: &DeadSettled, now_ms: i64) -> Result<Vec<i64>> {
        self.inner.settle_dead(settled, now_ms).await
    }
}
