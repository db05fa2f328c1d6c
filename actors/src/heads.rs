//! What the shards of an execution share, read from the ledger once per process.

use moka::policy::EvictionPolicy;
use shardcron_domain::ExecutionId;
use shardcron_store::{ExecutionHead, Ledger, StoreError};
use std::sync::Arc;

/// Heads that are kept: more than are claimed at a time, also when each execution has one shard.
const HEADS: u64 = 4_096;

/// A bounded cache over `Ledger::execution_head`. A head never changes, so there is nothing to invalidate.
#[derive(Clone)]
pub(crate) struct Heads {
    ledger: Arc<dyn Ledger>,
    cache: moka::future::Cache<ExecutionId, Arc<ExecutionHead>>,
}

impl Heads {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        // By age: heads are read some moments before they are used, and hardly ever again. By frequency, as is usual, a full cache would
        // not take in what has never been asked for.
        let cache = moka::future::Cache::builder().max_capacity(HEADS).eviction_policy(EvictionPolicy::lru()).build();
        Heads { ledger, cache }
    }

    /// Reads what is not known yet of these in one statement, for [`Heads::get`] to find. Only an accelerator: what goes wrong here
    /// goes wrong there again, and is said there.
    pub(crate) async fn warm(&self, ids: impl Iterator<Item = ExecutionId>) {
        let mut unknown: Vec<ExecutionId> = ids.filter(|id| !self.cache.contains_key(id)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        // A single one is read by whoever needs it.
        if unknown.len() < 2 {
            return;
        }
        match self.ledger.execution_heads(&unknown).await {
            Ok(heads) => {
                for head in heads {
                    self.cache.insert(head.id, Arc::new(head)).await;
                }
            }
            Err(e) => tracing::debug!(error = %e, "the executions' heads could not be read together"),
        }
    }

    /// One read per execution, however many shards ask at once.
    pub(crate) async fn get(&self, id: ExecutionId) -> Result<Arc<ExecutionHead>, StoreError> {
        let load = async {
            match self.ledger.execution_head(id).await {
                Ok(Some(head)) => Ok(Arc::new(head)),
                Ok(None) => Err(StoreError::Invalid(format!("execution {id} is not in the ledger"))),
                Err(e) => Err(e),
            }
        };
        self.cache.try_get_with(id, load).await.map_err(|shared| (*shared).clone())
    }
}
