//! What people ask of the ledger about work that went wrong, and what it answers.

use serde::Serialize;
use shardcron_domain::{AttemptRef, ExecutionId};

/// Which failed shards of an execution are sent back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReopenShards {
    /// All that have failed, from this one on.
    Failed {
        /// The first that may be meant.
        from: u32,
    },
    /// These; at most `limits::REOPEN_BATCH`. If one of them has not failed, nothing is done.
    These(Vec<u32>),
}

/// Failed shards of an execution that are to run again.
#[derive(Clone, Debug)]
pub struct Reopen {
    /// The execution.
    pub execution: ExecutionId,
    /// Which of its shards.
    pub shards: ReopenShards,
    /// Who asks.
    pub who: String,
    /// Why, in his own words.
    pub reason: Option<String>,
}

/// What was sent back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reopened {
    /// The attempts that had failed; each shard goes on under the next one.
    pub shards: Vec<AttemptRef>,
    /// There are more, from this shard on: the batch is bounded.
    pub next: Option<u32>,
    /// Dead letters that were settled with it.
    pub letters: u64,
    /// Jobs that had been told of the bad end, did not fire for it, and will be told of the next one.
    pub followers: u64,
}

/// One time that failed shards of an execution were sent back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReopeningRow {
    /// Its number, from 1; the execution's first round is 0.
    pub round: u32,
    /// When.
    pub at_ms: i64,
    /// By whom.
    pub who: String,
    /// Why, if he said so.
    pub reason: Option<String>,
    /// How many shards.
    pub shards: u64,
}

/// The kind of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadKind {
    /// A shard without a try left.
    Shard,
    /// A message that could not be read or was refused.
    Message,
}

impl DeadKind {
    /// The word in the ledger.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            DeadKind::Shard => "shard",
            DeadKind::Message => "message",
        }
    }
}

/// Which dead letters are meant. What is not said is not asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadQuery {
    /// With numbers in one of these ranges, both ends included.
    pub ids: Vec<(i64, i64)>,
    /// Shards of this job's executions.
    pub job: Option<String>,
    /// Of this kind.
    pub kind: Option<DeadKind>,
    /// After this number, in their order; `None`: newest first.
    pub after: Option<i64>,
}

/// Dead letters that are done with.
#[derive(Clone, Debug)]
pub struct DeadSettled {
    /// Their numbers; at most `limits::DEAD_BATCH`.
    pub ids: Vec<i64>,
    /// What was done with them: the word of the audit table.
    pub action: &'static str,
    /// Who did it.
    pub who: String,
    /// Why, or with what outcome.
    pub why: String,
}
