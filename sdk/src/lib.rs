//! What the author of a handler imports.
//!
//! A handler gets a [`ShardContext`]: which slice of which execution it has, in which attempt, how long it may take, and where an
//! earlier attempt got to. It returns what it did, or why it could not. It may be run again after a crash, so its effects must
//! bear that; the context's `idempotency_key` is the same for every attempt at a shard.

pub mod cache;
pub mod context;
pub mod file;
pub mod handler;
pub mod once;
pub mod testing;
pub mod transaction;

pub use async_trait::async_trait;
pub use cache::{Cache, CacheLoader};
pub use context::{CheckpointError, Effects, EmitError, ShardContext, SubResult};
pub use file::FilePart;
pub use handler::{NotBefore, Registry, ShardError, ShardHandler, ShardOutput};
pub use shardcron_domain::effects::{SqlValue, StepEnd};
pub use shardcron_domain::job::RetryPolicy;
pub use shardcron_domain::once::{Batch, Known, OverLimit, RecordRow};
pub use shardcron_domain::output::Stream;
pub use shardcron_domain::plan::ShardSlice;
pub use shardcron_domain::shard::{Checkpoint, FailureClass};
pub use shardcron_domain::slots::slot_of;
pub use transaction::{EffectError, EffectsTransaction, Transaction};
