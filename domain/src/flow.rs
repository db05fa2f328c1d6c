//! How much a worker takes at a time: thousands of tiny shards, no hoard of long ones.

use crate::limits::PREFETCH_MAX;

/// The work that a worker keeps claimed ahead of its free slots, as time. Long enough to cover a group commit and its way there
/// and back, short enough that nobody misses what it holds.
const AHEAD_MS: f64 = 100.0;

/// How long shards take, smoothed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    mean_ms: Option<f64>,
}

impl Pace {
    /// Takes in one attempt's duration.
    pub fn observe(&mut self, duration_ms: f64) {
        self.mean_ms = Some(match self.mean_ms {
            // Slower counts at once, faster bit by bit: claiming too much of long work hurts more than too little of short work.
            Some(mean) if duration_ms > mean * 4.0 => duration_ms,
            Some(mean) => mean * 0.95 + duration_ms * 0.05,
            None => duration_ms,
        });
    }

    /// Shards to hold claimed beyond the free slots.
    #[must_use]
    pub fn ahead(&self, concurrency: usize) -> usize {
        let Some(mean) = self.mean_ms else { return 0 };
        let ahead = concurrency as f64 * AHEAD_MS / mean.max(0.01);
        (ahead as usize).min(usize::from(PREFETCH_MAX) / 2)
    }

    /// Deliveries to hold unacked: the slots, what is ahead of them, and as much again on its way.
    #[must_use]
    pub fn prefetch(&self, concurrency: usize) -> u16 {
        let wanted = concurrency + 2 * self.ahead(concurrency);
        u16::try_from(wanted).unwrap_or(PREFETCH_MAX).clamp(1, PREFETCH_MAX)
    }
}

/// Whether a wanted prefetch is far enough from the present one to be worth the change.
#[must_use]
pub fn worth_changing(present: u16, wanted: u16) -> bool {
    let (small, large) = (present.min(wanted), present.max(wanted));
    u32::from(large) >= 2 * u32::from(small)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_shards_are_taken_by_the_hundred_and_long_ones_one_by_one() {
        let mut tiny = Pace::default();
        assert_eq!((tiny.ahead(8), tiny.prefetch(8)), (0, 8), "nothing is known yet");
        tiny.observe(0.05);
        assert_eq!((tiny.ahead(8), tiny.prefetch(8)), (512, 1_024));
        let mut long = Pace::default();
        long.observe(60_000.0);
        assert_eq!((long.ahead(8), long.prefetch(8)), (0, 8));
    }

    #[test]
    fn work_that_turns_long_is_noticed_at_once() {
        let mut pace = Pace::default();
        pace.observe(0.1);
        pace.observe(30_000.0);
        assert_eq!(pace.ahead(8), 0);
    }

    #[test]
    fn small_changes_are_not_worth_it() {
        assert!(!worth_changing(100, 150));
        assert!(worth_changing(100, 200));
        assert!(worth_changing(200, 100));
    }
}
