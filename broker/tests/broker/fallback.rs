//! RabbitMQ with the ledger behind it, while it goes away and comes back.

use crate::conformance::{Rows, T0, fire};
use crate::faults::{cut, heal};
use crate::support::*;
use shardcron_broker::{Broker, BrokerState, Consumer, Fallback, POLLED, Published, Way};
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage, TriggerReply, TriggerRequest};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId};
use shardcron_store::Ledger;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use testkit::Relay;

const QUEUE: &str = "shardcron.shards.core";

/// A process that may be cut off from RabbitMQ, another that is not, and their ledger.
struct World {
    /// Behind the relay.
    far: Fallback,
    near: Fallback,
    rabbit: Rabbit,
    rows: Rows,
    epoch: Epoch,
}

async fn world() -> (World, Relay) {
    let direct = fresh_vhost().await;
    let port: u16 = direct.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let relay = tokio::task::spawn_blocking(move || Relay::start(port)).await.unwrap().unwrap();
    let far = rabbit_at(&direct, &format!("{}?heartbeat=2", relay.url(&direct))).await.declared().await;
    let rabbit = rabbit_at(&direct, &direct).await.declared().await;
    let rows = Rows::new().await;
    let epoch = rows.ledger.begin_epoch("test", T0).await.unwrap();
    let fallback = |broker| Fallback::new(broker, rows.ledger.clone(), quickly()).unwrap();
    let (far, near) = (fallback(far.broker), fallback(rabbit.broker.clone()));
    (World { far, near, rabbit, rows, epoch }, relay)
}

fn messages(execution: ExecutionId, range: std::ops::Range<u32>) -> Vec<ShardMessage> {
    let attempt = |index| AttemptRef { execution, index, attempt: 1 };
    range.map(|index| ShardMessage { v: ENVELOPE_VERSION, attempt: attempt(index), epoch: 1 }).collect()
}

impl World {
    /// Hands shards out as the dispatcher does.
    async fn hand_out(&self, broker: &Fallback, id: ExecutionId, range: std::ops::Range<u32>) {
        let to = range.end;
        match broker.publish(TIER, &messages(id, range)).await.pop() {
            Some(Published::Left) => {
                self.rows.ledger.leave_to_pollers(self.epoch, &[(id, to)], &[], T0).await.unwrap();
            }
            Some(Published::Confirmed) => {
                self.rows.ledger.mark_dispatched(self.epoch, &[(id, to)], &[]).await.unwrap();
            }
            other => panic!("{other:?}"),
        }
    }

    /// What the leader does once RabbitMQ is back.
    async fn send_what_is_missing(&self) {
        let polling = self.rows.ledger.polling().await.unwrap().unwrap();
        let rows = self.rows.ledger.handed_out(None, T0, 10_000).await.unwrap();
        let message = |a: &AttemptRef| ShardMessage { v: ENVELOPE_VERSION, attempt: *a, epoch: 1 };
        let missing: Vec<_> = rows.iter().map(|row| message(&row.attempt)).collect();
        assert_eq!(self.far.publish(TIER, &missing).await, all_confirmed(missing.len()));
        assert!(self.rows.ledger.end_polling(self.epoch, &polling).await.unwrap());
    }

    /// Claims and acks what comes until `count` shards at least are begun. Each is begun once, by whatever way it came.
    async fn work(&self, consumer: &mut Consumer, begun: &mut BTreeSet<AttemptRef>, count: usize) {
        while begun.len() < count {
            let deliveries = next_shards(consumer).await;
            let batch = attempts(&deliveries);
            let verdicts = self.rows.ledger.claim(self.rows.owner, &batch, T0).await.unwrap();
            for (attempt, verdict) in batch.iter().zip(verdicts) {
                // Claimed again by the same owner is the same claim; only what was refused was somebody else's.
                assert!(verdict.is_ok() || begun.contains(attempt), "{attempt}: {verdict:?}");
                begun.insert(*attempt);
            }
            consumer.acker.ack(&tags(&deliveries)).await;
        }
    }
}

/// The way as publishing sees it. Not the fault, which is also there while the leader's note stands.
async fn goes(broker: &Fallback, way: Way) {
    let turned = async {
        while broker.way() != way {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within("the other way", turned).await;
}

async fn fallen(broker: &Fallback) {
    goes(broker, Way::Ledger).await;
}

async fn risen(broker: &Fallback) {
    goes(broker, Way::Broker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_02_work_goes_on_through_cuts_and_silence() {
    let (world, relay) = world().await;
    let id = fire(&world.rows.ledger, world.epoch, 1_400).await;
    let mut consumer = world.far.consume(TIER, 100).await.unwrap();
    let mut begun = BTreeSet::new();
    world.hand_out(&world.far, id, 0..200).await;
    world.work(&mut consumer, &mut begun, 100).await;

    // Cut in the middle: what the broker held comes from the ledger, and so does what is handed out meanwhile.
    let relay = cut(relay).await;
    fallen(&world.far).await;
    assert_eq!(world.far.way(), Way::Ledger);
    assert!(matches!(*world.far.state().borrow(), BrokerState::Away(_)), "people see that it is away");
    world.hand_out(&world.far, id, 200..600).await;
    let depth = world.far.depth(TIER).await.unwrap();
    assert!(depth.unbounded && depth.ready >= 400, "the ledger's queue has a length, too: {depth:?}");
    world.work(&mut consumer, &mut begun, 500).await;
    let relay = heal(relay).await;
    risen(&world.far).await;
    assert_eq!(world.far.way(), Way::Broker);
    world.hand_out(&world.far, id, 600..700).await;
    world.send_what_is_missing().await;
    world.work(&mut consumer, &mut begun, 700).await;

    // Silence is noticed by the heartbeat.
    world.hand_out(&world.far, id, 700..800).await;
    relay.stall();
    fallen(&world.far).await;
    world.hand_out(&world.far, id, 800..1_000).await;
    world.work(&mut consumer, &mut begun, 1_000).await;
    let healed = Instant::now();
    let _relay = heal(relay).await;
    risen(&world.far).await;
    world.send_what_is_missing().await;
    world.hand_out(&world.far, id, 1_000..1_400).await;
    world.work(&mut consumer, &mut begun, 1_400).await;
    println!("back {:?} after the silence", healed.elapsed());
    // Everything was acked on the side that it came from: nothing is left in the queue, unacked or not. What still comes is the second
    // message of a shard that the ledger handed out, too.
    loop {
        tokio::select! {
            biased;
            deliveries = next_shards(&mut consumer) => {
                assert!(attempts(&deliveries).iter().all(|attempt| begun.contains(attempt)));
                consumer.acker.ack(&tags(&deliveries)).await;
            }
            () = world.rabbit.shown("the empty queue", |m| m.queue_depth(QUEUE).ok().filter(|d| *d == 0).map(drop)) => break,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connected_worker_polls_when_the_leader_says_so_and_only_then() {
    let (world, relay) = world().await;
    let id = fire(&world.rows.ledger, world.epoch, 40).await;
    let mut consumer = world.near.consume(TIER, 10).await.unwrap();
    // Handed out by a leader that died before it published: not for pollers.
    world.rows.ledger.mark_dispatched(world.epoch, &[(id, 10)], &[]).await.unwrap();
    quiet(&mut consumer).await;
    // The leader is cut off.
    let _relay = cut(relay).await;
    fallen(&world.far).await;
    world.hand_out(&world.far, id, 10..20).await;
    let told = Instant::now();
    let open = collect(&mut consumer, 10).await;
    assert!(told.elapsed() < Duration::from_secs(3), "{:?}", told.elapsed());
    assert!(open.iter().all(|d| d.tag.generation == POLLED && d.message.attempt.index < 20));
    assert!(world.near.fault().borrow().as_deref().unwrap().contains("the leader"));
    assert_eq!(world.near.way(), Way::Broker, "this process itself is connected");
    quiet(&mut consumer).await;

    // The same shard by message: known by its attempt, and each tag is settled on its own side.
    world.rows.ledger.claim(world.rows.owner, &attempts(&open[..4]), T0).await.unwrap();
    consumer.acker.ack(&tags(&open[..4])).await;
    let mut more = collect(&mut consumer, 4).await;
    let again: Vec<_> = open[4..8].iter().map(|d| d.message.clone()).collect();
    world.near.publish(TIER, &again).await;
    let twice = collect(&mut consumer, 4).await;
    assert!(twice.iter().all(|d| d.tag.generation != POLLED), "{twice:?}");
    more.extend(open[4..].iter().cloned());
    world.rows.ledger.claim(world.rows.owner, &attempts(&more), T0).await.unwrap();
    consumer.acker.ack(&tags(&more)).await;
    // Four of the broker's are open: the poller has what they leave of the prefetch.
    let six = collect(&mut consumer, 6).await;
    assert!(six.iter().all(|d| d.tag.generation == POLLED));
    quiet(&mut consumer).await;
    consumer.acker.ack(&tags(&twice)).await;
    world.rows.ledger.claim(world.rows.owner, &attempts(&six), T0).await.unwrap();
    consumer.acker.ack(&tags(&six)).await;
    world.rabbit.shown("the empty queue", |m| m.queue_depth(QUEUE).ok().filter(|d| *d == 0)).await;

    let polling = world.rows.ledger.polling().await.unwrap().unwrap();
    assert!(world.rows.ledger.end_polling(world.epoch, &polling).await.unwrap());
    within("nobody to be told any more", world.near.fault().wait_for(Option::is_none)).await.unwrap();
    world.rows.ledger.mark_dispatched(world.epoch, &[(id, 40)], &[]).await.unwrap();
    quiet(&mut consumer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_cut_off_takes_what_stands_in_the_queue_and_its_messages_are_refused() {
    let (world, relay) = world().await;
    let id = fire(&world.rows.ledger, world.epoch, 30).await;
    let mut far = world.far.consume(TIER, 100).await.unwrap();
    let _relay = cut(relay).await;
    fallen(&world.far).await;
    world.hand_out(&world.near, id, 0..30).await;
    let mut begun = BTreeSet::new();
    world.work(&mut far, &mut begun, 30).await;
    let mut near = world.near.consume(TIER, 100).await.unwrap();
    let late = collect(&mut near, 30).await;
    let other = shardcron_domain::Incarnation(uuid::Uuid::now_v7());
    let verdicts = world.rows.ledger.claim(other, &attempts(&late), T0).await.unwrap();
    assert!(verdicts.iter().all(Result::is_err), "{verdicts:?}");
    near.acker.ack(&tags(&late)).await;
    world.rabbit.shown("the empty queue", |m| m.queue_depth(QUEUE).ok().filter(|d| *d == 0)).await;
    far.acker.stop().await;
    assert!(within("the end", far.deliveries.next()).await.is_none(), "although the broker is away");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_07_a_consumer_begins_without_the_broker_and_joins_it_later() {
    let (world, relay) = world().await;
    let id = fire(&world.rows.ledger, world.epoch, 20).await;
    let relay = cut(relay).await;
    let mut consumer = within("a consumer", world.far.consume(TIER, 10)).await.unwrap();
    consumer.acker.set_prefetch(20).await;
    let mut triggers = within("triggers", world.far.triggers()).await.unwrap();
    world.hand_out(&world.far, id, 0..10).await;
    let mut begun = BTreeSet::new();
    world.work(&mut consumer, &mut begun, 10).await;
    let request = |id: &str| TriggerRequest {
        job: "demo".into(),
        params: Default::default(),
        request_id: Some(id.into()),
        ..Default::default()
    };
    world.far.send_trigger(&request("stored")).await.unwrap();
    let stored = within("the stored trigger", triggers.next()).await.unwrap();
    assert_eq!(world.rows.ledger.triggers(9).await.unwrap().len(), 1, "it stays until it is settled");

    let _relay = heal(relay).await;
    risen(&world.far).await;
    let polling = world.rows.ledger.polling().await.unwrap().unwrap();
    assert!(world.rows.ledger.end_polling(world.epoch, &polling).await.unwrap());
    world.near.send_trigger(&request("published")).await.unwrap();
    let published = within("the published trigger", triggers.next()).await.unwrap();
    assert!(published[0].tag.generation != POLLED && published[0].routed_to.as_deref() == Some("demo"));
    let reply = TriggerReply { outcome: "fired".into(), execution: None, message: "it runs".into() };
    // One that was left while the broker was away is settled in the ledger, whatever the broker does now.
    for trigger in [&stored[0], &published[0]] {
        triggers.settle(trigger, &reply).await;
    }
    assert!(world.rows.ledger.triggers(9).await.unwrap().is_empty());
    // So is one that somebody leaves there who is cut off while the leader is not.
    let payload = br#"{"job":"demo","request_id":"late"}"#;
    world.rows.ledger.put_trigger(payload, T0).await.unwrap();
    let late = within("the late trigger", triggers.next()).await.unwrap();
    assert_eq!(late[0].payload, payload);
    triggers.settle(&late[0], &reply).await;

    world.hand_out(&world.far, id, 10..20).await;
    let open = collect(&mut consumer, 10).await;
    assert!(open.iter().all(|d| d.tag.generation != POLLED), "{open:?}");
    consumer.acker.ack(&tags(&open)).await;
    consumer.acker.stop().await;
    assert!(within("the end", consumer.deliveries.next()).await.is_none());
}

/// A real alarm, at a server of its own: it stops whoever publishes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_memory_pauses_dispatch_and_is_not_away() {
    let server = tokio::task::spawn_blocking(|| testkit::RabbitMq::start().unwrap()).await.unwrap();
    let rows = Rows::new().await;
    let rabbit = shardcron_broker::RabbitMq::connect(&server.amqp_url(), Default::default()).unwrap();
    let broker = Fallback::new(std::sync::Arc::new(rabbit), rows.ledger.clone(), quickly()).unwrap();
    let mut state = broker.state();
    within("the broker to be up", state.wait_for(|s| *s == BrokerState::Up)).await.unwrap();
    broker.declare(&[TIER.into()]).await.unwrap();
    let mut consumer = broker.consume(TIER, 10).await.unwrap();
    let before = shards(5);
    assert_eq!(broker.publish(TIER, &before).await, all_confirmed(5));
    let server = tokio::task::spawn_blocking(move || {
        server.memory_alarm(true).unwrap();
        server
    })
    .await
    .unwrap();
    // The server says so with the first message that comes after the alarm; until then it holds it back.
    let during = shards(5);
    let outcomes = broker.publish(TIER, &during).await;
    assert!(outcomes.iter().all(|o| matches!(o, Published::Failed(_))), "{outcomes:?}");
    within("the alarm", state.wait_for(|s| matches!(s, BrokerState::Blocked(_)))).await.unwrap();
    assert_eq!(broker.way(), Way::Closed);
    assert!(broker.fault().borrow().is_none(), "blocked is not away");
    let open = collect(&mut consumer, 5).await;
    assert_eq!(attempts(&open), wanted(&before), "deliveries and acks go on");
    consumer.acker.ack(&tags(&open)).await;
    // A person's trigger does not wait for memory.
    let request =
        TriggerRequest { job: "demo".into(), params: Default::default(), request_id: None, ..Default::default() };
    broker.send_trigger(&request).await.unwrap();
    assert_eq!(rows.ledger.triggers(9).await.unwrap().len(), 1);
    let server = tokio::task::spawn_blocking(move || {
        server.memory_alarm(false).unwrap();
        server
    })
    .await
    .unwrap();
    within("the end of the alarm", state.wait_for(|s| *s == BrokerState::Up)).await.unwrap();
    assert_eq!(broker.publish(TIER, &during).await, all_confirmed(5));
    let mut came = BTreeSet::new();
    while came.len() < 5 {
        // What the server held back when it blocked may come, too: twice is not lost.
        came.extend(attempts(&next_shards(&mut consumer).await));
    }
    assert_eq!(came.into_iter().collect::<Vec<_>>(), wanted(&during));
    broker.close().await;
    tokio::task::spawn_blocking(move || drop(server)).await.unwrap();
}
