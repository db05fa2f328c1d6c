//! The lease as a row of the ledger, by the database's clock: what Redis is in a cluster.

use super::SqlLedger;
use super::fault::{Fault, Kind, Outcome, with_retries};
use super::value::Value;
use crate::error::Result;
use crate::lease::{LeaseAnswer, LeaseStore};
use async_trait::async_trait;
use shardcron_domain::fallback::{STAND_IN_PREFIX, is_stand_in};
use std::time::Duration;

/// A named lease in the ledger.
#[derive(Clone, Debug)]
pub struct LedgerLease {
    /// Where the row is.
    pub ledger: SqlLedger,
    /// Its name; at most 100 bytes.
    pub name: String,
}

impl LedgerLease {
    /// Who holds it now, if it has not expired.
    async fn current(&self) -> Outcome<Option<String>> {
        let now = self.ledger.now_ms();
        let sql = format!("SELECT token FROM lease WHERE name = ? AND expires_ms > {now}");
        let rows = self.ledger.db.rows(&sql, &[self.name.as_str().into()]).await?;
        rows.first().map(|row| row.text(0)).transpose()
    }

    async fn take(&self, token: &str, ttl_ms: i64) -> Outcome<LeaseAnswer> {
        let db = &self.ledger.db;
        let now = self.ledger.now_ms();
        let name = Value::from(self.name.as_str());
        // Compare and set in one statement: the row's own lock keeps the others out. A stand-in's lease is as good as free to a
        // scheduler; a prefix of no token at all is free to nobody.
        let free_to_me = if is_stand_in(token) { "" } else { STAND_IN_PREFIX };
        let update = format!(
            "UPDATE lease SET token = ?, expires_ms = {now} + ? WHERE name = ? AND \
             (token = ? OR expires_ms <= {now} OR (? <> '' AND SUBSTR(token, 1, {}) = ?))",
            STAND_IN_PREFIX.len()
        );
        let args = [token.into(), ttl_ms.into(), name.clone(), token.into(), free_to_me.into(), free_to_me.into()];
        if db.run(&update, &args).await? == 1 {
            return Ok(LeaseAnswer::Mine);
        }
        if let Some(holder) = self.current().await? {
            return Ok(if holder == token { LeaseAnswer::Mine } else { LeaseAnswer::HeldBy(holder) });
        }
        let insert = format!("INSERT INTO lease (name, token, expires_ms) VALUES (?, ?, {now} + ?)");
        match db.run(&insert, &[name, token.into(), ttl_ms.into()]).await {
            Ok(_) => Ok(LeaseAnswer::Mine),
            // Somebody was quicker, or it expired between the two statements: look again.
            Err(Fault::Server { kind: Kind::Duplicate, .. }) => Err(Fault::Moved),
            Err(other) => Err(other),
        }
    }

    async fn extend(&self, token: &str, ttl_ms: i64) -> Outcome<LeaseAnswer> {
        let now = self.ledger.now_ms();
        let update =
            format!("UPDATE lease SET expires_ms = {now} + ? WHERE name = ? AND token = ? AND expires_ms > {now}");
        let args = [ttl_ms.into(), self.name.as_str().into(), token.into()];
        if self.ledger.db.run(&update, &args).await? == 1 {
            return Ok(LeaseAnswer::Mine);
        }
        Ok(match self.current().await? {
            Some(holder) => LeaseAnswer::HeldBy(holder),
            None => LeaseAnswer::Nobody,
        })
    }
}

pub(crate) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX / 4)
}

#[async_trait]
impl LeaseStore for LedgerLease {
    async fn acquire(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        with_retries!(self.take(token, millis(ttl)))
    }

    async fn renew(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        with_retries!(self.extend(token, millis(ttl)))
    }

    async fn holder(&self) -> Result<Option<String>> {
        with_retries!(self.current())
    }

    async fn release(&self, token: &str) -> Result<()> {
        let args = [self.name.as_str().into(), token.into()];
        with_retries!(self.ledger.db.run("DELETE FROM lease WHERE name = ? AND token = ?", &args)).map(drop)
    }
}
