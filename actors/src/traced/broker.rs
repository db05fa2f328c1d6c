//! Messages that were taken, handed out and acked.

use crate::trace::Trace;
use async_trait::async_trait;
use shardcron_broker::*;
use shardcron_domain::messages::{ShardMessage, ShardRun, TriggerRequest};
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{AttemptRef, Epoch};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

pub(super) struct Traced {
    pub(super) inner: Arc<dyn Broker>,
    pub(super) trace: Trace,
}

type Answer<T> = std::result::Result<T, BrokerError>;

#[async_trait]
impl Broker for Traced {
    async fn declare(&self, tiers: &[String]) -> Answer<()> {
        self.inner.declare(tiers).await
    }

    async fn publish(&self, tier: &str, messages: &[ShardMessage]) -> Vec<Published> {
        let answers = self.inner.publish(tier, messages).await;
        let out = |answer: &Published| matches!(answer, Published::Confirmed | Published::Left);
        let confirmed = messages.iter().zip(&answers).filter(|(_, answer)| out(answer));
        self.trace.say_all(confirmed, |(m, _)| TraceEvent::Dispatched { epoch: Epoch(m.epoch), at: m.attempt });
        answers
    }

    async fn publish_runs(&self, tier: &str, runs: &[ShardRun]) -> Vec<Published> {
        let answers = self.inner.publish_runs(tier, runs).await;
        let out = |answer: &Published| matches!(answer, Published::Confirmed | Published::Left);
        let confirmed = runs.iter().zip(&answers).filter(|(_, answer)| out(answer)).flat_map(|(run, _)| run.shards());
        self.trace.say_all(confirmed, |m| TraceEvent::Dispatched { epoch: Epoch(m.epoch), at: m.attempt });
        answers
    }

    async fn depth(&self, tier: &str) -> Answer<Depth> {
        self.inner.depth(tier).await
    }

    async fn consume(&self, tier: &str, prefetch: u16) -> Answer<Consumer> {
        let Consumer { deliveries, acker } = self.inner.consume(tier, prefetch).await?;
        let held = Arc::new(Held::default());
        Ok(Consumer {
            deliveries: Box::new(TracedDeliveries { inner: deliveries, held: held.clone(), trace: self.trace.clone() }),
            acker: Arc::new(TracedAcker { inner: acker, held, trace: self.trace.clone() }),
        })
    }

    async fn triggers(&self) -> Answer<Box<dyn Triggers>> {
        self.inner.triggers().await
    }

    async fn send_trigger(&self, request: &TriggerRequest) -> Answer<()> {
        self.inner.send_trigger(request).await
    }

    async fn put_dead(&self, payload: &[u8], reason: &str) -> Answer<KeptIn> {
        self.inner.put_dead(payload, reason).await
    }

    fn way(&self) -> Way {
        self.inner.way()
    }

    fn state(&self) -> watch::Receiver<BrokerState> {
        self.inner.state()
    }

    async fn server_version(&self) -> Answer<String> {
        self.inner.server_version().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

/// Which attempt a tag stands for, as long as it does.
#[derive(Default)]
struct Held(Mutex<HashMap<Tag, AttemptRef>>);

impl Held {
    fn lock(&self) -> MutexGuard<'_, HashMap<Tag, AttemptRef>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, tags: &[Tag]) -> Vec<AttemptRef> {
        let mut held = self.lock();
        tags.iter().filter_map(|tag| held.remove(tag)).collect()
    }
}

struct TracedDeliveries {
    inner: Box<dyn Deliveries>,
    held: Arc<Held>,
    trace: Trace,
}

#[async_trait]
impl Deliveries for TracedDeliveries {
    async fn next(&mut self) -> Option<Arrival> {
        let arrival = self.inner.next().await?;
        match &arrival {
            Arrival::Shards(shards) => {
                self.held.lock().extend(shards.iter().map(|d| (d.tag, d.message.attempt)));
                self.trace.say_all(shards, |d| TraceEvent::Delivered { at: d.message.attempt });
            }
            // Those that were polled outlive every channel.
            Arrival::Renewed { generation } => self.held.lock().retain(|tag, _| tag.generation >= *generation),
        }
        Some(arrival)
    }

    fn served(&self) -> Option<watch::Receiver<bool>> {
        self.inner.served()
    }
}

struct TracedAcker {
    inner: Arc<dyn Acker>,
    held: Arc<Held>,
    trace: Trace,
}

#[async_trait]
impl Acker for TracedAcker {
    async fn ack(&self, tags: &[Tag]) {
        self.trace.say_all(self.held.take(tags), |at| TraceEvent::Acked { at });
        self.inner.ack(tags).await;
    }

    async fn requeue(&self, tags: &[Tag]) {
        self.held.take(tags);
        self.inner.requeue(tags).await;
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.inner.set_prefetch(prefetch).await;
    }

    async fn stop(&self) {
        self.inner.stop().await;
    }
}
