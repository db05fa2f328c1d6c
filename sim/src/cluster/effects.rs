//! Handlers here have no database of their own: only the ends of their shards pass by the rows of records.

use super::ledger::SimLedger;
use async_trait::async_trait;
use shardcron_domain::effects::StepEnd;
use shardcron_domain::once::RecordRow;
use shardcron_domain::shard::Rejection;
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::*;

type Answer<T> = Result<std::result::Result<T, Rejection>>;

#[async_trait]
impl EffectsLedger for SimLedger {
    async fn begin_step(&self, _: Incarnation, _: AttemptRef) -> Answer<Box<dyn StepTx>> {
        Err(StoreError::Invalid("no handler of the simulation has transactions".into()))
    }
    async fn step_stands(&self, owner: Incarnation, attempt: AttemptRef, end: &StepEnd) -> Answer<bool> {
        let sql = self.world().sql().clone();
        self.read("step_stands", async move { sql.step_stands(owner, attempt, end).await }).await
    }
    async fn open_records(&self, before: AttemptRef, limit: usize) -> Result<Vec<RecordRow>> {
        let sql = self.world().sql().clone();
        self.read("open_records", async move { sql.open_records(before, limit).await }).await
    }
    /// There are never any records, so this writes nothing.
    async fn end_records(&self, owner: Incarnation, ended: &Ended, now_ms: i64) -> Answer<RecordsEnd> {
        let sql = self.world().sql().clone();
        let named = Ended { attempt: self.world().renamed(ended.attempt), ..ended.clone() };
        self.read("end_records", async move { sql.end_records(owner, &named, now_ms).await }).await
    }
    async fn record_report(&self, execution: ExecutionId, limit: usize) -> Result<Vec<RecordRow>> {
        let sql = self.world().sql().clone();
        self.read("record_report", async move { sql.record_report(execution, limit).await }).await
    }
}
