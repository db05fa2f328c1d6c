//! What a person does when an execution went wrong: retry, cancel, replay, drop. On whole clusters of real processes.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::Value;
use shardcron_broker::Broker;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::messages::TriggerRequest;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};
use support::{Cluster, slack};
use testkit::{wait_for, wait_until_some};

const BOUND: Duration = Duration::from_secs(25);

/// Touches a file twenty times a second until it is told to stop.
struct Beats;

#[async_trait]
impl ShardHandler for Beats {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let file = context.params["beat"].as_str().unwrap_or_default().to_owned();
        while !context.should_stop() {
            let _ = std::fs::write(&file, b"x");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(ShardError::stopped("told to stop"))
    }
}

/// Not a test: the worker program of the test below, which starts it.
#[test]
#[ignore = "the worker of the other test"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let _ = shardcron::run_with(arguments, Registry::default().with("beats", Beats));
}

/// Milliseconds UTC of the last time that a file was written.
fn written_ms(path: &Path) -> Option<i64> {
    let at = std::fs::metadata(path).and_then(|m| m.modified()).ok()?;
    i64::try_from(at.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_millis()).ok()
}

/// A program with a child, and a Rust handler that listens: both are silent a second after the cancel, and what waits never starts.
#[test]
fn a_cancel_reaches_running_handlers_within_a_second() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=2");
    let (child, rust, begun) = (cluster.path("child"), cluster.path("rust"), cluster.path("begun"));
    let script = format!(
        "echo $SHARDCRON_SHARD_INDEX >> {}; (while true; do echo x > {}; sleep 0.05; done) & wait",
        begun.display(),
        child.display()
    );
    cluster.apply(&format!(
        "[job.program]\nshards = {{ modulo = 5 }}\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\n\
         [job.rust]\nhandler = {{ rust = \"beats\" }}\nparams = {{ beat = \"{}\" }}\n",
        rust.display()
    ));
    cluster.start("scheduler", "scheduler-1");
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, "worker-1");
    cluster.wait_workers(1);
    for (job, beat) in [("program", &child), ("rust", &rust)] {
        let id = cluster.trigger(job);
        wait_for("it to run", BOUND, || beat.exists());
        let id_text = id.to_string();
        let answer = cluster.json(&["executions", "cancel", &id_text, "--reason", "wrong date"]);
        assert_eq!(answer["state"], "cancelled");
        let row = cluster.execution(id);
        let asked_ms = row.ended_ms.unwrap();
        assert_eq!((row.phase, row.succeeded, row.cancelled), (Phase::Cancelled, 0, row.shards_total));
        // It writes twenty times a second while it runs.
        wait_for("it to be silent", BOUND, || written_ms(beat).is_some_and(|at| now_ms() - at > 800));
        let ran_on_ms = written_ms(beat).unwrap() - asked_ms;
        println!("{job}: silent {ran_on_ms} ms after the cancel");
        assert!(ran_on_ms < 1_000 * i64::from(slack()), "{job} ran on for {ran_on_ms} ms");
        let shown = cluster.json(&["executions", "show", &id_text]);
        assert_eq!(shown["cancelled"]["reason"], "wrong date");
        // Again: nothing changes, and it is said that it is cancelled.
        assert!(cluster.cli(&["executions", "cancel", &id_text]).status.success());
    }
    let begun = std::fs::read_to_string(begun).unwrap();
    assert!(begun.lines().count() <= 4, "of five shards those with a slot, and what was claimed ahead: {begun:?}");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM results"), 0);
    let unknown = ExecutionId(uuid::Uuid::from_u128(1)).to_string();
    assert_eq!(cluster.cli(&["executions", "cancel", &unknown]).status.code(), Some(2));
}

fn now_ms() -> i64 {
    i64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

fn code(cluster: &Cluster, arguments: &[&str]) -> (i32, String) {
    let output = cluster.cli(arguments);
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8_lossy(&text).into_owned())
}

/// Shards fail for good, somebody mends the cause and sends them back, though the leader is killed right then: they run under the next
/// attempts, the others do not run again, and who follows hears of it.
#[test]
fn failed_shards_are_retried_and_the_rest_is_left_alone() {
    let mut cluster = Cluster::on_services();
    let (ran, mended) = (cluster.path("ran"), cluster.path("mended"));
    let script = format!(
        "echo $SHARDCRON_SHARD_INDEX/$SHARDCRON_ATTEMPT >> {}; test $SHARDCRON_SHARD_INDEX = 0 || test -e {}",
        ran.display(),
        mended.display()
    );
    cluster.apply(&format!(
        "[job.load]\nshards = {{ modulo = 3 }}\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\n\
         retry = {{ attempts = 2, first = \"50ms\", max = \"50ms\" }}\n\
         [job.next]\nhandler = {{ rust = \"noop\" }}\nafter = [\"load\"]\n"
    ));
    cluster.start_all(2, 1);
    let (leader, epoch) = cluster.wait_leader(0);
    let id = cluster.trigger("load");
    let id_text = id.to_string();
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Failed);
    wait_for("the follower's refusal", BOUND, || cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 11") == 1);
    let dead = cluster.json(&["dead", "list", "--job", "load"]);
    assert_eq!(dead.as_array().unwrap().len(), 2);
    let letter = dead[0]["id"].to_string();
    let shown = cluster.json(&["dead", "show", &letter]);
    assert_eq!(shown["attempts"].as_array().unwrap().len(), 2, "{shown}");
    let (exit, text) = code(&cluster, &["executions", "retry", &id_text, "--shard", "0-1"]);
    assert!(exit == 2 && text.contains("shard 0 has not failed (success)"), "{exit} {text}");

    std::fs::write(&mended, b"").unwrap();
    let one = cluster.json(&["dead", "replay", &letter, "--reason", "mended"]);
    assert_eq!(one[0]["outcome"], "running", "{one}");
    cluster.kill(&leader);
    let rest = cluster.json(&["executions", "retry", &id_text, "--reason", "mended"]);
    assert_eq!(
        (rest["shards"].as_array().unwrap().len(), &rest["shards"][0]["attempt"]),
        (1, &Value::from(3)),
        "{rest}"
    );
    cluster.wait_leader(epoch);
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.succeeded, row.failed), (Phase::Success, 3, 0));
    let mut all: Vec<String> = std::fs::read_to_string(&ran).unwrap().lines().map(str::to_owned).collect();
    all.sort();
    assert_eq!(all, ["0/1", "1/1", "1/2", "1/3", "2/1", "2/2", "2/3"]);
    assert_eq!(cluster.json(&["dead", "list"]).as_array().unwrap().len(), 0);
    let after = "SELECT COUNT(*) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name = 'next'";
    wait_for("the follower", BOUND, || cluster.number(after) == 1);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM audit WHERE action = 'retry'"), 2);
    let (exit, text) = code(&cluster, &["executions", "retry", &id_text]);
    assert!(exit == 1 && text.contains("ended success"), "{exit} {text}");
    assert_eq!(cluster.cli(&["dead", "show", &letter]).status.code(), Some(2), "settled");
}

/// A message that names no job: shown, corrected, fired once; others dropped with a reason.
#[test]
fn dead_messages_are_shown_corrected_and_dropped() {
    let mut cluster = Cluster::on_services();
    cluster.apply("[job.quick]\nhandler = { rust = \"noop\" }\n");
    cluster.start_all(1, 1);
    let rabbit = cluster.rabbit();
    for job in ["qick", "qick", "nothing-like-it"] {
        let request = TriggerRequest { job: job.into(), ..TriggerRequest::default() };
        wait_until_some("the trigger to be taken", BOUND, || cluster.block_on(rabbit.send_trigger(&request)).ok());
    }
    wait_for("three dead letters", BOUND, || cluster.number("SELECT COUNT(*) FROM dead_letters") == 3);
    let list = cluster.json(&["dead", "list", "--kind", "message"]);
    let ids: Vec<String> = list.as_array().unwrap().iter().map(|d| d["id"].to_string()).collect();
    let [third, second, first] = ids.as_slice() else { panic!("{list}") };
    let (_, text) = code(&cluster, &["dead", "show", first]);
    assert!(text.contains("did you mean 'quick'?") && text.contains("dead replay"), "{text}");
    let (exit, text) = code(&cluster, &["dead", "replay", first]);
    assert!(exit == 1 && text.contains("refused") && text.contains("--body"), "{exit} {text}");
    let fired = cluster.json(&["dead", "replay", first, "--body", "{\"job\": \"quick\"}"]);
    assert_eq!(fired[0]["outcome"], "fired", "{fired}");
    let id: ExecutionId = fired[0]["execution"].as_str().unwrap().parse().unwrap();
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    let key = format!("SELECT COUNT(*) FROM executions WHERE fire_key = 'request:dead-letter-{first}'");
    assert_eq!(cluster.number(&key), 1);
    assert_eq!(code(&cluster, &["dead", "replay", first]).0, 2, "it is settled");
    assert_eq!(code(&cluster, &["dead", "drop", second]).0, 2, "without a reason");
    let range = format!("{second}-{third}");
    assert_eq!(cluster.json(&["dead", "drop", &range, "--reason", "a test"])["dropped"].as_array().unwrap().len(), 2);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM audit WHERE action = 'dead_drop' AND after_text = 'a test'"), 2);
    assert_eq!(code(&cluster, &["dead", "drop", "--all", "--reason", "nothing"]).0, 0, "none is left");
    assert_eq!(code(&cluster, &["dead", "replay", "x"]).0, 2);
}

/// Of four shards on two workers, those of the worker that dies are tried again, and the others are not (T-03).
#[test]
fn t_03_only_the_shards_of_a_lost_worker_are_tried_again() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=2");
    let (ran, go) = (cluster.path("ran"), cluster.path("go"));
    let script = format!(
        "echo $SHARDCRON_SHARD_INDEX/$SHARDCRON_ATTEMPT >> {}; while test ! -e {}; do sleep 0.05; done",
        ran.display(),
        go.display()
    );
    cluster.apply(&format!(
        "[job.four]\nshards = {{ modulo = 4 }}\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\n\
         retry = {{ attempts = 3, first = \"2s\" }}\n"
    ));
    cluster.start_all(1, 2);
    let id = cluster.trigger("four");
    let lines = || std::fs::read_to_string(&ran).unwrap_or_default().lines().count();
    wait_for("all four to run", BOUND, || lines() == 4);
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT owner) FROM shards WHERE state = 1"), 2);
    cluster.kill("worker-1");
    std::fs::write(&go, b"").unwrap();
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, 4));
    let lost = cluster.number("SELECT COUNT(*) FROM attempts");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM attempts WHERE outcome IN ('worker_lost', 'taken_over')"), lost);
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT owner) FROM attempts"), 1, "of one worker");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM results WHERE attempt = 2"), lost);
    assert!((1..=3).contains(&lost), "{lost} of four were at the worker that died");
    assert_eq!(i64::try_from(lines()).unwrap(), 4 + lost, "and nothing else ran twice");
}

/// A job of four shards fails in the middle of each; before its retry it is changed to six. The retry goes on with the four that it was
/// fired with, and every key is there once (C-06).
#[test]
fn c_06_a_retry_keeps_the_plan_of_its_execution() {
    let mut cluster = Cluster::on_services();
    let job = |count: u32| {
        format!(
            "[job.copy]\nshards = {{ range = {{ from = 1, to = 120 }}, count = {count} }}\nretry = {{ attempts = 1 }}\n\
             handler = {{ sql = \"INSERT INTO sink (id, total) SELECT id, :shards_total FROM source \
             WHERE id BETWEEN :shard_from AND :shard_to\", chunk = 5 }}\n"
        )
    };
    let tables = "CREATE TABLE source (id BIGINT PRIMARY KEY); CREATE TABLE sink (id BIGINT PRIMARY KEY, total INT)";
    cluster.block_on(cluster.ledger().execute_script(tables)).unwrap();
    let rows = (1..=120).map(|id| vec![shardcron_store::SqlArg::Int(id)]).collect();
    cluster.block_on(cluster.ledger().insert_rows("source", &["id"], rows)).unwrap();
    // In the second half of each shard of thirty, somebody else's row stands in the way.
    let blocked = "INSERT INTO sink VALUES (18, 0), (48, 0), (78, 0), (108, 0)";
    cluster.block_on(cluster.ledger().execute_script(blocked)).unwrap();
    cluster.apply(&job(4));
    cluster.start_all(1, 1);
    let id = cluster.trigger("copy");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.shards_total, row.failed), (Phase::Failed, 4, 4));
    assert_eq!(cluster.number("SELECT COUNT(*) FROM sink WHERE total = 4"), 60, "half of it is done");

    cluster.block_on(cluster.ledger().execute_script("DELETE FROM sink WHERE total = 0")).unwrap();
    cluster.apply(&job(6));
    cluster.json(&["executions", "retry", &id.to_string(), "--reason", "the rows are gone"]);
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.shards_total, row.succeeded), (Phase::Success, 4, 4));
    cluster.assert_exact(id, 4);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM sink"), 120, "none is lost, none was done twice");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM sink WHERE total = 4"), 120, "all by the plan of four");

    cluster.block_on(cluster.ledger().execute_script("DELETE FROM sink")).unwrap();
    let next = cluster.trigger("copy");
    let row = cluster.wait_end(next, BOUND);
    assert_eq!((row.phase, row.shards_total), (Phase::Success, 6));
    assert_eq!(cluster.number("SELECT COUNT(*) FROM sink WHERE total = 6"), 120);
}
