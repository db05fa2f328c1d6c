//! How long to wait before the next attempt.

use crate::job::RetryPolicy;
use crate::limits::NOT_BEFORE_MAX_MS;
use std::time::Duration;
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

/// The wait where the handler has said how long it must be at least: the longer of what it asked for and the policy's own wait. The
/// jitter is only ever added here, so that what was told to come back in a minute neither comes early nor all at once. What is asked
/// for is cut to a day.
#[must_use]
pub fn not_before_ms(policy: &RetryPolicy, failures: u32, asked_ms: u64, seed: u64) -> u64 {
    let asked = asked_ms.min(NOT_BEFORE_MAX_MS);
    let unit = xxh3_64_with_seed(&failures.to_le_bytes(), seed) as f64 / u64::MAX as f64;
    let spread = (asked as f64 * policy.jitter * unit).max(0.0) as u64;
    asked.saturating_add(spread).max(wait_ms(policy, failures, seed))
}

/// The wait before what met others in a deadlock or a lock is run again, after `tries` of it (1 after the first). Full jitter: any length up
/// to a bound, by the draw, since those that met must not meet again; the bound doubles with each try, from twice `unit` up to `most`, since
/// the more of them there are the longer it takes until each had its turn.
#[must_use]
pub fn apart(tries: u32, unit: Duration, most: Duration, draw: u64) -> Duration {
    let longest = unit.saturating_mul(1_u32.checked_shl(tries).unwrap_or(u32::MAX)).min(most);
    let longest_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
    Duration::from_micros(draw % longest_us.saturating_add(1))
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
    fn i_04_those_that_met_come_again_at_any_time_up_to_a_bound_that_grows() {
        let (unit, most) = (Duration::from_millis(20), Duration::from_millis(1_280));
        for (tries, bound_ms) in
            [(0, 20), (1, 40), (5, 640), (6, 1_280), (7, 1_280), (31, 1_280), (32, 1_280), (u32::MAX, 1_280)]
        {
            let bound = Duration::from_millis(bound_ms);
            let longest = u64::try_from(bound.as_micros()).unwrap();
            assert_eq!(apart(tries, unit, most, longest), bound, "after {tries} tries");
            assert_eq!(apart(tries, unit, most, longest + 1), Duration::ZERO, "after {tries} tries");
            assert!(apart(tries, unit, most, u64::MAX) <= bound);
        }
        assert_eq!(apart(1, Duration::ZERO, most, 7), Duration::ZERO);
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

    #[test]
    fn what_the_handler_asks_for_is_kept_and_bounded() {
        let p = policy(10_000, 2.0, 600_000);
        for seed in 0..500 {
            let wait = not_before_ms(&p, 1, 60_000, seed);
            assert!((60_000..=72_000).contains(&wait), "never early: seed {seed}: {wait}");
            let short = not_before_ms(&p, 1, 5, seed);
            assert_eq!(short, wait_ms(&p, 1, seed).max(short), "the policy's own wait is the least");
            assert!(not_before_ms(&p, 1, u64::MAX, seed) <= NOT_BEFORE_MAX_MS / 5 * 6);
        }
    }
}
