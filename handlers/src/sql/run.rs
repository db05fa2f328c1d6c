//! Running a template: one step for a shard, or one for each chunk of its range.
//!
//! # When an answer is lost
//!
//! A step is one transaction: fence, statements, checkpoint, in the last step the result. If the ledger does not answer, the
//! step was committed or it was not, and this worker can't know. It asks again with the very same step, and the ledger can say
//! three things:
//!
//! | the ledger says | what happened | what follows |
//! | --- | --- | --- |
//! | done | the first one had been rolled back; this one counts | go on |
//! | the checkpoint does not follow | if the shard is ours and stands at this step's end: the first one was committed | go on |
//! | the shard has ended well | if under our attempt: the first one was committed | done |
//!
//! Anything else means that somebody else has the shard: stop, write nothing. The re-reading is sound because nobody but this
//! task writes under this attempt's number: a checkpoint at the step's end, or a success, under our number is our own. It can't
//! come too early either: the repeated step waits for the row lock that a still open first transaction holds. The rows of a
//! step whose answer was lost are not known here; the ledger has their sum.
//!
//! A deadlock or a lock wait rolls the whole step back, so it is repeated here, up to 20 times, before it costs the shard a try. Any
//! other refusal of a statement (a syntax error, a missing table, a broken constraint) would come again the same way: permanent.

use super::params::Values;
use super::port::ShardLedger;
use super::tokens::SqlTemplate;
use crate::now_ms;
use metrics::counter;
use shardcron_domain::metric_names::SQL_ANSWERS_LOST;
use shardcron_domain::retry::apart;
use shardcron_domain::shard::{Checkpoint, Phase, Rejection};
use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use shardcron_store::{AttemptOutcome, Ended, ShardRow, SqlDone, SqlStep, StoreError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See [`apart`]: a step of a job may hold its locks for longer than one of the ledger's own.
const APART: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(1_280));

/// Waits around the ledger.
#[derive(Clone, Copy, Debug)]
pub struct SqlLimits {
    /// The first wait for a ledger that is away; it doubles with each further one.
    pub first_wait: Duration,
    /// The longest wait.
    pub max_wait: Duration,
    /// How long a ledger that is away is waited for in all, where the attempt has no earlier limit.
    pub patience: Duration,
    /// How often a step is repeated after deadlocks and lock waits before the attempt fails.
    pub deadlocks: u32,
    /// No further repetition after this long: a lock that somebody holds for minutes is a fault that people must see.
    pub contended: Duration,
    /// How long a running step may go on after it was told to stop.
    pub stop_grace: Duration,
}

impl Default for SqlLimits {
    fn default() -> Self {
        SqlLimits {
            first_wait: Duration::from_millis(100),
            max_wait: Duration::from_secs(5),
            patience: Duration::from_secs(600),
            deadlocks: 20,
            contended: Duration::from_secs(60),
            stop_grace: Duration::from_secs(5),
        }
    }
}

/// Runs a job's statements at the ledger.
pub struct SqlHandler {
    ledger: Arc<dyn ShardLedger>,
    template: SqlTemplate,
    chunk: Option<u32>,
    limits: SqlLimits,
}

impl SqlHandler {
    /// A handler of statements; of a range, `chunk` keys go into each transaction.
    #[must_use]
    pub fn new(ledger: Arc<dyn ShardLedger>, template: SqlTemplate, chunk: Option<u32>, limits: SqlLimits) -> Self {
        SqlHandler { ledger, template, chunk, limits }
    }
}

/// What the ledger made of a step.
enum Step {
    Done(SqlDone),
    /// It had been done when its answer was lost.
    DoneBefore,
}

#[async_trait]
impl ShardHandler for SqlHandler {
    /// Effects, checkpoint and result are one transaction that checks the attempt under a row lock.
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let rows = match (self.chunk, &context.slice) {
            (Some(size), &ShardSlice::Range { from, to }) => self.run_chunks(&context, (from, to), size).await?,
            (Some(_), _) => {
                return Err(ShardError::permanent(
                    "chunks are cut from a range, and this shard has none; leave out 'chunk'",
                ));
            }
            (None, _) => {
                let step = self.step(&context, None, None, true)?;
                self.commit(&context, step).await?.rows()
            }
        };
        Ok(ShardOutput { rows, summary: None, committed: true })
    }
}

impl Step {
    fn rows(&self) -> Option<u64> {
        match self {
            Step::Done(done) => Some(done.rows),
            Step::DoneBefore => None,
        }
    }
}

impl SqlHandler {
    /// One transaction for each chunk, from the checkpoint on. `None` if the rows of some step are not known here.
    async fn run_chunks(
        &self,
        context: &ShardContext,
        range: (i64, i64),
        size: u32,
    ) -> Result<Option<u64>, ShardError> {
        let (from, to) = range;
        let mut at = context.checkpoint.clone();
        let mut rows = Some(0u64);
        loop {
            if context.should_stop() || context.is_overdue() {
                return Err(interrupted(context));
            }
            let next = match &at {
                None => Some(from),
                // Before the range only if the plan had changed, which it can't (case C-06).
                Some(Checkpoint::Number(done)) => {
                    done.checked_add(1).map(|next| next.max(from)).filter(|next| *next <= to)
                }
                Some(Checkpoint::Text(text)) => {
                    return Err(ShardError::permanent(format!(
                        "the checkpoint '{}' is not a key of the range; it was not this handler that left it",
                        text.escape_default()
                    )));
                }
            };
            let Some(next) = next else {
                // All keys are done, but the shard has not ended. An older version of the job may have left it so.
                let step = SqlStep { statements: Vec::new(), ..self.step(context, None, None, true)? };
                self.commit(context, step).await?;
                return Ok(rows);
            };
            let end = next.saturating_add(i64::from(size) - 1).min(to);
            let step = self.step(context, Some((next, end)), Some((at, Checkpoint::Number(end))), end == to)?;
            let done = self.commit(context, step).await?;
            rows = rows.zip(done.rows()).map(|(sum, more)| sum.saturating_add(more));
            if end == to {
                return Ok(rows);
            }
            at = Some(Checkpoint::Number(end));
            context.progress();
        }
    }

    fn step(
        &self,
        context: &ShardContext,
        part: Option<(i64, i64)>,
        advance: Option<(Option<Checkpoint>, Checkpoint)>,
        last: bool,
    ) -> Result<SqlStep, ShardError> {
        let statements = Values::new(context, part).bind(&self.template).map_err(ShardError::permanent)?;
        let finish = last.then(|| Ended {
            attempt: context.attempt,
            outcome: AttemptOutcome::Success { rows: None, summary: None },
            started_ms: context.started_ms,
            ended_ms: now_ms(),
            retry: context.retry,
            // For the wait after a failure, and this is none.
            seed: 0,
        });
        Ok(SqlStep { attempt: context.attempt, statements, advance, finish, rows_elsewhere: 0 })
    }

    /// Sees a step through, over lost answers, an absent ledger and deadlocks.
    async fn commit(&self, context: &ShardContext, mut step: SqlStep) -> Result<Step, ShardError> {
        let mut patience = Patience::new(&self.limits);
        let (mut deadlocks, mut contended) = (0, None);
        loop {
            if let Some(finish) = &mut step.finish {
                finish.ended_ms = now_ms();
            }
            let error = match self.within(context, self.ledger.run_sql(context.owner, &step, now_ms())).await? {
                Ok(Ok(done)) => return Ok(Step::Done(done)),
                Ok(Err(rejection)) => match self.read_back(context, &step, rejection).await? {
                    Ok(step) => return Ok(step),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match error {
                StoreError::Unavailable { .. } => patience.wait(context, &error).await?,
                StoreError::Statement { transient: true, .. }
                    if deadlocks < self.limits.deadlocks
                        && contended.get_or_insert_with(Instant::now).elapsed() < self.limits.contended =>
                {
                    deadlocks += 1;
                    pause(context, apart(deadlocks, APART.0, APART.1, rand::random())).await?;
                }
                other if other.is_transient() => return Err(ShardError::transient(other.to_string())),
                other => return Err(ShardError::permanent(format!("{other}. Trying again would end the same way"))),
            }
        }
    }

    /// What a refused step means: it had been done, or the shard is somebody else's.
    async fn read_back(
        &self,
        context: &ShardContext,
        step: &SqlStep,
        rejection: Rejection,
    ) -> Result<Result<Step, StoreError>, ShardError> {
        let may_be_ours = match rejection {
            Rejection::CheckpointGap => step.advance.is_some(),
            Rejection::Terminal(Phase::Success) => step.finish.is_some(),
            _ => false,
        };
        if !may_be_ours {
            return Err(superseded(rejection));
        }
        let attempt = context.attempt;
        let rows = match self.within(context, self.ledger.shards(attempt.execution, attempt.index, 1)).await? {
            Ok(rows) => rows,
            Err(error) => return Ok(Err(error)),
        };
        let done = rows.iter().any(|row| row.index == attempt.index && was_done(context, step, row));
        if !done {
            return Err(superseded(rejection));
        }
        counter!(SQL_ANSWERS_LOST).increment(1);
        tracing::info!(execution_id = %attempt.execution, shard_no = attempt.index, attempt = attempt.attempt,
            "a step had been committed when its answer was lost");
        Ok(Ok(Step::DoneBefore))
    }

    /// Waits for the ledger, but no longer than the attempt may take. A call that is left alone may still be committed: that is
    /// the lost answer again, and whoever records the end of this attempt is refused then.
    async fn within<T>(&self, context: &ShardContext, call: impl Future<Output = T>) -> Result<T, ShardError> {
        let cut_off = async {
            stopped(context).await;
            tokio::time::sleep(self.limits.stop_grace).await;
        };
        tokio::select! {
            biased;
            answer = call => Ok(answer),
            () = cut_off => Err(interrupted(context)),
        }
    }
}

/// Whether the shard, as it stands in the ledger, has this step behind it.
fn was_done(context: &ShardContext, step: &SqlStep, row: &ShardRow) -> bool {
    if row.attempt != context.attempt.attempt {
        return false;
    }
    match (&step.finish, &step.advance) {
        (Some(_), _) => row.phase == Phase::Success,
        (None, Some((_, to))) => {
            row.phase == Phase::Running && row.owner == Some(context.owner) && row.checkpoint.as_ref() == Some(to)
        }
        (None, None) => false,
    }
}

fn superseded(rejection: Rejection) -> ShardError {
    ShardError::stopped(format!("superseded: {rejection}; nothing of this step was written"))
}

fn interrupted(context: &ShardContext) -> ShardError {
    if context.is_overdue() {
        ShardError::timeout(
            "the statements ran into the attempt's limit; what was committed up to the last checkpoint stands",
        )
    } else {
        ShardError::stopped("told to stop; what was committed up to the last checkpoint stands")
    }
}

/// Ends when the attempt should stop, for whichever reason.
async fn stopped(context: &ShardContext) {
    match context.deadline {
        Some(deadline) => tokio::select! {
            () = context.stop.cancelled() => {}
            () = tokio::time::sleep_until(deadline.into()) => {}
        },
        None => context.stop.cancelled().await,
    }
}

async fn pause(context: &ShardContext, length: Duration) -> Result<(), ShardError> {
    tokio::select! {
        () = tokio::time::sleep(length) => Ok(()),
        () = stopped(context) => Err(interrupted(context)),
    }
}

/// The waits for a ledger that is away: growing, and bounded in all.
struct Patience {
    since: Option<Instant>,
    next: Duration,
    max: Duration,
    total: Duration,
}

impl Patience {
    fn new(limits: &SqlLimits) -> Self {
        Patience { since: None, next: limits.first_wait, max: limits.max_wait, total: limits.patience }
    }

    async fn wait(&mut self, context: &ShardContext, error: &StoreError) -> Result<(), ShardError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.total {
            return Err(ShardError::transient(format!("{error}; waited for it for {} s", self.total.as_secs())));
        }
        tracing::debug!(%error, wait_ms = self.next.as_millis(), "the ledger did not answer a step; it is asked again");
        pause(context, self.next).await?;
        self.next = (self.next * 2).min(self.max);
        Ok(())
    }
}
