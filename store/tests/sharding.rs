//! Plans out of a table's keys and the last durations, and executions whose first shard says what the others are.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::effects::StepEnd;
use shardcron_domain::execution::Phase;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::once::Batch;
use shardcron_domain::plan::{Addressee, ShardPlan};
use shardcron_domain::planning::KeyBounds;
use shardcron_domain::shard::{self, Rejection};
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(
    s5_a_query_is_cut_at_quantiles_of_its_rows,
    what_a_query_can_not_cut_is_refused_with_the_reason,
    a_map_grows_with_its_first_shards_end_and_reduces_last,
    a_map_whose_shard_fails_never_reduces,
    a_retried_first_shard_emits_anew_without_doubles,
    a_map_does_not_grow_while_records_of_its_first_shard_are_open,
    the_last_good_run_is_learned_from,
    a_broadcast_is_run_by_its_workers_alone_and_lost_with_them,
);

fn query(key: &str, filter: Option<&str>, count: u32) -> QuerySpec {
    QuerySpec { table: "data_t".into(), key: key.into(), filter: filter.map(Into::into), count }
}

async fn fill(ledger: &SqlLedger, rows: impl IntoIterator<Item = (i64, &'static str, Option<i64>)>) {
    let sql = "CREATE TABLE data_t (id BIGINT NOT NULL PRIMARY KEY, word VARCHAR(20) NOT NULL, maybe BIGINT NULL)";
    ledger.execute_script(sql).await.unwrap();
    let row = |(id, word, maybe): (i64, &str, Option<i64>)| {
        vec![SqlArg::Int(id), SqlArg::Text(word.into()), maybe.map_or(SqlArg::Null, SqlArg::Int)]
    };
    let rows: Vec<_> = rows.into_iter().map(row).collect();
    ledger.insert_rows("data_t", &["id", "word", "maybe"], rows).await.unwrap();
}

async fn s5_a_query_is_cut_at_quantiles_of_its_rows(world: World) {
    let ledger = &world.ledger;
    // Sparse ids: the shares are of rows, not of the keys' range. Nine rows in ten have the same word.
    let words = ["b", "b", "b", "a", "b", "b", "b", "b", "b", "c"];
    fill(ledger, (0..1_000_i64).map(|n| (n * n, words[(n % 10) as usize], Some(n % 2)))).await;
    let bounds = ledger.key_bounds(&query("id", None, 4)).await.unwrap();
    let starts = vec![250 * 250, 500 * 500, 750 * 750];
    assert_eq!(bounds, KeyBounds::Numbers { first: 0, last: 999 * 999, starts });
    let odd = ledger.key_bounds(&query("id", Some("maybe = 1"), 2)).await.unwrap();
    assert_eq!(odd, KeyBounds::Numbers { first: 1, last: 999 * 999, starts: vec![501 * 501] });
    // A key that most rows share is one shard, however many were asked for.
    let words = ledger.key_bounds(&query("word", None, 8)).await.unwrap();
    assert_eq!(words, KeyBounds::Texts { starts: vec!["a".into(), "b".into()] });
    let more = ledger.key_bounds(&query("id", Some("id < 10"), 100)).await.unwrap();
    assert_eq!(more, KeyBounds::Numbers { first: 0, last: 9, starts: vec![1, 4, 9] });
}

async fn what_a_query_can_not_cut_is_refused_with_the_reason(world: World) {
    let ledger = &world.ledger;
    fill(ledger, [(1, "a", None), (2, "b", Some(5))]).await;
    let refused = |query: QuerySpec| async move { ledger.key_bounds(&query).await.unwrap_err() };
    let nulls = refused(query("maybe", None, 2)).await;
    assert!(
        matches!(&nulls, StoreError::Invalid(m) if m.contains("1 rows") && m.contains("maybe IS NOT NULL")),
        "{nulls}"
    );
    assert!(ledger.key_bounds(&query("maybe", Some("maybe IS NOT NULL"), 2)).await.is_ok());
    let missing = QuerySpec { table: "no_such_table".into(), ..query("id", None, 2) };
    for wrong in [missing, query("no_such_column", None, 2), query("id", Some("this is no condition"), 2)] {
        let e = refused(wrong).await;
        assert!(!e.is_transient() && e.to_string().contains("the query of its shards"), "{e}");
    }
    assert_eq!(ledger.key_bounds(&query("id", Some("id > 99"), 2)).await.unwrap(), KeyBounds::Empty);
}

/// A map with its first shard running.
async fn map(ledger: &SqlLedger) -> (Epoch, ExecutionId, Incarnation, AttemptRef) {
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("test", T0).await.unwrap();
    let plan = ShardPlan::Map { reduce: true, max: 100 };
    let new = NewExecution { plan, ..new_execution(1, OverlapPolicy::Allow) };
    let id = new.id;
    ledger.fire(epoch, &[intent(job, "k", new)], T0).await.unwrap();
    let (me, first) = (worker(), attempt(id, 0, 1));
    assert!(ledger.claim(me, &[first], T0).await.unwrap()[0].is_ok());
    (epoch, id, me, first)
}

fn payloads(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|n| format!("{{\"n\":{n}}}")).collect()
}

const GROWTH: Growth = Growth { emitted: 3, reduce: true };

async fn row(ledger: &SqlLedger, id: ExecutionId) -> ExecutionRow {
    ledger.execution(id).await.unwrap().unwrap()
}

/// What the dispatcher sees: how many shards may be handed out.
async fn handed_out(ledger: &SqlLedger, id: ExecutionId) -> Option<u32> {
    ledger.active_executions().await.unwrap().iter().find(|a| a.id == id).map(|a| a.shards_total)
}

async fn run(ledger: &SqlLedger, me: Incarnation, ends: &[Ended]) {
    let attempts: Vec<AttemptRef> = ends.iter().map(|end| end.attempt).collect();
    assert!(ledger.claim(me, &attempts, T0).await.unwrap().iter().all(|v| v.is_ok()));
    assert!(ledger.record(me, ends, T0 + 1).await.unwrap().iter().all(|v| v.is_ok()));
}

async fn a_map_grows_with_its_first_shards_end_and_reduces_last(world: World) {
    let ledger = &world.ledger;
    let (epoch, id, me, first) = map(ledger).await;
    // The answer to the first call was lost, so it was called again.
    for _ in 0..2 {
        assert_eq!(ledger.emit(me, first, 1, &payloads(0..2)).await.unwrap(), Ok(()));
    }
    assert_eq!(ledger.emit(me, first, 3, &payloads(2..3)).await.unwrap(), Ok(()));
    assert_eq!((row(ledger, id).await.shards_total, handed_out(ledger, id).await), (1, Some(1)));
    let stranger = ledger.emit(worker(), first, 1, &payloads(7..8)).await.unwrap();
    assert_eq!(stranger, Err(Rejection::NotOwner(me)));
    let recorded = ledger.finish_map(me, &success(first), GROWTH, T0 + 1).await.unwrap().unwrap();
    assert_eq!((recorded.phase, recorded.execution_ended), (shard::Phase::Success, None));
    assert_eq!((row(ledger, id).await.shards_total, handed_out(ledger, id).await), (5, Some(4)));
    // Called again, its answer lost: the ledger has decided, and nothing grows twice.
    assert!(ledger.finish_map(me, &success(first), GROWTH, T0 + 2).await.unwrap().is_err());
    assert_eq!(row(ledger, id).await.shards_total, 5);
    assert_eq!(ledger.emitted(id, 2).await.unwrap().as_deref(), Some("{\"n\":1}"));
    assert_eq!((ledger.emitted(id, 4).await.unwrap(), ledger.emitted_count(id).await.unwrap()), (None, 3));
    // However far is asked for, the reducing shard has no row before its time.
    assert_eq!(ledger.materialize(epoch, id, 5).await.unwrap(), 4);
    run(ledger, me, &[success(attempt(id, 1, 1)), success(attempt(id, 3, 1))]).await;
    assert_eq!(handed_out(ledger, id).await, Some(4));
    run(ledger, me, &[success(attempt(id, 2, 1))]).await;
    assert_eq!((row(ledger, id).await.phase, handed_out(ledger, id).await), (Phase::Running, Some(5)));
    let results = ledger.sub_results(id, 1, 2).await.unwrap();
    assert_eq!(results.iter().map(|r| (r.index, r.rows)).collect::<Vec<_>>(), [(1, Some(10)), (2, Some(10))]);
    assert_eq!(ledger.materialize(epoch, id, 5).await.unwrap(), 5);
    run(ledger, me, &[success(attempt(id, 4, 1))]).await;
    assert_eq!(row(ledger, id).await.phase, Phase::Success);
    let (tally, _) = ledger.tally(id).await.unwrap();
    shardcron_domain::invariants::check_tally(&tally).unwrap();
    assert_eq!((tally.shards_total, tally.results), (5, 5));
}

async fn a_map_whose_shard_fails_never_reduces(world: World) {
    let ledger = &world.ledger;
    let (epoch, id, me, first) = map(ledger).await;
    ledger.emit(me, first, 1, &payloads(0..3)).await.unwrap().unwrap();
    ledger.finish_map(me, &success(first), GROWTH, T0 + 1).await.unwrap().unwrap();
    ledger.materialize(epoch, id, 4).await.unwrap();
    let class = shard::FailureClass::Permanent;
    let failed = end(attempt(id, 2, 1), AttemptOutcome::Failure { class, message: "no".into() });
    run(ledger, me, &[success(attempt(id, 1, 1)), failed]).await;
    run(ledger, me, &[success(attempt(id, 3, 1))]).await;
    let ended = row(ledger, id).await;
    assert_eq!((ended.phase, ended.succeeded, ended.failed, ended.cancelled), (Phase::Failed, 3, 1, 1));
    let last = ledger.shards(id, 4, 1).await.unwrap();
    assert_eq!(last[0].phase, shard::Phase::Cancelled);
    let (tally, _) = ledger.tally(id).await.unwrap();
    shardcron_domain::invariants::check_tally(&tally).unwrap();
    assert_eq!(tally.terminal, 5);
}

async fn a_retried_first_shard_emits_anew_without_doubles(world: World) {
    let ledger = &world.ledger;
    let (_, id, me, first) = map(ledger).await;
    ledger.emit(me, first, 1, &payloads(0..5)).await.unwrap().unwrap();
    assert!(ledger.record(me, &[failure(first)], T0 + 1).await.unwrap()[0].is_ok());
    let late = ledger.emit(me, first, 6, &payloads(5..6)).await.unwrap();
    assert_eq!(late, Err(Rejection::StaleAttempt { named: 1, current: 2 }));
    let (other, second) = (worker(), attempt(id, 0, 2));
    assert!(ledger.claim(other, &[second], T0 + 5_000).await.unwrap()[0].is_ok());
    ledger.emit(other, second, 1, &payloads(10..11)).await.unwrap().unwrap();
    assert!(ledger.finish_map(me, &success(first), GROWTH, T0 + 6_000).await.unwrap().is_err());
    let growth = Growth { emitted: 1, reduce: false };
    ledger.finish_map(other, &success(second), growth, T0 + 6_000).await.unwrap().unwrap();
    assert_eq!((row(ledger, id).await.shards_total, ledger.emitted_count(id).await.unwrap()), (2, 1));
    assert_eq!(ledger.emitted(id, 1).await.unwrap().as_deref(), Some("{\"n\":10}"));
}

async fn a_map_does_not_grow_while_records_of_its_first_shard_are_open(world: World) {
    let ledger = &world.ledger;
    let (_, id, me, first) = map(ledger).await;
    ledger.emit(me, first, 1, &payloads(0..3)).await.unwrap().unwrap();
    let keys = vec![b"one".to_vec(), b"two".to_vec()];
    let mut tx = ledger.begin_step(me, first).await.unwrap().unwrap();
    let known = tx.known(&keys, true).await.unwrap();
    tx.commit(&StepEnd::default()).await.unwrap().unwrap();
    // One is done, and the other only begun.
    let settled = Batch::new(keys[..1].to_vec(), known[..1].to_vec()).unwrap().noted().settle(true, 0);
    let end = StepEnd { erased: settled.erased, ..StepEnd::default() };
    ledger.begin_step(me, first).await.unwrap().unwrap().commit(&end).await.unwrap().unwrap();
    let refused = ledger.finish_map(me, &success(first), GROWTH, T0 + 1).await.unwrap_err();
    assert!(refused.to_string().contains("still to be done: 1") && !refused.is_transient(), "{refused}");
    assert_eq!(
        (row(ledger, id).await.shards_total, ledger.open_records(attempt(id, 0, 9), 5).await.unwrap().len()),
        (1, 1)
    );
    // Done, too: it ends, and no row is left.
    let end = StepEnd { erased: vec![b"two".to_vec()], ..StepEnd::default() };
    ledger.begin_step(me, first).await.unwrap().unwrap().commit(&end).await.unwrap().unwrap();
    ledger.finish_map(me, &success(first), GROWTH, T0 + 2).await.unwrap().unwrap();
    assert_eq!(ledger.query("SELECT COUNT(*) FROM once_records", &[]).await.unwrap()[0][0], SqlArg::Int(0));
}

async fn the_last_good_run_is_learned_from(world: World) {
    let ledger = &world.ledger;
    let (_, job, id) = fired(ledger, 3).await;
    assert_eq!(ledger.last_run(job).await.unwrap(), None);
    let took = |index: u32| Ended { ended_ms: T0 + 100 * i64::from(index), ..success(attempt(id, index, 1)) };
    run(ledger, worker(), &[took(0), took(1), took(2)]).await;
    let (_, _, newer) = {
        let epoch = ledger.begin_epoch("test", T0).await.unwrap();
        let new = new_execution(2, OverlapPolicy::Allow);
        let newer = new.id;
        ledger.fire(epoch, &[intent(job, "newer", new)], T0).await.unwrap();
        (epoch, job, newer)
    };
    // One that has not ended teaches nothing.
    run(ledger, worker(), &[success(attempt(newer, 0, 1))]).await;
    let last = ledger.last_run(job).await.unwrap().unwrap();
    assert_eq!(last.plan, ShardPlan::Modulo { total: 3 });
    assert_eq!(last.took_ms.into_iter().collect::<Vec<_>>(), [(0, 0), (1, 100), (2, 200)]);
}

async fn a_broadcast_is_run_by_its_workers_alone_and_lost_with_them(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("test", T0).await.unwrap();
    let (lives, dies) = (worker(), worker());
    let workers = [lives, dies].map(|incarnation| Addressee { name: "w".into(), incarnation }).to_vec();
    let new = NewExecution { plan: ShardPlan::Broadcast { workers }, ..new_execution(1, OverlapPolicy::Allow) };
    let id = new.id;
    ledger.fire(epoch, &[intent(job, "k", new)], T0).await.unwrap();
    assert_eq!(ledger.active_executions().await.unwrap(), [], "nothing hands it out");
    let waits = |who, at_ms| async move { ledger.addressed(who, at_ms, 10).await.unwrap() };
    assert_eq!(waits(lives, T0).await, [("core".to_owned(), attempt(id, 0, 1))]);
    assert_eq!(waits(dies, T0).await, [("core".to_owned(), attempt(id, 1, 1))]);
    assert_eq!(waits(worker(), T0).await, []);
    assert_eq!(ledger.execution(id).await.unwrap().unwrap().tier, "core");
    // A retry waits for the same worker, and not before its time.
    assert!(ledger.claim(lives, &[attempt(id, 0, 1)], T0).await.unwrap()[0].is_ok());
    assert!(ledger.record(lives, &[failure(attempt(id, 0, 1))], T0).await.unwrap()[0].is_ok());
    assert_eq!(waits(lives, T0).await, []);
    assert_eq!(waits(lives, T0 + 60_000).await, [("core".to_owned(), attempt(id, 0, 2))]);
    assert_eq!(ledger.redispatch_due(T0 + 60_000, &[], 10).await.unwrap(), []);
    assert!(ledger.claim(lives, &[attempt(id, 0, 2)], T0 + 60_000).await.unwrap()[0].is_ok());
    assert!(ledger.record(lives, &[success(attempt(id, 0, 2))], T0 + 60_001).await.unwrap()[0].is_ok());
    assert_eq!(waits(lives, T0 + 60_002).await, []);
    assert_eq!(ledger.addressees().await.unwrap(), [dies]);
    // What runs there is not taken away here: the loss of its owner comes first.
    assert!(ledger.claim(dies, &[attempt(id, 1, 1)], T0).await.unwrap()[0].is_ok());
    assert_eq!(ledger.abandon(epoch, dies, T0).await.unwrap().len(), 0);
    let back = end(attempt(id, 1, 1), AttemptOutcome::HandBack);
    assert!(ledger.record(dies, &[back], T0).await.unwrap()[0].is_ok());
    assert_eq!(ledger.abandon(epoch, dies, T0 + 1).await.unwrap().len(), 1);
    assert_eq!(ledger.abandon(epoch, dies, T0 + 2).await.unwrap().len(), 0);
    let ended = row(ledger, id).await;
    assert_eq!((ended.phase, ended.succeeded, ended.failed), (Phase::Failed, 1, 1));
    assert!(ledger.dead(1).await.unwrap()[0].reason.contains("the worker that alone was to run this shard"));
    assert!(ledger.addressees().await.unwrap().is_empty());
    // Sent back by hand it waits for that worker again, and ends in the same way.
    let shards = ReopenShards::Failed { from: 0 };
    let wanted = Reopen { execution: id, shards, who: "test".into(), reason: None };
    assert_eq!(ledger.reopen(&wanted, T0 + 3).await.unwrap().unwrap().shards.len(), 1);
    assert_eq!(ledger.addressees().await.unwrap(), [dies]);
    assert_eq!(waits(dies, T0 + 4).await, [("core".to_owned(), attempt(id, 1, 3))]);
    assert_eq!(ledger.abandon(epoch, dies, T0 + 5).await.unwrap().len(), 1);
    assert_eq!(row(ledger, id).await.phase, Phase::Failed);
    let (tally, _) = ledger.tally(id).await.unwrap();
    shardcron_domain::invariants::check_tally(&tally).unwrap();
    assert!(ledger.abandon(Epoch(epoch.0 - 1), dies, T0).await.is_err(), "a leader that was deposed");
}
