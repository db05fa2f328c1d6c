//! Workers killed with SIGKILL in the middle of what programs and services do in stages: while a program maps, and while a service has
//! still to call back.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod support;

use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::limits::EMITTED_PER_WRITE;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::Cluster;

const BOUND: Duration = Duration::from_secs(90);
/// Flights whose plane is not in the register, as published with the data.
const UNMATCHED: &str = "\"unmatched\":52606";
/// All of them.
const FLIGHTS: i64 = 336_776;
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

/// What the first attempt emits instead of the example's groups: each carrier alone, again and again, more than the worker keeps back
/// (`EMITTED_PER_WRITE`), so that rows of it are in the ledger. Then it is silent until it is killed.
const CUT_OTHERWISE: &str = "    if os.environ[\"SHARDCRON_ATTEMPT\"] == \"1\":
        for carrier in sorted(tails_by_carrier(folder)) * 50:
            say(\"emit\", payload={\"carriers\": [carrier], \"flights\": 0})
        __import__(\"time\").sleep(300)
";

/// A worker dies when hundreds of shards that its program emitted stand in the ledger. They were cut in another way than the next attempt
/// cuts them, and of none of them anything is left: the shards, their slices and the answer are the next attempt's alone.
#[test]
fn a_worker_killed_while_a_program_emits_leaves_each_shard_once() {
    let mut cluster = Cluster::embedded();
    let folder = cluster.path("programs");
    std::fs::create_dir(&folder).unwrap();
    let program = std::fs::read_to_string(example().join("by_carrier.py")).unwrap();
    let emits = "    for flights, carriers in groups:\n        say(\"emit\"";
    assert!(program.contains(emits), "the example emits otherwise by now");
    std::fs::write(folder.join("by_carrier.py"), program.replace(emits, &format!("{CUT_OTHERWISE}{emits}"))).unwrap();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3");
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &folder.display().to_string());
    cluster.set("SHARDCRON_WORKER_LEFTOVERS", "kill");
    let job = std::fs::read_to_string(example().join("job.toml")).unwrap();
    cluster.apply(&job.replace("max = 16", "max = 1000"));
    cluster.start_all(1, 1);
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reconcile-flights/data");
    let answer = cluster.json(&["trigger", "by-carrier", "--param", &format!("folder={}", data.display())]);
    let id: ExecutionId = answer["execution"].as_str().unwrap().parse().unwrap();
    let emitted = |cluster: &Cluster, attempt: u32| {
        cluster.number(&format!("SELECT COUNT(*) FROM emitted WHERE attempt = {attempt}"))
    };
    let written = i64::try_from(EMITTED_PER_WRITE).unwrap();
    testkit::wait_for("emitted shards to be in the ledger", BOUND, || emitted(&cluster, 1) >= written);
    cluster.kill("worker-1");
    assert_eq!(cluster.execution(id).shards_total, 1, "what is emitted is no shard before the good end");
    assert_eq!(emitted(&cluster, 1), written);
    cluster.start("worker", "worker-2");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}: {}", cluster.json(&["executions", "show", &id.to_string()]));
    assert_eq!(
        (emitted(&cluster, 1), emitted(&cluster, 2)),
        (0, GROUPS.into()),
        "what the dead attempt emitted is gone"
    );
    cluster.assert_exact(id, GROUPS + 2);
    assert_eq!(summaries(&cluster, id), 1, "the reducing shard's answer");
    let shards = cluster.json(&["executions", "show", &id.to_string(), "--shards"])["shards"].clone();
    for shard in &shards.as_array().unwrap()[1..=GROUPS as usize] {
        let payload = &shard["slice"]["task"]["payload"];
        assert!(payload["flights"].as_u64() > Some(0), "cut by the dead attempt: {shard}");
    }
    assert_eq!(shards[GROUPS as usize + 1]["slice"]["reduce"]["tasks"], GROUPS, "{shards}");
    let rows = "SELECT row_count FROM results ORDER BY shard_index DESC LIMIT 1";
    assert_eq!(cluster.number(rows), FLIGHTS, "each flight in one shard");
    let lost = cluster.block_on(shardcron_store::Ledger::attempts(cluster.ledger(), id, 100)).unwrap();
    assert_eq!(lost.iter().filter(|a| a.outcome == "worker_lost").count(), 1, "{lost:?}");
}
