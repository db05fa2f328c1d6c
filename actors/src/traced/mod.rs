//! Ports that say what is asked of them and what they answer. An actor can't forget to: whatever it does goes through a port.

mod broker;
mod effects;
mod firing;
mod ledger;
mod ops;
mod sharding;

use crate::ports::Ports;
use crate::trace::Trace;
use async_trait::async_trait;
use shardcron_domain::AttemptRef;
use shardcron_domain::trace::{ALREADY_DONE, TraceEvent};
use shardcron_store::{IdempotencyHint, IdempotencyStore, Result};
use std::sync::Arc;

impl Ports {
    /// The same ports, traced.
    #[must_use]
    pub fn traced(self, trace: Trace) -> Self {
        Ports {
            ledger: Arc::new(ledger::Traced { inner: self.ledger, trace: trace.clone() }),
            broker: Arc::new(broker::Traced { inner: self.broker, trace: trace.clone() }),
            idempotency: Arc::new(Keys { inner: self.idempotency, trace: trace.clone() }),
            trace,
            ..self
        }
    }
}

struct Keys {
    inner: Arc<dyn IdempotencyStore>,
    trace: Trace,
}

#[async_trait]
impl IdempotencyStore for Keys {
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>> {
        let hints = self.inner.begin(attempts).await?;
        let done = attempts.iter().zip(&hints).filter(|(_, hint)| **hint == IdempotencyHint::Done);
        self.trace.say_all(done, |(at, _)| TraceEvent::ClaimRefused { at: *at, reason: ALREADY_DONE.into() });
        Ok(hints)
    }

    async fn finish(&self, attempts: &[AttemptRef]) -> Result<()> {
        self.inner.finish(attempts).await
    }
}
