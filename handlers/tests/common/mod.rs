//! A ledger of one shard in memory, under the real transition function, that fails where the test says.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod fired;
pub mod server;

use shardcron_domain::invariants;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::{self, Checkpoint, Effect, Event, ReclaimReason, Rejection, Shard};
use shardcron_domain::{ExecutionId, Incarnation};
use shardcron_handlers::ShardLedger;
use shardcron_sdk::async_trait;
use shardcron_store::*;
use std::collections::VecDeque;
use std::sync::Mutex;

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
        invariants::check_event(&self.shard, event, &next).unwrap();
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

pub type Answer = Result<std::result::Result<SqlDone, Rejection>>;

/// A real ledger behind a line that loses answers.
pub struct Lossy {
    pub ledger: shardcron_store::sql::SqlLedger,
    pub faults: Mutex<VecDeque<Fault>>,
}

#[async_trait]
impl ShardLedger for Lossy {
    async fn run_sql(&self, owner: Incarnation, step: &SqlStep, now_ms: i64) -> Answer {
        let fault = self.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
        if fault == Fault::Away {
            return Err(away());
        }
        let answer = self.ledger.run_sql(owner, step, now_ms).await;
        if fault == Fault::AnswerLost { Err(away()) } else { answer }
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.ledger.shards(id, from, limit).await
    }
}

#[async_trait]
impl ShardLedger for OneShard {
    async fn run_sql(&self, owner: Incarnation, step: &SqlStep, _now_ms: i64) -> Answer {
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

    async fn shards(&self, _id: ExecutionId, from: u32, _limit: usize) -> Result<Vec<ShardRow>> {
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
