//! The ledger's clock, as far as this process knows it. When a retry may run is written by one process and compared by others; each of
//! them uses this time for it, so that hosts whose clocks differ agree.

use crate::ports::Ports;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// How far the ledger's clock is ahead of this process's, in milliseconds. Zero until it has been measured. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct LedgerTime(Arc<AtomicI64>);

const MEASURE_EVERY: Duration = Duration::from_secs(15);
/// An answer that took longer says too little about when it was given.
const ROUND_TRIP_MOST_MS: i64 = 1_000;
/// A difference that people are told about.
const WORTH_A_LINE_MS: i64 = 2_000;

impl LedgerTime {
    /// Milliseconds that have to be added to this process's clock.
    #[must_use]
    pub fn ahead_ms(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes in one measurement: the own clock before and after the call, and what the ledger answered.
    fn observe(&self, before_ms: i64, ledger_ms: i64, after_ms: i64) -> bool {
        if !(0..=ROUND_TRIP_MOST_MS).contains(&(after_ms - before_ms)) {
            return false;
        }
        let ahead = ledger_ms - (before_ms + (after_ms - before_ms) / 2);
        self.0.swap(ahead, Ordering::Relaxed).abs_diff(ahead) > WORTH_A_LINE_MS.unsigned_abs()
    }
}

/// Measures now and then, for as long as the process lives. The first measurement is made before anything is written.
pub async fn follow(ports: Ports) {
    loop {
        measure(&ports).await;
        tokio::time::sleep(MEASURE_EVERY).await;
    }
}

/// One measurement; a ledger that does not answer leaves what was known.
pub async fn measure(ports: &Ports) {
    let before = ports.clock.now_ms();
    if let Ok(ledger_ms) = ports.ledger.server_now_ms().await
        && ports.ledger_time.observe(before, ledger_ms, ports.clock.now_ms())
    {
        let ahead_ms = ports.ledger_time.ahead_ms();
        tracing::warn!(
            ahead_ms,
            "the ledger's clock and this host's differ; retries are timed by the ledger's, firings by this host's"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_call_is_when_the_answer_was_given() {
        let time = LedgerTime::default();
        assert!(!time.observe(1_000, 1_350, 1_100), "too small to be told");
        assert_eq!(time.ahead_ms(), 300);
        assert!(time.observe(1_000, 61_050, 1_100));
        assert_eq!(time.ahead_ms(), 60_000);
        assert!(!time.observe(1_000, 9_000, 3_000), "too slow an answer");
        assert!(!time.observe(3_000, 9_000, 1_000), "the clock was set meanwhile");
        assert_eq!(time.ahead_ms(), 60_000);
    }
}
