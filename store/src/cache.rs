//! What all workers share of their caches.

use crate::error::Result;
use async_trait::async_trait;
use std::time::Duration;

/// Bytes that are kept for a while, and may be forgotten at any time.
#[async_trait]
pub trait SharedCache: Send + Sync + 'static {
    /// What is kept under keys of a cache, in their order.
    ///
    /// # Errors
    /// The store did not answer.
    async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>>;

    /// Keeps bytes under keys of a cache, each for its time.
    ///
    /// # Errors
    /// The store did not answer; some may be kept.
    async fn write(&self, cache: &str, values: &[(String, Vec<u8>, Duration)]) -> Result<()>;

    /// Forgets a key of a cache.
    ///
    /// # Errors
    /// The store did not answer; it may be forgotten.
    async fn forget(&self, cache: &str, key: &str) -> Result<()>;
}
