//! What the author of a handler imports.
//!
//! A handler gets a [`ShardContext`]: which slice of which execution it has, in which attempt, how long it may take, and where an
//! earlier attempt got to. It returns what it did, or why it could not. It may be run again after a crash, so its effects must
//! bear that; the context's `idempotency_key` is the same for every attempt at a shard.

pub mod context;
pub mod handler;
pub mod testing;

pub use async_trait::async_trait;
pub use context::{CheckpointError, Effects, ShardContext};
pub use handler::{Registry, ShardError, ShardHandler, ShardOutput};
pub use shardcron_domain::job::RetryPolicy;
pub use shardcron_domain::plan::ShardSlice;
pub use shardcron_domain::shard::Checkpoint;
