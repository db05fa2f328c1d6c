//! The way to Redis, which closes while Redis is away.

use crate::error::{Result, StoreError};
use crate::redis::RedisStores;
use shardcron_domain::circuit::Circuit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// One circuit for all that a process has in Redis: that it is away is the same news for each of them.
#[derive(Debug)]
pub(super) struct Gate {
    redis: RedisStores,
    /// How long one call waits.
    patience: Duration,
    origin: Instant,
    circuit: Mutex<Circuit>,
    fault: watch::Sender<Option<String>>,
}

impl Gate {
    pub(super) fn new(redis: RedisStores, patience: Duration) -> Self {
        let (fault, _) = watch::channel(None);
        Gate { redis, patience, origin: Instant::now(), circuit: Mutex::default(), fault }
    }

    pub(super) fn fault(&self) -> watch::Receiver<Option<String>> {
        self.fault.subscribe()
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    fn now_ms(&self) -> i64 {
        i64::try_from(self.origin.elapsed().as_millis()).unwrap_or(i64::MAX)
    }

    fn circuit(&self) -> MutexGuard<'_, Circuit> {
        // Nothing in it can be left half done.
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What Redis says; `None` if it is away, at once if that is known, else within the patience.
    pub(super) async fn ask<T, F>(self: &Arc<Self>, call: impl Fn() -> F) -> Option<T>
    where
        F: Future<Output = Result<T>>,
    {
        if !self.circuit().is_closed() {
            return None;
        }
        let twice = async {
            match call().await {
                Ok(answer) => Ok(answer),
                // A connection that Redis had closed is no absence: the second try makes another. All calls may be repeated.
                Err(_) => call().await,
            }
        };
        let why = match tokio::time::timeout(self.patience, twice).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the redis has not answered within {:?}", self.patience),
        };
        self.failed(why);
        None
    }

    fn failed(self: &Arc<Self>, why: String) {
        if self.circuit().failed(self.now_ms()) {
            self.fault.send_replace(Some(why));
            tokio::spawn(self.clone().probe());
        }
    }

    /// Asks from time to time, and lets the others in again when Redis takes a write: one that only answers reads (out of memory,
    /// or a replica) is as good as away.
    async fn probe(self: Arc<Self>) {
        for probe in 0.. {
            let wait = self.circuit().wait_ms(probe);
            tokio::time::sleep(Duration::from_millis(wait)).await;
            match tokio::time::timeout(self.patience, self.redis.probe()).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => tracing::trace!(%error, "Redis is still away"),
                Err(_) => tracing::trace!("Redis still does not answer"),
            }
        }
        self.circuit().passed(self.now_ms());
        self.fault.send_replace(None);
    }
}

/// For the callers that must not wait for a ledger that stalls.
pub(super) async fn within<T>(limit: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        Err(StoreError::Unavailable { store: "ledger", detail: format!("it has not answered within {limit:?}") })
    })
}
