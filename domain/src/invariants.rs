//! The invariants, each once, as predicates. Used by the tests, the simulator, the oracle of the load tests, and as checks in
//! the running program (a panic in debug builds; in release the caller counts them as a metric).

use crate::shard::{Checkpoint, Phase, Shard};
use std::fmt;

/// The names that the documentation, the metrics and the reports use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InvariantId {
    /// One execution per (job, fire key), whoever leads.
    F1,
    /// Every nominal instant of an enabled job has exactly one recorded decision.
    F2,
    /// A shard's result is recorded once.
    S1,
    /// A terminal state never changes.
    S2,
    /// The attempt number of accepted writes never falls.
    S3,
    /// A checkpoint only moves forward, and never skips.
    S4,
    /// An execution's shards cover the job's data exactly.
    S5,
    /// At any time at most one epoch's writes are accepted.
    L1,
    /// A leader stops acting before its trust window ends.
    L2,
    /// A delivery is acked only after what it caused is committed.
    A1,
    /// The overlap policy is never exceeded, cluster-wide.
    O1,
    /// Once faults stop, every shard becomes terminal in bounded time.
    P1,
}

/// A broken invariant, with what was seen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant {id} is broken: {seen}")]
pub struct Violation {
    /// Which.
    pub id: InvariantId,
    /// What was seen.
    pub seen: String,
}

impl fmt::Display for InvariantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

fn broken<T>(id: InvariantId, seen: String) -> Result<T, Violation> {
    Err(Violation { id, seen })
}

/// S2, S3, S4 and the shape of a shard, over one accepted transition.
///
/// # Errors
/// The first invariant that the step breaks.
pub fn check_shard_step(before: &Shard, after: &Shard) -> Result<(), Violation> {
    if before.phase.is_terminal() && before != after {
        return broken(InvariantId::S2, format!("{:?} became {:?}", before.phase, after.phase));
    }
    if after.attempt < before.attempt {
        return broken(InvariantId::S3, format!("attempt {} became {}", before.attempt, after.attempt));
    }
    if let (Some(Checkpoint::Number(a)), Some(Checkpoint::Number(b))) = (&before.checkpoint, &after.checkpoint)
        && b < a
    {
        return broken(InvariantId::S4, format!("checkpoint {a} became {b}"));
    }
    if before.checkpoint.is_some() && after.checkpoint.is_none() {
        return broken(InvariantId::S4, "a checkpoint was forgotten".into());
    }
    if (after.phase == Phase::Running) != after.owner.is_some() {
        return broken(InvariantId::S1, format!("{:?} with owner {:?}", after.phase, after.owner));
    }
    Ok(())
}

/// What the oracle counts in one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Shards that the execution must have.
    pub shards_total: u64,
    /// Shards with a terminal state.
    pub terminal: u64,
    /// Result rows.
    pub results: u64,
    /// Shards with more than one result row or more than one counted success.
    pub recorded_twice: u64,
    /// What the execution's own counters add up to.
    pub counted: u64,
}

/// S1 and P1 over a finished execution.
///
/// # Errors
/// The first invariant that the counts break.
pub fn check_tally(tally: &Tally) -> Result<(), Violation> {
    if tally.recorded_twice > 0 {
        return broken(InvariantId::S1, format!("{} shards are recorded twice", tally.recorded_twice));
    }
    if tally.counted > tally.terminal {
        return broken(InvariantId::S1, format!("{} counted, {} ended", tally.counted, tally.terminal));
    }
    if tally.terminal < tally.shards_total {
        return broken(InvariantId::P1, format!("{} of {} shards ended", tally.terminal, tally.shards_total));
    }
    Ok(())
}
