//! Whether the database server can be reached, as the statements that run anyway find it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A connection that can't be had says nothing as long as others get their answers: the pool may simply be busy.
const QUIET: Duration = Duration::from_secs(1);

/// What is known of a server.
#[derive(Debug)]
pub(crate) struct Reach {
    origin: Instant,
    answered_ms: AtomicU64,
    packet: AtomicU64,
    fault: watch::Sender<Option<String>>,
}

impl Default for Reach {
    fn default() -> Self {
        let (answered_ms, packet) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        Reach { origin: Instant::now(), answered_ms, packet, fault: watch::Sender::new(None) }
    }
}

impl Reach {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Why it is away, while it is.
    pub(crate) fn fault(&self) -> watch::Receiver<Option<String>> {
        self.fault.subscribe()
    }

    /// The largest statement that the server takes, in bytes; as it said to the connection that was made last.
    pub(crate) fn packet(&self) -> u64 {
        self.packet.load(Ordering::Relaxed)
    }

    /// See [`Self::packet`].
    pub(crate) fn set_packet(&self, bytes: u64) {
        self.packet.store(bytes, Ordering::Relaxed);
    }

    /// A statement was answered, well or badly.
    pub(crate) fn answered(&self) {
        self.answered_ms.store(self.now_ms(), Ordering::Relaxed);
        if self.fault.borrow().is_some() {
            self.fault.send_replace(None);
        }
    }

    /// No connection could be had, or no answer came in time.
    pub(crate) fn silent(&self, why: &str) {
        let silent_ms = self.now_ms().saturating_sub(self.answered_ms.load(Ordering::Relaxed));
        if u128::from(silent_ms) >= QUIET.as_millis() {
            self.fault.send_if_modified(|fault| {
                let new = fault.is_none();
                fault.get_or_insert_with(|| why.to_owned());
                new
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_pool_is_not_an_absent_server() {
        let reach = Reach::default();
        let fault = reach.fault();
        reach.answered();
        reach.silent("no connection is free");
        assert_eq!(*fault.borrow(), None);
        let old = Reach { origin: Instant::now() - QUIET * 2, ..Reach::default() };
        let fault = old.fault();
        old.silent("refused");
        old.silent("refused again");
        assert_eq!(fault.borrow().as_deref(), Some("refused"));
        old.answered();
        assert_eq!(*fault.borrow(), None);
    }
}
