//! How long to wait before the next attempt.

use crate::job::RetryPolicy;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The wait before the attempt that follows `failures` failures (1 after the first), before jitter: the smaller of `max` and
/// `first × factor^(failures-1)`. Grows to `max` and stays there, whatever the count (case T-01).
#[must_use]
pub fn backoff_ms(policy: &RetryPolicy, failures: u32) -> u64 {
    let first = policy.first.0 as f64;
    let max = policy.max.0 as f64;
    if first <= 0.0 {
        return 0;
    }
    let exponent = failures.saturating_sub(1).min(i32::MAX as u32) as i32;
    // powi overflows to infinity, which `min` turns into `max`: no wrap, no negative wait.
    let wait = first * policy.factor.powi(exponent);
    if wait.is_finite() { wait.min(max) as u64 } else { policy.max.0 }
}

/// The same with jitter: up to `policy.jitter` of the wait more or less, drawn from the seed so that it can be replayed.
#[must_use]
pub fn wait_ms(policy: &RetryPolicy, failures: u32, seed: u64) -> u64 {
    let wait = backoff_ms(policy, failures);
    let draw = xxh3_64_with_seed(&failures.to_le_bytes(), seed);
    let unit = draw as f64 / u64::MAX as f64 * 2.0 - 1.0;
    (wait as f64 * (1.0 + policy.jitter * unit)).max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Span;

    fn policy(first: u64, factor: f64, max: u64) -> RetryPolicy {
        RetryPolicy { attempts: 3, first: Span(first), factor, max: Span(max), jitter: 0.2 }
    }

    #[test]
    fn t_01_backoff_never_overflows() {
        let p = policy(1_000, 2.0, 3_600_000);
        for (failures, seconds) in [
            (1, 1),
            (2, 2),
            (12, 2_048),
            (13, 3_600),
            (63, 3_600),
            (64, 3_600),
            (65, 3_600),
            (1_000, 3_600),
            (u32::MAX, 3_600),
        ] {
            assert_eq!(backoff_ms(&p, failures), seconds * 1_000, "after {failures} failures");
        }
        assert_eq!(backoff_ms(&policy(0, 1.5, 1_000), u32::MAX), 0);
        assert_eq!(backoff_ms(&policy(1_000, 1.5, 10_000), 3), 2_250);
    }

    #[test]
    fn jitter_stays_within_its_share_and_is_repeatable() {
        let p = policy(10_000, 2.0, 600_000);
        for seed in 0..500 {
            let wait = wait_ms(&p, 1, seed);
            assert!((8_000..=12_000).contains(&wait), "seed {seed}: {wait}");
            assert_eq!(wait, wait_ms(&p, 1, seed));
        }
    }
}
