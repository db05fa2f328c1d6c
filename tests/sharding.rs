//! Shards that are planned when a job fires, and shards that a shard makes, in the real program on the embedded ledger.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "../examples/map_reduce.rs"]
mod map_reduce;
mod support;

use serde_json::Value;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_sdk::{FilePart, Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use std::fmt::Write as _;
use std::process::Command;
use std::time::Duration;
use support::Cluster;

const BOUND: Duration = Duration::from_secs(60);

/// Counts the records of its part of a CSV file.
struct CountRecords;

#[async_trait]
impl ShardHandler for CountRecords {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let part = FilePart::open(&context.slice)?;
        if part.header()? != b"id,text\n" {
            return Err(ShardError::permanent("the header is not the file's"));
        }
        let mut rows = 0;
        for record in csv::ReaderBuilder::new().has_headers(false).from_reader(part).records() {
            let record = record.map_err(|e| ShardError::permanent(e.to_string()))?;
            if record.len() != 2 || &record[1] != "two\nlines" {
                return Err(ShardError::permanent(format!("cut inside a record: {record:?}")));
            }
            rows += 1;
        }
        Ok(ShardOutput::rows(rows))
    }
}

/// Sleeps in proportion to the keys beyond 900 in its range: a lopsided job.
struct Lopsided;

#[async_trait]
impl ShardHandler for Lopsided {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Range { from, to } = context.slice else { return Err(ShardError::permanent("no range")) };
        let dear = u64::try_from(to - from.max(900) + 1).unwrap_or(0);
        tokio::time::sleep(Duration::from_millis(1 + 4 * dear)).await;
        Ok(ShardOutput::rows(from.abs_diff(to) + 1))
    }
}

/// Not a test: the worker program of the tests below, which start it.
#[test]
#[ignore = "the worker of the other tests"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let registry = Registry::default()
        .with("count-records", CountRecords)
        .with("lopsided", Lopsided)
        .with("reconcile-by-carrier", map_reduce::ReconcileByCarrier);
    let _ = shardcron::run_with(arguments, registry);
}

fn start_worker(cluster: &mut Cluster, name: &str) {
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, name);
}

/// Fires a job and waits until it is decided; the execution, or the decision's kind and sentence.
fn fire(cluster: &Cluster, job: &str) -> Result<ExecutionId, (String, String)> {
    let answer = cluster.json(&["trigger", job, "--request-id", &uuid::Uuid::now_v7().to_string(), "--wait"]);
    if let Some(id) = answer["id"].as_str() {
        return Ok(id.parse().unwrap());
    }
    let text = |key: &str| answer[key].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    Err((text("outcome"), text("message")))
}

fn slices(cluster: &Cluster, id: ExecutionId) -> Vec<Value> {
    let shown = cluster.json(&["executions", "show", &id.to_string(), "--shards"]);
    shown["shards"].as_array().unwrap().iter().map(|shard| shard["slice"].clone()).collect()
}

fn rows(cluster: &Cluster, id: ExecutionId) -> u64 {
    cluster.block_on(shardcron_store::Ledger::rows_done(cluster.ledger(), id)).unwrap()
}

#[test]
fn plans_are_made_at_the_firing_and_what_can_not_be_planned_is_a_decision() {
    let mut cluster = Cluster::embedded();
    let file = cluster.path("in.csv");
    let mut text = "id,text\n".to_owned();
    (0..1_000).for_each(|n| writeln!(text, "{n},\"two\nlines\"").unwrap());
    std::fs::write(&file, &text).unwrap();
    let (path, missing) = (file.display(), cluster.path("missing.csv"));
    cluster.apply(&format!(
        r#"
[job.file]
shards = {{ file = {{ path = "{path}", count = 5, format = "csv", header = true }} }}
handler = {{ rust = "count-records" }}
[job.missing]
shards = {{ file = {{ path = "{}" }} }}
handler = {{ rust = "count-records" }}
[job.query]
shards = {{ query = {{ table = "orders", key = "id", where = "paid = 0", count = 4 }} }}
handler = {{ sql = "UPDATE orders SET paid = 1 WHERE paid = 0 AND id BETWEEN :shard_from AND :shard_to" }}
[job.slots]
shards = {{ slots = 8 }}
handler = {{ sql = "UPDATE orders SET seen = seen + 1 WHERE slot BETWEEN :slot_from AND :slot_to" }}
[job.range]
shards = {{ range = {{ from = 1, to = 1000 }}, count = 4, balance = "last" }}
handler = {{ rust = "lopsided" }}
[job.plain]
handler = {{ rust = "noop" }}
"#,
        missing.display()
    ));
    let mut orders =
        "CREATE TABLE orders (id BIGINT PRIMARY KEY, paid INT NOT NULL, seen INT NOT NULL, slot INT NOT NULL);"
            .to_owned();
    for n in 0..2_000_i64 {
        let slot = shardcron_sdk::slot_of(n.to_string().as_bytes());
        write!(orders, "INSERT INTO orders VALUES ({}, {}, 0, {slot});", n * n, n % 2).unwrap();
    }
    cluster.block_on(cluster.ledger().execute_script(&format!("BEGIN;{orders}COMMIT;"))).unwrap();
    cluster.start("scheduler", "scheduler-1");
    // Nobody runs it before the file has changed.
    let id = cluster.json(&["trigger", "file", "--request-id", "changed"]);
    assert_eq!(id["outcome"], "waiting", "{id}");
    let changed = testkit::wait_until_some("the plan", BOUND, || {
        cluster.json(&["executions", "list", "--job", "file"])[0]["id"].as_str().map(|id| id.parse().unwrap())
    });
    std::fs::write(&file, format!("{text}1000,\"two\nlines\"\n")).unwrap();
    start_worker(&mut cluster, "worker-1");
    assert_eq!(cluster.wait_end(changed, BOUND).phase, Phase::Failed);
    let refused = &cluster.block_on(shardcron_store::Ledger::attempts(cluster.ledger(), changed, 10)).unwrap()[0];
    assert!(refused.message.as_deref().unwrap().contains("has changed since the job fired"), "{refused:?}");

    let counted = fire(&cluster, "file").unwrap();
    assert_eq!((cluster.execution(counted).shards_total, rows(&cluster, counted)), (5, 1_001));
    assert!(slices(&cluster, counted)[4]["file"]["to"].as_u64().unwrap() > text.len() as u64);

    let (kind, sentence) = fire(&cluster, "missing").unwrap_err();
    assert!(kind == "invalid_plan" && sentence.contains("missing.csv can't be read"), "{kind}: {sentence}");
    fire(&cluster, "plain").unwrap();

    let paid = fire(&cluster, "query").unwrap();
    assert_eq!(cluster.execution(paid).shards_total, 4);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM orders WHERE paid = 0"), 0);
    assert_eq!(rows(&cluster, paid), 1_000);
    let (kind, sentence) = fire(&cluster, "query").unwrap_err();
    assert!(kind == "skipped_empty" && sentence.contains("no rows"), "{kind}: {sentence}");

    fire(&cluster, "slots").unwrap();
    assert_eq!(cluster.number("SELECT COUNT(*) FROM orders WHERE seen = 1"), 2_000);

    let first = slices(&cluster, fire(&cluster, "range").unwrap());
    let second = slices(&cluster, fire(&cluster, "range").unwrap());
    assert_eq!(first[0]["range"]["to"], 250);
    // The last quarter took nearly all of the time, so most cuts are in it.
    assert!(second[1]["range"]["from"].as_u64().unwrap() > 700, "{second:?}");
    assert_eq!((second.len(), second[3]["range"]["to"].as_u64()), (4, Some(1_000)));
}

#[test]
fn a_broadcast_has_a_shard_for_each_live_worker_and_loses_it_with_the_worker() {
    let mut cluster = Cluster::embedded();
    cluster.apply(
        "[job.everywhere]\nshards = { broadcast = true }\nhandler = { exec = [\"sh\", \"-c\", \"echo $SHARDCRON_WORKER\"] }\n\
         [job.long]\nshards = { broadcast = true }\nhandler = { exec = [\"sleep\", \"600\"] }\n",
    );
    cluster.start("scheduler", "scheduler-1");
    let (kind, sentence) = fire(&cluster, "everywhere").unwrap_err();
    assert!(kind == "invalid_plan" && sentence.contains("no worker of the tier 'core'"), "{kind}: {sentence}");
    for name in ["worker-1", "worker-2"] {
        cluster.start("worker", name);
    }
    cluster.wait_workers(2);
    let id = fire(&cluster, "everywhere").unwrap();
    let row = cluster.execution(id);
    assert_eq!((row.phase, row.shards_total), (Phase::Success, 2));
    let names: Vec<String> =
        slices(&cluster, id).iter().map(|s| s["worker"]["worker"]["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, ["worker-1", "worker-2"]);
    // Each ran at its own worker, whichever asked first.
    let sql = "SELECT COUNT(DISTINCT owner) FROM results WHERE shard_index IN (0, 1)";
    assert_eq!(cluster.number(sql), 2);

    cluster.json(&["trigger", "long"]);
    let long = testkit::wait_until_some("the long one to run", BOUND, || {
        let row = &cluster.json(&["executions", "list", "--job", "long"])[0];
        let id: ExecutionId = row["id"].as_str()?.parse().ok()?;
        (cluster.execution(id).running == Some(2)).then_some(id)
    });
    for name in ["worker-1", "worker-2"] {
        cluster.kill(name);
    }
    let row = cluster.wait_end(long, BOUND);
    assert_eq!((row.phase, row.failed), (Phase::Failed, 2));
    let shown = cluster.json(&["executions", "show", &long.to_string()]).to_string();
    assert!(shown.contains("the worker that alone was to run this shard"), "{shown}");
}

#[test]
fn the_flights_by_map_and_reduce_give_the_same_answer() {
    let mut cluster = Cluster::embedded();
    let folder = format!("{}/examples/reconcile-flights/data", env!("CARGO_MANIFEST_DIR"));
    let job = include_str!("../examples/map-reduce/job.toml").replace("examples/reconcile-flights/data", &folder);
    cluster.apply(&job);
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    let id = fire(&cluster, "reconcile-by-carrier").unwrap();
    let row = cluster.execution(id);
    assert_eq!((row.phase, row.shards_total), (Phase::Success, 18), "the first, sixteen carriers and the reducing one");
    let sql = "SELECT MAX(row_count) FROM results WHERE shard_index = 17";
    assert_eq!(cluster.number(sql), 52_606);
    cluster.assert_exact(id, 18);
    let slices = slices(&cluster, id);
    assert_eq!((&slices[1]["task"]["payload"], &slices[17]["reduce"]["tasks"]), (&"9E".into(), &16.into()));
}

/// The same by a program and by a service, as their examples have it.
#[test]
fn the_flights_by_programs_and_services_that_map_and_reduce() {
    let root = env!("CARGO_MANIFEST_DIR");
    let (example, folder) =
        (format!("{root}/examples/map-reduce-programs"), format!("{root}/examples/reconcile-flights/data"));
    let service = support::Program::listening("python3", &[&format!("{example}/service.py"), "0", &folder]);
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3");
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &example);
    cluster.set("SHARDCRON_WORKER_ALLOW_HTTP", &service.url);
    // Services call back there.
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    let job = include_str!("../examples/map-reduce-programs/job.toml");
    cluster
        .apply(&job.replace("examples/reconcile-flights/data", &folder).replace("http://127.0.0.1:8090", &service.url));
    cluster.start_all(1, 1);
    for (job, shards) in [("by-carrier", 6), ("by-carrier-http", 18), ("by-carrier-callback", 18)] {
        let id = fire(&cluster, job).unwrap();
        let row = cluster.execution(id);
        assert_eq!(
            (row.phase, row.shards_total),
            (Phase::Success, shards),
            "{job}: the first, those that it emitted, the last"
        );
        cluster.assert_exact(id, shards);
        let last = &cluster.json(&["executions", "show", &id.to_string(), "--shards"])["shards"][shards as usize - 1];
        let summary = cluster
            .block_on(shardcron_store::ShardingLedger::sub_results(cluster.ledger(), id, shards - 1, 1))
            .unwrap();
        let summary: Value = serde_json::from_str(summary[0].summary.as_deref().unwrap()).unwrap();
        assert_eq!(
            (summary["unmatched"].as_u64(), &last["slice"]["reduce"]["tasks"]),
            (Some(52_606), &(shards - 2).into())
        );
        assert_eq!(rows(&cluster, id), 2 * 336_776, "{job}: by the sub-tasks, and added up by the last");
    }
}
