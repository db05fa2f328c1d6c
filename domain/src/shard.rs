//! The state machine of a shard.
//!
//! ```text
//!            claim                       succeed
//!  pending ─────────▶ running(owner) ─────────────▶ success
//!     ▲                  │      │
//!     │ retry, reclaim,  │      └── fail, reclaim with no try left ──▶ failed (a dead letter)
//!     └── hand back ─────┘
//!  running(owner) ── take over ──▶ running(another), attempt + 1; failed with no try left
//!  pending, running ── cancel ──▶ cancelled;  pending ── abandon ──▶ failed
//!  failed ── reopen ──▶ pending, attempt + 1, failures 0      a person's, recorded; nothing else leaves a terminal phase
//! ```
//!
//! `attempt` is the fence: it grows by one whenever a shard leaves its owner without having ended, so a late write of an earlier
//! owner matches nothing. `failures` is the budget: a hand-back at shutdown raises the attempt but not the failures; a take-over
//! raises both, so that a shard that kills its workers runs out of tries however fast the next one takes it (case T-04).
//!
//! The SQL adapters carry these guards in their `WHERE` clauses; the store's conformance suite holds the two together.

use crate::ids::Incarnation;
use crate::job::RetryPolicy;
use crate::retry::{not_before_ms, wait_ms};
use serde::{Deserialize, Serialize};

/// Where a shard is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// To be run, perhaps not before some instant.
    Pending,
    /// Claimed by the owner.
    Running,
    /// Ended well; its result is recorded.
    Success,
    /// Its tries are used up, or it said that trying again is no use.
    Failed,
    /// Its execution was cancelled first.
    Cancelled,
}

impl Phase {
    /// Nothing leaves a terminal phase (S2), but for what a person reopens: that begins a new round, with its own record.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Phase::Success | Phase::Failed | Phase::Cancelled)
    }

    /// The number in the ledger.
    #[must_use]
    pub fn code(self) -> i64 {
        match self {
            Phase::Pending => 0,
            Phase::Running => 1,
            Phase::Success => 2,
            Phase::Failed => 3,
            Phase::Cancelled => 4,
        }
    }

    /// From the number in the ledger.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        [Phase::Pending, Phase::Running, Phase::Success, Phase::Failed, Phase::Cancelled]
            .into_iter()
            .find(|p| p.code() == code)
    }

    /// The word that people see.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Phase::Pending => "pending",
            Phase::Running => "running",
            Phase::Success => "success",
            Phase::Failed => "failed",
            Phase::Cancelled => "cancelled",
        }
    }
}

/// How far an attempt got. A number must grow; a text only has to follow from the previous one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Checkpoint {
    /// A key of the data: everything up to and with it is done.
    Number(i64),
    /// Anything else that the handler understands.
    Text(String),
}

/// What the ledger knows of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Where it is.
    pub phase: Phase,
    /// The attempt that runs, or the one that will.
    pub attempt: u32,
    /// Tries that ended badly so far.
    pub failures: u32,
    /// Who runs it; `Some` exactly while it is running.
    pub owner: Option<Incarnation>,
    /// It is not handed out before this instant.
    pub not_before_ms: i64,
    /// Where the next attempt starts.
    pub checkpoint: Option<Checkpoint>,
}

impl Shard {
    /// As a firing makes it.
    #[must_use]
    pub fn new() -> Self {
        Shard { phase: Phase::Pending, attempt: 1, failures: 0, owner: None, not_before_ms: 0, checkpoint: None }
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::new()
    }
}

/// Why a shard was taken from its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimReason {
    /// The owner's heartbeat ended.
    WorkerLost,
    /// The owner's heartbeat goes on, but the attempt is past its timeout and the grace.
    Hung,
    /// The owner's heartbeat goes on, but the attempt has made no progress for the job's `stall_timeout` and the grace.
    Stalled,
}

impl ReclaimReason {
    /// The sentence that stands in the attempt's history.
    #[must_use]
    pub fn sentence(self) -> &'static str {
        match self {
            ReclaimReason::WorkerLost => "worker lost: its heartbeat ended while the shard ran",
            ReclaimReason::Hung => "hung: the attempt ran past its timeout and did not end when told to",
            ReclaimReason::Stalled => {
                "stalled: the attempt made no progress for the job's stall_timeout and did not end when told to"
            }
        }
    }

    /// The word in the attempt's history, in metrics and in logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            ReclaimReason::WorkerLost => "worker_lost",
            ReclaimReason::Hung => "hung",
            ReclaimReason::Stalled => "stalled",
        }
    }
}

/// Why the worker that got a shard's message again may take the shard from another that the ledger holds for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TakeOverReason {
    /// The owner's heartbeat had ended.
    OwnerGone,
    /// The broker delivered the message again, so the owner's connection had ended; the job allows it (`takeover = "immediate"`).
    Redelivered,
}

impl TakeOverReason {
    /// The sentence that stands in the attempt's history.
    #[must_use]
    pub fn sentence(self) -> &'static str {
        match self {
            TakeOverReason::OwnerGone => {
                "worker lost: its heartbeat had ended when the shard's message came again, and another worker took it over"
            }
            TakeOverReason::Redelivered => {
                "worker lost: its connection to the broker ended while the shard ran, and another worker took it over at once \
                 (takeover = \"immediate\")"
            }
        }
    }
}

/// The word in the history of an attempt that was taken over. The ledger finds by it whether a message of an earlier attempt still
/// stands for the one that runs.
pub const TAKEN_OVER: &str = "taken_over";

/// What a failed handler says about another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// Another try may help.
    Transient,
    /// Another try would fail the same way.
    Permanent,
    /// It ran into its timeout; another try may help.
    Timeout,
    /// It made no progress for the job's `stall_timeout`; another try may help.
    Stalled,
    /// Another try may help, but not before this long after the end: the other side said when it will be able to. Costs a try like
    /// any failure, so that a service which is away for good ends as a dead letter and not as a shard that waits for ever.
    NotBefore {
        /// Milliseconds; bounded by [`NOT_BEFORE_MAX_MS`](crate::limits::NOT_BEFORE_MAX_MS).
        wait_ms: u64,
    },
}

/// What happens to a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A worker wants to run an attempt.
    Claim {
        /// The attempt that its message named.
        attempt: u32,
        /// The worker.
        owner: Incarnation,
    },
    /// A running attempt got further.
    Advance {
        /// The attempt.
        attempt: u32,
        /// The worker.
        owner: Incarnation,
        /// The checkpoint that it went on from.
        from: Option<Checkpoint>,
        /// The new one.
        to: Checkpoint,
    },
    /// The handler ended well.
    Succeed {
        /// The attempt.
        attempt: u32,
        /// The worker.
        owner: Incarnation,
    },
    /// The handler ended badly.
    Fail {
        /// The attempt.
        attempt: u32,
        /// The worker.
        owner: Incarnation,
        /// Whether another try may help.
        class: FailureClass,
        /// For the jitter of the wait.
        seed: u64,
    },
    /// The leader takes the shard from its owner.
    Reclaim {
        /// The attempt that was seen running.
        attempt: u32,
        /// Its owner then.
        owner: Incarnation,
        /// Why.
        reason: ReclaimReason,
    },
    /// Another worker goes on with what it was handed again, in place of the owner, without a wait in between. Costs a try.
    TakeOver {
        /// The attempt that was seen running.
        attempt: u32,
        /// Its owner then.
        owner: Incarnation,
        /// Who runs the next attempt.
        by: Incarnation,
        /// Why.
        reason: TakeOverReason,
    },
    /// The owner gives it back unfinished, at shutdown or because it never started it.
    HandBack {
        /// The attempt.
        attempt: u32,
        /// The worker.
        owner: Incarnation,
    },
    /// The worker that alone may run it is gone (a broadcast).
    Abandon,
    /// The execution is cancelled.
    Cancel,
    /// A person sends a failed shard back, with its checkpoint and all its tries: a new round of the execution.
    Reopen {
        /// The attempt that was seen failed.
        attempt: u32,
    },
}

/// What has to be done after a transition, by whoever applied it, in the same transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Hand the shard to the broker again under its new attempt.
    Redispatch {
        /// Not before this instant.
        not_before_ms: i64,
    },
    /// Count the shard in its execution.
    Settle(Phase),
}

/// A refused event: stale, late or a duplicate. Counted by its [`Rejection::label`]; nothing changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Rejection {
    /// The shard has ended.
    #[error("the shard has already ended ({})", .0.word())]
    Terminal(Phase),
    /// A later attempt exists.
    #[error("attempt {named} is superseded by attempt {current}")]
    StaleAttempt {
        /// The attempt that the event named.
        named: u32,
        /// The attempt in the ledger.
        current: u32,
    },
    /// The event names an attempt that the ledger never gave out.
    #[error("attempt {named} does not exist; the ledger is at {current}")]
    UnknownAttempt {
        /// The attempt that the event named.
        named: u32,
        /// The attempt in the ledger.
        current: u32,
    },
    /// This attempt has been claimed.
    #[error("the attempt is already running at {0}")]
    AlreadyRunning(Incarnation),
    /// Someone else runs this attempt.
    #[error("the attempt belongs to {0}")]
    NotOwner(Incarnation),
    /// Nobody runs it.
    #[error("the attempt is not running")]
    NotRunning,
    /// It waits for its retry.
    #[error("the shard waits until its retry is due")]
    NotYet,
    /// The checkpoint does not follow from the ledger's (S4).
    #[error("the checkpoint does not follow from the one in the ledger")]
    CheckpointGap,
    /// It is not over, so there is nothing to reopen.
    #[error("the shard has not ended")]
    NotEnded,
    /// There is no such shard.
    #[error("there is no such shard")]
    NoSuchShard,
}

impl Rejection {
    /// The bounded label of the metric `shardcron_refused_total`.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Rejection::Terminal(_) => "terminal",
            Rejection::StaleAttempt { .. } => "stale_attempt",
            Rejection::UnknownAttempt { .. } => "unknown_attempt",
            Rejection::AlreadyRunning(_) => "already_running",
            Rejection::NotOwner(_) => "not_owner",
            Rejection::NotRunning => "not_running",
            Rejection::NotYet => "not_yet",
            Rejection::CheckpointGap => "checkpoint_gap",
            Rejection::NotEnded => "not_ended",
            Rejection::NoSuchShard => "no_such_shard",
        }
    }
}

/// The one place where a shard changes. Unknown combinations are refusals, never a silent default.
///
/// # Errors
/// The event does not apply to the state; the state stays as it is.
pub fn apply(
    shard: &Shard,
    event: &Event,
    policy: &RetryPolicy,
    now_ms: i64,
) -> Result<(Shard, Option<Effect>), Rejection> {
    match event {
        Event::Claim { attempt, owner } => {
            if shard.phase == Phase::Running && *attempt == shard.attempt {
                return Err(Rejection::AlreadyRunning(shard.owner.unwrap_or(*owner)));
            }
            check_attempt(shard, *attempt)?;
            if shard.not_before_ms > now_ms {
                return Err(Rejection::NotYet);
            }
            Ok((Shard { phase: Phase::Running, owner: Some(*owner), ..shard.clone() }, None))
        }
        Event::Advance { attempt, owner, from, to } => {
            check_running(shard, *attempt, *owner)?;
            if *from != shard.checkpoint || !moves_forward(from.as_ref(), to) {
                return Err(Rejection::CheckpointGap);
            }
            Ok((Shard { checkpoint: Some(to.clone()), ..shard.clone() }, None))
        }
        Event::Succeed { attempt, owner } => {
            check_running(shard, *attempt, *owner)?;
            Ok((Shard { phase: Phase::Success, owner: None, ..shard.clone() }, Some(Effect::Settle(Phase::Success))))
        }
        Event::Fail { attempt, owner, class, seed } => {
            check_running(shard, *attempt, *owner)?;
            let failures = shard.failures.saturating_add(1);
            let again = *class != FailureClass::Permanent && failures < policy.attempts;
            let wait = match class {
                FailureClass::NotBefore { wait_ms } => not_before_ms(policy, failures, *wait_ms, *seed),
                _ => wait_ms(policy, failures, *seed),
            };
            let wait = i64::try_from(wait).unwrap_or(i64::MAX);
            Ok(after_failure(shard, failures, again.then_some(now_ms.saturating_add(wait))))
        }
        Event::Reclaim { attempt, owner, .. } => {
            check_running(shard, *attempt, *owner)?;
            let failures = shard.failures.saturating_add(1);
            Ok(after_failure(shard, failures, (failures < policy.attempts).then_some(now_ms)))
        }
        Event::TakeOver { attempt, owner, by, .. } => {
            check_running(shard, *attempt, *owner)?;
            if owner == by {
                return Err(Rejection::AlreadyRunning(*by));
            }
            let failures = shard.failures.saturating_add(1);
            if failures >= policy.attempts {
                return Ok(after_failure(shard, failures, None));
            }
            let attempt = shard.attempt.saturating_add(1);
            Ok((Shard { attempt, failures, owner: Some(*by), ..shard.clone() }, None))
        }
        Event::HandBack { attempt, owner } => {
            check_running(shard, *attempt, *owner)?;
            Ok(after_failure(shard, shard.failures, Some(now_ms)))
        }
        Event::Abandon => match shard.phase {
            Phase::Pending => Ok(after_failure(shard, shard.failures, None)),
            // Its owner's loss is seen to first; then it is pending.
            Phase::Running => Err(Rejection::NotYet),
            ended => Err(Rejection::Terminal(ended)),
        },
        Event::Cancel => {
            if shard.phase.is_terminal() {
                return Err(Rejection::Terminal(shard.phase));
            }
            Ok((
                Shard { phase: Phase::Cancelled, owner: None, ..shard.clone() },
                Some(Effect::Settle(Phase::Cancelled)),
            ))
        }
        Event::Reopen { attempt } => match shard.phase {
            Phase::Pending | Phase::Running => Err(Rejection::NotEnded),
            Phase::Success | Phase::Cancelled => Err(Rejection::Terminal(shard.phase)),
            Phase::Failed => {
                same_attempt(shard, *attempt)?;
                // Due at once, whatever the clock of who asks says.
                Ok(after_failure(shard, 0, Some(0)))
            }
        },
    }
}

fn after_failure(shard: &Shard, failures: u32, next_at_ms: Option<i64>) -> (Shard, Option<Effect>) {
    match next_at_ms {
        Some(not_before_ms) => (
            Shard {
                phase: Phase::Pending,
                attempt: shard.attempt.saturating_add(1),
                failures,
                owner: None,
                not_before_ms,
                checkpoint: shard.checkpoint.clone(),
            },
            Some(Effect::Redispatch { not_before_ms }),
        ),
        None => (
            Shard { phase: Phase::Failed, failures, owner: None, ..shard.clone() },
            Some(Effect::Settle(Phase::Failed)),
        ),
    }
}

fn check_attempt(shard: &Shard, named: u32) -> Result<(), Rejection> {
    if shard.phase.is_terminal() {
        return Err(Rejection::Terminal(shard.phase));
    }
    same_attempt(shard, named)
}

fn same_attempt(shard: &Shard, named: u32) -> Result<(), Rejection> {
    match named.cmp(&shard.attempt) {
        std::cmp::Ordering::Less => Err(Rejection::StaleAttempt { named, current: shard.attempt }),
        std::cmp::Ordering::Greater => Err(Rejection::UnknownAttempt { named, current: shard.attempt }),
        std::cmp::Ordering::Equal => Ok(()),
    }
}

fn check_running(shard: &Shard, attempt: u32, owner: Incarnation) -> Result<(), Rejection> {
    check_attempt(shard, attempt)?;
    match (shard.phase, shard.owner) {
        (Phase::Running, Some(current)) if current == owner => Ok(()),
        (Phase::Running, Some(current)) => Err(Rejection::NotOwner(current)),
        _ => Err(Rejection::NotRunning),
    }
}

/// S4: numbers grow; between texts the ledger can only check that nothing was skipped.
fn moves_forward(from: Option<&Checkpoint>, to: &Checkpoint) -> bool {
    match (from, to) {
        (Some(Checkpoint::Number(a)), Checkpoint::Number(b)) => b > a,
        (Some(from), to) => from != to,
        (None, _) => true,
    }
}

#[cfg(test)]
mod tests;
