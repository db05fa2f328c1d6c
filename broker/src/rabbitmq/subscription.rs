//! A consumer that lasts: its own channel and task, made anew whenever the channel, the connection or the queue is lost.
//!
//! Another prefetch means another consumer on the same channel, since the server reads `basic.qos` when a consumer begins (and quorum
//! queues refuse the channel-wide kind): the old one is cancelled, what it has delivered stays unacked on the channel under the same
//! tags, and the new one begins to count at nothing. So for a moment up to old + new deliveries may be open, none is lost or doubled.

use super::error::bounded;
use super::link::{Closing, Link};
use super::settler::Settler;
use super::{Inner, declare};
use crate::backoff::Backoff;
use crate::metric_definitions as m;
use crate::port::{BrokerError, Result};
use crate::topology::Topology;
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};
use shardcron_domain::limits;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

/// Deliveries in one arrival; the size of a group commit.
const BATCH_MAX: usize = limits::GROUP_COMMIT_ENTRIES;
/// Batches that wait for the receiver. More would only hide from the broker that nobody takes them.
const WAITING_BATCHES: usize = 2;
/// lapin does not always say that a channel has died, so it is asked.
const WATCHDOG: Duration = Duration::from_millis(500);
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Comes on top of the connection's own pause; see there.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// A refusal needs a person, who needs longer (case D-05: at most one try in a second).
const REFUSED_FIRST: Duration = Duration::from_secs(2);
const REFUSED_MAX: Duration = Duration::from_secs(10);
/// Tries in a row that got no answer for the whole time that one is waited for, after which a queue is taken for dead. Nobody waits
/// for it: meanwhile the ledger is polled (`fallback/consumer.rs`).
const SILENT_MAX: u32 = 2;

/// What to consume.
pub(super) struct Spec {
    /// `shards` or `triggers`, for metrics.
    pub kind: &'static str,
    pub queue: String,
    /// Declared before each (re)start: somebody may have deleted the queue.
    pub topology: Topology,
    pub prefetch: u16,
    /// What stands in it stands in the ledger, too: it may be deleted when the server can't serve it any more.
    pub expendable: bool,
}

/// What its owner wants of a running consumer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub prefetch: u16,
    pub stop: bool,
}

/// Turns what lapin delivers into what the port's receiver gets.
pub(super) trait Reader: Send + 'static {
    type Item: Send + 'static;
    /// A batch of deliveries of one generation; `None` if nothing of it is for the receiver.
    fn batch(&mut self, generation: u64, deliveries: Vec<Delivery>) -> Option<Self::Item>;
    /// A new channel.
    fn renewed(&mut self, generation: u64) -> Option<Self::Item>;
}

/// The ends of a running consumer.
pub(super) struct Started<T> {
    pub items: mpsc::Receiver<T>,
    pub wanted: watch::Sender<Wanted>,
    /// False while it has no channel that consumes.
    pub served: watch::Receiver<bool>,
}

/// Begins to consume; waits for the server.
pub(super) async fn start<R: Reader>(
    inner: &Arc<Inner>,
    spec: Spec,
    settler: Arc<Settler>,
    reader: R,
) -> Result<Started<R::Item>> {
    let (sender, items) = mpsc::channel(WAITING_BATCHES);
    let (wanted, wishes) = watch::channel(Wanted { prefetch: spec.prefetch, stop: false });
    let (serving, served) = watch::channel(true);
    let mut task = Subscription {
        link: inner.consuming.clone(),
        closing: inner.closing(),
        name: format!("{}-{}", inner.name, spec.kind),
        spec,
        settler,
        reader,
        sender,
        wishes,
        serving,
        asked: tokio::time::Instant::now(),
        generation: 0,
        consumers: 0,
    };
    let Some(open) = task.first_open().await? else {
        return Err(BrokerError::Unavailable("the broker is being closed".into()));
    };
    inner.runtime.spawn(task.run(open));
    Ok(Started { items, wanted, served })
}

struct Subscription<R: Reader> {
    link: Link,
    closing: Closing,
    name: String,
    spec: Spec,
    settler: Arc<Settler>,
    reader: R,
    sender: mpsc::Sender<R::Item>,
    wishes: watch::Receiver<Wanted>,
    serving: watch::Sender<bool>,
    /// When the last try began, with a connection that was up.
    asked: tokio::time::Instant,
    generation: u64,
    /// Consumers of this subscription so far; each has its own tag.
    consumers: u64,
}

/// A channel that consumes.
struct Open {
    channel: Channel,
    stream: Consumer,
    prefetch: u16,
    /// Deliveries that have been read off the stream and not been handed over.
    backlog: Vec<Delivery>,
    /// The stream has ended, for this reason; to be acted upon when the backlog is handed over.
    ended: Option<String>,
    /// The server has been asked to end it.
    cancelled: bool,
}

/// Why a channel is not served any more.
enum End {
    /// Nobody wants it any more.
    Done,
    /// It is lost, for this reason.
    Lost(String),
}

impl<R: Reader> Subscription<R> {
    async fn run(mut self, mut open: Open) {
        loop {
            match self.serve(&mut open).await {
                End::Done => return leave(&mut open),
                End::Lost(why) => tracing::debug!(queue = self.spec.queue, why, "consumer's channel was lost"),
            }
            self.settler.clear();
            drop(open);
            self.serving.send_replace(false);
            let Some(again) = self.reopen().await else { return };
            open = again;
            self.serving.send_replace(true);
            metrics::counter!(m::RENEWALS, "queue" => self.spec.kind).increment(1);
            if let Some(item) = self.reader.renewed(self.generation)
                && !self.hand_over(item, &mut open, true).await
            {
                return leave(&mut open);
            }
        }
    }

    /// The first time a refusal is the caller's business; the server being away is not.
    async fn first_open(&mut self) -> Result<Option<Open>> {
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MAX);
        let mut silent = 0;
        loop {
            match self.open().await {
                Ok(open) => return Ok(open),
                Err(refused @ BrokerError::Refused(_)) => return Err(refused),
                Err(BrokerError::Unavailable(_)) => {
                    self.count_silence(&mut silent).await;
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    /// After a try that failed: counts those in a row that got no answer at all, and acts upon too many.
    async fn count_silence(&mut self, silent: &mut u32) {
        *silent = if self.asked.elapsed() >= super::RPC_TIMEOUT { *silent + 1 } else { 0 };
        if *silent < SILENT_MAX {
            return;
        }
        *silent = 0;
        if self.spec.expendable {
            self.replace_queue().await;
        } else {
            metrics::counter!(m::SILENT, "queue" => self.spec.kind).increment(1);
            tracing::error!(
                queue = self.spec.queue,
                "the queue answers no consumer, and may hold messages of people: nothing is taken from it until it does. See \
                 docs/errors/queue-silent.md"
            );
        }
    }

    /// Later a refusal is waited out: one log line, and further tries at growing intervals.
    async fn reopen(&mut self) -> Option<Open> {
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MAX);
        let mut refusals = Backoff::new(REFUSED_FIRST, REFUSED_MAX);
        let mut said = false;
        let mut silent = 0;
        let (mut wishes, mut closing) = (self.wishes.clone(), self.closing.clone());
        loop {
            let opened = tokio::select! {
                opened = self.open() => opened,
                () = stop_wished(&mut wishes) => return None,
            };
            let pause = match opened {
                Ok(open) => return open,
                Err(BrokerError::Unavailable(why)) => {
                    tracing::debug!(queue = self.spec.queue, why, "consuming could not begin again yet");
                    self.count_silence(&mut silent).await;
                    backoff.pause()
                }
                Err(BrokerError::Refused(reason)) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::error!(queue = self.spec.queue, reason, "consuming is refused, trying again");
                    }
                    refusals.pause()
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.sender.closed() => return None,
                () = closing.wait() => return None,
                () = stop_wished(&mut wishes) => return None,
            }
        }
    }

    /// `None` when the broker is closed.
    async fn open(&mut self) -> Result<Option<Open>> {
        let Some(connection) = self.link.up().await else { return Ok(None) };
        self.asked = tokio::time::Instant::now();
        let (channel, stream, prefetch) = self.open_on(&connection).await?;
        self.generation += 1;
        self.settler.install(self.generation, channel.clone());
        Ok(Some(Open { channel, stream, prefetch, backlog: Vec::new(), ended: None, cancelled: false }))
    }

    /// RabbitMQ (seen with 3.10, killed under load) can come back without the process of a quorum queue: it lists the queue, and answers
    /// no request to it. Nobody would get a shard any more. The ledger has all that stood in it, and the leader publishes that again.
    async fn replace_queue(&mut self) {
        metrics::counter!(m::SILENT, "queue" => self.spec.kind).increment(1);
        tracing::warn!(
            queue = self.spec.queue,
            "the queue answers no consumer; deleting it to declare it anew. Its shards are in the ledger and are published again"
        );
        let Ok(connection) = self.link.now() else { return };
        let Ok(channel) = connection.channel().await else { return };
        let delete = channel.queue_delete(self.spec.queue.as_str().into(), QueueDeleteOptions::default());
        if let Err(error) = bounded(delete).await {
            tracing::warn!(queue = self.spec.queue, %error, "the queue could not be deleted; trying again later");
        }
    }

    async fn open_on(&mut self, connection: &super::conn::Conn) -> Result<(Channel, Consumer, u16)> {
        declare::declare(connection, &self.spec.topology)
            .await
            .inspect_err(|why| tracing::debug!(queue = self.spec.queue, %why, "declaring for a consumer"))?;
        let channel = connection.channel().await?;
        let prefetch = self.wishes.borrow().prefetch;
        let stream = self.begin(&channel, prefetch).await?;
        Ok((channel, stream, prefetch))
    }

    async fn begin(&mut self, channel: &Channel, prefetch: u16) -> Result<Consumer> {
        bounded(channel.basic_qos(prefetch, BasicQosOptions::default())).await?;
        self.consumers += 1;
        let tag = format!("{}-{}", self.name, self.consumers);
        let queue = self.spec.queue.as_str().into();
        bounded(channel.basic_consume(queue, tag.into(), BasicConsumeOptions::default(), FieldTable::default())).await
    }

    async fn serve(&mut self, open: &mut Open) -> End {
        let mut watchdog = tokio::time::interval(WATCHDOG);
        watchdog.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut closing = self.closing.clone();
        loop {
            if !open.backlog.is_empty() {
                let rest = open.backlog.split_off(open.backlog.len().min(BATCH_MAX));
                let batch = std::mem::replace(&mut open.backlog, rest);
                if !self.deliver(batch, open, true).await {
                    return End::Done;
                }
                continue;
            }
            if let Some(why) = open.ended.take() {
                return End::Lost(why);
            }
            tokio::select! {
                biased;
                () = closing.wait() => return End::Done,
                () = self.sender.closed() => return End::Done,
                changed = self.wishes.changed() => {
                    let wanted = *self.wishes.borrow_and_update();
                    // Nobody is left who could ack or stop it. Deliveries may still be received, and will come again.
                    let orphaned = changed.is_err();
                    if wanted.stop || orphaned {
                        return self.stop(open).await;
                    }
                    if wanted.prefetch != open.prefetch && let Err(error) = self.change_prefetch(open, wanted.prefetch).await {
                        return End::Lost(error.to_string());
                    }
                }
                delivery = open.stream.next() => match delivery {
                    Some(Ok(delivery)) => take_all_that_is_there(delivery, open),
                    other => return End::Lost(end_of_stream(other)),
                },
                _ = watchdog.tick() => if !open.channel.status().connected() {
                    return End::Lost("the channel has died in silence".into());
                },
            }
        }
    }

    /// False when nobody receives any more.
    async fn deliver(&mut self, batch: Vec<Delivery>, open: &mut Open, may_cancel: bool) -> bool {
        for delivery in &batch {
            self.settler.delivered(self.generation, delivery.delivery_tag);
        }
        match self.reader.batch(self.generation, batch) {
            Some(item) => self.hand_over(item, open, may_cancel).await,
            None => true,
        }
    }

    /// Waits until the receiver has room. Meanwhile a wish to stop reaches the server at once (`may_cancel`), so that it delivers no
    /// more; the stream is read to its end later.
    async fn hand_over(&mut self, item: R::Item, open: &mut Open, may_cancel: bool) -> bool {
        let (mut wishes, mut closing) = (self.wishes.clone(), self.closing.clone());
        let mut may_cancel = may_cancel;
        let sender = self.sender.clone();
        let reserve = sender.reserve();
        tokio::pin!(reserve);
        let permit = loop {
            tokio::select! {
                biased;
                permit = &mut reserve => break permit,
                () = closing.wait() => return false,
                () = stop_wished(&mut wishes), if may_cancel => {
                    leave(open);
                    may_cancel = false;
                }
            }
        };
        permit.map(|permit| permit.send(item)).is_ok()
    }

    /// Takes no more from the server and hands over what had arrived.
    async fn stop(&mut self, open: &mut Open) -> End {
        match self.cancel(open).await {
            Ok(()) => {}
            Err(error) => tracing::debug!(queue = self.spec.queue, %error, "consumer was lost while it stopped"),
        }
        while !open.backlog.is_empty() {
            let rest = open.backlog.split_off(open.backlog.len().min(BATCH_MAX));
            let batch = std::mem::replace(&mut open.backlog, rest);
            if !self.deliver(batch, open, false).await {
                break;
            }
        }
        End::Done
    }

    async fn change_prefetch(&mut self, open: &mut Open, prefetch: u16) -> Result<()> {
        self.cancel(open).await?;
        open.stream = self.begin(&open.channel, prefetch).await?;
        open.prefetch = prefetch;
        Ok(())
    }

    /// Cancels the current consumer; what it had delivered goes into the backlog. The server answers after its last delivery.
    async fn cancel(&mut self, open: &mut Open) -> Result<()> {
        if !open.cancelled {
            let tag = open.stream.tag();
            bounded(open.channel.basic_cancel(tag, BasicCancelOptions::default())).await?;
        }
        let until = tokio::time::Instant::now() + super::RPC_TIMEOUT;
        while let Ok(Some(Ok(delivery))) = tokio::time::timeout_at(until, open.stream.next()).await {
            open.backlog.push(delivery);
        }
        open.cancelled = false;
        Ok(())
    }
}

/// Ends when nobody wants more, or nobody is left who could.
async fn stop_wished(wishes: &mut watch::Receiver<Wanted>) {
    let _ = wishes.wait_for(|w| w.stop).await;
}

/// Asks the server to deliver no more, without waiting for its answer, at which the stream ends. The channel stays with the settler,
/// for what is still held, and closes with it.
fn leave(open: &mut Open) {
    // The first poll sends it. Not `nowait`: lapin would then drop what arrives until the server has read it.
    let _ = open.channel.basic_cancel(open.stream.tag(), BasicCancelOptions::default()).now_or_never();
    open.cancelled = true;
}

/// The first delivery and all that have arrived behind it, up to a batch.
fn take_all_that_is_there(first: Delivery, open: &mut Open) {
    open.backlog.push(first);
    while open.backlog.len() < BATCH_MAX {
        match open.stream.next().now_or_never() {
            None => return,
            Some(Some(Ok(delivery))) => open.backlog.push(delivery),
            Some(other) => {
                open.ended = Some(end_of_stream(other));
                return;
            }
        }
    }
}

fn end_of_stream(last: Option<lapin::Result<Delivery>>) -> String {
    match last {
        Some(Err(error)) => error.to_string(),
        _ => "the server cancelled the consumer; was its queue deleted?".into(),
    }
}
