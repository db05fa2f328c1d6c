//! Starts, kills, freezes and wipes each service, and looks from outside whether it did what it says.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use testkit::{RabbitMq, Redis, Relay, Sql, shared, wait_for};

const BOUND: Duration = Duration::from_secs(30);

fn refused(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err()
}

#[test]
fn redis_is_killed_frozen_restarted_and_wiped() -> Result<()> {
    let mut redis = Redis::start()?;
    let (port, first) = (redis.port(), redis.pid());
    assert_eq!(redis.command(&["SET", "a", "1"])?, "+OK");
    assert_eq!(redis.command(&["GET", "a"])?, "1");
    assert_eq!(redis.command(&["CONFIG", "GET", "maxmemory-policy"])?, "*2");

    redis.freeze()?;
    assert!(redis.command(&["GET", "a"]).is_err(), "a frozen server does not answer");
    redis.thaw()?;
    assert_eq!(redis.command(&["GET", "a"])?, "1");

    redis.restart()?;
    assert_ne!(redis.pid(), first);
    assert_eq!(redis.port(), port);
    assert_eq!(redis.command(&["GET", "a"])?, "1", "an orderly restart keeps the data");

    redis.kill()?;
    assert!(refused(port));
    assert!(!redis.is_running());
    redis.restart()?;
    assert_eq!(redis.command(&["GET", "a"])?, "$-1", "nothing is on disk after a kill");

    redis.command(&["SET", "b", "1"])?;
    redis.restart_wiped()?;
    assert_eq!(redis.command(&["DBSIZE"])?, ":0");

    redis.command(&["SET", "c", "1"])?;
    redis.flush_all()?;
    assert_eq!(redis.command(&["DBSIZE"])?, ":0");
    redis.stop()?;
    assert!(refused(port));
    Ok(())
}

#[test]
fn redis_takes_more_arguments() -> Result<()> {
    let redis = Redis::start_with(&["--maxmemory", "2mb"])?;
    let full = (0..10_000).find_map(|n| {
        let answer = redis.command(&["SET", &format!("key{n}"), &"x".repeat(1_000)]).ok()?;
        answer.starts_with("-OOM").then_some(n)
    });
    assert!(full.is_some(), "without eviction, a full server refuses");
    Ok(())
}

#[test]
fn sql_is_killed_frozen_and_restarted() -> Result<()> {
    let mut sql = Sql::start()?;
    let (port, first) = (sql.port(), sql.pid());
    sql.execute("CREATE TABLE t (a INT PRIMARY KEY); INSERT INTO t VALUES (1), (2)")?;
    assert_eq!(sql.execute("SELECT a FROM t ORDER BY a")?, "1\n2");
    assert_eq!(sql.execute("SELECT @@innodb_flush_log_at_trx_commit")?, "1");
    assert!(sql.execute("SELECT nonsense").is_err());
    let other = sql.create_database("other")?;
    testkit::execute_at(&other, "CREATE TABLE u (a INT)")?;
    assert_eq!(testkit::execute_at(&other, "SHOW TABLES")?, "u");

    sql.freeze()?;
    assert!(!refused(port), "the kernel still takes connections for a frozen server");
    sql.thaw()?;
    assert_eq!(sql.execute("SELECT COUNT(*) FROM t")?, "2");

    sql.kill()?;
    assert!(refused(port));
    sql.restart()?;
    assert_ne!(sql.pid(), first);
    assert_eq!(sql.port(), port);
    assert_eq!(sql.execute("SELECT COUNT(*) FROM t")?, "2", "what was committed survives a kill");

    sql.restart()?;
    assert_eq!(sql.execute("SELECT COUNT(*) FROM t")?, "2");
    Ok(())
}

#[test]
fn rabbitmq_is_killed_frozen_restarted_and_wiped() -> Result<()> {
    let mut rabbit = RabbitMq::start()?;
    let (port, first) = (rabbit.port(), rabbit.pid());
    let ui = rabbit.management().clone();
    let durable = json!({ "durable": true, "arguments": { "x-queue-type": "quorum" } });
    let persistent = json!({ "delivery_mode": 2, "content_type": "text/plain", "headers": { "x-a": "b" } });

    assert!(!ui.publish("", "nobody", "lost", &json!({}))?, "no queue of that name");
    assert!(ui.publish("no-such-exchange", "", "", &json!({})).is_err());
    ui.declare_queue("q", &durable)?;
    assert!(ui.publish("", "q", "höchste Zeit", &persistent)?);
    assert!(ui.publish_bytes("", "q", &[0x81, 0xff, 0x00], &persistent)?);
    let messages = ui.get_messages("q", 10)?;
    assert_eq!(messages.len(), 2);
    assert_eq!(messages[0].text(), "höchste Zeit");
    assert_eq!(messages[0].header("x-a"), "b");
    assert_eq!(messages[1].payload, [0x81, 0xff, 0x00]);
    wait_for("a depth of 2", BOUND, || ui.queue_depth("q").is_ok_and(|depth| depth == 2));

    rabbit.freeze()?;
    rabbit.thaw()?;
    wait_for("an answer after the thaw", BOUND, || ui.is_ready());

    rabbit.kill()?;
    assert!(refused(port));
    rabbit.restart()?;
    assert_ne!(rabbit.pid(), first);
    assert_eq!(rabbit.port(), port);
    wait_for("both messages after a kill", BOUND, || ui.get_messages("q", 10).is_ok_and(|found| found.len() == 2));

    ui.purge("q")?;
    assert!(ui.take_messages("q", 10)?.is_empty());
    ui.delete_queue("q")?;
    assert!(ui.queues()?.is_empty());
    ui.declare_queue("again", &durable)?;
    rabbit.restart_wiped()?;
    assert!(ui.queues()?.is_empty(), "a wiped server has no queue");
    assert_eq!(ui.close_all_connections()?, 0);
    Ok(())
}

#[test]
fn a_relay_passes_cuts_stalls_and_delays() -> Result<()> {
    let redis = Redis::start()?;
    let mut relay = Relay::start(redis.port())?;
    let ask = || redis_through(relay.port(), Duration::from_secs(5));
    assert!(ask());
    assert_eq!(relay.url(&redis.url()), redis.url_through(relay.port()));

    let port = relay.port();
    relay.cut();
    assert!(refused(port));
    assert_eq!(relay.connections(), 0);
    relay.heal()?;
    assert!(redis_through(port, Duration::from_secs(5)));

    relay.stall();
    assert!(!redis_through(port, Duration::from_millis(200)), "nothing comes through");
    relay.heal()?;
    assert!(redis_through(port, Duration::from_secs(5)));

    let asked = pings(&redis)?;
    relay.stall_answers();
    assert!(!redis_through(port, Duration::from_millis(200)), "no answer comes back");
    wait_for("the question to have arrived", BOUND, || pings(&redis).is_ok_and(|count| count > asked));
    relay.heal()?;

    relay.delay(Duration::from_millis(150));
    let started = std::time::Instant::now();
    assert!(redis_through(port, Duration::from_secs(5)));
    assert!(started.elapsed() >= Duration::from_millis(300), "held up both ways");
    Ok(())
}

#[test]
fn a_cut_ends_connections_that_are_open() -> Result<()> {
    use std::io::Read;
    let redis = Redis::start()?;
    let mut relay = Relay::start(redis.port())?;
    let mut open = TcpStream::connect((Ipv4Addr::LOCALHOST, relay.port()))?;
    open.set_read_timeout(Some(BOUND))?;
    wait_for("the connection to be relayed", BOUND, || relay.connections() == 1);
    relay.cut();
    assert_eq!(open.read(&mut [0])?, 0, "the client sees the end");
    relay.heal()?;
    let mut open = TcpStream::connect((Ipv4Addr::LOCALHOST, relay.port()))?;
    open.set_read_timeout(Some(BOUND))?;
    wait_for("the connection to be relayed", BOUND, || relay.connections() == 1);
    drop(redis);
    assert!(matches!(open.read(&mut [0]), Ok(0) | Err(_)), "the end of the server is passed on");
    wait_for("the connection to be forgotten", BOUND, || relay.connections() == 0);
    Ok(())
}

#[test]
fn shared_services_give_each_test_a_corner_of_its_own() -> Result<()> {
    let (first, second) = (shared().fresh_database(), shared().fresh_database());
    assert_ne!(first, second);
    testkit::execute_at(&first, "CREATE TABLE t (a INT)")?;
    assert_eq!(testkit::execute_at(&second, "SHOW TABLES")?, "");

    let vhost = shared().fresh_vhost();
    let ui = shared().management_of(&vhost);
    ui.declare_queue("q", &json!({}))?;
    assert_eq!(ui.queues()?, ["q"]);
    assert!(ui.publish("", "q", "x", &json!({}))?);
    assert_ne!(shared().fresh_redis_prefix(), shared().fresh_redis_prefix());
    assert!(shared().redis_url().starts_with("redis://"));
    Ok(())
}

/// True if the relayed Redis answers a `PING` in time.
fn redis_through(port: u16, bound: Duration) -> bool {
    use std::io::{Read, Write};
    let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { return false };
    let mut answer = [0; 7];
    stream.set_read_timeout(Some(bound)).is_ok()
        && stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && &answer == b"+PONG\r\n"
}

/// How often Redis was asked to `PING`: connections alone say nothing about what came through.
fn pings(redis: &Redis) -> Result<u64> {
    let statistics = redis.command(&["INFO", "commandstats"])?;
    let line = statistics.lines().find_map(|line| line.strip_prefix("cmdstat_ping:calls="));
    Ok(line.and_then(|line| line.split(',').next()).map_or(Ok(0), str::parse)?)
}
