//! RabbitMQ's own: topology, routing, what people publish by hand, acks as the server sees them.

use crate::support::*;
use serde_json::json;
use shardcron_broker::{Broker, BrokerError, BrokerState, Depth, Published};
use shardcron_domain::messages::TriggerReply;
use std::time::{Duration, Instant};

const SHARDS: &str = "shardcron.shards.core";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_01_a_missing_queue_is_noticed_and_made_again() {
    let rabbit = rabbit().await.declared().await;
    rabbit.manage(|m| m.delete_queue(SHARDS)).await.unwrap();
    let messages = shards(300);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, vec![Published::Unroutable; 300]);
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap(), Depth::default());
    rabbit.broker.declare(&[TIER.into()]).await.unwrap();
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(300));
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap().ready, 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_01_a_queue_that_vanishes_in_the_middle_loses_nothing_unnoticed() {
    let rabbit = rabbit().await.declared().await;
    let messages = shards(30_000);
    let started = Instant::now();
    let (outcomes, ()) = tokio::join!(rabbit.broker.publish(TIER, &messages), async {
        // Asked over AMQP, since the management API counts once in a second.
        while rabbit.broker.depth(TIER).await.unwrap().ready == 0 {}
        rabbit.manage(|m| m.delete_queue(SHARDS)).await.unwrap();
    });
    assert_eq!(outcomes.len(), messages.len());
    let runs: Vec<_> = outcomes.chunk_by(|a, b| a == b).map(|run| (run.len(), &run[0])).collect();
    // What was in flight is never confirmed by the server; that is said soon, and what comes behind it is not sent any more.
    let lost = outcomes.iter().filter(|o| **o != Published::Confirmed).count();
    assert!(lost > 0 && started.elapsed() < Duration::from_secs(8), "{:?} {runs:?}", started.elapsed());
    // Nothing is said to be confirmed that came after the loss.
    let first_lost = outcomes.iter().position(|o| *o != Published::Confirmed).unwrap();
    assert!(first_lost > 0 && first_lost + lost == outcomes.len(), "{runs:?}");
    // RabbitMQ 3.10 may have left the connection in "flow" for ever; then it has been replaced.
    let mut state = rabbit.broker.state();
    loop {
        within("the broker to be up", state.wait_for(|s| *s == BrokerState::Up)).await.unwrap();
        if rabbit.broker.declare(&[TIER.into()]).await.is_ok() {
            break;
        }
    }
    assert_eq!(rabbit.broker.publish(TIER, &messages[..100]).await, all_confirmed(100));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_queue_comes_back_with_its_consumer() {
    let rabbit = rabbit().await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    rabbit.manage(|m| m.delete_queue(SHARDS)).await.unwrap();
    let started = Instant::now();
    assert_eq!(renewed(&mut consumer).await, 2);
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    let messages = shards(3);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(3));
    assert_eq!(attempts(&collect(&mut consumer, 3).await), wanted(&messages));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_05_a_queue_with_other_arguments_is_named_with_the_remedy() {
    let rabbit = rabbit().await;
    rabbit.up().await;
    for options in [
        json!({"durable": true, "arguments": {}}),
        json!({"durable": false, "arguments": {}}),
        json!({"durable": true, "arguments": {"x-max-priority": 10}}),
    ] {
        rabbit.manage(move |m| m.declare_queue(SHARDS, &options)).await.unwrap();
        let refusals = [
            rabbit.broker.declare(&[TIER.into()]).await.err(),
            within("the refusal", rabbit.broker.consume(TIER, 10)).await.err(),
        ];
        for refusal in refusals {
            let Some(BrokerError::Refused(sentence)) = refusal else { panic!("{refusal:?}") };
            for part in [SHARDS, "exists with", "shardcron needs", "Delete the queue"] {
                assert!(sentence.contains(part), "{part}: {sentence}");
            }
        }
        rabbit.manage(|m| m.delete_queue(SHARDS)).await.unwrap();
    }
    // The refusals have closed channels and nothing else.
    rabbit.broker.declare(&[TIER.into()]).await.unwrap();
    assert_eq!(rabbit.broker.publish(TIER, &shards(1)).await, all_confirmed(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_leave_exactly_the_rest_at_the_server() {
    let rabbit = rabbit().await.declared().await;
    rabbit.broker.publish(TIER, &shards(200)).await;
    let mut consumer = rabbit.broker.consume(TIER, 200).await.unwrap();
    let all = collect(&mut consumer, 200).await;
    let (odd, even): (Vec<_>, Vec<_>) = all.into_iter().partition(|d| d.message.attempt.index % 2 == 1);
    consumer.acker.ack(&tags(&odd)).await;
    unacked(&rabbit, 100).await;
    consumer.acker.ack(&tags(&even[..60])).await;
    consumer.acker.ack(&tags(&odd)).await;
    unacked(&rabbit, 40).await;
    consumer.acker.ack(&tags(&even)).await;
    unacked(&rabbit, 0).await;
    // The channel has survived all of it.
    let messages = shards(5);
    rabbit.broker.publish(TIER, &messages).await;
    assert_eq!(attempts(&collect(&mut consumer, 5).await), wanted(&messages));
}

async fn unacked(rabbit: &Rabbit, count: u64) {
    let seen = move |m: &testkit::Management| {
        let queue = m.queue(SHARDS).ok()?;
        let open = queue["messages_unacknowledged"].as_u64()?;
        (open == count && queue["messages_ready"].as_u64()? == 0).then_some(())
    };
    rabbit.shown("the server's count of unacked messages", seen).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g_02_unreadable_shards_do_not_block_and_are_explained() {
    let rabbit = rabbit().await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 2).await.unwrap();
    let gzip = [0x1f, 0x8b, 8, 0, 0, 0];
    rabbit
        .manage(move |m| {
            for payload in
                [b"".as_slice(), b"{", b"null", b"{\"job\":\"demo\"}", &gzip, &[0xdf, 0xff, 0xff, 0xff, 0xff]]
            {
                assert!(m.publish_bytes("", SHARDS, payload, &json!({})).unwrap());
            }
        })
        .await;
    let messages = shards(2);
    rabbit.broker.publish(TIER, &messages).await;
    let good = collect(&mut consumer, 2).await;
    assert_eq!(attempts(&good), wanted(&messages));
    assert!(good.iter().all(|d| d.tag.generation == 1), "the channel was not lost");
    let dead =
        rabbit.shown("six dead letters", |m| m.get_messages("shardcron.dead", 10).ok().filter(|d| d.len() == 6)).await;
    for message in &dead {
        let reason = message.header("x-shardcron-error").as_str().unwrap();
        assert!(reason.len() > 20, "{reason}");
    }
    assert!(dead.iter().any(|d| d.text() == "{\"job\":\"demo\"}"
        && d.header("x-shardcron-error").as_str().unwrap().contains("queue of triggers")));
    consumer.acker.ack(&tags(&good)).await;
    unacked(&rabbit, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g_01_what_a_person_publishes_reaches_the_leader_and_is_answered() {
    let rabbit = rabbit().await.declared().await;
    let mut triggers = rabbit.broker.triggers().await.unwrap();
    rabbit
        .manage(|m| {
            m.declare_queue("answers", &json!({"durable": true})).unwrap();
            assert!(m.publish("", "shardcron.triggers", r#"{"job":"demo"}"#, &json!({})).unwrap());
            assert!(m.publish("shardcron.trigger", "demo.with.dots", "", &json!({})).unwrap());
            let asked = json!({"reply_to": "answers", "correlation_id": "c1", "message_id": "m1"});
            assert!(m.publish("shardcron.trigger", "demo", "{}", &asked).unwrap());
        })
        .await;
    let mut came = Vec::new();
    while came.len() < 3 {
        came.extend(within("triggers", triggers.next()).await.unwrap());
    }
    assert_eq!((came[0].payload.as_slice(), came[0].routed_to.as_deref()), (br#"{"job":"demo"}"#.as_slice(), None));
    assert_eq!((came[1].payload.as_slice(), came[1].routed_to.as_deref()), (b"".as_slice(), Some("demo.with.dots")));
    assert_eq!((&came[0].transport_id, &came[0].reply_to), (&None, &None));
    assert_eq!(came[2].transport_id.as_deref(), Some("m1"));
    assert_eq!(came[2].reply_to, Some(("answers".into(), Some("c1".into()))));
    let reply = TriggerReply { outcome: "fired".into(), execution: Some("e1".into()), message: "it runs".into() };
    for trigger in &came {
        triggers.settle(trigger, &reply).await;
    }
    let answer = rabbit.shown("the answer", |m| m.take_messages("answers", 1).ok()?.pop()).await;
    assert_eq!(serde_json::from_slice::<TriggerReply>(&answer.payload).unwrap(), reply);
    assert_eq!(answer.properties["correlation_id"], "c1");
    assert_eq!(answer.properties["content_type"], "application/json");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_to_nowhere_does_not_hold_up_the_trigger() {
    let rabbit = rabbit().await.declared().await;
    let mut triggers = rabbit.broker.triggers().await.unwrap();
    rabbit.manage(|m| m.publish("", "shardcron.triggers", "demo", &json!({"reply_to": "nobody"}))).await.unwrap();
    let came = within("the trigger", triggers.next()).await.unwrap();
    let reply = TriggerReply { outcome: "fired".into(), execution: None, message: String::new() };
    within("the settling", triggers.settle(&came[0], &reply)).await;
    rabbit.shown("the empty queue", |m| m.queue_depth("shardcron.triggers").ok().filter(|d| *d == 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn properties_are_used_as_meant() {
    let rabbit = rabbit().await.declared().await;
    let messages = shards(1);
    rabbit.broker.publish(TIER, &messages).await;
    let message = rabbit.manage(|m| m.take_messages(SHARDS, 1)).await.unwrap().remove(0);
    let properties = &message.properties;
    assert_eq!(properties["content_type"], "application/msgpack");
    assert_eq!((&properties["type"], &properties["app_id"]), (&json!("shard"), &json!("shardcron")));
    assert_eq!(properties["message_id"], messages[0].attempt.to_string());
    assert_eq!(properties["delivery_mode"], 2);
    assert!(properties["timestamp"].as_u64().unwrap() > 1_700_000_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_and_triggers_are_kept_although_nothing_was_declared() {
    let rabbit = rabbit().await;
    rabbit.up().await;
    rabbit.broker.put_dead(b"x", "no such job").await.unwrap();
    let request = shardcron_domain::messages::TriggerRequest { job: "demo".into(), ..Default::default() };
    rabbit.broker.send_trigger(&request).await.unwrap();
    let queues = rabbit.manage(|m| m.queues()).await.unwrap();
    assert!(queues.contains(&"shardcron.dead".to_owned()) && queues.contains(&"shardcron.triggers".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_nobody_reads_stops_without_leaving_anything_behind() {
    let rabbit = rabbit().await.declared().await;
    rabbit.broker.publish(TIER, &shards(3_000)).await;
    let mut consumer = rabbit.broker.consume(TIER, 1_024).await.unwrap();
    let full =
        |m: &testkit::Management| (m.queue(SHARDS).ok()?["messages_unacknowledged"].as_u64()? == 1_024).then_some(());
    rabbit.shown("a full prefetch", full).await;
    consumer.acker.stop().await;
    let mut drained = Vec::new();
    while let Some(arrival) = within("the rest", consumer.deliveries.next()).await {
        if let shardcron_broker::Arrival::Shards(shards) = arrival {
            drained.extend(shards);
        }
    }
    assert_eq!(drained.len(), 1_024, "all that the server has delivered was handed over");
    consumer.acker.ack(&tags(&drained)).await;
    let rest = |m: &testkit::Management| {
        let queue = m.queue(SHARDS).ok()?;
        (queue["messages_unacknowledged"] == 0 && queue["messages_ready"] == 1_976).then_some(())
    };
    rabbit.shown("the rest in the queue", rest).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_consumer_gives_its_deliveries_back() {
    let rabbit = rabbit().await.declared().await;
    let messages = shards(20);
    rabbit.broker.publish(TIER, &messages).await;
    let mut dropped = rabbit.broker.consume(TIER, 20).await.unwrap();
    let held = collect(&mut dropped, 20).await;
    dropped.acker.ack(&tags(&held[..10])).await;
    drop(dropped);
    let mut other = rabbit.broker.consume(TIER, 20).await.unwrap();
    let again = collect(&mut other, 10).await;
    assert_eq!(attempts(&again), attempts(&held[10..]));
    assert!(again.iter().all(|d| d.redelivered));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_05_a_refusal_in_the_middle_is_waited_out() {
    let rabbit = rabbit().await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    // Somebody deletes the queue and is quicker to make one of another kind. The consumer races with it, so try until it loses.
    rabbit
        .manage(|m| {
            testkit::wait_for("a queue of another kind", PATIENCE, || {
                m.delete_queue(SHARDS).is_ok() && m.declare_queue(SHARDS, &json!({"durable": true})).is_ok()
            });
        })
        .await;
    rabbit.manage(|m| m.delete_queue(SHARDS)).await.unwrap();
    renewed(&mut consumer).await;
    rabbit.broker.declare(&[TIER.into()]).await.unwrap();
    let messages = shards(1);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(1));
    assert_eq!(attempts(&collect(&mut consumer, 1).await), wanted(&messages));
}

/// Given back more often than RabbitMQ 4's own limit of 20, a message is still there, and not among the dead (R-03).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_03_a_message_that_comes_back_25_times_is_not_dropped() {
    let rabbit = rabbit().await.declared().await;
    let messages = shards(1);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(1));
    let mut consumer = rabbit.broker.consume(TIER, 1).await.unwrap();
    for _ in 0..25 {
        let held = collect(&mut consumer, 1).await;
        assert_eq!(attempts(&held), wanted(&messages));
        consumer.acker.requeue(&tags(&held)).await;
    }
    let last = collect(&mut consumer, 1).await;
    assert!(last[0].redelivered);
    consumer.acker.ack(&tags(&last)).await;
    quiet(&mut consumer).await;
}
