//! The triggers, for the leader.

use super::Inner;
use super::settler::{Settler, number_of};
use super::subscription::{self, Reader, Spec, Wanted};
use crate::codec;
use crate::metric_definitions as m;
use crate::port::{Result, Tag, TriggerDelivery, Triggers};
use async_trait::async_trait;
use lapin::message::Delivery;
use shardcron_domain::messages::TriggerReply;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Triggers that one leader holds unsettled.
const PREFETCH: u16 = 64;
/// A reply is a courtesy; it must not hold up the triggers behind it.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

pub(super) async fn consume(inner: &Arc<Inner>) -> Result<Box<dyn Triggers>> {
    let settler = Arc::new(Settler::default());
    let spec = Spec {
        kind: "triggers",
        queue: inner.names.triggers(),
        topology: inner.names.triggers_topology(),
        prefetch: PREFETCH,
        expendable: false,
    };
    let reader = TriggerReader { exchange: inner.names.trigger_exchange() };
    let started = subscription::start(inner, spec, settler.clone(), reader).await?;
    Ok(Box::new(RabbitTriggers { items: started.items, wanted: started.wanted, settler, inner: inner.clone() }))
}

struct RabbitTriggers {
    items: mpsc::Receiver<Vec<TriggerDelivery>>,
    wanted: watch::Sender<Wanted>,
    settler: Arc<Settler>,
    inner: Arc<Inner>,
}

#[async_trait]
impl Triggers for RabbitTriggers {
    async fn next(&mut self) -> Option<Vec<TriggerDelivery>> {
        self.items.recv().await
    }

    async fn settle(&mut self, trigger: &TriggerDelivery, reply: &TriggerReply) {
        // First: the answer is a courtesy, and waiting for it must not leave a committed trigger unacked.
        self.settler.ack(&[trigger.tag]);
        if let Some((queue, correlation_id)) = &trigger.reply_to {
            let payload = codec::encode_reply(reply);
            let sending = self.inner.publisher.reply(queue, correlation_id.as_deref(), payload);
            match tokio::time::timeout(REPLY_TIMEOUT, sending).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "the answer to a trigger was not sent"),
                Err(_) => tracing::debug!("the answer to a trigger was not sent in time"),
            }
        }
    }

    async fn stop(&mut self) {
        self.wanted.send_modify(|w| w.stop = true);
        let drained = async { while self.items.recv().await.is_some() {} };
        let _ = tokio::time::timeout(STOP_TIMEOUT, drained).await;
        // Closes the channel, and with that everything unsettled is ready for the next leader.
        self.settler.clear();
    }
}

struct TriggerReader {
    exchange: String,
}

impl Reader for TriggerReader {
    type Item = Vec<TriggerDelivery>;

    fn batch(&mut self, generation: u64, deliveries: Vec<Delivery>) -> Option<Self::Item> {
        metrics::counter!(m::TRIGGERS).increment(deliveries.len() as u64);
        Some(deliveries.into_iter().map(|delivery| self.read(generation, delivery)).collect())
    }

    /// What was unsettled comes again; settling it by the old tag does nothing.
    fn renewed(&mut self, _generation: u64) -> Option<Self::Item> {
        None
    }
}

impl TriggerReader {
    fn read(&self, generation: u64, delivery: Delivery) -> TriggerDelivery {
        let text = |t: &lapin::types::ShortString| t.as_str().to_owned();
        let properties = &delivery.properties;
        let by_exchange = delivery.exchange.as_str() == self.exchange && !delivery.routing_key.as_str().is_empty();
        let correlation_id = properties.correlation_id().as_ref().map(text);
        TriggerDelivery {
            routed_to: by_exchange.then(|| text(&delivery.routing_key)),
            reply_to: properties.reply_to().as_ref().map(|queue| (text(queue), correlation_id)),
            transport_id: properties.message_id().as_ref().map(text).filter(|id| !id.is_empty()),
            tag: Tag { generation, number: number_of(delivery.delivery_tag, 0) },
            payload: delivery.data,
        }
    }
}
