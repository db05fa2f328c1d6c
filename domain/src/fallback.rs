//! When no scheduler is there: when a worker stands in for one, what it fires, and how often.
//!
//! A stand-in leads under an epoch of the ledger as any scheduler does, so that the hand-back doubles nothing: its lease may be
//! taken from it at any time, and with the next epoch its writes are refused.

use crate::firing::{DecisionKind, Intent};
use crate::units::{Span, rfc3339};
use std::collections::BTreeSet;

/// What the lease token of a stand-in begins with. No scheduler's may.
pub const STAND_IN_PREFIX: &str = "fallback:";

/// Whether the lease's holder only stands in, so that a scheduler may take the lease from it.
#[must_use]
pub fn is_stand_in(token: &str) -> bool {
    token.starts_with(STAND_IN_PREFIX)
}

/// What a stand-in does of a scheduler's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// The tiers whose jobs fire and whose shards are handed out. The instants of all others stay undecided until a scheduler
    /// leads again.
    pub tiers: BTreeSet<String>,
    /// The least time between two firings of a job; `None`: as its schedule says.
    pub at_most_every: Option<Span>,
}

impl Scope {
    /// Whether jobs and shards of this tier are looked after.
    #[must_use]
    pub fn covers(&self, tier: &str) -> bool {
        self.tiers.contains(tier)
    }

    /// Takes out of what is due what would come too soon after the last firing. What is taken out is recorded as coalesced, so
    /// that every instant has its decision (F2).
    #[must_use]
    pub fn thin_out(&self, intents: Vec<Intent>, last_fired_ms: Option<i64>) -> Vec<Intent> {
        let Some(every) = self.at_most_every else { return intents };
        let mut last = last_fired_ms;
        intents
            .into_iter()
            .map(|intent| match (&intent, last) {
                (Intent::Fire { nominal_ms }, Some(fired)) if nominal_ms.saturating_sub(fired) < every.as_ms() => {
                    let reason = format!(
                        "no scheduler leads, and a worker fires this job every {every} at most; it fired for {}",
                        rfc3339(fired)
                    );
                    Intent::Record { nominal_ms: *nominal_ms, kind: DecisionKind::Coalesced, reason }
                }
                (Intent::Fire { nominal_ms }, _) => {
                    last = Some(*nominal_ms);
                    intent
                }
                (Intent::Record { .. }, _) => intent,
            })
            .collect()
    }
}

/// Who holds the lease, as one look found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// A scheduler.
    ByScheduler,
    /// A worker that stands in for one.
    ByStandIn,
    /// Nobody.
    ByNobody,
    /// It could not be seen.
    Unknown,
}

impl Held {
    /// By the holder's token.
    #[must_use]
    pub fn by(holder: Option<&str>) -> Self {
        match holder {
            Some(token) if is_stand_in(token) => Held::ByStandIn,
            Some(_) => Held::ByScheduler,
            None => Held::ByNobody,
        }
    }
}

/// A worker's watch over the lease.
#[derive(Clone, Copy, Debug, Default)]
pub struct Vigil {
    vacant_since_ms: Option<i64>,
}

impl Vigil {
    /// Takes in one look; true if the worker is to stand for election now. `now_ms` is monotonic.
    ///
    /// A look that found nothing out says nothing: the time of the vacancy is counted afresh. Where another stand-in leads, the
    /// vacancy is known, and whoever stands ready takes over as soon as its lease ends.
    pub fn observe(&mut self, held: Held, after_ms: i64, now_ms: i64) -> bool {
        match held {
            Held::ByScheduler | Held::Unknown => {
                self.vacant_since_ms = None;
                false
            }
            Held::ByStandIn => true,
            Held::ByNobody => now_ms - *self.vacant_since_ms.get_or_insert(now_ms) >= after_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fire(seconds: i64) -> Intent {
        Intent::Fire { nominal_ms: seconds * 1_000 }
    }

    fn fired(intents: &[Intent]) -> Vec<i64> {
        intents.iter().filter(|i| matches!(i, Intent::Fire { .. })).map(|i| i.nominal_ms() / 1_000).collect()
    }

    #[test]
    fn a_lower_frequency_decides_every_instant() {
        let scope = Scope { tiers: BTreeSet::from(["core".to_owned()]), at_most_every: Some(Span::secs(10)) };
        let due = || (0..30).map(fire).collect::<Vec<_>>();
        let all = scope.thin_out(due(), None);
        assert_eq!((all.len(), fired(&all)), (30, vec![0, 10, 20]));
        let Intent::Record { kind, reason, .. } = &all[1] else { panic!("{:?}", all[1]) };
        assert_eq!(*kind, DecisionKind::Coalesced);
        assert!(reason.contains("every 10s at most") && reason.contains("1970-01-01T00:00:00Z"), "{reason}");
        assert_eq!(fired(&scope.thin_out(due(), Some(-3_000))), [7, 17, 27], "from the last firing on");
        let own = Scope { at_most_every: None, ..scope.clone() };
        assert_eq!(own.thin_out(due(), Some(0)), due());
        assert!(scope.covers("core") && !scope.covers("bulk"));
    }

    #[test]
    fn what_is_recorded_anyway_stays_and_is_no_firing() {
        let scope = Scope { tiers: BTreeSet::new(), at_most_every: Some(Span::secs(10)) };
        let skipped = Intent::Record { nominal_ms: 0, kind: DecisionKind::SkippedMisfire, reason: "missed".into() };
        assert_eq!(scope.thin_out(vec![skipped.clone(), fire(1)], None), [skipped, fire(1)]);
    }

    #[test]
    fn nobody_for_long_enough() {
        let mut vigil = Vigil::default();
        let mut at = |held, now_ms| vigil.observe(held, 15_000, now_ms);
        assert!(!at(Held::ByNobody, 0));
        assert!(!at(Held::ByNobody, 14_999));
        assert!(at(Held::ByNobody, 15_000));
        assert!(!at(Held::ByScheduler, 16_000));
        assert!(!at(Held::ByNobody, 17_000), "counted afresh");
        assert!(!at(Held::Unknown, 31_000));
        assert!(!at(Held::ByNobody, 33_000), "and after what could not be seen");
        assert!(at(Held::ByStandIn, 34_000), "another stands in: ready to follow it");
    }

    #[test]
    fn holders_are_told_apart() {
        assert_eq!(Held::by(Some("fallback:worker-1/0190")), Held::ByStandIn);
        assert_eq!(Held::by(Some("scheduler-1/0190")), Held::ByScheduler);
        assert_eq!(Held::by(None), Held::ByNobody);
    }
}
