//! What a job has preloaded by queries, and how a handler says where its keys come from: a real worker process on real databases.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::Value;
use shardcron_sdk::{CacheLoader, Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use support::Cluster;

const BOUND: Duration = Duration::from_secs(30);

/// Appends a line to a file in the worker's folder.
fn note(file: &str, line: &str) -> Result<(), ShardError> {
    let failed = |e: std::io::Error| ShardError::permanent(format!("{file}: {e}"));
    let mut to = std::fs::OpenOptions::new().create(true).append(true).open(file).map_err(failed)?;
    to.write_all(format!("{line}\n").as_bytes()).map_err(failed)
}

/// The source: every user but those whose number is beyond 100.
struct Users;

#[async_trait]
impl CacheLoader for Users {
    async fn load(&self, keys: &[String]) -> Result<Vec<(String, Value)>, ShardError> {
        note("loaded", &keys.join(","))?;
        match keys {
            [key] if key == "66" => panic!("the source broke"),
            _ => {}
        }
        let exists = |key: &&String| key.parse::<u32>().is_ok_and(|n| n <= 100);
        Ok(keys.iter().filter(exists).map(|key| (key.clone(), format!("user {key}").into())).collect())
    }
}

/// Asks for the keys of its parameter `keys`, and notes which of them it has to load itself.
struct Reads;

#[async_trait]
impl ShardHandler for Reads {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let cache = context.cache("user");
        let mut found = Vec::new();
        for key in context.params["keys"].as_array().unwrap() {
            let key = key.as_str().unwrap();
            let load = async {
                note("asked", key)?;
                Ok(Some(format!("asked {key}")))
            };
            found.push(cache.get::<String, _>(key, load).await?);
        }
        Ok(ShardOutput { rows: Some(1), summary: Some(serde_json::json!(found)), ..ShardOutput::default() })
    }

    fn cache_loader(&self, cache: &str) -> Option<Arc<dyn CacheLoader>> {
        (cache == "user").then(|| Arc::new(Users) as Arc<dyn CacheLoader>)
    }
}

/// Not a test: the worker program of the tests below, which start it.
#[test]
#[ignore = "the worker of the other tests"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let _ = shardcron::run_with(arguments, Registry::default().with("reads", Reads));
}

fn start_worker(cluster: &mut Cluster) {
    cluster.set("SHARDCRON_LOG_FILTER", "info,shardcron_handlers=debug");
    cluster.start("scheduler", "scheduler-1");
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, "worker-1");
    cluster.wait_workers(1);
}

const USERS: &str = "CREATE TABLE users (id BIGINT PRIMARY KEY, region VARCHAR(10)); \
                     INSERT INTO users VALUES (1, 'eu'), (2, 'eu'), (3, 'us'), (101, 'eu')";

fn lines(cluster: &Cluster, file: &str) -> Vec<String> {
    let text = std::fs::read_to_string(cluster.path(file)).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn said(cluster: &Cluster, words: &str) -> usize {
    cluster.log("worker-1").lines().filter(|line| line.contains(words)).count()
}

/// Four shards, one query, one load of its keys; what is found to be missing is known to be missing, too.
fn a_query_fills_the_memory_once(mut cluster: Cluster) {
    cluster.block_on(cluster.ledger().execute_script(USERS)).unwrap();
    cluster.apply(
        "[job.reads]\nhandler = { rust = \"reads\" }\nshards = { modulo = 4 }\n\
         preload = [\"user:7\", { cache = \"user\", query = \"SELECT id FROM users WHERE region = :region ORDER BY id\" }]\n\
         params = { region = \"eu\", keys = [\"1\", \"2\", \"3\", \"7\", \"101\"] }\n",
    );
    start_worker(&mut cluster);
    let id = cluster.trigger("reads");
    assert_eq!(cluster.wait_end(id, BOUND).succeeded, 4, "{}", cluster.log("worker-1"));
    assert_eq!(said(&cluster, "asking the query of a preload"), 1);
    assert_eq!(lines(&cluster, "loaded"), ["7", "1,2,101"], "each key once for all shards");
    assert_eq!(lines(&cluster, "asked"), ["3"], "what nobody preloaded");
    let sum = "SELECT COUNT(*) FROM results WHERE summary LIKE '%user 1%user 2%asked 3%user 7%null%'";
    assert_eq!(cluster.number(sum), 4);
    // Another execution asks again: the data may have changed. Its keys are in memory still.
    let again = cluster.trigger("reads");
    assert_eq!(cluster.wait_end(again, BOUND).succeeded, 4);
    assert_eq!(said(&cluster, "asking the query of a preload"), 2);
    assert_eq!(lines(&cluster, "loaded").len(), 2);
}

#[test]
fn a_query_fills_the_memory_once_on_sqlite() {
    a_query_fills_the_memory_once(Cluster::embedded());
}

#[test]
fn a_query_fills_the_memory_once_on_services() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_REDIS_PREFIX", &testkit::unique_prefix());
    a_query_fills_the_memory_once(cluster);
}

/// A query binds what its shard is, so each shard has its own; in another database, whose URL stands in a file.
#[test]
fn a_query_in_another_database_binds_the_slice() {
    let mut cluster = Cluster::embedded();
    let url = format!("sqlite://{}", cluster.path("crm.db").display());
    std::fs::write(cluster.path("crm-url"), format!("{url}\n")).unwrap();
    let file = format!("[databases]\ncrm = \"file:{}\"\n", cluster.path("crm-url").display());
    std::fs::write(cluster.path("shardcron.toml"), file).unwrap();
    let crm = cluster.block_on(SqlLedger::connect(&url, SqlOptions::default())).unwrap();
    cluster.block_on(crm.execute_script(USERS)).unwrap();
    cluster.apply(
        "[job.reads]\nhandler = { rust = \"reads\" }\nshards = { modulo = 2 }\n\
         preload = [{ cache = \"user\", query = \"SELECT id FROM users WHERE id % :modulo_total = :modulo_item ORDER BY id\", \
         database = \"crm\" }]\nparams = { keys = [] }\n",
    );
    start_worker(&mut cluster);
    let id = cluster.trigger("reads");
    assert_eq!(cluster.wait_end(id, BOUND).succeeded, 2, "{}", cluster.log("worker-1"));
    assert_eq!(said(&cluster, "asking the query of a preload"), 2);
    let mut loaded = lines(&cluster, "loaded");
    loaded.sort();
    assert_eq!(loaded, ["1,3,101", "2"]);
    // Nothing is made where somebody only reads.
    let tables = cluster.block_on(crm.query("SELECT name FROM sqlite_master WHERE type = 'table'", &[])).unwrap();
    assert_eq!(tables.len(), 1, "{tables:?}");
}

/// Neither a query that writes, nor one that can't be, nor a loader that breaks ends an attempt; each is said once.
#[test]
fn what_fails_is_said_once_and_fails_nothing() {
    let mut cluster = Cluster::embedded();
    cluster.block_on(cluster.ledger().execute_script(USERS)).unwrap();
    cluster.apply(
        "[job.reads]\nhandler = { rust = \"reads\" }\nshards = { modulo = 4 }\n\
         preload = [{ cache = \"user\", query = \"WITH x AS (SELECT 1) DELETE FROM users\" }, \
         { cache = \"user\", query = \"SELECT id FROM users; SELECT 1\" }, \
         { cache = \"user\", query = \"SELECT id FROM users WHERE region = :regoin\" }, \
         { cache = \"user\", query = \"SELECT id FROM nowhere\" }, \
         { cache = \"user\", query = \"SELECT 1\", database = \"crm\" }]\n\
         params = { region = \"eu\", keys = [\"1\"] }\n\
         [job.breaks]\nhandler = { rust = \"reads\" }\npreload = [\"user:66\"]\nparams = { keys = [\"66\"] }\n",
    );
    start_worker(&mut cluster);
    let id = cluster.trigger("reads");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.succeeded, row.failed), (4, 0), "{}", cluster.log("worker-1"));
    assert_eq!(cluster.number("SELECT COUNT(*) FROM users"), 4, "nothing was deleted");
    assert_eq!(cluster.number("SELECT MAX(attempt) FROM results"), 1);
    for words in ["several statements", "did you mean ':region'?", "nowhere", "has no database 'crm'"] {
        assert_eq!(said(&cluster, words), 1, "{words}: {}", cluster.log("worker-1"));
    }
    assert_eq!(said(&cluster, "the query of a preload failed"), 5);
    let id = cluster.trigger("breaks");
    assert_eq!(cluster.wait_end(id, BOUND).succeeded, 1);
    assert_eq!(said(&cluster, "cache loader broke off"), 1);
    assert_eq!(lines(&cluster, "asked"), ["1", "66"]);
}
