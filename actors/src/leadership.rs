//! Who leads: the lease task, its trust window, and what it tells the actors.
//!
//! The lease decides who tries to lead; the ledger's epoch decides whose writes count. The task runs on the I/O runtime and never
//! behind an actor's mailbox, so that a busy actor can't make a healthy leader look dead.

use crate::ports::Ports;
use crate::telemetry;
use shardcron_domain::Epoch;
use shardcron_store::{LeaseAnswer, Result, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// What a scheduler is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderState {
    /// Not the leader.
    Standby {
        /// Why not, in words.
        why: String,
        /// Who holds the lease, if somebody is known to.
        held_by: Option<String>,
    },
    /// The leader under this epoch.
    Leading(Epoch),
}

/// A term of leadership, with the window in which it may be acted upon (L2).
#[derive(Clone)]
pub(crate) struct Term {
    pub(crate) epoch: Epoch,
    trusted_until: Arc<AtomicI64>,
}

impl Term {
    /// A term whose window ends at an instant of the monotonic clock.
    #[cfg(test)]
    pub(crate) fn until(epoch: Epoch, mono_ms: i64) -> Self {
        Term { epoch, trusted_until: Arc::new(AtomicI64::new(mono_ms)) }
    }

    /// Whether the leader may still act, by its own monotonic clock, whatever it has heard.
    pub(crate) fn trusted(&self, mono_ms: i64) -> bool {
        mono_ms < self.trusted_until.load(Ordering::Acquire)
    }

    /// Nobody may act on it any more, whatever was left of its window. Before the lease is given up, or another leader may take it
    /// while somebody here still acts: the actors hear of a term's end later than it ends.
    fn end(&self) {
        self.trusted_until.store(i64::MIN, Ordering::Release);
    }
}

/// What the actors are told.
#[derive(Clone, Default)]
pub(crate) struct Leading(pub(crate) Option<Term>);

pub(crate) struct LeaseTask {
    pub(crate) ports: Ports,
    /// Unique to this process life; the lease's value.
    pub(crate) token: String,
    pub(crate) ttl: Duration,
    pub(crate) leading: watch::Sender<Leading>,
    pub(crate) state: watch::Sender<LeaderState>,
    /// The actors report here that the ledger refused their epoch.
    pub(crate) deposed: mpsc::Receiver<Epoch>,
    pub(crate) shutdown: CancellationToken,
}

impl LeaseTask {
    /// Clock drift within a TTL and the time between a check and the act that it allows.
    fn margin_ms(&self) -> i64 {
        self.ttl.as_millis() as i64 / 10
    }

    fn trust_from(&self, start_ms: i64) -> i64 {
        start_ms + self.ttl.as_millis() as i64 - self.margin_ms()
    }

    pub(crate) async fn run(mut self) {
        let mut backoff = self.ports.backoff();
        while !self.shutdown.is_cancelled() {
            match self.try_to_lead().await {
                Ok(Some(term)) => {
                    backoff = self.ports.backoff();
                    let why = self.lead(&term).await;
                    term.end();
                    self.stand_by(why, None);
                }
                Ok(None) => {
                    backoff = self.ports.backoff();
                    // Often: what passes between the lease's end and the next look is added to every fail-over.
                    self.pause(self.ttl / 10).await;
                }
                Err(e) => {
                    // Any error while acquiring means: not the leader (case E-01).
                    self.stand_by(e.to_string(), None);
                    self.pause(backoff.next()).await;
                }
            }
        }
        self.release().await;
    }

    async fn pause(&self, time: Duration) {
        tokio::select! {
            biased;
            () = tokio::time::sleep(time) => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    fn stand_by(&self, why: String, held_by: Option<String>) {
        self.leading.send_replace(Leading(None));
        telemetry::leader(None);
        let next = LeaderState::Standby { why, held_by };
        if *self.state.borrow() != next {
            if let LeaderState::Standby { why, .. } = &next {
                tracing::info!(reason = %why, "standing by");
            }
            self.state.send_replace(next);
        }
    }

    /// The ledger's word on who leads, or that it does not give one in time.
    async fn ask_ledger(&self) -> Result<Epoch> {
        match tokio::time::timeout(self.ttl / 3, self.ports.ledger.leadership()).await {
            Ok(answer) => Ok(answer?.epoch),
            Err(_) => {
                Err(StoreError::Unavailable { store: "ledger", detail: "it did not say in time who leads".into() })
            }
        }
    }

    async fn release(&self) {
        if let Err(e) = self.ports.lease.release(&self.token).await {
            tracing::debug!(error = %e, "the lease could not be released; it ends by itself");
        }
    }

    async fn try_to_lead(&mut self) -> Result<Option<Term>> {
        // Who can't reach the ledger could do nothing with the lease but keep it from those who can.
        self.ask_ledger().await?;
        let start = self.ports.clock.mono_ms();
        match self.ports.lease.acquire(&self.token, self.ttl).await? {
            LeaseAnswer::Mine => {}
            LeaseAnswer::HeldBy(holder) => {
                self.stand_by(format!("{holder} holds the lease"), Some(holder));
                return Ok(None);
            }
            LeaseAnswer::Nobody => return Ok(None),
        }
        let trusted_until = Arc::new(AtomicI64::new(self.trust_from(start)));
        let begun = self.ports.ledger.begin_epoch(&self.token, self.ports.clock.now_ms()).await;
        if begun.is_err() {
            self.release().await;
        }
        let epoch = begun?;
        while self.deposed.try_recv().is_ok() {} // reports about earlier terms
        let term = Term { epoch, trusted_until };
        // The ledger may have taken longer to answer than the lease lasts.
        Ok(term.trusted(self.ports.clock.mono_ms()).then_some(term))
    }

    /// Leads until something ends it; returns what.
    async fn lead(&mut self, term: &Term) -> String {
        tracing::info!(epoch = term.epoch.0, "leading");
        telemetry::leader(Some(term.epoch.0));
        self.leading.send_replace(Leading(Some(term.clone())));
        self.state.send_replace(LeaderState::Leading(term.epoch));
        let mut ledger_heard_ms = self.ports.clock.mono_ms();
        let mut due = tokio::time::interval(self.ttl / 3);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        due.tick().await;
        loop {
            tokio::select! {
                biased;
                Some(epoch) = self.deposed.recv() => {
                    if epoch >= term.epoch {
                        return format!("the ledger refused epoch {epoch}: another scheduler leads");
                    }
                    continue;
                }
                () = self.shutdown.cancelled() => return "shutting down".into(),
                _ = due.tick() => {}
            }
            let start = self.ports.clock.mono_ms();
            let renewal = tokio::time::timeout(self.ttl / 3, self.ports.lease.renew(&self.token, self.ttl));
            let (renewal, ledger) = tokio::join!(renewal, self.ask_ledger());
            match ledger {
                Ok(epoch) if epoch > term.epoch => return format!("epoch {epoch} has begun"),
                Ok(_) => ledger_heard_ms = start,
                Err(e) if self.ports.clock.mono_ms() - ledger_heard_ms >= self.ttl.as_millis() as i64 * 2 / 3 => {
                    // The actors stop acting on this term when they are told of it, so before the lease is given away.
                    self.leading.send_replace(Leading(None));
                    term.end();
                    self.release().await;
                    return format!("the ledger does not answer, and may answer to another scheduler: {e}");
                }
                Err(e) => tracing::debug!(error = %e, "the ledger did not answer; asking again"),
            }
            match renewal {
                Ok(Ok(LeaseAnswer::Mine)) => term.trusted_until.store(self.trust_from(start), Ordering::Release),
                Ok(Ok(LeaseAnswer::HeldBy(other))) => return format!("{other} holds the lease"),
                Ok(Ok(LeaseAnswer::Nobody)) => return "the lease was lost".into(),
                Ok(Err(StoreError::Deposed { current, .. })) => return format!("epoch {current} has begun"),
                Ok(Err(e)) if !term.trusted(self.ports.clock.mono_ms()) => {
                    return format!("the lease could not be renewed: {e}");
                }
                Err(_) if !term.trusted(self.ports.clock.mono_ms()) => {
                    return "the lease could not be renewed in time".into();
                }
                Ok(Err(e)) => tracing::debug!(error = %e, "a renewal failed; trying again within the trust window"),
                Err(_) => tracing::debug!("a renewal did not answer; trying again within the trust window"),
            }
        }
    }
}
