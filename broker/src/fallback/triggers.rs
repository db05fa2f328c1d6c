//! Triggers from both sides. Those in the ledger are taken also while the broker is there: who left them may have been cut off from
//! it, or left them before it came back.

use super::Inner;
use crate::port::*;
use async_trait::async_trait;
use shardcron_domain::messages::TriggerReply;
use std::sync::Arc;
use tokio::sync::oneshot;

pub(super) async fn consume(inner: &Arc<Inner>) -> Result<Box<dyn Triggers>> {
    let broker = inner.broker.clone();
    let mut opening = Box::pin(async move { broker.triggers().await });
    let opened = tokio::select! {
        opened = &mut opening => Some(opened?),
        () = inner.outlook.falls() => None,
    };
    let stored = inner.triggers.triggers().await?;
    let opening = match opened {
        Some(_) => None,
        None => {
            let (mut sender, receiver) = oneshot::channel();
            let mut changes = inner.outlook.changes();
            inner.runtime.spawn(async move {
                tokio::select! {
                    opened = opening => match opened {
                        Ok(triggers) => drop(sender.send(triggers)),
                        Err(error) => tracing::error!(%error, "the broker's triggers can't be taken; those in the ledger are"),
                    },
                    () = sender.closed() => {}
                    () = changes.closed() => {}
                }
            });
            Some(receiver)
        }
    };
    Ok(Box::new(BothTriggers { opening, from_broker: opened, stored: Some(stored), stopped: false }))
}

struct BothTriggers {
    opening: Option<oneshot::Receiver<Box<dyn Triggers>>>,
    from_broker: Option<Box<dyn Triggers>>,
    stored: Option<Box<dyn Triggers>>,
    stopped: bool,
}

#[async_trait]
impl Triggers for BothTriggers {
    async fn next(&mut self) -> Option<Vec<TriggerDelivery>> {
        while !self.stopped && (self.opening.is_some() || self.from_broker.is_some() || self.stored.is_some()) {
            tokio::select! {
                opened = maybe(self.opening.as_mut()) => {
                    self.opening = None;
                    self.from_broker = opened;
                }
                batch = from(self.from_broker.as_mut()) => match batch {
                    Some(batch) => return Some(batch),
                    None => self.from_broker = None,
                },
                batch = from(self.stored.as_mut()) => match batch {
                    Some(batch) => return Some(batch),
                    None => self.stored = None,
                },
            }
        }
        None
    }

    async fn settle(&mut self, trigger: &TriggerDelivery, reply: &TriggerReply) {
        let side = if trigger.tag.generation == POLLED { &mut self.stored } else { &mut self.from_broker };
        if let Some(side) = side {
            side.settle(trigger, reply).await;
        }
    }

    async fn stop(&mut self) {
        self.stopped = true;
        self.opening = None;
        for side in [&mut self.stored, &mut self.from_broker].into_iter().flatten() {
            side.stop().await;
        }
    }
}

async fn maybe(opening: Option<&mut oneshot::Receiver<Box<dyn Triggers>>>) -> Option<Box<dyn Triggers>> {
    match opening {
        Some(opening) => opening.await.ok(),
        None => std::future::pending().await,
    }
}

async fn from(side: Option<&mut Box<dyn Triggers>>) -> Option<Vec<TriggerDelivery>> {
    match side {
        Some(side) => side.next().await,
        None => std::future::pending().await,
    }
}
