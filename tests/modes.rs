//! The degraded modes on real services: what goes on while a part is away, and the way back.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_domain::execution::Phase;
use std::fmt::Write;
use std::time::{Duration, Instant};
use support::Cluster;
use testkit::{Redis, Relay, shared, wait_for};

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
    assert_eq!(cluster.number("SELECT COUNT(*) FROM attempts"), 0, "no attempt ended badly or was taken over");
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
