//! A user's statements in the shard's transaction: every case runs against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::ExecutionId;
use shardcron_domain::shard::{Checkpoint, Phase, Rejection};
use shardcron_domain::{AttemptRef, execution};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(
    steps_move_the_checkpoint_and_finish,
    a_failing_statement_leaves_nothing,
    a_step_of_a_lost_attempt_does_nothing,
    statements_that_end_the_transaction_are_refused,
    a_last_step_ends_when_its_statements_have_ended,
    helpers_for_examples,
);

async fn with_table(ledger: &SqlLedger) -> (shardcron_domain::Incarnation, AttemptRef, ExecutionId) {
    let (_, _, id) = fired(ledger, 1).await;
    ledger
        .execute_script("CREATE TABLE effects (id BIGINT PRIMARY KEY, note VARCHAR(100), amount DOUBLE)")
        .await
        .unwrap();
    let me = worker();
    let at = attempt(id, 0, 1);
    ledger.claim(me, &[at], T0).await.unwrap();
    (me, at, id)
}

fn insert(id: i64) -> BoundSql {
    let args = vec![SqlArg::Int(id), SqlArg::Text("it's 🦀".into()), SqlArg::Float(1.5)];
    BoundSql { text: "INSERT INTO effects (id, note, amount) VALUES (?, ?, ?)".into(), args }
}

fn step(at: AttemptRef, statements: Vec<BoundSql>) -> SqlStep {
    SqlStep { attempt: at, statements, advance: None, finish: None, rows_elsewhere: 0 }
}

async fn effects(ledger: &SqlLedger) -> usize {
    ledger.query("SELECT id FROM effects", &[]).await.unwrap().len()
}

async fn steps_move_the_checkpoint_and_finish(world: World) {
    let ledger = &world.ledger;
    let (me, at, id) = with_table(ledger).await;
    let n = Checkpoint::Number;
    let look = BoundSql { text: "SELECT COUNT(*) FROM effects".into(), args: vec![] };
    let first = SqlStep { advance: Some((None, n(10))), ..step(at, vec![insert(1), insert(2), look.clone()]) };
    assert_eq!(ledger.run_sql(me, &first, T0).await.unwrap(), Ok(SqlDone { rows: 2, recorded: None }));
    assert_eq!(ledger.run_sql(me, &first, T0).await.unwrap(), Err(Rejection::CheckpointGap));
    assert_eq!(effects(ledger).await, 2);
    let last =
        SqlStep { advance: Some((Some(n(10)), n(20))), finish: Some(success(at)), ..step(at, vec![look, insert(3)]) };
    let done = ledger.run_sql(me, &last, T0).await.unwrap().unwrap();
    let recorded = done.recorded.unwrap();
    assert_eq!((done.rows, recorded.phase), (1, Phase::Success));
    assert_eq!(recorded.execution_ended, Some(execution::Phase::Success));
    assert_eq!(ledger.rows_done(id).await.unwrap(), 3, "the ledger's own sum, not what the caller says");
    assert_eq!(ledger.run_sql(me, &last, T0).await.unwrap(), Err(Rejection::Terminal(Phase::Success)));
    assert_eq!(effects(ledger).await, 3);
}

async fn a_last_step_ends_when_its_statements_have_ended(world: World) {
    let ledger = &world.ledger;
    let (me, at, id) = with_table(ledger).await;
    let slow = match ledger.dialect_name() {
        "sqlite" => {
            "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 300000) SELECT COUNT(*) FROM c"
        }
        _ => "SELECT SLEEP(0.05)",
    };
    let slow = BoundSql { text: slow.into(), args: Vec::new() };
    let began = std::time::Instant::now();
    let last = SqlStep { finish: Some(Ended { ended_ms: T0, ..success(at) }), ..step(at, vec![slow]) };
    ledger.run_sql(me, &last, T0).await.unwrap().unwrap();
    let most = T0 + i64::try_from(began.elapsed().as_millis()).unwrap();
    let attempt = &ledger.attempts(id, 1).await.unwrap()[0];
    assert!((T0 + 5..=most).contains(&attempt.ended_ms), "{} of {}", attempt.ended_ms - T0, most - T0);
    let ended = ledger.execution(id).await.unwrap().unwrap().ended_ms.unwrap();
    assert!((T0 + 5..=most).contains(&ended), "the execution's end, too: {}", ended - T0);
}

async fn a_failing_statement_leaves_nothing(world: World) {
    let ledger = &world.ledger;
    let (me, at, id) = with_table(ledger).await;
    let twice = SqlStep { advance: Some((None, Checkpoint::Number(1))), ..step(at, vec![insert(1), insert(1)]) };
    let error = ledger.run_sql(me, &twice, T0).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement { transient: false, .. }), "{error:?}");
    let unknown =
        step(at, vec![insert(1), BoundSql { text: "INSERT INTO no_such_table VALUES (1)".into(), args: vec![] }]);
    let error = ledger.run_sql(me, &unknown, T0).await.unwrap_err();
    assert!(matches!(&error, StoreError::Statement { detail, .. } if detail.contains("no_such_table")), "{error:?}");
    assert_eq!(effects(ledger).await, 0);
    let row = &ledger.shards(id, 0, 1).await.unwrap()[0];
    assert_eq!((row.phase, &row.checkpoint, row.rows_done), (Phase::Running, &None, 0));
}

async fn a_step_of_a_lost_attempt_does_nothing(world: World) {
    let ledger = &world.ledger;
    let (me, at, id) = with_table(ledger).await;
    assert_eq!(ledger.run_sql(worker(), &step(at, vec![insert(1)]), T0).await.unwrap(), Err(Rejection::NotOwner(me)));
    ledger.record(me, &[failure(at)], T0).await.unwrap();
    let stale = Err(Rejection::StaleAttempt { named: 1, current: 2 });
    assert_eq!(ledger.run_sql(me, &step(at, vec![insert(1)]), T0).await.unwrap(), stale);
    let none = step(attempt(id, 9, 1), vec![insert(1)]);
    assert_eq!(ledger.run_sql(me, &none, T0).await.unwrap(), Err(Rejection::NoSuchShard));
    assert_eq!(effects(ledger).await, 0);
}

async fn statements_that_end_the_transaction_are_refused(world: World) {
    let ledger = &world.ledger;
    let (me, at, _) = with_table(ledger).await;
    for text in ["COMMIT", " /* x */ rollback", "BEGIN"] {
        let ends = step(at, vec![insert(1), BoundSql { text: text.into(), args: vec![] }]);
        let error = ledger.run_sql(me, &ends, T0).await.unwrap_err();
        assert!(matches!(error, StoreError::Statement { transient: false, .. }), "{error:?}");
    }
    assert_eq!(effects(ledger).await, 0);
}

async fn helpers_for_examples(world: World) {
    let ledger = &world.ledger;
    ledger
        .execute_script("CREATE TABLE a (n BIGINT, t VARCHAR(20), f DOUBLE); CREATE TABLE b (n BIGINT)")
        .await
        .unwrap();
    let rows: Vec<_> = (0..5_000)
        .map(|n| {
            vec![
                SqlArg::Int(n),
                if n == 7 { SqlArg::Null } else { SqlArg::Text(format!("'{n}🦀\\")) },
                SqlArg::Float(n as f64 / 4.0),
            ]
        })
        .collect();
    assert_eq!(ledger.insert_rows("a", &["n", "t", "f"], rows.clone()).await.unwrap(), 5_000);
    let read = ledger.query("SELECT n, t, f FROM a WHERE n < ? ORDER BY n", &[SqlArg::Int(5_000)]).await.unwrap();
    assert_eq!(read, rows);
    let sums = ledger.query("SELECT COUNT(*), SUM(n) FROM a", &[]).await.unwrap();
    assert_eq!(sums[0][0], SqlArg::Int(5_000));
    let error = ledger.query("SELECT * FROM nowhere", &[]).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement { .. }), "{error:?}");
}
