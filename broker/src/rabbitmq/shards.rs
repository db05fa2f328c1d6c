//! The consumer of one tier.

use super::Inner;
use super::settler::Settler;
use super::subscription::{self, Reader, Spec, Wanted};
use crate::backoff::Backoff;
use crate::codec;
use crate::metric_definitions as m;
use crate::port::{Acker, Arrival, Consumer, Deliveries, Delivery, Result, Tag};
use async_trait::async_trait;
use shardcron_domain::limits;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const BURY_FIRST: Duration = Duration::from_millis(100);
const BURY_MAX: Duration = Duration::from_secs(5);

pub(super) async fn consume(inner: &Arc<Inner>, tier: &str, prefetch: u16) -> Result<Consumer> {
    let settler = Arc::new(Settler::default());
    let spec = Spec {
        kind: "shards",
        queue: inner.names.shards(tier),
        topology: inner.names.tier_topology(tier),
        prefetch: clamp(prefetch),
        expendable: true,
    };
    let reader = ShardReader { tier: tier.into(), inner: inner.clone(), settler: settler.clone() };
    let started = subscription::start(inner, spec, settler.clone(), reader).await?;
    Ok(Consumer {
        deliveries: Box::new(ShardDeliveries { items: started.items, served: started.served }),
        acker: Arc::new(ShardAcker { settler, wanted: started.wanted }),
    })
}

/// 0 would mean "no limit" to the server.
fn clamp(prefetch: u16) -> u16 {
    prefetch.clamp(1, limits::PREFETCH_MAX)
}

struct ShardDeliveries {
    items: mpsc::Receiver<Arrival>,
    served: watch::Receiver<bool>,
}

#[async_trait]
impl Deliveries for ShardDeliveries {
    async fn next(&mut self) -> Option<Arrival> {
        self.items.recv().await
    }

    fn served(&self) -> Option<watch::Receiver<bool>> {
        Some(self.served.clone())
    }
}

struct ShardAcker {
    settler: Arc<Settler>,
    wanted: watch::Sender<Wanted>,
}

#[async_trait]
impl Acker for ShardAcker {
    async fn ack(&self, tags: &[Tag]) {
        self.settler.ack(tags);
    }

    async fn requeue(&self, tags: &[Tag]) {
        self.settler.requeue(tags);
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.wanted.send_modify(|w| w.prefetch = clamp(prefetch));
    }

    async fn stop(&self) {
        self.wanted.send_modify(|w| w.stop = true);
    }
}

struct ShardReader {
    tier: String,
    inner: Arc<Inner>,
    settler: Arc<Settler>,
}

impl Reader for ShardReader {
    type Item = Arrival;

    fn batch(&mut self, generation: u64, deliveries: Vec<lapin::message::Delivery>) -> Option<Arrival> {
        let total = deliveries.len();
        let mut shards = Vec::with_capacity(total);
        let mut again = 0;
        for delivery in deliveries {
            let tag = Tag { generation, number: delivery.delivery_tag };
            match codec::decode_shard(&delivery.data) {
                Ok(message) => {
                    again += u64::from(delivery.redelivered);
                    shards.push(Delivery { message, redelivered: delivery.redelivered, tag });
                }
                Err(unreadable) => self.bury(tag, delivery.data, unreadable.to_string()),
            }
        }
        let first = shards.len() as u64 - again;
        for (kind, number) in [("first", first), ("again", again), ("unreadable", (total - shards.len()) as u64)] {
            if number > 0 {
                metrics::counter!(m::DELIVERIES, "tier" => self.tier.clone(), "kind" => kind).increment(number);
            }
        }
        (!shards.is_empty()).then_some(Arrival::Shards(shards))
    }

    fn renewed(&mut self, generation: u64) -> Option<Arrival> {
        Some(Arrival::Renewed { generation })
    }
}

impl ShardReader {
    /// Moves a message that can't be read to the dead letters, and only then acks it. Beside the consumer, which must not wait for
    /// it; the tasks are bounded by the prefetch.
    fn bury(&self, tag: Tag, payload: Vec<u8>, reason: String) {
        tracing::warn!(
            tier = self.tier,
            reason,
            bytes = payload.len(),
            "unreadable shard message goes to the dead letters"
        );
        let (inner, settler) = (self.inner.clone(), self.settler.clone());
        self.inner.runtime.spawn(async move {
            let mut backoff = Backoff::new(BURY_FIRST, BURY_MAX);
            // Once the channel is lost the message comes again, and is buried then.
            while settler.is_live(tag.generation) {
                if inner.put_dead(&payload, &reason).await.is_ok() {
                    return settler.ack(&[tag]);
                }
                tokio::time::sleep(backoff.pause()).await;
            }
        });
    }
}
