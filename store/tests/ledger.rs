//! The conformance suite of the ledger: every case runs against every adapter.

mod common;

use common::*;
use shardcron_domain::shard::{Phase, Rejection};
use shardcron_domain::{execution, invariants};
use shardcron_store::*;

macro_rules! conformance {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")] async fn $case() { super::$case(crate::common::sqlite().await).await; })*
        }
    };
}

conformance!(a_shard_goes_its_way);

async fn a_shard_goes_its_way(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 4).await;
    let me = worker();
    let all: Vec<_> = (0..4).map(|i| attempt(id, i, 1)).collect();
    let claimed = ledger.claim(me, &all, T0).await.unwrap();
    assert!(claimed.iter().all(|c| c.is_ok()), "{claimed:?}");
    assert_eq!(ledger.running(10).await.unwrap().len(), 4);
    let ends = [success(all[0]), failure(all[1]), success(all[2]), success(all[3])];
    let recorded = ledger.record(me, &ends, T0 + 10).await.unwrap();
    assert_eq!(recorded[0].unwrap().phase, Phase::Success);
    assert_eq!(recorded[1].unwrap().redispatch_at_ms, Some(T0 + 1_010));
    assert!(recorded.iter().all(|r| r.unwrap().execution_ended.is_none()));
    assert!(ledger.redispatch_due(T0 + 1_009, 10).await.unwrap().is_empty());
    let due = ledger.redispatch_due(T0 + 1_010, 10).await.unwrap();
    assert_eq!(due[0].attempt, attempt(id, 1, 2));
    let again = [due[0].attempt];
    assert_eq!(ledger.claim(me, &again, T0 + 1_000).await.unwrap(), [Err(Rejection::NotYet)]);
    assert!(ledger.claim(me, &again, T0 + 1_010).await.unwrap()[0].is_ok());
    let last = ledger.record(me, &[success(again[0])], T0 + 1_020).await.unwrap();
    assert_eq!(last[0].unwrap().execution_ended, Some(execution::Phase::Success));
    let replay = ledger.record(me, &[success(again[0])], T0 + 1_020).await.unwrap();
    assert_eq!(replay, [Err(Rejection::Terminal(Phase::Success))]);
    let (tally, started) = ledger.tally(id).await.unwrap();
    invariants::check_tally(&tally).unwrap();
    assert_eq!((tally.results, tally.counted, started), (4, 4, 5));
    assert_eq!(ledger.rows_done(id).await.unwrap(), 40);
    assert_eq!(ledger.attempts(id, 10).await.unwrap().len(), 5);
    assert_eq!(ledger.execution(id).await.unwrap().unwrap().phase, execution::Phase::Success);
    assert!(ledger.active_executions().await.unwrap().is_empty());
}
