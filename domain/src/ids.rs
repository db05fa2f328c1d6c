//! Identities. Each is its own type, so that an execution can't be passed where a worker is meant.

use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

/// The ledger's number of a job; a job keeps it over all its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub i64);

/// One firing that ran. A UUID of version 7, made by the leader, so that executions sort by the time they were fired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExecutionId(pub Uuid);

/// One process life of a worker. A worker that restarts under the same name is another incarnation (case H-04).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub Uuid);

/// The fencing number that the ledger hands out with each acquisition of leadership. It only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub i64);

/// One shard of one execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShardRef {
    /// The execution that it belongs to.
    pub execution: ExecutionId,
    /// Its position, from 0.
    pub index: u32,
}

/// One try at a shard. Every write of a worker names it; a lower attempt than the ledger's is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptRef {
    /// The execution.
    pub execution: ExecutionId,
    /// The shard's position, from 0.
    pub index: u32,
    /// The attempt's number, from 1.
    pub attempt: u32,
}

impl AttemptRef {
    /// The shard that this is an attempt at.
    #[must_use]
    pub fn shard(&self) -> ShardRef {
        ShardRef { execution: self.execution, index: self.index }
    }

    /// What a handler passes on to systems that deduplicate: the same for every attempt at the shard.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        self.shard().to_string()
    }
}

macro_rules! display_uuid {
    ($($t:ty),*) => {$(
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { self.0.fmt(f) }
        }
        impl $t {
            /// The sixteen bytes as the ledger stores them.
            #[must_use]
            pub fn as_bytes(&self) -> &[u8; 16] { self.0.as_bytes() }
            /// From sixteen stored bytes; `None` if there are not sixteen.
            #[must_use]
            pub fn from_slice(bytes: &[u8]) -> Option<Self> { Uuid::from_slice(bytes).ok().map(Self) }
        }
        impl std::str::FromStr for $t {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                Uuid::parse_str(s.trim()).map(Self).map_err(|_| format!("'{s}' is not an id; ids look like 01939d5e-7c1a-7def-8000-1234567890ab"))
            }
        }
    )*};
}
display_uuid!(ExecutionId, Incarnation);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ShardRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.execution, self.index)
    }
}

impl fmt::Display for AttemptRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}#{}", self.execution, self.index, self.attempt)
    }
}
