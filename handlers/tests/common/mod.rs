//! A ledger of one shard in memory, under the real transition function, that fails where the test says.

#![allow(dead_code, reason = "each test file uses its own part")]

use shardcron_domain::invariants::{self, Tally};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{self, Checkpoint, Effect, Event, ReclaimReason, Rejection, Shard};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, JobSpec, execution};
use shardcron_sdk::async_trait;
use shardcron_store::ledger::{PollCursor, Verdicts};
use shardcron_store::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// What happens to a call of `run_sql`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It is committed, but its answer is lost.
    AnswerLost,
    /// It never gets there.
    Away,
    /// It is rolled back.
    Deadlock,
    /// The statement is wrong.
    Refused,
    /// The supervisor takes the shard away first.
    TakenAway,
    /// The execution is cancelled first.
    Cancelled,
    /// The leader takes the shard away and another worker finishes it first.
    FinishedElsewhere,
    /// It never answers.
    Hangs,
}

pub struct OneShard {
    pub inner: Mutex<Inner>,
}

pub struct Inner {
    pub shard: Shard,
    /// Faults of the next calls of `run_sql`; then none.
    pub faults: VecDeque<Fault>,
    /// Faults of the next calls of `shards`: away or not.
    pub reads_away: usize,
    /// Ranges that the statements were run for, by attempt, as committed.
    pub effects: Vec<(u32, i64, i64)>,
    /// Statements as they came, committed or not.
    pub seen: Vec<SqlStep>,
    pub calls: usize,
}

impl OneShard {
    pub fn running(attempt: u32, owner: Incarnation, checkpoint: Option<Checkpoint>) -> Self {
        let shard = Shard { phase: shard::Phase::Running, attempt, owner: Some(owner), checkpoint, ..Shard::new() };
        let inner = Inner { shard, faults: VecDeque::new(), reads_away: 0, effects: vec![], seen: vec![], calls: 0 };
        OneShard { inner: Mutex::new(inner) }
    }

    pub fn with_faults(self, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.inner.lock().unwrap().faults = faults.into_iter().collect();
        self
    }
}

impl Inner {
    fn apply(&mut self, event: &Event) -> std::result::Result<Option<Effect>, Rejection> {
        let (next, effect) = shard::apply(&self.shard, event, &RetryPolicy::default(), 1)?;
        invariants::check_shard_step(&self.shard, &next).unwrap();
        self.shard = next;
        Ok(effect)
    }

    fn step(&mut self, owner: Incarnation, step: &SqlStep) -> std::result::Result<SqlDone, Rejection> {
        let before = self.shard.clone();
        let attempt = step.attempt.attempt;
        if let Some((from, to)) = &step.advance {
            self.apply(&Event::Advance { attempt, owner, from: from.clone(), to: to.clone() })?;
        }
        let mut recorded = None;
        if step.finish.is_some() {
            match self.apply(&Event::Succeed { attempt, owner }) {
                Ok(_) => {
                    recorded =
                        Some(Recorded { phase: self.shard.phase, redispatch_at_ms: None, execution_ended: None });
                }
                Err(rejection) => {
                    self.shard = before;
                    return Err(rejection);
                }
            }
        }
        let mut rows = 0;
        for statement in &step.statements {
            if let [SqlArg::Int(from), SqlArg::Int(to)] = statement.args[..] {
                self.effects.push((attempt, from, to));
                rows += to.abs_diff(from) + 1;
            }
        }
        Ok(SqlDone { rows, recorded })
    }

    fn take_away(&mut self) {
        if let (shard::Phase::Running, Some(owner)) = (self.shard.phase, self.shard.owner) {
            let attempt = self.shard.attempt;
            let _ = self.apply(&Event::Reclaim { attempt, owner, reason: ReclaimReason::WorkerLost });
        }
    }

    fn finish_elsewhere(&mut self) {
        self.take_away();
        let (attempt, owner) = (self.shard.attempt, Incarnation(uuid::Uuid::from_u128(77)));
        let _ = self.apply(&Event::Claim { attempt, owner });
        let _ = self.apply(&Event::Succeed { attempt, owner });
    }
}

pub fn away() -> StoreError {
    StoreError::Unavailable { store: "ledger", detail: "cut off by the test".into() }
}

fn not_here<T>() -> shardcron_store::Result<T> {
    Err(StoreError::Invalid("this ledger has one shard only".into()))
}

/// The two calls that the sql handler makes.
#[async_trait]
pub trait Port: Send + Sync + 'static {
    async fn step(&self, owner: Incarnation, step: &SqlStep, now_ms: i64) -> Answer;
    async fn look(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>>;
}

pub type Answer = Result<std::result::Result<SqlDone, Rejection>>;

/// A real ledger behind a line that loses answers.
pub struct Lossy {
    pub ledger: shardcron_store::sql::SqlLedger,
    pub faults: Mutex<VecDeque<Fault>>,
}

#[async_trait]
impl Port for Lossy {
    async fn step(&self, owner: Incarnation, step: &SqlStep, now_ms: i64) -> Answer {
        let fault = self.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
        if fault == Fault::Away {
            return Err(away());
        }
        let answer = self.ledger.run_sql(owner, step, now_ms).await;
        if fault == Fault::AnswerLost { Err(away()) } else { answer }
    }

    async fn look(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.ledger.shards(id, from, limit).await
    }
}

#[async_trait]
impl Port for OneShard {
    async fn step(&self, owner: Incarnation, step: &SqlStep, _now_ms: i64) -> Answer {
        let fault = {
            let mut inner = self.inner.lock().unwrap();
            inner.seen.push(step.clone());
            inner.calls += 1;
            inner.faults.pop_front().unwrap_or(Fault::None)
        };
        if fault == Fault::Hangs {
            std::future::pending::<()>().await;
        }
        let mut inner = self.inner.lock().unwrap();
        match fault {
            Fault::Away => return Err(away()),
            Fault::Deadlock => return Err(StoreError::Statement { detail: "deadlock found".into(), transient: true }),
            Fault::Refused => {
                return Err(StoreError::Statement { detail: "no such table: x".into(), transient: false });
            }
            Fault::TakenAway => inner.take_away(),
            Fault::FinishedElsewhere => inner.finish_elsewhere(),
            Fault::Cancelled => {
                let _ = inner.apply(&Event::Cancel);
            }
            Fault::None | Fault::AnswerLost | Fault::Hangs => {}
        }
        let answer = inner.step(owner, step);
        if fault == Fault::AnswerLost { Err(away()) } else { Ok(answer) }
    }

    async fn look(&self, _id: ExecutionId, from: u32, _limit: usize) -> Result<Vec<ShardRow>> {
        let mut inner = self.inner.lock().unwrap();
        if inner.reads_away > 0 {
            inner.reads_away -= 1;
            return Err(away());
        }
        let shard = &inner.shard;
        Ok(vec![ShardRow {
            index: from,
            phase: shard.phase,
            attempt: shard.attempt,
            failures: shard.failures,
            owner: shard.owner,
            checkpoint: shard.checkpoint.clone(),
            rows_done: 0,
        }])
    }
}

/// A ledger that does nothing else.
pub struct Narrow<P: Port>(pub Arc<P>);

#[async_trait]
impl<P: Port> FiringLedger for Narrow<P> {
    async fn touch_epoch(&self, _: Epoch, _: i64) -> Result<()> {
        not_here()
    }
    async fn epochs(&self, _: Option<Epoch>, _: usize) -> Result<Vec<EpochRow>> {
        not_here()
    }
    async fn versions(&self, _: JobId, _: usize) -> Result<Vec<JobVersion>> {
        not_here()
    }
    async fn latest_decision(&self, _: JobId) -> Result<Option<DecisionRow>> {
        not_here()
    }
    async fn set_scope_paused(&self, _: &str, _: Option<&str>, _: &str, _: i64) -> Result<bool> {
        not_here()
    }
    async fn pauses(&self) -> Result<Vec<PauseRow>> {
        not_here()
    }
    async fn waiting_heads(&self, _: i64, _: usize) -> Result<Vec<WaitingRow>> {
        not_here()
    }
    async fn waiting_count(&self, _: JobId) -> Result<u32> {
        not_here()
    }
    async fn begin_backfill(&self, _: Epoch, _: &NewBackfill, _: i64) -> Result<bool> {
        not_here()
    }
    async fn backfill(&self, _: JobId, _: &str) -> Result<Option<BackfillRow>> {
        not_here()
    }
    async fn ran(&self, _: JobId, _: &[String]) -> Result<Vec<String>> {
        not_here()
    }
    async fn watches(&self, _: usize) -> Result<Vec<WatchRow>> {
        not_here()
    }
    async fn drop_watches(&self, _: Epoch, _: &[i64]) -> Result<()> {
        not_here()
    }
    async fn result_summary(&self, _: ExecutionId, _: usize) -> Result<Option<ResultSummary>> {
        not_here()
    }
    async fn cancelled(&self, _: &[ExecutionId]) -> Result<Vec<ExecutionId>> {
        not_here()
    }
    async fn cancellation(&self, _: ExecutionId) -> Result<Option<CancellationRow>> {
        not_here()
    }
}

#[async_trait]
impl<P: Port> Ledger for Narrow<P> {
    async fn run_sql(&self, owner: Incarnation, step: &SqlStep, now_ms: i64) -> Answer {
        self.0.step(owner, step, now_ms).await
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.0.look(id, from, limit).await
    }

    async fn migrate(&self) -> Result<()> {
        not_here()
    }
    async fn server_version(&self) -> Result<String> {
        not_here()
    }
    async fn check_server(&self) -> Result<Vec<String>> {
        not_here()
    }
    async fn server_now_ms(&self) -> Result<i64> {
        not_here()
    }
    async fn begin_epoch(&self, _: &str, _: i64) -> Result<Epoch> {
        not_here()
    }
    async fn leadership(&self) -> Result<Leadership> {
        not_here()
    }
    async fn apply_jobs(&self, _: &[(JobSpec, Option<i64>)], _: &str, _: i64) -> Result<Vec<Applied>> {
        not_here()
    }
    async fn jobs(&self) -> Result<Vec<JobRecord>> {
        not_here()
    }
    async fn job(&self, _: &str) -> Result<Option<JobRecord>> {
        not_here()
    }
    async fn set_paused(&self, _: &str, _: Option<&str>, _: &str, _: i64) -> Result<bool> {
        not_here()
    }
    async fn jobs_revision(&self) -> Result<i64> {
        not_here()
    }
    async fn fire(&self, _: Epoch, _: &[FireIntent], _: i64) -> Result<Vec<FireOutcome>> {
        not_here()
    }
    async fn idle_since(&self, _: &[JobId]) -> Result<Vec<(JobId, Option<i64>)>> {
        not_here()
    }
    async fn arm(&self, _: Epoch, _: &[Arming]) -> Result<Vec<Arming>> {
        not_here()
    }
    async fn decision(&self, _: JobId, _: &str) -> Result<Option<DecisionRow>> {
        not_here()
    }
    async fn decisions(&self, _: JobId, _: i64, _: i64, _: usize) -> Result<Vec<DecisionRow>> {
        not_here()
    }
    async fn active_executions(&self) -> Result<Vec<ActiveExecution>> {
        not_here()
    }
    async fn materialize(&self, _: Epoch, _: ExecutionId, _: u32) -> Result<u32> {
        not_here()
    }
    async fn mark_dispatched(&self, _: Epoch, _: &[(ExecutionId, u32)], _: &[AttemptRef]) -> Result<()> {
        not_here()
    }
    async fn redispatch_due(&self, _: i64, _: usize) -> Result<Vec<Redispatch>> {
        not_here()
    }
    async fn stranded(&self, _: ExecutionId, _: u32, _: i64, _: usize) -> Result<Vec<AttemptRef>> {
        not_here()
    }
    async fn execution_head(&self, _: ExecutionId) -> Result<Option<ExecutionHead>> {
        not_here()
    }
    async fn execution_heads(&self, _: &[ExecutionId]) -> Result<Vec<ExecutionHead>> {
        not_here()
    }
    async fn claim(&self, _: Incarnation, _: &[AttemptRef], _: i64) -> Result<Verdicts<Claimed>> {
        not_here()
    }
    async fn record(&self, _: Incarnation, _: &[Ended], _: i64) -> Result<Verdicts<Recorded>> {
        not_here()
    }
    async fn advance(
        &self,
        _: Incarnation,
        _: AttemptRef,
        _: Option<Checkpoint>,
        _: Checkpoint,
        _: u64,
    ) -> Result<std::result::Result<(), Rejection>> {
        not_here()
    }
    async fn claimable(&self, _: &str, _: &mut PollCursor, _: i64, _: usize) -> Result<Vec<AttemptRef>> {
        not_here()
    }
    async fn running(&self, _: usize) -> Result<Vec<RunningRow>> {
        not_here()
    }
    async fn reclaim(&self, _: Epoch, _: &[(Reclaim, RetryPolicy)], _: i64) -> Result<Verdicts<Recorded>> {
        not_here()
    }
    async fn cancel(&self, _: ExecutionId, _: &str, _: i64) -> Result<Option<execution::Phase>> {
        not_here()
    }
    async fn put_trigger(&self, _: &[u8], _: i64) -> Result<()> {
        not_here()
    }
    async fn triggers(&self, _: usize) -> Result<Vec<StoredTrigger>> {
        not_here()
    }
    async fn settle_triggers(&self, _: &[i64]) -> Result<()> {
        not_here()
    }
    async fn put_dead_message(&self, _: &str, _: &[u8], _: i64) -> Result<()> {
        not_here()
    }
    async fn dead(&self, _: usize) -> Result<Vec<DeadRow>> {
        not_here()
    }
    async fn overview(&self) -> Result<Overview> {
        not_here()
    }
    async fn executions(&self, _: Option<&str>, _: Option<ExecutionId>, _: usize) -> Result<Vec<ExecutionRow>> {
        not_here()
    }
    async fn execution(&self, _: ExecutionId) -> Result<Option<ExecutionRow>> {
        not_here()
    }
    async fn attempts(&self, _: ExecutionId, _: usize) -> Result<Vec<AttemptRow>> {
        not_here()
    }
    async fn tally(&self, _: ExecutionId) -> Result<(Tally, u64)> {
        not_here()
    }
    async fn rows_done(&self, _: ExecutionId) -> Result<u64> {
        not_here()
    }
}
