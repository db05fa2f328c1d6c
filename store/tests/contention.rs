//! Many at once: each shard claimed and recorded once, whoever asks, and no call fails because of a deadlock.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use shardcron_domain::shard::Phase;
use shardcron_domain::{AttemptRef, Incarnation, execution, invariants};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::*;
use std::collections::BTreeMap;

conformance!(
    eight_claimers_of_the_same_shards,
    i_04_a_storm_of_overlapping_batches,
    b_04_three_nodes_migrate_at_once,
    two_leaders_at_once,
    cancel_against_recording,
);

fn seed() -> u64 {
    let seed = std::env::var("SHARDCRON_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    println!("SHARDCRON_SEED={seed}");
    seed
}

async fn eight_claimers_of_the_same_shards(world: World) {
    let (_, _, id) = fired(&world.ledger, 400).await;
    let all: Vec<_> = (0..400).map(|i| attempt(id, i, 1)).collect();
    let mut tasks = tokio::task::JoinSet::new();
    let mut rng = StdRng::seed_from_u64(seed());
    for _ in 0..8 {
        // Half of them as other processes would: with pools of their own.
        let ledger = if rng.random_bool(0.5) { world.again().await } else { world.ledger.clone() };
        let mut mine = all.clone();
        mine.shuffle(&mut rng);
        tasks.spawn(async move {
            let me = worker();
            let mut got = Vec::new();
            for batch in mine.chunks(50) {
                let answers = ledger.claim(me, batch, T0).await.unwrap();
                let won = batch.iter().zip(answers).filter(|(_, answer)| answer.is_ok()).map(|(at, _)| (*at, me));
                got.extend(won);
            }
            got
        });
    }
    let claims: Vec<(AttemptRef, Incarnation)> = tasks.join_all().await.concat();
    let owners: BTreeMap<_, _> = claims.iter().copied().collect();
    assert_eq!((claims.len(), owners.len()), (400, 400), "each once");
    for row in world.ledger.running(1_000).await.unwrap() {
        assert_eq!(owners.get(&row.attempt), Some(&row.owner));
    }
}

/// 64 tasks claim and record the same 10,000 shards of four executions, each shard tried by four of them, in batches of 50 in random
/// order; who records what it did not get is refused. The connections go by READ COMMITTED whatever the server's own level is, which on the
/// services is REPEATABLE READ.
async fn i_04_a_storm_of_overlapping_batches(world: World) {
    let ledger = &world.ledger;
    isolation_is_ours(ledger).await;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("test", T0).await.unwrap();
    let mut all = Vec::new();
    let mut ids = Vec::new();
    for n in 0..4 {
        let new = new_execution(EACH, shardcron_domain::job::OverlapPolicy::Allow);
        all.extend((0..EACH).map(|i| attempt(new.id, i, 1)));
        let id = new.id;
        ids.push(id);
        ledger.fire(epoch, &[intent(job, &n.to_string(), new)], T0).await.unwrap();
        ledger.materialize(epoch, id, EACH).await.unwrap();
    }
    let mut rng = StdRng::seed_from_u64(seed());
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..64 {
        let ledger = ledger.clone();
        let mut mine: Vec<_> = all.iter().copied().filter(|at| at.index % 16 == task % 16).collect();
        mine.shuffle(&mut rng);
        let mut rng = StdRng::seed_from_u64(rng.random());
        tasks.spawn(async move {
            let me = worker();
            let mut accepted = 0;
            for batch in mine.chunks(50) {
                let claimed = ledger.claim(me, batch, T0).await.unwrap();
                let mut ends: Vec<_> = batch
                    .iter()
                    .zip(&claimed)
                    // Some record what they did not get: they must be refused.
                    .filter(|(_, answer)| answer.is_ok() || rng.random_bool(0.1))
                    .map(|(at, _)| success(*at))
                    .collect();
                ends.shuffle(&mut rng);
                accepted += ledger.record(me, &ends, T0).await.unwrap().iter().filter(|r| r.is_ok()).count();
            }
            accepted
        });
    }
    assert_eq!(tasks.join_all().await.iter().sum::<usize>(), 4 * EACH as usize, "each recorded once");
    for id in ids {
        let (tally, started) = ledger.tally(id).await.unwrap();
        invariants::check_tally(&tally).unwrap();
        let each = u64::from(EACH);
        assert_eq!((tally.results, tally.counted, tally.recorded_twice, started), (each, each, 0, each));
        assert_eq!(ledger.execution(id).await.unwrap().unwrap().phase, execution::Phase::Success);
    }
}

/// Shards of each execution of the storm.
const EACH: u32 = 2_500;

async fn isolation_is_ours(ledger: &SqlLedger) {
    if ledger.dialect_name() != "mysql" {
        return;
    }
    for (scope, wanted) in [("GLOBAL", "REPEATABLE-READ"), ("SESSION", "READ-COMMITTED")] {
        let rows = ledger.query(&format!("SHOW {scope} VARIABLES LIKE 't%isolation'"), &[]).await.unwrap();
        assert!(!rows.is_empty() && rows.iter().all(|row| row[1] == SqlArg::Text(wanted.into())), "{scope}: {rows:?}");
    }
}

async fn b_04_three_nodes_migrate_at_once(world: World) {
    let url = if world.ledger.dialect_name() == "mysql" {
        tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.unwrap()
    } else {
        format!("{}.fresh", world.url)
    };
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let url = url.clone();
        tasks.spawn(async move {
            let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
            ledger.migrate().await.unwrap();
            ledger.migrate().await.unwrap();
        });
    }
    tasks.join_all().await;
    let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
    assert_eq!(ledger.leadership().await.unwrap().epoch, shardcron_domain::Epoch(0));
    let twice = "SELECT COUNT(*) - COUNT(DISTINCT version) FROM shardcron_migrations";
    assert_eq!(ledger.query(twice, &[]).await.unwrap()[0][0], SqlArg::Int(0), "each step once");
}

/// Two leaders fire the same instants; each takes the lead from the other over and over. One execution for each instant (F1), and
/// every one of them by the epoch that led (L1).
async fn two_leaders_at_once(world: World) {
    let job = apply(&world.ledger, "job").await;
    let mut tasks = tokio::task::JoinSet::new();
    for name in ["a", "b"] {
        let ledger = world.again().await;
        tasks.spawn(async move {
            let mut epoch = ledger.begin_epoch(name, T0).await.unwrap();
            let (mut fired, mut deposed) = (0, 0);
            for n in 0..30 {
                let new = new_execution(2, shardcron_domain::job::OverlapPolicy::Allow);
                match ledger.fire(epoch, &[intent(job, &n.to_string(), new)], T0).await {
                    Ok(outcomes) => fired += usize::from(matches!(outcomes[0], FireOutcome::Fired(_))),
                    Err(StoreError::Deposed { mine, current }) => {
                        assert!(mine == epoch && current > epoch);
                        deposed += 1;
                        epoch = ledger.begin_epoch(name, T0).await.unwrap();
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
            (fired, deposed)
        });
    }
    let counts = tasks.join_all().await;
    let fired: usize = counts.iter().map(|(fired, _)| fired).sum();
    let executions = world.ledger.executions(None, None, 100).await.unwrap();
    assert_eq!(executions.len(), fired);
    let keys: std::collections::HashSet<_> = executions.iter().map(|e| e.fire_key.clone()).collect();
    assert_eq!(keys.len(), fired);
    assert!(fired >= 30 - counts.iter().map(|(_, d)| d).sum::<usize>().min(29));
}

async fn cancel_against_recording(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 300).await;
    let me = worker();
    let all: Vec<_> = (0..300).map(|i| attempt(id, i, 1)).collect();
    ledger.claim(me, &all, T0).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for batch in all.chunks(20).map(<[_]>::to_vec) {
        let ledger = ledger.clone();
        tasks.spawn(async move {
            let ends: Vec<_> = batch.into_iter().map(success).collect();
            let answers = ledger.record(me, &ends, T0).await.unwrap();
            answers.iter().filter(|r| matches!(r, Ok(Recorded { phase: Phase::Success, .. }))).count()
        });
    }
    let phase = ledger.cancel(id, "ops", "tests", T0).await.unwrap().unwrap();
    let recorded: usize = tasks.join_all().await.iter().sum();
    let row = ledger.execution(id).await.unwrap().unwrap();
    assert_eq!((row.phase, row.succeeded as usize), (phase, recorded));
    assert_eq!(row.succeeded + row.cancelled, 300);
    invariants::check_tally(&ledger.tally(id).await.unwrap().0).unwrap();
}
