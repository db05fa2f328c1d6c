//! Transactions of handlers, the real ones: opened and committed at the database while virtual time stands still, so that the lock
//! on the shard's row, which nobody else could pass anyway, is never held over a step of another process. A commit may be lost on its
//! way there, and its answer on its way back.

use super::World;
use super::ledger::{SimLedger, away};
use super::life::{Life, Port};
use crate::guard::Mutation;
use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::once::{Known, RecordRow, RecordState, RecordWrite};
use shardcron_domain::shard::Rejection;
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::*;
use std::sync::Arc;

type Answer<T> = Result<std::result::Result<T, Rejection>>;

/// The fence as the ledger is told of it.
fn fence(world: &World, owner: Incarnation, at: AttemptRef) -> (Incarnation, AttemptRef) {
    match world.options.mutation {
        Some(Mutation::CheckpointWithoutFence) => world.oracle(|o| o.holder(at)).unwrap_or((owner, at)),
        _ => (owner, world.renamed(at)),
    }
}

#[async_trait]
impl EffectsLedger for SimLedger {
    async fn begin_step(&self, owner: Incarnation, attempt: AttemptRef) -> Answer<Box<dyn StepTx>> {
        self.0.request(Port::Ledger, false).await.map_err(|(why, _)| away(why))?;
        self.0.answer(Port::Ledger).await.map_err(away)?;
        let world = self.world();
        let (who, named) = fence(world, owner, attempt);
        let answer = world.real(world.sql().begin_step(who, named));
        self.0.note("begin_step", &answer.as_ref().map(|a| a.as_ref().map(|_| ())));
        Ok(answer?.map(|inner| -> Box<dyn StepTx> {
            Box::new(SimStep { inner, life: self.0.clone(), owner, at: attempt, noted: Vec::new() })
        }))
    }
    async fn step_stands(&self, owner: Incarnation, attempt: AttemptRef, end: &StepEnd) -> Answer<bool> {
        let sql = self.world().sql().clone();
        self.read("step_stands", async move { sql.step_stands(owner, attempt, end).await }).await
    }
    async fn open_records(&self, before: AttemptRef, limit: usize) -> Result<Vec<RecordRow>> {
        let sql = self.world().sql().clone();
        self.read("open_records", async move { sql.open_records(before, limit).await }).await
    }
    async fn end_records(&self, owner: Incarnation, ended: &Ended, now_ms: i64) -> Answer<RecordsEnd> {
        let ended = ended.clone();
        let effect = move |world: &World| {
            let named = Ended { attempt: world.renamed(ended.attempt), ..ended.clone() };
            let answer = world.real(world.sql().end_records(owner, &named, now_ms));
            let verdict = match &answer {
                Ok(Ok(RecordsEnd::Recorded(recorded))) => Some(Ok(*recorded)),
                Ok(Err(refusal)) => Some(Err(*refusal)),
                _ => None,
            };
            if let Some(verdict) = verdict {
                world.check(world.oracle(|o| o.recorded(owner, &[ended], &[verdict], now_ms)));
            }
            answer
        };
        self.write("end_records", effect).await
    }
    async fn record_report(&self, execution: ExecutionId, limit: usize) -> Result<Vec<RecordRow>> {
        let sql = self.world().sql().clone();
        self.read("record_report", async move { sql.record_report(execution, limit).await }).await
    }
}

/// An open transaction. Nothing in it waits, but for the answer behind its commit.
struct SimStep {
    inner: Box<dyn StepTx>,
    life: Life,
    owner: Incarnation,
    at: AttemptRef,
    noted: Vec<Vec<u8>>,
}

impl SimStep {
    fn world(&self) -> Arc<World> {
        self.life.world.clone()
    }
}

#[async_trait]
impl StepTx for SimStep {
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64> {
        self.world().real(self.inner.execute(sql, args))
    }
    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        self.world().real(self.inner.query(sql, args))
    }
    async fn mark(&mut self) -> Result<()> {
        self.world().real(self.inner.mark())
    }
    async fn undo(&mut self) -> Result<()> {
        self.world().real(self.inner.undo())
    }
    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>> {
        let answer = self.world().real(self.inner.known(keys, note))?;
        if note {
            let new = keys.iter().zip(&answer).filter(|(_, known)| known.is_none());
            self.noted = new.map(|(key, _)| key.clone()).collect();
        }
        Ok(answer)
    }
    async fn skipped(&mut self) -> Result<u32> {
        self.world().real(self.inner.skipped())
    }
    async fn commit(self: Box<Self>, end: &StepEnd) -> Answer<()> {
        let world = self.world();
        let SimStep { inner, life, owner, at, noted } = *self;
        let mut end = end.clone();
        if world.options.mutation == Some(Mutation::DoneBeforeItsTransaction) {
            let done = |key| RecordWrite { key, state: RecordState::Done, tries: 0, message: None };
            end.writes.extend(noted.into_iter().map(done));
        }
        if let Some((why, after_ms)) = life.lost_at_once(Port::Ledger) {
            drop(inner);
            super::life::sleep_ms(after_ms).await;
            return Err(away(why));
        }
        if world.options.mutation == Some(Mutation::CheckpointWithoutFence)
            && let Some((from, _)) = &mut end.advance
        {
            *from = world.oracle(|o| o.checkpoint(at));
        }
        let answer = world.real(inner.commit(&end));
        if let Ok(verdict) = &answer {
            world.check(world.oracle(|o| o.stepped(owner, at, &end, verdict.as_ref().copied())));
        }
        life.note("commit", &(at, &answer));
        life.answer(Port::Ledger).await.map_err(away)?;
        answer
    }
}
