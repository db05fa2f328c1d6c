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
//!
//! What attempts let others see, also of one that died: the lines of `shardcron logs`, output, progress, and the shards of a map, which
//! only the attempt that ends well makes.
//!
//! ```
//! use shardcron_sdk::{Checkpoint, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
//! use shardcron_testing::{Crash, Outcome, TestShard};
//!
//! /// Emits a shard for each folder that it finds: all of them in each attempt, since those of a dead one are nobody's.
//! struct Find;
//!
//! #[async_trait]
//! impl ShardHandler for Find {
//!     async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
//!         context.log(format!("beginning after {:?}", context.checkpoint));
//!         for folder in ["in", "out"] {
//!             context.emit(serde_json::json!({ "folder": folder })).await?;
//!         }
//!         let looks = if let Some(Checkpoint::Number(before)) = context.checkpoint { before + 1 } else { 1 };
//!         context.advance(Checkpoint::Number(looks), 2).await?;
//!         context.log("two folders");
//!         Ok(ShardOutput::rows(2))
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! let mut shard = TestShard::new(ShardSlice::Map { max: 10 }).await.unwrap();
//! // The worker dies when its checkpoint is in the ledger, and nobody was told.
//! let first = shard.attempt_with_crash(&Find, Crash::after(1)).await.unwrap();
//! assert!(matches!(first, Outcome::Crashed));
//! assert_eq!(shard.emitted_by(1).len(), 2);
//! assert!(shard.emitted().await.unwrap().is_empty(), "what a dead attempt emitted is nobody's shard");
//! assert!(matches!(shard.attempt(&Find).await.unwrap(), Outcome::Done(_)));
//! let lines: Vec<(u32, String)> = shard.log().await.unwrap();
//! let lines: Vec<(u32, &str)> = lines.iter().map(|(attempt, line)| (*attempt, line.as_str())).collect();
//! assert_eq!(lines, [(1, "beginning after None"), (2, "beginning after Some(Number(1))"), (2, "two folders")]);
//! assert_eq!(shard.emitted().await.unwrap(), [serde_json::json!({"folder": "in"}), serde_json::json!({"folder": "out"})]);
//! assert!(shard.progress(2) > shard.progress(1));
//! # });
//! ```

mod crash;
mod seen;
mod shard;

pub use crash::{Crash, Moment};
pub use shard::{Outcome, TestShard, crash_everywhere};

/// What may go wrong with the ledger itself, and what a check finds.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
