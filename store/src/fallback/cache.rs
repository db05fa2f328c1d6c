//! The shared level of caches, which is away with Redis: nothing else could take its place and be quicker than the source.

use super::gate::Gate;
use crate::cache::SharedCache;
use crate::error::{Result, StoreError};
use crate::redis::RedisCache;
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;

/// Caches in Redis; while it is away that is said at once.
#[derive(Clone, Debug)]
pub struct FallbackCache {
    redis: RedisCache,
    gate: Arc<Gate>,
}

impl FallbackCache {
    pub(super) fn new(redis: RedisCache, gate: Arc<Gate>) -> Self {
        FallbackCache { redis, gate }
    }
}

fn away<T>(answer: Option<T>) -> Result<T> {
    answer.ok_or_else(|| StoreError::Unavailable { store: "redis", detail: "it is away".into() })
}

#[async_trait]
impl SharedCache for FallbackCache {
    async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        away(self.gate.ask(|| self.redis.read(cache, keys)).await)
    }

    async fn write(&self, cache: &str, values: &[(String, Vec<u8>, Duration)]) -> Result<()> {
        away(self.gate.ask(|| self.redis.write(cache, values)).await)
    }

    async fn forget(&self, cache: &str, key: &str) -> Result<()> {
        away(self.gate.ask(|| self.redis.forget(cache, key)).await)
    }
}
