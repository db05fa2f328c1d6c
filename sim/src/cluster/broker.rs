//! The broker of a process: its connection to the queues.

use super::life::{Life, Port, sleep_ms};
use super::plan::Class;
use super::queue::fire_key;
use crate::guard::Mutation;
use async_trait::async_trait;
use shardcron_broker::*;
use shardcron_domain::messages::{ShardMessage, TriggerReply, TriggerRequest};
use std::sync::Arc;
use tokio::sync::{Notify, watch};

pub(crate) struct SimBroker {
    pub(crate) life: Life,
    pub(crate) state: watch::Receiver<BrokerState>,
}

type Answer<T> = std::result::Result<T, BrokerError>;

impl SimBroker {
    async fn call<T>(&self, what: &'static str, effect: impl FnOnce() -> T + Send) -> Answer<T>
    where
        T: Send + std::fmt::Debug,
    {
        let life = &self.life;
        life.request(Port::Broker, false).await.map_err(|(why, _)| BrokerError::Unavailable(why))?;
        let answer = Answer::Ok(effect());
        life.note(what, &answer);
        life.answer(Port::Broker).await.map_err(BrokerError::Unavailable)?;
        answer
    }

    /// What the broker does with one message that has reached it.
    fn take(&self, tier: &str, message: &ShardMessage) -> Published {
        let world = &self.life.world;
        let (chaos, plan) = (world.chaos(), &world.plan);
        let lost = chaos && plan.has(Class::LoseMessages) && world.dice(|d| d.percent(5));
        let doubled = chaos && plan.has(Class::Duplicate) && world.dice(|d| d.percent(10));
        if lost {
            return Published::Confirmed;
        }
        let copies = if doubled { 2 } else { 1 };
        let routed = world.queues(|queues, dice| (0..copies).all(|_| queues.publish(tier, message, dice)));
        if routed { Published::Confirmed } else { Published::Unroutable }
    }
}

#[async_trait]
impl Broker for SimBroker {
    async fn declare(&self, tiers: &[String]) -> Answer<()> {
        let world = &self.life.world;
        self.call("declare", || world.queues(|queues, _| tiers.iter().for_each(|tier| queues.declare(tier)))).await
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        let effect = || messages.iter().map(|m| self.take(tier, m)).collect::<Vec<_>>();
        match self.call("publish", effect).await {
            Ok(answers) => answers,
            Err(e) => messages.iter().map(|_| Published::Failed(e.to_string())).collect(),
        }
    }

    async fn depth(&self, tier: &str) -> Answer<Depth> {
        let world = &self.life.world;
        let blind = world.chaos() && world.plan.has(Class::BlindDepth) && world.dice(|d| d.percent(20));
        let depth = self.call("depth", || world.queues(|queues, _| queues.depth(tier))).await?;
        let Some((ready, consumers)) = depth else {
            return Err(BrokerError::Unavailable(format!("there is no queue for the tier {tier}")));
        };
        let (ready, consumers) = if blind { (0, 0) } else { (ready, consumers) };
        Ok(Depth { ready, consumers, unbounded: false })
    }

    async fn consume(&self, tier: &str, prefetch: u16) -> Answer<Consumer> {
        let (life, world) = (&self.life, &self.life.world);
        loop {
            let began = || world.queues(|queues, dice| queues.consume(life.id, tier, prefetch, dice)).0;
            // One whose answer was lost is nobody's: its connection is closed, and what it was handed comes again.
            match life.request(Port::Broker, false).await {
                Ok(()) => {
                    let id = began();
                    let wake = world.queues(|queues, _| queues.wake_of(id));
                    let deliveries = SimDeliveries { life: life.clone(), id, wake };
                    let acker = SimAcker { life: life.clone(), id };
                    return Ok(Consumer { deliveries: Box::new(deliveries), acker: Arc::new(acker) });
                }
                Err(_) => sleep_ms(100).await,
            }
        }
    }

    async fn triggers(&self) -> Answer<Box<dyn Triggers>> {
        let (life, world) = (&self.life, &self.life.world);
        while life.request(Port::Broker, false).await.is_err() {
            sleep_ms(100).await;
        }
        let (id, wake) = world.queues(|queues, _| queues.consume_triggers(life.id));
        Ok(Box::new(SimTriggers { life: life.clone(), id, wake, stopped: false }))
    }

    async fn send_trigger(&self, _request: &TriggerRequest) -> Answer<()> {
        Err(BrokerError::Refused("in a simulation, the world sends triggers".into()))
    }

    async fn put_dead(&self, _payload: &[u8], _reason: &str) -> Answer<KeptIn> {
        self.call("put_dead", || KeptIn::Queue).await
    }

    fn state(&self) -> watch::Receiver<BrokerState> {
        self.state.clone()
    }

    async fn server_version(&self) -> Answer<String> {
        Ok("simulated".into())
    }

    async fn close(&self) {}
}

struct SimDeliveries {
    life: Life,
    id: u64,
    wake: Arc<Notify>,
}

#[async_trait]
impl Deliveries for SimDeliveries {
    async fn next(&mut self) -> Option<Arrival> {
        let world = &self.life.world;
        loop {
            // On its way before it is here: what comes meanwhile comes with it.
            sleep_ms(world.dice(|d| d.of(0, 2))).await;
            let taken = world.queues(|queues, _| queues.take(self.id));
            match taken {
                Ok(arrival) => {
                    self.life.note("deliver", &arrival);
                    if let (Arrival::Shards(shards), Some(Mutation::AckBeforeCommit)) =
                        (&arrival, world.options.mutation)
                    {
                        let tags: Vec<Tag> = shards.iter().map(|d| d.tag).collect();
                        SimAcker { life: self.life.clone(), id: self.id }.settle(&tags, false);
                    }
                    return Some(arrival);
                }
                Err(true) => return None,
                Err(false) => self.wake.notified().await,
            }
        }
    }
}

struct SimAcker {
    life: Life,
    id: u64,
}

impl SimAcker {
    fn settle(&self, tags: &[Tag], requeue: bool) {
        let world = &self.life.world;
        if !requeue {
            for attempt in world.queues(|queues, _| queues.attempts(self.id, tags)) {
                self.life.note("ack", &attempt);
                world.check(world.oracle(|o| o.acked(self.life.id, attempt, world.now_ms())));
            }
        }
        world.queues(|queues, dice| queues.settle(self.id, tags, requeue, dice));
    }
}

#[async_trait]
impl Acker for SimAcker {
    async fn ack(&self, tags: &[Tag]) {
        self.settle(tags, false);
    }

    async fn requeue(&self, tags: &[Tag]) {
        self.settle(tags, true);
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.life.world.queues(|queues, dice| queues.set_prefetch(self.id, prefetch, dice));
    }

    async fn stop(&self) {
        self.life.world.queues(|queues, _| queues.stop(self.id));
    }
}

struct SimTriggers {
    life: Life,
    id: u64,
    wake: Arc<Notify>,
    stopped: bool,
}

#[async_trait]
impl Triggers for SimTriggers {
    async fn next(&mut self) -> Option<Vec<TriggerDelivery>> {
        loop {
            if self.stopped {
                return None;
            }
            let found = self.life.world.queues(|queues, _| queues.take_triggers(self.id));
            if !found.is_empty() {
                return Some(found);
            }
            self.wake.notified().await;
        }
    }

    async fn settle(&mut self, trigger: &TriggerDelivery, reply: &TriggerReply) {
        let world = &self.life.world;
        self.life.note("settle", &(&reply.outcome, trigger.tag.number));
        if let Some(key) = fire_key(trigger).filter(|_| reply.outcome != "rejected") {
            world.check(world.oracle(|o| o.trigger_settled(&key)));
        }
        world.queues(|queues, _| queues.settle_trigger(self.id, trigger.tag.number));
    }

    async fn stop(&mut self) {
        self.stopped = true;
        self.life.world.queues(|queues, _| queues.stop_triggers(self.id));
    }
}

/// Dropped without a stop, what it holds goes to the next one.
impl Drop for SimTriggers {
    fn drop(&mut self) {
        self.life.world.queues(|queues, _| queues.stop_triggers(self.id));
    }
}
