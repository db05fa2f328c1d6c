//! What can go wrong inside a transaction, and how often the whole of it is tried again.

use crate::error::StoreError;
use shardcron_domain::retry::apart;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

/// The result of a step inside the adapter.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// What the server's refusal means, by [`super::dialect::Dialect::classify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A unique key exists.
    Duplicate,
    /// A deadlock, a lock wait or a busy file: the transaction is rolled back and may simply be run again.
    Contention,
    /// The connection is gone, or none could be had.
    Lost,
    /// A table or a column is not there.
    Missing,
    /// Anything else that the server said.
    Refused,
}

/// A failed step.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// By the server.
    Server {
        /// What it means.
        kind: Kind,
        /// The server's words.
        detail: String,
    },
    /// A guarded write matched less than it should: what was read or assumed has changed since. Run again from the start.
    Moved,
    /// Final, as the caller sees it.
    Final(StoreError),
}

impl Fault {
    pub(crate) fn corrupt(what: String) -> Self {
        Fault::Final(StoreError::Corrupt(what))
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Fault::Final(StoreError::Invalid(what.into()))
    }

    /// For a write that must not be sent a second time: whether it happened is unknown once the connection is lost, and the caller
    /// has to be told so.
    pub(crate) fn once(self) -> Self {
        match self {
            Fault::Server { kind: Kind::Lost, .. } => Fault::Final(self.into_store_error()),
            other => other,
        }
    }

    /// As the caller sees it.
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            Fault::Final(error) => error,
            Fault::Moved => StoreError::Unavailable {
                store: "ledger",
                detail: "its rows changed with every try to write them".into(),
            },
            Fault::Server { kind: Kind::Missing, detail } => StoreError::Invalid(format!(
                "the ledger's tables are missing or older than this program ({detail}); run `shardcron migrate`"
            )),
            Fault::Server { detail, .. } => StoreError::Unavailable { store: "ledger", detail },
        }
    }
}

/// Tries of one transaction in all. Deadlocks among some dozen writers are over in two or three; the rest is for storms.
const TRIES: u32 = 12;
/// Tries after a lost connection in all: pooled connections may all have been closed by the server at once, and a server that
/// restarts must not be waited for here.
const TRIES_LOST: u32 = 3;

/// No further try after this long: a lock that is held for minutes is a fault that the caller must see (case M-05).
const TRY_FOR: Duration = Duration::from_secs(20);

/// See [`apart`].
const APART: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(256));

/// Counts the tries of one call and waits between them.
#[derive(Debug)]
pub(crate) struct Backoff {
    began: Instant,
    tries: u32,
    lost: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { began: Instant::now(), tries: 0, lost: 0 }
    }
}

impl Backoff {
    /// Waits before the next try, or says that there is none.
    pub(crate) async fn pause(&mut self, fault: Fault) -> Result<(), StoreError> {
        self.tries += 1;
        let again = match &fault {
            Fault::Server { kind: Kind::Contention, .. } | Fault::Moved => self.tries < TRIES,
            Fault::Server { kind: Kind::Lost, .. } => {
                self.lost += 1;
                self.lost < TRIES_LOST
            }
            Fault::Server { .. } | Fault::Final(_) => false,
        };
        if !again || self.began.elapsed() > TRY_FOR {
            return Err(fault.into_store_error());
        }
        tracing::debug!(tries = self.tries, ?fault, "a ledger transaction is run again");
        let draw = RandomState::new().build_hasher().finish();
        tokio::time::sleep(apart(self.tries, APART.0, APART.1, draw)).await;
        Ok(())
    }
}

/// Runs an attempt (an expression that makes its future anew) until it passes or its faults are final.
macro_rules! with_retries {
    ($attempt:expr) => {{
        let mut backoff = $crate::sql::fault::Backoff::default();
        loop {
            match $attempt.await {
                Ok(value) => break Ok(value),
                Err(fault) => {
                    if let Err(error) = backoff.pause(fault).await {
                        break Err(error);
                    }
                }
            }
        }
    }};
}
pub(crate) use with_retries;
