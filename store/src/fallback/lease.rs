//! The lease in Redis with a shadow in the ledger.
//!
//! | | |
//! | --- | --- |
//! | who waits | asks Redis for the key, as long as it answers, and leaves the row alone |
//! | who has Redis' key | also takes the ledger's row, and leads only with it; held by another, the key is given back |
//! | who can't reach Redis | tries the ledger's row, and finds it held while anybody leads |
//! | the leader | renews both; it leads as long as it renews the row, with or without the key |
//!
//! So the row decides, and the key keeps the crowd away from it. Two who see one store each (a partition) meet at the row. A leader
//! that can't reach the ledger can write nothing anyway: it gives up at the end of its trust window, and gives the key back for one
//! who can. The reasons: docs/decisions/0011.
//!
//! The key of a call that failed may nevertheless have been set. It ends by itself, within the lease's time, or with the caller's
//! next call.

use super::gate::{Gate, within};
use crate::error::Result;
use crate::lease::{LeaseAnswer, LeaseStore};
use crate::redis::RedisLease;
use crate::sql::LedgerLease;
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;

/// A named lease, in both.
#[derive(Debug)]
pub struct FallbackLease {
    redis: RedisLease,
    ledger: LedgerLease,
    gate: Arc<Gate>,
}

impl FallbackLease {
    pub(super) fn new(redis: RedisLease, ledger: LedgerLease, gate: Arc<Gate>) -> Self {
        FallbackLease { redis, ledger, gate }
    }

    async fn give_back(&self, token: &str) {
        self.gate.ask(|| self.redis.release(token)).await;
    }
}

/// A part of the lease's time, in which the ledger can answer.
fn part(ttl: Duration, of: u32) -> Duration {
    (ttl / of).max(Duration::from_millis(100))
}

#[async_trait]
impl LeaseStore for FallbackLease {
    async fn acquire(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        use LeaseAnswer::Mine;
        let key = self.gate.ask(|| self.redis.acquire(token, ttl)).await;
        if let Some(other) = key.clone().filter(|answer| *answer != Mine) {
            return Ok(other);
        }
        let row = within(part(ttl, 3), self.ledger.acquire(token, ttl)).await;
        if key.is_some() && !matches!(row, Ok(Mine)) {
            self.give_back(token).await;
        }
        row
    }

    async fn renew(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        use LeaseAnswer::{HeldBy, Mine, Nobody};
        let key = self.gate.ask(|| self.redis.renew(token, ttl));
        // At the same time, so that neither waits for a slow other.
        let (key, row) = tokio::join!(key, within(part(ttl, 4), self.ledger.renew(token, ttl)));
        match (&row, key) {
            // Redis has lost its memory, or is back. Whether the key can be had now or with the next renewal: the row decides.
            (Ok(Mine), Some(Nobody)) => {
                self.gate.ask(|| self.redis.acquire(token, ttl)).await;
                row
            }
            // It ended, as after a long stall of the database, and nobody has taken it. Whoever led in between has begun an epoch.
            (Ok(Nobody), Some(Mine)) => within(part(ttl, 8), self.ledger.acquire(token, ttl)).await,
            (Ok(HeldBy(_)), Some(Mine)) => {
                self.give_back(token).await;
                row
            }
            _ => row,
        }
    }

    async fn holder(&self) -> Result<Option<String>> {
        // The row decides.
        self.ledger.holder().await
    }

    async fn release(&self, token: &str) -> Result<()> {
        self.give_back(token).await;
        self.ledger.release(token).await
    }
}
