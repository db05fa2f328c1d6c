//! Tells handlers that their execution has been cancelled. The ledger refuses their writes from the cancel on; this only saves the
//! work, and ends a program that would go on for nothing.

use crate::ports::Ports;
use shardcron_domain::{AttemptRef, ExecutionId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often a worker that runs something asks.
const EVERY: Duration = Duration::from_millis(500);

/// What runs here, with how to stop it.
#[derive(Default)]
pub(crate) struct Cancels(Mutex<BTreeMap<AttemptRef, CancellationToken>>);

/// Takes its attempt off the list when dropped.
pub(super) struct Listed {
    cancels: Arc<Cancels>,
    attempt: AttemptRef,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.cancels.lock().remove(&self.attempt);
    }
}

impl Cancels {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<AttemptRef, CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an attempt on the list.
    pub(super) fn list(self: &Arc<Self>, attempt: AttemptRef, stop: CancellationToken) -> Listed {
        self.lock().insert(attempt, stop);
        Listed { cancels: self.clone(), attempt }
    }

    fn executions(&self) -> Vec<ExecutionId> {
        self.lock().keys().map(|attempt| attempt.execution).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn stop(&self, cancelled: &[ExecutionId]) {
        for (attempt, stop) in self.lock().iter().filter(|(attempt, _)| cancelled.contains(&attempt.execution)) {
            if !stop.is_cancelled() {
                tracing::info!(execution_id = %attempt.execution, shard_no = attempt.index, attempt = attempt.attempt, "cancelled; stopping the handler");
                stop.cancel();
            }
        }
    }
}

/// Looks as long as the worker lives.
pub(super) async fn watch(ports: Ports, cancels: Weak<Cancels>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(executions) = cancels.upgrade().map(|c| c.executions()) else { return };
        if executions.is_empty() {
            continue;
        }
        // A ledger that is away is said elsewhere.
        if let Ok(cancelled) = ports.ledger.cancelled(&executions).await
            && let Some(cancels) = cancels.upgrade()
        {
            cancels.stop(&cancelled);
        }
    }
}
