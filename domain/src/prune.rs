//! How many rows one statement of retention may delete, so that its locks never last long: learnt from the statements before it, since a row may hold
//! a number or 64 KiB, and no two servers are equally fast.

use crate::limits::{PRUNE_ROWS, PRUNE_ROWS_LEAST, PRUNE_STATEMENT_MS};

/// The pace of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrunePace {
    rows: u64,
}

impl Default for PrunePace {
    fn default() -> Self {
        PrunePace { rows: PRUNE_ROWS_LEAST }
    }
}

impl PrunePace {
    /// Rows that the next statement may delete: [`PRUNE_ROWS_LEAST`] to [`PRUNE_ROWS`].
    #[must_use]
    pub fn rows(self) -> u64 {
        self.rows
    }

    /// The pace after a statement that deleted so many rows in so long. It falls at once to what would have taken the wanted time, and
    /// grows to no more than twice; a statement that found fewer rows than it might have deleted is no reason to grow.
    #[must_use]
    pub fn after(self, gone: u64, took_us: u64) -> Self {
        if gone == 0 {
            return self;
        }
        let wanted = gone.saturating_mul(PRUNE_STATEMENT_MS * 1_000) / took_us.max(1);
        let most = if gone < self.rows { self.rows } else { self.rows.saturating_mul(2) };
        PrunePace { rows: wanted.min(most).clamp(PRUNE_ROWS_LEAST, PRUNE_ROWS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_rows_go_in_large_statements_and_large_rows_in_small_ones() {
        // 1 µs a row, then 170 µs a row.
        let mut pace = PrunePace::default();
        for _ in 0..10 {
            pace = pace.after(pace.rows(), pace.rows());
        }
        assert_eq!(pace.rows(), PRUNE_ROWS);
        let mut longest = 0;
        let mut pace = PrunePace::default();
        for _ in 0..10 {
            longest = longest.max(pace.rows() * 170);
            pace = pace.after(pace.rows(), pace.rows() * 170);
        }
        assert!(longest < 200_000, "even the first: {longest} µs");
        assert_eq!(pace.rows(), PRUNE_STATEMENT_MS * 1_000 / 170);
    }

    #[test]
    fn one_slow_statement_is_enough_and_few_rows_say_little() {
        let fast = PrunePace { rows: PRUNE_ROWS };
        assert_eq!(fast.after(PRUNE_ROWS, 1_000_000).rows(), PRUNE_ROWS / 20);
        assert_eq!(fast.after(1, 60_000_000).rows(), PRUNE_ROWS_LEAST, "it will have waited for somebody");
        assert_eq!(fast.after(0, 60_000_000), fast);
        let slow = PrunePace { rows: 300 };
        assert_eq!(slow.after(3, 10), slow, "fewer than it might have: nothing was learnt");
        assert_eq!(slow.after(300, 10).rows(), 600);
    }
}
