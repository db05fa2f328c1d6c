//! Output of attempts, as it goes into the ledger and comes out.

use shardcron_domain::output::{Chunk, Write};
use shardcron_domain::{AttemptRef, ExecutionId};

/// What to keep of one attempt, and what to delete for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputWrite {
    /// The attempt.
    pub attempt: AttemptRef,
    /// Its chunks.
    pub write: Write,
}

/// Which output to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputQuery {
    /// Of this execution.
    pub execution: ExecutionId,
    /// Of this shard only.
    pub shard: Option<u32>,
    /// Of this attempt only.
    pub attempt: Option<u32>,
    /// Behind this row; 0 for the beginning.
    pub after: i64,
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputRow {
    /// Grows with every row that is written. A row with a smaller id may become visible a moment later than one with a larger id.
    pub id: i64,
    /// When it was written, milliseconds UTC.
    pub at_ms: i64,
    /// The shard.
    pub shard: u32,
    /// The attempt.
    pub attempt: u32,
    /// What it is.
    pub chunk: Chunk,
}
