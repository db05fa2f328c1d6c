//! Lease, presence and idempotency: every case runs against the ledger's rows and against Redis.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

mod common;

use common::cases::*;
use common::*;
use shardcron_store::redis::RedisStores;
use shardcron_store::sql::{LedgerLease, LedgerPresence};
use shardcron_store::*;
use std::time::Duration;
use testkit::shared;

async fn redis() -> RedisStores {
    let (url, prefix) =
        tokio::task::spawn_blocking(|| (shared().redis_url().to_owned(), shared().fresh_redis_prefix())).await.unwrap();
    RedisStores::open(&url, &prefix).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_lease_in_sqlite() {
    let world = sqlite().await;
    lease_cases(&LedgerLease { ledger: world.ledger.clone(), name: "trigger".into() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_lease_in_mysql() {
    let world = mysql().await;
    lease_cases(&LedgerLease { ledger: world.ledger.clone(), name: "trigger".into() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_lease_in_redis() {
    lease_cases(&redis().await.lease("trigger")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_has_one_holder_sqlite() {
    let world = sqlite().await;
    let mut leases: Vec<Box<dyn LeaseStore>> = Vec::new();
    for _ in 0..4 {
        leases.push(Box::new(LedgerLease { ledger: world.again().await, name: "x".into() }));
    }
    race(leases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_has_one_holder_mysql_and_redis() {
    let world = mysql().await;
    let mut leases: Vec<Box<dyn LeaseStore>> = Vec::new();
    for _ in 0..8 {
        leases.push(Box::new(LedgerLease { ledger: world.ledger.clone(), name: "x".into() }));
    }
    race(leases).await;
    let redis = redis().await;
    race((0..8).map(|_| Box::new(redis.lease("x")) as Box<dyn LeaseStore>).collect()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_everywhere() {
    presence_cases(&LedgerPresence { ledger: sqlite().await.ledger.clone() }).await;
    presence_cases(&LedgerPresence { ledger: mysql().await.ledger.clone() }).await;
    presence_cases(&redis().await.presence()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_in_redis() {
    let keys = redis().await.idempotency(TTL);
    let id = new_execution(1, shardcron_domain::job::OverlapPolicy::Allow).id;
    let all: Vec<_> = (0..200).map(|i| attempt(id, i, 1)).collect();
    assert!(keys.begin(&all).await.unwrap().iter().all(|h| *h == IdempotencyHint::Fresh));
    keys.finish(&all[..100]).await.unwrap();
    let hints = keys.begin(&all).await.unwrap();
    assert!(hints[..100].iter().all(|h| *h == IdempotencyHint::Done));
    assert!(hints[100..].iter().all(|h| *h == IdempotencyHint::Claimed));
    assert_eq!(
        keys.begin(&[attempt(id, 0, 2), attempt(id, 0, 2)]).await.unwrap(),
        [IdempotencyHint::Fresh, IdempotencyHint::Claimed]
    );
    assert!(keys.begin(&[]).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn e_06_an_evicting_redis_is_named() {
    let server = tokio::task::spawn_blocking(|| testkit::Redis::start_with(&["--maxmemory-policy", "allkeys-lru"]))
        .await
        .unwrap()
        .unwrap();
    let stores = RedisStores::open(&server.url(), "x").unwrap();
    let faults = stores.check_server().await.unwrap();
    assert!(faults.len() == 1 && faults[0].contains("allkeys-lru") && faults[0].contains("noeviction"), "{faults:?}");
    assert!(stores.server_version().await.unwrap().starts_with("Redis "));
    assert!(redis().await.check_server().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_restarts_is_found_again() {
    let mut server = tokio::task::spawn_blocking(testkit::Redis::start).await.unwrap().unwrap();
    let stores = RedisStores::open(&server.url(), "x").unwrap();
    let lease = stores.lease("trigger");
    assert_eq!(lease.acquire("a", TTL).await.unwrap(), LeaseAnswer::Mine);
    let server = tokio::task::spawn_blocking(move || server.restart_wiped().map(|()| server)).await.unwrap().unwrap();
    let presence = stores.presence();
    until("the lease's connection", Duration::from_secs(10), || async { lease.renew("a", TTL).await.is_ok() }).await;
    assert_eq!(lease.renew("a", TTL).await.unwrap(), LeaseAnswer::Nobody, "its memory is gone");
    until("the pool", Duration::from_secs(10), || async { presence.workers().await.is_ok() }).await;
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_password_in_any_error() {
    let secret = "s3cr3t-pass";
    let errors = [
        RedisStores::open(&format!("redis://:{secret}@127.0.0.1:1/0"), "x")
            .unwrap()
            .server_version()
            .await
            .map(drop)
            .unwrap_err(),
        RedisStores::open(&format!("redis//:{secret}@"), "x").map(drop).unwrap_err(),
        connect(&format!("mysql://u:{secret}@127.0.0.1:1/x")).await,
        connect(&format!("mysql://u:{secret}@:no-port/x")).await,
        connect(&format!("postgres://u:{secret}@127.0.0.1/x")).await,
    ];
    for error in errors {
        assert!(!format!("{error} {error:?}").contains(secret), "{error:?}");
    }
    let stores = redis().await;
    assert!(!format!("{stores:?} {:?}", stores.lease("x")).contains("redis://"));
}

async fn connect(url: &str) -> StoreError {
    let options =
        shardcron_store::sql::SqlOptions { acquire_timeout: Duration::from_millis(300), ..Default::default() };
    shardcron_store::sql::SqlLedger::connect(url, options).await.map(drop).unwrap_err()
}
