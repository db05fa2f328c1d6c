//! Heartbeats in Redis, and in the ledger where Redis can't be reached.
//!
//! Either side may be cut off from Redis alone, so:
//! - a worker that can't reach it beats the ledger;
//! - a reader that can't reach it calls, by a row that ends by itself, and workers that see the call with their beat beat the ledger
//!   as well. They are there before the reader could take them for lost, which takes it the whole lost-after time;
//! - a reader takes both, and for each worker the younger beat, by [`TwoStores`]: what a worker left in the ledger long ago is no
//!   evidence against it.

use super::gate::{Gate, within};
use crate::error::Result;
use crate::lease::LeaseStore as _;
use crate::presence::{Presence, SeenWorker, WorkerBeat};
use crate::redis::RedisPresence;
use crate::sql::{LedgerLease, LedgerPresence};
use async_trait::async_trait;
use shardcron_domain::Incarnation;
use shardcron_domain::liveness::TwoStores;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The name of the row by which readers call, and what stands in it.
const CALL: (&str, &str) = ("presence", "beat the ledger");

/// The workers' presence, in both.
#[derive(Debug)]
pub struct FallbackPresence {
    redis: RedisPresence,
    ledger: LedgerPresence,
    call: LedgerLease,
    gate: Arc<Gate>,
    lost_after: Duration,
    /// The last beat went to the ledger, so there is a row to take away.
    in_ledger: AtomicBool,
    stores: Mutex<TwoStores>,
}

impl FallbackPresence {
    pub(super) fn new(redis: RedisPresence, ledger: LedgerPresence, gate: Arc<Gate>, lost_after: Duration) -> Self {
        let call = LedgerLease { ledger: ledger.ledger.clone(), name: CALL.0.to_owned() };
        let (in_ledger, stores) = (AtomicBool::new(false), Mutex::default());
        FallbackPresence { redis, ledger, call, gate, lost_after, in_ledger, stores }
    }

    /// Redis has taken the beat: the ledger gets it only if somebody calls for it, and else loses what it had.
    async fn also_ledger(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()> {
        if self.call.holder().await?.is_some() {
            self.in_ledger.store(true, Ordering::Relaxed);
            return self.ledger.beat(beat, lost_after).await;
        }
        if self.in_ledger.load(Ordering::Relaxed) {
            self.ledger.leave(beat.incarnation).await?;
            self.in_ledger.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    fn merge(&self, by_redis: Option<Vec<SeenWorker>>, by_ledger: Vec<SeenWorker>) -> Vec<SeenWorker> {
        let mut both: BTreeMap<Incarnation, (Option<SeenWorker>, Option<SeenWorker>)> = BTreeMap::new();
        for seen in by_redis.into_iter().flatten() {
            let who = seen.beat.incarnation;
            both.entry(who).or_default().0 = Some(seen);
        }
        for seen in by_ledger {
            let who = seen.beat.incarnation;
            both.entry(who).or_default().1 = Some(seen);
        }
        // Nothing in it can be left half done.
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.retain(|who| both.contains_key(who));
        let lost_after_ms = i64::try_from(self.lost_after.as_millis()).unwrap_or(i64::MAX);
        let younger = |(who, (redis, ledger)): (Incarnation, (Option<SeenWorker>, Option<SeenWorker>))| {
            let age = |seen: &Option<SeenWorker>| seen.as_ref().map(|s| s.age_ms);
            let age_ms = stores.age(who, age(&redis), age(&ledger), lost_after_ms)?;
            let said = redis.into_iter().chain(ledger).find(|s| s.age_ms == age_ms)?;
            Some(said)
        };
        both.into_iter().filter_map(younger).collect()
    }
}

#[async_trait]
impl Presence for FallbackPresence {
    async fn beat(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()> {
        if self.gate.ask(|| self.redis.beat(beat, lost_after)).await.is_none() {
            // Before the call: it may have taken effect although its answer does not come.
            self.in_ledger.store(true, Ordering::Relaxed);
            return self.ledger.beat(beat, lost_after).await;
        }
        // The beat has been taken; a ledger that stalls must not turn it into one that was not.
        if let Err(error) = within(self.gate.patience(), self.also_ledger(beat, lost_after)).await {
            tracing::debug!(%error, "whether the heartbeat is wanted in the ledger, too, is not known");
        }
        Ok(())
    }

    async fn leave(&self, who: Incarnation) -> Result<()> {
        self.gate.ask(|| self.redis.leave(who)).await;
        self.ledger.leave(who).await
    }

    async fn workers(&self) -> Result<Vec<SeenWorker>> {
        let by_redis = self.gate.ask(|| self.redis.workers()).await;
        if by_redis.is_none() {
            self.call.acquire(CALL.1, self.lost_after).await?;
        }
        let by_ledger = self.ledger.workers().await?;
        Ok(self.merge(by_redis, by_ledger))
    }
}
