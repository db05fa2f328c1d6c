//! Which degraded modes this process is in: each entry and exit is one log line and a metric, and health reads the rest.

use metrics::{counter, gauge};
use shardcron_domain::metric_names as names;
use shardcron_domain::modes::Mode;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// How a mode came to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entered {
    /// When, by this host's monotonic clock.
    pub since: Instant,
    /// The fault that led to it, in a sentence.
    pub reason: String,
}

/// The modes that this process is in. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Modes(Arc<watch::Sender<BTreeMap<Mode, Entered>>>);

impl Default for Modes {
    fn default() -> Self {
        Modes(Arc::new(watch::Sender::new(BTreeMap::new())))
    }
}

impl Modes {
    /// Enters a mode; nothing if the process is in it already.
    pub fn enter(&self, mode: Mode, reason: &str) {
        let new = self.0.send_if_modified(|modes| {
            let new = !modes.contains_key(&mode);
            modes.entry(mode).or_insert_with(|| Entered { since: Instant::now(), reason: reason.to_owned() });
            new
        });
        if new {
            counter!(names::DEGRADED_ENTERED, names::LABEL_MODE => mode.name()).increment(1);
            gauge!(names::DEGRADED, names::LABEL_MODE => mode.name()).set(1.0);
            tracing::warn!(mode = mode.name(), reason, "degraded: {}", mode.what_goes_on());
        }
    }

    /// Leaves a mode; nothing if the process is not in it.
    pub fn leave(&self, mode: Mode) {
        let mut left = None;
        self.0.send_if_modified(|modes| {
            left = modes.remove(&mode);
            left.is_some()
        });
        if let Some(entered) = left {
            gauge!(names::DEGRADED, names::LABEL_MODE => mode.name()).set(0.0);
            let seconds = entered.since.elapsed().as_secs_f64();
            tracing::info!(mode = mode.name(), seconds, "back to normal");
        }
    }

    /// Follows a fault that something else sees: in the mode while there is a reason. Ends with its source.
    pub async fn follow(self, mode: Mode, mut fault: watch::Receiver<Option<String>>) {
        loop {
            let now = fault.borrow_and_update().clone();
            match now {
                Some(reason) => self.enter(mode, &reason),
                None => self.leave(mode),
            }
            if fault.changed().await.is_err() {
                return;
            }
        }
    }

    /// The names of the modes now.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.0.borrow().keys().map(|mode| mode.name().to_owned()).collect()
    }

    /// The modes now and from now on.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<BTreeMap<Mode, Entered>> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entering_twice_is_entering_once() {
        let modes = Modes::default();
        let mut watch = modes.watch();
        modes.enter(Mode::RedisAway, "refused");
        assert!(watch.has_changed().unwrap());
        watch.borrow_and_update();
        modes.enter(Mode::RedisAway, "refused again");
        assert!(!watch.has_changed().unwrap());
        assert_eq!(watch.borrow()[&Mode::RedisAway].reason, "refused");
        assert_eq!(modes.names(), ["redis_away"]);
        modes.leave(Mode::BrokerAway);
        assert!(!watch.has_changed().unwrap());
        modes.leave(Mode::RedisAway);
        assert!(watch.borrow_and_update().is_empty());
    }
}
