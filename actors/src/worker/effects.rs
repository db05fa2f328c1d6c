//! What a running attempt may do through its worker: its steps at the ledger, the worker's caches, and the shards of a map.

use super::emits::Emits;
use super::output::Outlet;
use async_trait::async_trait;
use shardcron_domain::once::RecordRow;
use shardcron_domain::output::Stream;
use shardcron_domain::shard::Checkpoint;
use shardcron_handlers::effects::LedgerEffects;
use shardcron_sdk::cache::Caches;
use shardcron_sdk::{CheckpointError, EffectError, Effects, EffectsTransaction, EmitError, SubResult};
use std::sync::Arc;

pub(super) struct WorkerEffects {
    pub(super) steps: Arc<LedgerEffects>,
    pub(super) caches: Caches,
    pub(super) emits: Arc<Emits>,
    pub(super) outlet: Outlet,
}

#[async_trait]
impl Effects for WorkerEffects {
    async fn checkpoint(&self, from: Option<Checkpoint>, to: Checkpoint, rows: u64) -> Result<(), CheckpointError> {
        self.steps.checkpoint(from, to, rows).await
    }

    fn progress(&self) {
        self.steps.progress();
    }

    fn output(&self, stream: Stream, bytes: &[u8]) {
        self.outlet.push(stream, bytes);
    }

    async fn begin(&self) -> Result<Box<dyn EffectsTransaction>, EffectError> {
        self.steps.begin().await
    }

    async fn open_records(&self, limit: usize) -> Result<Vec<RecordRow>, EffectError> {
        self.steps.open_records(limit).await
    }

    fn caches(&self) -> Caches {
        self.caches.clone()
    }

    async fn emit(&self, payload: serde_json::Value) -> Result<(), EmitError> {
        self.emits.emit(payload).await
    }

    async fn sub_results(&self, from: u32) -> Result<Vec<SubResult>, EmitError> {
        self.emits.sub_results(from).await
    }
}
