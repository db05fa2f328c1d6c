//! Each cell of the fault matrix once, with short times and light load. Services that a cell does not harm are the test kit's shared
//! ones; what it does harm is started for it alone.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

use std::process::Stdio;
use std::process::{Command, Output};

/// Bounds are judged on a quiet machine (`docs/reliability.md`). Here, where other tests run at the same time, a cell may take this
/// much longer; what it may lose, double or miss is nothing, as there.
const SLACK_SECONDS: f64 = 6.0;

fn loadtest(arguments: &[&str]) -> Output {
    let shared = testkit::shared();
    let vhost = shared.fresh_vhost();
    Command::new(env!("CARGO_BIN_EXE_loadtest"))
        .args(arguments)
        .args(["--sql-url", shared.sql_url(), "--amqp-url", &vhost, "--redis-url", shared.redis_url()])
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn cell(name: &str) {
    let output = loadtest(&["faults", "--json", "--fast", "--cell", name]);
    let words = String::from_utf8_lossy(&output.stderr);
    let answer: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{name}: {e}\n{words}"));
    let [row] = answer.as_array().unwrap().as_slice() else { panic!("{answer}") };
    for count in ["lost", "recorded_twice", "firings_missed", "firings_doubled"] {
        assert_eq!(row[count].as_u64(), Some(0), "{name}: {count}\n{words}");
    }
    assert!(row["shards"].as_u64().unwrap() > 50 && row["firings"].as_u64().unwrap() > 5, "{name}: no load\n{answer}");
    let (bound, took) = (row["bound_seconds"].as_f64().unwrap(), row["recovered_seconds"].as_f64());
    let took = took.unwrap_or_else(|| panic!("{name}: it did not recover\n{words}"));
    assert!(took <= bound + SLACK_SECONDS, "{name}: {took} s, the bound is {bound} s\n{words}");
    let only_late = row["ok"].as_bool() == Some(false) && took > bound && words.lines().count() <= 3;
    assert!(row["ok"].as_bool() == Some(true) || only_late, "{name}:\n{words}");
    assert_eq!(output.status.success(), row["ok"].as_bool().unwrap(), "the exit code says what the answer says");
}

macro_rules! cells {
    ($($test:ident = $name:literal;)*) => {
        $(#[test] fn $test() { cell($name); })*

        /// A cell that is added to the matrix needs its line here.
        #[test]
        fn every_cell_has_its_test() {
            let output = Command::new(env!("CARGO_BIN_EXE_loadtest")).args(["faults", "--cell", "none/such"]).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "misused");
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            let names = words.split("there are ").nth(1).unwrap().lines().next().unwrap();
            let names: Vec<&str> = names.split(", ").map(str::trim).collect();
            assert_eq!(names, [$($name),*]);
        }
    };
}

cells! {
    leader_killed = "leader/killed";
    leader_frozen = "leader/frozen";
    leader_cut = "leader/cut";
    leader_cut_rabbitmq = "leader/cut-rabbitmq";
    leader_cut_redis = "leader/cut-redis";
    leader_cut_mysql = "leader/cut-mysql";
    leader_slow = "leader/slow";
    worker_killed = "worker/killed";
    worker_frozen = "worker/frozen";
    worker_cut = "worker/cut";
    worker_cut_rabbitmq = "worker/cut-rabbitmq";
    worker_cut_redis = "worker/cut-redis";
    worker_cut_mysql = "worker/cut-mysql";
    worker_slow = "worker/slow";
    rabbitmq_killed = "rabbitmq/killed";
    rabbitmq_frozen = "rabbitmq/frozen";
    rabbitmq_wiped = "rabbitmq/wiped";
    rabbitmq_cut = "rabbitmq/cut";
    rabbitmq_slow = "rabbitmq/slow";
    redis_killed = "redis/killed";
    redis_frozen = "redis/frozen";
    redis_wiped = "redis/wiped";
    redis_cut = "redis/cut";
    redis_slow = "redis/slow";
    mysql_killed = "mysql/killed";
    mysql_frozen = "mysql/frozen";
    mysql_cut = "mysql/cut";
    mysql_slow = "mysql/slow";
}
