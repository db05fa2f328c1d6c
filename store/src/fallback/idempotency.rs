//! The memory of recent attempts, which may forget.

use super::gate::Gate;
use crate::error::Result;
use crate::lease::{IdempotencyHint, IdempotencyStore};
use crate::redis::RedisIdempotency;
use async_trait::async_trait;
use shardcron_domain::AttemptRef;
use std::sync::Arc;

/// Idempotency keys in Redis; while it is away nothing is remembered, and the ledger alone decides.
#[derive(Clone, Debug)]
pub struct FallbackIdempotency {
    redis: RedisIdempotency,
    gate: Arc<Gate>,
}

impl FallbackIdempotency {
    pub(super) fn new(redis: RedisIdempotency, gate: Arc<Gate>) -> Self {
        FallbackIdempotency { redis, gate }
    }
}

#[async_trait]
impl IdempotencyStore for FallbackIdempotency {
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>> {
        let hints = self.gate.ask(|| self.redis.begin(attempts)).await;
        Ok(hints.unwrap_or_else(|| vec![IdempotencyHint::Fresh; attempts.len()]))
    }

    async fn finish(&self, attempts: &[AttemptRef]) -> Result<()> {
        self.gate.ask(|| self.redis.finish(attempts)).await;
        Ok(())
    }
}
