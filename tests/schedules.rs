//! Schedules in a running scheduler: exceptions, jitter, fixed delays.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_store::SqlArg;
use std::time::Duration;
use support::Cluster;
use testkit::wait_for;

const BOUND: Duration = Duration::from_secs(60);

fn rows(cluster: &Cluster, sql: &str) -> Vec<Vec<SqlArg>> {
    cluster.block_on(cluster.ledger().query(sql, &[])).unwrap()
}

fn int(arg: &SqlArg) -> i64 {
    match arg {
        SqlArg::Int(n) => *n,
        other => panic!("{other:?}"),
    }
}

/// Excepted instants have their decision and no execution; the others fire; jittered ones fire late under their own instant.
#[test]
fn f2_excepted_and_jittered_instants_each_have_their_decision() {
    let mut cluster = Cluster::embedded();
    cluster.apply(
        "[job.odd]\nschedule = { cron = \"* * * * * *\", except = [\"cron: */2 * * * * *\"] }\nhandler = { rust = \"noop\" }\n\
         overlap = \"allow\"\n\
         [job.late]\nschedule = { cron = \"* * * * * *\", jitter = \"900ms\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n",
    );
    cluster.start("up", "all");
    wait_for("decisions of both kinds", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 6") >= 3
            && cluster.number("SELECT COUNT(*) FROM executions") >= 8
    });
    let decisions = "SELECT d.nominal_ms, d.kind, d.decided_ms, j.name, d.reason FROM decisions d JOIN jobs j ON j.id = d.job_id ORDER BY 4, 1";
    let mut before: Option<(String, i64)> = None;
    let mut spread = 0;
    for row in rows(&cluster, decisions) {
        let (nominal, kind, decided) = (int(&row[0]), int(&row[1]), int(&row[2]));
        let SqlArg::Text(name) = &row[3] else { panic!("{row:?}") };
        if let Some((job, at)) = &before
            && job == name
        {
            assert_eq!(nominal - at, 1_000, "{name}: no instant without a decision");
        }
        assert!(nominal % 1_000 == 0 && decided >= nominal, "the fire key stays the instant");
        if name == "odd" {
            assert_eq!(kind, if nominal / 1_000 % 2 == 0 { 6 } else { 0 }, "{row:?}");
        } else {
            spread = spread.max(decided - nominal);
        }
        before = Some((name.clone(), nominal));
    }
    assert!(spread > 200, "something was drawn: {spread} ms at most");
}

/// A fixed delay counts from the end of the last execution, also over a restart (S-16); a firing by hand counts, too.
#[test]
fn s_16_a_fixed_delay_counts_from_the_end_and_survives_a_restart() {
    let mut cluster = Cluster::embedded();
    cluster.apply("[job.again]\nschedule = { delay = \"2s\" }\nhandler = { exec = [\"sleep\", \"0.5\"] }\n");
    cluster.start("up", "one");
    let ended = "SELECT COUNT(*) FROM executions WHERE ended_ms IS NOT NULL";
    wait_for("two runs", BOUND, || cluster.number(ended) >= 2);
    cluster.kill("one");
    cluster.start("up", "two");
    wait_for("two more", BOUND, || cluster.number(ended) >= 4);
    let runs =
        rows(&cluster, "SELECT nominal_ms, fired_ms, ended_ms FROM executions WHERE ended_ms IS NOT NULL ORDER BY id");
    for pair in runs.windows(2) {
        let (end, nominal, fired) = (int(&pair[0][2]), int(&pair[1][0]), int(&pair[1][1]));
        assert_eq!(nominal - end, 2_000, "the instant is the end and the delay: {runs:?}");
        assert!(fired >= nominal, "{runs:?}");
    }
    assert_eq!(cluster.number("SELECT COUNT(*) FROM decisions"), cluster.number("SELECT COUNT(*) FROM executions"));
}

/// A host in Shanghai, and database sessions there, too: an edited `*/5` job fires within five minutes (B-08).
#[test]
fn b_08_the_zone_of_the_host_and_of_the_session_move_no_instant() {
    let mut url = testkit::shared().fresh_database();
    url.push_str(if url.contains('?') { "&timezone=%2B08:00" } else { "?timezone=%2B08:00" });
    let mut cluster = Cluster::on(&url, None, None);
    cluster.set("TZ", "Asia/Shanghai");
    let job = |date: &str| {
        format!(
            "[job.five]\nschedule = {{ cron = \"*/5 * * * *\" }}\nhandler = {{ rust = \"noop\" }}\nparams = {{ d = \"{date}\" }}\n"
        )
    };
    cluster.apply(&job("a"));
    cluster.apply(&job("b"));
    let now = |cluster: &Cluster| cluster.block_on(shardcron_store::Ledger::server_now_ms(cluster.ledger())).unwrap();
    let next = cluster.number("SELECT next_fire_ms FROM jobs");
    let wait = next - now(&cluster);
    assert!((-1_000..=300_000).contains(&wait) && next % 300_000 == 0, "in {wait} ms");
    let host = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let apart = now(&cluster) - i64::try_from(host.as_millis()).unwrap();
    assert!(apart.abs() < 60_000, "the database's clock is read in UTC: {apart} ms apart");
    assert_eq!(cluster.json(&["jobs", "list"])["jobs"][0]["version"], 2);
}
