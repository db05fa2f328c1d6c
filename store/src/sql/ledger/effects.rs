//! A handler's transactions: its own statements with the checkpoint, under the attempt's fence.

use super::once;
use super::rows::{Held, checkpoint_text, read_shards_of, signed};
use super::step::{check_statement, read_users, run_users};
use crate::effects_port::{EffectsLedger, RecordsEnd, StepTx};
use crate::error::{Result, StoreError};
use crate::rows::Ended;
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Outcome, with_retries};
use crate::sql::pool::Tx;
use crate::sql::value::{Value, hex};
use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::limits::TRANSACTION_IDLE_MS;
use shardcron_domain::once::{Known, RecordRow, check_keys};
use shardcron_domain::shard::{Event, Rejection, Shard, apply};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use std::time::{Duration, Instant};

type Answer<T> = std::result::Result<T, Rejection>;

/// Whether an attempt runs at an owner: a hand-back passes exactly there.
pub(super) fn check_running(shard: &Shard, owner: Incarnation, attempt: AttemptRef) -> Answer<()> {
    let probe = Event::HandBack { attempt: attempt.attempt, owner };
    apply(shard, &probe, &RetryPolicy::default(), 0).map(drop)
}

#[async_trait]
impl EffectsLedger for SqlLedger {
    async fn begin_step(&self, owner: Incarnation, attempt: AttemptRef) -> Result<Answer<Box<dyn StepTx>>> {
        with_retries!(self.open_step(owner, attempt))
    }

    async fn step_stands(&self, owner: Incarnation, attempt: AttemptRef, end: &StepEnd) -> Result<Answer<bool>> {
        with_retries!(self.read_step(owner, attempt, end))
    }

    async fn open_records(&self, before: AttemptRef, limit: usize) -> Result<Vec<RecordRow>> {
        with_retries!(self.read_open_records(before, limit))
    }

    async fn end_records(&self, owner: Incarnation, ended: &Ended, now_ms: i64) -> Result<Answer<RecordsEnd>> {
        with_retries!(self.write_records_end(owner, ended, now_ms))
    }

    async fn record_report(&self, execution: ExecutionId, limit: usize) -> Result<Vec<RecordRow>> {
        with_retries!(self.read_record_report(execution, limit))
    }
}

impl SqlLedger {
    async fn open_step(&self, owner: Incarnation, attempt: AttemptRef) -> Outcome<Answer<Box<dyn StepTx>>> {
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let mut held = read_shards_of(&mut tx, [attempt.shard()], lock).await?;
        let Some(Held { shard, .. }) = held.remove(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        if let Err(rejection) = check_running(&shard, owner, attempt) {
            return Ok(Err(rejection));
        }
        let step = Step { tx, owner, attempt, shard, marked: false, broken: None, asked: Instant::now() };
        Ok(Ok(Box::new(step)))
    }

    async fn read_step(&self, owner: Incarnation, attempt: AttemptRef, end: &StepEnd) -> Outcome<Answer<bool>> {
        let mut tx = self.db.begin().await?;
        // Locked: whoever still holds the row is that step, and is waited for.
        let lock = tx.dialect().for_update();
        let held = read_shards_of(&mut tx, [attempt.shard()], lock).await?;
        let Some(Held { shard, .. }) = held.get(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        if let Err(rejection) = check_running(shard, owner, attempt) {
            return Ok(Err(rejection));
        }
        if let Some((_, to)) = &end.advance {
            return Ok(Ok(shard.checkpoint.as_ref() == Some(to)));
        }
        match end.writes.first() {
            Some(write) => once::stands(&mut tx, attempt, write).await.map(Ok),
            None => Ok(Ok(false)),
        }
    }
}

/// An open transaction.
struct Step {
    tx: Tx,
    owner: Incarnation,
    attempt: AttemptRef,
    /// As it stands, and stays: its row is locked.
    shard: Shard,
    marked: bool,
    /// What ended it: nothing of it may be committed any more.
    broken: Option<StoreError>,
    asked: Instant,
}

impl Step {
    /// Whether it may be asked for something now.
    fn check(&mut self) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let idle = self.asked.elapsed();
        if idle > Duration::from_millis(TRANSACTION_IDLE_MS) {
            let error = StoreError::Statement {
                detail: format!(
                    "the transaction stood still for {} ms, at most {TRANSACTION_IDLE_MS} are possible: its locks keep others waiting. \
                     Compute first, then begin it",
                    idle.as_millis()
                ),
                transient: true,
            };
            self.broken = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }

    /// Keeps in mind what can't be gone on from.
    fn heard<T>(&mut self, answer: Outcome<T>) -> Result<T> {
        self.asked = Instant::now();
        answer.map_err(|fault| {
            let error = match fault {
                fault @ Fault::Server { kind: crate::sql::fault::Kind::Contention, .. } => {
                    crate::sql::statement_error(fault)
                }
                other => other.into_store_error(),
            };
            // A deadlock has rolled everything back; what was said since would be committed alone.
            if error.is_transient() {
                self.broken = Some(error.clone());
            }
            error
        })
    }

    async fn write_end(&mut self, end: &StepEnd) -> Outcome<()> {
        if end.advance.is_some() || end.rows > 0 {
            let mut args = vec![Value::Int(signed(end.rows))];
            let mut set = String::from("rows_done = rows_done + ?");
            if let Some((_, to)) = &end.advance {
                set.push_str(", progress = ?");
                args.push(checkpoint_text(to)?.into());
            }
            let sql = format!(
                "UPDATE shards SET {set} WHERE execution_id = {} AND shard_index = {}",
                hex(self.attempt.execution.as_bytes()),
                self.attempt.index
            );
            self.tx.run(&sql, &args).await?;
        }
        once::write(&mut self.tx, self.attempt, end).await
    }
}

fn values(args: &[SqlValue]) -> Vec<Value> {
    args.iter().cloned().map(Value::from).collect()
}

#[async_trait]
impl StepTx for Step {
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64> {
        self.check()?;
        check_statement(self.tx.dialect(), sql)?;
        // The user's statements have the attempt's limit.
        let limit = self.tx.limit(None);
        let answer = run_users(&mut self.tx, sql, &values(args)).await;
        self.tx.limit(limit);
        self.heard(answer)
    }

    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        self.check()?;
        check_statement(self.tx.dialect(), sql)?;
        let limit = self.tx.limit(None);
        let answer = read_users(&mut self.tx, sql, &values(args)).await;
        self.tx.limit(limit);
        let rows = self.heard(answer)?;
        Ok(rows.into_iter().map(|row| row.0.into_iter().map(SqlValue::from).collect()).collect())
    }

    async fn mark(&mut self) -> Result<()> {
        self.check()?;
        let answer = self.tx.raw("SAVEPOINT shardcron_mark").await;
        self.heard(answer)?;
        self.marked = true;
        Ok(())
    }

    async fn undo(&mut self) -> Result<()> {
        self.check()?;
        if !self.marked {
            return Err(StoreError::Invalid("there is no mark to go back to in this transaction".into()));
        }
        let answer = self.tx.raw("ROLLBACK TO SAVEPOINT shardcron_mark").await;
        self.heard(answer).map(drop)
    }

    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>> {
        self.check()?;
        check_keys(keys).map_err(StoreError::Invalid)?;
        let answer = once::known(&mut self.tx, self.attempt, keys, note).await;
        self.heard(answer)
    }

    async fn skipped(&mut self) -> Result<u32> {
        self.check()?;
        let answer = once::skipped(&mut self.tx, self.attempt.shard()).await;
        self.heard(answer)
    }

    async fn commit(mut self: Box<Self>, end: &StepEnd) -> Result<Answer<()>> {
        self.check()?;
        if let Some((from, to)) = &end.advance {
            super::rows::check_checkpoint(to)?;
            let event =
                Event::Advance { attempt: self.attempt.attempt, owner: self.owner, from: from.clone(), to: to.clone() };
            if let Err(rejection) = apply(&self.shard, &event, &RetryPolicy::default(), 0) {
                return Ok(Err(rejection));
            }
        }
        let written = self.write_end(end).await;
        self.heard(written)?;
        match self.tx.commit().await {
            Ok(()) => Ok(Ok(())),
            Err(fault @ Fault::Server { kind: crate::sql::fault::Kind::Contention, .. }) => {
                Err(crate::sql::statement_error(fault))
            }
            Err(fault) => Err(fault.into_store_error()),
        }
    }
}
