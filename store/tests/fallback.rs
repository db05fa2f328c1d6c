//! Redis with the ledger behind it: the ports' own cases while Redis is up, away and frozen, and what happens in between. The Redis
//! is real, and so are its faults.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

mod common;

use common::cases::*;
use common::*;
use shardcron_domain::liveness::{Liveness, Observer, Sighting};
use shardcron_store::fallback::{Fallback, FallbackOptions};
use shardcron_store::redis::RedisStores;
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;
use std::time::{Duration, Instant};
use testkit::{Redis, Relay};

const LOST_AFTER: Duration = Duration::from_secs(2);
const LEASE_TTL: Duration = Duration::from_secs(2);

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

async fn private_redis() -> Redis {
    blocking(|| Redis::start().unwrap()).await
}

/// What one process has of a Redis at this URL and of a ledger.
fn site(redis_url: &str, ledger: &SqlLedger) -> Fallback {
    let redis = RedisStores::open(redis_url, "x").unwrap();
    let options = FallbackOptions { lost_after: LOST_AFTER, lease_ttl: LEASE_TTL, idempotency_ttl: TTL };
    Fallback::new(redis, ledger.clone(), options)
}

/// One that is cut off from Redis alone.
fn cut_off(redis: &Redis, ledger: &SqlLedger) -> (Fallback, Relay) {
    let mut relay = Relay::start(redis.port()).unwrap();
    relay.cut();
    (site(&redis.url_through(relay.port()), ledger), relay)
}

async fn all_cases(redis_url: &str, ledger: &SqlLedger) {
    let one = site(redis_url, ledger);
    lease_cases(&one.lease("trigger")).await;
    presence_cases(&one.presence()).await;
    race((0..6).map(|_| Box::new(site(redis_url, ledger).lease("x")) as Box<dyn LeaseStore>).collect()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_with_redis_up() {
    let redis = private_redis().await;
    all_cases(&redis.url(), &mysql().await.ledger).await;
    assert!(site(&redis.url(), &sqlite().await.ledger).fault().borrow().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_with_redis_away() {
    let mut redis = private_redis().await;
    redis.kill().unwrap();
    all_cases(&redis.url(), &mysql().await.ledger).await;
    all_cases(&redis.url(), &sqlite().await.ledger).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e_03_e_07_with_redis_frozen() {
    let mut redis = private_redis().await;
    redis.freeze().unwrap();
    all_cases(&redis.url(), &mysql().await.ledger).await;
}

/// Nobody waits for a Redis that does not answer but the first to find out.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_redis_is_waited_for_once() {
    let (mut redis, world) = (private_redis().await, sqlite().await);
    let one = site(&redis.url(), &world.ledger);
    let (keys, mut fault) = (one.idempotency(), one.fault());
    let id = new_execution(1, shardcron_domain::job::OverlapPolicy::Allow).id;
    let ask = async || keys.begin(&[attempt(id, 0, 1)]).await.unwrap()[0];
    assert_eq!(ask().await, IdempotencyHint::Fresh);
    assert_eq!(ask().await, IdempotencyHint::Claimed);
    redis.freeze().unwrap();
    let began = Instant::now();
    for _ in 0..200 {
        assert_eq!(ask().await, IdempotencyHint::Fresh, "the ledger decides");
        keys.finish(&[attempt(id, 0, 1)]).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(fault.borrow_and_update().as_ref().unwrap().contains("has not answered"));
    redis.thaw().unwrap();
    let began = Instant::now();
    fault.changed().await.unwrap();
    assert!(fault.borrow().is_none(), "one absence, one return");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(ask().await, IdempotencyHint::Claimed);
}

/// The leader goes on by the ledger's row, and takes Redis' key again when it comes back empty, whoever is quicker.
#[tokio::test(flavor = "multi_thread")]
async fn the_leader_stays_the_leader_while_redis_dies_and_comes_back_empty() {
    use LeaseAnswer::{HeldBy, Mine};
    let (mut redis, world) = (private_redis().await, mysql().await);
    let (leader, other) = (site(&redis.url(), &world.ledger), site(&redis.url(), &world.ledger));
    let (lease, others) = (leader.lease("trigger"), other.lease("trigger"));
    assert_eq!(lease.acquire("a", TTL).await.unwrap(), Mine);
    assert_eq!(others.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    redis.kill().unwrap();
    for _ in 0..3 {
        assert_eq!(lease.renew("a", TTL).await.unwrap(), Mine);
        assert_eq!(others.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    }
    let (mut gone, mut gone_too) = (leader.fault(), other.fault());
    assert!(gone.borrow_and_update().is_some() && gone_too.borrow_and_update().is_some());
    let redis = blocking(move || redis.restart_wiped().map(|()| redis)).await.unwrap();
    gone_too.changed().await.unwrap();
    // The other sees Redis first: it gets the key, finds the row held and gives the key back.
    assert_eq!(others.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    assert_eq!(redis.command(&["EXISTS", "x:lease:trigger"]).unwrap(), ":0");
    gone.wait_for(Option::is_none).await.unwrap();
    assert_eq!(lease.renew("a", TTL).await.unwrap(), Mine);
    assert_eq!(redis.command(&["GET", "x:lease:trigger"]).unwrap(), "a");
    assert_eq!(others.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    // Flushed while it runs, and another holds the key for a moment: the row decides, and the key comes back.
    redis.command(&["SET", "x:lease:trigger", "b", "PX", "60000"]).unwrap();
    assert_eq!(lease.renew("a", TTL).await.unwrap(), Mine);
    redis.flush_all().unwrap();
    assert_eq!(lease.renew("a", TTL).await.unwrap(), Mine);
    assert_eq!(redis.command(&["GET", "x:lease:trigger"]).unwrap(), "a");
    lease.release("a").await.unwrap();
    assert_eq!(others.acquire("b", TTL).await.unwrap(), Mine);
}

/// One sees Redis only, the other the ledger only: who can write leads, and the other gives the key back.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_between_redis_and_the_ledger() {
    use LeaseAnswer::{HeldBy, Mine};
    let (redis, world) = (private_redis().await, mysql().await);
    let port: u16 = world.url.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let mut wire = Relay::start(port).unwrap();
    let far = SqlLedger::connect(&wire.url(&world.url), Default::default()).await.unwrap();
    let a = site(&redis.url(), &far);
    let (b, _relay) = cut_off(&redis, &world.ledger);
    let (a, b) = (a.lease("trigger"), b.lease("trigger"));
    let ttl = Duration::from_secs(1);
    assert_eq!(a.acquire("a", ttl).await.unwrap(), Mine);
    assert_eq!(b.acquire("b", ttl).await.unwrap(), HeldBy("a".into()), "A's row is seen without Redis");
    wire.cut();
    assert!(a.renew("a", ttl).await.is_err(), "no renewal: the trust window ends");
    until("the end of A's row", Duration::from_secs(5), || async { b.acquire("b", TTL).await.unwrap() == Mine }).await;
    assert!(a.acquire("a", ttl).await.is_err(), "no row, no lease");
    assert_eq!(redis.command(&["EXISTS", "x:lease:trigger"]).unwrap(), ":0", "and the key is given back");
    wire.heal().unwrap();
    until("the wire", Duration::from_secs(10), || async { a.acquire("a", ttl).await.is_ok() }).await;
    assert_eq!(a.acquire("a", ttl).await.unwrap(), HeldBy("b".into()));
    assert_eq!(b.renew("b", TTL).await.unwrap(), Mine);
}

/// E-01: an error is never leadership. B's Redis refuses fifty times, and A leads.
#[tokio::test(flavor = "multi_thread")]
async fn e_01_who_is_refused_by_redis_does_not_lead() {
    let (redis, world) = (private_redis().await, mysql().await);
    let a = site(&redis.url(), &world.ledger).lease("trigger");
    let (b, mut relay) = cut_off(&redis, &world.ledger);
    let fault = b.fault();
    let b = b.lease("trigger");
    assert_eq!(a.acquire("a", TTL).await.unwrap(), LeaseAnswer::Mine);
    for _ in 0..50 {
        assert_eq!(b.acquire("b", TTL).await.unwrap(), LeaseAnswer::HeldBy("a".into()));
        assert_eq!(a.renew("a", TTL).await.unwrap(), LeaseAnswer::Mine);
    }
    assert!(fault.borrow().is_some());
    relay.heal().unwrap();
    until("B to see Redis again", Duration::from_secs(5), || async { fault.borrow().is_none() }).await;
    assert_eq!(b.acquire("b", TTL).await.unwrap(), LeaseAnswer::HeldBy("a".into()));
}

/// E-10: a Redis that refuses writes is away, however well it answers reads.
#[tokio::test(flavor = "multi_thread")]
async fn e_10_a_redis_that_refuses_writes() {
    let (redis, world) = (private_redis().await, mysql().await);
    for (refuse, allow) in [
        (vec!["CONFIG", "SET", "maxmemory", "1"], vec!["CONFIG", "SET", "maxmemory", "0"]),
        (vec!["REPLICAOF", "127.0.0.1", "1"], vec!["REPLICAOF", "NO", "ONE"]),
    ] {
        let one = site(&redis.url(), &world.ledger);
        let (lease, presence) = (one.lease("trigger"), one.presence());
        assert_eq!(redis.command(&refuse).unwrap(), "+OK");
        let who = worker();
        presence.beat(&beat(who, 1), LOST_AFTER).await.unwrap();
        assert!(presence.workers().await.unwrap().iter().any(|w| w.beat.incarnation == who));
        assert_eq!(lease.acquire("a", TTL).await.unwrap(), LeaseAnswer::Mine);
        assert_eq!(lease.renew("a", TTL).await.unwrap(), LeaseAnswer::Mine);
        let mut fault = one.fault();
        let words = fault.borrow_and_update().clone().unwrap();
        assert!(words.contains("OOM") || words.contains("READONLY") || words.contains("read only"), "{words}");
        assert_eq!(redis.command(&allow).unwrap(), "+OK");
        let began = Instant::now();
        fault.wait_for(Option::is_none).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_eq!(lease.renew("a", TTL).await.unwrap(), LeaseAnswer::Mine);
        assert_eq!(redis.command(&["GET", "x:lease:trigger"]).unwrap(), "a");
        lease.release("a").await.unwrap();
        presence.leave(who).await.unwrap();
    }
}

/// Beats as a worker does, until it is dropped.
fn beating(presence: impl Presence, who: shardcron_domain::Incarnation) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let _ = tokio::time::timeout(LOST_AFTER / 3, presence.beat(&beat(who, 1), LOST_AFTER)).await;
            tokio::time::sleep(LOST_AFTER / 3).await;
        }
    })
}

/// What a supervisor makes of it, from one sweep to the next.
struct Supervisor<P> {
    presence: P,
    observer: Observer,
    began: Instant,
}

impl<P: Presence> Supervisor<P> {
    fn new(presence: P) -> Self {
        Supervisor { presence, observer: Observer::default(), began: Instant::now() }
    }

    async fn judge(&mut self, who: shardcron_domain::Incarnation) -> Liveness {
        let Ok(seen) = self.presence.workers().await else { return Liveness::Suspect };
        let age = seen.iter().find(|w| w.beat.incarnation == who).map(|w| w.age_ms);
        let sighting = age.map_or(Sighting::Absent, |age_ms| Sighting::Beat { age_ms });
        let now_ms = self.began.elapsed().as_millis() as i64;
        self.observer.judge(who, sighting, LOST_AFTER.as_millis() as i64, now_ms)
    }

    /// Sweeps for a while; nobody who beats may ever be lost.
    async fn sweep(&mut self, who: shardcron_domain::Incarnation, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time {
            assert_ne!(self.judge(who).await, Liveness::Lost, "after {:?}", began.elapsed());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn until(&mut self, who: shardcron_domain::Incarnation, state: Liveness, bound: Duration) {
        let began = Instant::now();
        while self.judge(who).await != state {
            assert!(began.elapsed() < bound, "not {state:?} within {bound:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Redis goes away, comes back empty, goes away again: nobody who beats is lost, and who stops beating is.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_lost_when_redis_goes_and_comes_back_empty() {
    let (mut redis, world) = (private_redis().await, mysql().await);
    let who = worker();
    let beats = beating(site(&redis.url(), &world.ledger).presence(), who);
    let mut supervisor = Supervisor::new(site(&redis.url(), &world.ledger).presence());
    supervisor.until(who, Liveness::Alive, LOST_AFTER).await;
    redis.kill().unwrap();
    supervisor.sweep(who, LOST_AFTER + LOST_AFTER / 2).await;
    supervisor.until(who, Liveness::Alive, LOST_AFTER).await;
    let mut redis = blocking(move || redis.restart_wiped().map(|()| redis)).await.unwrap();
    supervisor.sweep(who, LOST_AFTER + LOST_AFTER / 2).await;
    supervisor.until(who, Liveness::Alive, LOST_AFTER).await;
    redis.kill().unwrap();
    supervisor.sweep(who, LOST_AFTER).await;
    beats.abort();
    supervisor.until(who, Liveness::Lost, LOST_AFTER + Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_alone_is_cut_off_is_seen_in_the_ledger() {
    let (redis, world) = (private_redis().await, mysql().await);
    let who = worker();
    let (of_worker, mut relay) = cut_off(&redis, &world.ledger);
    relay.heal().unwrap();
    let beats = beating(of_worker.presence(), who);
    let mut supervisor = Supervisor::new(site(&redis.url(), &world.ledger).presence());
    supervisor.until(who, Liveness::Alive, LOST_AFTER).await;
    relay.cut();
    supervisor.sweep(who, LOST_AFTER * 2).await;
    relay.heal().unwrap();
    let mut fault = of_worker.fault();
    fault.wait_for(Option::is_none).await.unwrap();
    supervisor.sweep(who, LOST_AFTER).await;
    // Back in Redis, and its row is taken away, so that it can't be mistaken for a late beat.
    until("the row to go", LOST_AFTER, || async {
        world.ledger.query("SELECT COUNT(*) FROM presence", &[]).await.unwrap()[0][0] == SqlArg::Int(0)
    })
    .await;
    beats.abort();
    supervisor.until(who, Liveness::Lost, LOST_AFTER + Duration::from_secs(2)).await;
}

/// The leader alone is cut off: the workers, whose beats Redis takes, hear that they are wanted in the ledger.
#[tokio::test(flavor = "multi_thread")]
async fn a_supervisor_that_alone_is_cut_off_loses_nobody() {
    let (redis, world) = (private_redis().await, mysql().await);
    let who = worker();
    let beats = beating(site(&redis.url(), &world.ledger).presence(), who);
    let (of_supervisor, mut relay) = cut_off(&redis, &world.ledger);
    relay.heal().unwrap();
    let mut supervisor = Supervisor::new(of_supervisor.presence());
    supervisor.until(who, Liveness::Alive, LOST_AFTER).await;
    relay.cut();
    supervisor.sweep(who, LOST_AFTER * 3).await;
    assert_eq!(supervisor.judge(who).await, Liveness::Alive);
    beats.abort();
    supervisor.until(who, Liveness::Lost, LOST_AFTER + Duration::from_secs(2)).await;
}
