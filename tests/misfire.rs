//! What was missed, held up or has nobody to run it, in a running cluster.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_store::SqlArg;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use std::fmt::Write;
use std::time::{Duration, Instant};
use support::{Cluster, slack};
use testkit::wait_for;

const BOUND: Duration = Duration::from_secs(30);

fn now_ms() -> i64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64
}

fn run(cluster: &Cluster, sql: &str) {
    cluster.block_on(cluster.ledger().execute_script(sql)).unwrap();
}

/// The executions of a job: instant, when it was fired, state.
fn fired(cluster: &Cluster, job: &str) -> Vec<(i64, i64, i64)> {
    let sql = "SELECT e.nominal_ms, e.fired_ms, e.state FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name";
    let rows =
        cluster.block_on(cluster.ledger().query(&format!("{sql} = '{job}' ORDER BY e.nominal_ms"), &[])).unwrap();
    let of = |row: &Vec<SqlArg>| match row.as_slice() {
        [SqlArg::Int(nominal), SqlArg::Int(at), SqlArg::Int(state)] => (*nominal, *at, *state),
        other => panic!("{other:?}"),
    };
    rows.iter().map(of).collect()
}

/// Twenty jobs are overdue and one of them can't be read: it is shown, and the other nineteen fire (M-06). No worker is there: they
/// wait, and nothing fails for it (M-08). A job that is added fires no other again (M-09).
#[test]
fn m_06_m_08_m_09_what_is_overdue_fires_once_and_waits_for_a_worker() {
    let mut cluster = Cluster::on_services();
    let mut jobs = String::new();
    for n in 0..20 {
        let keys = "schedule = { cron = \"0 0 1 1 *\" }\nmisfire = { policy = \"fire_once\", grace = \"1h\" }";
        writeln!(jobs, "[job.daily-{n:02}]\n{keys}\nhandler = {{ rust = \"noop\" }}").unwrap();
    }
    cluster.apply(&jobs);
    // As if nobody had led since: each became due some minutes ago, well within the grace.
    let due = now_ms() / 60_000 * 60_000 - 600_000;
    run(&cluster, &format!("UPDATE jobs SET next_fire_ms = {due} - 60000 * (id % 7)"));
    run(&cluster, "UPDATE jobs SET spec = REPLACE(spec, '0 0 1 1 *', 'garbage') WHERE name = 'daily-07'");
    cluster.start("scheduler", "scheduler-1");
    let executions = |cluster: &Cluster| cluster.number("SELECT COUNT(*) FROM executions");
    wait_for("nineteen firings", BOUND, || executions(&cluster) == 19);
    wait_for("the decision about the broken one", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 5 AND reason LIKE '%garbage%'") == 1
    });
    let list = cluster.json(&["jobs", "list"]);
    let broken = list["jobs"].as_array().unwrap().iter().find(|job| job["job"] == "daily-07").unwrap();
    assert!(broken["state"].as_str().unwrap().starts_with("invalid"), "{broken}");
    // A job is added, and fires; whoever led or leads next, the others stay as they are.
    cluster.apply("[job.added]\nschedule = { every = \"1s\" }\noverlap = \"allow\"\nhandler = { rust = \"noop\" }\n");
    wait_for("the added job", BOUND, || fired(&cluster, "added").len() >= 2);
    cluster.kill("scheduler-1");
    cluster.start("scheduler", "scheduler-2");
    let before = fired(&cluster, "added").len();
    // Longer than messages that nobody takes are waited for.
    wait_for("the next leader", BOUND, || fired(&cluster, "added").len() >= before + 3);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions WHERE fire_key LIKE '%00Z' AND state = 0 AND job_id IN (SELECT id FROM jobs WHERE name LIKE 'daily-%')"), 19);
    assert_eq!(
        cluster.number("SELECT COUNT(*) FROM attempts") + cluster.number("SELECT COUNT(*) FROM dead_letters"),
        0
    );
    for scheduler in ["scheduler-1", "scheduler-2"] {
        let said = cluster.log(scheduler).lines().filter(|line| line.contains("daily-07")).count();
        assert!(said <= 3, "{said} lines about one job: once when it is read, once when it is due");
    }
    cluster.start("worker", "worker-1");
    wait_for("all to end well", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name LIKE 'daily-%' AND e.state = 1") == 19
    });
    assert_eq!(cluster.number("SELECT COUNT(*) FROM attempts"), 0, "none had to be tried again");
}

/// Somebody holds the row of a job, then the whole table, while it is due: it fires late, once, under its instant; the leader lives
/// on and says what is slow (M-05). Ours: some seconds instead of 55, which is longer than anything here waits without a word.
#[test]
fn m_05_a_lock_held_by_somebody_else_makes_firings_late_and_loses_none() {
    let mut cluster = Cluster::on_services();
    cluster.apply(
        "[job.held]\nschedule = { cron = \"5 0 * * *\" }\nhandler = { rust = \"noop\" }\n\
         [job.tick]\nschedule = { every = \"1s\" }\noverlap = \"allow\"\nhandler = { rust = \"noop\" }\n",
    );
    let due = (now_ms() / 1_000 + 8) * 1_000;
    run(&cluster, &format!("UPDATE jobs SET next_fire_ms = {due} WHERE name = 'held'"));
    cluster.start_all(1, 1);
    let (_, epoch) = cluster.wait_leader(0);
    wait_for("ticks", BOUND, || fired(&cluster, "tick").len() >= 2);
    let url = cluster.ledger_url().to_owned();
    let hold = |lock: &str, seconds: u32| {
        let (url, script) = (url.clone(), format!("{lock}; SELECT SLEEP({seconds}); COMMIT; UNLOCK TABLES"));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let one = SqlOptions { max_connections: 1, ..SqlOptions::default() };
                SqlLedger::connect(&url, one).await.unwrap().execute_script(&script).await.unwrap();
            });
        })
    };
    wait_for("the instant to come near", BOUND, || now_ms() > due - 1_000);
    let row = hold("START TRANSACTION; SELECT id FROM jobs WHERE name = 'held' FOR UPDATE", 4);
    wait_for("the instant to pass", BOUND, || now_ms() > due + 1_500);
    assert_eq!(fired(&cluster, "held"), [], "its row is held");
    row.join().unwrap();
    wait_for("the late firing", BOUND, || fired(&cluster, "held").len() == 1);
    let late = fired(&cluster, "held")[0].1 - due;
    assert!(late < 4_000 + 1_000 * i64::from(slack()), "fired {late} ms late");
    cluster.wait_log("scheduler-1", "another transaction holds", BOUND);

    let began = Instant::now();
    let table = hold("LOCK TABLES jobs WRITE", 4);
    table.join().unwrap();
    assert!(began.elapsed() > Duration::from_secs(4));
    let (upto, since) = (now_ms() / 1_000 * 1_000 - 1_000, due / 1_000 * 1_000 - 1_000);
    wait_for("the ticks of that time", BOUND, || fired(&cluster, "tick").last().is_some_and(|last| last.0 > upto));
    let ticks: Vec<i64> = fired(&cluster, "tick").iter().map(|f| f.0).filter(|at| *at > since && *at <= upto).collect();
    assert!(ticks.windows(2).all(|pair| pair[1] - pair[0] == 1_000), "each second once: {ticks:?}");
    let longest = fired(&cluster, "tick").iter().filter(|f| f.0 > due && f.0 < due + 2_000).map(|f| f.1 - f.0).max();
    assert!(
        longest.unwrap() < 1_000 * i64::from(slack()),
        "a row that is held makes no other job late: {longest:?} ms"
    );
    cluster.wait_log("scheduler-1", "the ledger is slow", BOUND);
    assert_eq!((cluster.wait_leader(0).1, fired(&cluster, "held").len()), (epoch, 1), "the same leader all the time");
}
