//! The cases of the small ports, for every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

use super::*;
use shardcron_domain::Incarnation;
use std::time::{Duration, Instant};

pub const TTL: Duration = Duration::from_secs(60);

/// Asks until it holds or the bound has passed.
pub async fn until<F: Future<Output = bool>>(what: &str, bound: Duration, mut probe: impl FnMut() -> F) {
    let began = Instant::now();
    while !probe().await {
        assert!(began.elapsed() < bound, "{what} did not happen within {bound:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn lease_cases(lease: &dyn LeaseStore) {
    use LeaseAnswer::{HeldBy, Mine, Nobody};
    assert_eq!(lease.renew("a", TTL).await.unwrap(), Nobody);
    assert_eq!(lease.acquire("a", TTL).await.unwrap(), Mine);
    assert_eq!(lease.acquire("a", TTL).await.unwrap(), Mine, "the answer to the first was lost");
    assert_eq!(lease.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    assert_eq!(lease.renew("a", TTL).await.unwrap(), Mine);
    // E-07: what comes late from an earlier holder changes nothing.
    lease.release("b").await.unwrap();
    assert_eq!(lease.renew("b", Duration::from_millis(1)).await.unwrap(), HeldBy("a".into()));
    assert_eq!(lease.acquire("b", TTL).await.unwrap(), HeldBy("a".into()));
    lease.release("a").await.unwrap();
    lease.release("a").await.unwrap();
    assert_eq!(lease.acquire("b", Duration::from_millis(80)).await.unwrap(), Mine);
    // E-03: it ends by itself.
    until("the end of b's lease", Duration::from_secs(5), || async { lease.acquire("c", TTL).await.unwrap() == Mine })
        .await;
    assert_eq!(lease.renew("b", TTL).await.unwrap(), HeldBy("c".into()));
    assert_eq!(lease.holder().await.unwrap().as_deref(), Some("c"));
    lease.release("c").await.unwrap();
    assert_eq!(lease.holder().await.unwrap(), None);
    // A stand-in's lease is a scheduler's for the taking, and no other stand-in's.
    assert_eq!(lease.acquire("fallback:a", TTL).await.unwrap(), Mine);
    assert_eq!(lease.acquire("fallback:b", TTL).await.unwrap(), HeldBy("fallback:a".into()));
    assert_eq!(lease.renew("fallback:a", TTL).await.unwrap(), Mine);
    assert_eq!(lease.acquire("d", TTL).await.unwrap(), Mine);
    assert_eq!(lease.renew("fallback:a", TTL).await.unwrap(), HeldBy("d".into()));
    assert_eq!(lease.acquire("fallback:a", TTL).await.unwrap(), HeldBy("d".into()));
    lease.release("fallback:a").await.unwrap();
    assert_eq!(lease.renew("d", TTL).await.unwrap(), Mine);
    lease.release("d").await.unwrap();
}

/// Eight at once, over and over: never two who hold it.
pub async fn race(leases: Vec<Box<dyn LeaseStore>>) {
    for round in 0..10 {
        let answers = futures_util::future::join_all(
            leases
                .iter()
                .enumerate()
                .map(|(n, lease)| async move { lease.acquire(&format!("r{round}-{n}"), TTL).await.unwrap() }),
        )
        .await;
        let winners: Vec<_> =
            answers.iter().enumerate().filter(|(_, a)| **a == LeaseAnswer::Mine).map(|(n, _)| n).collect();
        assert_eq!(winners.len(), 1, "round {round}: {answers:?}");
        leases[0].release(&format!("r{round}-{}", winners[0])).await.unwrap();
    }
}

pub fn beat(who: Incarnation, running: u32) -> WorkerBeat {
    WorkerBeat {
        incarnation: who,
        name: "w 🦀 'x'".into(),
        host: "here".into(),
        pid: 7,
        version: "0.1.0".into(),
        started_ms: T0,
        tiers: vec![("core".into(), 8)],
        running,
        draining: false,
        modes: vec!["redis_away".into()],
        progress: Vec::new(),
        hot_keys: vec![("user".into(), "17".into())],
    }
}

pub async fn presence_cases(presence: &dyn Presence) {
    let lost = Duration::from_secs(15);
    assert!(presence.workers().await.unwrap().is_empty());
    let (a, b) = (worker(), worker());
    presence.beat(&beat(a, 1), lost).await.unwrap();
    presence.beat(&beat(b, 2), lost).await.unwrap();
    presence.beat(&beat(a, 3), lost).await.unwrap();
    let mut seen = presence.workers().await.unwrap();
    seen.sort_by_key(|s| s.beat.incarnation);
    assert_eq!(seen.iter().map(|s| s.beat.clone()).collect::<Vec<_>>(), [beat(a, 3), beat(b, 2)]);
    assert!(seen.iter().all(|s| (0..10_000).contains(&s.age_ms)), "{seen:?}");
    until("ageing", Duration::from_secs(5), || async {
        presence.workers().await.unwrap().iter().all(|s| s.age_ms >= 20)
    })
    .await;
    presence.leave(a).await.unwrap();
    presence.leave(a).await.unwrap();
    assert_eq!(presence.workers().await.unwrap()[0].beat.incarnation, b);
    assert_eq!(presence.workers().await.unwrap().len(), 1);
}
