//! Everything that is published: shards by the window, single messages one at a time, all with confirms.

use super::declare;
use super::error::{bounded, is_not_found, raw_bounded, sort};
use super::link::Link;
use crate::codec;
use crate::metric_definitions as m;
use crate::port::{BrokerError, Depth, Published, Result};
use crate::topology::{Names, Topology};
use futures_util::FutureExt;
use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, PublisherConfirm};
use shardcron_domain::limits;
use shardcron_domain::messages::ShardRun;
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, SystemTime};
use tokio::sync::Mutex;

/// A batch that is not confirmed by then is unknown, and published again.
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// When a confirm takes that long, it is looked at those behind it.
const HOLD_UP: Duration = Duration::from_secs(1);
/// So many looks in a row without any answer end a batch. The server never confirms what was on its way into a quorum queue that
/// somebody deletes, and all tiers wait behind it.
const HOLD_UPS: u32 = 3;
/// Messages that are put into the socket's queue at once: one wake-up of lapin's thread for all of them.
const CHUNK: usize = 128;
/// A reason travels in a header, within one frame.
const REASON_BYTES: usize = 2 * 1024;
const PERSISTENT: u8 = 2;

/// A message to publish.
#[derive(Clone)]
pub(super) struct Outgoing {
    exchange: ShortString,
    routing_key: ShortString,
    payload: Vec<u8>,
    properties: BasicProperties,
    mandatory: bool,
}

impl Outgoing {
    /// Shards for their tier's queue, in one message.
    pub(super) fn shards(queue: &str, run: &ShardRun) -> Self {
        let id = match run.count {
            1 => run.attempt.to_string(),
            count => format!("{}+{}", run.attempt, count - 1),
        };
        let properties = properties(codec::MSGPACK, codec::TYPE_SHARD).with_message_id(id.into());
        Self {
            exchange: ShortString::default(),
            routing_key: queue.into(),
            // Encoding to memory does not fail; were it ever to, the consumer says so in the dead letters.
            payload: codec::encode_run(run).unwrap_or_default(),
            properties,
            mandatory: true,
        }
    }
}

fn properties(content_type: &str, kind: &str) -> BasicProperties {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    BasicProperties::default()
        .with_content_type(content_type.into())
        .with_type(kind.into())
        .with_app_id(codec::APP_ID.into())
        .with_timestamp(now)
        .with_delivery_mode(PERSISTENT)
}

/// Channels of the publishing connection. A channel serves one batch at a time: lapin hands a returned message to whichever confirm
/// comes next, so that the returns of two batches on one channel could not be told apart.
pub(super) struct Publisher {
    link: Link,
    names: Names,
    batches: Mutex<Option<Channel>>,
    singles: Mutex<Option<Channel>>,
    looking: Mutex<Option<Channel>>,
}

impl Publisher {
    pub(super) fn new(link: Link, names: Names) -> Self {
        Self { link, names, batches: Mutex::default(), singles: Mutex::default(), looking: Mutex::default() }
    }

    /// Publishes a batch.
    pub(super) async fn shards(&self, messages: Vec<Outgoing>) -> Vec<Published> {
        self.publish(&self.batches, messages).await
    }

    /// Sends a trigger by way of the exchange, as a person would.
    pub(super) async fn trigger(&self, job: &str, payload: Vec<u8>) -> Result<()> {
        let message = Outgoing {
            exchange: self.names.trigger_exchange().into(),
            routing_key: job.into(),
            payload,
            properties: properties(codec::JSON, codec::TYPE_TRIGGER),
            mandatory: true,
        };
        let topology = self.names.triggers_topology();
        // A missing exchange closes the channel, a missing queue returns the message: the remedy is the same.
        self.single_with(message, &topology).await
    }

    /// Puts a dead letter.
    pub(super) async fn dead(&self, payload: &[u8], reason: &str) -> Result<()> {
        let mut headers = FieldTable::default();
        headers.insert(codec::HEADER_ERROR.into(), AMQPValue::LongString(cut(reason).into()));
        let kept = codec::dead_payload(payload);
        if kept.len() < payload.len() {
            let bytes = i64::try_from(payload.len()).unwrap_or(i64::MAX);
            headers.insert(codec::HEADER_BYTES.into(), AMQPValue::LongLongInt(bytes));
        }
        let message = Outgoing {
            exchange: ShortString::default(),
            routing_key: self.names.dead().into(),
            payload: kept.to_vec(),
            properties: properties("application/octet-stream", "dead").with_headers(headers),
            mandatory: true,
        };
        self.single_with(message, &self.names.dead_topology()).await
    }

    /// Answers a trigger. Who asked may be gone, so nobody having a queue for it is no fault.
    pub(super) async fn reply(&self, queue: &str, correlation_id: Option<&str>, payload: Vec<u8>) -> Result<()> {
        let mut properties = properties(codec::JSON, codec::TYPE_REPLY);
        if let Some(id) = correlation_id {
            properties = properties.with_correlation_id(id.into());
        }
        let exchange = ShortString::default();
        let message = Outgoing { exchange, routing_key: queue.into(), payload, properties, mandatory: false };
        match self.publish(&self.singles, vec![message]).await.pop() {
            Some(Published::Failed(why)) => Err(BrokerError::Unavailable(why)),
            _ => Ok(()),
        }
    }

    /// Looks at a queue. One that does not exist is empty; publishing to it says the rest.
    pub(super) async fn depth(&self, queue: &str) -> Result<Depth> {
        let mut slot = self.looking.lock().await;
        let channel = self.channel(&mut slot, false).await?;
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        match raw_bounded(channel.queue_declare(queue.into(), options, FieldTable::default())).await {
            Ok(Ok(queue)) => {
                Ok(Depth { ready: queue.message_count(), consumers: queue.consumer_count(), unbounded: false })
            }
            Ok(Err(error)) => {
                *slot = None;
                if is_not_found(&error) { Ok(Depth::default()) } else { Err(sort(&error)) }
            }
            Err(late) => {
                *slot = None;
                Err(late)
            }
        }
    }

    /// One message that must arrive: when nothing takes it, what should is declared, once.
    async fn single_with(&self, message: Outgoing, topology: &Topology) -> Result<()> {
        if self.publish(&self.singles, vec![message.clone()]).await.pop() == Some(Published::Confirmed) {
            return Ok(());
        }
        let connection = self.link.now()?;
        if let Some(reason) = self.link.blocked_now() {
            return Err(blocked(&reason));
        }
        declare::declare(&connection, topology).await?;
        match self.publish(&self.singles, vec![message]).await.pop() {
            Some(Published::Confirmed) => Ok(()),
            Some(Published::Failed(why)) => Err(BrokerError::Unavailable(why)),
            _ => Err(BrokerError::Unavailable("the queue vanished while it was published to".into())),
        }
    }

    async fn publish(&self, lane: &Mutex<Option<Channel>>, messages: Vec<Outgoing>) -> Vec<Published> {
        let ids = messages.iter().map(|m| m.properties.message_id().clone()).collect();
        let mut batch = Batch::new(ids);
        if messages.is_empty() {
            return batch.outcomes;
        }
        let deadline = tokio::time::sleep(BATCH_TIMEOUT);
        tokio::select! {
            biased;
            // First, so that nothing is handed to lapin that would lie there until the server is well again.
            reason = self.link.blocked() => batch.give_up(&blocked(&reason).to_string()),
            () = self.run(lane, messages, &mut batch) => {}
            () = deadline => batch.stall(&format!("no confirm within {} s", BATCH_TIMEOUT.as_secs())),
        }
        if batch.stalled {
            // Finds out whether the connection is stuck (see `conn.rs`), before the next batch runs into it.
            let mut slot = lane.lock().await;
            let _ = self.channel(&mut slot, true).await;
        }
        batch.finish()
    }

    /// Publishes within the window. The channel is taken out of its slot meanwhile: when this is cut off in the middle, the channel
    /// goes with it, and with it all confirms and returns that are still to come.
    async fn run(&self, lane: &Mutex<Option<Channel>>, messages: Vec<Outgoing>, batch: &mut Batch) {
        let mut slot = lane.lock().await;
        let channel = match self.channel(&mut slot, true).await {
            Ok(channel) => channel,
            Err(error) => return batch.give_up(&error.to_string()),
        };
        *slot = None;
        let mut next = 0;
        for chunk in messages.chunks(CHUNK) {
            while batch.in_flight.len() + chunk.len() > limits::PUBLISH_WINDOW {
                if !batch.settle_oldest().await {
                    return;
                }
            }
            let sends = chunk.iter().map(|message| {
                let options = BasicPublishOptions { mandatory: message.mandatory, immediate: false };
                let (exchange, key) = (message.exchange.clone(), message.routing_key.clone());
                channel.basic_publish(exchange, key, options, &message.payload, message.properties.clone())
            });
            for sent in join_all(sends).await {
                match sent {
                    Ok(confirm) => batch.in_flight.push_back((next, confirm)),
                    Err(error) => return batch.give_up(&error.to_string()),
                }
                next += 1;
            }
            metrics::gauge!(m::IN_FLIGHT).set(batch.in_flight.len() as f64);
        }
        while !batch.in_flight.is_empty() {
            if !batch.settle_oldest().await {
                return;
            }
        }
        *slot = Some(channel);
    }

    async fn channel(&self, slot: &mut Option<Channel>, confirms: bool) -> Result<Channel> {
        if let Some(channel) = slot.as_ref().filter(|c| c.status().connected()) {
            return Ok(channel.clone());
        }
        let connection = self.link.now()?;
        let channel = connection.channel().await?;
        if confirms {
            bounded(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        }
        *slot = Some(channel.clone());
        Ok(channel)
    }
}

fn blocked(reason: &str) -> BrokerError {
    BrokerError::Unavailable(format!("the server takes no messages for now ({reason})"))
}

fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

/// The answers of one batch as they come in.
struct Batch {
    ids: Vec<Option<ShortString>>,
    outcomes: Vec<Published>,
    open: Vec<bool>,
    in_flight: VecDeque<(usize, PublisherConfirm)>,
    returned: HashSet<ShortString>,
    /// A confirm has brought the return of another message.
    swapped: bool,
    /// Looks in a row at which nothing was answered.
    hold_ups: u32,
    stalled: bool,
}

impl Batch {
    fn new(ids: Vec<Option<ShortString>>) -> Self {
        let len = ids.len();
        Self {
            ids,
            outcomes: vec![Published::Failed(String::new()); len],
            open: vec![true; len],
            in_flight: VecDeque::new(),
            returned: HashSet::new(),
            swapped: false,
            hold_ups: 0,
            stalled: false,
        }
    }

    /// Waits for the oldest confirm. False when no more is to be expected.
    async fn settle_oldest(&mut self) -> bool {
        let Some((index, confirm)) = self.in_flight.front_mut() else { return true };
        let index = *index;
        let Ok(answer) = tokio::time::timeout(HOLD_UP, confirm).await else {
            let before = self.in_flight.len();
            self.take_ready();
            self.hold_ups = if self.in_flight.len() < before { 0 } else { self.hold_ups + 1 };
            if self.returned.is_empty() && self.hold_ups < HOLD_UPS {
                return true;
            }
            self.stall("no confirm; was the queue deleted while it was published to?");
            return false;
        };
        self.hold_ups = 0;
        self.in_flight.pop_front();
        match answer {
            Ok(confirmation) => self.answered(index, confirmation),
            Err(error) => {
                self.give_up(&error.to_string());
                return false;
            }
        }
        true
    }

    /// Takes the answers that are there behind one that is not.
    fn take_ready(&mut self) {
        for (index, mut confirm) in std::mem::take(&mut self.in_flight) {
            match (&mut confirm).now_or_never() {
                Some(Ok(confirmation)) => self.answered(index, confirmation),
                // The error of one is the error of all, and is met by who waits for the oldest.
                Some(Err(error)) => self.set(index, Published::Failed(error.to_string())),
                None => self.in_flight.push_back((index, confirm)),
            }
        }
    }

    fn answered(&mut self, index: usize, confirmation: Confirmation) {
        let outcome = match &confirmation {
            Confirmation::Ack(_) => Published::Confirmed,
            Confirmation::Nack(_) => Published::Failed("the server could not store it".into()),
            Confirmation::NotRequested => Published::Failed("confirms are off".into()),
        };
        self.set(index, outcome);
        // An unroutable message is acked, too, and says so by being returned before. Which one it was stands in the returned message:
        // lapin gives it to whichever confirm comes next.
        if let Some(message) = confirmation.take_message() {
            match message.properties.message_id() {
                Some(id) => {
                    self.swapped |= self.ids[index].as_ref() != Some(id);
                    self.returned.insert(id.clone());
                }
                None => self.set(index, Published::Unroutable),
            }
        }
    }

    fn set(&mut self, index: usize, outcome: Published) {
        self.outcomes[index] = outcome;
        self.open[index] = false;
    }

    /// Ends a batch that the server does not answer.
    fn stall(&mut self, why: &str) {
        self.stalled = true;
        self.give_up(why);
    }

    /// Ends the batch early.
    fn give_up(&mut self, why: &str) {
        self.take_ready();
        // Where returns were swapped, that of an answered message may wait for a confirm that never comes: trust none then.
        let doubtful = self.swapped && !self.in_flight.is_empty();
        self.in_flight.clear();
        for index in 0..self.open.len() {
            if self.open[index] || (doubtful && self.outcomes[index] == Published::Confirmed) {
                self.set(index, Published::Failed(why.into()));
            }
        }
    }

    fn finish(mut self) -> Vec<Published> {
        metrics::gauge!(m::IN_FLIGHT).set(0.0);
        if !self.returned.is_empty() {
            for (outcome, id) in self.outcomes.iter_mut().zip(&self.ids) {
                if id.as_ref().is_some_and(|id| self.returned.contains(id)) {
                    *outcome = Published::Unroutable;
                }
            }
        }
        self.outcomes
    }
}

/// Counts outcomes, by batch and not by message: a counter's look-up costs more than an encode.
pub(super) fn count(tier: &str, outcomes: &[Published]) {
    let number = |wanted: fn(&Published) -> bool| outcomes.iter().filter(|o| wanted(o)).count() as u64;
    let counts = [
        ("confirmed", number(|o| matches!(o, Published::Confirmed))),
        ("unroutable", number(|o| matches!(o, Published::Unroutable))),
        ("failed", number(|o| matches!(o, Published::Failed(_)))),
    ];
    for (outcome, number) in counts {
        if number > 0 {
            metrics::counter!(m::PUBLISHED, "tier" => tier.to_owned(), "outcome" => outcome).increment(number);
        }
    }
}
