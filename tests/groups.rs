//! Tiny shards of a large execution share messages: nothing of a message that was half done is lost or done twice in the ledger.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_broker::Broker;
use shardcron_domain::execution::Phase;
use shardcron_store::Ledger;
use std::time::Duration;
use support::{Cluster, get, web_of};

const BOUND: Duration = Duration::from_secs(90);

fn cluster(shards: u32) -> Cluster {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    cluster.apply(&format!(
        "[job.tiny]\nshards = {{ count = {shards} }}\nhandler = {{ rust = \"noop\" }}\n\
         [job.alone]\nshards = {{ count = 3000, group = 1 }}\nhandler = {{ rust = \"noop\" }}\n"
    ));
    cluster.start_all(1, 2);
    cluster
}

/// The sum of a counter over its labels, at one process.
fn counter(cluster: &Cluster, process: &str, name: &str) -> f64 {
    let (status, text) = get(&format!("{}/metrics", web_of(cluster, process)));
    assert_eq!(status, 200, "{text}");
    let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    text.lines().filter(of_name).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Messages that a worker got, and results that it had recorded.
fn traffic(cluster: &Cluster, worker: &str) -> (f64, f64) {
    let messages = counter(cluster, worker, "shardcron_broker_deliveries_total");
    (messages, counter(cluster, worker, "shardcron_results_recorded_total"))
}

/// Waits until a worker has had recorded far more than it got messages since `before`.
fn wait_grouped(cluster: &Cluster, worker: &str, before: (f64, f64)) {
    testkit::wait_for("messages with several shards", BOUND, || {
        let (messages, recorded) = traffic(cluster, worker);
        recorded - before.1 > messages - before.0 + 500.0
    });
}

#[test]
fn a_worker_that_is_killed_with_half_done_messages_loses_none_of_their_shards() {
    const SHARDS: u32 = 60_000;
    let mut cluster = cluster(SHARDS);
    // Each in a message of its own where the job says so.
    let alone = cluster.trigger("alone");
    assert_eq!(cluster.wait_end(alone, BOUND).phase, Phase::Success);
    let traffics = ["worker-1", "worker-2"].map(|worker| traffic(&cluster, worker));
    let (messages, recorded) = traffics.iter().fold((0.0, 0.0), |sum, t| (sum.0 + t.0, sum.1 + t.1));
    assert!((messages, recorded) >= (3_000.0, 3_000.0), "{traffics:?}");
    let id = cluster.trigger("tiny");
    wait_grouped(&cluster, "worker-2", traffics[1]);
    cluster.kill("worker-2");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, SHARDS));
    cluster.assert_exact(id, SHARDS);
    let again = cluster.number("SELECT COUNT(*) FROM attempts WHERE outcome IN ('worker_lost', 'taken_over')");
    println!("{again} shards were taken over");
    assert!(again > 0, "it had some in hand");
}

#[test]
fn a_cancel_in_the_middle_leaves_no_message_behind() {
    // More than are done before the cancel comes.
    const SHARDS: u32 = 120_000;
    let cluster = cluster(SHARDS);
    let id = cluster.trigger("tiny");
    wait_grouped(&cluster, "worker-1", (0.0, 0.0));
    let output = cluster.cli(&["executions", "cancel", &id.to_string(), "--reason", "a test"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.succeeded + row.cancelled), (Phase::Cancelled, SHARDS));
    assert!(row.succeeded > 0 && row.cancelled > 0, "{row:?}");
    // All of what was delivered is acked, and what stood in the queue was taken and refused.
    let rabbit = cluster.rabbit();
    testkit::wait_for("the queue to be empty", BOUND, || {
        cluster.block_on(rabbit.depth("core")).is_ok_and(|depth| depth.ready == 0)
    });
    assert_eq!(cluster.block_on(cluster.ledger().running(10)).unwrap(), []);
    let next = cluster.trigger("alone");
    assert_eq!(cluster.wait_end(next, BOUND).phase, Phase::Success);
}
