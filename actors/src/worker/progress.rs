//! How attempts move: a counter for each, which the handler's calls raise, which the attempt itself watches, and which goes along with
//! the heartbeat where the job asks for it. Nothing of it costs traffic of its own.

use shardcron_domain::AttemptRef;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Raised with each progress of one attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Ticks(Arc<AtomicU64>);

impl Ticks {
    pub(super) fn tick(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends when the counter has stood still for `limit`; never without one. An eighth of it late at the most.
    pub(super) async fn stalled(&self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        let (mut count, mut moved) = (self.count(), Instant::now());
        while moved.elapsed() < limit {
            tokio::time::sleep((limit / 8).min(limit.saturating_sub(moved.elapsed()))).await;
            let now = self.count();
            if now != count {
                (count, moved) = (now, Instant::now());
            }
        }
    }
}

/// The counters that the heartbeat tells: those of jobs with a `stall_timeout`. As many as attempts run.
#[derive(Debug, Default)]
pub(super) struct Watched(Mutex<BTreeMap<AttemptRef, Ticks>>);

impl Watched {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<AttemptRef, Ticks>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the returned guard is dropped, the heartbeat tells the attempt's count.
    pub(super) fn watch(self: &Arc<Self>, attempt: AttemptRef, ticks: &Ticks) -> Watch {
        self.lock().insert(attempt, ticks.clone());
        Watch { all: self.clone(), attempt }
    }

    pub(super) fn counts(&self) -> Vec<(AttemptRef, u64)> {
        self.lock().iter().map(|(attempt, ticks)| (*attempt, ticks.count())).collect()
    }
}

/// See [`Watched::watch`].
pub(super) struct Watch {
    all: Arc<Watched>,
    attempt: AttemptRef,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.all.lock().remove(&self.attempt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ticks_put_the_stall_off() {
        let ticks = Ticks::default();
        let limit = Duration::from_millis(400);
        let began = Instant::now();
        let moving = async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                ticks.tick();
            }
        };
        tokio::join!(moving, ticks.stalled(Some(limit)));
        assert!(began.elapsed() >= Duration::from_millis(1_000) + limit - limit / 8, "{:?}", began.elapsed());
        let never = tokio::time::timeout(limit * 2, ticks.stalled(None)).await;
        assert!(never.is_err(), "without a limit nothing stalls");
    }

    #[test]
    fn only_what_is_watched_is_told() {
        let (watched, ticks) = (Arc::new(Watched::default()), Ticks::default());
        let attempt = AttemptRef { execution: shardcron_domain::ExecutionId(uuid::Uuid::nil()), index: 1, attempt: 1 };
        let watch = watched.watch(attempt, &ticks);
        ticks.tick();
        assert_eq!(watched.counts(), [(attempt, 1)]);
        drop(watch);
        assert!(watched.counts().is_empty());
    }
}
