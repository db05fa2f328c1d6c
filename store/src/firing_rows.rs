//! What the ledger keeps of firings beyond decisions: what waits, who led, what is paused, what is cancelled.

use crate::rows::Params;
use serde::{Deserialize, Serialize};
use shardcron_domain::override_plan::ShardsWanted;
use shardcron_domain::{Epoch, ExecutionId, JobId};

/// What a firing has beyond an instant of the schedule.
#[derive(Clone, Debug, Default)]
pub struct FireExtra {
    /// The row of what waits that it comes from. It goes with the decision.
    pub waiting: Option<WaitingRef>,
    /// Ends of upstreams that it takes up. They go with the decision, whatever that is.
    pub watches: Vec<i64>,
    /// What was asked for; kept, should it have to wait.
    pub request: FiringRequest,
}

/// What was asked for with a firing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FiringRequest {
    /// Parameters over the job's own.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub params: Params,
    /// Other shards than the job's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<ShardsWanted>,
    /// A sentence that is kept with the decision: who asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Why a firing waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitingKind {
    /// For its instant.
    Future,
    /// For the job to be free: overlap policy `queue`.
    Queued,
    /// For its turn in a backfill.
    Backfill,
}

impl WaitingKind {
    /// The number in the ledger.
    #[must_use]
    pub fn code(self) -> i64 {
        match self {
            WaitingKind::Future => 0,
            WaitingKind::Queued => 1,
            WaitingKind::Backfill => 2,
        }
    }

    /// From the number in the ledger.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        [WaitingKind::Future, WaitingKind::Queued, WaitingKind::Backfill].into_iter().find(|k| k.code() == code)
    }
}

/// A row of what waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRef {
    /// Its number; their order.
    pub id: i64,
    /// Why it waits.
    pub kind: WaitingKind,
}

/// A firing that waits and may have its turn.
#[derive(Clone, Debug)]
pub struct WaitingRow {
    /// Which.
    pub at: WaitingRef,
    /// Its job.
    pub job: JobId,
    /// The job's name.
    pub job_name: String,
    /// The firing's identity.
    pub fire_key: String,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// Whether a pause stops it.
    pub scheduled: bool,
    /// What was asked for.
    pub request: FiringRequest,
    /// Executions of the job that have not ended.
    pub active: u32,
}

/// One epoch of leadership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EpochRow {
    /// Its number.
    pub epoch: Epoch,
    /// The scheduler that led, with its process life.
    pub holder: String,
    /// When it began, by that scheduler's clock.
    pub from_ms: i64,
    /// When it was last seen to lead.
    pub seen_ms: i64,
}

/// A pause of more than one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PauseRow {
    /// `all`, or `tier:` and its name.
    pub scope: String,
    /// By whom.
    pub paused_by: String,
    /// Since when.
    pub at_ms: i64,
}

/// Why an execution was cancelled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CancellationRow {
    /// When.
    pub at_ms: i64,
    /// By whom.
    pub who: String,
    /// In a sentence.
    pub reason: String,
}

/// A request to run past instants.
#[derive(Clone, Debug)]
pub struct NewBackfill {
    /// The job.
    pub job: JobId,
    /// The request's identity within the job.
    pub request_id: String,
    /// The first instant that may be meant.
    pub from_ms: i64,
    /// The first one beyond.
    pub to_ms: i64,
    /// Whether those that ran are run again.
    pub forced: bool,
    /// Who asks.
    pub who: String,
    /// Instants of the range that ran and are left alone.
    pub already: u32,
    /// What is to be run, oldest first: fire key and instant.
    pub instants: Vec<(String, i64)>,
    /// What every one of them gets.
    pub request: FiringRequest,
}

/// A backfill and how far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackfillRow {
    /// The request's identity within the job.
    pub request_id: String,
    /// The first instant that may be meant.
    pub from_ms: i64,
    /// The first one beyond.
    pub to_ms: i64,
    /// Whether those that ran are run again.
    pub forced: bool,
    /// Who asked.
    pub who: String,
    /// When the leader took it.
    pub at_ms: i64,
    /// Instants that it is to run.
    pub instants: u32,
    /// Instants of the range that ran before and are left alone.
    pub already: u32,
    /// Instants that have not had their turn.
    pub left: u32,
}

/// An upstream's execution that a downstream job has not taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchRow {
    /// Its number.
    pub id: i64,
    /// The downstream job.
    pub job: JobId,
    /// The downstream job's name.
    pub job_name: String,
    /// The upstream job's name.
    pub upstream: String,
    /// The upstream's execution.
    pub execution: ExecutionId,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// Where it is.
    pub phase: shardcron_domain::execution::Phase,
}

/// What an upstream's execution came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResultSummary {
    /// Shards of its plan.
    pub shards: u32,
    /// Those that failed.
    pub failed: u32,
    /// Records, where its handlers count them.
    pub rows: Option<u64>,
    /// The summary of its first shard, cut.
    pub summary: Option<String>,
}
