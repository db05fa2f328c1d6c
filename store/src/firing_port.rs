//! The part of the ledger's port that is about firings that wait, follow and are looked back at.

use crate::error::Result;
use crate::firing_rows::*;
use crate::rows::DecisionRow;
use async_trait::async_trait;
use shardcron_domain::{Epoch, ExecutionId, JobId};

/// Like [`Ledger`](crate::Ledger), whose rules hold here: each method is one transaction at most and may be called again.
#[async_trait]
#[allow(missing_docs, reason = "each method is documented where it stands")]
pub trait FiringLedger: Send + Sync + 'static {
    /// Notes that a leader was seen to lead. A later note never falls behind an earlier one.
    async fn touch_epoch(&self, epoch: Epoch, now_ms: i64) -> Result<()>;
    /// Epochs up to one (or to the latest), latest first.
    async fn epochs(&self, upto: Option<Epoch>, limit: usize) -> Result<Vec<EpochRow>>;

    /// The decision that was made last about a job.
    async fn latest_decision(&self, job: JobId) -> Result<Option<DecisionRow>>;

    /// Pauses (`Some(who)`) or resumes all jobs (`all`) or a tier's (`tier:name`). A job's own pause stays as it is. False: nothing
    /// changed.
    async fn set_scope_paused(&self, scope: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool>;
    /// The pauses of more than one job.
    async fn pauses(&self) -> Result<Vec<PauseRow>>;

    /// Of each job and kind, the first firing whose time has come.
    async fn waiting_heads(&self, now_ms: i64, limit: usize) -> Result<Vec<WaitingRow>>;
    /// How many firings of a job wait, of all kinds.
    async fn waiting_count(&self, job: JobId) -> Result<u32>;
    /// Begins a backfill under the fence; false if this request of the job has begun one before.
    async fn begin_backfill(&self, epoch: Epoch, new: &NewBackfill, now_ms: i64) -> Result<bool>;
    /// One backfill of a job.
    async fn backfill(&self, job: JobId, request_id: &str) -> Result<Option<BackfillRow>>;

    /// Of these fire keys of a job, those that have an execution.
    async fn ran(&self, job: JobId, fire_keys: &[String]) -> Result<Vec<String>>;

    /// Jobs with at least one upstream's end that they have not taken up, and with each all such executions, ended or not, up to a
    /// limit for each pair; oldest first.
    async fn watches(&self, limit: usize) -> Result<Vec<WatchRow>>;
    /// Drops ends that a fan-in has not taken up, under the fence.
    async fn drop_watches(&self, epoch: Epoch, ids: &[i64]) -> Result<()>;
    /// What an execution came to; `None` if there is no such execution.
    async fn result_summary(&self, execution: ExecutionId, summary_bytes: usize) -> Result<Option<ResultSummary>>;

    /// Which of these executions are cancelled.
    async fn cancelled(&self, among: &[ExecutionId]) -> Result<Vec<ExecutionId>>;
    /// Why an execution was cancelled.
    async fn cancellation(&self, execution: ExecutionId) -> Result<Option<CancellationRow>>;
}
