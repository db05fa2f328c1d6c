//! A real ledger in SQLite with one execution over the keys 1 to 40, handed out, and the tables that its job copies between.

use super::{Fault, Lossy};
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation};
use shardcron_handlers::SqlLimits;
use shardcron_sdk::ShardContext;
use shardcron_sdk::testing::TestContext;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::*;
use std::sync::Mutex;
use std::time::Duration;
use uuid::Uuid;

pub const T0: i64 = 1_772_323_200_000;
/// Whatever an attempt waits for after the one before, it is over.
const A_DAY_LATER: i64 = T0 + 86_400_000;

pub struct Fired {
    pub ledger: SqlLedger,
    pub epoch: Epoch,
    pub execution: ExecutionId,
    plan: ShardPlan,
    folder: tempfile::TempDir,
}

impl Fired {
    /// `job` is the body of a job file's table.
    pub async fn new(job: &str, shards: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ledger = open(&folder, "ledger.db").await;
        ledger.migrate().await.unwrap();
        let execution = ExecutionId(Uuid::from_u128(0x0193_9d5e_7c1a_7def_8000_1234_5678_90ab));
        let plan = ShardPlan::Range { from: 1, to: 40, count: shards };
        let epoch = fire(&ledger, &format!("[job.copy]\n{job}\n"), execution, plan.clone()).await;
        Fired { ledger, epoch, execution, plan, folder }
    }

    /// Another database beside the ledger, and its URL.
    pub async fn beside(&self, name: &str) -> (SqlLedger, String) {
        (open(&self.folder, name).await, url(&self.folder, name))
    }

    pub fn attempt(&self, index: u32, attempt: u32) -> AttemptRef {
        AttemptRef { execution: self.execution, index, attempt }
    }

    /// The attempt's context, with the parameter `who`.
    pub async fn claim(&self, owner: Incarnation, attempt: AttemptRef, who: &str) -> ShardContext {
        let claimed = self.ledger.claim(owner, &[attempt], A_DAY_LATER).await.unwrap().remove(0).unwrap();
        let base = TestContext::new(self.plan.slice(attempt.index).unwrap()).param("who", who).context();
        ShardContext { attempt, owner, checkpoint: claimed.checkpoint, ..base }
    }

    pub async fn shard(&self, index: u32) -> ShardRow {
        self.ledger.shards(self.execution, index, 1).await.unwrap().remove(0)
    }

    /// The ledger behind a line on which this happens to the first calls.
    pub fn behind(&self, faults: &[Fault]) -> Lossy {
        Lossy { ledger: self.ledger.clone(), faults: Mutex::new(faults.iter().copied().collect()) }
    }
}

/// Fires the file's only job once with a plan, and hands all of it out, as its leader.
pub async fn fire(ledger: &SqlLedger, file: &str, execution: ExecutionId, plan: ShardPlan) -> Epoch {
    let spec = shardcron_domain::jobfile::parse(file).unwrap().remove(0);
    let name = spec.name.clone();
    ledger.apply_jobs(&[(spec, None)], "test", T0).await.unwrap();
    let job = ledger.job(&name).await.unwrap().unwrap().id;
    let epoch = ledger.begin_epoch("test", T0).await.unwrap();
    let shards = plan.count();
    let new = NewExecution {
        id: execution,
        plan,
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
    assert_eq!(ledger.fire(epoch, &[intent], T0).await.unwrap(), [FireOutcome::Fired(execution)]);
    ledger.materialize(epoch, execution, shards).await.unwrap();
    ledger.mark_dispatched(epoch, &[(execution, shards)], &[]).await.unwrap();
    epoch
}

fn url(folder: &tempfile::TempDir, name: &str) -> String {
    format!("sqlite://{}", folder.path().join(name).display())
}

async fn open(folder: &tempfile::TempDir, name: &str) -> SqlLedger {
    SqlLedger::connect(&url(folder, name), SqlOptions::default()).await.unwrap()
}

/// The keys 1 to 40 in `src`, and an empty `dst` that would take a key twice.
pub async fn source_and_target(database: &SqlLedger) {
    database.execute_script("CREATE TABLE src (id BIGINT); CREATE TABLE dst (id BIGINT, who TEXT)").await.unwrap();
    database.insert_rows("src", &["id"], (1..=40).map(|id| vec![SqlArg::Int(id)]).collect()).await.unwrap();
}

/// What stands in `dst`.
pub async fn copied(database: &SqlLedger) -> Vec<i64> {
    let rows = database.query("SELECT id FROM dst ORDER BY id", &[]).await.unwrap();
    rows.into_iter().map(|row| if let SqlArg::Int(id) = row[0] { id } else { panic!("{row:?}") }).collect()
}

/// Who is not answered tries again at once, and not for long.
pub fn quick() -> SqlLimits {
    SqlLimits {
        first_wait: Duration::from_millis(1),
        max_wait: Duration::from_millis(2),
        patience: Duration::from_millis(20),
        ..SqlLimits::default()
    }
}
