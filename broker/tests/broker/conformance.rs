//! What every broker must do: RabbitMQ, the polled ledger, and RabbitMQ with the ledger behind it, there and away.

use crate::support::*;
use shardcron_broker::{Arrival, Broker, BrokerState, Fallback, LedgerBroker, Published, RabbitMq, RabbitOptions, Way};
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::messages::{ShardMessage, TriggerReply, TriggerRequest};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::{FireAction, FireIntent, FireOutcome, Ledger, NewExecution, Params};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

pub const T0: i64 = 1_772_323_200_000;

/// A broker and what surrounds it.
enum World {
    Rabbit(Rabbit),
    Ledger {
        broker: LedgerBroker,
        rows: Rows,
    },
    /// RabbitMQ is there, the ledger behind it.
    Both {
        rabbit: Rabbit,
        broker: Fallback,
        _rows: Rows,
    },
    /// RabbitMQ is not there.
    Away {
        broker: Fallback,
        rows: Rows,
    },
}

/// A ledger and who claims in it.
pub struct Rows {
    pub ledger: Arc<SqlLedger>,
    pub owner: Incarnation,
    _folder: tempfile::TempDir,
}

impl Rows {
    pub async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("ledger.db").display());
        let ledger = Arc::new(SqlLedger::connect(&url, SqlOptions::default()).await.unwrap());
        ledger.migrate().await.unwrap();
        Rows { ledger, owner: Incarnation(Uuid::now_v7()), _folder: folder }
    }

    /// A new execution whose first shards have been handed out.
    async fn hand_out(&self, broker: &dyn Broker, messages: &mut [ShardMessage], answer: Published) {
        let count = messages.len() as u32;
        let epoch = self.ledger.begin_epoch("test", T0).await.unwrap();
        let id = fire(&self.ledger, epoch, count).await;
        messages.iter_mut().for_each(|m| m.attempt.execution = id);
        assert_eq!(broker.publish(TIER, messages).await, vec![answer.clone(); messages.len()]);
        if answer == Published::Left {
            self.ledger.leave_to_pollers(epoch, &[(id, count)], &[], T0).await.unwrap();
        } else {
            self.ledger.mark_dispatched(epoch, &[(id, count)], &[]).await.unwrap();
        }
    }
}

impl World {
    async fn rabbit() -> Self {
        World::Rabbit(rabbit().await.declared().await)
    }

    async fn ledger() -> Self {
        let rows = Rows::new().await;
        World::Ledger { broker: LedgerBroker::new(rows.ledger.clone(), Duration::from_millis(200)), rows }
    }

    async fn both() -> Self {
        let (rabbit, rows) = (rabbit().await.declared().await, Rows::new().await);
        let broker = Fallback::new(rabbit.broker.clone(), rows.ledger.clone(), quickly()).unwrap();
        World::Both { rabbit, broker, _rows: rows }
    }

    async fn away() -> Self {
        let rows = Rows::new().await;
        // The port of discard: nobody listens there.
        let rabbit = RabbitMq::connect("amqp://127.0.0.1:9/%2f", RabbitOptions::default()).unwrap();
        let broker = Fallback::new(Arc::new(rabbit), rows.ledger.clone(), quickly()).unwrap();
        within("the fall", broker.fault().wait_for(Option::is_some)).await.unwrap();
        World::Away { broker, rows }
    }

    fn broker(&self) -> &dyn Broker {
        match self {
            World::Rabbit(rabbit) => &*rabbit.broker,
            World::Ledger { broker, .. } => broker,
            World::Both { broker, .. } | World::Away { broker, .. } => broker,
        }
    }

    /// Hands shards out as the dispatcher does: publish, then note it in the ledger.
    async fn hand_out(&self, count: u32) -> Vec<ShardMessage> {
        let mut messages = shards(count);
        match self {
            World::Rabbit(_) | World::Both { .. } => {
                assert_eq!(self.broker().publish(TIER, &messages).await, all_confirmed(messages.len()));
            }
            World::Ledger { broker, rows } => rows.hand_out(broker, &mut messages, Published::Confirmed).await,
            World::Away { broker, rows } => rows.hand_out(broker, &mut messages, Published::Left).await,
        }
        messages
    }

    /// What a worker does before it acks.
    async fn commit(&self, attempts: &[AttemptRef]) {
        if let World::Ledger { rows, .. } | World::Away { rows, .. } = self {
            rows.ledger.claim(rows.owner, attempts, T0).await.unwrap();
        }
    }

    /// Two pollers may both see a shard; the claim decides.
    fn polls(&self) -> bool {
        matches!(self, World::Ledger { .. } | World::Away { .. })
    }

    async fn dead(&self) -> Vec<(Vec<u8>, String)> {
        match self {
            World::Rabbit(rabbit) | World::Both { rabbit, .. } => {
                let read = |m: &testkit::Message| {
                    (m.payload.clone(), m.header("x-shardcron-error").as_str().unwrap_or_default().to_owned())
                };
                let messages = rabbit.manage(|m| m.take_messages("shardcron.dead", 10)).await.unwrap();
                messages.iter().map(read).collect()
            }
            World::Ledger { rows, .. } | World::Away { rows, .. } => {
                let rows = rows.ledger.dead(10).await.unwrap();
                rows.into_iter().map(|r| (r.text.unwrap_or_default().into_bytes(), r.reason)).collect()
            }
        }
    }
}

/// An execution, all of whose rows are there.
pub async fn fire(ledger: &SqlLedger, epoch: shardcron_domain::Epoch, count: u32) -> ExecutionId {
    let text = "[job.job]\nhandler = { rust = \"noop\" }\nshards = { modulo = 4 }\n";
    let spec = shardcron_domain::jobfile::parse(text).unwrap().remove(0);
    ledger.apply_jobs(&[(spec, Some(T0))], "test", T0).await.unwrap();
    let job = ledger.job("job").await.unwrap().unwrap().id;
    let id = ExecutionId(Uuid::now_v7());
    let new = NewExecution {
        id,
        plan: ShardPlan::Modulo { total: count },
        params: Params::new(),
        tier: TIER.into(),
        timeout_ms: None,
        stall_ms: None,
        overlap: OverlapPolicy::Allow,
    };
    let intent = FireIntent {
        job,
        version: 1,
        fire_key: id.to_string(),
        nominal_ms: T0,
        scheduled: true,
        action: FireAction::Fire(new),
        next_fire_ms: None,
        extra: Default::default(),
    };
    assert_eq!(ledger.fire(epoch, &[intent], T0).await.unwrap(), [FireOutcome::Fired(id)]);
    assert_eq!(ledger.materialize(epoch, id, count).await.unwrap(), count);
    id
}

macro_rules! for_all {
    ($($case:ident),* $(,)?) => {
        mod rabbitmq {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::World::rabbit().await).await; })*
        }
        mod ledger {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::World::ledger().await).await; })*
        }
        mod both {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::World::both().await).await; })*
        }
        mod away {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::World::away().await).await; })*
        }
    };
}

for_all!(
    all_that_is_handed_out_arrives,
    the_prefetch_bounds_what_is_open,
    another_prefetch_takes_effect,
    what_is_given_back_comes_again,
    two_consumers_share,
    a_consumer_stops_and_what_it_holds_is_acked,
    a_trigger_is_taken_until_it_is_settled,
    a_dead_letter_is_kept_with_its_reason,
    closing_ends_the_consumers,
    it_says_how_and_what_it_is,
);

async fn all_that_is_handed_out_arrives(world: World) {
    let mut consumer = world.broker().consume(TIER, 64).await.unwrap();
    let messages = world.hand_out(1_000).await;
    let mut seen = Vec::new();
    while seen.len() < messages.len() {
        let deliveries = next_shards(&mut consumer).await;
        let batch = attempts(&deliveries);
        world.commit(&batch).await;
        consumer.acker.ack(&tags(&deliveries)).await;
        seen.extend(batch);
    }
    seen.sort_unstable();
    assert_eq!(seen, wanted(&messages), "each once");
    quiet(&mut consumer).await;
}

async fn the_prefetch_bounds_what_is_open(world: World) {
    world.hand_out(40).await;
    let mut consumer = world.broker().consume(TIER, 10).await.unwrap();
    let mut open = collect(&mut consumer, 10).await;
    quiet(&mut consumer).await;
    // Out of order, and not from the beginning: exactly as many come as were acked.
    for take in [[9, 3, 4], [0, 1, 2], [6, 5, 0]] {
        let acked: Vec<_> = take.iter().map(|&i| open[i].clone()).collect();
        open.retain(|d| !acked.contains(d));
        world.commit(&attempts(&acked)).await;
        consumer.acker.ack(&tags(&acked)).await;
        open.extend(collect(&mut consumer, 3).await);
        assert_eq!(open.len(), 10);
        quiet(&mut consumer).await;
    }
}

async fn another_prefetch_takes_effect(world: World) {
    let messages = world.hand_out(60).await;
    let mut consumer = world.broker().consume(TIER, 5).await.unwrap();
    let mut open = collect(&mut consumer, 5).await;
    consumer.acker.set_prefetch(20).await;
    // RabbitMQ counts anew for the new consumer; what is open stays open beside it.
    while open.len() < 20 {
        open.extend(next_shards(&mut consumer).await);
    }
    assert!(open.len() <= 25, "{}", open.len());
    let mut seen = BTreeSet::new();
    let mut pending = open;
    while seen.len() < messages.len() {
        world.commit(&attempts(&pending)).await;
        consumer.acker.ack(&tags(&pending)).await;
        for attempt in attempts(&pending) {
            assert!(seen.insert(attempt), "{attempt} came twice");
        }
        if seen.len() < messages.len() {
            pending = next_shards(&mut consumer).await;
            assert!(pending.len() <= 20);
        }
    }
    quiet(&mut consumer).await;
}

async fn what_is_given_back_comes_again(world: World) {
    let messages = world.hand_out(3).await;
    let mut consumer = world.broker().consume(TIER, 10).await.unwrap();
    let first = collect(&mut consumer, 3).await;
    consumer.acker.requeue(&tags(&first[1..2])).await;
    let again = collect(&mut consumer, 1).await;
    assert_eq!(again[0].message.attempt, first[1].message.attempt);
    // Acking what was given back does nothing to its new delivery.
    consumer.acker.ack(&tags(&first[1..2])).await;
    world.commit(&wanted(&messages)).await;
    consumer.acker.ack(&tags(&first)).await;
    consumer.acker.ack(&tags(&again)).await;
    quiet(&mut consumer).await;
}

async fn two_consumers_share(world: World) {
    let mut left = world.broker().consume(TIER, 30).await.unwrap();
    let mut right = world.broker().consume(TIER, 30).await.unwrap();
    let messages = world.hand_out(60).await;
    let mut seen = BTreeSet::new();
    while seen.len() < messages.len() {
        let (consumer, deliveries) = tokio::select! {
            deliveries = next_shards(&mut left) => (&left, deliveries),
            deliveries = next_shards(&mut right) => (&right, deliveries),
        };
        let batch = attempts(&deliveries);
        world.commit(&batch).await;
        consumer.acker.ack(&tags(&deliveries)).await;
        for attempt in batch {
            let first = seen.insert(attempt);
            // Two pollers of one ledger may both see a shard; the claim decides.
            assert!(first || world.polls(), "{attempt} came twice");
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), wanted(&messages));
}

async fn a_consumer_stops_and_what_it_holds_is_acked(world: World) {
    world.hand_out(30).await;
    let mut consumer = world.broker().consume(TIER, 10).await.unwrap();
    let held = collect(&mut consumer, 10).await;
    consumer.acker.stop().await;
    assert!(within("the end", consumer.deliveries.next()).await.is_none());
    world.commit(&attempts(&held[..5])).await;
    consumer.acker.ack(&tags(&held[..5])).await;
    consumer.acker.requeue(&tags(&held[5..])).await;
    let mut other = world.broker().consume(TIER, 100).await.unwrap();
    let rest = collect(&mut other, 25).await;
    let acked = attempts(&held[..5]);
    assert!(attempts(&rest).iter().all(|a| !acked.contains(a)));
    quiet(&mut other).await;
}

async fn a_trigger_is_taken_until_it_is_settled(world: World) {
    let request = |id: &str| TriggerRequest {
        job: "demo".into(),
        params: serde_json::from_str(r#"{"date":"2013-01-31"}"#).unwrap(),
        request_id: Some(id.into()),
        ..TriggerRequest::default()
    };
    let mut triggers = world.broker().triggers().await.unwrap();
    world.broker().send_trigger(&request("r1")).await.unwrap();
    world.broker().send_trigger(&request("r2")).await.unwrap();
    let mut came = Vec::new();
    while came.len() < 2 {
        came.extend(within("triggers", triggers.next()).await.unwrap());
    }
    let parse = |t: &shardcron_broker::TriggerDelivery| {
        shardcron_domain::trigger::parse(&t.payload, t.routed_to.as_deref()).unwrap()
    };
    assert_eq!(came.iter().map(parse).collect::<Vec<_>>(), [request("r1"), request("r2")]);
    let reply = TriggerReply { outcome: "fired".into(), execution: None, message: "it runs".into() };
    triggers.settle(&came[0], &reply).await;
    triggers.stop().await;
    assert!(within("the end", triggers.next()).await.is_none());
    // The next leader gets what was not settled, and only that.
    let mut next = world.broker().triggers().await.unwrap();
    let again = within("the unsettled trigger", next.next()).await.unwrap();
    assert_eq!(again.iter().map(parse).collect::<Vec<_>>(), [request("r2")]);
    next.settle(&again[0], &reply).await;
    assert!(tokio::time::timeout(QUIET, next.next()).await.is_err());
}

async fn a_dead_letter_is_kept_with_its_reason(world: World) {
    let huge = vec![b'x'; 1 << 20];
    world.broker().put_dead(b"what", "unknown job 'recncile'; did you mean 'reconcile'?").await.unwrap();
    world.broker().put_dead(&huge, "too large").await.unwrap();
    let dead = world.dead().await;
    assert_eq!(dead.len(), 2);
    let of = |reason: &str| dead.iter().find(|(_, r)| r.contains(reason)).unwrap().0.clone();
    assert_eq!(of("did you mean"), b"what");
    assert_eq!(of("too large").len(), 4 * 1024);
}

async fn closing_ends_the_consumers(world: World) {
    let mut consumer = world.broker().consume(TIER, 10).await.unwrap();
    let mut triggers = world.broker().triggers().await.unwrap();
    world.broker().close().await;
    loop {
        match within("the end", consumer.deliveries.next()).await {
            None => break,
            Some(Arrival::Shards(shards)) => panic!("{shards:?}"),
            Some(Arrival::Renewed { .. }) => {}
        }
    }
    assert!(within("the triggers' end", triggers.next()).await.is_none());
}

async fn it_says_how_and_what_it_is(world: World) {
    let depth = world.broker().depth(TIER).await.unwrap();
    assert_eq!(depth.unbounded, world.polls());
    if let World::Away { broker, .. } = &world {
        assert!(broker.server_version().await.is_err());
        assert!(matches!(*broker.state().borrow(), BrokerState::Away(_)), "work goes on, but it is away");
        assert_eq!(broker.way(), Way::Ledger);
        return;
    }
    assert_eq!(world.broker().way(), Way::Broker);
    let version = world.broker().server_version().await.unwrap();
    assert!(version.contains("RabbitMQ ") || version.contains("SQLite "), "{version}");
    assert_eq!(*world.broker().state().borrow(), BrokerState::Up);
}
