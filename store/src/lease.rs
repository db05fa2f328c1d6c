//! The trigger lease and the idempotency keys: ports that Redis serves in a cluster and the ledger serves without it.

use crate::error::Result;
use async_trait::async_trait;
use shardcron_domain::AttemptRef;
use std::time::Duration;

/// Whose a lease is after a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The caller's.
    Mine,
    /// Somebody else's, by this token.
    HeldBy(String),
    /// Nobody's (only after a renewal that found nothing: the store lost it, or it expired).
    Nobody,
}

/// A time-limited lock. It decides who tries to lead; whose writes count is decided by the ledger's epoch.
///
/// Every call that errs may nevertheless have taken effect. Callers compute their trust window from the instant *before* the
/// call.
#[async_trait]
pub trait LeaseStore: Send + Sync + 'static {
    /// Takes the lease if it is free, or extends it if it is already the caller's. A scheduler also takes it from a stand-in, at
    /// once (see [`shardcron_domain::fallback::is_stand_in`]); what the stand-in had still under way is refused by the epoch.
    ///
    /// # Errors
    /// The store did not answer. The caller is not the leader.
    async fn acquire(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer>;

    /// Extends the lease, only if it is the caller's (compare, then extend, in one step; case E-07).
    ///
    /// # Errors
    /// The store did not answer.
    async fn renew(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer>;

    /// Who holds it now, if anybody does.
    ///
    /// # Errors
    /// The store did not answer: nothing may be concluded.
    async fn holder(&self) -> Result<Option<String>>;

    /// Gives the lease up, only if it is the caller's.
    ///
    /// # Errors
    /// The store did not answer; the lease ends by itself.
    async fn release(&self, token: &str) -> Result<()>;
}

/// What the idempotency store knows of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdempotencyHint {
    /// Nobody has asked about it; the asker's mark is set now.
    Fresh,
    /// Somebody asked before and may have died since: the ledger decides.
    Claimed,
    /// Its result is in the ledger: the delivery may be dropped.
    Done,
}

/// A memory of recent attempts in front of the ledger. Only an accelerator: it may forget at any time.
#[async_trait]
pub trait IdempotencyStore: Send + Sync + 'static {
    /// Asks about and marks a batch, in one round trip; the answers are in the batch's order.
    ///
    /// # Errors
    /// The store did not answer; ask the ledger.
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>>;

    /// Notes that the results of these are committed.
    ///
    /// # Errors
    /// The store did not answer; nothing is lost by that.
    async fn finish(&self, attempts: &[AttemptRef]) -> Result<()>;
}

/// Without Redis: the ledger alone decides.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoIdempotency;

#[async_trait]
impl IdempotencyStore for NoIdempotency {
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>> {
        Ok(vec![IdempotencyHint::Fresh; attempts.len()])
    }

    async fn finish(&self, _attempts: &[AttemptRef]) -> Result<()> {
        Ok(())
    }
}
