//! Shutdown: a restart of everything costs nothing, and what must end at once ends in order.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use nix::sys::signal::Signal;
use shardcron_domain::execution::Phase;
use shardcron_store::Ledger;
use std::time::{Duration, Instant};
use support::{Cluster, slack};

const BOUND: Duration = Duration::from_secs(60);

/// Every process is restarted, one after another, under load and with a job that fires each second: every shard succeeds in its first
/// attempt, nothing runs twice, nothing fires more than a second late, and what had ended before does not run again (H-05).
#[test]
fn h_05_a_rolling_restart_of_everything_costs_nothing() {
    let mut cluster = Cluster::on_services();
    // The defaults: a lease that is released is not waited for, however long it lasts.
    cluster.set("SHARDCRON_SCHEDULER_LEASE_TTL", "5s");
    cluster.set("SHARDCRON_WORKER_LOST_AFTER", "15s");
    let effects = cluster.path("effects");
    cluster.apply(&format!(
        "[job.tick]\nschedule = {{ cron = \"* * * * * *\" }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n\
         [job.done]\nhandler = {{ rust = \"noop\" }}\n\
         [job.load]\ntier = \"bulk\"\nshards = {{ modulo = 60 }}\noverlap = \"allow\"\n\
         handler = {{ exec = [\"sh\", \"-c\", \"echo x >> {}; sleep 0.3\"] }}\n\
         [job.many]\nshards = {{ modulo = 2000 }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n",
        effects.display()
    ));
    cluster.start_all(2, 3);
    cluster.wait_workers(3);
    let done = cluster.trigger("done");
    cluster.wait_end(done, BOUND);
    // Firings of the start, when nobody led yet, are late by right.
    testkit::wait_for("firings", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions WHERE fired_ms - nominal_ms < 500") >= 3
    });
    let since = cluster.number("SELECT MAX(nominal_ms) FROM executions");
    let mut loads = Vec::new();
    let names: Vec<String> = cluster.processes.iter().map(|p| p.name.clone()).collect();
    for name in names {
        loads.push((cluster.trigger("load"), 60));
        loads.push((cluster.trigger("many"), 2_000));
        let role = name.split('-').next().unwrap().to_owned();
        let took = cluster.terminate(&name, Duration::from_secs(20));
        assert!(took < Duration::from_secs(8) * slack(), "{name} took {took:?}");
        cluster.start(&role, &name);
        if role == "worker" {
            cluster.wait_workers(3);
        } else {
            cluster.wait_log(&name, "holds the lease", BOUND);
        }
    }
    for (id, shards) in &loads {
        assert_eq!(cluster.wait_end(*id, BOUND).phase, Phase::Success);
        cluster.assert_exact(*id, *shards);
    }
    let outcomes =
        cluster.block_on(cluster.ledger().query("SELECT outcome, COUNT(*) FROM attempts GROUP BY outcome", &[]));
    let again = cluster.number("SELECT COUNT(*) FROM shards WHERE attempt > 1");
    assert_eq!(again, 0, "every shard in its first attempt: {outcomes:?}");
    assert_eq!(std::fs::read_to_string(&effects).unwrap().lines().count(), 5 * 60, "each program ran once");
    let late = cluster.number(&format!(
        "SELECT MAX(e.fired_ms - e.nominal_ms) FROM executions e JOIN jobs j ON j.id = e.job_id \
         WHERE j.name = 'tick' AND e.nominal_ms > {since}"
    ));
    println!("latest firing: {late} ms");
    assert!(late <= 1_000 * i64::from(slack()), "a firing was {late} ms late");
    let seconds = cluster.number(&format!(
        "SELECT MAX(e.nominal_ms) - MIN(e.nominal_ms) - 1000 * (COUNT(*) - 1) FROM executions e \
         JOIN jobs j ON j.id = e.job_id WHERE j.name = 'tick' AND e.nominal_ms > {since}"
    ));
    assert_eq!(seconds, 0, "every second once");
    let again = "SELECT COUNT(*) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name = 'done'";
    assert_eq!(cluster.number(again), 1, "what had ended did not run again");
}

/// The second SIGTERM hands back what runs: the checkpoint is kept, no try is used up, and the next worker goes on (H-07).
#[test]
fn h_07_a_second_signal_hands_back_at_once() {
    let mut cluster = Cluster::on_services();
    cluster.block_on(cluster.ledger().execute_script("CREATE TABLE marks (k INT NOT NULL, pause INT)")).unwrap();
    cluster.apply(
        "[job.steps]\nshards = { range = { from = 1, to = 160 }, count = 4 }\n\
         handler = { sql = \"INSERT INTO marks (k, pause) SELECT :shard_from, SLEEP(0.1)\", chunk = 1 }\n",
    );
    cluster.start_all(1, 1);
    let id = cluster.trigger("steps");
    testkit::wait_for("some steps", BOUND, || cluster.number("SELECT COUNT(*) FROM marks") >= 12);
    let began = Instant::now();
    cluster.signal("worker-1", Signal::SIGTERM);
    cluster.wait_log("worker-1", "draining", BOUND);
    let took = cluster.terminate("worker-1", Duration::from_secs(10));
    assert!(began.elapsed() < Duration::from_secs(5), "ended after {took:?}");
    let shards = cluster.block_on(cluster.ledger().shards(id, 0, 100)).unwrap();
    assert!(shards.iter().all(|s| (s.attempt, s.failures) == (2, 0)), "{shards:?}");
    assert!(shards.iter().all(|s| s.checkpoint.is_some()), "{shards:?}");
    cluster.start("worker", "worker-2");
    assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM marks"), 160, "it went on from the checkpoints");
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT k) FROM marks"), 160);
    cluster.assert_exact(id, 4);
}

/// Twenty restarts, by SIGTERM and by SIGKILL in turn: every second between the first and the last has one execution (H-03).
#[test]
fn h_03_twenty_restarts_lose_no_second() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_BROKER_POLL", "50ms");
    cluster.set("SHARDCRON_SCHEDULER_LEASE_TTL", "300ms");
    cluster.apply(
        "[job.tick]\nschedule = { cron = \"* * * * * *\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n\
         misfire = { policy = \"fire_all\", grace = \"1m\", limit = 1000 }\n",
    );
    cluster.start("worker", "worker-1");
    let executions = |cluster: &Cluster| cluster.number("SELECT COUNT(*) FROM executions");
    for restart in 0..20 {
        let before = executions(&cluster);
        cluster.start("scheduler", "scheduler-1");
        testkit::wait_for("a firing", BOUND, || executions(&cluster) > before);
        if restart % 2 == 0 {
            cluster.terminate("scheduler-1", Duration::from_secs(10));
        } else {
            cluster.kill("scheduler-1");
        }
    }
    let missing = cluster.number("SELECT MAX(nominal_ms) - MIN(nominal_ms) - 1000 * (COUNT(*) - 1) FROM executions");
    assert_eq!(missing, 0, "of {}", executions(&cluster));
    let twice = "SELECT COUNT(*) - COUNT(DISTINCT nominal_ms) FROM executions";
    assert_eq!(cluster.number(twice), 0);
    cluster.start("scheduler", "scheduler-1");
    testkit::wait_for("what was fired to end", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions WHERE state = 0") <= 1
    });
}

/// Twenty elections, the leader killed or frozen in turn: every instant has its execution, none later than the lease and five seconds
/// (E-05). Accelerated: a job that fires each second and a lease of 600 ms.
#[test]
fn e_05_twenty_elections_stop_no_job() {
    let mut cluster = Cluster::on_services();
    let ttl = Duration::from_millis(600);
    cluster.set("SHARDCRON_SCHEDULER_LEASE_TTL", "600ms");
    cluster.apply(
        "[job.tick]\nschedule = { cron = \"* * * * * *\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n",
    );
    cluster.start_all(3, 1);
    let mut epoch = 0;
    for election in 0..20 {
        let (leader, now) = cluster.wait_leader(epoch);
        epoch = now;
        let fired = format!("SELECT COUNT(*) FROM executions WHERE epoch >= {now}");
        testkit::wait_for("the new leader to fire", BOUND, || cluster.number(&fired) > 0);
        if election % 2 == 0 {
            cluster.kill(&leader);
            cluster.start("scheduler", &leader);
        } else {
            cluster.signal(&leader, Signal::SIGSTOP);
            epoch = cluster.wait_leader(epoch).1 - 1;
            cluster.signal(&leader, Signal::SIGCONT);
        }
    }
    let (_, last) = cluster.wait_leader(epoch);
    testkit::wait_for("the last leader to fire", BOUND, || {
        cluster.number(&format!("SELECT COUNT(*) FROM executions WHERE epoch >= {last}")) > 0
    });
    assert!(last >= 20, "{last} epochs");
    let missing = cluster.number("SELECT MAX(nominal_ms) - MIN(nominal_ms) - 1000 * (COUNT(*) - 1) FROM executions");
    assert_eq!(missing, 0, "every instant ran");
    let late = cluster.number("SELECT MAX(fired_ms - nominal_ms) FROM executions");
    let bound = (ttl + Duration::from_secs(5)).as_millis() as i64;
    assert!(late <= bound * i64::from(slack()), "the latest was {late} ms late");
}
