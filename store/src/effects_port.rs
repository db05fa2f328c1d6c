//! The part of the ledger's port that is about what a handler does to the ledger's own database: transactions under the attempt's
//! fence, and records that are worked on once.

use crate::error::Result;
use crate::rows::{Ended, Recorded};
use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::once::{Known, RecordRow};
use shardcron_domain::shard::Rejection;
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};

/// A transaction of a handler. The shard's row is locked from its beginning to its end, so that nobody can take the shard away in
/// between; dropped without a commit, everything in it is rolled back. It must not wait for long between two statements
/// (`limits::TRANSACTION_IDLE_MS`).
#[async_trait]
pub trait StepTx: Send {
    /// Runs a statement; the count of rows that it changed or matched.
    ///
    /// # Errors
    /// [`Statement`](crate::StoreError::Statement): the database refused it. The transaction goes on, unless the refusal is
    /// transient; then all of it is rolled back.
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> Result<u64>;
    /// Rows of a statement.
    ///
    /// # Errors
    /// As [`Self::execute`].
    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>>;
    /// Marks this point of the transaction, and forgets an earlier mark.
    ///
    /// # Errors
    /// The ledger is away.
    async fn mark(&mut self) -> Result<()>;
    /// Undoes everything since the mark.
    ///
    /// # Errors
    /// The ledger is away, or there is no mark.
    async fn undo(&mut self) -> Result<()>;
    /// What is known of records, in the order of the keys. `note`: those of which nothing is known get a row that says `started`.
    ///
    /// # Errors
    /// A key is too long, or the ledger is away.
    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> Result<Vec<Option<Known>>>;
    /// How many records of the shard have been given up.
    ///
    /// # Errors
    /// The ledger is away.
    async fn skipped(&mut self) -> Result<u32>;
    /// Commits.
    ///
    /// # Errors
    /// [`Unavailable`](crate::StoreError::Unavailable): it was committed or it was not; [`EffectsLedger::step_stands`] says.
    async fn commit(self: Box<Self>, end: &StepEnd) -> Result<std::result::Result<(), Rejection>>;
}

/// How the end of a shard with records of its own was taken.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordsEnd {
    /// There are no rows of records: the end is to be recorded like any other.
    NoRecords,
    /// It is recorded, and the rows are gone.
    Recorded(Recorded),
    /// It was recorded by an earlier call whose answer was lost.
    Before,
    /// Nothing was written: so many records are still to be done. With the first of them.
    Open(u64, Vec<RecordRow>),
}

/// Like [`Ledger`](crate::Ledger), whose rules hold here.
#[async_trait]
pub trait EffectsLedger: Send + Sync + 'static {
    /// Begins a transaction of a handler, if the attempt is this owner's and runs.
    async fn begin_step(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
    ) -> Result<std::result::Result<Box<dyn StepTx>, Rejection>>;
    /// Whether a step whose answer was lost has been committed. Waits for a transaction that is still open.
    async fn step_stands(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        end: &StepEnd,
    ) -> Result<std::result::Result<bool, Rejection>>;
    /// Records of the shard that an attempt before this one began with or failed at, in the order of their keys.
    async fn open_records(&self, before: AttemptRef, limit: usize) -> Result<Vec<RecordRow>>;
    /// Records the good end of a shard together with the end of its records' rows, if there are any.
    async fn end_records(
        &self,
        owner: Incarnation,
        ended: &Ended,
        now_ms: i64,
    ) -> Result<std::result::Result<RecordsEnd, Rejection>>;
    /// Records of an execution that failed or were given up, by shard.
    async fn record_report(&self, execution: ExecutionId, limit: usize) -> Result<Vec<RecordRow>>;
}
