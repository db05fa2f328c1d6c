//! The configuration's `[cache]`: how long handlers' caches keep what.

use serde::Deserialize;
use shardcron_domain::limits::{CACHE_ABSENT_MS, CACHE_BYTES, CACHE_FRESH_MS};
use shardcron_domain::units::Span;
use shardcron_sdk::cache::CacheOptions;

/// The caches that handlers have. Since 0.2.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// How long a value is in a worker's memory. Default: 60s.
    pub fresh: Span,
    /// How long Redis keeps a value for all workers. Default: 300s and up to 60s more at random.
    pub shared: Option<Span>,
    /// How long it is known that a key does not exist. Default: 30s.
    pub absent: Span,
    /// Bytes that each cache holds in a worker's memory. Default: 33554432 (32 MiB).
    pub bytes: u64,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig { fresh: Span(CACHE_FRESH_MS), shared: None, absent: Span(CACHE_ABSENT_MS), bytes: CACHE_BYTES }
    }
}

impl CacheConfig {
    /// For a worker.
    #[must_use]
    pub fn options(&self) -> CacheOptions {
        CacheOptions {
            fresh: self.fresh.as_std(),
            absent: self.absent.as_std(),
            shared: self.shared.map(Span::as_std),
            bytes: self.bytes,
        }
    }
}
