//! The sql handler in another database: there each step happens once, whatever becomes of the ledger's answers and of its worker.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::{Fault, Lossy};
use shardcron_domain::job::{HandlerSpec, OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{FailureClass, Phase, ReclaimReason};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_handlers::{HandlerOptions, Handlers, SqlLimits};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardOutput};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

const T0: i64 = 1_772_323_200_000;
const COPY: &str = "INSERT INTO dst (id) SELECT id FROM src WHERE id BETWEEN :shard_from AND :shard_to";

struct World {
    ledger: SqlLedger,
    target: SqlLedger,
    target_url: String,
    epoch: shardcron_domain::Epoch,
    execution: ExecutionId,
    _folder: tempfile::TempDir,
}

impl World {
    /// A ledger, and beside it a database with keys 1 to 40 in `src` and a `dst` that would take a key twice.
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = |name: &str| format!("sqlite://{}", folder.path().join(name).display());
        let target_url = url("target.db");
        let ledger = SqlLedger::connect(&url("ledger.db"), SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        let target = SqlLedger::connect(&target_url, SqlOptions::default()).await.unwrap();
        target.execute_script("CREATE TABLE src (id BIGINT); CREATE TABLE dst (id BIGINT)").await.unwrap();
        target.insert_rows("src", &["id"], (1..=40).map(|id| vec![SqlArg::Int(id)]).collect()).await.unwrap();
        let text = "[job.copy]\nhandler = { sql = \"SELECT 1\", database = \"target\" }\n";
        let spec = shardcron_domain::jobfile::parse(text).unwrap().remove(0);
        ledger.apply_jobs(&[(spec, None)], "test", T0).await.unwrap();
        let job = ledger.job("copy").await.unwrap().unwrap().id;
        let epoch = ledger.begin_epoch("test", T0).await.unwrap();
        let execution = ExecutionId(Uuid::from_u128(0x0193_9d5e_7c1a_7def_8000_1234_5678_90ac));
        let new = NewExecution {
            id: execution,
            plan: ShardPlan::Range { from: 1, to: 40, count: 1 },
            params: Params::new(),
            tier: "core".into(),
            timeout_ms: None,
            stall_ms: None,
            overlap: OverlapPolicy::Allow,
        };
        let intent = FireIntent {
            job,
            version: 1,
            fire_key: "one".into(),
            nominal_ms: T0,
            scheduled: true,
            action: FireAction::Fire(new),
            next_fire_ms: None,
            extra: Default::default(),
        };
        ledger.fire(epoch, &[intent], T0).await.unwrap();
        ledger.mark_dispatched(epoch, &[(execution, 1)], &[]).await.unwrap();
        World { ledger, target, target_url, epoch, execution, _folder: folder }
    }

    async fn claim(&self, attempt: u32) -> ShardContext {
        let owner = Incarnation(Uuid::now_v7());
        let attempt = AttemptRef { execution: self.execution, index: 0, attempt };
        let claimed = self.ledger.claim(owner, &[attempt], T0 + 86_400_000).await.unwrap().remove(0).unwrap();
        let slice = ShardPlan::Range { from: 1, to: 40, count: 1 }.slice(0).unwrap();
        ShardContext { attempt, owner, checkpoint: claimed.checkpoint, ..TestContext::new(slice).context() }
    }

    async fn run(
        &self,
        context: ShardContext,
        (sql, chunk): (&str, Option<u32>),
        faults: &[Fault],
    ) -> std::result::Result<ShardOutput, ShardError> {
        let faults = Mutex::new(faults.iter().copied().collect());
        let lossy = Lossy { ledger: self.ledger.clone(), faults };
        let mut options = HandlerOptions::over(Arc::new(lossy), Registry::default())
            .databases([("target".to_owned(), self.target_url.clone())]);
        options.sql = SqlLimits {
            first_wait: Duration::from_millis(1),
            max_wait: Duration::from_millis(2),
            patience: Duration::from_millis(20),
            ..SqlLimits::default()
        };
        let spec = HandlerSpec::Sql { sql: sql.into(), chunk, database: Some("target".into()) };
        Handlers::new(options).resolve(&spec).unwrap().run(context).await
    }

    async fn copied(&self) -> Vec<i64> {
        let rows = self.target.query("SELECT id FROM dst ORDER BY id", &[]).await.unwrap();
        rows.into_iter().map(|row| if let SqlArg::Int(id) = row[0] { id } else { panic!("{row:?}") }).collect()
    }

    async fn ended_well(&self, what: &str) {
        assert_eq!(self.copied().await, (1..=40).collect::<Vec<_>>(), "{what}");
        assert_eq!(self.ledger.rows_done(self.execution).await.unwrap(), 40, "{what}");
        let shard = self.ledger.shards(self.execution, 0, 1).await.unwrap().remove(0);
        assert_eq!(shard.phase, Phase::Success, "{what}");
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
            let verdict = world.ledger.reclaim(world.epoch, &[(reclaim, RetryPolicy::default())], T0).await.unwrap();
            assert!(verdict[0].is_ok());
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
    let options = HandlerOptions::over(
        Arc::new(Lossy { ledger: world.ledger.clone(), faults: Mutex::default() }),
        Registry::default(),
    )
    .databases([("target".to_owned(), "mysql://root:s3cret@127.0.0.1:1/x".to_owned())]);
    let spec = HandlerSpec::Sql { sql: COPY.into(), chunk: None, database: Some("targte".into()) };
    let error = Handlers::new(options).resolve(&spec).err().unwrap();
    assert!(error.message.contains("did you mean 'target'?") && !error.message.contains("s3cret"), "{error}");
}
