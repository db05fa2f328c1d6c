//! Which running shards the leader takes from their owners: a snapshot in, a plan out.

use crate::ids::{AttemptRef, Incarnation};
use crate::liveness::Liveness;
use crate::shard::ReclaimReason;
use std::collections::BTreeMap;

/// A shard that the ledger holds as running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningShard {
    /// The attempt.
    pub attempt: AttemptRef,
    /// Who claimed it.
    pub owner: Incarnation,
    /// The attempt's limit; `None` for none.
    pub timeout_ms: Option<i64>,
}

/// One shard to take back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// The attempt that was seen.
    pub attempt: AttemptRef,
    /// Its owner then; the reclaim only applies while it still is.
    pub owner: Incarnation,
    /// Why.
    pub reason: ReclaimReason,
}

/// How long past its timeout an attempt may go on before its worker is held to have forgotten it. The worker itself cuts the
/// attempt at its timeout; this is the net below.
pub const HUNG_GRACE_MS: i64 = 30_000;

/// The leader's memory of when it first saw each running attempt, by its own monotonic clock.
#[derive(Clone, Debug, Default)]
pub struct FirstSeen(BTreeMap<AttemptRef, i64>);

/// What to take back now. Idempotent: applied twice, the second finds nothing, since the attempts have moved on.
pub fn reconcile(
    running: &[RunningShard],
    liveness: &BTreeMap<Incarnation, Liveness>,
    seen: &mut FirstSeen,
    now_ms: i64,
) -> Vec<Reclaim> {
    let mut still = BTreeMap::new();
    let mut plan = Vec::new();
    for shard in running {
        let first = seen.0.get(&shard.attempt).copied().unwrap_or(now_ms);
        still.insert(shard.attempt, first);
        let lost = liveness.get(&shard.owner) == Some(&Liveness::Lost);
        let hung = shard.timeout_ms.is_some_and(|t| now_ms.saturating_sub(first) > t.saturating_add(HUNG_GRACE_MS));
        let reason = match (lost, hung) {
            (true, _) => ReclaimReason::WorkerLost,
            (false, true) => ReclaimReason::Hung,
            (false, false) => continue,
        };
        plan.push(Reclaim { attempt: shard.attempt, owner: shard.owner, reason });
    }
    seen.0 = still;
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ExecutionId;
    use uuid::Uuid;

    fn shard(index: u32, owner: u128, timeout_ms: Option<i64>) -> RunningShard {
        let attempt = AttemptRef { execution: ExecutionId(Uuid::from_u128(9)), index, attempt: 1 };
        RunningShard { attempt, owner: Incarnation(Uuid::from_u128(owner)), timeout_ms }
    }

    #[test]
    fn t_03_only_the_lost_workers_shards_are_taken() {
        let running = [shard(0, 1, None), shard(1, 2, None), shard(2, 1, None)];
        let liveness = BTreeMap::from([(running[0].owner, Liveness::Lost), (running[1].owner, Liveness::Alive)]);
        let plan = reconcile(&running, &liveness, &mut FirstSeen::default(), 0);
        assert_eq!(plan.iter().map(|r| r.attempt.index).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn an_unknown_or_suspect_owner_keeps_its_shards() {
        let running = [shard(0, 1, None), shard(1, 2, None)];
        let liveness = BTreeMap::from([(running[0].owner, Liveness::Suspect)]);
        assert!(reconcile(&running, &liveness, &mut FirstSeen::default(), 0).is_empty());
    }

    #[test]
    fn a_hung_attempt_is_taken_after_timeout_and_grace_as_the_leader_saw_it() {
        let running = [shard(0, 1, Some(2_000))];
        let liveness = BTreeMap::from([(running[0].owner, Liveness::Alive)]);
        let mut seen = FirstSeen::default();
        assert!(reconcile(&running, &liveness, &mut seen, 100_000).is_empty(), "a new leader has just seen it");
        assert!(reconcile(&running, &liveness, &mut seen, 132_000).is_empty());
        assert_eq!(reconcile(&running, &liveness, &mut seen, 132_001)[0].reason, ReclaimReason::Hung);
    }
}
