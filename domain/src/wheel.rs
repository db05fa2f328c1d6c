//! All schedules by their next instant: what is due, and when to look again.
//!
//! An ordered set instead of a timer library's wheel: it needs no clock, so the same code runs in simulated time, and it is
//! exact to the millisecond (docs/decisions/0005).

use crate::ids::JobId;
use std::collections::{BTreeMap, BTreeSet};

/// The jobs by their next instant.
#[derive(Clone, Debug, Default)]
pub struct Wheel {
    by_instant: BTreeSet<(i64, JobId)>,
    of_job: BTreeMap<JobId, i64>,
}

impl Wheel {
    /// Sets a job's next instant; `None` takes it off.
    pub fn set(&mut self, job: JobId, next_ms: Option<i64>) {
        if let Some(old) = self.of_job.remove(&job) {
            self.by_instant.remove(&(old, job));
        }
        if let Some(next) = next_ms {
            self.of_job.insert(job, next);
            self.by_instant.insert((next, job));
        }
    }

    /// Takes up to `limit` jobs whose instant has come, the longest due first.
    pub fn take_due(&mut self, now_ms: i64, limit: usize) -> Vec<(JobId, i64)> {
        let due: Vec<(i64, JobId)> =
            self.by_instant.iter().take_while(|(at, _)| *at <= now_ms).take(limit).copied().collect();
        for entry in &due {
            self.by_instant.remove(entry);
            self.of_job.remove(&entry.1);
        }
        due.into_iter().map(|(at, job)| (job, at)).collect()
    }

    /// The earliest instant of all.
    #[must_use]
    pub fn next_ms(&self) -> Option<i64> {
        self.by_instant.first().map(|(at, _)| *at)
    }

    /// A job's next instant.
    #[must_use]
    pub fn get(&self, job: JobId) -> Option<i64> {
        self.of_job.get(&job).copied()
    }

    /// How many jobs are on it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.of_job.len()
    }

    /// Whether no job is on it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of_job.is_empty()
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
        assert_eq!(wheel.next_ms(), Some(20));
        assert_eq!(wheel.take_due(25, 10), [(JobId(3), 20), (JobId(2), 25)]);
        assert_eq!(wheel.take_due(25, 10), []);
        wheel.set(JobId(1), None);
        assert!(wheel.is_empty());
        assert_eq!(wheel.next_ms(), None);
    }
}
