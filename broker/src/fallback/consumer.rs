//! A consumer that hears the broker and, when told to, polls the ledger beside it.
//!
//! A shard may come by both ways, and twice: the consumer's owner knows it by its attempt, and the claim refuses the second. Tags
//! can't be confused: what was polled has the generation [`POLLED`], which no channel ever has.

use super::Inner;
use super::outlook::Side;
use crate::ledger::{LedgerAcker, LedgerDeliveries};
use crate::port::*;
use async_trait::async_trait;
use shardcron_domain::limits;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Arrivals from the ledger that wait to be fetched.
const WAITING: usize = 1;
/// A refusal needs a person, who needs longer.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// Begins to consume. With the broker there it is waited for, so that its refusal is the caller's to hear; else it is joined later.
pub(super) async fn consume(inner: &Arc<Inner>, tier: &str, prefetch: u16) -> Result<Consumer> {
    inner.outlook.read_note(inner.polled.ledger(), &inner.runtime);
    let (broker, name) = (inner.broker.clone(), tier.to_owned());
    let mut opening = Box::pin(async move { broker.consume(&name, prefetch).await });
    let mut silent = false;
    let opened = tokio::select! {
        opened = &mut opening => Some(opened?),
        () = inner.outlook.falls() => None,
        // The broker is there and the queue does not answer.
        () = silence(inner) => {
            silent = true;
            None
        }
    };
    let (polled, polls) = inner.polled.poll(tier);
    let shared = Arc::new(Shared {
        inner: inner.clone(),
        tier: tier.to_owned(),
        broker: OnceLock::new(),
        polls,
        counts: Mutex::new(Counts { prefetch, generation: 0, open: 0 }),
        stopping: watch::Sender::new(false),
    });
    let opening = match opened {
        Some(consumer) => {
            let (sender, receiver) = oneshot::channel();
            let _ = sender.send(consumer);
            receiver
        }
        None => {
            if silent {
                shared.unserved(true);
            }
            open_later(inner, tier, opening, &shared)
        }
    };
    let (sender, from_ledger) = mpsc::channel(WAITING);
    inner.runtime.spawn(fetch(polled, sender));
    inner.runtime.spawn(follow(shared.clone(), inner.outlook.changes()));
    shared.share_out();
    let deliveries = Box::new(BothDeliveries {
        shared: shared.clone(),
        opening: Some(opening),
        from_broker: None,
        from_ledger: Some(from_ledger),
    });
    Ok(Consumer { deliveries, acker: Arc::new(BothAcker { shared }) })
}

/// Ends when the broker has been up for so long that a queue that can answer would have.
async fn silence(inner: &Inner) {
    let mut state = inner.broker.state();
    loop {
        if state.wait_for(|s| !matches!(s, BrokerState::Away(_))).await.is_err() {
            return std::future::pending().await;
        }
        let away = state.wait_for(|s| matches!(s, BrokerState::Away(_)));
        if tokio::time::timeout(inner.silence, away).await.is_err() {
            return;
        }
    }
}

/// Polls the ledger for a tier whose queue does not serve its consumer, until it does again.
async fn watch_served(shared: Arc<Shared>, mut served: watch::Receiver<bool>) {
    let mut stopping = shared.stopping.subscribe();
    let turns = async {
        while served.wait_for(|served| !*served).await.is_ok() {
            let back = served.wait_for(|served| *served);
            if tokio::time::timeout(shared.inner.silence, back).await.is_err() {
                shared.unserved(true);
                if served.wait_for(|served| *served).await.is_err() {
                    break;
                }
            }
            shared.unserved(false);
        }
    };
    tokio::select! {
        () = turns => {}
        _ = stopping.wait_for(|stop| *stop) => {}
    }
}

type Opening = std::pin::Pin<Box<dyn Future<Output = Result<Consumer>> + Send>>;

/// Joins the broker when it is there, unless the consumer has been stopped by then.
fn open_later(
    inner: &Arc<Inner>,
    tier: &str,
    mut opening: Opening,
    shared: &Arc<Shared>,
) -> oneshot::Receiver<Consumer> {
    let (sender, receiver) = oneshot::channel();
    let (inner, tier, shared) = (inner.clone(), tier.to_owned(), shared.clone());
    let runtime = inner.runtime.clone();
    runtime.spawn(async move {
        let mut stopping = shared.stopping.subscribe();
        let mut changes = inner.outlook.changes();
        loop {
            let opened = tokio::select! {
                opened = &mut opening => opened,
                () = silence(&inner), if !inner.outlook.is_silent(&tier, Side::Consuming) => {
                    shared.unserved(true);
                    continue;
                }
                _ = stopping.wait_for(|stop| *stop) => return,
                () = changes.closed() => return,
            };
            match opened {
                Ok(consumer) => {
                    let _ = sender.send(consumer);
                    return;
                }
                Err(BrokerError::Unavailable(_)) => {}
                Err(BrokerError::Refused(reason)) => {
                    tracing::error!(
                        tier,
                        reason,
                        "consuming is refused, trying again; the ledger is polled only while the broker is away"
                    );
                }
            }
            tokio::select! {
                () = tokio::time::sleep(REFUSED_PAUSE) => {}
                _ = stopping.wait_for(|stop| *stop) => return,
                () = changes.closed() => return,
            }
            let (broker, name, prefetch) = (inner.broker.clone(), tier.clone(), shared.counts().prefetch);
            opening = Box::pin(async move { broker.consume(&name, prefetch).await });
        }
    });
    receiver
}

/// Polls in a task of its own: a look at the ledger is not broken off whenever the broker delivers something.
async fn fetch(mut polled: LedgerDeliveries, sender: mpsc::Sender<Arrival>) {
    loop {
        let arrival = tokio::select! {
            arrival = polled.next() => arrival,
            () = sender.closed() => return,
        };
        let Some(arrival) = arrival else { return };
        if sender.send(arrival).await.is_err() {
            return;
        }
    }
}

/// Lets the ledger be polled, or not, as the outlook changes.
async fn follow(shared: Arc<Shared>, mut changes: super::outlook::Changes) {
    let mut stopping = shared.stopping.subscribe();
    loop {
        tokio::select! {
            goes_on = changes.next() => if !goes_on { return },
            _ = stopping.wait_for(|stop| *stop) => return,
        }
        shared.share_out();
    }
}

struct Shared {
    inner: Arc<Inner>,
    tier: String,
    broker: OnceLock<Arc<dyn Acker>>,
    polls: LedgerAcker,
    counts: Mutex<Counts>,
    stopping: watch::Sender<bool>,
}

/// How many deliveries of the broker are open.
struct Counts {
    prefetch: u16,
    generation: u64,
    open: usize,
}

impl Shared {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the tier's queue does without this consumer. While the whole broker is away that is said by others.
    fn unserved(&self, silent: bool) {
        if self.inner.outlook.set_silent(&self.tier, Side::Consuming, silent) {
            if silent && !self.inner.outlook.fallen() {
                tracing::warn!(
                    tier = self.tier,
                    "the tier's queue does not serve its consumer; the ledger is polled until it does"
                );
            } else {
                tracing::debug!(tier = self.tier, silent, "a consumer is served or not");
            }
        }
        self.share_out();
    }

    /// Lets the poller have what the broker's deliveries leave of the prefetch, so that both together keep to it. After a return of
    /// the broker, what was polled before is open beside its deliveries for a moment, as with a change of the prefetch.
    fn share_out(&self) {
        // Everything is read under the lock: what is seen last is also set last.
        let counts = self.counts();
        let polls = self.inner.outlook.polls(&self.tier) && !*self.stopping.borrow();
        self.polls.set_limit(if polls { usize::from(counts.prefetch).saturating_sub(counts.open) } else { 0 });
    }

    fn arrived(&self, arrival: &Arrival) {
        let mut counts = self.counts();
        match arrival {
            Arrival::Shards(deliveries) => {
                let generation = deliveries.first().map_or(counts.generation, |d| d.tag.generation);
                if generation != counts.generation {
                    (counts.generation, counts.open) = (generation, 0);
                }
                counts.open += deliveries.len();
            }
            Arrival::Renewed { generation } => (counts.generation, counts.open) = (*generation, 0),
        }
        drop(counts);
        self.share_out_if_polling();
    }

    fn settled(&self, tags: &[Tag]) {
        let mut counts = self.counts();
        let generation = counts.generation;
        let settled = tags.iter().filter(|t| t.generation == generation).count();
        counts.open = counts.open.saturating_sub(settled);
        drop(counts);
        self.share_out_if_polling();
    }

    fn share_out_if_polling(&self) {
        if self.inner.outlook.polls(&self.tier) {
            self.share_out();
        }
    }
}

struct BothDeliveries {
    shared: Arc<Shared>,
    /// Gives the broker's consumer, once.
    opening: Option<oneshot::Receiver<Consumer>>,
    from_broker: Option<Box<dyn Deliveries>>,
    from_ledger: Option<mpsc::Receiver<Arrival>>,
}

enum Next {
    Opened(Option<Consumer>),
    Broker(Option<Arrival>),
    Ledger(Option<Arrival>),
}

#[async_trait]
impl Deliveries for BothDeliveries {
    async fn next(&mut self) -> Option<Arrival> {
        loop {
            let next = tokio::select! {
                opened = maybe(self.opening.as_mut()) => Next::Opened(opened.ok()),
                arrival = from(self.from_broker.as_mut()) => Next::Broker(arrival),
                arrival = received(self.from_ledger.as_mut()) => Next::Ledger(arrival),
                else => return None,
            };
            match next {
                Next::Opened(consumer) => {
                    self.opening = None;
                    if let Some(consumer) = consumer {
                        self.join(consumer).await;
                    }
                }
                Next::Broker(Some(arrival)) => {
                    self.shared.arrived(&arrival);
                    return Some(arrival);
                }
                Next::Ledger(Some(arrival)) => return Some(arrival),
                Next::Broker(None) => self.from_broker = None,
                Next::Ledger(None) => self.from_ledger = None,
            }
            if self.opening.is_none() && self.from_broker.is_none() && self.from_ledger.is_none() {
                return None;
            }
        }
    }
}

impl BothDeliveries {
    async fn join(&mut self, Consumer { deliveries, acker }: Consumer) {
        let _ = self.shared.broker.set(acker.clone());
        match deliveries.served() {
            Some(served) => {
                if *served.borrow() {
                    self.shared.unserved(false);
                }
                self.shared.inner.runtime.spawn(watch_served(self.shared.clone(), served));
            }
            None => self.shared.unserved(false),
        }
        self.from_broker = Some(deliveries);
        // Looked at after the acker can be found, so that no wish falls between. To ask for what is there already changes nothing.
        let wanted = self.shared.counts().prefetch;
        acker.set_prefetch(wanted).await;
        if *self.shared.stopping.borrow() {
            acker.stop().await;
        }
    }
}

async fn maybe(
    opening: Option<&mut oneshot::Receiver<Consumer>>,
) -> std::result::Result<Consumer, oneshot::error::RecvError> {
    match opening {
        Some(opening) => opening.await,
        None => std::future::pending().await,
    }
}

async fn from(deliveries: Option<&mut Box<dyn Deliveries>>) -> Option<Arrival> {
    match deliveries {
        Some(deliveries) => deliveries.next().await,
        None => std::future::pending().await,
    }
}

async fn received(arrivals: Option<&mut mpsc::Receiver<Arrival>>) -> Option<Arrival> {
    match arrivals {
        Some(arrivals) => arrivals.recv().await,
        None => std::future::pending().await,
    }
}

struct BothAcker {
    shared: Arc<Shared>,
}

impl BothAcker {
    fn broker(&self) -> Option<&Arc<dyn Acker>> {
        self.shared.broker.get()
    }

    /// Sends tags to the side that they are of.
    async fn settle(&self, tags: &[Tag], requeue: bool) {
        let polled: Vec<Tag> = tags.iter().copied().filter(|t| t.generation == POLLED).collect();
        if !polled.is_empty() {
            // For the ledger both are the same: it has the claim or the result, or the shard is still pending.
            self.shared.polls.ack(&polled).await;
        }
        let others: Vec<Tag>;
        let tags = if polled.is_empty() {
            tags
        } else {
            others = tags.iter().copied().filter(|t| t.generation != POLLED).collect();
            &others
        };
        if let (Some(broker), false) = (self.broker(), tags.is_empty()) {
            match requeue {
                true => broker.requeue(tags).await,
                false => broker.ack(tags).await,
            }
            self.shared.settled(tags);
        }
    }
}

#[async_trait]
impl Acker for BothAcker {
    async fn ack(&self, tags: &[Tag]) {
        self.settle(tags, false).await;
    }

    async fn requeue(&self, tags: &[Tag]) {
        self.settle(tags, true).await;
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.shared.counts().prefetch = prefetch.clamp(1, limits::PREFETCH_MAX);
        self.shared.share_out();
        if let Some(broker) = self.broker() {
            broker.set_prefetch(prefetch).await;
        }
    }

    async fn stop(&self) {
        self.shared.stopping.send_replace(true);
        self.shared.polls.stop().await;
        if let Some(broker) = self.broker() {
            broker.stop().await;
        }
    }
}
