//! Everything that the actors reach the world through.

use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::io::Io;
use crate::ledger_time::LedgerTime;
use crate::modes::Modes;
use crate::trace::Trace;
use shardcron_broker::Broker;
use shardcron_store::{IdempotencyStore, LeaseStore, Ledger, Presence};
use std::future::Future;
use std::sync::Arc;

/// The ports, and the runtime that all I/O runs on. Cheap to clone.
#[derive(Clone)]
pub struct Ports {
    /// The durable truth.
    pub ledger: Arc<dyn Ledger>,
    /// The transport.
    pub broker: Arc<dyn Broker>,
    /// The trigger lease.
    pub lease: Arc<dyn LeaseStore>,
    /// The workers' heartbeats.
    pub presence: Arc<dyn Presence>,
    /// The memory of recent attempts.
    pub idempotency: Arc<dyn IdempotencyStore>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// What the ledger's clock says against it.
    pub ledger_time: LedgerTime,
    /// The dice.
    pub entropy: Arc<dyn Entropy>,
    /// The degraded modes that this process is in.
    pub modes: Modes,
    /// What is said of all this, to whom; off but for tests.
    pub trace: Trace,
    /// Where I/O runs.
    pub io: Io,
    /// Where users' own code runs. What blocks there keeps no heartbeat and no connection waiting.
    pub handlers: Io,
}

impl Ports {
    /// Milliseconds UTC by the ledger's clock: for what one process writes and another compares, such as when a retry may run.
    #[must_use]
    pub fn ledger_now_ms(&self) -> i64 {
        self.clock.now_ms().saturating_add(self.ledger_time.ahead_ms())
    }

    /// A series of waits between tries.
    pub(crate) fn backoff(&self) -> Backoff {
        Backoff { base_ms: 50, entropy: self.entropy.clone() }
    }

    /// Runs `work` on the I/O runtime and hands its outcome to `deliver` there, which sends it to an actor (and waits for room in
    /// the mailbox, so a slow actor slows its sources down instead of growing).
    pub fn run<T, W, D, F>(&self, work: W, deliver: D)
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
        D: FnOnce(T) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        self.io.spawn(async move {
            let outcome = work.await;
            deliver(outcome).await;
        });
    }
}

/// Sends a message to an actor and waits until the mailbox has taken it and the actor has answered. An actor that is gone means
/// that the process is going down; the guardian says so.
pub(crate) async fn tell<A, M>(addr: actix::Addr<A>, message: M)
where
    A: actix::Actor<Context = actix::Context<A>> + actix::Handler<M>,
    M: actix::Message + Send + 'static,
    M::Result: Send,
{
    if addr.send(message).await.is_err() {
        tracing::debug!(message = std::any::type_name::<M>(), "the receiving actor has stopped");
    }
}

/// Waits between tries: doubling from 50 ms to two seconds, with some randomness so that a fleet does not come in step.
pub(crate) struct Backoff {
    base_ms: u64,
    entropy: Arc<dyn Entropy>,
}

impl Backoff {
    pub(crate) fn next(&mut self) -> std::time::Duration {
        let base = self.base_ms;
        self.base_ms = (base * 2).min(2_000);
        std::time::Duration::from_millis(base / 2 + self.entropy.draw() % (base / 2 + 1))
    }
}
