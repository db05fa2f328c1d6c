//! Many writers of the same rows on MySQL or MariaDB: deadlocks and lock waits are tried again inside, and no run fails because of one (I-04).
//!
//! SQLite has no part in it: its one writer is waited for, there are no isolation levels, and nothing can be locked crosswise.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod common;

use async_trait::async_trait;
use common::fired::{T0, fire};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_handlers::effects::LedgerEffects;
use shardcron_handlers::{ShardLedger, SqlHandler, SqlLimits, SqlTemplate};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{ShardContext, ShardHandler as _};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The test's numbers: 64 tasks, each key by four of them, in batches of fifty.
const TASKS: u32 = 64;
const KEYS: u32 = 10_000;
const TIMES: u32 = 4;
const BATCH: u32 = 50;
/// What each task brings.
const EACH: u32 = KEYS * TIMES / TASKS;

fn seed() -> StdRng {
    let seed = std::env::var("SHARDCRON_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    println!("SHARDCRON_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// A database with one running execution, and a session of its own for each task.
struct Storm {
    ledger: SqlLedger,
    sessions: Vec<SqlLedger>,
    execution: ExecutionId,
    owner: Incarnation,
    level: &'static str,
}

impl Storm {
    async fn new(level: &'static str, shards: u32) -> Self {
        let url = tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.unwrap();
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        let file = "[job.storm]\nhandler = { rust = \"storm\" }\noverlap = \"allow\"\n";
        let (execution, owner) = (ExecutionId(uuid::Uuid::now_v7()), Incarnation(uuid::Uuid::now_v7()));
        fire(&ledger, file, execution, ShardPlan::Modulo { total: shards }).await;
        let attempts: Vec<_> = (0..shards).map(|index| AttemptRef { execution, index, attempt: 1 }).collect();
        assert!(ledger.claim(owner, &attempts, T0).await.unwrap().iter().all(|claim| claim.is_ok()));
        // One connection each, so that what a session is set to holds for all that its task does. Ours would be READ COMMITTED.
        let one = SqlOptions { max_connections: 1, acquire_timeout: Duration::from_secs(30), ..SqlOptions::default() };
        let mut sessions = Vec::new();
        for _ in 0..TASKS {
            let session = SqlLedger::connect(&url, one).await.unwrap();
            session.execute_script(&format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}")).await.unwrap();
            sessions.push(session);
        }
        let storm = Storm { ledger, sessions, execution, owner, level };
        storm.assert_level().await;
        storm
    }

    /// Every session still is at the level of the test: none was replaced by another.
    async fn assert_level(&self) {
        let wanted = SqlArg::Text(self.level.replace(' ', "-"));
        for session in &self.sessions {
            let rows = session.query("SHOW SESSION VARIABLES LIKE 't%isolation'", &[]).await.unwrap();
            assert!(!rows.is_empty() && rows.iter().all(|row| row[1] == wanted), "{}: {rows:?}", self.level);
        }
    }

    /// The attempt at a shard, as a handler has it, over one of the sessions.
    fn context(&self, session: usize, index: u32, slice: ShardSlice) -> ShardContext {
        let attempt = AttemptRef { execution: self.execution, index, attempt: 1 };
        let ledger: Arc<dyn Ledger> = Arc::new(self.sessions[session].clone());
        let effects = Arc::new(LedgerEffects::new(ledger, (self.owner, attempt), Box::new(|| {})));
        ShardContext { attempt, owner: self.owner, effects, ..TestContext::new(slice).context() }
    }

    async fn number(&self, sql: &str) -> i64 {
        match self.ledger.query(sql, &[]).await.unwrap()[0][0] {
            SqlArg::Int(n) => n,
            ref other => panic!("{sql}: {other:?}"),
        }
    }
}

/// Records of 16 shards, those of each brought by four tasks: noted, done, and noted as done. Each is new to one of the four and to no other.
async fn records_are_noted_once(level: &'static str, rng: &mut StdRng) {
    let shards = TASKS / TIMES;
    let storm = Arc::new(Storm::new(level, shards).await);
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let storm = storm.clone();
        let mut keys: Vec<u32> = (0..EACH).collect();
        keys.shuffle(rng);
        tasks.spawn(async move {
            let mut context =
                storm.context(task as usize, task % shards, ShardSlice::Modulo { total: shards, item: task % shards });
            let mut new = 0;
            for keys in keys.chunks(BATCH as usize) {
                let batch = context.once(keys.iter().map(|key| format!("record-{key}"))).await.unwrap();
                new += batch.open().into_iter().filter(|n| !batch.is_again(*n)).count();
                context.settle_records(batch).await.unwrap();
            }
            new
        });
    }
    let new: usize = tasks.join_all().await.into_iter().sum();
    println!("{level}: {KEYS} records, each by {TIMES} of {TASKS} tasks, in {:?}", began.elapsed());
    assert_eq!(new, KEYS as usize, "each is new to one task");
    let rows = "SELECT COUNT(*) FROM once_records";
    assert_eq!(storm.number(rows).await, i64::from(KEYS));
    let done = shardcron_domain::once::RecordState::Done.code();
    assert_eq!(storm.number(&format!("{rows} WHERE state = {done}")).await, i64::from(KEYS), "and is done");
    storm.assert_level().await;
}

/// Counts how often a step was told of a deadlock or a lock wait.
struct Counted {
    session: SqlLedger,
    all: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    of_this_step: AtomicU32,
}

#[async_trait]
impl ShardLedger for Counted {
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, shardcron_domain::shard::Rejection>> {
        let answer = self.session.run_sql(owner, step, now_ms).await;
        match &answer {
            Err(StoreError::Statement { transient: true, .. }) => {
                self.all.fetch_add(1, Ordering::Relaxed);
                self.of_this_step.fetch_add(1, Ordering::Relaxed);
            }
            _ => {
                self.most.fetch_max(self.of_this_step.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        answer
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.session.shards(id, from, limit).await
    }
}

/// 64 shards of an `sql` job write into one unique index of the user's, each key by four of them, in random order: what deadlocks.
async fn steps_into_one_index_are_done_once(level: &'static str, rng: &mut StdRng) {
    let storm = Arc::new(Storm::new(level, TASKS).await);
    let tables = "CREATE TABLE given (id BIGINT PRIMARY KEY, k BIGINT NOT NULL) ENGINE=InnoDB; \
                  CREATE TABLE taken (id BIGINT PRIMARY KEY, k BIGINT NOT NULL, times INT NOT NULL, UNIQUE (k)) ENGINE=InnoDB";
    storm.ledger.execute_script(tables).await.unwrap();
    let mut keys: Vec<i64> = (0..KEYS).flat_map(|key| [i64::from(key); TIMES as usize]).collect();
    keys.shuffle(rng);
    let rows = keys.iter().zip(0..).map(|(key, id)| vec![SqlArg::Int(id), SqlArg::Int(*key)]).collect();
    storm.ledger.insert_rows("given", &["id", "k"], rows).await.unwrap();
    let began = Instant::now();
    let (all, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (storm, all, most) = (storm.clone(), all.clone(), most.clone());
        tasks.spawn(async move {
            let session = storm.sessions[task as usize].clone();
            let counted = Counted { session, all, most, of_this_step: AtomicU32::new(0) };
            let template = SqlTemplate::parse(
                "INSERT INTO taken (id, k, times) SELECT id, k, 1 FROM given WHERE id BETWEEN :shard_from AND :shard_to \
                 ON DUPLICATE KEY UPDATE times = times + 1",
            );
            let handler =
                SqlHandler::new(Arc::new(counted), template.unwrap(), Some(BATCH), SqlLimits::default());
            let from = i64::from(task * EACH);
            let slice = ShardSlice::Range { from, to: from + i64::from(EACH) - 1 };
            handler.run(storm.context(task as usize, task, slice)).await.map(drop)
        });
    }
    let ends = tasks.join_all().await;
    let (all, most) = (all.load(Ordering::Relaxed), most.load(Ordering::Relaxed));
    println!("{level}: {all} deadlocks, at most {most} of one step, in {:?}", began.elapsed());
    assert!(ends.iter().all(|end| end.is_ok()), "no attempt fails because of a deadlock: {ends:?}");
    assert!(all > 0, "without one nothing was shown");
    assert_eq!(storm.number("SELECT COUNT(*) FROM taken").await, i64::from(KEYS));
    let once = format!("SELECT COUNT(*) FROM taken WHERE times = {TIMES}");
    assert_eq!(storm.number(&once).await, i64::from(KEYS), "each step once, however often it was tried");
    let row = storm.ledger.execution(storm.execution).await.unwrap().unwrap();
    assert_eq!((row.phase, row.succeeded), (shardcron_domain::execution::Phase::Success, TASKS));
    storm.assert_level().await;
}

/// Somebody holds a row for longer than the server lets anybody wait: the step is told so (error 1205), and done once the row is free.
#[tokio::test(flavor = "multi_thread")]
async fn i_04_a_lock_wait_that_ends_fails_no_run() {
    let storm = Storm::new("READ COMMITTED", 1).await;
    storm
        .ledger
        .execute_script("CREATE TABLE taken (k BIGINT PRIMARY KEY, times INT NOT NULL) ENGINE=InnoDB")
        .await
        .unwrap();
    let (holder, session) = (&storm.sessions[0], storm.sessions[1].clone());
    session.execute_script("SET SESSION innodb_lock_wait_timeout = 1").await.unwrap();
    holder.execute_script("START TRANSACTION; INSERT INTO taken VALUES (1, 1)").await.unwrap();
    let (all, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let counted = Counted { session, all: all.clone(), most, of_this_step: AtomicU32::new(0) };
    let template = "INSERT INTO taken (k, times) VALUES (1, 1) ON DUPLICATE KEY UPDATE times = times + 1";
    let handler = SqlHandler::new(Arc::new(counted), SqlTemplate::parse(template).unwrap(), None, SqlLimits::default());
    let context = storm.context(1, 0, ShardSlice::Modulo { total: 1, item: 0 });
    let step = tokio::spawn(async move { handler.run(context).await.map(drop) });
    tokio::task::spawn_blocking({
        let all = all.clone();
        move || testkit::wait_for("a lock wait", Duration::from_secs(20), || all.load(Ordering::Relaxed) > 0)
    })
    .await
    .unwrap();
    holder.execute_script("COMMIT").await.unwrap();
    step.await.unwrap().unwrap();
    assert_eq!(storm.number("SELECT times FROM taken").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn i_04_records_of_overlapping_batches_are_noted_once() {
    let mut rng = seed();
    for level in ["READ COMMITTED", "REPEATABLE READ"] {
        records_are_noted_once(level, &mut rng).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i_04_deadlocks_in_a_unique_index_fail_no_run() {
    let mut rng = seed();
    for level in ["READ COMMITTED", "REPEATABLE READ"] {
        steps_into_one_index_are_done_once(level, &mut rng).await;
    }
}
