//! Who runs a shard when its worker dies, hangs, stands still, or only loses its connection.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use nix::sys::signal::Signal;
use shardcron_domain::execution::Phase;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::{ExecutionId, Incarnation};
use shardcron_store::Ledger;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use support::{Cluster, slack};

const BOUND: Duration = Duration::from_secs(60);
/// What `Cluster` gives its workers.
const LOST_AFTER: Duration = Duration::from_secs(2);

fn exec(job: &str, shards: u32, script: &str, more: &str) -> String {
    format!(
        "[job.{job}]\nshards = {{ modulo = {shards} }}\nhandler = {{ exec = [\"sh\", \"-c\", \"{script}\"] }}\n\
         retry = {{ attempts = 3, first = \"100ms\", max = \"1s\" }}\n{more}\n"
    )
}

/// A job whose shards take some seconds in steps of 100 ms, each a transaction with a row of its own.
fn steps(cluster: &Cluster, takeover: &str) {
    cluster.block_on(cluster.ledger().execute_script("CREATE TABLE marks (k INT NOT NULL, pause INT)")).unwrap();
    cluster.apply(&format!(
        "[job.steps]\nshards = {{ range = {{ from = 1, to = 120 }}, count = 4 }}\n{takeover}\n\
         handler = {{ sql = \"INSERT INTO marks (k, pause) SELECT :shard_from, SLEEP(0.1)\", chunk = 1 }}\n"
    ));
}

fn owners(cluster: &Cluster, id: ExecutionId) -> Vec<Incarnation> {
    let running = cluster.block_on(cluster.ledger().running(100)).unwrap();
    running.into_iter().filter(|r| r.attempt.execution == id).map(|r| r.owner).collect()
}

/// Fires the job, kills the worker that runs all of it, and measures until all of it runs elsewhere.
fn kill_and_measure(cluster: &mut Cluster, job: &str, shards: usize) -> (ExecutionId, Duration) {
    let id = cluster.trigger(job);
    testkit::wait_for("all shards to run", BOUND, || owners(cluster, id).len() == shards);
    let before: BTreeSet<Incarnation> = owners(cluster, id).into_iter().collect();
    cluster.start("worker", "worker-2");
    cluster.wait_workers(2);
    let began = Instant::now();
    cluster.kill("worker-1");
    testkit::wait_for("its shards to run elsewhere", BOUND, || {
        let now = owners(cluster, id);
        now.len() == shards && now.iter().all(|owner| !before.contains(owner))
    });
    (id, began.elapsed())
}

/// Each step of each shard was done once, whatever became of its attempts.
fn assert_steps(cluster: &Cluster, id: ExecutionId) {
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM marks"), 120);
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT k) FROM marks"), 120);
    cluster.assert_exact(id, 4);
}

fn outcomes(cluster: &Cluster, id: ExecutionId) -> Vec<String> {
    cluster.block_on(cluster.ledger().attempts(id, 100)).unwrap().into_iter().map(|a| a.outcome).collect()
}

/// The bound of the design: lost-after and two seconds.
#[test]
fn a_killed_workers_shards_run_elsewhere_within_lost_after_and_two_seconds() {
    let mut cluster = Cluster::on_services();
    steps(&cluster, "");
    cluster.start_all(1, 1);
    let (id, took) = kill_and_measure(&mut cluster, "steps", 4);
    println!("taken over after {took:?}");
    assert!(took <= (LOST_AFTER + Duration::from_secs(2)) * slack(), "taken over after {took:?}");
    assert_steps(&cluster, id);
    // Some by the supervisor, and some perhaps by a worker that got the message when the heartbeat had already ended.
    let lost = |o: &String| o == "worker_lost" || o == "taken_over";
    assert_eq!(outcomes(&cluster, id).iter().filter(|o| lost(o)).count(), 4);
}

/// The bound of the design: one second. Whoever gets the messages that come again goes on from the checkpoints.
#[test]
fn with_takeover_immediate_they_do_within_one_second() {
    let mut cluster = Cluster::on_services();
    // A heartbeat that would be waited for would be waited for in vain.
    cluster.set("SHARDCRON_WORKER_LOST_AFTER", "60s");
    steps(&cluster, "takeover = \"immediate\"");
    cluster.start_all(1, 1);
    let (id, took) = kill_and_measure(&mut cluster, "steps", 4);
    println!("taken over after {took:?}");
    assert!(took <= Duration::from_secs(1) * slack(), "taken over after {took:?}");
    // Its successor dies too: the same messages come a third time, and stand for the second attempts.
    cluster.start("worker", "worker-3");
    cluster.wait_workers(2);
    let second: BTreeSet<Incarnation> = owners(&cluster, id).into_iter().collect();
    let began = Instant::now();
    cluster.kill("worker-2");
    testkit::wait_for("its shards to run elsewhere again", BOUND, || {
        let now = owners(&cluster, id);
        now.len() == 4 && now.iter().all(|owner| !second.contains(owner))
    });
    assert!(began.elapsed() <= Duration::from_secs(1) * slack(), "taken over again after {:?}", began.elapsed());
    assert_steps(&cluster, id);
    assert_eq!(outcomes(&cluster, id).iter().filter(|o| *o == "taken_over").count(), 8);
}

/// A program's effects can't be fenced: the job file is refused in a sentence.
#[test]
fn takeover_immediate_is_refused_for_programs() {
    let cluster = Cluster::embedded();
    let file = cluster.path("jobs.toml");
    std::fs::write(&file, exec("program", 1, "true", "takeover = \"immediate\"")).unwrap();
    let output = cluster.cli(&["jobs", "apply", &file.display().to_string()]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("takeover") && said.contains("nothing fences what a program or a service does"), "{said}");
}

/// Poison with `takeover = "immediate"`: it uses up its tries within seconds and takes no further worker with it (R-02, T-04).
#[test]
fn t_04_poison_is_counted_also_when_it_is_taken_over_at_once() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_LOST_AFTER", "60s");
    steps(&cluster, "takeover = \"immediate\"\nretry = { attempts = 3 }");
    cluster.start_all(1, 1);
    let id = cluster.trigger("steps");
    testkit::wait_for("all shards to run", BOUND, || owners(&cluster, id).len() == 4);
    for n in 2..=4 {
        cluster.start("worker", &format!("worker-{n}"));
        cluster.wait_workers(2);
        let before: BTreeSet<Incarnation> = owners(&cluster, id).into_iter().collect();
        cluster.kill(&format!("worker-{}", n - 1));
        testkit::wait_for("the messages to come again", BOUND, || {
            let row = cluster.execution(id);
            row.failed == 4 || owners(&cluster, id).iter().filter(|o| !before.contains(o)).count() == 4
        });
    }
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.failed), (Phase::Failed, 4));
    let shards = cluster.block_on(cluster.ledger().shards(id, 0, 100)).unwrap();
    assert!(shards.iter().all(|s| (s.attempt, s.failures) == (3, 3)), "{shards:?}");
    assert_eq!(cluster.json(&["dead", "list"]).as_array().map(Vec::len), Some(4));
}

/// Only the connection to RabbitMQ is cut, in mid-shard: the message comes to another worker, which does not run it beside its
/// living owner; the external effect happens once (R-06).
#[test]
fn r_06_a_cut_connection_starts_no_second_execution() {
    let mut cluster = Cluster::on_services();
    let file = cluster.path("effects");
    cluster.apply(&exec("effects", 4, &format!("echo x >> {}; sleep 5", file.display()), ""));
    let url = cluster.amqp_url().to_owned();
    let mut relay = testkit::Relay::start(port_of(&url)).unwrap();
    cluster.start_all(1, 0);
    cluster.set("SHARDCRON_BROKER_URL", &relay.url(&url));
    cluster.start("worker", "worker-1");
    cluster.wait_workers(1);
    let id = cluster.trigger("effects");
    testkit::wait_for("all shards to run", BOUND, || owners(&cluster, id).len() == 4);
    cluster.set("SHARDCRON_BROKER_URL", &url);
    cluster.start("worker", "worker-2");
    cluster.wait_workers(2);
    relay.cut();
    // The other one is asked, and refuses.
    cluster.wait_log("worker-2", "a delivery is not wanted", BOUND);
    relay.heal().unwrap();
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 4, "each once");
    assert_eq!(outcomes(&cluster, id), ["success"; 4]);
    cluster.assert_exact(id, 4);
}

fn port_of(url: &str) -> u16 {
    let host = url.rsplit('@').next().unwrap().split('/').next().unwrap();
    host.rsplit(':').next().unwrap().parse().unwrap()
}

/// A shard that kills its worker ends as a dead letter; what its workers held beside it succeeds (R-02).
#[test]
fn r_02_poison_does_not_burn_its_neighbours() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=10");
    // It takes a moment to do it, as running out of memory does. What still runs beside it then loses a try each time.
    let script = "sleep 0.1; if [ $SHARDCRON_SHARD_INDEX = 3 ]; then sleep 1; kill -ABRT $PPID; fi";
    cluster.apply(&exec("poison", 10, script, "").replace("attempts = 3", "attempts = 4"));
    cluster.start_all(1, 0);
    let mut workers = 0;
    let id = cluster.trigger("poison");
    let row = testkit::wait_until_some("the poisoned execution to end", Duration::from_secs(90), || {
        if cluster.reap() || workers == 0 {
            workers += 1;
            cluster.start("worker", &format!("worker-{workers}"));
        }
        Some(cluster.execution(id)).filter(|r| r.phase.is_terminal())
    });
    assert_eq!((row.phase, row.succeeded, row.failed), (Phase::Failed, 9, 1));
    let dead = cluster.json(&["dead", "list"]);
    assert_eq!(dead.as_array().map(Vec::len), Some(1), "only the poison: {dead}");
    assert!(dead[0]["reason"].as_str().unwrap().contains("worker lost"), "{dead}");
    assert!(workers <= 5, "four tries, and one more worker that finds nothing: {workers}");
    cluster.assert_exact_ends(id, 10);
}

/// Its progress stands still although its worker lives: cut off for that reason, and that reason is what people read.
#[test]
fn what_makes_no_progress_is_cut_off_and_what_moves_is_not() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_BROKER_POLL", "20ms");
    let moving = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done";
    let stuck = "echo begun; sleep 60";
    let limit = "stall_timeout = \"1s\"";
    let once = exec("stuck", 1, stuck, limit).replace("attempts = 3", "attempts = 2");
    cluster.apply(&(exec("moving", 1, moving, limit) + &once));
    cluster.start_all(1, 1);
    let (moving, stuck) = (cluster.trigger("moving"), cluster.trigger("stuck"));
    assert_eq!(cluster.wait_end(moving, BOUND).phase, Phase::Success);
    assert_eq!(cluster.wait_end(stuck, BOUND).phase, Phase::Failed);
    let attempts = cluster.block_on(cluster.ledger().attempts(stuck, 10)).unwrap();
    assert_eq!(attempts.len(), 2);
    for attempt in &attempts {
        assert_eq!(attempt.outcome, "stalled");
        assert!(attempt.message.as_deref().unwrap().contains("no progress for 1s"), "{attempt:?}");
        let ran = attempt.ended_ms - attempt.started_ms;
        assert!((1_000..4_000).contains(&ran), "cut off after {ran} ms");
    }
}

/// The same name within a second is another incarnation: what the dead one ran is seen as orphaned (H-04). Ours: lost-after + 2 s.
#[test]
fn h_04_a_worker_that_restarts_under_its_name_does_not_vouch_for_the_dead_one() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&exec("slow", 4, "sleep 1", ""));
    cluster.start_all(1, 1);
    let id = cluster.trigger("slow");
    testkit::wait_for("all shards to run", BOUND, || owners(&cluster, id).len() == 4);
    let orphaned: BTreeSet<Incarnation> = owners(&cluster, id).into_iter().collect();
    cluster.kill("worker-1");
    let began = Instant::now();
    cluster.start("worker", "worker-1");
    testkit::wait_for("the orphans to run again", BOUND, || {
        let now = owners(&cluster, id);
        now.len() == 4 && now.iter().all(|owner| !orphaned.contains(owner))
    });
    assert!(began.elapsed() <= (LOST_AFTER + Duration::from_secs(2)) * slack(), "{:?}", began.elapsed());
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    assert_eq!(outcomes(&cluster, id).iter().filter(|o| *o == "worker_lost").count(), 4);
    cluster.assert_exact(id, 4);
}

/// Everything is killed at once while two jobs with `overlap = "skip"` run, one of which has no try left: nothing holds either for ever (I-06).
/// What was asked for while nobody lived is decided, and named what is in the way; the same request again is told that it is one. Ours: the
/// old one has a final state and the next is accepted lost-after + 2 s after the restart; with a retry, the time that it takes, too.
#[test]
fn i_06_a_killed_cluster_leaves_no_lock_behind() {
    let default = shardcron::config::Config::default().worker.lost_after.as_ms();
    assert!(default <= 60_000, "with what people have, too: {default} ms");
    let mut cluster = Cluster::on_services();
    let again = exec("again", 1, "sleep 1", "overlap = \"skip\"");
    let never = exec("never", 1, "sleep 2", "overlap = \"skip\"").replace("attempts = 3", "attempts = 1");
    cluster.apply(&(again + &never));
    cluster.start_all(1, 2);
    cluster.wait_workers(2);
    let held = cluster.json(&["trigger", "never", "--request-id", "the-key"]);
    let never: ExecutionId = held["execution"].as_str().unwrap().parse().unwrap();
    let again = cluster.trigger("again");
    testkit::wait_for("both to run", BOUND, || owners(&cluster, never).len() + owners(&cluster, again).len() == 2);
    for (job, holder) in [("never", never), ("again", again)] {
        let refused = cluster.json(&["trigger", job]);
        assert_eq!(refused["execution"], holder.to_string(), "the one in the way is named: {refused}");
    }
    for name in ["scheduler-1", "worker-1", "worker-2"] {
        cluster.signal(name, Signal::SIGKILL);
    }
    testkit::wait_for("all to be gone", BOUND, || {
        cluster.reap();
        cluster.processes.is_empty()
    });
    let management = testkit::shared().management_of(cluster.amqp_url());
    let meanwhile = r#"{"job":"again","request_id":"meanwhile"}"#;
    let sent = management.publish("amq.default", "shardcron.triggers", meanwhile, &serde_json::json!({}));
    assert!(sent.unwrap(), "nobody lives, and the message is kept");
    cluster.start_all(1, 2);
    let began = Instant::now();
    // Again and again, as a person would, until one is accepted. Each one before is answered with what is in the way.
    let second = testkit::wait_until_some("a new run to be accepted", BOUND, || {
        let answer = cluster.json(&["trigger", "never"]);
        let fired = answer["outcome"] == "fired";
        assert!(fired || !answer["execution"].is_null(), "dropped without a word: {answer}");
        fired.then(|| answer["execution"].as_str().unwrap().parse::<ExecutionId>().unwrap())
    });
    let took = began.elapsed();
    println!("accepted {took:?} after the restart");
    assert!(took <= (LOST_AFTER + Duration::from_secs(2)) * slack(), "{took:?}");
    assert_eq!(cluster.execution(never).phase, Phase::Failed, "the old one has a final state");
    assert_eq!(outcomes(&cluster, never), ["worker_lost"]);
    assert_eq!(cluster.wait_end(second, BOUND).phase, Phase::Success);
    let again_end = cluster.wait_end(again, BOUND);
    assert_eq!(again_end.phase, Phase::Success, "the one with a retry ran again");
    assert!(began.elapsed() <= (LOST_AFTER * 2 + Duration::from_secs(6)) * slack(), "{:?}", began.elapsed());
    let job = cluster.block_on(cluster.ledger().job("again")).unwrap().unwrap().id;
    let asked = testkit::wait_until_some("what was asked for while nobody lived to be decided", BOUND, || {
        cluster.block_on(cluster.ledger().decision(job, "request:meanwhile")).unwrap()
    });
    if asked.kind == DecisionKind::Fired {
        assert_eq!(cluster.wait_end(asked.execution.unwrap(), BOUND).phase, Phase::Success);
    } else {
        assert_eq!((asked.kind, asked.execution), (DecisionKind::SkippedOverlap, Some(again)));
    }
    let third = cluster.trigger("again");
    assert_eq!(cluster.wait_end(third, BOUND).phase, Phase::Success);
    let twice = cluster.cli(&["trigger", "never", "--request-id", "the-key", "--json"]);
    let said = String::from_utf8_lossy(&twice.stdout).into_owned();
    assert!(said.contains(&never.to_string()), "the same key names the same run, which has ended: {said}");
}

/// A shard that waits for its retry counts as running: the instants in between are skipped and say so, and never do two attempts of
/// the job run at once (T-05).
#[test]
fn t_05_a_waiting_retry_is_the_running_execution() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_BROKER_POLL", "20ms");
    cluster.apply(
        "[job.fails]\nschedule = { cron = \"* * * * * *\" }\nhandler = { exec = [\"false\"] }\noverlap = \"skip\"\n\
         retry = { attempts = 3, first = \"2s\", factor = 1.0, max = \"2s\", jitter = 0.0 }\n",
    );
    cluster.start_all(1, 1);
    testkit::wait_for("two executions to end", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions WHERE state <> 0") >= 2
    });
    let job = cluster.block_on(cluster.ledger().jobs()).unwrap()[0].id;
    let decisions = cluster.block_on(cluster.ledger().decisions(job, 0, i64::MAX, 1_000)).unwrap();
    for pair in decisions.windows(2) {
        assert_eq!(pair[1].nominal_ms - pair[0].nominal_ms, 1_000, "every instant has its row");
    }
    let skipped = cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 1");
    assert!(skipped >= 4, "the waits of two executions: {skipped}");
    let overlapping = cluster.number(
        "SELECT COUNT(*) FROM executions a JOIN executions b ON a.job_id = b.job_id AND a.id < b.id \
         WHERE a.ended_ms IS NULL OR a.ended_ms > b.fired_ms",
    );
    assert_eq!(overlapping, 0, "never two at once");
    let tries = cluster.number("SELECT COUNT(*) FROM attempts WHERE outcome = 'failed'");
    assert!(tries >= 6, "{tries}");
}

/// RabbitMQ closes the channel of a consumer that does not ack for `consumer_timeout`. A shard that takes longer is neither lost nor
/// run twice, whether the horizon was set too high (its channel is closed under it, and its message comes again) or right (it is
/// acked before).
#[test]
fn a_shard_that_outlives_the_consumer_timeout_runs_once() {
    let low = "[{rabbit, [{consumer_timeout, 3000}, {channel_tick_interval, 500}]}].\n";
    let rabbit = testkit::RabbitMq::start_with(low).unwrap();
    let services = testkit::shared();
    let redis = services.redis_url().to_owned();
    let mut cluster = Cluster::on(&services.fresh_database(), Some(rabbit.amqp_url()), Some(redis));
    let file = cluster.path("effects");
    cluster.apply(&exec("long", 4, &format!("echo x >> {}; sleep 7", file.display()), ""));
    cluster.start_all(1, 0);
    for (round, horizon) in [(1, "10m"), (2, "1s")] {
        cluster.set("SHARDCRON_WORKER_ACK_HORIZON", horizon);
        let names = [format!("worker-{round}a"), format!("worker-{round}b")];
        for name in &names {
            cluster.start("worker", name);
        }
        cluster.wait_workers(2);
        let id = cluster.trigger("long");
        assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
        assert_eq!(outcomes(&cluster, id), ["success"; 4], "with a horizon of {horizon}");
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 4 * round, "each once");
        cluster.assert_exact(id, 4);
        let closed = names.iter().any(|name| cluster.log(name).contains("consumer's channel was lost"));
        assert_eq!(closed, round == 1, "the server's timeout strikes with a horizon of {horizon}");
        for name in &names {
            cluster.terminate(name, Duration::from_secs(10));
        }
    }
}
