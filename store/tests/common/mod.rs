//! What the store's tests share: fresh ledgers of each kind, a job, a leader, and a way to fire.
#![allow(dead_code, reason = "each test binary takes what it needs")]

pub mod cases;

use shardcron_domain::job::{OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::units::Span;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, JobSpec};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::*;
use std::sync::atomic::{AtomicU32, Ordering};
use uuid::Uuid;

/// 2026-03-01T00:00:00Z.
pub const T0: i64 = 1_772_323_200_000;

/// A fresh, migrated ledger.
pub struct World {
    pub ledger: SqlLedger,
    pub url: String,
    _folder: Option<tempfile::TempDir>,
}

impl World {
    /// Another process's view of the same ledger.
    pub async fn again(&self) -> SqlLedger {
        SqlLedger::connect(&self.url, SqlOptions::default()).await.expect("connect again")
    }
}

pub async fn sqlite() -> World {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite://{}", folder.path().join("ledger.db").display());
    let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.expect("open SQLite");
    ledger.migrate().await.expect("migrate SQLite");
    World { ledger, url, _folder: Some(folder) }
}

pub async fn mysql() -> World {
    let url = tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.expect("a database");
    let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.expect("connect");
    ledger.migrate().await.expect("migrate");
    World { ledger, url, _folder: None }
}

/// Each case once for every adapter.
#[allow(unused_macros, reason = "each test binary takes what it needs")]
macro_rules! conformance {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() { super::$case(crate::common::sqlite().await).await; })*
        }
        mod mysql {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() { super::$case(crate::common::mysql().await).await; })*
        }
    };
}

static WORKERS: AtomicU32 = AtomicU32::new(1);

/// A worker that no other test has.
pub fn worker() -> Incarnation {
    Incarnation(Uuid::from_u128((0x77 << 120) | u128::from(WORKERS.fetch_add(1, Ordering::Relaxed))))
}

pub fn spec(name: &str) -> JobSpec {
    let text = format!("[job.{name}]\nhandler = {{ rust = \"noop\" }}\nshards = {{ modulo = 4 }}\n");
    shardcron_domain::jobfile::parse(&text).expect("a job file").remove(0)
}

/// Applies a job without a schedule.
pub async fn apply(ledger: &SqlLedger, name: &str) -> JobId {
    ledger.apply_jobs(&[(spec(name), Some(T0))], "test", T0).await.expect("apply");
    ledger.job(name).await.expect("read the job").expect("the job").id
}

pub fn new_execution(shards: u32, overlap: OverlapPolicy) -> NewExecution {
    NewExecution {
        id: ExecutionId(Uuid::now_v7()),
        plan: ShardPlan::Modulo { total: shards },
        params: Params::new(),
        tier: "core".into(),
        timeout_ms: Some(1_800_000),
        stall_ms: Some(60_000),
        overlap,
    }
}

pub fn intent(job: JobId, fire_key: &str, new: NewExecution) -> FireIntent {
    FireIntent {
        job,
        version: 1,
        fire_key: fire_key.into(),
        nominal_ms: T0,
        scheduled: true,
        action: FireAction::Fire(new),
        next_fire_ms: None,
        extra: Default::default(),
    }
}

/// A leader, a job and one execution of so many shards, all handed out.
pub async fn fired(ledger: &SqlLedger, shards: u32) -> (Epoch, JobId, ExecutionId) {
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("test", T0).await.expect("lead");
    let new = new_execution(shards, OverlapPolicy::Allow);
    let id = new.id;
    let outcomes = ledger.fire(epoch, &[intent(job, &id.to_string(), new)], T0).await.expect("fire");
    assert_eq!(outcomes, [FireOutcome::Fired(id)]);
    assert_eq!(ledger.materialize(epoch, id, shards).await.expect("materialize"), shards);
    ledger.mark_dispatched(epoch, &[(id, shards)], &[]).await.expect("mark");
    (epoch, job, id)
}

pub fn attempt(execution: ExecutionId, index: u32, attempt: u32) -> AttemptRef {
    AttemptRef { execution, index, attempt }
}

pub fn policy(attempts: u32) -> RetryPolicy {
    RetryPolicy { attempts, first: Span::secs(1), factor: 1.0, max: Span::secs(1), jitter: 0.0 }
}

pub fn end(attempt: AttemptRef, outcome: AttemptOutcome) -> Ended {
    Ended { attempt, outcome, started_ms: T0, ended_ms: T0 + 5, retry: policy(3), seed: 7 }
}

pub fn success(attempt: AttemptRef) -> Ended {
    end(attempt, AttemptOutcome::Success { rows: Some(10), summary: None })
}

pub fn failure(attempt: AttemptRef) -> Ended {
    let class = shardcron_domain::shard::FailureClass::Transient;
    end(attempt, AttemptOutcome::Failure { class, message: "it broke".into() })
}
