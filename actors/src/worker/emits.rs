//! What the first shard of a map emits, and what its last one reads. Emitted shards go to the ledger in batches, under the attempt;
//! they become the execution's own with the good end of that attempt, in the same transaction (docs/decisions/0024).

use crate::ports::Ports;
use shardcron_domain::limits::{EMITTED_BYTES, EMITTED_PER_WRITE, SUB_RESULTS_PAGE};
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_sdk::{EmitError, ShardError, SubResult};
use shardcron_store::{Ended, ExecutionHead, Growth, StoreError};
use std::sync::Arc;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// The way from an attempt to the shards that it makes or sums up.
pub(super) struct Emits {
    ports: Ports,
    owner: Incarnation,
    attempt: AttemptRef,
    what: What,
    staged: Mutex<Staged>,
}

/// What the attempt may do.
#[derive(Clone, Copy)]
enum What {
    Nothing,
    Emit { max: u32, reduce: bool },
    Reduce,
}

#[derive(Default)]
struct Staged {
    /// In the ledger.
    kept: u32,
    /// Not yet.
    waiting: Vec<String>,
}

impl Emits {
    pub(super) fn of(ports: &Ports, owner: Incarnation, attempt: AttemptRef, head: &ExecutionHead) -> Arc<Self> {
        let what = match &head.plan {
            ShardPlan::Map { reduce, max } if attempt.index == 0 => What::Emit { max: *max, reduce: *reduce },
            ShardPlan::Map { reduce: true, .. } => What::Reduce,
            _ => What::Nothing,
        };
        Arc::new(Emits { ports: ports.clone(), owner, attempt, what, staged: Mutex::default() })
    }

    pub(super) async fn emit(&self, payload: serde_json::Value) -> Result<(), EmitError> {
        let What::Emit { max, .. } = self.what else {
            return Err(EmitError::Refused(
                "only the first shard of a job with shards = { map = {} } emits shards".into(),
            ));
        };
        let text = payload.to_string();
        if text.len() > EMITTED_BYTES {
            return Err(EmitError::Refused(format!(
                "an emitted shard of {} bytes; {EMITTED_BYTES} are the most. Emit where the data is, and not the data",
                text.len()
            )));
        }
        let mut staged = self.staged.lock().await;
        if staged.kept as usize + staged.waiting.len() >= max as usize {
            return Err(EmitError::Refused(format!(
                "more than {max} shards; raise 'max' in the job's map, or emit larger ones"
            )));
        }
        // Kept first where there is no room: what could not be kept is not forgotten, and emitting it again would double it.
        if staged.waiting.len() >= EMITTED_PER_WRITE {
            self.keep(&mut staged).await?;
        }
        staged.waiting.push(text);
        Ok(())
    }

    async fn keep(&self, staged: &mut Staged) -> Result<(), EmitError> {
        let from = staged.kept + 1;
        match self.ports.ledger.emit(self.owner, self.attempt, from, &staged.waiting).await {
            Ok(Ok(())) => {
                staged.kept += u32::try_from(staged.waiting.len()).unwrap_or(u32::MAX);
                staged.waiting.clear();
                Ok(())
            }
            Ok(Err(rejection)) => Err(EmitError::Superseded(rejection)),
            Err(e) => Err(EmitError::Unavailable(e.to_string())),
        }
    }

    pub(super) async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        let What::Reduce = self.what else {
            return Err(EmitError::Refused("only the reducing shard of a map reads the others' results".into()));
        };
        // The first shard's own result is no sub-result.
        let page =
            self.ports.ledger.sub_results(self.attempt.execution, from.saturating_add(1), SUB_RESULTS_PAGE).await;
        let page = page.map_err(|e| EmitError::Unavailable(e.to_string()))?;
        let read = |text: String| serde_json::from_str(&text).ok();
        Ok(page
            .into_iter()
            .map(|r| SubResult { number: r.index.saturating_sub(1), rows: r.rows, summary: r.summary.and_then(read) })
            .collect())
    }

    /// Whether this is the first shard of a map.
    pub(super) fn is_first(&self) -> bool {
        matches!(self.what, What::Emit { .. })
    }

    /// Records the good end of a map's first shard together with what it emitted. `None`: it is another shard's end, to be recorded
    /// like any other. Waits for the ledger as long as the worker is not told to stop.
    pub(super) async fn finish(&self, ended: &Ended, stop: &CancellationToken) -> Option<Result<(), ShardError>> {
        let What::Emit { reduce, .. } = self.what else { return None };
        let mut staged = self.staged.lock().await;
        let mut backoff = self.ports.backoff();
        loop {
            let problem = match self.finish_once(ended, &mut staged, reduce).await {
                Ok(done) => return Some(done),
                Err(problem) => problem,
            };
            tracing::debug!(error = %problem, "the end of a map's first shard could not be recorded yet");
            tokio::select! {
                biased;
                () = stop.cancelled() => return Some(Err(ShardError::stopped("told to stop before its end was recorded"))),
                () = tokio::time::sleep(backoff.next()) => {}
            }
        }
    }

    /// An error of the outer kind may be gone with another try.
    async fn finish_once(
        &self,
        ended: &Ended,
        staged: &mut Staged,
        reduce: bool,
    ) -> Result<Result<(), ShardError>, String> {
        if !staged.waiting.is_empty() {
            match self.keep(staged).await {
                Ok(()) => {}
                Err(e @ EmitError::Unavailable(_)) => return Err(e.to_string()),
                Err(e) => return Ok(Err(e.into())),
            }
        }
        let growth = Growth { emitted: staged.kept, reduce };
        let now_ms = self.ports.ledger_now_ms();
        match self.ports.ledger.finish_map(self.owner, ended, growth, now_ms).await {
            Ok(Ok(_)) => Ok(Ok(())),
            // By this attempt itself perhaps, and the answer was lost: whatever it was, the ledger has decided.
            Ok(Err(rejection)) => Ok(Err(ShardError::stopped(format!("its end was refused: {rejection}")))),
            Err(e) if e.is_transient() => Err(e.to_string()),
            Err(e) => Ok(Err(ShardError::permanent(e.to_string()))),
        }
    }

    /// The slice of a shard that is not in the plan itself.
    pub(super) async fn slice(&self, plan: &ShardPlan) -> Result<ShardSlice, StoreError> {
        let AttemptRef { execution, index, .. } = self.attempt;
        let ledger = &self.ports.ledger;
        let ShardPlan::Map { reduce, .. } = plan else {
            return Err(StoreError::Invalid(format!("shard {index} is beyond the plan of {}", plan.count())));
        };
        if let Some(text) = ledger.emitted(execution, index).await? {
            let payload = serde_json::from_str(&text).map_err(|e| {
                StoreError::Corrupt(format!("the payload of shard {index} of execution {execution}: {e}"))
            })?;
            return Ok(ShardSlice::Task { number: index.saturating_sub(1), payload });
        }
        if !*reduce {
            return Err(StoreError::Invalid(format!("shard {index} of execution {execution} was never emitted")));
        }
        Ok(ShardSlice::Reduce { tasks: ledger.emitted_count(execution).await? })
    }
}
