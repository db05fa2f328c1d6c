//! Whether a worker lives, by what the presence store and the observer's own clock say. Two hosts' clocks are never compared.

use crate::ids::Incarnation;
use crate::limits::LOSS_CONFIRM_MS;
use std::collections::{BTreeMap, BTreeSet};

/// What the presence store says of an incarnation, by its own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sighting {
    /// It has renewed this long ago.
    Beat {
        /// Milliseconds since, by the store's clock.
        age_ms: i64,
    },
    /// The store knows nothing of it: it never was there, it left, or the store lost its memory.
    Absent,
}

/// The verdict on one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It beats.
    Alive,
    /// It may be gone; not long enough to say.
    Suspect,
    /// It is gone: its shards may be taken.
    Lost,
}

/// The observer's memory of who has been absent since when, and whose beat has been too old since when.
///
/// A store that was flushed forgets everybody at once; they get the whole lost-after time to show up again, instead of being
/// declared lost all together. A store whose clock is put forward makes every beat too old at once; who lives has until
/// [`confirm_ms`] has passed to beat again, so that a loss is seen within the lost-after time, that, and the sweeps
/// that notice the one and the other.
///
/// The limit of it: a step that is larger than the lost-after time, and at which a worker's next beat is further away than
/// [`confirm_ms`] (beats come every 5 s), still takes its shards from it. That costs a try, and no record is made twice, since the
/// new attempt fences the old one.
#[derive(Clone, Debug, Default)]
pub struct Observer {
    absent_since_ms: BTreeMap<Incarnation, i64>,
    stale_since_ms: BTreeMap<Incarnation, i64>,
}

/// How long a beat must have been too old, by the observer's own clock, until its worker is lost.
#[must_use]
pub fn confirm_ms(lost_after_ms: i64) -> i64 {
    (lost_after_ms / 3).min(LOSS_CONFIRM_MS)
}

impl Observer {
    /// Takes in one sighting. `now_ms` is the observer's own monotonic clock.
    pub fn judge(&mut self, who: Incarnation, sighting: Sighting, lost_after_ms: i64, now_ms: i64) -> Liveness {
        match sighting {
            Sighting::Beat { age_ms } => {
                self.absent_since_ms.remove(&who);
                if age_ms <= lost_after_ms {
                    self.stale_since_ms.remove(&who);
                    return Liveness::Alive;
                }
                let since = *self.stale_since_ms.entry(who).or_insert(now_ms);
                if now_ms - since >= confirm_ms(lost_after_ms) { Liveness::Lost } else { Liveness::Suspect }
            }
            Sighting::Absent => {
                let since = *self.absent_since_ms.entry(who).or_insert(now_ms);
                if now_ms - since > lost_after_ms { Liveness::Lost } else { Liveness::Suspect }
            }
        }
    }

    /// In how many milliseconds the verdict on somebody can change at the earliest, if nothing is heard of them until then. Called
    /// after [`judge`](Self::judge) with the same sighting; `None` for who is lost. Who looks again then sees a loss within the
    /// lost-after time and [`confirm_ms`], whatever the rhythm of the other looks is.
    #[must_use]
    pub fn next_look_ms(&self, who: Incarnation, sighting: Sighting, lost_after_ms: i64, now_ms: i64) -> Option<i64> {
        let left = match sighting {
            Sighting::Beat { age_ms } if age_ms <= lost_after_ms => lost_after_ms - age_ms + 1,
            Sighting::Beat { .. } => {
                confirm_ms(lost_after_ms) - (now_ms - self.stale_since_ms.get(&who).copied().unwrap_or(now_ms))
            }
            Sighting::Absent => {
                lost_after_ms - (now_ms - self.absent_since_ms.get(&who).copied().unwrap_or(now_ms)) + 1
            }
        };
        (left > 0).then_some(left)
    }

    /// Forgets everybody who owns nothing any more; bounds the memory.
    pub fn retain(&mut self, owners: &[Incarnation]) {
        self.absent_since_ms.retain(|who, _| owners.contains(who));
        self.stale_since_ms.retain(|who, _| owners.contains(who));
    }
}

/// How old a beat is where workers beat one store, and another where they can't reach the first.
///
/// The younger of two beats counts. But a worker that beats the first store leaves an old beat in the second, from the last time
/// when it had to go there, and the first may be unreadable or have lost its memory just now: so an old beat in the second says
/// that a worker is gone only of one that this observer has seen beat there, and not in the first since. Of all others it says
/// nothing, and they have the time that somebody unknown has.
#[derive(Clone, Debug, Default)]
pub struct TwoStores {
    in_second: BTreeSet<Incarnation>,
}

impl TwoStores {
    /// The age of a worker's last beat, out of its ages in the first and in the second store; `None` if nothing can be said.
    pub fn age(
        &mut self,
        who: Incarnation,
        first: Option<i64>,
        second: Option<i64>,
        lost_after_ms: i64,
    ) -> Option<i64> {
        match (first, second) {
            (Some(first), second) if second.is_none_or(|second| first <= second) => {
                self.in_second.remove(&who);
                Some(first)
            }
            (_, Some(second)) if second <= lost_after_ms => {
                self.in_second.insert(who);
                Some(second)
            }
            (_, Some(second)) if self.in_second.contains(&who) => Some(second),
            (first, _) => first,
        }
    }

    /// Forgets everybody who is in no store any more; bounds the memory.
    pub fn retain(&mut self, known: impl Fn(&Incarnation) -> bool) {
        self.in_second.retain(known);
    }
}

/// When a worker that can't renew must stop its handlers: at two thirds of the lost-after time since the start of its last
/// successful renewal, so that it has stopped before anybody takes its shards.
#[must_use]
pub fn must_fence(since_last_renewal_ms: i64, lost_after_ms: i64) -> bool {
    since_last_renewal_ms >= lost_after_ms * 2 / 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flushed_store_does_not_kill_everybody() {
        let who = Incarnation(uuid::Uuid::from_u128(1));
        let mut observer = Observer::default();
        assert_eq!(observer.judge(who, Sighting::Beat { age_ms: 4_000 }, 15_000, 0), Liveness::Alive);
        assert_eq!(observer.judge(who, Sighting::Absent, 15_000, 1_000), Liveness::Suspect);
        assert_eq!(observer.judge(who, Sighting::Absent, 15_000, 16_000), Liveness::Suspect);
        assert_eq!(observer.judge(who, Sighting::Beat { age_ms: 0 }, 15_000, 16_500), Liveness::Alive);
        assert_eq!(observer.judge(who, Sighting::Absent, 15_000, 20_000), Liveness::Suspect, "counted afresh");
        assert_eq!(observer.judge(who, Sighting::Absent, 15_000, 35_001), Liveness::Lost);
    }

    #[test]
    fn who_looks_when_told_to_sees_a_loss_as_soon_as_it_can_be_seen() {
        let who = Incarnation(uuid::Uuid::from_u128(1));
        for (heard, gone_after) in [(true, 15_001 + confirm_ms(15_000)), (false, 15_001)] {
            let (mut observer, mut now, mut looks) = (Observer::default(), 0, 0);
            let sighting = |now| if heard { Sighting::Beat { age_ms: now } } else { Sighting::Absent };
            while observer.judge(who, sighting(now), 15_000, now) != Liveness::Lost {
                now += observer.next_look_ms(who, sighting(now), 15_000, now).expect("not lost yet");
                looks += 1;
            }
            assert_eq!((now, looks <= 2), (gone_after, true));
            assert_eq!(observer.next_look_ms(who, sighting(now), 15_000, now), None);
        }
    }

    #[test]
    fn a_beat_that_stays_too_old_is_lost() {
        let mut observer = Observer::default();
        let who = Incarnation(uuid::Uuid::from_u128(1));
        let mut old = |age_ms, now_ms| observer.judge(who, Sighting::Beat { age_ms }, 15_000, now_ms);
        assert_eq!(old(15_000, 0), Liveness::Alive);
        assert_eq!(old(15_001, 100), Liveness::Suspect);
        assert_eq!(old(15_900, 999), Liveness::Suspect);
        assert_eq!(old(15_901, 1_000), Liveness::Lost);
        assert_eq!((confirm_ms(900), confirm_ms(15_000)), (300, 900), "never more than a third of lost-after");
    }

    #[test]
    fn a_step_of_the_stores_clock_does_not_kill_who_beats_again() {
        let mut observer = Observer::default();
        let [lives, is_gone] = [1, 2].map(|n| Incarnation(uuid::Uuid::from_u128(n)));
        for who in [lives, is_gone] {
            assert_eq!(observer.judge(who, Sighting::Beat { age_ms: 2_000 }, 15_000, 0), Liveness::Alive);
            // An hour forward, between two sweeps.
            assert_eq!(observer.judge(who, Sighting::Beat { age_ms: 3_602_500 }, 15_000, 500), Liveness::Suspect);
        }
        assert_eq!(observer.judge(lives, Sighting::Beat { age_ms: 100 }, 15_000, 1_900), Liveness::Alive);
        assert_eq!(observer.judge(is_gone, Sighting::Beat { age_ms: 3_604_000 }, 15_000, 2_000), Liveness::Lost);
        assert_eq!(
            observer.judge(lives, Sighting::Beat { age_ms: 3_600_200 }, 15_000, 2_000),
            Liveness::Suspect,
            "afresh"
        );
        observer.retain(&[]);
        assert_eq!(observer.judge(is_gone, Sighting::Beat { age_ms: 3_604_500 }, 15_000, 2_500), Liveness::Suspect);
    }

    #[test]
    fn the_younger_of_two_beats_counts() {
        let who = Incarnation(uuid::Uuid::from_u128(1));
        let mut stores = TwoStores::default();
        let mut age = |first, second| stores.age(who, first, second, 15_000);
        assert_eq!(age(None, None), None);
        assert_eq!(age(Some(4_000), None), Some(4_000));
        assert_eq!(age(Some(60_000), Some(3_000)), Some(3_000), "it alone is cut off from the first");
        assert_eq!(age(None, Some(2_000)), Some(2_000));
        assert_eq!(age(None, Some(15_001)), Some(15_001), "it was seen there, and beats no more");
        assert_eq!(age(Some(1_000), Some(20_000)), Some(1_000), "it is back at the first");
        assert_eq!(age(None, Some(25_000)), None, "and the first loses its memory: the old beat says nothing");
    }

    #[test]
    fn an_old_beat_in_the_second_store_loses_nobody() {
        let who = Incarnation(uuid::Uuid::from_u128(1));
        let (mut stores, mut observer) = (TwoStores::default(), Observer::default());
        let mut judge = |first, second, now_ms| {
            let sighting =
                stores.age(who, first, second, 15_000).map_or(Sighting::Absent, |age_ms| Sighting::Beat { age_ms });
            observer.judge(who, sighting, 15_000, now_ms)
        };
        // An hour ago it had to beat the second store; now the first one goes away.
        assert_eq!(judge(Some(4_000), Some(3_600_000), 0), Liveness::Alive);
        assert_eq!(judge(None, Some(3_601_000), 1_000), Liveness::Suspect);
        assert_eq!(judge(None, Some(3_603_000), 3_000), Liveness::Suspect, "no loss after the short confirmation");
        assert_eq!(judge(None, Some(100), 4_000), Liveness::Alive);
        // From here on it is known to be there, and its silence counts as anybody's.
        assert_eq!(judge(None, Some(15_100), 19_000), Liveness::Suspect);
        assert_eq!(judge(None, Some(16_100), 20_000), Liveness::Lost);
    }

    #[test]
    fn fencing_comes_before_loss() {
        assert!(!must_fence(9_999, 15_000));
        assert!(must_fence(10_000, 15_000));
    }
}
