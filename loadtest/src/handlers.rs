//! The handlers that the workers of a load test have besides those of the program.

use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use std::time::Duration;

/// `handler = { rust = "nap" }`: long enough that a worker which is killed is always in the middle of some.
struct Nap;

/// Shards sleep for 2 to 21 ms, by their index: the same shard always as long, so that runs with one seed compare.
const SHORTEST_MS: u64 = 2;
const SPREAD_MS: u64 = 20;

#[async_trait]
impl ShardHandler for Nap {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let nap = Duration::from_millis(SHORTEST_MS + u64::from(context.attempt.index) % SPREAD_MS);
        tokio::select! {
            () = tokio::time::sleep(nap) => Ok(ShardOutput::rows(1)),
            () = context.stop.cancelled() => Err(ShardError::stopped("told to stop")),
        }
    }
}

/// What the tested workers run.
pub fn registry() -> Registry {
    Registry::default().with("nap", Nap)
}
