//! What a handler is told, and what it may tell.

use async_trait::async_trait;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::plan::ShardSlice;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, Incarnation};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Why a checkpoint was not taken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The attempt is no longer this worker's. Stop: everything from here on is done by somebody else.
    #[error(
        "the attempt is not this worker's any more ({0}); stop here, another attempt goes on from the last checkpoint"
    )]
    Superseded(Rejection),
    /// The ledger is away. The checkpoint may be tried again.
    #[error("the checkpoint could not be kept: {0}")]
    Unavailable(String),
}

/// What a running attempt may do to the world through its worker. Implemented by the worker, and by test helpers.
#[async_trait]
pub trait Effects: Send + Sync {
    /// Moves the checkpoint of the attempt.
    ///
    /// # Errors
    /// Superseded, or the ledger is away.
    async fn checkpoint(&self, from: Option<Checkpoint>, to: Checkpoint, rows: u64) -> Result<(), CheckpointError>;

    /// Notes that the attempt moves. Costs nothing; called as often as one likes.
    fn progress(&self) {}
}

/// One attempt at one shard, as its handler sees it.
#[derive(Clone)]
pub struct ShardContext {
    /// The attempt. Every write of the worker names it.
    pub attempt: AttemptRef,
    /// The worker's process life.
    pub owner: Incarnation,
    /// The job's name.
    pub job: String,
    /// The shard's position among those that the job's data is cut into (`shardingItem` elsewhere). The same as `attempt.index` but
    /// where a trigger picked some shards out.
    pub shard_index: u32,
    /// How many shards the job's data is cut into (`shardingTotal` elsewhere).
    pub shards_total: u32,
    /// The part of the data.
    pub slice: ShardSlice,
    /// The execution's parameters.
    pub params: serde_json::Map<String, serde_json::Value>,
    /// The instant that the execution is for, milliseconds UTC.
    pub nominal_ms: i64,
    /// Where an earlier attempt got to.
    pub checkpoint: Option<Checkpoint>,
    /// When the attempt began, milliseconds UTC by the worker's clock; for the record, never for decisions.
    pub started_ms: i64,
    /// What follows a failed attempt.
    pub retry: RetryPolicy,
    /// When the attempt is cut off; `None` for no limit.
    pub deadline: Option<Instant>,
    /// Ends when the attempt should stop: its timeout, a shutdown, a cancelled execution, or a worker that lost its presence.
    pub stop: CancellationToken,
    /// The way back to the worker.
    pub effects: Arc<dyn Effects>,
}

impl ShardContext {
    /// The same for every attempt at this shard; for systems that deduplicate.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        self.attempt.idempotency_key()
    }

    /// Whether to stop at the next opportunity.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Whether the attempt is past its limit.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.deadline.is_some_and(|d| Instant::now() >= d)
    }

    /// Time left before the attempt is cut off.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }

    /// Notes that everything up to `to` is done, `rows` of it since the last time. The next attempt starts there.
    ///
    /// # Errors
    /// Superseded, or the ledger is away.
    pub async fn advance(&mut self, to: Checkpoint, rows: u64) -> Result<(), CheckpointError> {
        self.effects.checkpoint(self.checkpoint.clone(), to.clone(), rows).await?;
        self.checkpoint = Some(to);
        self.effects.progress();
        Ok(())
    }

    /// Says that the attempt moves, where there is no checkpoint to take: it is what a job's `stall_timeout` waits for. A call costs
    /// nothing, so it may stand in the innermost loop.
    pub fn progress(&self) {
        self.effects.progress();
    }
}
