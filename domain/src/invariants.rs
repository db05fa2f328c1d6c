//! The invariants, each once, as predicates. Used by the tests, the simulator, the oracle of the load tests, and as checks in
//! the running program (a panic in debug builds; in release the caller counts them as a metric).

use crate::ids::{Epoch, Incarnation};
use crate::job::OverlapPolicy;
use crate::shard::{Checkpoint, Event, Phase, Shard};
use std::collections::BTreeMap;
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

/// The invariants of one accepted event: [`check_reopened`] for a person's reopening, [`check_shard_step`] for everything else.
///
/// # Errors
/// The first invariant that the step breaks.
pub fn check_event(before: &Shard, event: &Event, after: &Shard) -> Result<(), Violation> {
    match event {
        Event::Reopen { .. } => check_reopened(before, after),
        _ => check_shard_step(before, after),
    }
}

/// S2 to S4 over a reopening, the one step out of a terminal phase (docs/decisions/0025): only what failed is reopened, and to
/// everything else it is a new attempt like any other. What ended well or was cancelled never changes.
///
/// # Errors
/// The first invariant that the step breaks.
pub fn check_reopened(before: &Shard, after: &Shard) -> Result<(), Violation> {
    if before.phase != Phase::Failed || after.phase != Phase::Pending {
        return broken(InvariantId::S2, format!("{:?} was reopened as {:?}", before.phase, after.phase));
    }
    if after.attempt <= before.attempt {
        return broken(InvariantId::S3, format!("attempt {} was reopened as {}", before.attempt, after.attempt));
    }
    if after.checkpoint != before.checkpoint {
        return broken(InvariantId::S4, "a reopening changed the checkpoint".into());
    }
    Ok(())
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

/// S3 over a write that the ledger accepted: it named the attempt that the ledger was at, and none before it.
///
/// # Errors
/// A late attempt's write was accepted.
pub fn check_accepted(named: u32, before: &Shard) -> Result<(), Violation> {
    if named == before.attempt {
        return Ok(());
    }
    broken(InvariantId::S3, format!("a write of attempt {named} was accepted at attempt {}", before.attempt))
}

/// L1 over a leader's write that the ledger accepted.
///
/// # Errors
/// The write came under another epoch than the ledger's.
pub fn check_epoch(writer: Epoch, current: Epoch) -> Result<(), Violation> {
    if writer == current {
        return Ok(());
    }
    broken(InvariantId::L1, format!("a write of epoch {writer} was accepted in epoch {current}"))
}

/// F1 over one fire key of one job.
///
/// # Errors
/// It has more than one execution.
pub fn check_fire_key(fire_key: &str, executions: usize) -> Result<(), Violation> {
    if executions <= 1 {
        return Ok(());
    }
    broken(InvariantId::F1, format!("{executions} executions under the fire key {fire_key}"))
}

/// F2 over the instants that a schedule had, against the number of decisions at each instant.
///
/// # Errors
/// An instant has no decision or more than one.
pub fn check_decisions(instants: &[i64], decisions: &BTreeMap<i64, usize>) -> Result<(), Violation> {
    for instant in instants {
        let count = decisions.get(instant).copied().unwrap_or(0);
        if count != 1 {
            return broken(InvariantId::F2, format!("the instant {instant} has {count} decisions"));
        }
    }
    Ok(())
}

/// S1 over one shard's result rows.
///
/// # Errors
/// There is more than one.
pub fn check_results(results: usize) -> Result<(), Violation> {
    if results <= 1 {
        return Ok(());
    }
    broken(InvariantId::S1, format!("a shard has {results} results"))
}

/// O1 over the executions of one job that run at the same time.
///
/// # Errors
/// More of them run than the policy allows.
pub fn check_overlap(policy: OverlapPolicy, active: usize) -> Result<(), Violation> {
    match policy {
        OverlapPolicy::Skip | OverlapPolicy::Queue { .. } | OverlapPolicy::CancelRunning if active > 1 => {
            broken(InvariantId::O1, format!("{active} executions run, and the policy is {}", policy.word()))
        }
        OverlapPolicy::Skip | OverlapPolicy::Queue { .. } | OverlapPolicy::CancelRunning | OverlapPolicy::Allow => {
            Ok(())
        }
    }
}

/// A1 over the ack of a delivery, on the shard as the ledger holds it at that moment. `past_horizon`: the attempt has run so long
/// that its worker's heartbeat vouches for it instead of the delivery.
///
/// # Errors
/// The ledger does not know yet what became of the delivery: a crash now would leave nobody to deliver it again.
pub fn check_ack(shard: &Shard, attempt: u32, acker: Incarnation, past_horizon: bool) -> Result<(), Violation> {
    let open = match shard.phase {
        Phase::Pending => true,
        Phase::Running => shard.owner == Some(acker) && !past_horizon,
        Phase::Success | Phase::Failed | Phase::Cancelled => false,
    };
    if open && shard.attempt == attempt {
        return broken(InvariantId::A1, format!("attempt {attempt} was acked while it was {}", shard.phase.word()));
    }
    Ok(())
}

/// L2 over an act of a leader, where the lease store kept its memory: whoever acts holds the lease.
///
/// # Errors
/// It acts although its lease has ended.
pub fn check_trust(now_ms: i64, lease_ends_ms: Option<i64>) -> Result<(), Violation> {
    match lease_ends_ms {
        Some(ends_ms) if now_ms < ends_ms => Ok(()),
        Some(ends_ms) => broken(
            InvariantId::L2,
            format!("a leader acts {} ms after its lease's end", now_ms.saturating_sub(ends_ms)),
        ),
        None => broken(InvariantId::L2, "a leader acts while another holds the lease".into()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn an_ack_needs_a_ledger_that_knows() {
        let (me, other) = (Incarnation(Uuid::from_u128(1)), Incarnation(Uuid::from_u128(2)));
        let pending = Shard::new();
        let running = Shard { phase: Phase::Running, owner: Some(me), ..Shard::new() };
        let ended = Shard { phase: Phase::Success, ..Shard::new() };
        assert_eq!(check_ack(&pending, 1, me, false).unwrap_err().id, InvariantId::A1);
        assert_eq!(check_ack(&running, 1, me, false).unwrap_err().id, InvariantId::A1);
        assert!(check_ack(&running, 1, me, true).is_ok());
        assert!(check_ack(&running, 1, other, false).is_ok(), "a twin that is refused");
        assert!(check_ack(&ended, 1, me, false).is_ok());
        assert!(check_ack(&Shard { attempt: 2, ..Shard::new() }, 1, me, false).is_ok(), "it has moved on");
    }

    #[test]
    fn a_missing_and_a_double_decision_are_both_seen() {
        let decisions = BTreeMap::from([(10, 1), (20, 2)]);
        assert!(check_decisions(&[10], &decisions).is_ok());
        assert_eq!(check_decisions(&[10, 20], &decisions).unwrap_err().id, InvariantId::F2);
        assert_eq!(check_decisions(&[30], &decisions).unwrap_err().id, InvariantId::F2);
    }

    #[test]
    fn only_what_failed_is_reopened() {
        let at = |phase, attempt| Shard { phase, attempt, checkpoint: Some(Checkpoint::Number(3)), ..Shard::new() };
        let failed = at(Phase::Failed, 3);
        assert!(check_reopened(&failed, &at(Phase::Pending, 4)).is_ok());
        assert!(check_shard_step(&failed, &at(Phase::Pending, 4)).is_err(), "no other event may do it");
        for (after, id) in [
            (at(Phase::Success, 4), InvariantId::S2),
            (at(Phase::Pending, 3), InvariantId::S3),
            (Shard { checkpoint: None, ..at(Phase::Pending, 4) }, InvariantId::S4),
        ] {
            assert_eq!(check_reopened(&failed, &after).unwrap_err().id, id);
        }
        assert_eq!(check_reopened(&at(Phase::Success, 1), &at(Phase::Pending, 2)).unwrap_err().id, InvariantId::S2);
    }
}
