//! For authors of handlers: runs a handler on a real embedded ledger, crashes it where one likes, runs it again, and looks at what
//! came of it. No service and no worker process is needed.
//!
//! Owns: a ledger in a folder of its own, one shard in it with its attempts as a worker claims and ends them, and crashes.
//!
//! Must not: imitate the ledger. What a handler does here goes through the same code as in a worker, on SQLite; that is why this is a
//! crate of its own, above the store, while the SDK that handlers import stays below it.
//!
//! ```
//! use shardcron_sdk::{Checkpoint, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait, values};
//! use shardcron_testing::TestShard;
//!
//! struct Count;
//!
//! #[async_trait]
//! impl ShardHandler for Count {
//!     async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
//!         let from = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { 1 };
//!         for id in from..=3 {
//!             let mut tx = context.transaction().await?;
//!             tx.execute("INSERT INTO seen (id) VALUES (?)", &values![id]).await?;
//!             tx.commit(Checkpoint::Number(id), 1).await?;
//!         }
//!         Ok(ShardOutput::rows(3))
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! // A worker dies before each commit and after each commit; the next attempt goes on, and each row is there once.
//! let crashes = shardcron_testing::crash_everywhere(
//!     async || {
//!         let shard = TestShard::new(ShardSlice::Range { from: 1, to: 3 }).await?;
//!         shard.script("CREATE TABLE seen (id BIGINT)").await?;
//!         Ok(shard)
//!     },
//!     &Count,
//!     async |shard| {
//!         assert_eq!(shard.number("SELECT COUNT(*) FROM seen").await?, 3);
//!         Ok(())
//!     },
//! )
//! .await
//! .unwrap();
//! assert_eq!(crashes, 6);
//! # });
//! ```

mod crash;
mod shard;

pub use crash::{Crash, Moment};
pub use shard::{Outcome, TestShard, crash_everywhere};

/// What may go wrong with the ledger itself, and what a check finds.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
