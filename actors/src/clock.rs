//! The only clock of the actors.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Tells the time. A trait, so that whole systems can run in simulated time.
pub trait Clock: Send + Sync + 'static {
    /// Milliseconds since 1970-01-01T00:00:00Z, by this host.
    fn now_ms(&self) -> i64;
    /// Milliseconds since some fixed instant; never goes back. For leases and liveness.
    fn mono_ms(&self) -> i64;
}

/// The host's clocks.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        SystemClock { origin: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> i64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
    }

    fn mono_ms(&self) -> i64 {
        i64::try_from(self.origin.elapsed().as_millis()).unwrap_or(i64::MAX)
    }
}
