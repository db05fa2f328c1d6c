//! Recent attempts, one key each.

use super::{RedisStores, millis, unavailable};
use crate::error::{Result, StoreError};
use crate::lease::{IdempotencyHint, IdempotencyStore};
use async_trait::async_trait;
use deadpool_redis::redis;
use shardcron_domain::AttemptRef;
use std::time::Duration;

const CLAIMED: &str = "claimed";
const DONE: &str = "done";

/// The idempotency keys in Redis.
#[derive(Clone, Debug)]
pub struct RedisIdempotency {
    stores: RedisStores,
    ttl: Duration,
}

impl RedisIdempotency {
    pub(super) fn new(stores: RedisStores, ttl: Duration) -> Self {
        RedisIdempotency { stores, ttl }
    }

    fn key(&self, attempt: &AttemptRef) -> String {
        self.stores.key(&format!("once:{}:{}:{}", attempt.execution.0.simple(), attempt.index, attempt.attempt))
    }
}

#[async_trait]
impl IdempotencyStore for RedisIdempotency {
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>> {
        if attempts.is_empty() {
            return Ok(Vec::new());
        }
        let ttl = millis(self.ttl);
        let mut pipe = redis::Pipeline::with_capacity(attempts.len() * 2);
        for attempt in attempts {
            let key = self.key(attempt);
            // SET … NX GET in one would need Redis 7.
            pipe.cmd("SET").arg(&key).arg(CLAIMED).arg("NX").arg("PX").arg(ttl);
            pipe.cmd("GET").arg(&key);
        }
        let mut connection = self.stores.connection().await?;
        let answers: Vec<Option<String>> = pipe.query_async(&mut connection).await.map_err(|e| unavailable(&e))?;
        let (pairs, _) = answers.as_chunks::<2>();
        if pairs.len() != attempts.len() {
            let detail = format!("{} answers to {} questions", pairs.len(), attempts.len());
            return Err(StoreError::Unavailable { store: "redis", detail });
        }
        Ok(pairs
            .iter()
            .map(|[set, value]| match (set, value.as_deref()) {
                (Some(_), _) => IdempotencyHint::Fresh,
                (None, Some(DONE)) => IdempotencyHint::Done,
                (None, _) => IdempotencyHint::Claimed,
            })
            .collect())
    }

    async fn finish(&self, attempts: &[AttemptRef]) -> Result<()> {
        if attempts.is_empty() {
            return Ok(());
        }
        let ttl = millis(self.ttl);
        let mut pipe = redis::Pipeline::with_capacity(attempts.len());
        for attempt in attempts {
            pipe.cmd("SET").arg(self.key(attempt)).arg(DONE).arg("PX").arg(ttl).ignore();
        }
        let mut connection = self.stores.connection().await?;
        pipe.query_async::<()>(&mut connection).await.map_err(|e| unavailable(&e))
    }
}
