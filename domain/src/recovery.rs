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
    /// How long it may go without progress; `None` for as long as it likes.
    pub stall_ms: Option<i64>,
    /// A number that changes with every progress.
    pub progress: u64,
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

/// How long past its timeout, or its stall timeout, an attempt may go on before its worker is held to have forgotten it. The worker
/// itself cuts the attempt; this is the net below.
pub const HUNG_GRACE_MS: i64 = 30_000;

/// The leader's memory of when it first saw each running attempt, and when it first saw its latest progress, by its own monotonic
/// clock.
#[derive(Clone, Debug, Default)]
pub struct FirstSeen(BTreeMap<AttemptRef, Seen>);

#[derive(Clone, Copy, Debug)]
struct Seen {
    first_ms: i64,
    progress: u64,
    moved_ms: i64,
}

impl Seen {
    fn again(mut self, shard: &RunningShard, now_ms: i64) -> Self {
        if self.progress != shard.progress {
            (self.progress, self.moved_ms) = (shard.progress, now_ms);
        }
        self
    }

    /// Why the attempt is to be taken from a worker that lives.
    fn fault(self, shard: &RunningShard, now_ms: i64) -> Option<ReclaimReason> {
        let past = |since_ms: i64, limit: Option<i64>| {
            limit.is_some_and(|limit| now_ms.saturating_sub(since_ms) > limit.saturating_add(HUNG_GRACE_MS))
        };
        if past(self.first_ms, shard.timeout_ms) {
            return Some(ReclaimReason::Hung);
        }
        past(self.moved_ms, shard.stall_ms).then_some(ReclaimReason::Stalled)
    }
}

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
        let new = Seen { first_ms: now_ms, progress: shard.progress, moved_ms: now_ms };
        let at = seen.0.get(&shard.attempt).map_or(new, |seen| seen.again(shard, now_ms));
        still.insert(shard.attempt, at);
        let lost = liveness.get(&shard.owner) == Some(&Liveness::Lost);
        let reason = if lost { Some(ReclaimReason::WorkerLost) } else { at.fault(shard, now_ms) };
        plan.extend(reason.map(|reason| Reclaim { attempt: shard.attempt, owner: shard.owner, reason }));
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
        RunningShard { attempt, owner: Incarnation(Uuid::from_u128(owner)), timeout_ms, stall_ms: None, progress: 0 }
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

    #[test]
    fn an_attempt_without_progress_is_taken_after_its_stall_timeout_and_the_grace() {
        let shard = RunningShard { stall_ms: Some(5_000), ..shard(0, 1, None) };
        let liveness = BTreeMap::from([(shard.owner, Liveness::Alive)]);
        let mut seen = FirstSeen::default();
        let mut look =
            |progress, now_ms| reconcile(&[RunningShard { progress, ..shard }], &liveness, &mut seen, now_ms);
        assert!(look(0, 0).is_empty());
        assert!(look(1, 34_000).is_empty(), "it moved");
        assert!(look(1, 69_000).is_empty());
        assert_eq!(look(1, 69_001)[0].reason, ReclaimReason::Stalled);
        assert!(look(2, 69_002).is_empty(), "seen to move before it was taken: counted afresh");
    }
}
