//! The examples of programs and services, as people would run them: real processes, workers killed in the middle, effects counted where
//! they went.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod support;

use serde_json::Value;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_store::Ledger;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::{Cluster, Program};

const BOUND: Duration = Duration::from_secs(120);
/// Flights whose plane is not in the register, as published with the data.
const UNMATCHED: i64 = 52_606;
const FLIGHTS: u64 = 336_776;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

fn cluster() -> Cluster {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3,sh");
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &examples().display().to_string());
    cluster.set("SHARDCRON_WORKER_LEFTOVERS", "kill");
    cluster
}

fn apply(cluster: &Cluster, job: &str, change: impl Fn(String) -> String) {
    let text = std::fs::read_to_string(examples().join(job).join("job.toml")).unwrap();
    cluster.apply(&change(text));
}

fn trigger(cluster: &Cluster, job: &str, params: &[String]) -> ExecutionId {
    let mut arguments = vec!["trigger", job];
    arguments.extend(params.iter().flat_map(|p| ["--param", p.as_str()]));
    let answer = cluster.json(&arguments);
    answer["execution"].as_str().unwrap_or_else(|| panic!("not fired: {answer}")).parse().unwrap()
}

/// Kills a worker, and starts another, each time that so many more records are done.
fn kill_workers(cluster: &mut Cluster, id: ExecutionId, kills: u64, measure: impl Fn(&Cluster) -> u64) {
    for n in 1..=kills {
        let bar = FLIGHTS * n / (kills + 2);
        testkit::wait_for(&format!("{bar} records"), BOUND, || {
            cluster.execution(id).phase.is_terminal() || measure(cluster) >= bar
        });
        assert!(!cluster.execution(id).phase.is_terminal(), "it ended before kill {n} of {kills}");
        cluster.kill(&format!("worker-{n}"));
        cluster.start("worker", &format!("worker-{}", n + 2));
    }
}

/// One number from a database of the example's own, asked by Python, which has SQLite.
fn ask(database: &Path, sql: &str) -> i64 {
    let program = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone()[0])";
    let output = Command::new("python3").args(["-c", program]).arg(database).arg(sql).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    text.parse().unwrap_or_else(|_| panic!("{sql}: {text} {}", String::from_utf8_lossy(&output.stderr)))
}

/// reconcile-flights by a Python program. At least once: a chunk may be done twice, under the same key; here its effects have keys.
fn reconcile_by_python(kills: u64, pause_ms: u64) {
    let mut cluster = cluster();
    apply(&cluster, "reconcile-python", |text| text);
    cluster.start_all(1, 2);
    let target = cluster.path("unmatched.db");
    let data = examples().join("reconcile-flights/data");
    let params =
        [format!("data={}", data.display()), format!("target={}", target.display()), format!("pause_ms={pause_ms}")];
    let id = trigger(&cluster, "reconcile-python", &params);
    kill_workers(&mut cluster, id, kills, |c| c.block_on(c.ledger().rows_done(id)).unwrap());
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}");
    cluster.assert_exact(id, row.shards_total);
    assert_eq!(cluster.block_on(cluster.ledger().rows_done(id)).unwrap(), FLIGHTS, "each record under one checkpoint");
    assert_eq!(ask(&target, "SELECT COUNT(*) FROM unmatched"), UNMATCHED);
    let keys = ask(&target, "SELECT COUNT(DISTINCT key) FROM starts");
    assert_eq!(keys, i64::from(row.shards_total), "the key is the shard's, whatever the attempt");
    let (starts, twice) = (
        ask(&target, "SELECT COUNT(*) FROM starts"),
        ask(&target, "SELECT COALESCE(SUM(times - 1), 0) FROM unmatched"),
    );
    println!("{kills} kills: {starts} starts of {keys} shards, {twice} findings written again");
    if kills > 0 {
        assert!(starts > keys, "some shard was begun again");
        let resumed = ask(
            &target,
            "SELECT COUNT(*) FROM starts WHERE attempt > 1 AND begin > (SELECT MIN(begin) FROM starts s WHERE s.key = starts.key)",
        );
        assert!(resumed > 0, "an attempt went on from a checkpoint");
    }
}

#[test]
fn reconcile_flights_by_a_python_program_with_workers_killed() {
    reconcile_by_python(2, 30);
}

/// The example's service.
fn service(target: &Path) -> Program {
    let (script, folder) = (examples().join("reconcile-http/service.py"), examples().join("reconcile-flights/data"));
    let words = [&script, Path::new("0"), &folder, target].map(|word| word.display().to_string());
    Program::listening("python3", &words.each_ref().map(String::as_str))
}

/// reconcile-flights by a service. At least once: it may be asked again under the same key, which it honours.
fn reconcile_by_http(job: &str, kills: u64, pause_ms: u64) {
    let mut cluster = cluster();
    let target = cluster.path("reconciled.db");
    let service = service(&target);
    cluster.set("SHARDCRON_WORKER_ALLOW_HTTP", &service.url);
    apply(&cluster, "reconcile-http", |text| text.replace("http://127.0.0.1:8090", &service.url));
    cluster.start_all(1, 2);
    let id = trigger(&cluster, job, &[format!("pause_ms={pause_ms}")]);
    kill_workers(&mut cluster, id, kills, |c| {
        let row = c.execution(id);
        FLIGHTS * u64::from(row.succeeded) / u64::from(row.shards_total)
    });
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}");
    cluster.assert_exact(id, row.shards_total);
    assert_eq!(ask(&target, "SELECT COUNT(*) FROM unmatched"), UNMATCHED, "exact, since the service honours the key");
    let (calls, keys) =
        (ask(&target, "SELECT COUNT(*) FROM calls"), ask(&target, "SELECT COUNT(DISTINCT key) FROM calls"));
    println!("{job}, {kills} kills: {calls} calls of {keys} shards");
    assert_eq!(keys, i64::from(row.shards_total), "the key is the shard's, whatever the attempt");
    assert!(calls >= keys);
}

#[test]
fn reconcile_flights_by_a_service_with_workers_killed() {
    reconcile_by_http("reconcile-http", 2, 150);
}

#[test]
fn reconcile_flights_by_a_service_that_takes_its_time() {
    reconcile_by_http("reconcile-http-later", 1, 150);
}

fn logs(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.cli(&[&["logs"], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_shell_example_and_what_it_wrote() {
    let mut cluster = cluster();
    let reports = cluster.path("reports");
    std::fs::create_dir(&reports).unwrap();
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &examples().join("shell-exec").display().to_string());
    apply(&cluster, "shell-exec", |text| text.replace("/tmp/reports", &reports.display().to_string()));
    cluster.start_all(1, 1);
    let id = trigger(&cluster, "days", &[]);
    // It ends by itself, and then everything is there: output is written before the end is recorded.
    let followed = logs(&cluster, &[&id.to_string(), "-f"]);
    assert_eq!(cluster.execution(id).phase, Phase::Success);
    let mut lines: Vec<&str> = followed.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "0#1 | days 1 to 92 are done",
            "1#1 | days 93 to 183 are done",
            "2#1 | days 184 to 274 are done",
            "3#1 | days 275 to 365 are done"
        ]
    );
    assert_eq!(std::fs::read_dir(&reports).unwrap().count(), 365);
    assert_eq!(cluster.block_on(cluster.ledger().rows_done(id)).unwrap(), 365);
    assert_eq!(logs(&cluster, &[&id.to_string(), "2"]), "days 184 to 274 are done\n");
    let json: Value = serde_json::from_str(logs(&cluster, &[&id.to_string(), "1", "--json"]).trim()).unwrap();
    let expected = ("stdout", 1, "days 93 to 183 are done");
    assert_eq!(
        (json["stream"].as_str().unwrap(), json["shard"].as_i64().unwrap(), json["text"].as_str().unwrap()),
        expected
    );
    assert_eq!(logs(&cluster, &[&id.to_string(), "--attempt", "2"]), "");
    let missing = cluster.cli(&["logs", &id.to_string(), "4"]);
    assert_eq!(missing.status.code(), Some(2), "{}", String::from_utf8_lossy(&missing.stderr));
}
