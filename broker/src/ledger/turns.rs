//! Whose turn it is to ask the ledger: in one process the tier `core` comes first. What it asks for is what the ledger answers first,
//! while one database serves everybody instead of a queue for each tier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The tier that comes first.
const FIRST: &str = "core";
/// Behind, and not never: a tier whose work does not end for hours must not stop the others.
const AT_LEAST_EVERY: Duration = Duration::from_secs(1);

/// The turns of one process.
#[derive(Debug)]
pub(super) struct Turns {
    /// The first tier asks, or is about to, and has reason to hope.
    asks: watch::Sender<bool>,
    /// Its last look has found something.
    found: AtomicBool,
    /// When the others were let through although it asked.
    let_through: Mutex<Instant>,
}

impl Default for Turns {
    fn default() -> Self {
        Self { asks: watch::Sender::new(false), found: AtomicBool::new(false), let_through: Mutex::new(Instant::now()) }
    }
}

impl Turns {
    /// Waits for the tier's turn to look. A call that is given up has taken nothing.
    pub(super) async fn wait(&self, tier: &str) {
        if tier == FIRST {
            return self.set(self.found.load(Ordering::Relaxed));
        }
        if !*self.asks.borrow() {
            return;
        }
        let mut asks = self.asks.subscribe();
        let until = *self.last() + AT_LEAST_EVERY;
        if tokio::time::timeout_at(until, asks.wait_for(|asks| !asks)).await.is_err() {
            *self.last() = Instant::now();
        }
    }

    /// Tells how a look of a tier has ended: whether it found something, and has room for more than that. Where there is no more
    /// room, the others have what is left of the ledger's time.
    pub(super) fn looked(&self, tier: &str, found: bool, room: bool) {
        if tier == FIRST {
            self.found.store(found, Ordering::Relaxed);
            self.set(found && room);
        }
    }

    fn set(&self, asks: bool) {
        self.asks.send_if_modified(|now| std::mem::replace(now, asks) != asks);
    }

    fn last(&self) -> MutexGuard<'_, Instant> {
        self.let_through.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn others_come_when_the_first_has_found_nothing_more() {
        let turns = Turns::default();
        turns.wait("core").await;
        turns.wait("bulk").await;
        turns.looked("core", true, false);
        turns.wait("bulk").await;
        turns.wait("core").await;
        let bulk = turns.wait("bulk");
        tokio::pin!(bulk);
        assert!(tokio::time::timeout(Duration::from_millis(10), &mut bulk).await.is_err(), "core comes first");
        turns.looked("core", false, true);
        bulk.await;
    }

    #[tokio::test(start_paused = true)]
    async fn others_come_each_second_all_the_same() {
        let turns = Turns::default();
        turns.looked("core", true, true);
        let began = Instant::now();
        turns.wait("bulk").await;
        turns.wait("bulk").await;
        assert!(began.elapsed() >= Duration::from_millis(1_900), "{:?}", began.elapsed());
    }
}
