//! The program's own path through each scenario, small, on the test kit's shared services.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A scenario that hangs is killed, and its words are shown.
const PATIENCE: Duration = Duration::from_secs(180);

fn loadtest(arguments: &[&str]) -> (bool, serde_json::Value) {
    let shared = testkit::shared();
    let dir = tempfile::tempdir().unwrap();
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_loadtest"))
        .args(arguments)
        .args([
            "--json",
            "--sql-url",
            shared.sql_url(),
            "--amqp-url",
            &shared.fresh_vhost(),
            "--redis-url",
            shared.redis_url(),
        ])
        .stdin(Stdio::null())
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&err).unwrap())
        .spawn()
        .unwrap();
    let status = testkit::poll(PATIENCE, || child.try_wait().unwrap());
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let status = status.unwrap_or_else(|| panic!("{arguments:?} did not end within {PATIENCE:?}:\n{}", read(&err)));
    let answer =
        serde_json::from_str(read(&out).trim()).unwrap_or_else(|e| panic!("{e}: {}\n{}", read(&out), read(&err)));
    (status.success(), answer)
}

#[test]
fn a_small_throughput_loses_nothing() {
    let (well, answer) = loadtest(&["throughput", "--shards", "2000", "--samples", "20"]);
    assert!(well, "{answer}");
    for name in ["shards_per_second", "broker_ceiling_per_second", "ledger_ceiling_per_second"] {
        assert!(answer[name].as_f64().unwrap() > 0.0, "{name}: {answer}");
    }
    assert_eq!((answer["lost"].as_u64(), answer["recorded_twice"].as_u64()), (Some(0), Some(0)));
    assert!(answer["fire_to_start_ms"]["p99"].as_f64() >= answer["fire_to_start_ms"]["p50"].as_f64(), "{answer}");
    assert!(answer["rss_mib"]["worker-1"].as_f64().unwrap() > 1.0, "{answer}");
}

#[test]
fn a_few_killed_workers_lose_nothing() {
    let (well, answer) = loadtest(&["worker-kill", "--seconds", "6", "--seed", "7"]);
    assert!(well, "{answer}");
    assert!(answer["kills"].as_u64().unwrap() > 0, "{answer}");
    assert_eq!((answer["lost"].as_u64(), answer["recorded_twice"].as_u64()), (Some(0), Some(0)));
}

#[test]
fn other_machines_are_refused() {
    let refused = Command::new(env!("CARGO_BIN_EXE_loadtest"))
        .args(["throughput", "--redis-url", "redis://192.0.2.1:6379"])
        .output()
        .unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("this machine only"));
}
