//! The rules of Shardcron, and nothing else.
//!
//! Owns: the job specification, schedules, sharding plans, the state machines of executions and shards, the firing, retry,
//! overlap and misfire policies, liveness, recovery, fair dispatch, the invariants and every limit.
//!
//! Must not: read a clock, draw a random number, do I/O, log, or be async. Time and seeds come in as arguments; what has to
//! be done goes out as data. `clippy.toml` and `scripts/check-deps` hold this crate to it.

pub mod address;
pub mod after;
pub mod backfill;
pub mod balance;
pub mod cache;
pub mod cgroup;
pub mod circuit;
pub mod conformance;
pub mod dispatch;
pub mod effects;
pub mod execution;
pub mod explain;
pub mod fallback;
pub mod file_beginning;
pub mod firing;
pub mod flow;
pub mod grouping;
pub mod hints;
pub mod hot_keys;
pub mod http_call;
pub mod ids;
pub mod import;
pub mod invariants;
pub mod job;
pub mod jobfile;
pub mod limits;
pub mod liveness;
pub mod messages;
pub mod metric_names;
pub mod modes;
pub mod once;
pub mod output;
pub mod overlap;
pub mod override_plan;
pub mod plan;
pub mod planning;
pub mod program;
pub mod prune;
pub mod record_ends;
pub mod recovery;
pub mod reopen;
pub mod retry;
pub mod schedule;
pub mod shard;
pub mod sharding;
pub mod slots;
pub mod trace;
pub mod trigger;
mod trigger_fields;
pub mod units;
pub mod wheel;

pub use ids::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, ShardRef};
pub use job::JobSpec;
