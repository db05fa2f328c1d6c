//! Output of running attempts on its way to the ledger: kept within bounds by `domain::output`, and written together for all attempts
//! of the worker a few times a second. An attempt that writes nothing costs nothing; a ledger that is away costs no more memory than
//! the bounds.

use crate::ports::Ports;
use shardcron_domain::AttemptRef;
use shardcron_domain::output::{Buffer, Stream};
use shardcron_store::OutputWrite;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::Notify;

/// How long output waits for company. Who follows sees it this much later.
const EVERY: Duration = Duration::from_millis(250);
/// How long an attempt's end waits for its output to be written.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait between tries while the ledger is away.
const MAX_WAIT: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Slot {
    buffer: Buffer,
    /// The attempt is over: what its handler still writes is nobody's.
    closed: bool,
    /// There was output.
    wrote: bool,
}

type Shelf = BTreeMap<AttemptRef, Arc<Mutex<Slot>>>;

/// The output of a worker's attempts.
#[derive(Default)]
pub(super) struct Outputs {
    /// Attempts that have written something since the last write.
    dirty: Mutex<Shelf>,
    /// Of one write at a time: what was sent and not answered yet. It is sent again as it was.
    unanswered: tokio::sync::Mutex<Vec<OutputWrite>>,
    wake: Arc<Notify>,
}

/// Where one attempt writes.
#[derive(Clone)]
pub(super) struct Outlet {
    attempt: AttemptRef,
    slot: Arc<Mutex<Slot>>,
    all: Weak<Outputs>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outlet {
    pub(super) fn push(&self, stream: Stream, bytes: &[u8]) {
        let first = {
            let mut slot = lock(&self.slot);
            if slot.closed || bytes.is_empty() {
                return;
            }
            let first = slot.buffer.is_empty();
            slot.wrote = true;
            slot.buffer.push(stream, bytes);
            first
        };
        if first && let Some(all) = self.all.upgrade() {
            lock(&all.dirty).insert(self.attempt, self.slot.clone());
            all.wake.notify_one();
        }
    }
}

impl Outputs {
    /// Notified when there is something to write.
    pub(super) fn wake(&self) -> Arc<Notify> {
        self.wake.clone()
    }

    /// Where an attempt writes.
    pub(super) fn outlet(self: &Arc<Self>, attempt: AttemptRef) -> Outlet {
        Outlet { attempt, slot: Arc::default(), all: Arc::downgrade(self) }
    }

    /// Takes no more of an attempt, and writes what there is of it, if the ledger answers in time.
    pub(super) async fn finish(&self, ports: &Ports, outlet: &Outlet) {
        let wrote = {
            let mut slot = lock(&outlet.slot);
            slot.closed = true;
            slot.wrote
        };
        if !wrote {
            return;
        }
        let all = async {
            while !(self.flush(ports).await && lock(&outlet.slot).buffer.is_empty()) {
                tokio::time::sleep(EVERY / 5).await;
            }
        };
        if tokio::time::timeout(PATIENCE, all).await.is_err() {
            tracing::debug!(execution_id = %outlet.attempt.execution, shard_no = outlet.attempt.index, "output is written later");
        }
    }

    /// Writes everything that has come in. May be dropped at any time: what was not answered is sent again.
    async fn flush(&self, ports: &Ports) -> bool {
        let mut writes = self.unanswered.lock().await;
        if writes.is_empty() {
            let dirty = std::mem::take(&mut *lock(&self.dirty));
            *writes = dirty
                .into_iter()
                .map(|(attempt, slot)| OutputWrite { attempt, write: lock(&slot).buffer.take() })
                .filter(|one| !one.write.add.is_empty() || one.write.delete.is_some())
                .collect();
        }
        if writes.is_empty() {
            return true;
        }
        match ports.ledger.keep_output(&writes, ports.ledger_now_ms()).await {
            Ok(()) => {
                writes.clear();
                true
            }
            Err(e) if e.is_transient() => {
                tracing::debug!(error = %e, "output waits for the ledger");
                false
            }
            Err(e) => {
                tracing::warn!(error = %e, "the ledger does not take this output; it is dropped");
                writes.clear();
                true
            }
        }
    }
}

/// Writes as long as the worker lives.
pub(super) async fn write(ports: Ports, outputs: Weak<Outputs>, wake: Arc<Notify>) {
    let mut wait = EVERY;
    loop {
        // A worker that is gone wakes nobody: looked for now and then.
        let woken = tokio::time::timeout(MAX_WAIT * 6, wake.notified()).await.is_ok();
        tokio::time::sleep(wait).await;
        let Some(outputs) = outputs.upgrade() else { return };
        if !woken && lock(&outputs.dirty).is_empty() {
            continue;
        }
        if outputs.flush(&ports).await {
            wait = EVERY;
        } else {
            wait = (wait * 2).min(MAX_WAIT);
            outputs.wake.notify_one();
        }
        if !lock(&outputs.dirty).is_empty() {
            outputs.wake.notify_one();
        }
    }
}
