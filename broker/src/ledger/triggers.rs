//! Triggers that were left in the ledger, for the leader.

use super::{AWAY_FIRST, AWAY_MAX, IDLE_FIRST, Inner};
use crate::backoff::Backoff;
use crate::metric_definitions as m;
use crate::port::{POLLED, Tag, TriggerDelivery, Triggers};
use async_trait::async_trait;
use shardcron_domain::messages::TriggerReply;
use shardcron_store::StoredTrigger;
use std::collections::HashSet;
use std::sync::Arc;
use tokio::sync::watch;

/// Triggers that one leader holds unsettled.
const BATCH: usize = 64;

pub(super) fn consume(inner: Arc<Inner>) -> Box<dyn Triggers> {
    Box::new(LedgerTriggers {
        wake: inner.wake.subscribe(),
        idle: Backoff::new(IDLE_FIRST, inner.poll_interval),
        away: Backoff::new(AWAY_FIRST, AWAY_MAX),
        handed: HashSet::new(),
        settled: Vec::new(),
        stopped: false,
        inner,
    })
}

struct LedgerTriggers {
    inner: Arc<Inner>,
    wake: watch::Receiver<u64>,
    idle: Backoff,
    away: Backoff,
    /// Handed over and still in the ledger.
    handed: HashSet<i64>,
    /// Settled, but the ledger was away when it was told so.
    settled: Vec<i64>,
    stopped: bool,
}

#[async_trait]
impl Triggers for LedgerTriggers {
    async fn next(&mut self) -> Option<Vec<TriggerDelivery>> {
        loop {
            self.wake.mark_unchanged();
            if self.stopped || self.inner.closed() {
                return None;
            }
            let pause = match self.look().await {
                Ok(found) if !found.is_empty() => {
                    self.idle.reset();
                    metrics::counter!(m::TRIGGERS).increment(found.len() as u64);
                    return Some(found.into_iter().map(|t| self.hand_over(t)).collect());
                }
                Ok(_) => self.idle.plain_pause(),
                Err(()) => self.away.pause(),
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.wake.changed() => self.idle.reset(),
            }
        }
    }

    async fn settle(&mut self, trigger: &TriggerDelivery, _reply: &TriggerReply) {
        // Nobody can be answered here: who sent it looks into the ledger.
        if let Ok(id) = i64::try_from(trigger.tag.number)
            && trigger.tag.generation == POLLED
        {
            self.settled.push(id);
            let _ = self.tell_settled().await;
        }
    }

    async fn stop(&mut self) {
        let _ = self.tell_settled().await;
        self.stopped = true;
    }
}

impl LedgerTriggers {
    /// New triggers. An error has been noted as the broker's state.
    async fn look(&mut self) -> Result<Vec<StoredTrigger>, ()> {
        self.tell_settled().await?;
        // With room for those that are held: they come first, and must not hide the others.
        let answer = self.inner.ledger.triggers(BATCH + self.handed.len().min(BATCH)).await;
        let found = self.inner.heard(answer).map_err(|error| tracing::debug!(%error, "polling for triggers failed"))?;
        self.away.reset();
        let free = BATCH.saturating_sub(self.handed.len());
        Ok(found.into_iter().filter(|t| !self.handed.contains(&t.id)).take(free).collect())
    }

    async fn tell_settled(&mut self) -> Result<(), ()> {
        if self.settled.is_empty() {
            return Ok(());
        }
        let answer = self.inner.ledger.settle_triggers(&self.settled).await;
        self.inner.heard(answer).map_err(|error| tracing::debug!(%error, "settling triggers failed, trying again"))?;
        for id in self.settled.drain(..) {
            self.handed.remove(&id);
        }
        Ok(())
    }

    fn hand_over(&mut self, trigger: StoredTrigger) -> TriggerDelivery {
        self.handed.insert(trigger.id);
        TriggerDelivery {
            payload: trigger.payload,
            routed_to: None,
            reply_to: None,
            transport_id: Some(format!("ledger-{}", trigger.id)),
            tag: Tag { generation: POLLED, number: trigger.id.unsigned_abs() },
        }
    }
}
