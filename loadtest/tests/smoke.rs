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
fn records_with_killed_workers_are_counted_once() {
    let (well, answer) = loadtest(&["effects", "--records", "10000", "--every-ms", "200", "--seed", "7"]);
    assert!(well, "{answer}");
    assert_eq!(answer["records"].as_u64(), Some(10_000), "{answer}");
    assert!(answer["kills"].as_u64().unwrap() > 0, "{answer}");
    assert_eq!((answer["wrong_counters"].as_u64(), answer["dedup_rows_left"].as_u64()), (Some(0), Some(0)), "{answer}");
    assert!(answer["dedup_rows_peak"].as_u64().is_some(), "{answer}");
}

#[test]
fn what_a_record_costs_is_measured() {
    let (well, answer) = loadtest(&["once", "--records", "10000"]);
    assert!(well, "{answer}");
    for name in ["records_per_second", "bare_insert_per_second"] {
        assert!(answer[name].as_f64().unwrap() > 0.0, "{name}: {answer}");
    }
}

/// How even it becomes depends on what else the machine does: asserted is only that it is measured, and that all was found.
#[test]
fn a_lopsided_job_is_cut_anew() {
    let (_, answer) = loadtest(&["skew", "--runs", "2"]);
    let ratios = answer["longest_over_mean"].as_array().unwrap();
    assert!(ratios.len() == 2 && ratios.iter().all(|ratio| ratio.as_f64().unwrap() >= 1.0), "{answer}");
    assert_eq!(answer["unmatched"], serde_json::json!([52_606, 52_606]), "{answer}");
    assert_eq!(answer["twice"], serde_json::json!([0, 0]), "{answer}");
}

#[test]
fn every_way_to_write_a_job_finds_the_same_although_a_worker_is_killed() {
    let (well, answer) = loadtest(&["ways", "--kills", "1", "--seed", "7"]);
    assert!(well, "{answer}");
    let ways: Vec<(&str, &str)> = answer
        .as_array()
        .unwrap()
        .iter()
        .map(|way| (way["way"].as_str().unwrap(), way["promise"].as_str().unwrap()))
        .collect();
    let once = ["sql", "rust-transaction", "rust-once", "http-key", "map", "sql-elsewhere"];
    assert_eq!(ways.len(), once.len() + 2, "{answer}");
    for (way, promise) in ways {
        assert_eq!(promise, if once.contains(&way) { "once" } else { "at least once" }, "{way}");
    }
    for way in answer.as_array().unwrap() {
        assert_eq!((way["rows"].as_u64(), way["wrong"].as_u64()), (Some(52_606), Some(0)), "{way}");
        assert_eq!((way["kills"].as_u64(), way["kills_hit"].as_u64()), (Some(1), Some(1)), "{way}");
        assert!(way["taken_over"].as_u64().unwrap() > 0, "{way}");
        if way["promise"] == "once" {
            assert_eq!(way["duplicates"].as_u64(), Some(0), "{way}");
        }
        if ["exec", "http", "http-key"].contains(&way["way"].as_str().unwrap()) {
            assert_eq!(way["keys_per_shard_max"].as_u64(), Some(1), "{way}");
            assert!(way["open_at_end"].as_u64().is_some(), "the count looked for what the dead had left: {way}");
        }
        assert_eq!(way["ok"].as_bool(), Some(true), "{way}");
    }
}

/// A second is too short for either: both are tried, and each says why it was cancelled and what stood open.
#[test]
fn a_way_that_does_not_end_is_cancelled_and_the_next_one_runs() {
    let (well, answer) = loadtest(&["ways", "--kills", "1", "--seed", "7", "--only", "sql", "map", "--bound", "1"]);
    assert!(!well, "{answer}");
    let ways = answer.as_array().unwrap();
    assert_eq!(ways.iter().map(|way| way["way"].as_str().unwrap()).collect::<Vec<_>>(), ["sql", "map"], "{answer}");
    for way in ways {
        let faults: Vec<&str> = way["faults"].as_array().unwrap().iter().map(|fault| fault.as_str().unwrap()).collect();
        let said = |words: &str| faults.iter().any(|fault| fault.contains(words));
        assert!(said("not ended within 1 s: ") && said("cancelled: it is cancelled now"), "{faults:?}");
        let open = format!("ways-{} of ", way["way"].as_str().unwrap());
        assert!(said(&open) && said("has not ended: of "), "what stood open: {faults:?}");
        assert_eq!((way["ok"].as_bool(), way["lost"].as_u64()), (Some(false), Some(0)), "{way}");
    }
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

/// The waits of small jobs are figures and no bound here: others use the machine, too.
#[test]
fn tiny_shards_singly_and_together_lose_nothing() {
    let (_, answer) = loadtest(&["groups", "--shards", "20000", "--workers", "2"]);
    for way in ["singly", "grouped"] {
        assert!(answer[way]["shards_per_second"].as_f64().unwrap() > 0.0, "{answer}");
        assert!(answer[way]["small_job_ms"]["p99"].as_f64().unwrap() > 0.0, "{answer}");
    }
    let counts = ["lost", "recorded_twice", "failed"].map(|name| answer[name].as_u64());
    assert_eq!(counts, [Some(0), Some(0), Some(0)], "{answer}");
}
