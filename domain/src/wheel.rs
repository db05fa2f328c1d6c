//! All schedules by their next instant: what is due, in which order, and when to look again.
//!
//! An ordered set instead of a timer library's wheel: it needs no clock, so the same code runs in simulated time, and it is
//! exact to the millisecond (docs/decisions/0005).
//!
//! What is due is taken by the earliest deadline, which is the job's following instant: at midnight, when ten thousand daily jobs
//! are due together, a job of every second does not wait behind them.

use crate::ids::JobId;
use std::collections::{BTreeMap, HashMap};

/// The spacing of a job of which only one instant has been seen. In that time any job that matters here has shown its own.
const UNKNOWN_MS: i64 = 3_600_000;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The instant that stands on the wheel.
    next_ms: Option<i64>,
    /// The instant that was taken last.
    taken_ms: Option<i64>,
    spacing_ms: i64,
}

/// The jobs by their next instant.
#[derive(Clone, Debug, Default)]
pub struct Wheel {
    /// With the spacing to the instant that follows, as far as it is known.
    by_instant: BTreeMap<(i64, JobId), i64>,
    of_job: HashMap<JobId, Slot>,
}

impl Wheel {
    /// Sets a job's next instant; `None` takes it off.
    pub fn set(&mut self, job: JobId, next_ms: Option<i64>) {
        let old = self.of_job.get(&job).copied();
        if let Some(at) = old.and_then(|slot| slot.next_ms) {
            self.by_instant.remove(&(at, job));
        }
        let Some(next) = next_ms else {
            self.of_job.remove(&job);
            return;
        };
        let known = old.map_or(UNKNOWN_MS, |slot| slot.spacing_ms);
        let taken_ms = old.and_then(|slot| slot.taken_ms);
        let spacing_ms = taken_ms.and_then(|taken| next.checked_sub(taken)).filter(|ms| *ms > 0).unwrap_or(known);
        self.of_job.insert(job, Slot { next_ms: Some(next), taken_ms, spacing_ms });
        self.by_instant.insert((next, job), spacing_ms);
    }

    /// The instant at which a job stands.
    #[must_use]
    pub fn get(&self, job: JobId) -> Option<i64> {
        self.of_job.get(&job)?.next_ms
    }

    /// Takes up to `limit` jobs whose instant has come, the earliest deadline first.
    pub fn take_due(&mut self, now_ms: i64, limit: usize) -> Vec<(JobId, i64)> {
        let mut due: Vec<(i64, i64, JobId)> = self
            .by_instant
            .iter()
            .take_while(|((at, _), _)| *at <= now_ms)
            .map(|((at, job), spacing)| (at.saturating_add(*spacing), *at, *job))
            .collect();
        if due.len() > limit && limit > 0 {
            due.select_nth_unstable(limit - 1);
        }
        due.truncate(limit);
        due.sort_unstable();
        for (_, at, job) in &due {
            self.by_instant.remove(&(*at, *job));
            if let Some(slot) = self.of_job.get_mut(job) {
                (slot.next_ms, slot.taken_ms) = (None, Some(*at));
            }
        }
        due.into_iter().map(|(_, at, job)| (job, at)).collect()
    }

    /// The earliest instant of all.
    #[must_use]
    pub fn next_ms(&self) -> Option<i64> {
        self.by_instant.first_key_value().map(|((at, _), _)| *at)
    }

    /// How many jobs are on it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_instant.len()
    }

    /// Whether no job is on it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_instant.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_jobs_come_in_order_and_once() {
        let mut wheel = Wheel::default();
        wheel.set(JobId(1), Some(30));
        wheel.set(JobId(2), Some(10));
        wheel.set(JobId(3), Some(20));
        wheel.set(JobId(2), Some(25));
        assert_eq!((wheel.next_ms(), wheel.get(JobId(2)), wheel.len()), (Some(20), Some(25), 3));
        assert_eq!(wheel.take_due(25, 10), [(JobId(3), 20), (JobId(2), 25)]);
        assert_eq!(wheel.take_due(25, 10), []);
        assert_eq!(wheel.get(JobId(3)), None);
        wheel.set(JobId(1), None);
        assert!(wheel.is_empty());
        assert_eq!(wheel.next_ms(), None);
    }

    #[test]
    fn l_01_a_job_of_every_second_does_not_wait_behind_a_thousand_of_midnight() {
        let mut wheel = Wheel::default();
        let second = JobId(5_000);
        wheel.set(second, Some(0));
        assert_eq!(wheel.take_due(0, 10), [(second, 0)]);
        wheel.set(second, Some(1_000));
        for job in 0..1_000 {
            wheel.set(JobId(job), Some(1_000));
        }
        let first = wheel.take_due(1_000, 100);
        assert_eq!((first.len(), first[0]), (100, (second, 1_000)));
        // While the others are worked off its following instant comes, and is the first again; the others keep their turn.
        wheel.set(second, Some(2_000));
        let then = wheel.take_due(2_000, 100);
        assert_eq!((then[0], then[1].1), ((second, 2_000), 1_000));
        let mut left = 0;
        while let taken @ 1.. = wheel.take_due(2_000, 100).len() {
            left += taken;
        }
        assert_eq!(left, 1_000 - 99 - 99);
    }
}
