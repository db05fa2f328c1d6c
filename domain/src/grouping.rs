//! How many tiny shards travel in one message.
//!
//! A message costs the broker, the leader and a worker some tens of microseconds each, which is more than a tiny shard takes. A few of
//! them together cost as much as one. What must not suffer: slots that find nothing to do because one worker holds what many could
//! run, a worker that holds more time's worth of work than anybody expects, and small jobs beside the large one. So the size follows
//! from how long the execution's last shards took, and from how many are left.

use crate::limits::GROUP_MAX;

/// Work of one slot that a message holds, about.
const MESSAGE_MS: f64 = 20.0;
/// The same where shards are as slow as the slowest tenth of them.
const TAIL_MS: f64 = 60.0;
/// Durations from which something can be learnt.
pub const SAMPLE_MIN: usize = 16;
/// Durations that are looked at: the latest.
pub const SAMPLE_MAX: usize = 64;
/// Shards that must be left for it to be worth a look.
pub const WORTH_A_LOOK: u32 = 512;
/// Messages that are left for each consumer at least, so that the end of an execution is not one worker's alone. A consumer has eight
/// slots unless it is told otherwise.
const MESSAGES_PER_CONSUMER: u32 = 32;

/// Shards for each message, 1 to [`GROUP_MAX`].
///
/// `took_ms`: how long the latest shards of the execution took, in any order. `limit`: the job's own. `left`: shards not handed out
/// yet. `consumers`: of the tier's queue.
#[must_use]
pub fn size(took_ms: &[u64], limit: Option<u32>, left: u32, consumers: u32) -> u32 {
    if took_ms.len() < SAMPLE_MIN {
        return 1;
    }
    let mut sorted = took_ms.to_vec();
    sorted.sort_unstable();
    // Measured in whole milliseconds by two readings of a clock: 0 is anything below one.
    let mean = sorted.iter().sum::<u64>() as f64 / sorted.len() as f64 + 0.25;
    let slow = sorted[sorted.len() * 9 / 10] as f64 + 0.25;
    let by_time = (MESSAGE_MS / mean).min(TAIL_MS / slow) as u32;
    let by_left = left / MESSAGES_PER_CONSUMER.saturating_mul(consumers.max(1));
    let most = by_time.min(by_left).min(limit.unwrap_or(GROUP_MAX)).clamp(1, GROUP_MAX);
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

    #[test]
    fn tiny_shards_travel_together_and_others_alone() {
        assert_eq!(size(&[0; 64], None, 1_000_000, 3), 64);
        assert_eq!(size(&[1; 64], None, 1_000_000, 3), 16);
        assert_eq!(size(&[5; 64], None, 1_000_000, 3), 2);
        assert_eq!(size(&[50; 64], None, 1_000_000, 3), 1);
    }

    #[test]
    fn nothing_is_guessed() {
        assert_eq!(size(&[], None, 1_000_000, 3), 1);
        assert_eq!(size(&[0; SAMPLE_MIN - 1], None, 1_000_000, 3), 1);
    }

    #[test]
    fn a_slow_tenth_counts() {
        let mut took = [0; 64];
        took[..7].fill(400);
        assert_eq!(size(&took, None, 1_000_000, 3), 1);
        let mut hiccup = [0; 64];
        hiccup[0] = 20;
        assert!(size(&hiccup, None, 1_000_000, 3) >= 16, "one pause of the machine says little");
    }

    #[test]
    fn the_end_of_an_execution_is_for_everybody() {
        assert_eq!(size(&[0; 64], None, 3 * 32 * 8, 3), 8);
        assert_eq!(size(&[0; 64], None, 10, 3), 1);
    }

    #[test]
    fn the_job_has_the_last_word() {
        assert_eq!(size(&[0; 64], Some(1), 1_000_000, 3), 1);
        assert_eq!(size(&[0; 64], Some(10), 1_000_000, 3), 10);
        assert_eq!(size(&[5; 64], Some(10), 1_000_000, 3), 2);
    }

    proptest! {
        #[test]
        fn the_size_keeps_its_bounds(
            took in prop::collection::vec(0u64..100_000, 0..100), limit in prop::option::of(1u32..=64), left: u32, consumers: u32
        ) {
            let size = size(&took, limit, left, consumers);
            prop_assert!((1..=limit.unwrap_or(GROUP_MAX)).contains(&size));
            prop_assert!(size == 1 || u64::from(size) * 32 * u64::from(consumers.max(1)) <= u64::from(left));
        }

        #[test]
        fn s5_runs_cover_every_shard_once_in_order(from in 0u32..1_000, length in 0u32..3_000, size in 0u32..100) {
            let covered: Vec<u32> = runs(from, from + length, size).flat_map(|(first, count)| first..first + count).collect();
            prop_assert_eq!(covered, (from..from + length).collect::<Vec<_>>());
            prop_assert!(runs(from, from + length, size).all(|(_, count)| (1..=size.clamp(1, GROUP_MAX)).contains(&count)));
        }
    }
}
