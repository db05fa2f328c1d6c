//! The queues of a broker that does all that a broker may do: deliver again, twice, late, in any order, or not at all.

use super::life::LifeId;
use crate::world::Dice;
use shardcron_broker::{Arrival, Delivery, Tag, TriggerDelivery};
use shardcron_domain::messages::ShardMessage;
use shardcron_domain::{AttemptRef, messages};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::Notify;

struct Message {
    message: ShardMessage,
    redelivered: bool,
}

struct Consumer {
    life: LifeId,
    tier: String,
    prefetch: usize,
    generation: u64,
    next: u64,
    unacked: BTreeMap<u64, Message>,
    inbox: VecDeque<Arrival>,
    connected: bool,
    stopped: bool,
    wake: Arc<Notify>,
}

struct Trigger {
    id: u64,
    payload: Vec<u8>,
    held_by: Option<u64>,
}

struct TriggerConsumer {
    life: LifeId,
    connected: bool,
    wake: Arc<Notify>,
}

/// All queues and all consumers.
#[derive(Default)]
pub(crate) struct Queues {
    ready: BTreeMap<String, VecDeque<Message>>,
    consumers: BTreeMap<u64, Consumer>,
    triggers: VecDeque<Trigger>,
    trigger_consumers: BTreeMap<u64, TriggerConsumer>,
    last: u64,
    reorders: bool,
}

impl Queues {
    pub(crate) fn new(reorders: bool) -> Self {
        Queues { reorders, ..Queues::default() }
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    // ---- queues -------------------------------------------------------------------------------------------------------

    pub(crate) fn declare(&mut self, tier: &str) {
        self.ready.entry(tier.to_owned()).or_default();
    }

    /// False: there is no such queue.
    pub(crate) fn publish(&mut self, tier: &str, message: &ShardMessage, dice: &mut Dice) -> bool {
        let Some(ready) = self.ready.get_mut(tier) else { return false };
        ready.push_back(Message { message: message.clone(), redelivered: false });
        self.deliver(tier, dice);
        true
    }

    pub(crate) fn depth(&self, tier: &str) -> Option<(u32, u32)> {
        let ready = self.ready.get(tier)?.len() as u32;
        let consumers = self.consumers.values().filter(|c| c.tier == tier && c.connected && !c.stopped).count() as u32;
        Some((ready, consumers))
    }

    pub(crate) fn purge(&mut self) {
        self.ready.values_mut().for_each(VecDeque::clear);
    }

    /// The queue is gone, with all that was in it and all that was delivered from it. Returns whose consumers have lost it.
    pub(crate) fn delete(&mut self, tier: &str) -> Vec<u64> {
        self.ready.remove(tier);
        let consumers = self.consumers.iter_mut().filter(|(_, c)| c.tier == tier && c.connected);
        consumers
            .map(|(id, consumer)| {
                consumer.connected = false;
                consumer.unacked.clear();
                consumer.inbox.clear();
                *id
            })
            .collect()
    }

    fn deliver(&mut self, tier: &str, dice: &mut Dice) {
        let Some(ready) = self.ready.get_mut(tier) else { return };
        while !ready.is_empty() {
            let takes = |c: &Consumer| c.tier == tier && c.connected && !c.stopped && c.unacked.len() < c.prefetch;
            let mut open: Vec<&mut Consumer> = self.consumers.values_mut().filter(|c| takes(c)).collect();
            if open.is_empty() {
                return;
            }
            let chosen = dice.index(open.len());
            let consumer = &mut open[chosen];
            let at = if self.reorders { dice.index(ready.len()) } else { 0 };
            let Some(message) = ready.remove(at) else { return };
            consumer.next += 1;
            let tag = Tag { generation: consumer.generation, number: consumer.next };
            let delivery = Delivery { message: message.message.clone(), redelivered: message.redelivered, tag };
            consumer.unacked.insert(consumer.next, message);
            match consumer.inbox.back_mut() {
                Some(Arrival::Shards(batch)) => batch.push(delivery),
                _ => consumer.inbox.push_back(Arrival::Shards(vec![delivery])),
            }
            consumer.wake.notify_one();
        }
    }

    // ---- consumers ----------------------------------------------------------------------------------------------------

    pub(crate) fn consume(&mut self, life: LifeId, tier: &str, prefetch: u16, dice: &mut Dice) -> (u64, Arc<Notify>) {
        self.declare(tier);
        let (id, wake) = (self.number(), Arc::new(Notify::new()));
        let consumer = Consumer {
            life,
            tier: tier.to_owned(),
            prefetch: usize::from(prefetch.max(1)),
            generation: 1,
            next: 0,
            unacked: BTreeMap::new(),
            inbox: VecDeque::new(),
            connected: true,
            stopped: false,
            wake: wake.clone(),
        };
        self.consumers.insert(id, consumer);
        self.deliver(tier, dice);
        (id, wake)
    }

    pub(crate) fn wake_of(&self, id: u64) -> Arc<Notify> {
        self.consumers.get(&id).map(|c| c.wake.clone()).unwrap_or_default()
    }

    /// `Err(true)`: nothing will come any more.
    pub(crate) fn take(&mut self, id: u64) -> Result<Arrival, bool> {
        let Some(consumer) = self.consumers.get_mut(&id) else { return Err(true) };
        consumer.inbox.pop_front().ok_or(consumer.stopped)
    }

    /// Which attempts the tags stand for; void tags stand for none.
    pub(crate) fn attempts(&self, id: u64, tags: &[Tag]) -> Vec<AttemptRef> {
        let Some(consumer) = self.consumers.get(&id).filter(|c| c.connected) else { return Vec::new() };
        let valid = tags.iter().filter(|t| t.generation == consumer.generation);
        valid.filter_map(|t| consumer.unacked.get(&t.number)).map(|m| m.message.attempt).collect()
    }

    pub(crate) fn settle(&mut self, id: u64, tags: &[Tag], requeue: bool, dice: &mut Dice) {
        let Some(consumer) = self.consumers.get_mut(&id).filter(|c| c.connected) else { return };
        let tier = consumer.tier.clone();
        for tag in tags.iter().filter(|t| t.generation == consumer.generation) {
            if let (Some(message), true) = (consumer.unacked.remove(&tag.number), requeue)
                && let Some(ready) = self.ready.get_mut(&tier)
            {
                ready.push_front(Message { redelivered: true, ..message });
            }
        }
        self.deliver(&tier, dice);
    }

    pub(crate) fn set_prefetch(&mut self, id: u64, prefetch: u16, dice: &mut Dice) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.prefetch = usize::from(prefetch.max(1));
            let tier = consumer.tier.clone();
            self.deliver(&tier, dice);
        }
    }

    pub(crate) fn stop(&mut self, id: u64) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.stopped = true;
            consumer.wake.notify_one();
        }
    }

    // ---- connections --------------------------------------------------------------------------------------------------

    /// The connections of some lives are lost: what they held comes again. Returns the consumers.
    pub(crate) fn disconnect(&mut self, lost: impl Fn(LifeId) -> bool, dice: &mut Dice) -> Vec<u64> {
        let (mut ids, mut tiers) = (Vec::new(), Vec::new());
        for (id, consumer) in self.consumers.iter_mut().filter(|(_, c)| c.connected && lost(c.life)) {
            consumer.connected = false;
            consumer.inbox.clear();
            for (_, message) in std::mem::take(&mut consumer.unacked) {
                if let Some(ready) = self.ready.get_mut(&consumer.tier) {
                    ready.push_front(Message { redelivered: true, ..message });
                }
            }
            ids.push(*id);
            tiers.push(consumer.tier.clone());
        }
        for (id, consumer) in self.trigger_consumers.iter_mut().filter(|(_, c)| c.connected && lost(c.life)) {
            consumer.connected = false;
            self.triggers.iter_mut().filter(|t| t.held_by == Some(*id)).for_each(|t| t.held_by = None);
            ids.push(*id);
        }
        tiers.iter().for_each(|tier| self.deliver(tier, dice));
        self.wake_triggers();
        ids
    }

    pub(crate) fn disconnected(&self, of: impl Fn(LifeId) -> bool) -> Vec<u64> {
        let shards = self.consumers.iter().filter(|(_, c)| !c.connected && of(c.life)).map(|(id, _)| *id);
        let triggers = self.trigger_consumers.iter().filter(|(_, c)| !c.connected && of(c.life)).map(|(id, _)| *id);
        shards.chain(triggers).collect()
    }

    pub(crate) fn reconnect(&mut self, id: u64, dice: &mut Dice) {
        if let Some(consumer) = self.consumers.get_mut(&id).filter(|c| !c.connected) {
            consumer.connected = true;
            consumer.generation += 1;
            consumer.inbox.push_back(Arrival::Renewed { generation: consumer.generation });
            consumer.wake.notify_one();
            let tier = consumer.tier.clone();
            self.declare(&tier);
            self.deliver(&tier, dice);
        }
        if let Some(consumer) = self.trigger_consumers.get_mut(&id) {
            consumer.connected = true;
            consumer.wake.notify_one();
        }
    }

    /// A process has ended, and its connections with it.
    pub(crate) fn forget(&mut self, life: LifeId, dice: &mut Dice) {
        for id in self.disconnect(|l| l == life, dice) {
            self.consumers.remove(&id);
            self.trigger_consumers.remove(&id);
        }
        self.consumers.retain(|_, c| c.life != life);
        self.trigger_consumers.retain(|_, c| c.life != life);
    }

    // ---- triggers -----------------------------------------------------------------------------------------------------

    pub(crate) fn send_trigger(&mut self, payload: Vec<u8>) -> u64 {
        let id = self.number();
        self.triggers.push_back(Trigger { id, payload, held_by: None });
        self.wake_triggers();
        id
    }

    fn wake_triggers(&self) {
        self.trigger_consumers.values().for_each(|c| c.wake.notify_one());
    }

    pub(crate) fn consume_triggers(&mut self, life: LifeId) -> (u64, Arc<Notify>) {
        let (id, wake) = (self.number(), Arc::new(Notify::new()));
        wake.notify_one();
        self.trigger_consumers.insert(id, TriggerConsumer { life, connected: true, wake: wake.clone() });
        (id, wake)
    }

    pub(crate) fn take_triggers(&mut self, consumer: u64) -> Vec<TriggerDelivery> {
        if !self.trigger_consumers.get(&consumer).is_some_and(|c| c.connected) {
            return Vec::new();
        }
        let free = self.triggers.iter_mut().filter(|t| t.held_by.is_none()).take(8);
        free.map(|trigger| {
            trigger.held_by = Some(consumer);
            TriggerDelivery {
                payload: trigger.payload.clone(),
                routed_to: None,
                reply_to: None,
                transport_id: Some(transport_id(trigger.id)),
                tag: Tag { generation: 1, number: trigger.id },
            }
        })
        .collect()
    }

    pub(crate) fn settle_trigger(&mut self, consumer: u64, id: u64) {
        self.triggers.retain(|t| !(t.id == id && t.held_by == Some(consumer)));
    }

    pub(crate) fn stop_triggers(&mut self, consumer: u64) {
        self.trigger_consumers.remove(&consumer);
        self.triggers.iter_mut().filter(|t| t.held_by == Some(consumer)).for_each(|t| t.held_by = None);
        self.wake_triggers();
    }

    pub(crate) fn triggers_waiting(&self) -> usize {
        self.triggers.len()
    }
}

fn transport_id(id: u64) -> String {
    format!("message-{id}")
}

/// The fire key that a trigger without a request id gets.
pub(crate) fn fire_key(trigger: &TriggerDelivery) -> Option<String> {
    let request: messages::TriggerRequest = serde_json::from_slice(&trigger.payload).ok()?;
    let of_transport = || trigger.transport_id.as_deref().map(shardcron_domain::trigger::transport_request_id);
    request.request_id.or_else(of_transport).map(|id| shardcron_domain::firing::request_key(&id))
}
