//! Which workers live, by the presence store's own clock.

use crate::error::Result;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shardcron_domain::{AttemptRef, Incarnation};
use std::time::Duration;

/// What a worker says of itself with each beat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerBeat {
    /// This process life.
    pub incarnation: Incarnation,
    /// The name that people gave it; may come again with another incarnation.
    pub name: String,
    /// Where it runs.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// The program's version.
    pub version: String,
    /// When it started, by its own clock; for display.
    pub started_ms: i64,
    /// Its tiers with their concurrency.
    pub tiers: Vec<(String, u32)>,
    /// Attempts that it runs now.
    pub running: u32,
    /// It takes nothing new.
    pub draining: bool,
    /// For each attempt of a job with a `stall_timeout`: a count that grows with its progress. Empty for all others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub progress: Vec<(AttemptRef, u64)>,
    /// The keys that its caches are asked for most, each with its cache: what its successor preloads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hot_keys: Vec<(String, String)>,
    /// The degraded modes that it is in, by name; a beat of before 0.2 has none.
    #[serde(default)]
    pub modes: Vec<String>,
}

/// A worker as the store last saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenWorker {
    /// Its last words.
    pub beat: WorkerBeat,
    /// Milliseconds since, by the store's clock.
    pub age_ms: i64,
}

/// The heartbeats.
#[async_trait]
pub trait Presence: Send + Sync + 'static {
    /// Renews the worker's presence. The store keeps it for some multiple of `lost_after`, so that a dead worker is seen as dead
    /// and not as unknown.
    ///
    /// # Errors
    /// The store did not answer; the beat may have counted.
    async fn beat(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()>;

    /// Takes the worker off, at the end of a clean shutdown.
    ///
    /// # Errors
    /// The store did not answer; the worker will be seen as dead later.
    async fn leave(&self, who: Incarnation) -> Result<()>;

    /// Everybody whom the store remembers, the dead included for a while.
    ///
    /// # Errors
    /// The store did not answer: nothing may be concluded about anybody.
    async fn workers(&self) -> Result<Vec<SeenWorker>>;
}
