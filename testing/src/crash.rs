//! Effects that end in the middle, as a killed worker's do.

use async_trait::async_trait;
use shardcron_sdk::cache::Caches;
use shardcron_sdk::{
    Checkpoint, CheckpointError, EffectError, Effects, EffectsTransaction, EmitError, Known, RecordRow, SqlValue,
    StepEnd, Stream, SubResult,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio_util::sync::CancellationToken;

/// On which side of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Nothing of it is in the ledger.
    Before,
    /// It is in the ledger, and nobody was told.
    After,
}

/// Where the worker dies: at so many a commit of the attempt, counted from 1. Commits are checkpoints (`advance`), the two of a batch
/// of records (`once` and `settle`), and those of transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// At which commit.
    pub commit: usize,
    /// On which side of it.
    pub moment: Moment,
}

impl Crash {
    /// Before a commit.
    #[must_use]
    pub fn before(commit: usize) -> Self {
        Crash { commit, moment: Moment::Before }
    }

    /// After a commit.
    #[must_use]
    pub fn after(commit: usize) -> Self {
        Crash { commit, moment: Moment::After }
    }
}

/// Counts commits, and dies at one.
#[derive(Clone)]
pub(crate) struct Fuse {
    at: Option<Crash>,
    commits: Arc<AtomicUsize>,
    dead: CancellationToken,
}

impl Fuse {
    pub(crate) fn new(at: Option<Crash>) -> Self {
        Fuse { at, commits: Arc::default(), dead: CancellationToken::new() }
    }

    /// Ends when the attempt is dead.
    pub(crate) async fn blown(&self) {
        self.dead.cancelled().await;
    }

    /// A commit, on both of its sides. Where the attempt dies, this never returns: whoever waits for it is dropped.
    async fn around<T>(&self, commit: impl Future<Output = T>) -> T {
        let number = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
        let dies = |moment| self.at == Some(Crash { commit: number, moment });
        if dies(Moment::Before) {
            self.die().await;
        }
        let done = commit.await;
        if dies(Moment::After) {
            self.die().await;
        }
        done
    }

    async fn die(&self) {
        self.dead.cancel();
        std::future::pending::<()>().await;
    }
}

/// Effects with a fuse.
pub(crate) struct Fused {
    pub(crate) inner: Arc<dyn Effects>,
    pub(crate) fuse: Fuse,
}

#[async_trait]
impl Effects for Fused {
    async fn checkpoint(&self, from: Option<Checkpoint>, to: Checkpoint, rows: u64) -> Result<(), CheckpointError> {
        self.fuse.around(self.inner.checkpoint(from, to, rows)).await
    }

    fn progress(&self) {
        self.inner.progress();
    }

    async fn begin(&self) -> Result<Box<dyn EffectsTransaction>, EffectError> {
        let inner = self.inner.begin().await?;
        Ok(Box::new(FusedTransaction { inner, fuse: self.fuse.clone() }))
    }

    async fn open_records(&self, limit: usize) -> Result<Vec<RecordRow>, EffectError> {
        self.inner.open_records(limit).await
    }

    fn output(&self, stream: Stream, bytes: &[u8]) {
        self.inner.output(stream, bytes);
    }

    fn caches(&self) -> Caches {
        self.inner.caches()
    }

    async fn emit(&self, payload: serde_json::Value) -> Result<(), EmitError> {
        self.inner.emit(payload).await
    }

    async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        self.inner.sub_results(from).await
    }
}

struct FusedTransaction {
    inner: Box<dyn EffectsTransaction>,
    fuse: Fuse,
}

#[async_trait]
impl EffectsTransaction for FusedTransaction {
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64, EffectError> {
        self.inner.execute(sql, args).await
    }

    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>, EffectError> {
        self.inner.query(sql, args).await
    }

    async fn mark(&mut self) -> Result<(), EffectError> {
        self.inner.mark().await
    }

    async fn undo(&mut self) -> Result<(), EffectError> {
        self.inner.undo().await
    }

    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>, EffectError> {
        self.inner.known(keys, note).await
    }

    async fn skipped(&mut self) -> Result<u32, EffectError> {
        self.inner.skipped().await
    }

    async fn commit(self: Box<Self>, end: StepEnd) -> Result<(), EffectError> {
        let FusedTransaction { inner, fuse } = *self;
        fuse.around(inner.commit(end)).await
    }
}
