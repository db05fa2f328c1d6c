//! What the tests share.

use shardcron_broker::{
    Arrival, Broker, BrokerState, Consumer, Delivery, FallbackOptions, Published, RabbitMq, RabbitOptions, Tag,
};
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage};
use shardcron_domain::{AttemptRef, ExecutionId};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use testkit::Management;
use uuid::Uuid;

pub const TIER: &str = "core";

/// Longer than anything here takes; a test that runs into it has found a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long to watch for what must not come.
pub const QUIET: Duration = Duration::from_millis(400);

/// Bounds a wait.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {PATIENCE:?} in vain for: {what}"),
    }
}

/// A broker in a vhost of its own, and the management API for it.
pub struct Rabbit {
    pub broker: Arc<RabbitMq>,
    pub management: Management,
    pub name: String,
}

pub async fn rabbit() -> Rabbit {
    let url = fresh_vhost().await;
    rabbit_at(&url, &url).await
}

pub async fn fresh_vhost() -> String {
    tokio::task::spawn_blocking(|| testkit::shared().fresh_vhost()).await.unwrap()
}

/// Connects by `url`, which may lead through a relay, to the vhost of `direct`.
pub async fn rabbit_at(direct: &str, url: &str) -> Rabbit {
    let name = testkit::unique_prefix();
    let broker = RabbitMq::connect(url, RabbitOptions { name: name.clone(), ..RabbitOptions::default() }).unwrap();
    let direct = direct.to_owned();
    let management = tokio::task::spawn_blocking(move || testkit::shared().management_of(&direct)).await.unwrap();
    Rabbit { broker: Arc::new(broker), management, name }
}

impl Rabbit {
    pub async fn up(&self) {
        let mut state = self.broker.state();
        within("the broker to be up", state.wait_for(|s| *s == BrokerState::Up)).await.unwrap();
    }

    pub async fn declared(self) -> Self {
        self.up().await;
        self.broker.declare(&[TIER.into()]).await.unwrap();
        self
    }

    /// Runs a blocking call of the management API.
    pub async fn manage<T: Send + 'static>(&self, call: impl FnOnce(&Management) -> T + Send + 'static) -> T {
        let management = self.management.clone();
        tokio::task::spawn_blocking(move || call(&management)).await.unwrap()
    }

    /// Waits for something that the management API shows with delay.
    pub async fn shown<T: Send + 'static>(
        &self,
        what: &'static str,
        mut probe: impl FnMut(&Management) -> Option<T> + Send + 'static,
    ) -> T {
        self.manage(move |m| testkit::wait_until_some(what, PATIENCE, || probe(m))).await
    }

    /// Has the server close every connection of this broker; gives their number.
    pub async fn close_connections(&self) -> usize {
        let name = self.name.clone();
        self.shown("both connections to be listed", move |m| {
            let listed = m.call("GET", "connections", None).ok()?;
            let ours = |c: &&serde_json::Value| {
                c["client_properties"]["connection_name"].as_str().is_some_and(|n| n.starts_with(&name))
            };
            let names: Vec<_> = listed.as_array()?.iter().filter(ours).filter_map(|c| c["name"].as_str()).collect();
            if names.len() < 2 {
                return None;
            }
            let close = |name: &&str| {
                let path = format!("connections/{}", name.replace(' ', "%20").replace('>', "%3E"));
                m.call("DELETE", &path, None).is_ok()
            };
            Some(names.iter().filter(|n| close(n)).count())
        })
        .await
    }
}

/// A fallback that does not keep a test waiting.
pub fn quickly() -> FallbackOptions {
    FallbackOptions { after: Duration::from_millis(200), poll: Duration::from_millis(200), runtime: None }
}

/// Shards of a new execution.
pub fn shards(count: u32) -> Vec<ShardMessage> {
    let execution = ExecutionId(Uuid::now_v7());
    let shard =
        |index| ShardMessage { v: ENVELOPE_VERSION, attempt: AttemptRef { execution, index, attempt: 1 }, epoch: 1 };
    (0..count).map(shard).collect()
}

pub fn all_confirmed(count: usize) -> Vec<Published> {
    vec![Published::Confirmed; count]
}

/// The next deliveries; a renewal is passed over.
pub async fn next_shards(consumer: &mut Consumer) -> Vec<Delivery> {
    loop {
        match within("deliveries", consumer.deliveries.next()).await {
            Some(Arrival::Shards(shards)) => return shards,
            Some(Arrival::Renewed { .. }) => {}
            None => panic!("the consumer ended"),
        }
    }
}

/// Exactly so many deliveries; panics when more come with them.
pub async fn collect(consumer: &mut Consumer, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(next_shards(consumer).await);
    }
    assert_eq!(all.len(), count, "more came than may be open");
    all
}

/// Nothing comes.
pub async fn quiet(consumer: &mut Consumer) {
    if let Ok(arrival) = tokio::time::timeout(QUIET, consumer.deliveries.next()).await {
        panic!("expected nothing, and there came {arrival:?}");
    }
}

pub async fn renewed(consumer: &mut Consumer) -> u64 {
    loop {
        match within("a renewal", consumer.deliveries.next()).await {
            Some(Arrival::Renewed { generation }) => return generation,
            Some(Arrival::Shards(_)) => {}
            None => panic!("the consumer ended"),
        }
    }
}

pub fn tags(deliveries: &[Delivery]) -> Vec<Tag> {
    deliveries.iter().map(|d| d.tag).collect()
}

pub fn attempts(deliveries: &[Delivery]) -> Vec<AttemptRef> {
    let mut attempts: Vec<_> = deliveries.iter().map(|d| d.message.attempt).collect();
    attempts.sort_unstable();
    attempts
}

pub fn wanted(messages: &[ShardMessage]) -> Vec<AttemptRef> {
    messages.iter().map(|m| m.attempt).collect()
}
