//! Growing pauses between tries, with jitter, so that a fleet does not come back in step after a restart of the broker.

use std::time::Duration;

/// A pause that doubles with each failure, up to a bound.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first }
    }

    /// The pause before the next try: between half of the current step and all of it.
    pub(crate) fn pause(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.max);
        // The last byte of a version 7 UUID is random; a whole generator for a jitter would be too much.
        let random = uuid::Uuid::now_v7().as_bytes()[15];
        step.div_f64(2.0) + step.div_f64(2.0).mul_f64(f64::from(random) / 255.0)
    }

    /// The same without jitter, for pauses of milliseconds within one process.
    pub(crate) fn plain_pause(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.max);
        step
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_its_bound_and_starts_again() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        let pauses: Vec<_> = (0..6).map(|_| backoff.pause()).collect();
        assert!(pauses[0] >= Duration::from_millis(50) && pauses[0] <= Duration::from_millis(100));
        assert!(pauses[5] >= Duration::from_millis(500) && pauses[5] <= Duration::from_secs(1));
        backoff.reset();
        assert_eq!(backoff.plain_pause(), Duration::from_millis(100));
    }
}
