//! The shared level of the workers' caches.

use super::{RedisStores, millis, unavailable};
use crate::cache::SharedCache;
use crate::error::Result;
use async_trait::async_trait;
use deadpool_redis::redis;
use std::time::Duration;

/// Values of caches in Redis, one key each.
#[derive(Clone, Debug)]
pub struct RedisCache {
    stores: RedisStores,
}

impl RedisCache {
    pub(super) fn new(stores: RedisStores) -> Self {
        RedisCache { stores }
    }

    /// A name of a cache has no colon, so that no two caches share a key.
    fn key(&self, cache: &str, key: &str) -> String {
        self.stores.key(&format!("cache:{cache}:{key}"))
    }
}

#[async_trait]
impl SharedCache for RedisCache {
    async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut get = redis::cmd("MGET");
        keys.iter().for_each(|key| {
            get.arg(self.key(cache, key));
        });
        let mut connection = self.stores.connection().await?;
        get.query_async(&mut connection).await.map_err(|e| unavailable(&e))
    }

    async fn write(&self, cache: &str, values: &[(String, Vec<u8>, Duration)]) -> Result<()> {
        let mut pipe = redis::Pipeline::with_capacity(values.len());
        for (key, value, keep) in values {
            // Redis refuses a time of nothing.
            pipe.cmd("SET")
                .arg(self.key(cache, key))
                .arg(value.as_slice())
                .arg("PX")
                .arg(millis(*keep).max(1))
                .ignore();
        }
        if values.is_empty() {
            return Ok(());
        }
        let mut connection = self.stores.connection().await?;
        pipe.query_async::<()>(&mut connection).await.map_err(|e| unavailable(&e))
    }

    async fn forget(&self, cache: &str, key: &str) -> Result<()> {
        let mut connection = self.stores.connection().await?;
        let mut del = redis::cmd("DEL");
        del.arg(self.key(cache, key));
        del.query_async::<i64>(&mut connection).await.map(drop).map_err(|e| unavailable(&e))
    }
}
