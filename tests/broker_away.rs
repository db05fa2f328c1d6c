//! RabbitMQ away in a real cluster: work goes on through the ledger, and comes back by itself.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_broker::Broker;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_store::Ledger;
use std::time::{Duration, Instant};
use support::Cluster;
use testkit::{RabbitMq, Relay};

const BOUND: Duration = Duration::from_secs(60);
/// How soon work goes by RabbitMQ again after its return.
const RETURN_BOUND: Duration = Duration::from_secs(5);
/// More than the window of a queue, so that some are in it and some are not handed out when it vanishes.
const SHARDS: u32 = 5_000;

const JOBS: &str = "\
    [job.many]\nshards = { modulo = 5000 }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n\
    [job.tick]\nschedule = { cron = \"* * * * * *\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n\
    misfire = { policy = \"fire_all\", grace = \"1m\", limit = 100 }\n";

/// A cluster on a RabbitMQ of its own, reached by `url`.
fn cluster(url: String) -> Cluster {
    let services = testkit::shared();
    let mut cluster = Cluster::on(&services.fresh_database(), Some(url), Some(services.redis_url().to_owned()));
    cluster.set("SHARDCRON_BROKER_FALLBACK_AFTER", "500ms");
    cluster.apply(JOBS);
    cluster
}

fn polled(cluster: &Cluster) -> bool {
    cluster.block_on(cluster.ledger().polling()).unwrap().is_some()
}

fn assert_done(cluster: &Cluster, id: ExecutionId) {
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.succeeded), (Phase::Success, SHARDS));
    cluster.assert_exact(id, SHARDS);
}

/// F1 and F2 of the job that fires each second, and that all it fired has ended.
fn assert_no_instant_lost(cluster: &Cluster) {
    let job = cluster.block_on(cluster.ledger().job("tick")).unwrap().unwrap().id;
    let decisions = cluster.block_on(cluster.ledger().decisions(job, 0, i64::MAX, 100_000)).unwrap();
    let (first, last) = (decisions.first().unwrap().nominal_ms, decisions.last().unwrap().nominal_ms);
    assert_eq!((last - first) / 1_000 + 1, decisions.len() as i64, "an instant without a decision");
    assert!(decisions.iter().all(|d| d.execution.is_some()), "{decisions:?}");
    let fired = decisions.iter().filter_map(|d| d.execution);
    for id in fired {
        assert_eq!(cluster.wait_end(id, BOUND).phase, Phase::Success);
        cluster.assert_exact(id, 1);
    }
}

/// What has come to the workers by RabbitMQ.
fn delivered(cluster: &Cluster) -> u64 {
    let of = |name: &str| -> u64 {
        let metrics = support::get(&format!("{}/metrics", support::web_of(cluster, name))).1;
        let lines = metrics.lines().filter(|line| line.starts_with("shardcron_broker_deliveries_total{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    };
    of("worker-1") + of("worker-2")
}

/// Waits until nothing is polled any more, and holds that to its bound. RabbitMQ 3.10 that was killed can come back with a queue that
/// answers nobody (docs/errors/queue-silent.md): it is replaced after two requests without an answer, and only that may take longer.
fn way_back(cluster: &Cluster, since: Instant) -> Duration {
    const REPLACED_BOUND: Duration = Duration::from_secs(20);
    let names = ["scheduler-1", "worker-1", "worker-2"];
    let replacements =
        || names.iter().map(|name| cluster.log(name).matches("answers no consumer").count()).sum::<usize>();
    // What was replaced after an earlier fault excuses nothing now.
    let before = replacements();
    testkit::wait_for("the way back", RETURN_BOUND + REPLACED_BOUND, || !polled(cluster));
    let took = since.elapsed();
    assert!(took <= RETURN_BOUND || replacements() > before, "back after {took:?}");
    took
}

/// Executions are fired until one has gone by RabbitMQ as a whole. When the server is back its queue may be without a process for some
/// seconds yet; until it is declared anew, executions go by the ledger, and end.
fn assert_goes_by_rabbitmq(cluster: &Cluster) {
    testkit::wait_for("an execution to go by RabbitMQ", BOUND, || {
        let before = delivered(cluster);
        assert_done(cluster, cluster.trigger("many"));
        delivered(cluster) >= before + u64::from(SHARDS)
    });
}

#[test]
fn d_02_rabbitmq_killed_frozen_and_wiped_in_mid_execution() {
    let began = Instant::now();
    let at = |what: &str| println!("{:>6} ms: {what}", began.elapsed().as_millis());
    let mut rabbit = RabbitMq::start().unwrap();
    at("RabbitMQ is there");
    let mut cluster = cluster(rabbit.amqp_url());
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    cluster.start_all(1, 2);
    cluster.wait_workers(2);

    at("the workers are there");
    // Killed: the execution ends without it, and so does one that a person fires meanwhile.
    let execution = cluster.trigger("many");
    cluster.wait_ended(execution, 500, BOUND);
    rabbit.kill().unwrap();
    assert_done(&cluster, execution);
    assert_done(&cluster, cluster.trigger("many"));
    at("killed, and two executions have ended");
    assert!(polled(&cluster));
    cluster.wait_log("worker-1", "degraded", BOUND);
    cluster.wait_log("scheduler-1", "degraded", BOUND);
    rabbit.restart().unwrap();
    at(&format!("killed: back after {:?}", way_back(&cluster, Instant::now())));
    assert_goes_by_rabbitmq(&cluster);

    at("an execution has gone by RabbitMQ");
    // Frozen: its connections stay open, and nothing answers. It wakes with all that it held.
    let execution = cluster.trigger("many");
    cluster.wait_ended(execution, 500, BOUND);
    rabbit.freeze().unwrap();
    assert_done(&cluster, execution);
    rabbit.thaw().unwrap();
    at(&format!("frozen: back after {:?}", way_back(&cluster, Instant::now())));

    // Its data gone.
    let execution = cluster.trigger("many");
    cluster.wait_ended(execution, 500, BOUND);
    rabbit.restart_wiped().unwrap();
    let back = Instant::now();
    assert_done(&cluster, execution);
    at(&format!("wiped: back after {:?}", way_back(&cluster, back)));
    assert_goes_by_rabbitmq(&cluster);
    at("an execution has gone by RabbitMQ");
    assert_no_instant_lost(&cluster);
}

/// The connection dies 10 ms before an instant, and stays away for several; then the leader alone is cut off.
#[test]
fn d_02_no_instant_is_lost_with_the_connection() {
    let services = testkit::shared();
    let direct = services.fresh_vhost();
    let port = direct.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let mut relay = Relay::start(port).unwrap();
    let mut cluster = cluster(direct.clone());
    cluster.start("worker", "worker-1");
    // The leader goes through the relay, the worker does not.
    cluster.set("SHARDCRON_BROKER_URL", &relay.url(&direct));
    cluster.start("scheduler", "scheduler-1");
    let fired = |cluster: &Cluster| cluster.number("SELECT COUNT(*) FROM executions");
    let ended = |cluster: &Cluster| cluster.number("SELECT COUNT(*) FROM executions WHERE state > 0");
    testkit::wait_for("some firings", BOUND, || ended(&cluster) >= 2);
    let now_ms = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    testkit::wait_for("10 ms before an instant", BOUND, || now_ms() % 1_000 >= 988);
    relay.cut();
    let at_cut = fired(&cluster);
    testkit::wait_for("firings go on", BOUND, || fired(&cluster) >= at_cut + 6);
    testkit::wait_for("and are run", BOUND, || ended(&cluster) >= at_cut + 5);
    cluster.wait_log("worker-1", "the leader can't reach the broker", BOUND);
    let rabbit = cluster.block_on(async { shardcron_broker::RabbitMq::connect(&direct, Default::default()).unwrap() });
    testkit::wait_for("the heal", BOUND, || relay.heal().is_ok());
    let back = Instant::now();
    // Up to five seconds of reconnecting, and a survey.
    testkit::wait_for("the way back", RETURN_BOUND + Duration::from_secs(2), || !polled(&cluster));
    println!("leader cut off: back after {:?}", back.elapsed());
    assert_done(&cluster, cluster.trigger("many"));
    testkit::wait_for("the queue to run empty", BOUND, || {
        cluster.block_on(rabbit.depth("core")).is_ok_and(|d| d.ready == 0)
    });
    cluster.kill("scheduler-1");
    assert_no_instant_lost(&cluster);
}

/// Started before RabbitMQ: both work without it, and with it once it is there.
#[test]
fn d_07_scheduler_and_worker_start_without_rabbitmq() {
    let services = testkit::shared();
    let direct = services.fresh_vhost();
    let port = direct.rsplit(':').next().unwrap().split('/').next().unwrap().parse().unwrap();
    let mut relay = Relay::start(port).unwrap();
    let url = relay.url(&direct);
    relay.cut();
    let mut cluster = cluster(url);
    cluster.start_all(1, 2);
    assert_done(&cluster, cluster.trigger("many"));
    testkit::wait_for("the heal", BOUND, || relay.heal().is_ok());
    testkit::wait_for("the way back", RETURN_BOUND + Duration::from_secs(2), || !polled(&cluster));
    assert_done(&cluster, cluster.trigger("many"));
    cluster.kill("scheduler-1");
    assert_no_instant_lost(&cluster);
}
