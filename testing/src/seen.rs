//! What attempts let others see: output, progress, and the shards that they emit. Output and emitted shards go through the ledger, as a
//! worker's do.

use async_trait::async_trait;
use shardcron_domain::limits::{EMITTED_BYTES, EMITTED_PER_WRITE, SUB_RESULTS_PAGE};
use shardcron_domain::output::{Buffer, Stream};
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_sdk::cache::Caches;
use shardcron_sdk::{
    Checkpoint, CheckpointError, EffectError, Effects, EffectsTransaction, EmitError, RecordRow, ShardSlice, SubResult,
};
use shardcron_store::sql::SqlLedger;
use shardcron_store::{Ended, Growth, Ledger, OutputWrite, Recorded, ShardingLedger};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one attempt lets others see.
pub(crate) struct Seen {
    pub(crate) inner: Arc<dyn Effects>,
    ledger: SqlLedger,
    owner: Incarnation,
    attempt: AttemptRef,
    slice: ShardSlice,
    results: Vec<SubResult>,
    output: Mutex<Buffer>,
    progress: AtomicU64,
    emitted: Mutex<Vec<serde_json::Value>>,
    staged: tokio::sync::Mutex<Staged>,
    caches: Caches,
}

#[derive(Default)]
struct Staged {
    kept: u32,
    waiting: Vec<String>,
}

impl Seen {
    pub(crate) fn new(
        ledger: &SqlLedger,
        (owner, attempt): (Incarnation, AttemptRef),
        (slice, results): (ShardSlice, Vec<SubResult>),
        inner: Arc<dyn Effects>,
    ) -> Self {
        Seen {
            inner,
            ledger: ledger.clone(),
            owner,
            attempt,
            slice,
            results,
            output: Mutex::default(),
            progress: AtomicU64::new(0),
            emitted: Mutex::default(),
            staged: tokio::sync::Mutex::default(),
            caches: Caches::default(),
        }
    }

    pub(crate) fn marks(&self) -> u64 {
        self.progress.load(Ordering::SeqCst)
    }

    pub(crate) fn emits(&self) -> Vec<serde_json::Value> {
        lock(&self.emitted).clone()
    }

    /// Brings what was written into the ledger.
    pub(crate) async fn keep_output(&self, now_ms: i64) -> crate::Result<()> {
        let write = {
            let mut output = lock(&self.output);
            if output.is_empty() {
                return Ok(());
            }
            output.take()
        };
        Ok(self.ledger.keep_output(&[OutputWrite { attempt: self.attempt, write }], now_ms).await?)
    }

    /// Records the good end of a map's first shard with what it emitted; `None`: this is none.
    pub(crate) async fn finish_map(&self, ended: &Ended, now_ms: i64) -> crate::Result<Option<Recorded>> {
        if !matches!(self.slice, ShardSlice::Map { .. }) {
            return Ok(None);
        }
        let mut staged = self.staged.lock().await;
        self.keep(&mut staged).await?;
        let growth = Growth { emitted: staged.kept, reduce: false };
        Ok(Some(self.ledger.finish_map(self.owner, ended, growth, now_ms).await??))
    }

    async fn keep(&self, staged: &mut Staged) -> Result<(), EmitError> {
        if staged.waiting.is_empty() {
            return Ok(());
        }
        let answer = self.ledger.emit(self.owner, self.attempt, staged.kept + 1, &staged.waiting).await;
        answer.map_err(|e| EmitError::Unavailable(e.to_string()))?.map_err(EmitError::Superseded)?;
        staged.kept += u32::try_from(staged.waiting.len()).unwrap_or(u32::MAX);
        staged.waiting.clear();
        Ok(())
    }
}

#[async_trait]
impl Effects for Seen {
    async fn checkpoint(&self, from: Option<Checkpoint>, to: Checkpoint, rows: u64) -> Result<(), CheckpointError> {
        self.inner.checkpoint(from, to, rows).await
    }

    fn progress(&self) {
        self.progress.fetch_add(1, Ordering::SeqCst);
        self.inner.progress();
    }

    fn output(&self, stream: Stream, bytes: &[u8]) {
        lock(&self.output).push(stream, bytes);
    }

    async fn begin(&self) -> Result<Box<dyn EffectsTransaction>, EffectError> {
        self.inner.begin().await
    }

    async fn open_records(&self, limit: usize) -> Result<Vec<RecordRow>, EffectError> {
        self.inner.open_records(limit).await
    }

    fn caches(&self) -> Caches {
        self.caches.clone()
    }

    async fn emit(&self, payload: serde_json::Value) -> Result<(), EmitError> {
        let ShardSlice::Map { max } = self.slice else {
            let why =
                "only the first shard of a job with shards = { map = {} } emits shards; give the test ShardSlice::Map";
            return Err(EmitError::Refused(why.into()));
        };
        let text = payload.to_string();
        if text.len() > EMITTED_BYTES {
            let bytes = text.len();
            return Err(EmitError::Refused(format!("an emitted shard of {bytes} bytes; {EMITTED_BYTES} are the most")));
        }
        let mut staged = self.staged.lock().await;
        if staged.kept as usize + staged.waiting.len() >= max as usize {
            return Err(EmitError::Refused(format!("more than {max} shards")));
        }
        if staged.waiting.len() >= EMITTED_PER_WRITE {
            self.keep(&mut staged).await?;
        }
        staged.waiting.push(text);
        lock(&self.emitted).push(payload);
        Ok(())
    }

    async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        if !matches!(self.slice, ShardSlice::Reduce { .. }) {
            return Err(EmitError::Refused("only the reducing shard of a map reads the others' results".into()));
        }
        Ok(self.results.iter().filter(|result| result.number >= from).take(SUB_RESULTS_PAGE).cloned().collect())
    }
}
