//! The sql handler over the real ledger in SQLite: the effects, the checkpoint and the result stand or fall together, over a
//! line that loses answers, too.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::Fault;
use common::fired::{Fired, T0, copied, quick, source_and_target};
use shardcron_domain::Incarnation;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, FailureClass, Phase, ReclaimReason};
use shardcron_handlers::{SqlHandler, SqlTemplate};
use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput};
use shardcron_store::*;
use std::ops::Deref;
use std::sync::Arc;
use uuid::Uuid;

const OWNER: Incarnation = Incarnation(Uuid::from_u128(7));
const COPY: &str = "INSERT INTO dst (id, who) SELECT id, :who FROM src WHERE id BETWEEN :shard_from AND :shard_to";

struct World(Fired);

impl World {
    /// Two shards, and the tables in the ledger's database.
    async fn new() -> Self {
        let shards = "shards = { range = { from = 1, to = 40 }, count = 2 }";
        let fired = Fired::new(&format!("handler = {{ sql = \"{COPY}\" }}\n{shards}"), 2).await;
        source_and_target(&fired.ledger).await;
        World(fired)
    }

    async fn claim(&self, index: u32, attempt: u32) -> ShardContext {
        self.0.claim(OWNER, self.attempt(index, attempt), "it's; DROP TABLE src; --").await
    }

    async fn run(
        &self,
        context: ShardContext,
        sql: &str,
        chunk: Option<u32>,
        faults: &[Fault],
    ) -> std::result::Result<ShardOutput, ShardError> {
        let template = SqlTemplate::parse(sql).unwrap();
        SqlHandler::new(Arc::new(self.behind(faults)), template, chunk, quick()).run(context).await
    }

    async fn copied(&self) -> Vec<i64> {
        copied(&self.ledger).await
    }
}

impl Deref for World {
    type Target = Fired;

    fn deref(&self) -> &Fired {
        &self.0
    }
}

#[tokio::test]
async fn lost_answers_at_every_step_leave_every_key_once() {
    for (chunk, steps) in [(None, 1), (Some(7), 3), (Some(20), 1)] {
        for lost in 0..steps {
            let world = World::new().await;
            for index in 0..2 {
                let mut faults = vec![Fault::None; lost];
                faults.extend([Fault::AnswerLost, Fault::Away]);
                let context = world.claim(index, 1).await;
                let output = world.run(context, COPY, chunk, &faults).await.unwrap();
                assert!(output.committed);
            }
            assert_eq!(world.copied().await, (1..=40).collect::<Vec<_>>(), "chunk {chunk:?}, lost {lost}");
            assert_eq!(world.ledger.rows_done(world.execution).await.unwrap(), 40);
            let (tally, started) = world.ledger.tally(world.execution).await.unwrap();
            shardcron_domain::invariants::check_tally(&tally).unwrap();
            assert_eq!((tally.recorded_twice, started), (0, 2));
            let attempts = world.ledger.attempts(world.execution, 10).await.unwrap();
            assert_eq!(attempts.len(), 2, "two ends in all: {attempts:?}");
        }
    }
}

#[tokio::test]
async fn z_03_a_parameter_arrives_as_it_is() {
    let world = World::new().await;
    let context = world.claim(0, 1).await;
    assert_eq!(world.run(context, COPY, None, &[]).await.unwrap().rows, Some(20));
    let who = world.ledger.query("SELECT DISTINCT who FROM dst", &[]).await.unwrap();
    assert_eq!(who, [[SqlArg::Text("it's; DROP TABLE src; --".into())]]);
}

#[tokio::test]
async fn an_attempt_that_failed_is_continued_behind_its_checkpoint() {
    let world = World::new().await;
    let context = world.claim(0, 1).await;
    let mut faults = vec![Fault::None, Fault::AnswerLost];
    faults.extend([Fault::None; 1]);
    faults.extend([Fault::Away; 1_000]);
    let error = world.run(context, COPY, Some(6), &faults).await.unwrap_err();
    assert_eq!((error.class, error.stopped), (FailureClass::Transient, false));
    assert_eq!(world.shard(0).await.checkpoint, Some(Checkpoint::Number(12)));
    let end = Ended {
        attempt: world.attempt(0, 1),
        outcome: AttemptOutcome::Failure { class: error.class, message: error.message },
        started_ms: T0,
        ended_ms: T0,
        retry: RetryPolicy::default(),
        seed: 1,
    };
    world.ledger.record(OWNER, &[end], T0).await.unwrap().remove(0).unwrap();
    let context = world.claim(0, 2).await;
    assert_eq!(context.checkpoint, Some(Checkpoint::Number(12)));
    assert_eq!(world.run(context, COPY, Some(6), &[]).await.unwrap().rows, Some(8));
    assert_eq!(world.copied().await, (1..=20).collect::<Vec<_>>());
    assert_eq!(world.shard(0).await.rows_done, 20);
}

#[tokio::test]
async fn a_shard_that_was_taken_away_is_not_written() {
    let world = World::new().await;
    let context = world.claim(0, 1).await;
    let reclaim = Reclaim { attempt: world.attempt(0, 1), owner: OWNER, reason: ReclaimReason::WorkerLost };
    let reclaims = [(reclaim, RetryPolicy::default())];
    world.ledger.reclaim(world.epoch, &reclaims, T0).await.unwrap().remove(0).unwrap();
    let error = world.run(context, COPY, Some(6), &[Fault::Away]).await.unwrap_err();
    assert!(error.stopped && error.message.contains("superseded by attempt 2"), "{error}");
    assert_eq!(world.copied().await, Vec::<i64>::new());
}

#[tokio::test]
async fn a_statement_that_fails_takes_the_others_of_its_step_back() {
    let world = World::new().await;
    let context = world.claim(0, 1).await;
    let sql = format!("{COPY}; INSERT INTO nowhere VALUES (:shard_index)");
    let error = world.run(context, &sql, Some(6), &[]).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Permanent);
    assert!(error.message.contains("nowhere"), "{error}");
    assert_eq!(world.copied().await, Vec::<i64>::new());
    let shard = world.shard(0).await;
    assert_eq!((shard.phase, shard.checkpoint), (Phase::Running, None));
}
