//! Transactions in the ledger's own database: a handler's statements, the shard's checkpoint and the check that the attempt is
//! still the one, in one commit. What is committed so happens once, whatever dies.
//!
//! ```
//! # use shardcron_sdk::{Checkpoint, EffectError, ShardContext, values};
//! # async fn pay(context: &mut ShardContext, from: i64, to: i64) -> Result<(), EffectError> {
//! let mut tx = context.transaction().await?;
//! let paid = tx.execute("UPDATE accounts SET paid = 1 WHERE id BETWEEN ? AND ?", &values![from, to]).await?;
//! tx.commit(Checkpoint::Number(to), paid).await
//! # }
//! ```

use crate::context::ShardContext;
use crate::handler::ShardError;
use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::once::{Batch, Known, OverLimit};
use shardcron_domain::shard::{Checkpoint, Rejection};

/// Why an effect did not happen. `?` in a handler turns it into the right [`ShardError`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EffectError {
    /// The attempt is no longer this worker's. Stop: everything from here on is done by somebody else.
    #[error("the attempt is not this worker's any more ({0}); nothing of this step was written")]
    Superseded(Rejection),
    /// The ledger is away, or the transaction came to nothing. Nothing of it was written; it may be begun again.
    #[error("nothing of this step was written: {0}")]
    Unavailable(String),
    /// The database refused a statement. If it is `transient`, such as a deadlock, all of the transaction is rolled back and may be
    /// begun again; else only the statement had no effect, and the transaction goes on.
    #[error("the database refused the statement: {detail}")]
    Statement {
        /// The database's words.
        detail: String,
        /// Whether the same may pass later.
        transient: bool,
    },
    /// What was asked for can't be: a key that is too long, a checkpoint that is too long.
    #[error("{0}")]
    Invalid(String),
    /// More records failed for good than may be skipped. What was done of the batch is kept; the checkpoint stays where it was.
    #[error("{0}")]
    SkipLimit(OverLimit),
    /// This context has no database: a test's, or that of an older worker.
    #[error("this context has no ledger to write to; test such a handler with the crate shardcron-testing")]
    NoLedger,
}

impl EffectError {
    /// Whether the same transaction may pass if it is begun again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, EffectError::Unavailable(_) | EffectError::Statement { transient: true, .. })
    }

    /// Whether it is the fault of what the statement was given, as a record that breaks a constraint, and not of the transaction,
    /// which goes on.
    #[must_use]
    pub fn is_of_the_record(&self) -> bool {
        matches!(self, EffectError::Statement { transient: false, .. })
    }
}

impl From<EffectError> for ShardError {
    fn from(error: EffectError) -> Self {
        let message = error.to_string();
        match error {
            EffectError::Superseded(_) => ShardError::stopped(message),
            transient if transient.is_transient() => ShardError::transient(message),
            _ => ShardError::permanent(message),
        }
    }
}

/// An open transaction, as a worker or a test helper gives it.
#[async_trait]
pub trait EffectsTransaction: Send {
    /// Runs a statement; the count of rows that it changed or matched.
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64, EffectError>;
    /// Rows of a statement.
    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>, EffectError>;
    /// Marks this point, and forgets an earlier mark.
    async fn mark(&mut self) -> Result<(), EffectError>;
    /// Undoes everything since the mark.
    async fn undo(&mut self) -> Result<(), EffectError>;
    /// What is known of records; `note`: rows that say `started` for those of which nothing is known.
    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>, EffectError>;
    /// How many records of the shard have been given up.
    async fn skipped(&mut self) -> Result<u32, EffectError>;
    /// Commits; when it returns, it is known whether it was.
    async fn commit(self: Box<Self>, end: StepEnd) -> Result<(), EffectError>;
}

/// A transaction in the ledger's own database, under the attempt's fence.
///
/// The shard's row is locked from the beginning to the end, so nobody takes the shard away in between; a worker that was taken for
/// dead can't even begin. Dropped without a commit, everything is rolled back. Keep it short: it must not wait for more than three
/// seconds between two statements, and in SQLite it keeps all other writers waiting.
#[must_use = "a transaction that is dropped is rolled back"]
pub struct Transaction<'a> {
    context: &'a mut ShardContext,
    inner: Box<dyn EffectsTransaction>,
    batches: Vec<Batch>,
}

impl ShardContext {
    /// Begins a transaction in the ledger's own database.
    ///
    /// # Errors
    /// Superseded, or the ledger is away.
    pub async fn transaction(&mut self) -> Result<Transaction<'_>, EffectError> {
        let inner = self.effects.begin().await?;
        Ok(Transaction { context: self, inner, batches: Vec::new() })
    }
}

impl Transaction<'_> {
    /// The context that it is of.
    #[must_use]
    pub fn context(&self) -> &ShardContext {
        self.context
    }

    /// Runs a statement with `?` for each argument; the count of rows that it changed (in MySQL and MariaDB: matched).
    ///
    /// # Errors
    /// See [`EffectError::Statement`]; DDL and whatever else would end the transaction is refused.
    pub async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64, EffectError> {
        self.inner.execute(sql, args).await
    }

    /// Rows of a statement with `?` for each argument, as it sees them within the transaction.
    ///
    /// # Errors
    /// See [`EffectError::Statement`].
    pub async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>, EffectError> {
        self.inner.query(sql, args).await
    }

    /// Marks this point, so that [`Self::undo`] can come back to it: before each record whose effects are more than one statement.
    ///
    /// # Errors
    /// The ledger is away.
    pub async fn mark(&mut self) -> Result<(), EffectError> {
        self.inner.mark().await
    }

    /// Undoes everything since the last mark.
    ///
    /// # Errors
    /// The ledger is away, or there is no mark.
    pub async fn undo(&mut self) -> Result<(), EffectError> {
        self.inner.undo().await
    }

    /// Looks up which records of a batch are still to be worked on, to be settled by this transaction.
    ///
    /// # Errors
    /// A key is too long, or the ledger is away.
    pub async fn once<K: Into<Vec<u8>>>(&mut self, keys: impl IntoIterator<Item = K>) -> Result<Batch, EffectError> {
        let keys: Vec<Vec<u8>> = keys.into_iter().map(Into::into).collect();
        let known = self.inner.known(&keys, false).await?;
        Batch::new(keys, known).map_err(EffectError::Invalid)
    }

    /// Takes a batch back, with what was said of its records; it is written at the commit.
    pub fn settle(&mut self, batch: Batch) {
        self.batches.push(batch);
    }

    /// Commits everything, and moves the checkpoint: all up to `to` is done, `rows` of it here. Rows of settled records go with it.
    ///
    /// A lost answer is found out about before this returns.
    ///
    /// # Errors
    /// Superseded, or it came to nothing; then nothing of it was written. [`EffectError::SkipLimit`]: it is written, but the
    /// checkpoint was not moved.
    pub async fn commit(self, to: Checkpoint, rows: u64) -> Result<(), EffectError> {
        self.end(Some(to), rows).await
    }

    /// Commits everything and leaves the checkpoint where it is: for records that have no order. Only with a settled batch: nothing
    /// else would keep the next attempt from doing it all again.
    ///
    /// # Errors
    /// As [`Self::commit`], and if no batch has been settled.
    pub async fn commit_records(self, rows: u64) -> Result<(), EffectError> {
        if self.batches.iter().all(Batch::is_empty) {
            return Err(EffectError::Invalid(
                "a transaction without a checkpoint needs a settled batch of records: nothing else would keep the next attempt \
                 from doing it again"
                    .into(),
            ));
        }
        self.end(None, rows).await
    }

    async fn end(mut self, to: Option<Checkpoint>, rows: u64) -> Result<(), EffectError> {
        let mut skipped = if self.batches.iter().any(Batch::skips) { self.inner.skipped().await? } else { 0 };
        let settle = |covered: bool, skipped: &mut u32| {
            let mut all = Vec::with_capacity(self.batches.len());
            for batch in &self.batches {
                let settlement = batch.settle(covered, *skipped);
                let more = settlement.writes.iter().filter(|w| w.state == shardcron_domain::once::RecordState::Skipped);
                *skipped = skipped.saturating_add(u32::try_from(more.count()).unwrap_or(u32::MAX));
                all.push(settlement);
            }
            all
        };
        let before = skipped;
        let mut settled = settle(to.is_some(), &mut skipped);
        let over = settled.iter().find_map(|s| s.over.clone());
        let to = to.filter(|_| over.is_none());
        if over.is_some() {
            // The checkpoint stays: no batch is covered by it, not even those that are all well.
            settled = settle(false, &mut { before });
        }
        let mut end = StepEnd { rows, ..StepEnd::default() };
        for settlement in settled {
            end.writes.extend(settlement.writes);
            end.erased.extend(settlement.erased);
        }
        end.advance = to.clone().map(|to| (self.context.checkpoint.clone(), to));
        self.inner.commit(end).await?;
        self.context.effects.progress();
        if to.is_some() {
            self.context.checkpoint = to;
        }
        match over {
            Some(over) => Err(EffectError::SkipLimit(over)),
            None => Ok(()),
        }
    }
}

/// Values for the `?` of a statement: `values![1, "text", key, None::<i64>]`.
#[macro_export]
macro_rules! values {
    ($($value:expr),* $(,)?) => {
        [$($crate::SqlValue::from($value)),*]
    };
}
