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
    /// Shards at the end of the plan that are not handed out before all others have ended well: a map's reducing one.
    pub held: u32,
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
    /// The first shard of a map says what the others are. Once in its life.
    Grow {
        /// Shards that it emitted.
        emitted: u32,
        /// Whether one more shard reduces their results.
        reduce: bool,
    },
    /// Somebody cancels it; all its shards that have not ended are cancelled in the same transaction.
    Cancel,
    /// A person sends so many of its failed shards back; they are pending again in the same transaction, and it runs again.
    Reopen {
        /// The shards.
        shards: u32,
    },
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
    /// Fewer shards have failed than are sent back, or none is.
    #[error("{asked} shards are to run again, and {failed} have failed")]
    NotFailed {
        /// Shards that were asked for.
        asked: u32,
        /// Shards that have failed.
        failed: u32,
    },
    /// It has grown before, or its first shard is not its only one.
    #[error("it has {0} shards already and can't grow")]
    Grown(u32),
}

impl Execution {
    /// As a firing makes it.
    #[must_use]
    pub fn new(shards_total: u32) -> Self {
        Execution { phase: Phase::Running, shards_total, succeeded: 0, failed: 0, cancelled: 0, held: 0 }
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
    if let (Event::Reopen { shards }, Phase::Running | Phase::Failed) = (event, execution.phase) {
        return match execution.failed.checked_sub(shards) {
            // Of what has failed, only a reducing shard is cancelled: it waits again for those that are sent back.
            Some(failed) if shards > 0 => Ok(Execution {
                phase: Phase::Running,
                failed,
                held: execution.held + execution.cancelled,
                cancelled: 0,
                ..*execution
            }),
            _ => Err(Rejection::NotFailed { asked: shards, failed: execution.failed }),
        };
    }
    if execution.phase.is_terminal() {
        return Err(Rejection::Terminal(execution.phase));
    }
    match event {
        Event::Settled { succeeded, failed } => {
            let ended = u64::from(execution.ended()) + u64::from(succeeded) + u64::from(failed);
            // Those that are held back wait for all others.
            let total = execution.shards_total - execution.held;
            if ended > u64::from(total) {
                return Err(Rejection::TooMany { ended, total });
            }
            let mut next = *execution;
            next.succeeded += succeeded;
            next.failed += failed;
            if ended == u64::from(total) {
                let well = next.failed == 0 && next.cancelled == 0;
                match (next.held, well) {
                    (0, _) => next.phase = if next.failed == 0 { Phase::Success } else { Phase::Failed },
                    (_, true) => next.held = 0,
                    (held, false) => {
                        // Half of the results would be reduced to a wrong answer.
                        (next.cancelled, next.held, next.phase) = (next.cancelled + held, 0, Phase::Failed);
                    }
                }
            }
            Ok(next)
        }
        Event::Reopen { .. } => Err(Rejection::Terminal(execution.phase)),
        Event::Grow { emitted, reduce } => {
            if execution.shards_total != 1 || execution.held != 0 {
                return Err(Rejection::Grown(execution.shards_total));
            }
            let held = u32::from(reduce);
            Ok(Execution { shards_total: 1 + emitted + held, held, ..*execution })
        }
        Event::Cancel => {
            let cancelled = execution.shards_total - execution.succeeded - execution.failed;
            Ok(Execution { phase: Phase::Cancelled, cancelled, held: 0, ..*execution })
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
    fn a_map_grows_once_and_reduces_when_all_others_ended_well() {
        let map = apply(&Execution::new(1), Event::Grow { emitted: 2, reduce: true }).unwrap();
        assert_eq!((map.shards_total, map.held), (4, 1));
        assert_eq!(apply(&map, Event::Grow { emitted: 2, reduce: true }), Err(Rejection::Grown(4)));
        let map = apply(&map, Event::Settled { succeeded: 2, failed: 0 }).unwrap();
        assert_eq!(
            apply(&map, Event::Settled { succeeded: 2, failed: 0 }),
            Err(Rejection::TooMany { ended: 4, total: 3 })
        );
        let well = apply(&map, Event::Settled { succeeded: 1, failed: 0 }).unwrap();
        assert_eq!((well.phase, well.held, well.ended()), (Phase::Running, 0, 3));
        assert_eq!(apply(&well, Event::Settled { succeeded: 1, failed: 0 }).unwrap().phase, Phase::Success);
        let badly = apply(&map, Event::Settled { succeeded: 0, failed: 1 }).unwrap();
        assert_eq!((badly.phase, badly.cancelled, badly.ended()), (Phase::Failed, 1, 4));
        let again = apply(&badly, Event::Reopen { shards: 1 }).unwrap();
        assert_eq!(again, map, "the reducing shard waits again for the one that is sent back");
        let none = apply(&Execution::new(1), Event::Grow { emitted: 0, reduce: false }).unwrap();
        assert_eq!(apply(&none, Event::Settled { succeeded: 1, failed: 0 }).unwrap().phase, Phase::Success);
    }

    #[test]
    fn a_cancelled_one_takes_nothing_more() {
        let e = apply(&Execution::new(3), Event::Settled { succeeded: 1, failed: 0 }).unwrap();
        let e = apply(&e, Event::Cancel).unwrap();
        assert_eq!((e.phase, e.cancelled, e.ended()), (Phase::Cancelled, 2, 3));
        assert!(apply(&e, Event::Settled { succeeded: 1, failed: 0 }).is_err());
    }

    #[test]
    fn a_failed_one_runs_again_with_the_shards_that_are_sent_back() {
        let e = apply(&Execution::new(3), Event::Settled { succeeded: 1, failed: 2 }).unwrap();
        assert_eq!(apply(&e, Event::Reopen { shards: 3 }), Err(Rejection::NotFailed { asked: 3, failed: 2 }));
        assert!(apply(&e, Event::Reopen { shards: 0 }).is_err());
        let e = apply(&e, Event::Reopen { shards: 1 }).unwrap();
        assert_eq!((e.phase, e.succeeded, e.failed), (Phase::Running, 1, 1));
        // The other one, while the first runs.
        let e = apply(&e, Event::Reopen { shards: 1 }).unwrap();
        let e = apply(&e, Event::Settled { succeeded: 2, failed: 0 }).unwrap();
        assert_eq!((e.phase, e.failed), (Phase::Success, 0));
        assert_eq!(apply(&e, Event::Reopen { shards: 1 }), Err(Rejection::Terminal(Phase::Success)));
    }
}
