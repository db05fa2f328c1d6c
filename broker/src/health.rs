//! How the transport is, put together from its parts, with one log line when it goes away and one when it is back.

use crate::metric_definitions as m;
use crate::port::BrokerState;
use std::sync::{Mutex, PoisonError};
use tokio::sync::watch;

/// The reason of a connection that this process itself has ended; no trouble, and no warning.
pub(crate) const CLOSED: &str = "closed";

/// The state of a broker that stands on several connections: the worst of them.
#[derive(Debug)]
pub(crate) struct Health {
    what: &'static str,
    parts: Mutex<Vec<BrokerState>>,
    whole: watch::Sender<BrokerState>,
}

impl Health {
    /// `parts` connections that are in this state before the first try.
    pub(crate) fn new(what: &'static str, parts: usize, initial: BrokerState) -> Self {
        Self { what, parts: Mutex::new(vec![initial.clone(); parts]), whole: watch::Sender::new(initial) }
    }

    /// Notes the state of one part.
    pub(crate) fn set(&self, part: usize, state: BrokerState) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = parts.get_mut(part) else { return };
        *slot = state;
        let whole = parts.iter().max_by_key(|s| rank(s)).cloned().unwrap_or(BrokerState::Up);
        // Under the lock, so that two parts can't publish their views in the wrong order.
        self.whole.send_if_modified(|current| {
            // A new reason for the same trouble is kept for who asks, and not logged again.
            let turned = rank(current) != rank(&whole);
            if turned {
                self.log(&whole);
            }
            let changed = *current != whole;
            *current = whole;
            changed
        });
    }

    fn log(&self, state: &BrokerState) {
        metrics::gauge!(m::STATE, "broker" => self.what).set(2.0 - f64::from(rank(state)));
        match state {
            BrokerState::Up => tracing::info!(broker = self.what, "broker is there"),
            BrokerState::Blocked(reason) => {
                tracing::warn!(broker = self.what, reason, "broker takes no messages for now, dispatch pauses");
            }
            BrokerState::Away(reason) if reason == CLOSED => tracing::debug!(broker = self.what, "closed"),
            BrokerState::Away(reason) => tracing::warn!(broker = self.what, reason, "broker is away, trying again"),
        }
    }

    /// The first report of trouble at the start is worth a line although the state has been "away" from the beginning.
    pub(crate) fn log_first_failure(&self, reason: &str) {
        tracing::warn!(broker = self.what, reason, "broker is not there yet, trying again");
    }

    pub(crate) fn watch(&self) -> watch::Receiver<BrokerState> {
        self.whole.subscribe()
    }
}

fn rank(state: &BrokerState) -> u8 {
    match state {
        BrokerState::Up => 0,
        BrokerState::Blocked(_) => 1,
        BrokerState::Away(_) => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_is_as_bad_as_its_worst_part() {
        let health = Health::new("test", 2, BrokerState::Away("not tried".into()));
        let watch = health.watch();
        health.set(0, BrokerState::Up);
        assert!(matches!(*watch.borrow(), BrokerState::Away(_)));
        health.set(1, BrokerState::Up);
        assert_eq!(*watch.borrow(), BrokerState::Up);
        health.set(0, BrokerState::Blocked("memory".into()));
        assert_eq!(*watch.borrow(), BrokerState::Blocked("memory".into()));
        health.set(1, BrokerState::Away("gone".into()));
        assert_eq!(*watch.borrow(), BrokerState::Away("gone".into()));
    }
}
