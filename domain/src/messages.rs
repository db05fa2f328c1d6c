//! What travels between processes. The codecs are in the broker crate; fields may be added, never renamed.

use crate::ids::AttemptRef;
use serde::{Deserialize, Serialize};

/// The version of the envelope that this program writes.
pub const ENVELOPE_VERSION: u8 = 1;

/// "Run this attempt": the whole message. The data of the shard is in the ledger, under the execution's frozen plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardMessage {
    /// [`ENVELOPE_VERSION`] of the sender.
    pub v: u8,
    /// The attempt to run.
    pub attempt: AttemptRef,
    /// The leader that handed it out; for the logs only, a worker never decides by it.
    pub epoch: i64,
}

/// The version of a message that holds several shards. A worker that reads up to [`ENVELOPE_VERSION`] only refuses it in words instead
/// of running its first shard and losing sight of the others.
pub const RUN_VERSION: u8 = 2;

/// Several shards of one execution in a row, all at the same attempt: what tiny shards travel in (see `crate::grouping`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRun {
    /// [`RUN_VERSION`] of the sender, or [`ENVELOPE_VERSION`] for a single shard.
    pub v: u8,
    /// The first of them.
    pub attempt: AttemptRef,
    /// How many; at least one.
    pub count: u32,
    /// The leader that handed them out; for the logs only.
    pub epoch: i64,
}

impl ShardRun {
    /// `count` shards from `attempt` on.
    #[must_use]
    pub fn new(attempt: AttemptRef, count: u32, epoch: i64) -> Self {
        ShardRun { v: if count > 1 { RUN_VERSION } else { ENVELOPE_VERSION }, attempt, count, epoch }
    }

    /// Each shard as a message of its own.
    pub fn shards(self) -> impl Iterator<Item = ShardMessage> {
        let AttemptRef { execution, index, attempt } = self.attempt;
        (index..index.saturating_add(self.count)).map(move |index| ShardMessage {
            v: ENVELOPE_VERSION,
            attempt: AttemptRef { execution, index, attempt },
            epoch: self.epoch,
        })
    }
}

/// A trigger by a person or a program, read and checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TriggerRequest {
    /// The job's name.
    pub job: String,
    /// Parameters over the job's own.
    #[serde(default)]
    pub params: serde_json::Map<String, serde_json::Value>,
    /// The same id fires once. Absent: each message is a firing of its own.
    #[serde(default)]
    pub request_id: Option<String>,
    /// The instant that it is for, in RFC 3339; now if absent. One in the future is kept and fired then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Other shards than the job's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<crate::override_plan::ShardsWanted>,
    /// Who asks; kept with the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Past instants of the schedule instead of one firing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backfill: Option<crate::backfill::BackfillRequest>,
}

/// What the requester gets back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerReply {
    /// `fired`, `waiting`, `backfilling`, `duplicate`, `skipped` or `rejected`.
    pub outcome: String,
    /// The execution: the new one, the one of the same request, or the one in the way.
    pub execution: Option<String>,
    /// A sentence.
    pub message: String,
}
