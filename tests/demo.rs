//! The main job's answer, with processes killed in the middle.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::Value;
use std::process::Command;
use support::Cluster;

fn check(report: &Value, least_killed: usize) {
    assert_eq!(report["unmatched"], 52_606, "{report}");
    assert_eq!(report["distinct_tailnums"], 722, "{report}");
    assert_eq!(report["by_carrier"]["MQ"], 25_397, "{report}");
    assert_eq!(report["matches_published"], true, "{report}");
    assert_eq!(
        (&report["recorded_twice"], &report["lost"], &report["rows_twice"]),
        (&0.into(), &0.into(), &0.into()),
        "{report}"
    );
    assert_eq!(report["shards"], 32);
    assert!(report["killed"].as_array().is_some_and(|k| k.len() >= least_killed), "{report}");
    let taken_over = report["taken_over"].as_u64().unwrap();
    assert!(taken_over >= 1, "{report}");
    assert!(report["attempts"].as_u64().unwrap() >= 32 + taken_over, "{report}");
    assert!(report["seconds"].as_f64().unwrap() < 20.0, "{report}");
}

#[test]
fn the_embedded_demo_has_the_published_answer_ten_times_out_of_ten() {
    for run in 1..=10 {
        let dir = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_shardcron"))
            .args(["demo", "--json"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "run {run}: {text} {}", String::from_utf8_lossy(&output.stderr));
        check(&serde_json::from_str(text.lines().last().unwrap()).unwrap(), 1);
    }
}

#[test]
fn the_cluster_has_it_with_a_worker_and_the_leader_killed() {
    let cluster = Cluster::on_services();
    let report = cluster.json(&["demo", "--cluster"]);
    check(&report, 2);
}
