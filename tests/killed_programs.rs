//! Workers killed with SIGKILL in the middle of what programs and services do in stages: while a program maps, and while a service has
//! still to call back.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod support;

use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::Cluster;

const BOUND: Duration = Duration::from_secs(90);
/// Flights whose plane is not in the register, as published with the data.
const UNMATCHED: &str = "\"unmatched\":52606";
/// Groups of carriers that the example's program emits.
const GROUPS: u32 = 4;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/map-reduce-programs")
}

fn summaries(cluster: &Cluster, id: ExecutionId) -> i64 {
    let hex: String = id.as_bytes().iter().map(|byte| format!("{byte:02X}")).collect();
    cluster.number(&format!(
        "SELECT COUNT(*) FROM results WHERE HEX(execution_id) = '{hex}' AND summary LIKE '%{UNMATCHED}%'"
    ))
}

/// Behind each emit: it is noted, and behind the second of the first attempt the program waits for its worker's death, and ends then.
const AFTER_AN_EMIT: &str = r#"
        noted = open(os.path.join(os.path.dirname(__file__), "emitted"), "a")
        noted.write(os.environ["SHARDCRON_ATTEMPT"])
        noted.close()
        if os.environ["SHARDCRON_ATTEMPT"] == "1" and os.path.getsize(noted.name) == 2:
            import time
            worker = os.getppid()
            while os.getppid() == worker:
                time.sleep(0.01)
            os._exit(1)
"#;

/// The example's program: the worker dies when it has emitted two of its shards, and none of them counts.
#[test]
fn a_worker_killed_while_a_program_emits_leaves_each_shard_once() {
    let mut cluster = Cluster::embedded();
    let folder = cluster.path("programs");
    std::fs::create_dir(&folder).unwrap();
    let program = std::fs::read_to_string(example().join("by_carrier.py")).unwrap();
    let emit = "        say(\"emit\", payload={\"carriers\": carriers, \"flights\": flights})\n";
    assert!(program.contains(emit), "the example emits otherwise by now");
    let held = format!("{emit}{AFTER_AN_EMIT}");
    std::fs::write(folder.join("by_carrier.py"), program.replace(emit, &held)).unwrap();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3");
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &folder.display().to_string());
    cluster.set("SHARDCRON_WORKER_LEFTOVERS", "kill");
    cluster.apply(&std::fs::read_to_string(example().join("job.toml")).unwrap());
    cluster.start_all(1, 1);
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reconcile-flights/data");
    let answer = cluster.json(&["trigger", "by-carrier", "--param", &format!("folder={}", data.display())]);
    let id: ExecutionId = answer["execution"].as_str().unwrap().parse().unwrap();
    let emitted = || std::fs::read_to_string(folder.join("emitted")).unwrap_or_default();
    testkit::wait_for("two shards to be emitted", BOUND, || emitted().len() >= 2);
    cluster.kill("worker-1");
    assert!(emitted().len() < GROUPS as usize, "it was killed too late to show anything: {}", emitted());
    cluster.start("worker", "worker-2");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}");
    assert!(emitted().ends_with("2222"), "the second attempt emits everything anew: {}", emitted());
    cluster.assert_exact(id, GROUPS + 2);
    assert_eq!(summaries(&cluster, id), 1, "the reducing shard's answer");
    let lost = cluster.block_on(shardcron_store::Ledger::attempts(cluster.ledger(), id, 100)).unwrap();
    assert_eq!(lost.iter().filter(|a| a.outcome == "worker_lost").count(), 1, "{lost:?}");
}
