//! When a part that can be done without is asked again after it has failed, so that nobody waits long for one that is away.

use crate::limits::{CIRCUIT_PROBE_MS, CIRCUIT_STABLE_MS, CIRCUIT_STRIKES_MAX};

/// Closed: the part is asked. Open: nobody asks it but a probe from time to time, and everybody else goes the other way at once.
///
/// One that fails soon after a probe has let it in again (it answers the probe and nothing else) is probed more and more rarely,
/// so that its users do not go to and fro each second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Circuit {
    open: bool,
    closed_at_ms: Option<i64>,
    strikes: u32,
}

impl Circuit {
    /// Whether the part may be asked.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        !self.open
    }

    /// A call has failed. True if that opened the circuit: the caller begins to probe. `now_ms` is monotonic.
    pub fn failed(&mut self, now_ms: i64) -> bool {
        if self.open {
            return false;
        }
        let relapse = self.closed_at_ms.is_some_and(|at| now_ms - at < CIRCUIT_STABLE_MS);
        self.strikes = if relapse { (self.strikes + 1).min(CIRCUIT_STRIKES_MAX) } else { 0 };
        self.open = true;
        true
    }

    /// How long to wait before the probe of this number, from 0. The first one comes soon: one broken connection is no absence.
    #[must_use]
    pub fn wait_ms(&self, probe: u32) -> u64 {
        let usual = if probe == 0 && self.strikes == 0 { CIRCUIT_PROBE_MS / 5 } else { CIRCUIT_PROBE_MS };
        usual << self.strikes
    }

    /// A probe has passed.
    pub fn passed(&mut self, now_ms: i64) {
        (self.open, self.closed_at_ms) = (false, Some(now_ms));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_once_and_is_probed_each_second() {
        let mut circuit = Circuit::default();
        assert!(circuit.is_closed());
        assert!(circuit.failed(1_000));
        assert!(!circuit.failed(1_001), "the second failure of the same absence begins no second probing");
        assert!(!circuit.is_closed());
        assert_eq!([0, 1, 2, 99].map(|n| circuit.wait_ms(n)), [200, 1_000, 1_000, 1_000]);
        circuit.passed(60_000);
        assert!(circuit.is_closed());
    }

    #[test]
    fn one_that_relapses_is_probed_more_rarely() {
        let mut circuit = Circuit::default();
        let mut waits = Vec::new();
        for n in 0..7 {
            assert!(circuit.failed(n * 10));
            waits.push(circuit.wait_ms(0));
            circuit.passed(n * 10 + 5);
        }
        assert_eq!(waits, [200, 2_000, 4_000, 8_000, 16_000, 16_000, 16_000]);
        assert!(circuit.failed(60_000), "long after the last return");
        assert_eq!(circuit.wait_ms(0), 200);
    }
}
