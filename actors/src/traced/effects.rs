//! A handler's transactions: their checkpoints, and the ends of shards with records of their own.

use super::ledger::{Traced, recorded, recording};
use crate::trace::Trace;
use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::once::{Known, RecordRow};
use shardcron_domain::shard::{Phase, Rejection};
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::*;

type Answer<T> = Result<std::result::Result<T, Rejection>>;

#[async_trait]
impl EffectsLedger for Traced {
    async fn begin_step(&self, owner: Incarnation, attempt: AttemptRef) -> Answer<Box<dyn StepTx>> {
        let answer = self.inner.begin_step(owner, attempt).await?;
        Ok(answer.map(|inner| -> Box<dyn StepTx> {
            Box::new(TracedStep { inner, trace: self.trace.clone(), owner, at: attempt })
        }))
    }
    async fn step_stands(&self, owner: Incarnation, attempt: AttemptRef, end: &StepEnd) -> Answer<bool> {
        let stands = self.inner.step_stands(owner, attempt, end).await?;
        if let (Ok(true), Some((_, to))) = (&stands, &end.advance) {
            self.trace.say(|| TraceEvent::Advanced { owner, at: attempt, to: to.clone() });
        }
        Ok(stands)
    }
    async fn open_records(&self, before: AttemptRef, limit: usize) -> Result<Vec<RecordRow>> {
        self.inner.open_records(before, limit).await
    }
    async fn end_records(&self, owner: Incarnation, ended: &Ended, now_ms: i64) -> Answer<RecordsEnd> {
        self.trace.say(|| recording(owner, ended));
        let answer = self.inner.end_records(owner, ended, now_ms).await?;
        match &answer {
            Ok(RecordsEnd::Recorded(done)) => self.trace.say(|| recorded(owner, ended, Ok(done))),
            Err(refusal) => self.trace.say(|| recorded(owner, ended, Err(refusal))),
            // By an earlier call of this attempt, whose answer was lost: it is answered now.
            Ok(RecordsEnd::Before) => {
                let done = Recorded { phase: Phase::Success, redispatch_at_ms: None, execution_ended: None };
                self.trace.say(|| recorded(owner, ended, Ok(&done)));
            }
            Ok(RecordsEnd::NoRecords | RecordsEnd::Open(..)) => {}
        }
        Ok(answer)
    }
    async fn record_report(&self, execution: ExecutionId, limit: usize) -> Result<Vec<RecordRow>> {
        self.inner.record_report(execution, limit).await
    }
}

struct TracedStep {
    inner: Box<dyn StepTx>,
    trace: Trace,
    owner: Incarnation,
    at: AttemptRef,
}

#[async_trait]
impl StepTx for TracedStep {
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64> {
        self.inner.execute(sql, args).await
    }
    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        self.inner.query(sql, args).await
    }
    async fn mark(&mut self) -> Result<()> {
        self.inner.mark().await
    }
    async fn undo(&mut self) -> Result<()> {
        self.inner.undo().await
    }
    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>> {
        self.inner.known(keys, note).await
    }
    async fn skipped(&mut self) -> Result<u32> {
        self.inner.skipped().await
    }
    async fn commit(self: Box<Self>, end: &StepEnd) -> Answer<()> {
        let TracedStep { inner, trace, owner, at } = *self;
        if let Some((from, to)) = &end.advance {
            trace.say(|| TraceEvent::Advancing { owner, at, from: from.clone(), to: to.clone() });
        }
        let verdict = inner.commit(end).await?;
        if let (Ok(()), Some((_, to))) = (&verdict, &end.advance) {
            trace.say(|| TraceEvent::Advanced { owner, at, to: to.clone() });
        }
        Ok(verdict)
    }
}
