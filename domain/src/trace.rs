//! What the actors say of themselves, for who checks a whole run afterwards (see [`crate::conformance`]).
//!
//! What may have an effect that its process never hears of is said twice: before the ledger is asked, and with its answer. A
//! process that is killed in between has said all that it may have done.

use crate::ids::{AttemptRef, Epoch, ExecutionId, Incarnation};
use crate::shard::{Checkpoint, FailureClass, Phase, ReclaimReason, TakeOverReason};
use serde::{Deserialize, Serialize};

/// The reason of a claim that the ledger was not asked for: the keys know that the attempt's end is recorded.
pub const ALREADY_DONE: &str = "already_done";

/// The reason of a claim that came before the attempt's time, by the label of the refusal.
pub const NOT_YET: &str = "not_yet";

/// The outcome of a firing that made its execution.
pub const FIRED: &str = "fired";

/// How an attempt ended, by its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Well.
    Success,
    /// Badly.
    Failure(FailureClass),
    /// Given back unfinished.
    HandBack,
}

/// One thing that a process did, is about to do, or was told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TraceEvent {
    /// The ledger gave this process an epoch.
    EpochBegun {
        /// The epoch.
        epoch: Epoch,
    },
    /// A firing is about to be asked for.
    Firing {
        /// Under which epoch.
        epoch: Epoch,
        /// The job's number.
        job: i64,
        /// The firing's identity within the job.
        fire_key: String,
        /// The execution, if one is to be made.
        execution: Option<ExecutionId>,
        /// The shards of its plan.
        shards: u32,
    },
    /// The first shard of a map is about to be recorded, with the shards that it emitted.
    Growing {
        /// The execution.
        execution: ExecutionId,
        /// Its shards from then on.
        shards: u32,
    },
    /// What the ledger decided about it.
    Decided {
        /// Under which epoch.
        epoch: Epoch,
        /// The job's number.
        job: i64,
        /// The firing's identity within the job.
        fire_key: String,
        /// `fired`, `duplicate`, or why not.
        outcome: String,
        /// The execution that was made, or that stands under the key already.
        execution: Option<ExecutionId>,
    },
    /// The broker confirmed an attempt's message.
    Dispatched {
        /// Under which epoch.
        epoch: Epoch,
        /// The attempt.
        at: AttemptRef,
    },
    /// A shard is about to be taken from its owner.
    Reclaiming {
        /// Under which epoch.
        epoch: Epoch,
        /// The attempt.
        at: AttemptRef,
        /// Its owner.
        owner: Incarnation,
        /// Why.
        reason: ReclaimReason,
        /// Tries that its job allows.
        attempts: u32,
    },
    /// It was, and this is what became of it; `None`: the ledger refused.
    Reclaimed {
        /// Under which epoch.
        epoch: Epoch,
        /// The attempt.
        at: AttemptRef,
        /// Where the shard is now.
        became: Option<Phase>,
    },
    /// Shards of broadcasts that wait for a worker which is gone are about to be ended.
    Abandoning {
        /// Under which epoch.
        epoch: Epoch,
        /// The worker.
        worker: Incarnation,
    },
    /// This one was, and is a dead letter.
    Abandoned {
        /// The attempt that nobody had claimed.
        at: AttemptRef,
    },
    /// A person is about to send failed shards of an execution back.
    Reopening {
        /// The execution.
        execution: ExecutionId,
    },
    /// This one was: the next attempt of its shard has all its tries again.
    Reopened {
        /// The attempt that had failed.
        at: AttemptRef,
    },
    /// A worker was handed an attempt.
    Delivered {
        /// The attempt.
        at: AttemptRef,
    },
    /// A claim is about to be asked for.
    Claiming {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
    },
    /// The claim was granted.
    Claimed {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
    },
    /// The claim was refused; by the keys ([`ALREADY_DONE`]), or by the ledger.
    ClaimRefused {
        /// The attempt.
        at: AttemptRef,
        /// Why; the label of the metric.
        reason: String,
    },
    /// A shard whose message came again is about to be taken over from its owner.
    TakingOver {
        /// By this worker.
        by: Incarnation,
        /// The attempt that the message names; the one that runs may be a later one.
        at: AttemptRef,
        /// Why.
        reason: TakeOverReason,
        /// Tries that its job allows.
        attempts: u32,
    },
    /// It was, and runs here.
    TakenOver {
        /// At this worker.
        by: Incarnation,
        /// The new attempt.
        at: AttemptRef,
        /// The attempt that the message named.
        message: u32,
        /// Why.
        reason: TakeOverReason,
        /// Tries that its job allows.
        attempts: u32,
    },
    /// It was taken from its owner, and had no try left.
    TakenAway {
        /// By this worker.
        by: Incarnation,
        /// The attempt that the message names.
        at: AttemptRef,
        /// Why.
        reason: TakeOverReason,
        /// Tries that its job allows.
        attempts: u32,
        /// Where the shard is now.
        became: Phase,
    },
    /// A checkpoint is about to be moved.
    Advancing {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
        /// From where.
        from: Option<Checkpoint>,
        /// To where.
        to: Checkpoint,
    },
    /// It was moved.
    Advanced {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
        /// To where.
        to: Checkpoint,
    },
    /// An end is about to be recorded.
    Recording {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
        /// The end.
        end: End,
        /// Tries that its job allows.
        attempts: u32,
    },
    /// The end is in the ledger.
    Recorded {
        /// The worker.
        owner: Incarnation,
        /// The attempt.
        at: AttemptRef,
        /// The end.
        end: End,
        /// Where the shard is now.
        became: Phase,
    },
    /// The ledger refused the end.
    RecordRefused {
        /// The attempt.
        at: AttemptRef,
        /// Why; the label of the metric.
        reason: String,
    },
    /// The attempt has run so long that its delivery is acked while it runs.
    PastHorizon {
        /// The attempt.
        at: AttemptRef,
    },
    /// Its delivery is acked.
    Acked {
        /// The attempt.
        at: AttemptRef,
    },
}

/// An event with the process that said it. A process life numbers its events from 1; nothing else orders them: clocks differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceLine {
    /// The process life: its name, and something that no other life under this name has.
    pub life: String,
    /// The number of the event in that life.
    pub seq: u64,
    /// The event.
    #[serde(flatten)]
    pub event: TraceEvent,
}
