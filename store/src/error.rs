//! What can go wrong at a store, sorted by what the caller does about it.

use shardcron_domain::Epoch;

/// A store's answer.
pub type Result<T> = std::result::Result<T, StoreError>;

/// A fault of a store.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The server is away, overloaded or busy. Trying again later is right; whether the last write happened is unknown.
    #[error("the {store} is not reachable: {detail}")]
    Unavailable {
        /// `ledger`, `redis`.
        store: &'static str,
        /// Without passwords.
        detail: String,
    },
    /// Another leader has a later epoch. Nothing was written; the caller must stop leading.
    #[error("epoch {mine} is no longer the leader's; the ledger is at {current}")]
    Deposed {
        /// The caller's.
        mine: Epoch,
        /// The ledger's.
        current: Epoch,
    },
    /// A statement of a user's job was refused by the database. The transaction was rolled back.
    #[error("the database refused the job's statement: {detail}")]
    Statement {
        /// The database's words.
        detail: String,
        /// A deadlock or a lock wait: the same statement may pass later.
        transient: bool,
    },
    /// The caller asked for something that can't be: an unknown job, a version that is gone.
    #[error("{0}")]
    Invalid(String),
    /// Somebody else changed it since the caller looked. Nothing was written; look again.
    #[error("{0}")]
    Conflict(String),
    /// What stands in the store can't be understood. Says where.
    #[error("the ledger holds something that this version can't read: {0}")]
    Corrupt(String),
}

impl StoreError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Unavailable { .. } | StoreError::Statement { transient: true, .. })
    }
}
