//! What the shards of an execution share, read from the ledger once per process.

use shardcron_domain::ExecutionId;
use shardcron_store::{ExecutionHead, Ledger, StoreError};
use std::sync::Arc;

/// A bounded cache over `Ledger::execution_head`. A head never changes, so there is nothing to invalidate.
#[derive(Clone)]
pub(crate) struct Heads {
    ledger: Arc<dyn Ledger>,
    cache: moka::future::Cache<ExecutionId, Arc<ExecutionHead>>,
}

impl Heads {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Heads { ledger, cache: moka::future::Cache::new(1_000) }
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
