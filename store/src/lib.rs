//! The durable truth: ports and their adapters.
//!
//! Owns: the ledger (executions, shards, results, decisions), the trigger lease, the workers' presence, the idempotency keys,
//! and every line of SQL and every Redis command of the program.
//!
//! Must not: decide. Whether a transition is allowed is said by `shardcron_domain`; the adapters carry its guards in their
//! `WHERE` clauses, and one conformance suite runs against every adapter.

pub mod cache;
pub mod effects_port;
pub mod error;
pub mod fallback;
pub mod firing_port;
pub mod firing_rows;
pub mod job_rows;
pub mod lease;
pub mod ledger;
pub mod ops_port;
pub mod ops_rows;
pub mod output_rows;
pub mod presence;
pub mod redis;
pub mod rows;
pub mod sharding_port;
pub mod sql;

pub use cache::SharedCache;
pub use effects_port::{EffectsLedger, RecordsEnd, StepTx};
pub use error::{Result, StoreError};
pub use firing_port::FiringLedger;
pub use firing_rows::*;
pub use job_rows::*;
pub use lease::{IdempotencyHint, IdempotencyStore, LeaseAnswer, LeaseStore, NoIdempotency};
pub use ledger::Ledger;
pub use ops_port::OpsLedger;
pub use ops_rows::*;
pub use output_rows::*;
pub use presence::{Presence, SeenWorker, WorkerBeat};
pub use rows::*;
pub use sharding_port::{Growth, ShardingLedger, SubResult};
