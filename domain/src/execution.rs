//! The state machine of an execution: it counts its shards' ends and ends with the last one.

use serde::{Deserialize, Serialize};

/// Where an execution is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Some shard has not ended.
    Running,
    /// Every shard ended well.
    Success,
    /// Every shard ended, at least one of them badly.
    Failed,
    /// It was cancelled before its end.
    Cancelled,
}

impl Phase {
    /// Whether it can still change.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        self != Phase::Running
    }

    /// The number in the ledger.
    #[must_use]
    pub fn code(self) -> i64 {
        match self {
            Phase::Running => 0,
            Phase::Success => 1,
            Phase::Failed => 2,
            Phase::Cancelled => 3,
        }
    }

    /// From the number in the ledger.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        [Phase::Running, Phase::Success, Phase::Failed, Phase::Cancelled].into_iter().find(|p| p.code() == code)
    }

    /// The word that people see.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Phase::Running => "running",
            Phase::Success => "success",
            Phase::Failed => "failed",
            Phase::Cancelled => "cancelled",
        }
    }
}

/// What the ledger counts of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Execution {
    /// Where it is.
    pub phase: Phase,
    /// Shards of its plan.
    pub shards_total: u32,
    /// Shards that ended well.
    pub succeeded: u32,
    /// Shards that ended badly.
    pub failed: u32,
    /// Shards that were cancelled.
    pub cancelled: u32,
}

/// What happens to an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// So many of its shards ended, each for the first time.
    Settled {
        /// Ended well.
        succeeded: u32,
        /// Ended badly.
        failed: u32,
    },
    /// Somebody cancels it; all its shards that have not ended are cancelled in the same transaction.
    Cancel,
}

/// A refused event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Rejection {
    /// It has ended.
    #[error("the execution has already ended ({})", .0.word())]
    Terminal(Phase),
    /// More shards ended than there are: invariant S1 is broken.
    #[error("{ended} shards ended of {total}")]
    TooMany {
        /// The sum with this event.
        ended: u64,
        /// The plan's shards.
        total: u32,
    },
}

impl Execution {
    /// As a firing makes it.
    #[must_use]
    pub fn new(shards_total: u32) -> Self {
        Execution { phase: Phase::Running, shards_total, succeeded: 0, failed: 0, cancelled: 0 }
    }

    /// Shards that have ended.
    #[must_use]
    pub fn ended(&self) -> u32 {
        self.succeeded + self.failed + self.cancelled
    }
}

/// The one place where an execution changes.
///
/// # Errors
/// The event does not apply; the state stays as it is.
pub fn apply(execution: &Execution, event: Event) -> Result<Execution, Rejection> {
    if execution.phase.is_terminal() {
        return Err(Rejection::Terminal(execution.phase));
    }
    match event {
        Event::Settled { succeeded, failed } => {
            let ended = u64::from(execution.ended()) + u64::from(succeeded) + u64::from(failed);
            let total = execution.shards_total;
            if ended > u64::from(total) {
                return Err(Rejection::TooMany { ended, total });
            }
            let mut next = *execution;
            next.succeeded += succeeded;
            next.failed += failed;
            if ended == u64::from(total) {
                next.phase = if next.failed == 0 { Phase::Success } else { Phase::Failed };
            }
            Ok(next)
        }
        Event::Cancel => {
            let cancelled = execution.shards_total - execution.succeeded - execution.failed;
            Ok(Execution { phase: Phase::Cancelled, cancelled, ..*execution })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_with_its_last_shard() {
        let e = Execution::new(3);
        let e = apply(&e, Event::Settled { succeeded: 2, failed: 0 }).unwrap();
        assert_eq!(e.phase, Phase::Running);
        assert_eq!(apply(&e, Event::Settled { succeeded: 1, failed: 0 }).unwrap().phase, Phase::Success);
        assert_eq!(apply(&e, Event::Settled { succeeded: 0, failed: 1 }).unwrap().phase, Phase::Failed);
        assert_eq!(
            apply(&e, Event::Settled { succeeded: 1, failed: 1 }),
            Err(Rejection::TooMany { ended: 4, total: 3 })
        );
    }

    #[test]
    fn a_cancelled_one_takes_nothing_more() {
        let e = apply(&Execution::new(3), Event::Settled { succeeded: 1, failed: 0 }).unwrap();
        let e = apply(&e, Event::Cancel).unwrap();
        assert_eq!((e.phase, e.cancelled, e.ended()), (Phase::Cancelled, 2, 3));
        assert!(apply(&e, Event::Settled { succeeded: 1, failed: 0 }).is_err());
    }
}
