//! The sql handler in another database: there each step happens once, whatever becomes of the ledger's answers and of its worker.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::Fault;
use common::fired::{Fired, T0, copied, quick, source_and_target};
use shardcron_domain::Incarnation;
use shardcron_domain::job::{HandlerSpec, RetryPolicy};
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{FailureClass, Phase, ReclaimReason};
use shardcron_handlers::{HandlerOptions, Handlers};
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardOutput};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;
use std::sync::Arc;
use uuid::Uuid;

const JOB: &str = "handler = { sql = \"SELECT 1\", database = \"target\" }";
const COPY: &str = "INSERT INTO dst (id) SELECT id FROM src WHERE id BETWEEN :shard_from AND :shard_to";

struct World {
    fired: Fired,
    target: SqlLedger,
    target_url: String,
}

impl World {
    /// One shard, and the tables in a database beside the ledger.
    async fn new() -> Self {
        let fired = Fired::new(JOB, 1).await;
        let (target, target_url) = fired.beside("target.db").await;
        source_and_target(&target).await;
        World { fired, target, target_url }
    }

    async fn claim(&self, attempt: u32) -> ShardContext {
        self.fired.claim(Incarnation(Uuid::now_v7()), self.fired.attempt(0, attempt), "nobody").await
    }

    async fn run(
        &self,
        context: ShardContext,
        (sql, chunk): (&str, Option<u32>),
        faults: &[Fault],
    ) -> std::result::Result<ShardOutput, ShardError> {
        let mut options = HandlerOptions::over(Arc::new(self.fired.behind(faults)), Registry::default())
            .databases([("target".to_owned(), self.target_url.clone())]);
        options.sql = quick();
        let spec = HandlerSpec::Sql { sql: sql.into(), chunk, database: Some("target".into()) };
        Handlers::new(options).resolve(&spec).unwrap().run(context).await
    }

    async fn ended_well(&self, what: &str) {
        assert_eq!(copied(&self.target).await, (1..=40).collect::<Vec<_>>(), "{what}");
        assert_eq!(self.fired.ledger.rows_done(self.fired.execution).await.unwrap(), 40, "{what}");
        assert_eq!(self.fired.shard(0).await.phase, Phase::Success, "{what}");
    }
}

#[tokio::test]
async fn lost_answers_of_the_ledger_do_no_step_twice() {
    for (chunk, steps) in [(None, 1), (Some(15), 3)] {
        for lost in 0..steps {
            for fault in [Fault::AnswerLost, Fault::Away] {
                let world = World::new().await;
                let mut faults = vec![Fault::None; lost];
                faults.extend([fault, Fault::Away]);
                let context = world.claim(1).await;
                assert!(world.run(context, (COPY, chunk), &faults).await.unwrap().committed);
                world.ended_well(&format!("{chunk:?}, {lost}, {fault:?}")).await;
            }
        }
    }
}

/// The worker dies when a step is done there, and the ledger has not heard of it.
#[tokio::test]
async fn who_dies_between_the_two_commits_is_gone_on_from() {
    for (chunk, steps) in [(None, 1), (Some(15), 3)] {
        for died in 0..steps {
            let world = World::new().await;
            let context = world.claim(1).await;
            let (attempt, owner) = (context.attempt, context.owner);
            let mut faults = vec![Fault::None; died];
            faults.extend([Fault::Away; 1_000]);
            world.run(context, (COPY, chunk), &faults).await.unwrap_err();
            let reclaim = Reclaim { attempt, owner, reason: ReclaimReason::WorkerLost };
            let (ledger, reclaims) = (&world.fired.ledger, [(reclaim, RetryPolicy::default())]);
            assert!(ledger.reclaim(world.fired.epoch, &reclaims, T0).await.unwrap()[0].is_ok());
            let context = world.claim(2).await;
            world.run(context, (COPY, chunk), &[]).await.unwrap();
            world.ended_well(&format!("{chunk:?}, died at {died}")).await;
        }
    }
}

#[tokio::test]
async fn what_can_not_run_says_why() {
    let world = World::new().await;
    let context = world.claim(1).await;
    let error = world.run(context, ("INSERT INTO nowhere VALUES (1)", None), &[]).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Permanent);
    assert!(error.message.contains("nowhere") && error.message.contains("'target'"), "{error}");
    let options = HandlerOptions::over(Arc::new(world.fired.behind(&[])), Registry::default())
        .databases([("target".to_owned(), "mysql://root:s3cret@127.0.0.1:1/x".to_owned())]);
    let spec = HandlerSpec::Sql { sql: COPY.into(), chunk: None, database: Some("targte".into()) };
    let error = Handlers::new(options).resolve(&spec).err().unwrap();
    assert!(error.message.contains("did you mean 'target'?") && !error.message.contains("s3cret"), "{error}");
}
