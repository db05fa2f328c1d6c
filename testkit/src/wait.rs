//! Owns the one way to wait in a test: poll a condition, with a bound.
//!
//! A plain sleep is either too short on a busy machine or too long on a quiet one; this ends as soon as the condition
//! holds, and says what it waited for when it never does.

use std::time::{Duration, Instant};

const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Polls `cond` until it holds; panics after `bound` with a sentence that names `what`.
///
/// # Panics
/// When the condition still does not hold after `bound`.
#[track_caller]
pub fn wait_for(what: &str, bound: Duration, mut cond: impl FnMut() -> bool) {
    let holds = poll(bound, || cond().then_some(()));
    assert!(holds.is_some(), "waited {bound:?} in vain for: {what}");
}

/// Polls `probe` until it gives a value, which is returned; panics after `bound` with a sentence that names `what`.
///
/// # Panics
/// When the probe still gives nothing after `bound`.
#[track_caller]
pub fn wait_until_some<T>(what: &str, bound: Duration, probe: impl FnMut() -> Option<T>) -> T {
    match poll(bound, probe) {
        Some(value) => value,
        None => panic!("waited {bound:?} in vain for: {what}"),
    }
}

/// Polls `probe` until it gives a value or the bound has passed. The probe runs at least once, and once more at the end.
pub fn poll<T>(bound: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    let mut pause = PAUSE_FIRST;
    loop {
        let last_round = started.elapsed() >= bound;
        if let Some(value) = probe() {
            return Some(value);
        }
        if last_round {
            return None;
        }
        pause_for(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[allow(clippy::disallowed_methods, reason = "the one place that may sleep: between two looks at a condition")]
fn pause_for(pause: Duration) {
    std::thread::sleep(pause);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_as_soon_as_the_condition_holds() {
        let mut looks = 0;
        wait_for("the third look", Duration::from_secs(60), || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    #[should_panic(expected = "waited 20ms in vain for: pigs to fly")]
    fn names_what_never_came() {
        wait_for("pigs to fly", Duration::from_millis(20), || false);
    }
}
