//! Rust handlers that block their thread.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_domain::execution::Phase;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use shardcron_store::Ledger;
use std::process::Command;
use std::time::{Duration, Instant};
use support::{Cluster, slack};

const BOUND: Duration = Duration::from_secs(60);

/// Sleeps on its thread and looks at nothing.
struct Blocks;

#[async_trait]
#[allow(clippy::disallowed_methods, reason = "to block its thread is what the handler is for")]
impl ShardHandler for Blocks {
    async fn run(&self, _: ShardContext) -> Result<ShardOutput, ShardError> {
        std::thread::sleep(Duration::from_secs(120));
        Ok(ShardOutput::rows(1))
    }
}

/// Not a test: the worker program of the test below, which starts it.
#[test]
#[ignore = "the worker of the other test"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let _ = shardcron::run_with(arguments, Registry::default().with("blocks", Blocks));
}

/// A blocking handler is timed out and flagged (ours: at its timeout and the ten seconds that every handler has to stop), keeps its
/// slot and nothing else, and does not keep the process.
#[test]
fn x_02_a_handler_that_blocks_keeps_its_slot_and_nothing_else() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=3");
    cluster.apply(
        "[job.blocks]\nshards = { modulo = 2 }\nhandler = { rust = \"blocks\" }\ntimeout = \"1s\"\nretry = { attempts = 1 }\n\
         [job.quick]\nshards = { modulo = 20 }\nhandler = { rust = \"noop\" }\n",
    );
    cluster.start("scheduler", "scheduler-1");
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, "worker-1");
    cluster.wait_workers(1);
    let began = Instant::now();
    let blocked = cluster.trigger("blocks");
    assert_eq!(cluster.wait_end(blocked, BOUND).phase, Phase::Failed);
    assert!(began.elapsed() < Duration::from_secs(16) * slack(), "{:?}", began.elapsed());
    for attempt in cluster.block_on(cluster.ledger().attempts(blocked, 10)).unwrap() {
        assert_eq!((attempt.attempt, attempt.outcome.as_str()), (1, "timeout"));
        let message = attempt.message.unwrap();
        assert!(message.contains("timed out after 1s") && message.contains("not cancellable"), "{message}");
    }
    // Its heartbeat went on all the time, and two of three slots are still taken.
    assert_eq!(cluster.number("SELECT COUNT(*) FROM attempts WHERE outcome = 'worker_lost'"), 0);
    testkit::wait_for("the beat to tell it", BOUND, || cluster.json(&["workers"])[0]["worker"]["running"] == 2);
    // What is left of it works.
    let quick = cluster.trigger("quick");
    assert_eq!(cluster.wait_end(quick, BOUND).phase, Phase::Success);
    let took = cluster.terminate("worker-1", Duration::from_secs(15));
    assert!(took < Duration::from_secs(8) * slack(), "the blocked threads do not keep the process: {took:?}");
}
