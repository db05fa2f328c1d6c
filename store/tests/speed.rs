//! A small measurement, for people: `cargo test --release -p shardcron-store --test speed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

mod common;

use common::*;
use std::time::Instant;

async fn transitions(world: World, tasks: u32) {
    const BATCH: usize = 128;
    let each = 128 * 60;
    let total = each * tasks;
    let (_, _, id) = fired(&world.ledger, total).await;
    let began = Instant::now();
    let mut set = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let ledger = world.ledger.clone();
        set.spawn(async move {
            use shardcron_store::Ledger as _;
            let me = worker();
            let mine: Vec<_> = (task * each..(task + 1) * each).map(|i| attempt(id, i, 1)).collect();
            for batch in mine.chunks(BATCH) {
                assert!(ledger.claim(me, batch, T0).await.unwrap().iter().all(|c| c.is_ok()));
                let ends: Vec<_> = batch.iter().copied().map(success).collect();
                assert!(ledger.record(me, &ends, T0).await.unwrap().iter().all(|c| c.is_ok()));
            }
        });
    }
    set.join_all().await;
    let seconds = began.elapsed().as_secs_f64();
    let rate = f64::from(total) * 2.0 / seconds;
    println!("{}, {tasks} tasks, batches of {BATCH}: {rate:.0} transitions/s", world.ledger.dialect_name());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn claim_and_record() {
    for tasks in [1, 2, 4] {
        transitions(sqlite().await, tasks).await;
        transitions(mysql().await, tasks).await;
    }
}
