//! What concerns firings and is only looked at here: the firings themselves are asked for by [`Ledger::fire`].

use super::ledger::Traced;
use async_trait::async_trait;
use shardcron_domain::{Epoch, ExecutionId, JobId};
use shardcron_store::*;

#[async_trait]
impl FiringLedger for Traced {
    async fn touch_epoch(&self, epoch: Epoch, now_ms: i64) -> Result<()> {
        self.inner.touch_epoch(epoch, now_ms).await
    }
    async fn epochs(&self, upto: Option<Epoch>, limit: usize) -> Result<Vec<EpochRow>> {
        self.inner.epochs(upto, limit).await
    }
    async fn latest_decision(&self, job: JobId) -> Result<Option<DecisionRow>> {
        self.inner.latest_decision(job).await
    }
    async fn set_scope_paused(&self, scope: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        self.inner.set_scope_paused(scope, paused_by, who, now_ms).await
    }
    async fn pauses(&self) -> Result<Vec<PauseRow>> {
        self.inner.pauses().await
    }
    async fn waiting_heads(&self, now_ms: i64, limit: usize) -> Result<Vec<WaitingRow>> {
        self.inner.waiting_heads(now_ms, limit).await
    }
    async fn waiting_count(&self, job: JobId) -> Result<u32> {
        self.inner.waiting_count(job).await
    }
    async fn begin_backfill(&self, epoch: Epoch, new: &NewBackfill, now_ms: i64) -> Result<bool> {
        self.inner.begin_backfill(epoch, new, now_ms).await
    }
    async fn backfill(&self, job: JobId, request_id: &str) -> Result<Option<BackfillRow>> {
        self.inner.backfill(job, request_id).await
    }
    async fn ran(&self, job: JobId, fire_keys: &[String]) -> Result<Vec<String>> {
        self.inner.ran(job, fire_keys).await
    }
    async fn watches(&self, limit: usize) -> Result<Vec<WatchRow>> {
        self.inner.watches(limit).await
    }
    async fn drop_watches(&self, epoch: Epoch, ids: &[i64]) -> Result<()> {
        self.inner.drop_watches(epoch, ids).await
    }
    async fn result_summary(&self, execution: ExecutionId, summary_bytes: usize) -> Result<Option<ResultSummary>> {
        self.inner.result_summary(execution, summary_bytes).await
    }
    async fn cancelled(&self, among: &[ExecutionId]) -> Result<Vec<ExecutionId>> {
        self.inner.cancelled(among).await
    }
    async fn cancellation(&self, execution: ExecutionId) -> Result<Option<CancellationRow>> {
        self.inner.cancellation(execution).await
    }
}
