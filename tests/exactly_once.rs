//! S1 to S3 and P1 in a real cluster: whatever the transport does, each shard is recorded once.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use nix::sys::signal::Signal;
use shardcron_broker::Broker;
use shardcron_domain::execution::Phase;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::{AttemptOutcome, Ended, Ledger};
use std::time::Duration;
use support::{Cluster, slack};

const BOUND: Duration = Duration::from_secs(60);

fn noop(shards: u32) -> String {
    format!("[job.many]\nshards = {{ modulo = {shards} }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n")
}

fn slow(shards: u32, seconds: &str) -> String {
    format!(
        "[job.slow]\nshards = {{ modulo = {shards} }}\nhandler = {{ exec = [\"sleep\", \"{seconds}\"] }}\noverlap = \"allow\"\n\
         retry = {{ attempts = 3, first = \"100ms\", max = \"1s\" }}\n"
    )
}

fn messages(execution: ExecutionId, shards: u32, attempt: u32) -> Vec<ShardMessage> {
    let attempt = |index| AttemptRef { execution, index, attempt };
    (0..shards).map(|index| ShardMessage { v: ENVELOPE_VERSION, attempt: attempt(index), epoch: 0 }).collect()
}

#[test]
fn s1_every_delivery_sent_twice_is_recorded_once() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&noop(3_000));
    cluster.start_all(1, 3);
    let execution = cluster.trigger("many");
    let rabbit = cluster.rabbit();
    // Twice more each, while the cluster hands them out itself: some before the first claim, some beside it, some after the end.
    for _ in 0..2 {
        let answers = cluster.block_on(rabbit.publish("core", &messages(execution, 3_000, 1)));
        assert!(answers.iter().all(|a| *a == shardcron_broker::Published::Confirmed));
    }
    let row = cluster.wait_end(execution, BOUND);
    assert_eq!(row.phase, Phase::Success);
    // All of the doubles have been looked at before anything is counted.
    testkit::wait_for("the queue to run empty", BOUND, || {
        cluster.block_on(rabbit.depth("core")).is_ok_and(|d| d.ready == 0)
    });
    cluster.assert_exact(execution, 3_000);
}

#[test]
fn s2_s3_results_of_old_attempts_are_refused() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&slow(4, "1"));
    cluster.start_all(1, 1);
    let execution = cluster.trigger("slow");
    testkit::wait_for("all shards to run", BOUND, || cluster.execution(execution).running == Some(4));
    let running = cluster.block_on(cluster.ledger().running(100)).unwrap();
    let old_owner: Incarnation = running[0].owner;
    cluster.kill("worker-1");
    cluster.start("worker", "worker-2");
    let row = cluster.wait_end(execution, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, 4));
    // Now the dead worker's results arrive after all, and those of an attempt that never was.
    let replay = |attempt: u32| -> Vec<Ended> {
        let of = |index| Ended {
            attempt: AttemptRef { execution, index, attempt },
            outcome: AttemptOutcome::Success { rows: Some(99), summary: None },
            started_ms: 0,
            ended_ms: 1,
            retry: RetryPolicy::default(),
            seed: 0,
        };
        (0..4).map(of).collect()
    };
    for attempt in [1, 2, 3] {
        let verdicts = cluster.block_on(cluster.ledger().record(old_owner, &replay(attempt), 0)).unwrap();
        assert!(verdicts.iter().all(Result::is_err), "attempt {attempt}: {verdicts:?}");
    }
    let rabbit = cluster.rabbit();
    for attempt in [1, 2, 3] {
        cluster.block_on(rabbit.publish("core", &messages(execution, 4, attempt)));
    }
    testkit::wait_for("the queue to run empty", BOUND, || {
        cluster.block_on(rabbit.depth("core")).is_ok_and(|d| d.ready == 0)
    });
    cluster.assert_exact(execution, 4);
    let lost = cluster.block_on(cluster.ledger().attempts(execution, 100)).unwrap();
    assert_eq!(lost.iter().filter(|a| a.outcome == "worker_lost").count(), 4);
}

#[test]
fn p1_queues_purged_and_deleted_in_the_middle_lose_nothing() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&noop(20_000));
    cluster.start_all(1, 2);
    let management = testkit::shared().management_of(cluster.amqp_url());
    let execution = cluster.trigger("many");
    cluster.wait_ended(execution, 1_000, BOUND);
    management.purge("shardcron.shards.core").unwrap();
    cluster.wait_ended(execution, 5_000, BOUND);
    for queue in management.queues().unwrap() {
        management.delete_queue(&queue).unwrap();
    }
    let row = cluster.wait_end(execution, Duration::from_secs(120));
    assert_eq!((row.phase, row.succeeded), (Phase::Success, 20_000));
    cluster.assert_exact(execution, 20_000);
}

#[test]
fn p1_redis_flushed_in_the_middle_loses_nothing() {
    let redis = testkit::Redis::start().unwrap();
    let services = testkit::shared();
    let mut cluster = Cluster::on(&services.fresh_database(), Some(services.fresh_vhost()), Some(redis.url()));
    cluster.apply(&(noop(20_000) + &slow(4, "3")));
    cluster.start_all(2, 2);
    let long = cluster.trigger("slow");
    let execution = cluster.trigger("many");
    for shards in [1_000, 5_000, 10_000] {
        cluster.wait_ended(execution, shards, BOUND);
        redis.flush_all().unwrap();
    }
    for id in [execution, long] {
        assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    }
    cluster.assert_exact(execution, 20_000);
    cluster.assert_exact(long, 4);
    // A flushed presence is not a fleet of dead workers.
    let bad = cluster.block_on(cluster.ledger().attempts(long, 100)).unwrap();
    assert!(bad.iter().all(|a| a.outcome == "success"), "{bad:?}");
}

#[test]
fn x_04_a_frozen_worker_that_wakes_as_a_zombie_changes_nothing() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&slow(8, "2"));
    cluster.start_all(1, 2);
    cluster.wait_workers(2);
    let execution = cluster.trigger("slow");
    testkit::wait_for("all shards to run", BOUND, || cluster.execution(execution).running == Some(8));
    cluster.signal("worker-1", Signal::SIGSTOP);
    let row = cluster.wait_end(execution, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, 8));
    let before = cluster.block_on(cluster.ledger().shards(execution, 0, 100)).unwrap();
    cluster.signal("worker-1", Signal::SIGCONT);
    cluster.wait_log("worker-1", "no heartbeat was taken", Duration::from_secs(20));
    cluster.wait_log("worker-1", "beginning another", Duration::from_secs(20));
    cluster.assert_exact(execution, 8);
    let after = cluster.block_on(cluster.ledger().shards(execution, 0, 100)).unwrap();
    assert_eq!(serde_json::to_string(&before).unwrap(), serde_json::to_string(&after).unwrap());
    // It works again, as another incarnation.
    let again = cluster.trigger("slow");
    assert_eq!(cluster.wait_end(again, BOUND).phase, Phase::Success);
}

#[test]
fn t_04_a_shard_that_kills_its_workers_ends_as_a_dead_letter() {
    let mut cluster = Cluster::on_services();
    // The handler kills its own worker: its parent.
    cluster.apply(
        "[job.poison]\nhandler = { exec = [\"sh\", \"-c\", \"kill -9 $PPID\"] }\n\
         retry = { attempts = 3, first = \"100ms\", max = \"1s\" }\n",
    );
    cluster.start_all(1, 0);
    let mut workers = 0;
    let mut next = |cluster: &mut Cluster| {
        workers += 1;
        cluster.start("worker", &format!("worker-{workers}"));
    };
    next(&mut cluster);
    let execution = cluster.trigger("poison");
    let row = testkit::wait_until_some("the poison shard to end", Duration::from_secs(90), || {
        if cluster.reap() {
            next(&mut cluster);
        }
        Some(cluster.execution(execution)).filter(|r| r.phase.is_terminal())
    });
    assert_eq!((row.phase, row.failed), (Phase::Failed, 1));
    let attempts = cluster.block_on(cluster.ledger().attempts(execution, 100)).unwrap();
    assert_eq!(attempts.iter().filter(|a| a.outcome == "worker_lost").count(), 3, "{attempts:?}");
    let dead = cluster.json(&["dead", "list"]);
    assert_eq!(dead.as_array().map(Vec::len), Some(1), "{dead}");
    assert!(dead[0]["reason"].as_str().unwrap().contains("worker lost"), "{dead}");
}

/// Four tries, numbered from 1 to 4 wherever one looks, and a second between them, by half a second at most (T-06).
#[test]
fn t_06_failing_attempts_are_retried_as_written_and_end_as_a_dead_letter() {
    let mut cluster = Cluster::on_services();
    cluster.apply(
        "[job.fails]\nhandler = { exec = [\"sh\", \"-c\", \"echo no luck >&2; exit 3\"] }\n\
         retry = { attempts = 4, first = \"1s\", factor = 1.0, max = \"1s\", jitter = 0.0 }\n",
    );
    cluster.start_all(1, 1);
    let execution = cluster.trigger("fails");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Failed);
    let attempts = cluster.block_on(cluster.ledger().attempts(execution, 100)).unwrap();
    assert_eq!(attempts.iter().map(|a| a.attempt).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(attempts.iter().all(|a| a.message.as_deref().is_some_and(|m| m.contains("no luck"))), "{attempts:?}");
    for pair in attempts.windows(2) {
        let gap = pair[1].started_ms - pair[0].ended_ms;
        // Never early; late as far as the machine is.
        assert!((500..=1_000 + 500 * i64::from(slack())).contains(&gap), "the wait of 1 s was {gap} ms");
    }
    let shown = cluster.json(&["executions", "show", &execution.to_string()]);
    let numbers: Vec<i64> =
        shown["attempts"].as_array().unwrap().iter().map(|a| a["attempt"].as_i64().unwrap()).collect();
    assert_eq!((numbers, &shown["shards"][0]["failures"]), (vec![1, 2, 3, 4], &serde_json::json!(4)));
    let log = cluster.log("worker-1");
    let said: Vec<u32> = (1..=5).filter(|n| log.contains(&format!("{execution}/0#{n} "))).collect();
    assert_eq!(said, [1, 2, 3, 4], "the log has the same numbers");
    let dead = cluster.json(&["dead", "list"]);
    assert!(dead[0]["reason"].as_str().unwrap().contains("no luck") && dead.as_array().unwrap().len() == 1, "{dead}");
}

/// Work that turns long is not hoarded: what was claimed ahead for short work goes back, and costs no try.
#[test]
fn what_is_claimed_ahead_goes_back_when_shards_turn_long() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=2");
    cluster.apply(&(noop(2_000) + &slow(40, "1")));
    cluster.start_all(1, 1);
    let short = cluster.trigger("many");
    assert_eq!(cluster.wait_end(short, BOUND).phase, Phase::Success);
    let long = cluster.trigger("slow");
    testkit::wait_for("claims ahead of the slots to go back", BOUND, || {
        let row = cluster.execution(long);
        assert!(!row.phase.is_terminal(), "it ended before anything went back: {row:?}");
        row.succeeded > 0 && row.running.is_some_and(|r| r <= 4)
    });
    cluster.start("worker", "worker-2");
    cluster.start("worker", "worker-3");
    assert_eq!(cluster.wait_end(long, BOUND).phase, Phase::Success);
    let shards = cluster.block_on(cluster.ledger().shards(long, 0, 100)).unwrap();
    assert!(shards.iter().all(|s| s.failures == 0), "{shards:?}");
    cluster.assert_exact(long, 40);
}

/// A rolling restart costs no attempt: what runs may finish, what waits is handed back (H-07's kind).
#[test]
fn h_02_a_drained_worker_costs_no_attempt_and_no_duplicate() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_TIERS", "core=2");
    cluster.apply(&slow(10, "1"));
    cluster.start_all(1, 2);
    cluster.wait_workers(2);
    let execution = cluster.trigger("slow");
    testkit::wait_for("shards to run", BOUND, || cluster.execution(execution).running == Some(4));
    let took = cluster.terminate("worker-1", Duration::from_secs(20));
    assert!(took < Duration::from_secs(5), "drained in {took:?}");
    let row = cluster.wait_end(execution, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, 10));
    let shards = cluster.block_on(cluster.ledger().shards(execution, 0, 100)).unwrap();
    assert!(shards.iter().all(|s| s.failures == 0), "{shards:?}");
    cluster.assert_exact(execution, 10);
}

/// The drain limit hands a long shard back; the next worker goes on with it, and no try is used up (H-07).
#[test]
fn h_07_the_drain_limit_hands_long_shards_back() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_DRAIN", "500ms");
    cluster.apply(&slow(2, "4"));
    cluster.start_all(1, 1);
    let execution = cluster.trigger("slow");
    testkit::wait_for("shards to run", BOUND, || cluster.execution(execution).running == Some(2));
    cluster.terminate("worker-1", Duration::from_secs(15));
    let shards = cluster.block_on(cluster.ledger().shards(execution, 0, 100)).unwrap();
    assert!(shards.iter().all(|s| (s.attempt, s.failures) == (2, 0)), "{shards:?}");
    cluster.start("worker", "worker-2");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    cluster.assert_exact(execution, 2);
}

#[test]
fn the_same_holds_without_any_service() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_BROKER_POLL", "20ms");
    cluster.apply(&(noop(500) + &slow(6, "1")));
    cluster.start_all(2, 2);
    let many = cluster.trigger("many");
    let execution = cluster.trigger("slow");
    testkit::wait_for("shards to run", BOUND, || cluster.execution(execution).running.is_some_and(|r| r >= 4));
    cluster.kill("worker-1");
    let (leader, _) = cluster.wait_leader(0);
    cluster.kill(&leader);
    for (id, shards) in [(many, 500), (execution, 6)] {
        assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
        cluster.assert_exact(id, shards);
    }
}
