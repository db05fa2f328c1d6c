//! Steps in a database that is not the ledger's: every case runs against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::AttemptRef;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_store::sql::{Inbox, SqlOptions};
use shardcron_store::*;

conformance!(
    a_step_is_done_once_however_often_it_is_asked_for,
    an_earlier_attempt_is_refused_once_a_later_one_has_been_there,
    a_failing_step_leaves_nothing_there,
    an_inbox_that_was_set_back_is_said,
);

fn n(number: i64) -> Checkpoint {
    Checkpoint::Number(number)
}

fn step(attempt: AttemptRef, from: Option<i64>, to: i64) -> SqlStep {
    let args = vec![SqlArg::Int(to)];
    let insert = BoundSql { text: "INSERT INTO sink (id) VALUES (?)".into(), args };
    let advance = Some((from.map(n), n(to)));
    SqlStep { attempt, statements: vec![insert], advance, finish: None, rows_elsewhere: 0 }
}

async fn inbox(world: &World) -> (Inbox, AttemptRef) {
    world.ledger.execute_script("CREATE TABLE sink (id BIGINT PRIMARY KEY)").await.unwrap();
    let at = attempt(shardcron_domain::ExecutionId(uuid::Uuid::now_v7()), 0, 1);
    (Inbox::new("target", &world.url, SqlOptions::default()), at)
}

async fn sink(world: &World) -> usize {
    world.ledger.query("SELECT id FROM sink", &[]).await.unwrap().len()
}

async fn a_step_is_done_once_however_often_it_is_asked_for(world: World) {
    let (inbox, at) = inbox(&world).await;
    for _ in 0..3 {
        assert_eq!(inbox.apply(&step(at, None, 10), T0).await.unwrap(), Ok(1), "the rows of the time that it was done");
    }
    let next = AttemptRef { attempt: 2, ..at };
    assert_eq!(inbox.apply(&step(next, None, 10), T0).await.unwrap(), Ok(1), "the next attempt, a step behind");
    assert_eq!(inbox.apply(&step(next, Some(10), 20), T0).await.unwrap(), Ok(1));
    let last = SqlStep { finish: Some(success(next)), ..step(next, Some(20), 30) };
    for _ in 0..2 {
        assert_eq!(inbox.apply(&last, T0).await.unwrap(), Ok(1));
    }
    assert_eq!(sink(&world).await, 3);
    // Another shard of the execution is another row.
    let other = AttemptRef { index: 1, ..at };
    assert_eq!(inbox.apply(&step(other, None, 40), T0).await.unwrap(), Ok(1));
    // 100 days later, at the end of another execution's first shard, the old rows go.
    let later = attempt(shardcron_domain::ExecutionId(uuid::Uuid::now_v7()), 0, 1);
    let end = SqlStep { finish: Some(success(later)), ..step(later, None, 50) };
    inbox.apply(&end, T0 + 100 * 86_400_000).await.unwrap().unwrap();
    assert_eq!(world.ledger.query("SELECT attempt FROM shardcron_inbox", &[]).await.unwrap().len(), 1);
}

async fn an_earlier_attempt_is_refused_once_a_later_one_has_been_there(world: World) {
    let (inbox, at) = inbox(&world).await;
    inbox.apply(&step(at, None, 10), T0).await.unwrap().unwrap();
    inbox.apply(&step(AttemptRef { attempt: 3, ..at }, Some(10), 20), T0).await.unwrap().unwrap();
    let stale = Err(Rejection::StaleAttempt { named: 1, current: 3 });
    assert_eq!(inbox.apply(&step(at, Some(20), 30), T0).await.unwrap(), stale);
    assert_eq!(sink(&world).await, 2);
}

async fn a_failing_step_leaves_nothing_there(world: World) {
    let (inbox, at) = inbox(&world).await;
    inbox.apply(&step(at, None, 10), T0).await.unwrap().unwrap();
    let mut twice = step(at, Some(10), 20);
    twice.statements.push(twice.statements[0].clone());
    let error = inbox.apply(&twice, T0).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Statement { detail, transient: false } if detail.contains("'target'")),
        "{error:?}"
    );
    assert_eq!(sink(&world).await, 1);
    assert_eq!(inbox.apply(&step(at, Some(10), 20), T0).await.unwrap(), Ok(1));
}

async fn an_inbox_that_was_set_back_is_said(world: World) {
    let (inbox, at) = inbox(&world).await;
    let error = inbox.apply(&step(at, Some(10), 20), T0).await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(why) if why.contains("backup")), "{error:?}");
    assert_eq!(sink(&world).await, 0);
}
