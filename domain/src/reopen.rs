//! Whether failed shards of an execution may be sent back by a person (docs/decisions/0025).

use crate::execution::{self, Execution, Phase};
use crate::ids::ExecutionId;
use crate::job::OverlapPolicy;
use crate::shard;

/// Why nothing is sent back, in a sentence that says what to do instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such execution.
    #[error(
        "there is no execution {0}; it may be older than the retention keeps. 'shardcron executions list' shows them"
    )]
    NoSuchExecution(ExecutionId),
    /// Retention deletes it: some of its rows are gone already.
    #[error(
        "execution {0} is being deleted by the retention, and can't run again; fire the job again ('shardcron trigger JOB', with \
         --only-shards for a part). A longer 'retention.failed' leaves more time for a retry"
    )]
    Deleting(ExecutionId),
    /// It ended well, or was cancelled.
    #[error("{}", ended(.0, *.1))]
    Ended(ExecutionId, Phase),
    /// None of its shards has failed.
    #[error("no shard of execution {0} has failed")]
    NothingFailed(ExecutionId),
    /// Of the named shards, one has not failed.
    #[error("shard {index} has not failed ({}); only failed shards are run again, and nothing was changed", .found.map_or("there is no such shard", shard::Phase::word))]
    NotFailed {
        /// The first such shard.
        index: u32,
        /// Where it is; `None`: it does not exist.
        found: Option<shard::Phase>,
    },
    /// Another execution of the job runs.
    #[error("execution {by} of the job runs, and its overlap policy is {}; wait for its end, or cancel it", .policy.word())]
    Busy {
        /// That execution.
        by: ExecutionId,
        /// The policy.
        policy: OverlapPolicy,
    },
}

fn ended(id: &ExecutionId, phase: Phase) -> String {
    match phase {
        Phase::Cancelled => format!(
            "execution {id} was cancelled, which is final; fire the job again ('shardcron trigger JOB', with --only-shards for a part)"
        ),
        other => format!("execution {id} ended {}; there is nothing to run again", other.word()),
    }
}

/// What a retry by hand meets beside the execution's own counters.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// The job's policy of now.
    pub overlap: OverlapPolicy,
    /// Executions of the job that have not ended, this one left out.
    pub others: &'a [ExecutionId],
    /// Retention has begun to delete the execution.
    pub deleting: bool,
}

/// Whether some shards of an execution may be sent back.
///
/// # Errors
/// Why not.
pub fn decide(
    id: ExecutionId,
    execution: &Execution,
    Around { overlap, others, deleting }: Around<'_>,
) -> Result<(), Refused> {
    // However it ended: of what is half gone nothing may run.
    if deleting {
        return Err(Refused::Deleting(id));
    }
    match execution.phase {
        Phase::Success | Phase::Cancelled => return Err(Refused::Ended(id, execution.phase)),
        Phase::Running | Phase::Failed => {}
    }
    if execution::apply(execution, execution::Event::Reopen { shards: 1 }).is_err() {
        return Err(Refused::NothingFailed(id));
    }
    // What runs counts already (O1); what has ended would begin to.
    match others.first() {
        Some(by) if execution.phase.is_terminal() && overlap != OverlapPolicy::Allow => {
            Err(Refused::Busy { by: *by, policy: overlap })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::{Event, apply};

    #[test]
    fn overlap_and_the_end_of_an_execution_are_respected() {
        let id = |n| ExecutionId(uuid::Uuid::from_u128(n));
        let failed = apply(&Execution::new(2), Event::Settled { succeeded: 1, failed: 1 }).unwrap();
        let (skip, allow) = (OverlapPolicy::Skip, OverlapPolicy::Allow);
        fn around(overlap: OverlapPolicy, others: &[ExecutionId]) -> Around<'_> {
            Around { overlap, others, deleting: false }
        }
        assert_eq!(decide(id(1), &failed, around(skip, &[])), Ok(()));
        assert_eq!(decide(id(1), &failed, around(skip, &[id(2)])), Err(Refused::Busy { by: id(2), policy: skip }));
        assert_eq!(decide(id(1), &failed, around(allow, &[id(2)])), Ok(()));
        let gone = Around { deleting: true, ..around(allow, &[]) };
        assert_eq!(decide(id(1), &failed, gone), Err(Refused::Deleting(id(1))));
        // It runs: what fails meanwhile may go on without being anybody's second execution.
        let runs = apply(&Execution::new(3), Event::Settled { succeeded: 1, failed: 1 }).unwrap();
        assert_eq!(decide(id(1), &runs, around(skip, &[id(2)])), Ok(()));
        let well = apply(&Execution::new(1), Event::Settled { succeeded: 1, failed: 0 }).unwrap();
        assert_eq!(decide(id(1), &well, around(allow, &[])), Err(Refused::Ended(id(1), Phase::Success)));
        let cancelled = apply(&runs, Event::Cancel).unwrap();
        let refused = decide(id(1), &cancelled, around(allow, &[])).unwrap_err();
        assert!(refused.to_string().contains("--only-shards"), "{refused}");
        assert_eq!(decide(id(1), &Execution::new(1), around(skip, &[])), Err(Refused::NothingFailed(id(1))));
    }
}
