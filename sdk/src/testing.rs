//! Help for testing a handler without a worker: a context, and effects that remember what was asked of them.
//!
//! ```
//! use shardcron_sdk::testing::TestContext;
//! use shardcron_sdk::{Checkpoint, ShardSlice};
//!
//! let test = TestContext::new(ShardSlice::Range { from: 1, to: 10 }).param("date", "2013-01-31");
//! let context = test.context(); // handler.run(context).await
//! assert_eq!(context.params["date"], "2013-01-31");
//! assert_eq!(test.checkpoints(), Vec::<(Checkpoint, u64)>::new());
//! ```

use crate::cache::Caches;
use crate::context::{CheckpointError, Effects, EmitError, ShardContext, SubResult};
use async_trait::async_trait;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::output::Stream;
use shardcron_domain::plan::ShardSlice;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Effects that keep checkpoints in memory, under the same compare-and-set as the ledger.
#[derive(Default)]
pub struct RecordedEffects {
    moves: Mutex<Vec<(Checkpoint, u64)>>,
    emitted: Mutex<Vec<serde_json::Value>>,
    results: Vec<SubResult>,
    start: Option<Checkpoint>,
    output: Mutex<Vec<(Stream, Vec<u8>)>>,
    caches: Caches,
}

impl RecordedEffects {
    /// Effects of an attempt that goes on from a checkpoint.
    #[must_use]
    pub fn starting_at(start: Option<Checkpoint>) -> Self {
        RecordedEffects { start, ..RecordedEffects::default() }
    }

    /// What was written to a stream; text that is not UTF-8 with U+FFFD in its place.
    #[must_use]
    pub fn output(&self, stream: Stream) -> String {
        let all = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = all.iter().filter(|(of, _)| *of == stream).flat_map(|(_, bytes)| bytes.clone()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The checkpoints taken, with the records of each step.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<(Checkpoint, u64)> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl Effects for RecordedEffects {
    async fn checkpoint(&self, from: Option<Checkpoint>, to: Checkpoint, rows: u64) -> Result<(), CheckpointError> {
        let mut moves = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        let current = moves.last().map(|(at, _)| at.clone()).or_else(|| self.start.clone());
        if current != from {
            return Err(CheckpointError::Superseded(Rejection::CheckpointGap));
        }
        moves.push((to, rows));
        Ok(())
    }

    fn output(&self, stream: Stream, bytes: &[u8]) {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).push((stream, bytes.to_vec()));
    }

    fn caches(&self) -> Caches {
        self.caches.clone()
    }

    async fn emit(&self, payload: serde_json::Value) -> Result<(), EmitError> {
        self.emitted.lock().unwrap_or_else(PoisonError::into_inner).push(payload);
        Ok(())
    }

    async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        Ok(self.results.iter().filter(|result| result.number >= from).cloned().collect())
    }
}

/// A context for tests, and what became of it.
#[derive(Clone)]
pub struct TestContext {
    context: ShardContext,
    effects: Arc<RecordedEffects>,
}

impl TestContext {
    /// Attempt 1 at shard 0 of 1 of an execution of the job `test`, without a limit.
    #[must_use]
    pub fn new(slice: ShardSlice) -> Self {
        let effects = Arc::new(RecordedEffects::default());
        let context = ShardContext {
            attempt: AttemptRef { execution: ExecutionId(Uuid::from_u128(1)), index: 0, attempt: 1 },
            owner: Incarnation(Uuid::from_u128(2)),
            job: "test".into(),
            shard_index: 0,
            shards_total: 1,
            slice,
            params: serde_json::Map::new(),
            nominal_ms: 0,
            checkpoint: None,
            started_ms: 0,
            retry: RetryPolicy::default(),
            deadline: None,
            stop: CancellationToken::new(),
            effects: effects.clone(),
        };
        TestContext { context, effects }
    }

    /// With a parameter.
    #[must_use]
    pub fn param(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.context.params.insert(name.into(), value.into());
        self
    }

    /// As a later attempt that goes on from a checkpoint.
    #[must_use]
    pub fn resumed(mut self, attempt: u32, checkpoint: Checkpoint) -> Self {
        self.effects = Arc::new(RecordedEffects::starting_at(Some(checkpoint.clone())));
        self.context.effects = self.effects.clone();
        self.context.attempt.attempt = attempt;
        self.context.checkpoint = Some(checkpoint);
        self
    }

    /// With a limit, counted from now.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.context.deadline = Some(Instant::now() + limit);
        self
    }

    /// What the handler is given. Its `stop` is this test's, too.
    #[must_use]
    pub fn context(&self) -> ShardContext {
        self.context.clone()
    }

    /// Tells the handler to stop.
    pub fn stop(&self) {
        self.context.stop.cancel();
    }

    /// The checkpoints taken, with the records of each step.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<(Checkpoint, u64)> {
        self.effects.checkpoints()
    }

    /// What was written to a stream: `Stream::Log` is what [`ShardContext::log`] writes.
    #[must_use]
    pub fn output(&self, stream: Stream) -> String {
        self.effects.output(stream)
    }

    /// As the shard that reduces these results.
    #[must_use]
    pub fn reducing(mut self, results: Vec<SubResult>) -> Self {
        let tasks = u32::try_from(results.len()).unwrap_or(u32::MAX);
        self.effects = Arc::new(RecordedEffects { results, ..RecordedEffects::default() });
        self.context.effects = self.effects.clone();
        self.context.slice = ShardSlice::Reduce { tasks };
        self
    }

    /// The shards that were emitted, in their order.
    #[must_use]
    pub fn emitted(&self) -> Vec<serde_json::Value> {
        self.effects.emitted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn checkpoints_follow_from_each_other() {
        let test = TestContext::new(ShardSlice::Range { from: 1, to: 9 }).resumed(2, Checkpoint::Number(3));
        let (mut one, mut twin) = (test.context(), test.context());
        one.advance(Checkpoint::Number(5), 2).await.unwrap();
        let late = twin.advance(Checkpoint::Number(6), 3).await;
        assert!(matches!(late, Err(CheckpointError::Superseded(Rejection::CheckpointGap))));
        assert_eq!(test.checkpoints(), [(Checkpoint::Number(5), 2)]);
    }
}
