//! Heartbeats, by Redis' own clock.

use super::{RedisStores, millis, unavailable};
use crate::error::{Result, StoreError};
use crate::presence::{Presence, SeenWorker, WorkerBeat};
use async_trait::async_trait;
use deadpool_redis::redis::Script;
use shardcron_domain::Incarnation;
use std::sync::LazyLock;
use std::time::Duration;

/// A dead worker is remembered for this long at least, so that a leader who was away sees it as dead and not as unknown.
const REMEMBERED_MS: i64 = 3_600_000;

/// Milliseconds by Redis; part of each script.
const NOW: &str = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) ";

/// KEYS: beats (hash), last seen (sorted set), kept until (sorted set). Old ones go with each beat, so that nothing grows.
static BEAT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(&format!(
        "{NOW} \
         redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) \
         redis.call('ZADD', KEYS[2], now, ARGV[1]) \
         redis.call('ZADD', KEYS[3], now + ARGV[3], ARGV[1]) \
         local old = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100) \
         for _, who in ipairs(old) do \
           redis.call('HDEL', KEYS[1], who) redis.call('ZREM', KEYS[2], who) redis.call('ZREM', KEYS[3], who) \
         end \
         return 1"
    ))
});
static LEAVE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "redis.call('ZREM', KEYS[2], ARGV[1]) redis.call('ZREM', KEYS[3], ARGV[1]) \
         return redis.call('HDEL', KEYS[1], ARGV[1])",
    )
});
/// The answer is a list of texts: a beat, its age, a beat, its age, …
static WORKERS: LazyLock<Script> = LazyLock::new(|| {
    Script::new(&format!(
        "{NOW} local out = {{}} \
         for _, who in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. now, '+inf')) do \
           local beat = redis.call('HGET', KEYS[1], who) local seen = redis.call('ZSCORE', KEYS[2], who) \
           if beat and seen then out[#out + 1] = beat out[#out + 1] = string.format('%d', now - seen) end \
         end \
         return out"
    ))
});

/// The workers' presence in Redis.
#[derive(Clone, Debug)]
pub struct RedisPresence {
    stores: RedisStores,
    keys: [String; 3],
}

impl RedisPresence {
    pub(super) fn new(stores: RedisStores) -> Self {
        let keys = ["presence:beats", "presence:seen", "presence:kept"].map(|name| stores.key(name));
        RedisPresence { stores, keys }
    }
}

#[async_trait]
impl Presence for RedisPresence {
    async fn beat(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()> {
        let text = serde_json::to_string(beat).map_err(|e| StoreError::Invalid(format!("a heartbeat as JSON: {e}")))?;
        let keep = millis(lost_after).saturating_mul(10).max(REMEMBERED_MS);
        let mut connection = self.stores.connection().await?;
        let mut call = BEAT.key(&self.keys);
        call.arg(beat.incarnation.to_string()).arg(text).arg(keep);
        call.invoke_async::<i64>(&mut connection).await.map(drop).map_err(|e| unavailable(&e))
    }

    async fn leave(&self, who: Incarnation) -> Result<()> {
        let mut connection = self.stores.connection().await?;
        let mut call = LEAVE.key(&self.keys);
        call.arg(who.to_string());
        call.invoke_async::<i64>(&mut connection).await.map(drop).map_err(|e| unavailable(&e))
    }

    async fn workers(&self) -> Result<Vec<SeenWorker>> {
        let mut connection = self.stores.connection().await?;
        let flat: Vec<String> =
            WORKERS.key(&self.keys).invoke_async(&mut connection).await.map_err(|e| unavailable(&e))?;
        let (pairs, _) = flat.as_chunks::<2>();
        // A beat of another version that can't be read is skipped: its worker is unknown, and unknown is never reclaimed.
        Ok(pairs
            .iter()
            .filter_map(|[beat, age]| {
                Some(SeenWorker { beat: serde_json::from_str(beat).ok()?, age_ms: age.parse::<i64>().ok()?.max(0) })
            })
            .collect())
    }
}
