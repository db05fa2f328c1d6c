//! Shards of broadcasts: in no queue, since only this worker may run them. It asks the ledger for its own, and hands them to the
//! consumer of their tier as if they had come by the broker, so that claims, slots, results and a drain are the same for all.

use super::Shared;
use super::consumer::{Arrived, ConsumerActor};
use crate::ports::{Ports, tell};
use actix::prelude::*;
use async_trait::async_trait;
use shardcron_broker::{Acker, Arrival, Delivery, Tag};
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage};
use shardcron_domain::{AttemptRef, Incarnation};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// How often a worker asks.
const EVERY: Duration = Duration::from_secs(1);
/// What was handed to a consumer and is still waiting then is handed to it again.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
const AT_ONCE: usize = 1_000;
/// No broker's tag; nothing is acked by it.
const TAG: Tag = Tag { generation: u64::MAX, number: u64::MAX };

/// A broker's acker that never hears of shards which did not come from there.
pub(super) struct Beside(pub(super) Arc<dyn Acker>);

fn of_the_broker(tags: &[Tag]) -> Vec<Tag> {
    tags.iter().copied().filter(|tag| *tag != TAG).collect()
}

#[async_trait]
impl Acker for Beside {
    async fn ack(&self, tags: &[Tag]) {
        let tags = of_the_broker(tags);
        if !tags.is_empty() {
            self.0.ack(&tags).await;
        }
    }

    async fn requeue(&self, tags: &[Tag]) {
        let tags = of_the_broker(tags);
        if !tags.is_empty() {
            self.0.requeue(&tags).await;
        }
    }

    async fn set_prefetch(&self, prefetch: u16) {
        self.0.set_prefetch(prefetch).await;
    }

    async fn stop(&self) {
        self.0.stop().await;
    }
}

/// Asks as long as the worker lives and takes something new.
pub(super) async fn poll(
    ports: Ports,
    who: Incarnation,
    consumers: Vec<(String, Addr<ConsumerActor>)>,
    shared: Weak<Shared>,
) {
    let mut told: HashMap<AttemptRef, Instant> = HashMap::new();
    loop {
        tokio::time::sleep(EVERY).await;
        match shared.upgrade() {
            Some(shared) if !shared.draining.load(Ordering::Relaxed) => {}
            _ => return,
        }
        // A ledger that is away is said elsewhere.
        let Ok(found) = ports.ledger.addressed(who, ports.ledger_now_ms(), AT_ONCE).await else { continue };
        told.retain(|attempt, since| {
            since.elapsed() < AGAIN_AFTER && found.iter().any(|(_, waiting)| waiting == attempt)
        });
        for (tier, consumer) in &consumers {
            let mine = found.iter().filter(|(of, attempt)| of == tier && !told.contains_key(attempt));
            let mine: Vec<AttemptRef> = mine.map(|(_, attempt)| *attempt).collect();
            if mine.is_empty() {
                continue;
            }
            told.extend(mine.iter().map(|attempt| (*attempt, Instant::now())));
            let delivery = |attempt| Delivery {
                message: ShardMessage { v: ENVELOPE_VERSION, attempt, epoch: 0 },
                redelivered: false,
                tag: TAG,
            };
            tell(consumer.clone(), Arrived(Arrival::Shards(mine.into_iter().map(delivery).collect()))).await;
        }
    }
}
