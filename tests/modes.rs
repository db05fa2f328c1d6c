//! The degraded modes on real services: what goes on while a part is away, and the way back.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_domain::execution::Phase;
use shardcron_domain::firing::DecisionKind;
use shardcron_store::{Ledger, SqlArg};
use std::fmt::Write;
use std::time::{Duration, Instant};
use support::Cluster;
use testkit::{Redis, Relay, Sql, shared, wait_for};

const BOUND: Duration = Duration::from_secs(30);
/// How long after the return of a part work must have resumed.
const RETURN: Duration = Duration::from_secs(5);

/// So many jobs of a tier, each every second.
fn ticking(tier: &str, jobs: usize, grace: &str) -> String {
    let mut file = String::new();
    for n in 0..jobs {
        writeln!(
            file,
            "[job.{tier}-{n}]\nschedule = {{ cron = \"* * * * * *\" }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n\
             tier = \"{tier}\"\nmisfire = {{ policy = \"fire_all\", grace = \"{grace}\", limit = 1000 }}"
        )
        .unwrap();
    }
    file
}

/// The seconds of each job between its first and its last decision that have none, and the instants fired twice (F1, F2).
fn missing_and_twice(cluster: &Cluster) -> (i64, i64) {
    let missing = "SELECT CAST(COALESCE(SUM(d.span - d.n), 0) AS SIGNED) FROM (SELECT (MAX(nominal_ms) - MIN(nominal_ms)) DIV 1000 + 1 \
                   AS span, COUNT(*) AS n FROM decisions WHERE fire_key NOT LIKE 'request:%' GROUP BY job_id) d";
    let twice = "SELECT COUNT(*) FROM (SELECT job_id, nominal_ms FROM executions GROUP BY job_id, nominal_ms HAVING COUNT(*) > 1) t";
    (cluster.number(missing), cluster.number(twice))
}

/// The outcomes of attempts that did not end well, with the words.
fn badly_ended(cluster: &Cluster) -> Vec<Vec<SqlArg>> {
    let sql = "SELECT outcome, message, COUNT(*), MIN(ended_ms), MAX(ended_ms) FROM attempts GROUP BY outcome, message";
    cluster.block_on(cluster.ledger().query(sql, &[])).unwrap()
}

fn executions(cluster: &Cluster) -> i64 {
    cluster.number("SELECT COUNT(*) FROM executions")
}

fn wait_fired(cluster: &Cluster, more: i64, bound: Duration) {
    let before = executions(cluster);
    wait_for(&format!("{more} firings"), bound, || executions(cluster) >= before + more);
}

fn wait_mode(cluster: &Cluster, name: &str, modes: &[&str], bound: Duration) {
    wait_for(&format!("{name} in {modes:?}"), bound, || cluster.modes(name) == modes);
}

fn lease_key(redis: &Redis) -> String {
    let keys = redis.command(&[
        "EVAL",
        "local k = redis.call('KEYS', '*:lease:trigger') return k[1] and redis.call('GET', k[1])",
        "0",
    ]);
    keys.unwrap()
}

fn on_private_redis(redis: &Redis) -> Cluster {
    let mut cluster = Cluster::on(&shared().fresh_database(), Some(shared().fresh_vhost()), Some(redis.url()));
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    cluster
}

/// Redis is killed under load and comes back empty: the leader goes on under its epoch, nobody is lost, nothing waits.
#[test]
fn redis_away_and_back_empty_changes_nothing() {
    let mut redis = Redis::start().unwrap();
    let mut cluster = on_private_redis(&redis);
    cluster.apply(
        &(ticking("core", 5, "1m") + "[job.long]\nhandler = { exec = [\"sleep\", \"4\"] }\nshards = { modulo = 4 }\n"),
    );
    cluster.start_all(2, 2);
    let (leader, epoch) = cluster.wait_leader(0);
    cluster.wait_workers(2);
    let long = cluster.trigger("long");
    wait_fired(&cluster, 10, BOUND);
    let processes = ["scheduler-1", "scheduler-2", "worker-1", "worker-2"];
    redis.kill().unwrap();
    // The leader renews within a third of its TTL, workers beat within a third of lost-after.
    for name in processes {
        wait_mode(&cluster, name, &["redis_away"], BOUND);
    }
    let health = cluster.health(&leader);
    assert_eq!((&health["status"], &health["leading"]), (&"degraded".into(), &true.into()), "{health}");
    for words in [
        "Meanwhile lease, heartbeats and idempotency go by the ledger",
        // With their next beat, which goes to the ledger.
        "redis_away, say worker-1, worker-2: lease, heartbeats",
    ] {
        wait_for(&format!("'{words}' from the doctor"), Duration::from_secs(10), || {
            cluster.json(&["doctor"]).as_array().unwrap().iter().any(|c| c["detail"].as_str().unwrap().contains(words))
        });
    }
    // Well beyond the lease's time and lost-after: nobody has stepped down, fenced itself or lost a shard.
    wait_fired(&cluster, 5 * 5, BOUND);
    assert_eq!(cluster.wait_end(long, BOUND).phase, Phase::Success);
    redis.restart_wiped().unwrap();
    let returned = Instant::now();
    for name in processes {
        wait_mode(&cluster, name, &[], RETURN);
    }
    wait_for("the leader to have its key again", RETURN, || lease_key(&redis).starts_with(&leader));
    eprintln!("back within {:?}", returned.elapsed());
    // Beyond lost-after again: an empty Redis loses nobody.
    let long = cluster.trigger("long");
    assert_eq!(cluster.wait_end(long, BOUND).phase, Phase::Success);
    assert_eq!(cluster.wait_leader(0), (leader.clone(), epoch), "one epoch all the time");
    assert_eq!(badly_ended(&cluster), Vec::<Vec<SqlArg>>::new(), "no attempt ended badly or was taken over");
    assert_eq!(missing_and_twice(&cluster), (0, 0));
    for name in processes {
        let log = cluster.log(name);
        assert_eq!(log.matches("degraded:").count(), 1, "entered once: {name}");
        assert_eq!(log.matches("back to normal").count(), 1, "left once: {name}");
        assert!(!log.contains("no heartbeat was taken") && !log.contains("panicked"), "{name}");
    }
}

/// E-10, and the take-over without Redis: the leader dies while Redis refuses writes.
#[test]
fn e_10_another_leads_while_redis_refuses_writes() {
    let redis = Redis::start().unwrap();
    let mut cluster = on_private_redis(&redis);
    cluster.apply(&ticking("core", 5, "1m"));
    cluster.start_all(2, 1);
    let (leader, epoch) = cluster.wait_leader(0);
    wait_fired(&cluster, 5, BOUND);
    assert_eq!(redis.command(&["CONFIG", "SET", "maxmemory", "1"]).unwrap(), "+OK");
    wait_mode(&cluster, "worker-1", &["redis_away"], BOUND);
    wait_fired(&cluster, 10, BOUND);
    assert_eq!(cluster.wait_leader(0), (leader.clone(), epoch), "no step-down for it");
    assert_eq!(redis.command(&["REPLICAOF", "127.0.0.1", "1"]).unwrap(), "+OK");
    cluster.kill(&leader);
    let began = Instant::now();
    let (second, later) = cluster.wait_leader(epoch);
    assert_ne!(second, leader);
    assert!(began.elapsed() < Duration::from_secs(4), "lease of 2 s, taken over after {:?}", began.elapsed());
    wait_fired(&cluster, 10, BOUND);
    assert_eq!(redis.command(&["REPLICAOF", "NO", "ONE"]).unwrap(), "+OK");
    assert_eq!(redis.command(&["CONFIG", "SET", "maxmemory", "0"]).unwrap(), "+OK");
    for name in [second.as_str(), "worker-1"] {
        wait_mode(&cluster, name, &[], Duration::from_secs(10));
    }
    wait_for("the leader to have the key", RETURN, || lease_key(&redis).starts_with(&second));
    wait_fired(&cluster, 10, BOUND);
    assert_eq!(cluster.wait_leader(0), (second, later));
    assert_eq!(missing_and_twice(&cluster), (0, 0));
}

/// E-01: Redis closes the connections of one scheduler, over and over; it never leads while the other does.
#[test]
fn e_01_a_scheduler_that_redis_refuses_never_leads() {
    let redis = Redis::start().unwrap();
    let mut cluster = on_private_redis(&redis);
    cluster.apply(&ticking("core", 5, "1m"));
    cluster.start("scheduler", "a");
    cluster.start("worker", "worker-1");
    let (leader, epoch) = cluster.wait_leader(0);
    assert_eq!(leader, "a");
    let relay = Relay::start(redis.port()).unwrap();
    cluster.set("SHARDCRON_REDIS_URL", &relay.url(&redis.url()));
    cluster.start("scheduler", "b");
    cluster.wait_log("b", "a/", BOUND);
    let before = relay.accepted();
    let began = Instant::now();
    // Each try makes a connection; it is closed before the answer.
    relay.stall_answers();
    wait_for("Redis to refuse b eight times, and for longer than the lease lasts", BOUND, || {
        relay.drop_connections();
        relay.accepted() >= before + 8 && began.elapsed() > Duration::from_secs(6)
    });
    assert!(!cluster.log("b").contains("leading epoch"));
    assert_eq!(cluster.wait_leader(0), ("a".into(), epoch));
    wait_fired(&cluster, 10, BOUND);
    assert_eq!(missing_and_twice(&cluster), (0, 0));
    let metrics = support::get(&format!("{}/metrics", support::web_of(&cluster, "b"))).1;
    assert!(metrics.lines().any(|l| l == "shardcron_leader 0"), "{metrics}");
    assert!(metrics.lines().any(|l| l == "shardcron_degraded{mode=\"redis_away\"} 1"), "{metrics}");
}

fn decisions_of(cluster: &Cluster, tier: &str) -> i64 {
    cluster.number(&format!(
        "SELECT COUNT(*) FROM decisions d JOIN jobs j ON j.id = d.job_id WHERE j.name LIKE '{tier}-%'"
    ))
}

fn wait_decided(cluster: &Cluster, tier: &str, more: i64, bound: Duration) {
    let before = decisions_of(cluster, tier);
    wait_for(&format!("{more} decisions of {tier}"), bound, || decisions_of(cluster, tier) >= before + more);
}

/// All schedulers are killed: a worker fires the core jobs, another does when that one is killed, bulk waits; then a scheduler comes
/// back and decides what waited, and nothing is missing or doubled.
#[test]
fn schedulers_away_core_goes_on_and_bulk_waits() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_FALLBACK_AFTER", "2s");
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    cluster.apply(&(ticking("core", 2, "1m") + &ticking("bulk", 2, "1m")));
    cluster.start_all(2, 3);
    let (_, epoch) = cluster.wait_leader(0);
    wait_decided(&cluster, "bulk", 4, BOUND);
    cluster.kill("scheduler-1");
    cluster.kill("scheduler-2");
    let (first, first_epoch) = cluster.wait_leader(epoch);
    let bulk = decisions_of(&cluster, "bulk");
    let first = first.strip_prefix("fallback:").unwrap_or_else(|| panic!("{first} leads")).to_owned();
    wait_mode(&cluster, &first, &["schedulers_away"], BOUND);
    wait_decided(&cluster, "core", 6, BOUND);
    cluster.kill(&first);
    let (second, second_epoch) = cluster.wait_leader(first_epoch);
    assert!(second.starts_with("fallback:worker-") && !second.ends_with(&first), "{second} after {first}");
    wait_decided(&cluster, "core", 6, BOUND);
    assert_eq!(decisions_of(&cluster, "bulk"), bulk, "bulk waits, undecided");
    cluster.start("scheduler", "scheduler-3");
    let began = Instant::now();
    let (leader, _) = cluster.wait_leader(second_epoch);
    assert_eq!(leader, "scheduler-3");
    assert!(began.elapsed() < RETURN, "the lease is taken from the stand-in at once, not after {:?}", began.elapsed());
    // What waited is decided by the policy, which is to fire all of it, and both tiers go on.
    wait_decided(&cluster, "bulk", 2 * 8, BOUND);
    wait_decided(&cluster, "core", 4, BOUND);
    wait_mode(&cluster, second.strip_prefix("fallback:").unwrap(), &[], BOUND);
    assert_eq!(missing_and_twice(&cluster), (0, 0));
    let by_stand_ins =
        format!("SELECT COUNT(*) FROM decisions WHERE kind = 0 AND epoch IN ({first_epoch}, {second_epoch})");
    assert!(cluster.number(&by_stand_ins) >= 12);
    wait_for("what was fired to end", BOUND, || {
        cluster.number("SELECT COUNT(*) FROM executions WHERE state = 0 AND fired_ms < (SELECT MAX(fired_ms) FROM executions) - 2000") == 0
    });
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions WHERE state > 1"), 0, "none failed");
}

/// A configured lower frequency: every instant has its decision, and those that fire are so far apart, the last one of the scheduler
/// included. Without any service.
#[test]
fn schedulers_away_at_a_lower_frequency() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_FALLBACK_AFTER", "2s");
    cluster.set("SHARDCRON_FALLBACK_AT_MOST_EVERY", "3s");
    cluster.apply(&ticking("core", 1, "1m"));
    cluster.start("scheduler", "scheduler-1");
    cluster.start("worker", "worker-1");
    let (_, epoch) = cluster.wait_leader(0);
    wait_decided(&cluster, "core", 2, BOUND);
    cluster.kill("scheduler-1");
    let (holder, stand_in) = cluster.wait_leader(epoch);
    assert_eq!(holder, "fallback:worker-1");
    wait_decided(&cluster, "core", 10, BOUND);
    let job = cluster.block_on(cluster.ledger().job("core-0")).unwrap().unwrap();
    let decisions = cluster.block_on(cluster.ledger().decisions(job.id, 0, i64::MAX, 10_000)).unwrap();
    assert!(
        decisions.windows(2).all(|d| d[1].nominal_ms - d[0].nominal_ms == 1_000),
        "each instant once: {decisions:?}"
    );
    let (mut last, mut fired) = (i64::MIN, 0);
    for decision in &decisions {
        let by_stand_in = decision.epoch.0 == stand_in;
        if decision.execution.is_some() {
            assert!(!by_stand_in || decision.nominal_ms - last >= 3_000, "{decisions:?}");
            (last, fired) = (decision.nominal_ms, fired + i32::from(by_stand_in));
        } else {
            assert!(by_stand_in && decision.kind == DecisionKind::Coalesced, "{decision:?}");
            assert!(decision.reason.as_ref().unwrap().contains("every 3s at most"), "{decision:?}");
        }
    }
    assert!(fired >= 3, "{decisions:?}");
}

/// The database is frozen, and then killed, under load: what has ended is held, nothing is lost or done twice, and work goes on
/// within the bound of its return. Each absence is one entry and one exit.
#[test]
fn mysql_away_results_are_held_and_recorded_on_its_return() {
    // For each fault its own, so that there is work left when the database returns, however long the fault was noticed after.
    const SHARDS: u32 = 120;
    let mut sql = Sql::start().unwrap();
    let database = sql.create_database(&testkit::unique_prefix()).unwrap();
    let redis = shared().redis_url().to_owned();
    let mut cluster = Cluster::on(&database, Some(shared().fresh_vhost()), Some(redis));
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    // A server that stands still is known as away after this time; nobody else is lost meanwhile, however busy the machine is.
    cluster.set("SHARDCRON_LEDGER_CALL_TIMEOUT", "2s");
    cluster.set("SHARDCRON_WORKER_LOST_AFTER", "9s");
    let load = format!("[job.load]\nhandler = {{ exec = [\"sleep\", \"0.3\"] }}\nshards = {{ modulo = {SHARDS} }}\n");
    cluster.apply(&(ticking("core", 2, "1m") + &load));
    let processes = ["scheduler-1", "worker-1", "worker-2"];
    cluster.start_all(1, 2);
    cluster.wait_workers(2);
    let mut executions = Vec::new();
    for (round, fault) in ["frozen", "killed"].iter().enumerate() {
        let execution = cluster.trigger("load");
        executions.push(execution);
        let ended = cluster.wait_ended(execution, 16, BOUND).succeeded;
        cluster.wait_ended(execution, ended + 8, BOUND);
        match round {
            0 => sql.freeze().unwrap(),
            _ => sql.kill().unwrap(),
        }
        for name in processes {
            wait_mode(&cluster, name, &["ledger_away"], BOUND);
        }
        let health = cluster.health("worker-1");
        assert_eq!(health["status"], "down", "{health}");
        match round {
            0 => sql.thaw().unwrap(),
            _ => sql.restart().unwrap(),
        }
        let returned = Instant::now();
        let ended = cluster.execution(execution).succeeded;
        let fired = decisions_of(&cluster, "core");
        cluster.wait_ended(execution, ended + 8, RETURN);
        wait_for("firing to go on", RETURN, || decisions_of(&cluster, "core") > fired);
        eprintln!("{fault}: work again {:?} after its return", returned.elapsed());
        for name in processes {
            wait_mode(&cluster, name, &[], BOUND);
        }
        assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    }
    for execution in executions {
        cluster.assert_exact(execution, SHARDS);
    }
    // What was claimed ahead may have been handed back, by a worker that found its work long on a busy machine: it costs no try.
    let bad: Vec<Vec<SqlArg>> = badly_ended(&cluster);
    let other = |row: &&Vec<SqlArg>| row[0] != SqlArg::Text("handed_back".into());
    assert_eq!(bad.iter().filter(other).count(), 0, "no attempt ended badly or was taken over: {bad:?}");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM shards WHERE failures > 0"), 0, "none cost a try");
    eprintln!("attempts that ended otherwise: {bad:?}");
    wait_decided(&cluster, "core", 4, BOUND);
    assert_eq!(missing_and_twice(&cluster), (0, 0));
    for name in processes {
        let log = cluster.log(name);
        assert_eq!(log.matches("mode=\"ledger_away\"").count(), 4, "entered twice, left twice: {name}");
    }
}
