//! Runs of shards, each in one message of RabbitMQ's: acked as a whole, given back as a whole, and counted in shards.

use crate::support::*;
use shardcron_broker::{Broker, Delivery, Published};
use shardcron_domain::messages::ShardRun;
use shardcron_domain::{AttemptRef, ExecutionId};
use std::collections::BTreeSet;
use uuid::Uuid;

fn first(index: u32) -> AttemptRef {
    AttemptRef { execution: ExecutionId(Uuid::from_u128(7)), index, attempt: 1 }
}

fn run(from: u32, count: u32) -> ShardRun {
    ShardRun::new(first(from), count, 1)
}

fn indexes(deliveries: &[Delivery]) -> BTreeSet<u32> {
    deliveries.iter().map(|d| d.message.attempt.index).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_one_message_and_each_of_its_shards_a_delivery() {
    let rabbit = rabbit().await.declared().await;
    let runs = [run(0, 64), run(64, 1), run(65, 10)];
    assert_eq!(rabbit.broker.publish_runs(TIER, &runs).await, vec![Published::Confirmed; 3]);
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap().ready, 75, "shards, and not messages");
    let mut consumer = rabbit.broker.consume(TIER, 100).await.unwrap();
    let all = collect(&mut consumer, 75).await;
    assert_eq!(indexes(&all), (0..75).collect());
    assert!(all.iter().all(|d| !d.redelivered && d.message.attempt.attempt == 1));
    let tags: BTreeSet<_> = tags(&all).into_iter().collect();
    assert_eq!(tags.len(), 75, "each has a tag of its own");
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap().ready, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_a_message_is_acked_when_all_of_its_shards_are() {
    let rabbit = rabbit().await.declared().await;
    rabbit.broker.publish_runs(TIER, &[run(0, 20), run(20, 20)]).await;
    let mut consumer = rabbit.broker.consume(TIER, 100).await.unwrap();
    let all = collect(&mut consumer, 40).await;
    // All of the first message in any order, and all but one shard of the second.
    let mut acked = tags(&all);
    acked.reverse();
    let open = acked.remove(3);
    for tag in acked {
        consumer.acker.ack(&[tag, tag]).await;
    }
    drop(consumer);
    // Who holds nothing of the first message gets the second one whole: the ledger knows what of it was done.
    let mut next = rabbit.broker.consume(TIER, 100).await.unwrap();
    let again = collect(&mut next, 20).await;
    assert_eq!(indexes(&again), (20..40).collect());
    assert!(again.iter().all(|d| d.redelivered));
    assert!(all.iter().any(|d| d.tag == open && d.message.attempt.index == 36));
    next.acker.ack(&tags(&again)).await;
    quiet(&mut next).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_goes_back_when_one_of_its_shards_does() {
    let rabbit = rabbit().await.declared().await;
    rabbit.broker.publish_runs(TIER, &[run(0, 8)]).await;
    let mut consumer = rabbit.broker.consume(TIER, 100).await.unwrap();
    let all = collect(&mut consumer, 8).await;
    consumer.acker.requeue(&[all[2].tag]).await;
    quiet(&mut consumer).await;
    let rest: Vec<_> = all.iter().filter(|d| d.tag != all[2].tag).map(|d| d.tag).collect();
    consumer.acker.ack(&rest).await;
    let again = collect(&mut consumer, 8).await;
    assert!(again.iter().all(|d| d.redelivered), "it came back when nothing of it was open");
    consumer.acker.ack(&tags(&again)).await;
    quiet(&mut consumer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_the_connection_a_message_comes_again_under_new_tags() {
    let rabbit = rabbit().await.declared().await;
    rabbit.broker.publish_runs(TIER, &[run(0, 30)]).await;
    let mut consumer = rabbit.broker.consume(TIER, 100).await.unwrap();
    let before = collect(&mut consumer, 30).await;
    assert!(rabbit.close_connections().await >= 2);
    let generation = renewed(&mut consumer).await;
    let again = collect(&mut consumer, 30).await;
    assert!(again.iter().all(|d| d.tag.generation == generation && d.redelivered));
    // Void tags settle nothing, so all of the new ones are needed.
    consumer.acker.ack(&tags(&before)).await;
    consumer.acker.ack(&tags(&again[1..])).await;
    drop(consumer);
    let mut next = rabbit.broker.consume(TIER, 100).await.unwrap();
    assert_eq!(collect(&mut next, 30).await.len(), 30);
}

/// 64 times the shards that were asked for would stand before the next job in a worker's hands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prefetch_is_counted_in_shards() {
    let rabbit = rabbit().await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 128).await.unwrap();
    // What is learnt of one message counts for the others.
    rabbit.broker.publish_runs(TIER, &[run(0, 64)]).await;
    let first = collect(&mut consumer, 64).await;
    consumer.acker.ack(&tags(&first)).await;
    let prefetch_of = |wanted: u64| {
        rabbit.shown("the new prefetch", move |m| {
            let listed = m.call("GET", "consumers", None).ok()?;
            let prefetches: Vec<u64> = listed.as_array()?.iter().filter_map(|c| c["prefetch_count"].as_u64()).collect();
            (prefetches == [wanted]).then_some(())
        })
    };
    prefetch_of(2).await;
    let runs: Vec<ShardRun> = (1..21).map(|n| run(n * 64, 64)).collect();
    rabbit.broker.publish_runs(TIER, &runs).await;
    let open = collect(&mut consumer, 128).await;
    quiet(&mut consumer).await;
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap().ready, 18 * 64);
    consumer.acker.ack(&tags(&open)).await;
    assert_eq!(collect(&mut consumer, 128).await.len(), 128);
    // Asked for more, it is so in messages.
    consumer.acker.set_prefetch(1_024).await;
    prefetch_of(16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d_01_a_run_without_a_queue_is_unroutable_as_a_whole() {
    let rabbit = rabbit().await.declared().await;
    rabbit.manage(|m| m.delete_queue("shardcron.shards.core")).await.unwrap();
    assert_eq!(rabbit.broker.publish_runs(TIER, &[run(0, 64), run(64, 64)]).await, vec![Published::Unroutable; 2]);
    assert_eq!(rabbit.broker.depth(TIER).await.unwrap().ready, 0);
}
