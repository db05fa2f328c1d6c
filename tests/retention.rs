//! Retention beside a running cluster.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use std::fmt::Write;
use std::time::{Duration, Instant};
use support::{Cluster, slack};

const BOUND: Duration = Duration::from_secs(60);
const JOBS: usize = 50;
/// Executions that are written at once.
const ROUND: i64 = 100_000;

/// So many times 100,000 executions of the first job that ended in the year 2020, with their shards, results and decisions, and as many young
/// ones as are said; gives the count of the old ones.
fn fill(cluster: &Cluster, old: i64, young: i64) -> i64 {
    let ledger = cluster.ledger();
    let run = |text: &str| cluster.block_on(ledger.execute_script(text)).unwrap();
    run("CREATE TABLE digits (d INT NOT NULL); INSERT INTO digits VALUES (0),(1),(2),(3),(4),(5),(6),(7),(8),(9)");
    run("CREATE TABLE numbers (n INT NOT NULL PRIMARY KEY)");
    run("INSERT INTO numbers SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d \
         FROM digits a, digits b, digits c, digits e, digits f");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let yesterday = now.as_millis() - 86_400_000;
    for round in 0..old + young {
        let n = format!("(n + {})", round * ROUND);
        // Some milliseconds apart, so that all of them are in that year, or yesterday; an id begins with its instant.
        let instant = match round < old {
            true => format!("(1577836800000 + {n} * 10)"),
            false => format!("({yesterday} + n * 10)"),
        };
        let id = format!("CONCAT(UNHEX(LPAD(HEX({instant}), 12, '0')), UNHEX(LPAD(HEX({n}), 20, '0')))");
        run(&format!(
            "INSERT INTO executions (id, job_id, version, fire_key, state, tier, nominal_ms, fired_ms, ended_ms, epoch, plan, params, \
             shards_total, materialized, dispatched, succeeded) SELECT {id}, 1, 1, CONCAT('old-', {n}), 1, 'core', {instant}, {instant}, \
             {instant}, 1, '{{}}', '{{}}', 1, 1, 1, 1 FROM numbers"
        ));
        run(&format!("INSERT INTO shards (execution_id, shard_index, state) SELECT {id}, 0, 2 FROM numbers"));
        run(&format!(
            "INSERT INTO results (execution_id, shard_index, attempt, owner, started_ms, ended_ms) \
             SELECT {id}, 0, 1, UNHEX(REPEAT('00', 16)), {instant}, {instant} FROM numbers"
        ));
        run(&format!(
            "INSERT INTO decisions (job_id, fire_key, nominal_ms, kind, decided_ms, epoch, execution_id) \
             SELECT 1, CONCAT('old-', {n}), {instant}, 0, {instant}, 1, {id} FROM numbers"
        ));
    }
    old * ROUND
}

/// Fifty jobs that fire each second stay on time while 400,000 rows are deleted, in statements of 5,000 rows and 200 ms at most, and the job
/// that most of them are of, with its 100,000 executions, is deleted in less than two seconds (B-06). Ours: that many rows instead of two
/// million, so that the test is short; the next one has the case's own.
#[test]
fn b_06_deleting_400_000_rows_makes_no_firing_late() {
    deleting_makes_no_firing_late(1, 0);
}

/// The case's own size: of 2,000,000 executions with as many shards, results and decisions, 1,900,000 go. On two cores, unoptimised: 7,600,000
/// rows in 201 s, 126 ms for the slowest statement, and the 99th percentile of 10,150 firings 7 ms late.
#[test]
#[ignore = "takes minutes, most of them for writing the rows"]
fn b_06_deleting_1_900_000_executions_makes_no_firing_late() {
    deleting_makes_no_firing_late(19, 1);
}

fn deleting_makes_no_firing_late(old: i64, young: i64) {
    let mut cluster = Cluster::on_services();
    let mut jobs = String::from("[job.history]\nhandler = { rust = \"noop\" }\n");
    for n in 0..JOBS {
        let schedule = "schedule = { cron = \"* * * * * *\" }\noverlap = \"allow\"";
        writeln!(jobs, "[job.tick-{n:02}]\n{schedule}\nhandler = {{ rust = \"noop\" }}").unwrap();
    }
    cluster.apply(&jobs);
    assert_eq!(cluster.number("SELECT id FROM jobs WHERE name = 'history'"), 1);
    let old = fill(&cluster, old, young);
    cluster.start_all(1, 1);
    let firings =
        "SELECT COUNT(*) FROM executions WHERE epoch > 0 AND fire_key NOT LIKE 'old-%' AND fired_ms - nominal_ms < 900";
    testkit::wait_for("firings on time", BOUND, || cluster.number(firings) > JOBS as i64 * 2);
    let since = cluster.number("SELECT MAX(nominal_ms) FROM executions");
    let began = Instant::now();
    let deleted = cluster.cli(&["jobs", "delete", "history"]);
    let took = began.elapsed();
    assert!(deleted.status.success(), "{}", String::from_utf8_lossy(&deleted.stderr));
    println!("a job of {old} executions deleted in {took:?}");
    assert!(took < Duration::from_secs(2) * slack(), "{took:?}");
    let began = Instant::now();
    let pruned = cluster.json(&["prune"]);
    println!("{pruned} in {:?}", began.elapsed());
    assert_eq!(pruned["executions"], old);
    assert_eq!(pruned["decisions"], old);
    assert_eq!(pruned["rows"], old * 4);
    // Of each statement that deleted something, measured where it was sent.
    let of = |what: &str| pruned[what].as_i64().unwrap();
    assert!((1..=5_000).contains(&of("most_rows")), "{pruned}");
    assert!(of("longest_ms") < 200 * i64::from(slack()), "{pruned}");
    testkit::wait_for("some firings after it", BOUND, || {
        cluster.number(&format!("SELECT COUNT(DISTINCT nominal_ms) FROM executions WHERE nominal_ms > {since}")) >= 5
    });
    let count = cluster.number(&format!("SELECT COUNT(*) FROM executions WHERE nominal_ms > {since}"));
    let late = cluster.number(&format!(
        "SELECT fired_ms - nominal_ms FROM executions WHERE nominal_ms > {since} ORDER BY fired_ms - nominal_ms DESC LIMIT 1 OFFSET {}",
        count / 100
    ));
    println!("p99 of {count} firings: {late} ms");
    assert!(late < 1_000 * i64::from(slack()), "p99 of {count} firings: {late} ms");
    let old = "SELECT COUNT(*) FROM shards s LEFT JOIN executions e ON e.id = s.execution_id WHERE e.id IS NULL";
    assert_eq!(cluster.number(old), 0, "nothing is left behind");
    let kept = cluster.number("SELECT COUNT(*) FROM executions WHERE job_id = 1");
    assert_eq!(kept, young * ROUND, "and nothing else is gone");
}

/// The leader does it by itself.
#[test]
fn the_leader_prunes_by_itself() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_BROKER_POLL", "20ms");
    cluster.set("SHARDCRON_RETENTION_EVERY", "1s");
    cluster.set("SHARDCRON_RETENTION_SUCCESS", "1s");
    cluster.apply("[job.once]\nhandler = { rust = \"noop\" }\n");
    cluster.start_all(1, 1);
    let id = cluster.trigger("once");
    testkit::wait_for("it to be gone", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions") == 0 && cluster.number("SELECT COUNT(*) FROM shards") == 0
    });
    assert_eq!(cluster.number("SELECT COUNT(*) FROM decisions"), 1, "decisions are kept for longer");
    cluster.wait_log("scheduler-1", "retention deleted what is old enough", BOUND);
    println!("{id} is gone");
}
