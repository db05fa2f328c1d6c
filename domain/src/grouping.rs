//! How many tiny shards travel in one message.
//!
//! A message costs the broker, the leader and a worker some tens of microseconds each, which is more than a tiny shard takes. A few of
//! them together cost as much as one. What must not suffer: slots that find nothing to do because one worker holds what many could
//! run, a worker that holds more time's worth of work than anybody expects, and small jobs beside the large one. So the size follows
//! from how long the execution's last shards took, and from how many are left.

use crate::limits::GROUP_MAX;

/// What one worker gets through in this time is in one message at most: nobody misses what waits there.
const MESSAGE_MS: f64 = 20.0;
/// Messages that are left for each consumer at least, so that the end of an execution is not one worker's alone.
const MESSAGES_PER_CONSUMER: u32 = 8;
/// Shards that must be left for it to be worth a look.
pub const WORTH_A_LOOK: u32 = 512;
/// A look sooner than this after the last one says too little.
const LOOK_MS: u64 = 250;

/// How fast the shards of an execution end, as its counters in the ledger show it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EndRate {
    per_second: Option<f64>,
}

impl EndRate {
    /// Takes in that so many shards ended within a time. False: the time was too short to say anything.
    pub fn observe(&mut self, ended: u32, elapsed_ms: u64) -> bool {
        if elapsed_ms < LOOK_MS {
            return false;
        }
        let now = f64::from(ended) * 1_000.0 / elapsed_ms as f64;
        // Slower counts at once, faster bit by bit: work that turns long must not wait in large messages.
        self.per_second = Some(match self.per_second {
            Some(before) if now > before => before.midpoint(now),
            _ => now,
        });
        true
    }
}

/// Shards for each message, 1 to [`GROUP_MAX`].
///
/// The rate says at least how quick a worker is with these shards, whatever else it does meanwhile: an estimate that is too low makes
/// messages too small, never too large. `limit`: the job's own. `left`: shards not handed out yet. `consumers`: of the tier's queue.
#[must_use]
pub fn size(rate: EndRate, limit: Option<u32>, left: u32, consumers: u32) -> u32 {
    let Some(per_second) = rate.per_second else { return 1 };
    let consumers = consumers.max(1);
    let quick = (per_second / f64::from(consumers) * MESSAGE_MS / 1_000.0) as u32;
    let fair = left / consumers.saturating_mul(MESSAGES_PER_CONSUMER);
    let most = quick.min(fair).min(limit.unwrap_or(GROUP_MAX)).clamp(1, GROUP_MAX);
    // A power of two: what changes seldom is counted more exactly by those who read it off the queue.
    if limit == Some(most) { most } else { 1 << most.ilog2() }
}

/// Cuts shards `from..to` into runs of `size`, in their order: the first shard of each, and how many.
pub fn runs(from: u32, to: u32, size: u32) -> impl Iterator<Item = (u32, u32)> {
    let size = size.clamp(1, GROUP_MAX);
    (from..to).step_by(size as usize).map(move |first| (first, size.min(to - first)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rate(per_second: u32) -> EndRate {
        let mut rate = EndRate::default();
        assert!(rate.observe(per_second, 1_000));
        rate
    }

    #[test]
    fn tiny_shards_travel_together_and_others_alone() {
        assert_eq!(size(rate(12_000), None, 1_000_000, 3), 64);
        assert_eq!(size(rate(2_500), None, 1_000_000, 3), 16);
        // Shards of a tenth of a second on three workers of eight slots.
        assert_eq!(size(rate(240), None, 1_000_000, 3), 1);
    }

    #[test]
    fn nothing_is_guessed() {
        assert_eq!(size(EndRate::default(), None, 1_000_000, 3), 1);
        let mut rate = EndRate::default();
        assert!(!rate.observe(10_000, LOOK_MS - 1));
        assert_eq!(rate, EndRate::default());
    }

    #[test]
    fn what_turns_long_is_noticed_at_once_and_what_turns_quick_bit_by_bit() {
        let mut changing = rate(12_000);
        changing.observe(100, 1_000);
        assert_eq!(size(changing, None, 1_000_000, 3), 1);
        changing.observe(12_000, 1_000);
        assert_eq!(size(changing, None, 1_000_000, 3), 32);
    }

    #[test]
    fn the_end_of_an_execution_is_for_everybody() {
        assert_eq!(size(rate(100_000), None, 3 * 8 * 8, 3), 8);
        assert_eq!(size(rate(100_000), None, 10, 3), 1);
    }

    #[test]
    fn the_job_has_the_last_word() {
        assert_eq!(size(rate(100_000), Some(1), 1_000_000, 3), 1);
        assert_eq!(size(rate(100_000), Some(10), 1_000_000, 3), 10);
        assert_eq!(size(rate(600), Some(10), 1_000_000, 3), 4);
    }

    proptest! {
        #[test]
        fn the_size_keeps_its_bounds(per_second: u32, limit in prop::option::of(1u32..=64), left: u32, consumers: u32) {
            let size = size(rate(per_second), limit, left, consumers);
            prop_assert!((1..=limit.unwrap_or(GROUP_MAX)).contains(&size));
            prop_assert!(size == 1 || u64::from(size) * u64::from(consumers.max(1)) <= u64::from(left));
        }

        #[test]
        fn s5_runs_cover_every_shard_once_in_order(from in 0u32..1_000, length in 0u32..3_000, size in 0u32..100) {
            let covered: Vec<u32> = runs(from, from + length, size).flat_map(|(first, count)| first..first + count).collect();
            prop_assert_eq!(covered, (from..from + length).collect::<Vec<_>>());
            prop_assert!(runs(from, from + length, size).all(|(_, count)| (1..=size.clamp(1, GROUP_MAX)).contains(&count)));
        }
    }
}
