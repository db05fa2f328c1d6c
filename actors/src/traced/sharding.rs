//! Plans and emitted shards. What a map's first shard comes to is said like any other end.

use super::ledger::{Traced, recorded, recording};
use async_trait::async_trait;
use shardcron_domain::planning::{KeyBounds, LastRun};
use shardcron_domain::shard::Rejection;
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};
use shardcron_store::*;

#[async_trait]
impl ShardingLedger for Traced {
    async fn key_bounds(&self, query: &QuerySpec) -> Result<KeyBounds> {
        self.inner.key_bounds(query).await
    }
    async fn last_run(&self, job: JobId) -> Result<Option<LastRun>> {
        self.inner.last_run(job).await
    }
    async fn emit(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: u32,
        payloads: &[String],
    ) -> Result<std::result::Result<(), Rejection>> {
        self.inner.emit(owner, attempt, from, payloads).await
    }
    async fn finish_map(
        &self,
        owner: Incarnation,
        ended: &Ended,
        growth: Growth,
        now_ms: i64,
    ) -> Result<std::result::Result<Recorded, Rejection>> {
        let shards = 1 + growth.emitted + u32::from(growth.reduce);
        self.trace.say(|| TraceEvent::Growing { execution: ended.attempt.execution, shards });
        self.trace.say(|| recording(owner, ended));
        let verdict = self.inner.finish_map(owner, ended, growth, now_ms).await?;
        self.trace.say(|| recorded(owner, ended, verdict.as_ref()));
        Ok(verdict)
    }
    async fn emitted(&self, execution: ExecutionId, index: u32) -> Result<Option<String>> {
        self.inner.emitted(execution, index).await
    }
    async fn emitted_count(&self, execution: ExecutionId) -> Result<u32> {
        self.inner.emitted_count(execution).await
    }
    async fn addressed(&self, who: Incarnation, now_ms: i64, limit: usize) -> Result<Vec<(String, AttemptRef)>> {
        self.inner.addressed(who, now_ms, limit).await
    }
    async fn addressees(&self) -> Result<Vec<Incarnation>> {
        self.inner.addressees().await
    }
    async fn abandon(&self, epoch: Epoch, who: Incarnation, now_ms: i64) -> Result<Vec<AttemptRef>> {
        self.trace.say(|| TraceEvent::Abandoning { epoch, worker: who });
        let abandoned = self.inner.abandon(epoch, who, now_ms).await?;
        self.trace.say_all(&abandoned, |at| TraceEvent::Abandoned { at: *at });
        Ok(abandoned)
    }
    async fn sub_results(&self, execution: ExecutionId, from: u32, limit: usize) -> Result<Vec<SubResult>> {
        self.inner.sub_results(execution, from, limit).await
    }
}
