//! Fair, windowed dispatch: how much to hand to the broker now, and of which executions.

use crate::ids::ExecutionId;
use crate::limits::{DISPATCH_QUANTUM, QUEUE_WINDOW_MAX, QUEUE_WINDOW_MIN};
use std::collections::BTreeMap;

/// An execution with shards that have not been handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The execution.
    pub execution: ExecutionId,
    /// The first shard that has not been handed out.
    pub next: u32,
    /// Shards of its plan.
    pub shards_total: u32,
}

/// Shards `from..to` of an execution, to be handed out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The execution.
    pub execution: ExecutionId,
    /// First shard.
    pub from: u32,
    /// One past the last.
    pub to: u32,
}

/// Shares `budget` shards among the executions of a tier in turns of a quantum, beginning after where the last call ended
/// (`turn`, updated). A job of a million shards can't make one of ten wait behind it.
pub fn pick(cursors: &mut [Cursor], turn: &mut usize, budget: u32) -> Vec<Pick> {
    let mut picks: Vec<Pick> = Vec::new();
    let mut pick_of: BTreeMap<ExecutionId, usize> = BTreeMap::new();
    let mut left = budget;
    let mut exhausted = 0;
    while left > 0 && exhausted < cursors.len() {
        let slot = *turn % cursors.len();
        *turn = slot + 1;
        let cursor = &mut cursors[slot];
        let take = (cursor.shards_total - cursor.next).min(DISPATCH_QUANTUM).min(left);
        if take == 0 {
            exhausted += 1;
            continue;
        }
        exhausted = 0;
        let (from, to) = (cursor.next, cursor.next + take);
        cursor.next = to;
        left -= take;
        // A later turn of the same execution goes on where its earlier one stopped: one pick for each execution.
        let at = *pick_of.entry(cursor.execution).or_insert(picks.len());
        match picks.get_mut(at) {
            Some(earlier) => earlier.to = to,
            None => picks.push(Pick { execution: cursor.execution, from, to }),
        }
    }
    // Published in this order: what is small need not stand behind what is large.
    picks.sort_by_key(|pick| pick.to - pick.from);
    picks
}

/// How fast a tier's queue drains, smoothed.
#[derive(Clone, Copy, Debug, Default)]
pub struct DrainRate {
    per_second: f64,
}

impl DrainRate {
    /// Takes in that `drained` messages left the queue in `elapsed_ms`.
    pub fn observe(&mut self, drained: u64, elapsed_ms: u64) {
        if elapsed_ms == 0 {
            return;
        }
        let now = drained as f64 * 1_000.0 / elapsed_ms as f64;
        // Up at once, down slowly: a starved consumer costs more than a queue that is a little too long.
        self.per_second = if now > self.per_second { now } else { self.per_second * 0.8 + now * 0.2 };
    }

    /// The smoothed rate, messages per second.
    #[must_use]
    pub fn per_second(&self) -> f64 {
        self.per_second
    }
}

/// How many ready messages the queue should hold: what it drains in half a second, and some for each consumer.
#[must_use]
pub fn window(rate: DrainRate, consumers: u32) -> u32 {
    let flow = (rate.per_second * 0.5) as u32;
    let floor = QUEUE_WINDOW_MIN.max(consumers.saturating_mul(4));
    flow.max(floor).min(QUEUE_WINDOW_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn cursor(n: u128, shards_total: u32) -> Cursor {
        Cursor { execution: ExecutionId(Uuid::from_u128(n)), next: 0, shards_total }
    }

    #[test]
    fn a_small_job_does_not_wait_behind_a_large_one() {
        let mut cursors = [cursor(1, 1_000_000), cursor(2, 10)];
        let picks = pick(&mut cursors, &mut 0, 100);
        let of = |n: u128| picks.iter().filter(|p| p.execution.0.as_u128() == n).map(|p| p.to - p.from).sum::<u32>();
        assert_eq!((of(1), of(2)), (90, 10));
        assert_eq!(picks[0].execution.0.as_u128(), 2, "and is published before it");
    }

    #[test]
    fn turns_go_on_where_they_stopped() {
        let mut cursors = [cursor(1, 1_000), cursor(2, 1_000)];
        let mut turn = 0;
        let first = pick(&mut cursors, &mut turn, DISPATCH_QUANTUM);
        let second = pick(&mut cursors, &mut turn, DISPATCH_QUANTUM);
        assert_eq!((first[0].execution.0.as_u128(), second[0].execution.0.as_u128()), (1, 2));
    }

    #[test]
    fn nothing_is_picked_twice_or_left_out() {
        let mut cursors = [cursor(1, 333), cursor(2, 10), cursor(3, 0)];
        let (mut turn, mut covered) = (0, 0);
        loop {
            let picks = pick(&mut cursors, &mut turn, 50);
            if picks.is_empty() {
                break;
            }
            covered += picks.iter().map(|p| p.to - p.from).sum::<u32>();
        }
        assert_eq!(covered, 343);
        assert!(pick(&mut [], &mut 0, 10).is_empty());
    }

    #[test]
    fn l_06_the_window_is_bounded_and_follows_the_drain() {
        let mut rate = DrainRate::default();
        assert_eq!(window(rate, 0), QUEUE_WINDOW_MIN);
        rate.observe(400, 100);
        assert_eq!(window(rate, 3), 2_000);
        rate.observe(1_000_000, 1);
        assert_eq!(window(rate, 3), QUEUE_WINDOW_MAX);
        for _ in 0..100 {
            rate.observe(0, 100);
        }
        assert_eq!(window(rate, 3), QUEUE_WINDOW_MIN);
    }
}
