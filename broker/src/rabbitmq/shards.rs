//! The consumer of one tier.

use super::Inner;
use super::settler::{Settler, number_of};
use super::subscription::{self, Reader, Spec, Wanted};
use crate::backoff::Backoff;
use crate::codec;
use crate::groups::Sizes;
use crate::metric_definitions as m;
use crate::port::{Acker, Arrival, Consumer, Deliveries, Delivery, Result, Tag};
use async_trait::async_trait;
use shardcron_domain::limits;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
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
    let flow = Arc::new(Flow { state: Mutex::new((clamp(prefetch), Sizes::default())), wanted: OnceLock::new() });
    let reader = ShardReader { tier: tier.into(), inner: inner.clone(), settler: settler.clone(), flow: flow.clone() };
    let started = subscription::start(inner, spec, settler.clone(), reader).await?;
    let _ = flow.wanted.set(started.wanted);
    Ok(Consumer {
        deliveries: Box::new(ShardDeliveries { items: started.items, served: started.served }),
        acker: Arc::new(ShardAcker { settler, flow }),
    })
}

/// How many messages are wanted, where shards are asked for and messages hold several.
struct Flow {
    /// The shards that are asked for, and what messages hold.
    state: Mutex<(u16, Sizes)>,
    wanted: OnceLock<watch::Sender<Wanted>>,
}

impl Flow {
    /// Changes the state, and the prefetch if that makes another of it.
    fn change(&self, change: impl FnOnce(&mut u16, &mut Sizes)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (shards, sizes) = &mut *state;
        change(shards, sizes);
        let messages = clamp(sizes.messages(*shards));
        // Under the lock, so that what is seen last is also asked for last.
        if let Some(wanted) = self.wanted.get() {
            wanted.send_if_modified(|w| std::mem::replace(&mut w.prefetch, messages) != messages);
        }
    }
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
    flow: Arc<Flow>,
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
        self.flow.change(|shards, _| *shards = clamp(prefetch));
    }

    async fn stop(&self) {
        if let Some(wanted) = self.flow.wanted.get() {
            wanted.send_modify(|w| w.stop = true);
        }
    }
}

struct ShardReader {
    tier: String,
    inner: Arc<Inner>,
    settler: Arc<Settler>,
    flow: Arc<Flow>,
}

impl Reader for ShardReader {
    type Item = Arrival;

    fn batch(&mut self, generation: u64, deliveries: Vec<lapin::message::Delivery>) -> Option<Arrival> {
        let mut shards = Vec::with_capacity(deliveries.len());
        let (mut first, mut again, mut unreadable) = (0, 0, 0);
        for delivery in deliveries {
            let tag = |part| Tag { generation, number: number_of(delivery.delivery_tag, part) };
            match codec::decode_shards(&delivery.data) {
                Ok(run) => {
                    *if delivery.redelivered { &mut again } else { &mut first } += 1_u64;
                    self.settler.grouped(generation, delivery.delivery_tag, run.count);
                    shards.extend((0..).zip(run.shards()).map(|(part, message)| Delivery {
                        message,
                        redelivered: delivery.redelivered,
                        tag: tag(part),
                    }));
                }
                Err(refusal) => {
                    unreadable += 1;
                    self.bury(tag(0), delivery.data, refusal.to_string());
                }
            }
        }
        let messages = first + again;
        self.flow.change(|_, sizes| sizes.observe(messages, shards.len() as u64));
        for (kind, number) in [("first", first), ("again", again), ("unreadable", unreadable)] {
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
