//! Overlap, following and backfills on whole clusters of real processes.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_domain::ExecutionId;
use std::time::{Duration, Instant};
use support::{Cluster, slack};
use testkit::{wait_for, wait_until_some};

const BOUND: Duration = Duration::from_secs(25);

fn decisions(cluster: &Cluster, kind: i64) -> i64 {
    cluster.number(&format!("SELECT COUNT(*) FROM decisions WHERE kind = {kind}"))
}

fn runs(cluster: &Cluster, job: &str) -> i64 {
    let of = "SELECT COUNT(*) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name";
    cluster.number(&format!("{of} = '{job}'"))
}

/// The most executions that ran at the same time, from the times that the ledger has.
fn most_at_once(cluster: &Cluster) -> i64 {
    cluster.number(
        "SELECT COALESCE(MAX(n), 0) FROM (SELECT COUNT(*) AS n FROM executions a JOIN executions b ON b.job_id = a.job_id \
         AND b.fired_ms <= a.fired_ms AND (b.ended_ms IS NULL OR b.ended_ms > a.fired_ms) GROUP BY a.id) AS counts",
    )
}

/// The most executions whose handlers ran at the same time, by the workers' own clock, which is one on this machine. For where one
/// execution is fired the moment that another has ended: when it was fired and when that had ended are said by two processes, each with
/// an estimate of the database's clock of its own, which are some milliseconds apart on a busy machine.
fn most_handlers_at_once(cluster: &Cluster) -> i64 {
    cluster.number(
        "SELECT COALESCE(MAX(n), 0) FROM (SELECT COUNT(DISTINCT b.execution_id) AS n FROM results a JOIN results b \
         ON b.started_ms <= a.started_ms AND b.ended_ms > a.started_ms GROUP BY a.execution_id, a.shard_index) AS counts",
    )
}

/// Three workers, and never more than one execution; each instant has its decision (O-01, O-07).
#[test]
fn o_01_o_07_overlap_is_decided_cluster_wide_and_every_instant_has_a_row() {
    let mut cluster = Cluster::on_services();
    cluster.apply(
        "[job.slow]\nschedule = { every = \"1s\" }\nhandler = { exec = [\"sleep\", \"2.2\"] }\noverlap = \"skip\"\n",
    );
    cluster.start_all(2, 3);
    wait_for("three executions", BOUND, || cluster.number("SELECT COUNT(*) FROM executions") >= 4);
    assert_eq!(most_at_once(&cluster), 1, "O1");
    cluster.cli(&["jobs", "pause", "slow"]);
    wait_for("the pause", BOUND, || decisions(&cluster, 3) >= 1);
    let (fired, skipped) = (decisions(&cluster, 0), decisions(&cluster, 1));
    assert!(skipped >= fired, "{fired} fired, {skipped} skipped: about two of three are");
    let span = cluster.number("SELECT MAX(nominal_ms) - MIN(nominal_ms) FROM decisions WHERE kind < 3") / 1_000 + 1;
    assert_eq!(fired + skipped, span, "F2: each instant has exactly one decision");
    let without = "SELECT COUNT(*) FROM decisions WHERE kind = 1 AND (reason IS NULL OR execution_id IS NULL)";
    assert_eq!(cluster.number(without), 0, "each names the execution in its way");
}

/// A worker that dies with the execution does not hold the job for ever (O-02, O-06).
#[test]
fn o_02_o_06_the_slot_is_free_again_after_a_dead_worker() {
    let mut cluster = Cluster::on_services();
    let flag = cluster.path("first");
    let script = format!("if mkdir {} 2>/dev/null; then sleep 100; fi", flag.display());
    cluster.apply(&format!(
        "[job.once]\nschedule = {{ every = \"1s\" }}\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\noverlap = \"skip\"\n\
         retry = {{ attempts = 3, first = \"100ms\", max = \"100ms\" }}\n",
    ));
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "sh,mkdir,sleep");
    cluster.start_all(1, 1);
    wait_for("the first run", BOUND, || flag.exists());
    cluster.kill("worker-1");
    let killed = Instant::now();
    cluster.start("worker", "worker-1");
    wait_for("a second execution", BOUND, || cluster.number("SELECT COUNT(*) FROM executions WHERE state = 1") >= 2);
    assert!(killed.elapsed() < Duration::from_secs(20), "after {:?}", killed.elapsed());
    assert_eq!(most_at_once(&cluster), 1);
}

/// What waits fires in order, once each, though the leader is killed between.
#[test]
fn o_01_a_queue_survives_the_leader() {
    let mut cluster = Cluster::on_services();
    cluster.apply("[job.q]\nhandler = { exec = [\"sleep\", \"1\"] }\noverlap = { policy = \"queue\", limit = 3 }\n");
    cluster.start_all(2, 1);
    let (leader, epoch) = cluster.wait_leader(0);
    let answers: Vec<String> = ["a", "b", "c", "d", "e"]
        .iter()
        .map(|id| cluster.json(&["trigger", "q", "--request-id", id])["outcome"].as_str().unwrap().to_owned())
        .collect();
    // The first may have ended before the last was asked for, on a busy machine; then nothing was full.
    assert_eq!(answers[..4], ["fired", "waiting", "waiting", "waiting"], "{answers:?}");
    cluster.kill(&leader);
    cluster.wait_leader(epoch);
    wait_for("all to end", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions WHERE state = 1") >= 4
            && cluster.number("SELECT COUNT(*) FROM waiting") == 0
    });
    assert_eq!(most_handlers_at_once(&cluster), 1);
    let out_of_order =
        "SELECT COUNT(*) FROM executions a JOIN executions b ON a.fire_key < b.fire_key AND a.fired_ms > b.fired_ms";
    assert_eq!(cluster.number(out_of_order), 0, "in the order in which they were asked for");
}

/// The new one fires at once, and the program of the old one is ended within about a second.
#[test]
fn o_07_cancel_running_ends_the_old_program_and_fires_the_new() {
    let mut cluster = Cluster::on_services();
    let beat = cluster.path("beat");
    let script = format!("while true; do date +%s%N > {}.$SHARDCRON_EXECUTION; sleep 0.05; done", beat.display());
    cluster.apply(&format!(
        "[job.c]\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\noverlap = \"cancel_running\"\n",
    ));
    cluster.start_all(1, 1);
    let of = |id: ExecutionId| format!("{}.{id}", beat.display());
    let first = cluster.trigger("c");
    wait_for("the first to run", BOUND, || std::path::Path::new(&of(first)).exists());
    let second = cluster.trigger("c");
    let asked = Instant::now();
    wait_for("the second to run", BOUND, || std::path::Path::new(&of(second)).exists());
    // It writes twenty times a second while it runs.
    let silent = || std::fs::metadata(of(first)).and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
    wait_for("the first to stop", BOUND, || silent().is_some_and(|since| since > Duration::from_millis(700)));
    assert!(asked.elapsed() < Duration::from_secs(8), "stopped after {:?}", asked.elapsed());
    let old = cluster.execution(first);
    assert_eq!(old.phase.word(), "cancelled");
    let why = cluster.block_on(shardcron_store::FiringLedger::cancellation(cluster.ledger(), first)).unwrap().unwrap();
    assert!(why.reason.contains(&second.to_string()), "{why:?}");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM results"), 0);
}

/// A chain and a fan-in follow within a second, with what came before as parameters, though the leader is killed in the middle.
#[test]
fn jobs_follow_jobs_and_survive_the_leader() {
    let mut cluster = Cluster::on_services();
    let seen = cluster.path("seen");
    let script = format!("printf %s \"$SHARDCRON_PARAMS\" > {}", seen.display());
    cluster.apply(&format!(
        "[job.load]\nhandler = {{ rust = \"noop\" }}\n\
         [job.left]\nhandler = {{ exec = [\"sleep\", \"0.3\"] }}\nafter = [\"load\"]\n\
         [job.right]\nhandler = {{ exec = [\"sleep\", \"1\"] }}\nafter = [\"load\"]\n\
         [job.report]\nhandler = {{ exec = [\"sh\", \"-c\", {script:?}] }}\nafter = [\"left\", \"right\"]\n\
         [job.alarm]\nhandler = {{ rust = \"noop\" }}\nafter = {{ jobs = [\"bad\"], on = \"end\" }}\n\
         [job.never]\nhandler = {{ rust = \"noop\" }}\nafter = [\"bad\"]\n\
         [job.bad]\nhandler = {{ exec = [\"false\"] }}\nretry = {{ attempts = 1 }}\n"
    ));
    cluster.start_all(2, 1);
    let (leader, epoch) = cluster.wait_leader(0);
    let load = cluster.trigger("load");
    wait_for("the middle", BOUND, || runs(&cluster, "left") == 1 && runs(&cluster, "right") == 1);
    let late = "SELECT COALESCE(MAX(d.fired_ms - u.ended_ms), 0) FROM executions d JOIN jobs j ON j.id = d.job_id AND j.name IN ('left', 'right') \
                JOIN executions u ON u.nominal_ms = d.nominal_ms JOIN jobs k ON k.id = u.job_id AND k.name = 'load'";
    let late = cluster.number(late);
    assert!(late < 1_000 * i64::from(slack()), "fired {late} ms after the upstream's end");
    cluster.kill(&leader);
    cluster.wait_leader(epoch);
    wait_for("the fan-in", BOUND, || runs(&cluster, "report") == 1 && seen.exists());
    let params: serde_json::Value = wait_until_some("the parameters", BOUND, || {
        serde_json::from_str(&std::fs::read_to_string(&seen).unwrap_or_default()).ok()
    });
    let upstream = params["upstream"].as_array().unwrap();
    assert_eq!(upstream.len(), 2);
    assert!(upstream.iter().all(|u| u["state"] == "success" && u["shards"] == 1), "{params}");
    assert_eq!(
        cluster.number("SELECT COUNT(DISTINCT nominal_ms) FROM executions"),
        1,
        "all for the first one's instant"
    );
    assert_eq!(cluster.execution(load).phase.word(), "success");
    cluster.trigger("bad");
    wait_for("what follows any end", BOUND, || runs(&cluster, "alarm") == 1);
    wait_for("why the other one did not fire", BOUND, || decisions(&cluster, 11) == 1);
    assert_eq!((runs(&cluster, "never"), runs(&cluster, "report")), (0, 1), "once for each set");
}

/// Past instants run once each under their own keys, one at a time; what ran is left alone unless it is forced.
#[test]
fn a_backfill_runs_past_instants_once() {
    let mut cluster = Cluster::on_services();
    cluster.apply(
        "[job.day]\nschedule = { cron = \"0 0 * * *\" }\nhandler = { rust = \"noop\" }\nshards = { modulo = 2 }\n",
    );
    cluster.start_all(1, 1);
    cluster.wait_leader(0);
    let range = ["backfill", "day", "--from", "2026-03-01T00:00:00Z", "--to", "2026-03-06T00:00:00Z"];
    let dry = cluster.json(&[&range[..], &["--dry-run"]].concat());
    assert_eq!((dry["run"].as_i64(), cluster.number("SELECT COUNT(*) FROM executions")), (Some(5), 0));
    let first = cluster.json(&[&range[..], &["--request-id", "one"]].concat());
    assert_eq!((first["instants"].as_i64(), first["left"].as_i64()), (Some(5), Some(0)), "{first}");
    wait_for("five executions", BOUND, || cluster.number("SELECT COUNT(*) FROM executions WHERE state = 1") == 5);
    assert_eq!(most_at_once(&cluster), 1);
    let again = cluster.json(&[&range[..], &["--request-id", "two"]].concat());
    assert_eq!((again["instants"].as_i64(), again["already"].as_i64()), (Some(0), Some(5)));
    let forced = cluster.json(&[&range[..], &["--request-id", "three", "--force", "--only-shards", "1"]].concat());
    assert_eq!(forced["instants"].as_i64(), Some(5));
    wait_for("five more", BOUND, || cluster.number("SELECT COUNT(*) FROM executions WHERE state = 1") == 10);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions WHERE fire_key LIKE '%/again:three'"), 5);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions WHERE shards_total = 1"), 5);
    // What is asked for stays as long as decisions do; then the request's id is free again.
    cluster.set("SHARDCRON_RETENTION_DECISIONS", "1h");
    cluster.cli(&["prune"]);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM backfills"), 3, "they are young");
    cluster.set("SHARDCRON_RETENTION_DECISIONS", "1ms");
    let pruned = cluster.json(&["prune"]);
    assert_eq!((pruned["backfills"].as_i64(), cluster.number("SELECT COUNT(*) FROM backfills")), (Some(3), 0));
    let bad = cluster.cli(&["backfill", "day", "--from", "2026-03-01"]);
    assert_eq!(bad.status.code(), Some(2), "{}", String::from_utf8_lossy(&bad.stderr));
}

/// A trigger for a wanted instant, a pause of everything, and a request that comes twice.
#[test]
fn g_06_g_08_wanted_instants_pauses_and_doubles() {
    let mut cluster = Cluster::embedded();
    cluster.apply("[job.tick]\nschedule = { every = \"1s\" }\nhandler = { rust = \"noop\" }\n[job.hand]\nhandler = { rust = \"noop\" }\n");
    let pause = cluster.json(&["jobs", "pause", "--all"]);
    assert_eq!((pause["scope"].as_str(), pause["changed"].as_bool()), (Some("all"), Some(true)));
    cluster.start("up", "one");
    wait_for("skipped instants", BOUND, || decisions(&cluster, 3) >= 2);
    assert_eq!(decisions(&cluster, 0), 0);
    let past = cluster.json(&["trigger", "hand", "--at", "2026-03-08T02:30:00-05:00", "--request-id", "r1", "--wait"]);
    assert_eq!(past["nominal_ms"].as_i64(), Some(1_772_955_000_000), "{past}");
    let twice = cluster.json(&["trigger", "hand", "--request-id", "r1"]);
    assert_eq!(twice["execution"], past["id"], "the same request is the same execution");
    let soon = shardcron_domain::units::rfc3339(testkit_now() + 2_500);
    let future = cluster.json(&["trigger", "hand", "--at", &soon, "--request-id", "r2"]);
    assert_eq!(future["outcome"], "waiting", "{future}");
    wait_for("the wanted instant", BOUND, || decisions(&cluster, 0) == 2);
    let early = "SELECT COUNT(*) FROM executions WHERE fired_ms < nominal_ms";
    assert_eq!(cluster.number(early), 0);
    let zoneless = cluster.cli(&["trigger", "hand", "--at", "2026-03-08T02:30"]);
    assert_eq!(zoneless.status.code(), Some(2));
    cluster.json(&["jobs", "resume", "--all"]);
    wait_for("the schedule again", BOUND, || decisions(&cluster, 0) >= 4);
    let by = "SELECT COUNT(*) FROM decisions WHERE kind = 3 AND reason NOT LIKE '%with all jobs%'";
    assert_eq!(cluster.number(by), 0, "each says who paused");
}

fn testkit_now() -> i64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64
}

/// A fail-over is seen in the answer: who led, when it was last seen, who took over.
#[test]
fn f2_explain_knows_of_a_fail_over_a_pause_and_what_is_no_instant() {
    let mut cluster = Cluster::on_services();
    cluster.apply(
        "[job.tick]\nschedule = { every = \"1s\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\nmisfire = { policy = \"fire_all\", grace = \"1m\" }\n",
    );
    cluster.start_all(2, 1);
    let (leader, epoch) = cluster.wait_leader(0);
    wait_for("firings", BOUND, || decisions(&cluster, 0) >= 3);
    // Nobody leads for some instants, so that the first firings of the next leader are late and have a reason.
    cluster.kill(if leader == "scheduler-1" { "scheduler-2" } else { "scheduler-1" });
    cluster.kill(&leader);
    let killed = Instant::now();
    wait_for("instants without a leader", BOUND, || killed.elapsed() > Duration::from_millis(3_500));
    cluster.start("scheduler", "scheduler-3");
    let (next, later) = cluster.wait_leader(epoch);
    let late = format!(
        "SELECT COALESCE(MAX(nominal_ms), 0) FROM decisions WHERE kind = 0 AND epoch = {later} AND decided_ms - nominal_ms > 1000"
    );
    wait_for("a late firing", BOUND, || cluster.number(&late) > 0);
    let instant = shardcron_domain::units::rfc3339(cluster.number(&late));
    let text = String::from_utf8(cluster.cli(&["explain", "tick", "--at", &instant]).stdout).unwrap();
    assert!(text.contains("fired") && text.contains(&format!("by {next} under epoch {later}")), "{text}");
    assert!(text.contains(&leader) && text.contains("no leader"), "{text}");
    assert!(text.contains("Execution "), "{text}");
    cluster.cli(&["jobs", "pause", "tick"]);
    wait_for("a pause", BOUND, || decisions(&cluster, 3) >= 1);
    let paused =
        shardcron_domain::units::rfc3339(cluster.number("SELECT MAX(nominal_ms) FROM decisions WHERE kind = 3"));
    let answer = cluster.json(&["explain", "tick", "--at", &paused]);
    assert_eq!(answer[0]["what"], "skipped_paused");
    assert!(answer[0]["sentences"].to_string().contains("paused by"), "{answer}");
    let beside = cluster.json(&["explain", "tick", "--at", &paused.replace('Z', ".500Z")]);
    assert_eq!(beside[0]["what"], "not_due", "{beside}");
    let since = cluster.json(&["explain", "tick", "--since", "1h"]);
    assert!(since["decisions"].as_array().unwrap().len() >= 5);
    assert!(since["undecided"].as_array().unwrap().iter().all(|u| u["what"] != "fault"), "F2: {since}");
    // What is taken out of the ledger is missed, and said to be a fault.
    let gone = cluster.number("SELECT MIN(nominal_ms) FROM decisions");
    let delete = format!("DELETE FROM decisions WHERE nominal_ms = {gone}");
    cluster.block_on(cluster.ledger().execute_script(&delete)).unwrap();
    wait_for("the leader to be seen later", BOUND, || {
        cluster.number("SELECT MAX(seen_ms) FROM epochs") > gone + 11_000
    });
    let fault = cluster.json(&["explain", "tick", "--at", &shardcron_domain::units::rfc3339(gone)]);
    assert_eq!(fault[0]["what"], "fault", "{fault}");
    let later = cluster.json(&["explain", "tick", "--since", "1h"]);
    assert_eq!(later["undecided"].as_array().unwrap().iter().filter(|u| u["what"] == "fault").count(), 1, "{later}");
    assert_eq!(cluster.cli(&["explain", "tikc"]).status.code(), Some(2));
    assert_eq!(cluster.cli(&["explain", "tick", "--at", "yesterday"]).status.code(), Some(2));
}
