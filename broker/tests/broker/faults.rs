//! Lost connections: by the server, by a cut, before the start, in silence.

use crate::support::*;
use shardcron_broker::{Broker, BrokerState, Published, RabbitMq, RabbitOptions};
use std::time::{Duration, Instant};
use testkit::Relay;

/// A broker behind a relay.
async fn relayed() -> (Rabbit, Relay) {
    let direct = fresh_vhost().await;
    let port: u16 = direct.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let relay = tokio::task::spawn_blocking(move || Relay::start(port)).await.unwrap().unwrap();
    // A short heartbeat, so that silence is noticed while somebody watches.
    let url = format!("{}?heartbeat=2", relay.url(&direct));
    (rabbit_at(&direct, &url).await, relay)
}

async fn away(rabbit: &Rabbit) {
    let mut state = rabbit.broker.state();
    within("the broker to be away", state.wait_for(|s| matches!(s, BrokerState::Away(_)))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_04_a_consumer_outlives_ten_closed_connections() {
    let rabbit = rabbit().await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    let messages = shards(4);
    rabbit.broker.publish(TIER, &messages).await;
    let mut open = collect(&mut consumer, 4).await;
    for round in 1..=10 {
        assert!(rabbit.close_connections().await >= 1);
        let closed = Instant::now();
        assert_eq!(renewed(&mut consumer).await, round + 1);
        // Acks by old tags are void and do no harm to the new channel, whose numbers are the same.
        consumer.acker.ack(&tags(&open)).await;
        open = collect(&mut consumer, 4).await;
        assert!(closed.elapsed() < Duration::from_secs(15), "round {round}: {:?}", closed.elapsed());
        assert_eq!(attempts(&open), wanted(&messages));
        assert!(open.iter().all(|d| d.redelivered && d.tag.generation == round + 1));
    }
    consumer.acker.ack(&tags(&open)).await;
    rabbit.up().await;
    rabbit.shown("the empty queue", |m| m.queue_depth("shardcron.shards.core").ok().filter(|d| *d == 0)).await;
    let more = shards(1);
    assert_eq!(rabbit.broker.publish(TIER, &more).await, all_confirmed(1));
    assert_eq!(attempts(&collect(&mut consumer, 1).await), wanted(&more));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_04_a_cut_wire_is_survived() {
    let (rabbit, relay) = relayed().await;
    let rabbit = rabbit.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    let messages = shards(2);
    rabbit.broker.publish(TIER, &messages).await;
    let held = collect(&mut consumer, 2).await;
    consumer.acker.ack(&tags(&held[..1])).await;
    let relay = cut(relay).await;
    away(&rabbit).await;
    let started = Instant::now();
    let outcome = rabbit.broker.publish(TIER, &shards(1)).await;
    assert!(matches!(outcome[..], [Published::Failed(_)]), "{outcome:?}");
    assert!(started.elapsed() < Duration::from_secs(1), "an absent broker is said at once");
    assert!(rabbit.broker.depth(TIER).await.is_err() && rabbit.broker.declare(&[]).await.is_err());
    let _relay = heal(relay).await;
    assert_eq!(renewed(&mut consumer).await, 2);
    // The ack may not have reached the server before the cut: then both come again, in any number of pieces.
    let mut again = Vec::new();
    while !attempts(&again).contains(&held[1].message.attempt) {
        again.extend(next_shards(&mut consumer).await);
    }
    rabbit.up().await;
    assert_eq!(rabbit.broker.publish(TIER, &shards(1)).await, all_confirmed(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_04_silence_is_noticed_by_the_heartbeat() {
    let (rabbit, relay) = relayed().await;
    let rabbit = rabbit.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    relay.stall();
    let started = Instant::now();
    let outcome = within("the answer of a publish", rabbit.broker.publish(TIER, &shards(1))).await;
    assert!(matches!(outcome[..], [Published::Failed(_)]), "{outcome:?}");
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
    away(&rabbit).await;
    // The publishing connection is given up by its silent confirms, the consuming one by its heartbeat.
    let relay = tokio::task::spawn_blocking(move || {
        testkit::wait_for("both connections to be tried again", PATIENCE, || relay.accepted() >= 4);
        relay
    })
    .await
    .unwrap();
    assert!(started.elapsed() < Duration::from_secs(2 * 2 + 5 + 5), "{:?}", started.elapsed());
    let _relay = heal(relay).await;
    renewed(&mut consumer).await;
    rabbit.up().await;
    let messages = shards(1);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_07_a_server_that_is_not_up_yet_is_waited_for() {
    let direct = fresh_vhost().await;
    let port: u16 = direct.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let relay = tokio::task::spawn_blocking(move || Relay::start(port)).await.unwrap().unwrap();
    let url = relay.url(&direct);
    let relay = cut(relay).await;
    let rabbit = rabbit_at(&direct, &url).await;
    assert!(matches!(&*rabbit.broker.state().borrow(), BrokerState::Away(_)));
    assert!(rabbit.broker.declare(&[TIER.into()]).await.is_err());
    assert!(rabbit.broker.server_version().await.is_err());
    let consuming = rabbit.broker.consume(TIER, 10);
    tokio::pin!(consuming);
    assert!(tokio::time::timeout(QUIET, &mut consuming).await.is_err(), "it waits");
    let _relay = heal(relay).await;
    let mut consumer = within("the consumer", consuming).await.unwrap();
    rabbit.up().await;
    let messages = shards(1);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(1));
    assert_eq!(attempts(&collect(&mut consumer, 1).await), wanted(&messages));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_said_and_not_shown() {
    let direct = fresh_vhost().await;
    let (login, rest) = direct.rsplit_once('@').unwrap();
    let user = login.trim_start_matches("amqp://").split(':').next().unwrap();
    let rabbit = rabbit_at(&direct, &format!("amqp://{user}:s3cret@{rest}")).await;
    let mut state = rabbit.broker.state();
    let said = |s: &BrokerState| matches!(s, BrokerState::Away(why) if why.contains("check the password"));
    within("the reason", state.wait_for(said)).await.unwrap();
    let BrokerState::Away(why) = state.borrow().clone() else { panic!("away") };
    assert!(!why.contains("s3cret"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_04_a_restarted_and_a_wiped_server_are_the_same_to_a_consumer() {
    let mut server = tokio::task::spawn_blocking(|| testkit::RabbitMq::start().unwrap()).await.unwrap();
    let broker = RabbitMq::connect(&server.amqp_url(), RabbitOptions::default()).unwrap();
    let mut consumer = within("the consumer", broker.consume(TIER, 10)).await.unwrap();
    for (round, wiped) in [(2, false), (3, true)] {
        server = tokio::task::spawn_blocking(move || {
            if wiped {
                server.restart_wiped().unwrap()
            } else {
                server.restart().unwrap()
            }
            server
        })
        .await
        .unwrap();
        let restarted = Instant::now();
        assert_eq!(renewed(&mut consumer).await, round);
        let mut state = broker.state();
        within("the broker to be up", state.wait_for(|s| *s == BrokerState::Up)).await.unwrap();
        // The consumer has made its queue again.
        let messages = shards(1);
        assert_eq!(broker.publish(TIER, &messages).await, all_confirmed(1));
        let came = collect(&mut consumer, 1).await;
        assert_eq!(attempts(&came), wanted(&messages));
        assert!(restarted.elapsed() < Duration::from_secs(15), "{:?}", restarted.elapsed());
        consumer.acker.ack(&tags(&came)).await;
    }
    tokio::task::spawn_blocking(move || drop(server)).await.unwrap();
}

pub async fn cut(mut relay: Relay) -> Relay {
    tokio::task::spawn_blocking(move || {
        relay.cut();
        relay
    })
    .await
    .unwrap()
}

pub async fn heal(mut relay: Relay) -> Relay {
    tokio::task::spawn_blocking(move || {
        // A server that another test starts at this moment may hold the old listener until its exec.
        testkit::wait_for("the relay's port", PATIENCE, || relay.heal().is_ok());
        relay
    })
    .await
    .unwrap()
}
