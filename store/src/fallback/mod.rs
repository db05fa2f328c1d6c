//! Redis where it answers, and the ledger where it does not: lease, presence and idempotency over both.
//!
//! The ledger's rows are the truth here as everywhere. What is kept in them while Redis works, and why nobody is lost when the one
//! goes away and comes back, stands with each of the three. They share one circuit for each process: after a failure Redis is
//! asked by a probe only, each second, and everybody else goes to the ledger at once.

mod cache;
mod gate;
mod idempotency;
mod lease;
mod presence;

pub use cache::FallbackCache;
pub use idempotency::FallbackIdempotency;
pub use lease::FallbackLease;
pub use presence::FallbackPresence;

use crate::redis::RedisStores;
use crate::sql::{LedgerLease, LedgerPresence, SqlLedger};
use gate::Gate;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The shortest and the longest that one call waits for Redis.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What the three have to know.
#[derive(Clone, Copy, Debug)]
pub struct FallbackOptions {
    /// How long a worker's beat counts.
    pub lost_after: Duration,
    /// How long the lease lasts.
    pub lease_ttl: Duration,
    /// How long an attempt is remembered in Redis.
    pub idempotency_ttl: Duration,
}

/// Redis with the ledger behind it. Clones share the circuit.
#[derive(Clone, Debug)]
pub struct Fallback {
    redis: RedisStores,
    ledger: SqlLedger,
    options: FallbackOptions,
    gate: Arc<Gate>,
}

impl Fallback {
    /// Over a Redis and the ledger that has the rows `lease` and `presence`.
    #[must_use]
    pub fn new(redis: RedisStores, ledger: SqlLedger, options: FallbackOptions) -> Self {
        // Callers of a beat give up after a third of lost_after, and of a renewal after a third of the lease's time: half of that
        // is for Redis, and the other half for the ledger.
        let patience = (options.lost_after.min(options.lease_ttl) / 6).clamp(PATIENCE.0, PATIENCE.1);
        let gate = Arc::new(Gate::new(redis.clone(), patience));
        Fallback { redis, ledger, options, gate }
    }

    /// The lease of this name.
    #[must_use]
    pub fn lease(&self, name: &str) -> FallbackLease {
        let ledger = LedgerLease { ledger: self.ledger.clone(), name: name.to_owned() };
        FallbackLease::new(self.redis.lease(name), ledger, self.gate.clone())
    }

    /// The workers' presence.
    #[must_use]
    pub fn presence(&self) -> FallbackPresence {
        let ledger = LedgerPresence { ledger: self.ledger.clone() };
        FallbackPresence::new(self.redis.presence(), ledger, self.gate.clone(), self.options.lost_after)
    }

    /// The idempotency keys.
    #[must_use]
    pub fn idempotency(&self) -> FallbackIdempotency {
        FallbackIdempotency::new(self.redis.idempotency(self.options.idempotency_ttl), self.gate.clone())
    }

    /// The level of caches that all workers share.
    #[must_use]
    pub fn cache(&self) -> FallbackCache {
        FallbackCache::new(self.redis.cache(), self.gate.clone())
    }

    /// Why this process does without Redis, while it does.
    #[must_use]
    pub fn fault(&self) -> watch::Receiver<Option<String>> {
        self.gate.fault()
    }
}
