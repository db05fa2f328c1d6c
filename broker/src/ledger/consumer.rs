//! The consumer of one tier. It has no task of its own: it polls while somebody waits for deliveries.

use super::{AWAY_FIRST, AWAY_MAX, IDLE_FIRST, Inner, clamp, spread};
use crate::backoff::Backoff;
use crate::metric_definitions as m;
use crate::port::{Acker, Arrival, Consumer, Deliveries, Delivery, POLLED, Tag};
use async_trait::async_trait;
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage};
use shardcron_domain::{AttemptRef, limits};
use shardcron_store::ledger::PollCursor;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Looks in a row that may find only what is already held, before there is a pause.
const FULL_LOOKS: u32 = 8;

/// The message came without a leader's hand; the epoch is for the logs only.
const NO_EPOCH: i64 = 0;

pub(super) fn consume(inner: Arc<Inner>, tier: &str, prefetch: u16) -> Consumer {
    let (deliveries, acker) = open(inner, tier, usize::from(clamp(prefetch)));
    Consumer { deliveries: Box::new(deliveries), acker: Arc::new(acker) }
}

/// The same for who sets the limit himself; 0 is no polling at all.
pub(super) fn open(inner: Arc<Inner>, tier: &str, limit: usize) -> (LedgerDeliveries, LedgerAcker) {
    let shared = Arc::new(Shared { held: Mutex::default(), changed: watch::Sender::new(Flow { limit, stop: false }) });
    let idle = Backoff::new(IDLE_FIRST, inner.poll_interval);
    let deliveries = LedgerDeliveries {
        wake: inner.wake.subscribe(),
        flow: shared.changed.subscribe(),
        tier: tier.into(),
        cursor: PollCursor::default(),
        idle,
        away: Backoff::new(AWAY_FIRST, AWAY_MAX),
        looks: 0,
        shared: shared.clone(),
        inner,
    };
    (deliveries, LedgerAcker { shared })
}

#[derive(Clone, Copy)]
struct Flow {
    /// Deliveries that may be open.
    limit: usize,
    stop: bool,
}

struct Shared {
    held: Mutex<Held>,
    changed: watch::Sender<Flow>,
}

/// What is handed out and not acked.
#[derive(Default)]
struct Held {
    last: u64,
    by_number: HashMap<u64, AttemptRef>,
    attempts: HashSet<AttemptRef>,
    /// Settled since the look that is under way has begun: it may have read them before they were claimed, and they would come again
    /// for nothing. What was given back is found by the next look.
    settled: HashSet<AttemptRef>,
}

impl Held {
    fn add(&mut self, attempt: AttemptRef) -> Option<Tag> {
        if self.settled.contains(&attempt) || !self.attempts.insert(attempt) {
            return None;
        }
        self.last += 1;
        self.by_number.insert(self.last, attempt);
        Some(Tag { generation: POLLED, number: self.last })
    }

    fn remove(&mut self, tag: Tag) {
        if tag.generation == POLLED
            && let Some(attempt) = self.by_number.remove(&tag.number)
        {
            self.attempts.remove(&attempt);
            self.settled.insert(attempt);
        }
    }

    fn look_begins(&mut self) {
        self.settled.clear();
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, tags: &[Tag]) {
        let mut held = self.held();
        for tag in tags {
            held.remove(*tag);
        }
        drop(held);
        // There may be room again.
        self.changed.send_modify(|_| {});
    }
}

pub(crate) struct LedgerDeliveries {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    wake: watch::Receiver<u64>,
    flow: watch::Receiver<Flow>,
    tier: String,
    cursor: PollCursor,
    idle: Backoff,
    away: Backoff,
    looks: u32,
}

/// What a look at the ledger leads to.
enum Look {
    Found(Vec<Delivery>),
    /// Look again after this time, or at once when something is published.
    Pause(Duration),
    /// Look again when a delivery is settled.
    Full,
}

#[async_trait]
impl Deliveries for LedgerDeliveries {
    async fn next(&mut self) -> Option<Arrival> {
        loop {
            // Marked as seen before the look, so that what comes during it is not slept over.
            self.wake.mark_unchanged();
            let flow = *self.flow.borrow_and_update();
            if flow.stop || self.inner.closed() {
                return None;
            }
            match self.look(flow.limit).await {
                Look::Found(deliveries) => return Some(Arrival::Shards(deliveries)),
                Look::Pause(pause) => {
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        _ = self.flow.changed() => {}
                        _ = self.wake.changed() => self.idle.reset(),
                    }
                }
                Look::Full => {
                    tokio::select! {
                        _ = self.flow.changed() => {}
                        // Closing wakes, too.
                        _ = self.wake.changed() => {}
                    }
                }
            }
        }
    }
}

impl Drop for LedgerDeliveries {
    fn drop(&mut self) {
        // Whoever does not ask any more keeps nobody waiting.
        self.inner.turns.looked(&self.tier, false, true);
    }
}

impl LedgerDeliveries {
    async fn look(&mut self, limit: usize) -> Look {
        let free = limit.saturating_sub(self.shared.held().attempts.len());
        if free == 0 {
            return Look::Full;
        }
        self.inner.turns.wait(&self.tier).await;
        self.shared.held().look_begins();
        // On a copy: a caller that gives up in the middle must not lose what the ledger was about to say.
        let mut cursor = self.cursor;
        let limit = free.min(limits::GROUP_COMMIT_ENTRIES);
        let answer =
            self.inner.ledger.claimable(&self.tier, &mut cursor, self.inner.now_ms(), limit * spread::WIDTH).await;
        let mut attempts = match self.inner.heard(answer) {
            Ok(attempts) => attempts,
            Err(error) => {
                self.inner.turns.looked(&self.tier, false, true);
                tracing::debug!(tier = self.tier, %error, "polling the ledger failed");
                return Look::Pause(self.away.pause());
            }
        };
        let full = attempts.len() == limit * spread::WIDTH;
        let run = spread::choose(attempts.len(), limit, spread::dice());
        // What is behind the chosen run is looked at next; what is before it is left to others, and to the next round.
        let next = attempts.get(run.end.saturating_sub(1)).filter(|_| run.end < attempts.len() || full);
        self.cursor = next.map_or(cursor, |at| PollCursor { execution: Some(at.execution), index: at.index + 1 });
        attempts.truncate(run.end);
        attempts.drain(..run.start);
        self.away.reset();
        let anything = !attempts.is_empty();
        let deliveries = self.hand_out(attempts);
        self.inner.turns.looked(&self.tier, !deliveries.is_empty(), deliveries.len() < free);
        if !deliveries.is_empty() {
            self.idle.reset();
            self.looks = 0;
            let number = deliveries.len() as u64;
            metrics::counter!(m::DELIVERIES, "tier" => self.tier.clone(), "kind" => "first").increment(number);
            return Look::Found(deliveries);
        }
        // Only what is held here already: the cursor has moved on, so the next look sees others.
        self.looks += 1;
        if anything && self.looks <= FULL_LOOKS {
            return Look::Pause(Duration::ZERO);
        }
        self.looks = 0;
        Look::Pause(self.idle.plain_pause())
    }

    fn hand_out(&self, attempts: Vec<AttemptRef>) -> Vec<Delivery> {
        let mut held = self.shared.held();
        let deliver = |attempt| {
            let tag = held.add(attempt)?;
            let message = ShardMessage { v: ENVELOPE_VERSION, attempt, epoch: NO_EPOCH };
            Some(Delivery { message, redelivered: false, tag })
        };
        attempts.into_iter().filter_map(deliver).collect()
    }
}

pub(crate) struct LedgerAcker {
    shared: Arc<Shared>,
}

impl LedgerAcker {
    /// Lets so many deliveries be open; those beyond it stay open.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.shared.changed.send_if_modified(|flow| std::mem::replace(&mut flow.limit, limit) != limit);
    }
}

#[async_trait]
impl Acker for LedgerAcker {
    /// The ledger has the claim or the result; nothing is to be told to it.
    async fn ack(&self, tags: &[Tag]) {
        self.shared.release(tags);
    }

    /// The shard is still pending, so any poller finds it again.
    async fn requeue(&self, tags: &[Tag]) {
        self.shared.release(tags);
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.set_limit(usize::from(clamp(prefetch)));
    }

    async fn stop(&self) {
        self.shared.changed.send_modify(|flow| flow.stop = true);
    }
}
