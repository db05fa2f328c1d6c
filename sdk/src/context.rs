//! What a handler is told, and what it may tell.

use crate::cache::{Cache, Caches};
use crate::handler::ShardError;
use crate::transaction::{EffectError, EffectsTransaction};
use async_trait::async_trait;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::once::RecordRow;
use shardcron_domain::output::Stream;
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

impl From<CheckpointError> for ShardError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Superseded(_) => ShardError::stopped(error.to_string()),
            CheckpointError::Unavailable(_) => ShardError::transient(error.to_string()),
        }
    }
}

/// Why a shard could not be emitted, or results not be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EmitError {
    /// The attempt is no longer this worker's, or the execution is over. Stop.
    #[error("the attempt is not this worker's any more ({0}); stop here, another attempt emits anew")]
    Superseded(Rejection),
    /// Only the first shard of a job with `shards = { map = … }` emits, and only its reducing shard reads results.
    #[error("{0}")]
    Refused(String),
    /// The ledger is away. May be tried again.
    #[error("what was emitted could not be kept: {0}")]
    Unavailable(String),
}

impl From<EmitError> for ShardError {
    fn from(error: EmitError) -> Self {
        match error {
            EmitError::Superseded(_) => ShardError::stopped(error.to_string()),
            EmitError::Refused(_) => ShardError::permanent(error.to_string()),
            EmitError::Unavailable(_) => ShardError::transient(error.to_string()),
        }
    }
}

/// What an emitted shard came to, for the one that reduces.
#[derive(Clone, Debug, PartialEq)]
pub struct SubResult {
    /// Its number among the emitted, from 0.
    pub number: u32,
    /// Records that it worked on, if its handler counted them.
    pub rows: Option<u64>,
    /// Its summary.
    pub summary: Option<serde_json::Value>,
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

    /// Keeps output of the attempt, where people can follow it. Costs no traffic of its own; what is more than the bounds is cut.
    fn output(&self, _stream: Stream, _bytes: &[u8]) {}

    /// Begins a transaction in the ledger's own database, under the attempt's fence.
    ///
    /// # Errors
    /// Superseded, or the ledger is away, or there is none.
    async fn begin(&self) -> Result<Box<dyn EffectsTransaction>, EffectError> {
        Err(EffectError::NoLedger)
    }

    /// Records of the shard that an earlier attempt began with or failed at.
    ///
    /// # Errors
    /// The ledger is away, or there is none.
    async fn open_records(&self, limit: usize) -> Result<Vec<RecordRow>, EffectError> {
        let _ = limit;
        Err(EffectError::NoLedger)
    }

    /// The worker's caches. Without a worker, caches that keep nothing.
    fn caches(&self) -> Caches {
        Caches::default()
    }

    /// Emits a shard of a map.
    ///
    /// # Errors
    /// This attempt emits nothing, there are too many, the payload is too large, or the ledger is away.
    async fn emit(&self, _payload: serde_json::Value) -> Result<(), EmitError> {
        Err(EmitError::Refused("this attempt has nowhere to emit shards to".into()))
    }

    /// A page of what the emitted shards came to, from a number on; empty behind the last.
    ///
    /// # Errors
    /// This attempt does not reduce, or the ledger is away.
    async fn sub_results(&self, _from: u32) -> Result<Vec<SubResult>, EmitError> {
        Err(EmitError::Refused("this attempt has no results to read".into()))
    }
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

    /// Writes a line that people see with `shardcron logs`, while the attempt runs and afterwards. It is progress, too.
    pub fn log(&self, line: impl std::fmt::Display) {
        self.effects.output(Stream::Log, format!("{line}\n").as_bytes());
        self.effects.progress();
    }

    /// The worker's cache of a name, which all its attempts share: values that many records need, read from their source as rarely as
    /// possible. See [`Cache::get`].
    #[must_use]
    pub fn cache(&self, name: &str) -> Cache {
        self.effects.caches().cache(name)
    }

    /// Emits a shard of a map: its handler gets the payload as its slice (`ShardSlice::Task`). It becomes a shard only with this
    /// attempt's good end; an attempt that fails has emitted nothing.
    ///
    /// # Errors
    /// The slice is not a map's first shard, there are more than the job's `max`, the payload is larger than 16 KiB as JSON, or the
    /// ledger is away.
    pub async fn emit(&self, payload: impl Into<serde_json::Value> + Send) -> Result<(), EmitError> {
        self.effects.emit(payload.into()).await?;
        self.effects.progress();
        Ok(())
    }

    /// What the emitted shards came to, a page from number `from` on, in their order; empty behind the last. For the shard whose
    /// slice is `ShardSlice::Reduce`.
    ///
    /// # Errors
    /// The slice is another, or the ledger is away.
    pub async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        self.effects.sub_results(from).await
    }

    /// Says that the attempt moves, where there is no checkpoint to take: it is what a job's `stall_timeout` waits for. A call costs
    /// nothing, so it may stand in the innermost loop.
    pub fn progress(&self) {
        self.effects.progress();
    }
}
