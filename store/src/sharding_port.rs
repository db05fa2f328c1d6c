//! The part of the ledger's port that is about plans that are made at a firing, and shards that a shard makes.

use crate::error::Result;
use crate::rows::{Ended, Recorded};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shardcron_domain::planning::{KeyBounds, LastRun};
use shardcron_domain::shard::Rejection;
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};

/// A shard that ended well, for the one that reduces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubResult {
    /// The shard's index in its execution; the emitted ones begin at 1.
    pub index: u32,
    /// Records that it worked on, if its handler counted them.
    pub rows: Option<u64>,
    /// Its summary as JSON.
    pub summary: Option<String>,
}

/// How an execution grows when its first shard has ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Shards that were emitted under the attempt.
    pub emitted: u32,
    /// Whether one more shard reduces their results.
    pub reduce: bool,
}

/// Like [`Ledger`](crate::Ledger), whose rules hold here: each method is one transaction at most and may be called again.
#[async_trait]
pub trait ShardingLedger: Send + Sync + 'static {
    /// Where the keys of a query are to be cut, so that each shard has as many rows as the next. Reads the key's index twice.
    ///
    /// # Errors
    /// `Invalid` or `Statement` with what is wrong with the query, or that keys are NULL; or the ledger is away.
    async fn key_bounds(&self, query: &QuerySpec) -> Result<KeyBounds>;

    /// The latest execution of a job that ended well, with all its shards' durations; none if it had too many shards to be of use.
    ///
    /// # Errors
    /// The ledger is away.
    async fn last_run(&self, job: JobId) -> Result<Option<LastRun>>;

    /// Stages shards of a map under the attempt of its first shard: payloads in JSON, for the indexes from `from` on. What an
    /// earlier call staged under the same indexes is replaced.
    ///
    /// # Errors
    /// The ledger is away.
    async fn emit(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: u32,
        payloads: &[String],
    ) -> Result<std::result::Result<(), Rejection>>;

    /// Records the good end of a map's first shard, and makes what was staged under that attempt the execution's other shards, in
    /// one transaction. What other attempts staged is gone.
    ///
    /// # Errors
    /// Fewer are staged than were emitted, which can't be; or the ledger is away.
    async fn finish_map(
        &self,
        owner: Incarnation,
        ended: &Ended,
        growth: Growth,
        now_ms: i64,
    ) -> Result<std::result::Result<Recorded, Rejection>>;

    /// The payload of an emitted shard; `None` if there is none of this index.
    ///
    /// # Errors
    /// The ledger is away.
    async fn emitted(&self, execution: ExecutionId, index: u32) -> Result<Option<String>>;

    /// How many shards an execution's first one emitted.
    ///
    /// # Errors
    /// The ledger is away.
    async fn emitted_count(&self, execution: ExecutionId) -> Result<u32>;

    /// Shards of broadcasts that wait for this worker and are due, with their tiers. What of its own has ended is forgotten.
    ///
    /// # Errors
    /// The ledger is away.
    async fn addressed(&self, who: Incarnation, now_ms: i64, limit: usize) -> Result<Vec<(String, AttemptRef)>>;

    /// Workers for which shards of broadcasts wait or run.
    ///
    /// # Errors
    /// The ledger is away.
    async fn addressees(&self) -> Result<Vec<Incarnation>>;

    /// Ends the shards that wait for a worker which is gone, as dead letters, under the leader's fence; some at a time, and which.
    ///
    /// # Errors
    /// Deposed, or the ledger is away.
    async fn abandon(&self, epoch: Epoch, who: Incarnation, now_ms: i64) -> Result<Vec<AttemptRef>>;

    /// Results of an execution's shards from an index on, in order.
    ///
    /// # Errors
    /// The ledger is away.
    async fn sub_results(&self, execution: ExecutionId, from: u32, limit: usize) -> Result<Vec<SubResult>>;
}
