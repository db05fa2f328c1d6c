//! The caches of a worker: the level that all share, what is counted, and what is in memory before an attempt begins.

use super::PreloadKeys;
use crate::io::Io;
use crate::ports::Ports;
use crate::telemetry;
use async_trait::async_trait;
use shardcron_domain::cache::{Preload, PreloadSpec};
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_sdk::cache::{CacheOptions, Caches, Kept, SharedLevel};
use shardcron_sdk::{ShardContext, ShardHandler};
use shardcron_store::SharedCache;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long an attempt waits for its preloads: they are there to save time.
const PATIENCE: Duration = Duration::from_secs(2);
/// Lost workers whose keys are remembered as taken over; beyond it the oldest are asked for again.
const REMEMBERED: usize = 256;
/// Ended attempts of a shard that one look for its last owner reads.
const LOOK: usize = 64;

struct Shared(Arc<dyn SharedCache>);

#[async_trait]
impl SharedLevel for Shared {
    async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, String> {
        self.0.read(cache, keys).await.map_err(|e| e.to_string())
    }
    async fn write(&self, cache: &str, values: &[Kept]) -> Result<(), String> {
        self.0.write(cache, values).await.map_err(|e| e.to_string())
    }
    async fn forget(&self, cache: &str, key: &str) -> Result<(), String> {
        self.0.forget(cache, key).await.map_err(|e| e.to_string())
    }
}

/// The caches of a worker, counted in its metrics. Without a shared level they are in memory only.
#[must_use]
pub fn caches(options: CacheOptions, shared: Option<Arc<dyn SharedCache>>) -> Caches {
    let shared = shared.map(|shared| Arc::new(Shared(shared)) as Arc<dyn SharedLevel>);
    Caches::new(options, shared, Some(Box::new(|cache, event| telemetry::cache(cache, event.word()))))
}

/// What has been preloaded for others.
#[derive(Default)]
pub(super) struct TakenOver {
    known: Mutex<BTreeSet<Incarnation>>,
    /// A look is under way: the shards of a lost worker come all at once, and one of them finds what all need.
    looking: AtomicBool,
}

impl TakenOver {
    /// Whether this is the first time.
    fn first(&self, of: Incarnation) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.pop_first();
        }
        known.insert(of)
    }
}

/// What a job wants to have at hand, brought into memory before its handler begins. Late is as bad as never: it waits for so long and
/// goes on without. On the runtime of users' code, for a handler's own loader is that: what it breaks or blocks is no attempt's end.
pub(super) async fn preload(ports: &Ports, wanted: Wanted) {
    let (job, execution) = (wanted.context.job.clone(), wanted.context.attempt.execution);
    let mut work = ports.handlers.spawn(wanted.bring(ports.io.clone()));
    match tokio::time::timeout(PATIENCE, &mut work).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::warn!(
            %job, execution_id = %execution, error = %e, "the handler's cache loader broke off; the attempt goes on without"
        ),
        Err(_) => {
            work.abort();
            tracing::debug!(%job, "the preloads are not there in time; going on without");
        }
    }
}

/// What one attempt wants preloaded, and from where it comes.
pub(super) struct Wanted {
    pub(super) caches: Caches,
    pub(super) entries: Vec<PreloadSpec>,
    pub(super) context: ShardContext,
    pub(super) handler: Arc<dyn ShardHandler>,
    pub(super) queries: Option<PreloadKeys>,
}

impl Wanted {
    /// Keys that stand in the job first: they wait for no query.
    async fn bring(self, io: Io) {
        for entry in &self.entries {
            if let PreloadSpec::Keys(text) = entry
                && let Ok(entry) = Preload::parse(text)
            {
                self.bring_keys(entry.cache(), &entry.keys(&self.context.slice, &self.context.params)).await;
            }
        }
        let Some(queries) = &self.queries else { return };
        for entry in &self.entries {
            if let PreloadSpec::Query(query) = entry {
                // Where the databases' connections live: a loader that blocks its thread must not keep them waiting.
                let keys = io.spawn(queries(query.clone(), self.context.clone())).await.unwrap_or_default();
                self.bring_keys(&query.cache, &keys).await;
            }
        }
    }

    async fn bring_keys(&self, name: &str, keys: &[String]) {
        let cache = self.caches.cache(name);
        let Some(loader) = self.handler.cache_loader(name) else {
            cache.preload(keys).await;
            return;
        };
        if let Err(e) = cache.preload_from(keys, &*loader).await {
            tracing::warn!(
                job = %self.context.job, execution_id = %self.context.attempt.execution, cache = name, error = %e,
                "the keys of a preload could not be loaded; the attempt goes on without"
            );
        }
    }
}

/// A shard whose last owner was lost: what that worker asked for most is what this one is about to ask for. Once for each lost worker,
/// beside the handler and not before it.
pub(super) async fn take_over_keys(ports: Ports, caches: Caches, taken: Arc<TakenOver>, attempt: AttemptRef) {
    if !taken.looking.swap(true, Ordering::Relaxed) {
        look(&ports, &caches, &taken, attempt).await;
        taken.looking.store(false, Ordering::Relaxed);
    }
}

async fn look(ports: &Ports, caches: &Caches, taken: &TakenOver, attempt: AttemptRef) {
    let Ok(ended) = ports.ledger.attempts_of(attempt.shard(), LOOK).await else { return };
    let lost = ended.iter().filter(|a| a.attempt < attempt.attempt).max_by_key(|a| a.attempt);
    let Some(owner) = lost.filter(|a| matches!(a.outcome.as_str(), "worker_lost" | "taken_over" | "hung" | "stalled"))
    else {
        return;
    };
    if !taken.first(owner.owner) {
        return;
    }
    let Ok(workers) = ports.presence.workers().await else { return };
    let Some(seen) = workers.into_iter().find(|seen| seen.beat.incarnation == owner.owner) else { return };
    let keys = seen.beat.hot_keys;
    if keys.is_empty() {
        return;
    }
    tracing::info!(worker = %owner.owner, keys = keys.len(), "preloading the hot keys of a worker that was lost");
    let found = caches.preload(keys).await;
    tracing::info!(worker = %owner.owner, found, "the hot keys are there");
}
