//! A Rust handler's effects, counted in its own tables while its workers are killed.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[allow(dead_code, reason = "the example's own main")]
#[path = "../examples/reconcile_flights.rs"]
mod example;
mod support;

use shardcron_domain::execution::Phase;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait, values};
use shardcron_store::{Ledger, SqlArg};
use std::io::Read as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::Cluster;

const BOUND: Duration = Duration::from_secs(90);

/// An effect that nothing fences: a row, outside of the attempt's transaction, with the idempotency key. Then it waits to be killed.
struct Bare;

#[async_trait]
impl ShardHandler for Bare {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let url = std::env::var("EFFECTS_URL").map_err(|e| ShardError::permanent(e.to_string()))?;
        let key = context.idempotency_key();
        let outside = shardcron_store::sql::SqlLedger::connect(&url, Default::default());
        let outside = outside.await.map_err(|e| ShardError::transient(e.to_string()))?;
        let attempt = SqlArg::Int(context.attempt.attempt.into());
        let row = vec![vec![SqlArg::Text(key), attempt]];
        outside
            .insert_rows("bare_effects", &["idempotency_key", "attempt"], row)
            .await
            .map_err(|e| ShardError::transient(e.to_string()))?;
        if context.attempt.attempt == 1 {
            std::future::pending::<()>().await;
        }
        Ok(ShardOutput::rows(1))
    }
}

/// Records one by one; of those that the parameters name, some fail always and some at the first attempt only.
struct Records;

#[async_trait]
impl ShardHandler for Records {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let names = |context: &ShardContext, what: &str| -> Vec<i64> {
            let list = context.params.get(what).and_then(|v| v.as_array());
            list.map(|all| all.iter().filter_map(serde_json::Value::as_i64).collect()).unwrap_or_default()
        };
        let (mut broken, flaky) = (names(&context, "broken"), names(&context, "flaky"));
        // What a person has mended since: a number for each line.
        let mended = context.params.get("mended").and_then(|path| std::fs::read_to_string(path.as_str()?).ok());
        broken.retain(|n| !mended.iter().flat_map(|text| text.lines()).any(|line| line == n.to_string()));
        let limit = context.params.get("skip_limit").and_then(serde_json::Value::as_u64).unwrap_or(0) as u32;
        let first = context.attempt.attempt == 1;
        while let Some(batch) = context.left_over().await? {
            let mut tx = context.transaction().await?;
            for n in batch.open() {
                note(&mut tx, batch.key(n)).await?;
            }
            tx.settle(batch);
            tx.commit_records(0).await?;
        }
        let done = match context.checkpoint {
            Some(shardcron_sdk::Checkpoint::Number(done)) => done,
            _ => 0,
        };
        for from in (done + 1..=20).step_by(5) {
            let to = from + 4;
            let mut tx = context.transaction().await?;
            let mut batch = tx.once((from..=to).map(|n| n.to_string())).await?.skip_limit(limit);
            for n in batch.open() {
                let id = from + n as i64;
                if broken.contains(&id) {
                    batch.skip(n, "it is broken");
                } else if flaky.contains(&id) && first {
                    batch.retry(n, "not this time");
                } else {
                    note(&mut tx, batch.key(n)).await?;
                }
            }
            tx.settle(batch);
            tx.commit(shardcron_sdk::Checkpoint::Number(to), 5).await?;
        }
        Ok(ShardOutput::rows(20))
    }
}

/// A result of 20 MiB, or a failure with as long a sentence, behind 5 MiB of log.
struct Huge;

#[async_trait]
impl ShardHandler for Huge {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        for _ in 0..5 {
            context.log("l".repeat(1 << 20));
        }
        let text = "\"r\"".repeat((20 << 20) / 3);
        if context.params.contains_key("fail") {
            return Err(ShardError::permanent(text));
        }
        Ok(ShardOutput { rows: Some(7), summary: Some(serde_json::json!({ "text": text })), committed: false })
    }
}

/// A map whose first shard has six records, of which some wait for a person: each attempt asks for all of them, does what is open and can
/// be done, emits what is its own, and says that all is well. The first attempt then waits to be killed.
struct MapWithRecords;

#[async_trait]
impl ShardHandler for MapWithRecords {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Map { .. } = context.slice else { return Ok(ShardOutput::rows(1)) };
        let mended = context.params.get("mended").and_then(|path| path.as_str()).is_some_and(|p| Path::new(p).exists());
        let mut tx = context.transaction().await?;
        let mut batch = tx.once((1..=6).map(|n| n.to_string())).await?;
        for n in batch.open() {
            if mended || !matches!(batch.key(n), b"3" | b"5") {
                note(&mut tx, batch.key(n)).await?;
            } else {
                batch.retry(n, "the bank is closed");
            }
        }
        tx.settle(batch);
        tx.commit_records(0).await?;
        let attempt = context.attempt.attempt;
        for n in 0..=attempt {
            context.emit(serde_json::json!({ "attempt": attempt, "n": n })).await?;
        }
        if attempt == 1 {
            std::future::pending::<()>().await;
        }
        Ok(ShardOutput::rows(6))
    }
}

async fn note(tx: &mut shardcron_sdk::Transaction<'_>, key: &[u8]) -> Result<(), ShardError> {
    let attempt = tx.context().attempt.attempt;
    tx.execute("INSERT INTO sink (record_key, attempt) VALUES (?, ?)", &values![key, attempt]).await?;
    Ok(())
}

/// Not a test: the worker program of the tests below, which start it.
#[test]
#[ignore = "the worker of the other tests"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let registry = Registry::default()
        .with("reconcile", example::Reconcile)
        .with("bare", Bare)
        .with("records", Records)
        .with("huge", Huge)
        .with("map", MapWithRecords);
    let _ = shardcron::run_with(arguments, registry);
}

fn start_worker(cluster: &mut Cluster, name: &str) {
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, name);
}

fn csv(text: &[u8], columns: &[usize], numbers: usize) -> Vec<Vec<SqlArg>> {
    let mut reader = csv::Reader::from_reader(text);
    let value = |n: usize, text: &str| {
        if n < numbers { SqlArg::Int(text.parse().unwrap()) } else { SqlArg::Text(text.to_owned()) }
    };
    let row = |record: csv::StringRecord| columns.iter().enumerate().map(|(n, at)| value(n, &record[*at])).collect();
    reader.records().map(|record| row(record.unwrap())).collect()
}

/// The demo's tables, as the demo makes them.
fn load_flights(cluster: &Cluster) {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reconcile-flights/data");
    let packed = std::fs::read(data.join("flights.csv.gz")).unwrap();
    let mut flights = Vec::new();
    flate2::read::GzDecoder::new(packed.as_slice()).read_to_end(&mut flights).unwrap();
    let planes = std::fs::read(data.join("planes.csv")).unwrap();
    let column = |text: &[u8], name: &str| {
        let headers = csv::Reader::from_reader(text).headers().unwrap().clone();
        headers.iter().position(|h| h == name).unwrap()
    };
    let of_flights = ["id", "carrier", "tailnum"].map(|name| column(&flights, name));
    let of_planes = ["tailnum", "model"].map(|name| column(&planes, name));
    cluster.block_on(async {
        let ledger = cluster.ledger();
        ledger
            .execute_script(
                "CREATE TABLE demo_flights (id BIGINT NOT NULL PRIMARY KEY, carrier VARCHAR(8) NOT NULL, tailnum VARCHAR(16) NOT NULL, KEY tails (tailnum)); \
                 CREATE TABLE demo_planes (tailnum VARCHAR(16) NOT NULL PRIMARY KEY, model VARCHAR(64) NOT NULL); \
                 CREATE TABLE demo_unmatched (flight_id BIGINT NOT NULL, carrier VARCHAR(8) NOT NULL, tailnum VARCHAR(16) NOT NULL)",
            )
            .await
            .unwrap();
        ledger.insert_rows("demo_planes", &["tailnum", "model"], csv(&planes, &of_planes, 0)).await.unwrap();
        ledger.insert_rows("demo_flights", &["id", "carrier", "tailnum"], csv(&flights, &of_flights, 1)).await.unwrap();
    });
}

/// The published answer, exactly, with a worker killed every 300 ms as long as it runs.
#[test]
fn reconcile_flights_in_rust_has_the_published_answer_whoever_is_killed() {
    let mut cluster = Cluster::on_services();
    load_flights(&cluster);
    let job = std::fs::read_to_string(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reconcile-flights/rust.toml"),
    );
    cluster.apply(&job.unwrap().replace("attempts = 3, first = \"1s\"", "attempts = 100, first = \"50ms\""));
    cluster.start("scheduler", "scheduler-1");
    for n in 1..=3 {
        start_worker(&mut cluster, &format!("worker-{n}"));
    }
    cluster.wait_workers(3);
    let execution = cluster.trigger("reconcile-flights-rust");
    let mut kills = 0;
    while !cluster.execution(execution).phase.is_terminal() && kills < 10 {
        // Each once it has something in hand, so that every kill costs.
        let running = |c: &Cluster| c.execution(execution).running.unwrap_or(0) > 0;
        testkit::poll(Duration::from_millis(300), || running(&cluster).then_some(()));
        cluster.kill(&format!("worker-{}", kills + 1));
        kills += 1;
        start_worker(&mut cluster, &format!("worker-{}", kills + 3));
        testkit::poll(Duration::from_millis(300), || cluster.execution(execution).phase.is_terminal().then_some(()));
    }
    assert!(kills >= 3, "{kills} kills");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    cluster.assert_exact(execution, 32);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM demo_unmatched"), 52_606);
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT flight_id) FROM demo_unmatched"), 52_606);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM demo_unmatched WHERE carrier = 'MQ'"), 25_397);
    let taken = "SELECT COUNT(*) FROM attempts WHERE outcome IN ('worker_lost', 'taken_over')";
    assert!(cluster.number(taken) > 0, "nobody was killed at work");
}

/// A handler whose effects are fenced by nothing does them at least once, and can tell the other side by a key that stays.
#[test]
fn bare_effects_come_at_least_once_with_the_same_key() {
    let mut cluster = Cluster::on_services();
    let url: String = cluster.variable("SHARDCRON_LEDGER_URL");
    cluster.set("EFFECTS_URL", &url);
    cluster
        .block_on(
            cluster.ledger().execute_script("CREATE TABLE bare_effects (idempotency_key VARCHAR(100), attempt INT)"),
        )
        .unwrap();
    cluster.apply("[job.bare]\nhandler = { rust = \"bare\" }\nretry = { attempts = 3, first = \"50ms\" }\n");
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    cluster.wait_workers(1);
    let execution = cluster.trigger("bare");
    let effects = "SELECT COUNT(*) FROM bare_effects";
    testkit::wait_for("the first effect", BOUND, || cluster.number(effects) == 1);
    cluster.kill("worker-1");
    start_worker(&mut cluster, "worker-2");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    assert_eq!(cluster.number(effects), 2, "at least once");
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT idempotency_key) FROM bare_effects"), 1);
    cluster.assert_exact(execution, 1);
}

/// Records fail alone: what can be done is done once, what is flaky is tried again by the next attempt, and what is broken is skipped
/// within the limit, and said (C-01, C-02, C-03).
#[test]
fn c_01_c_02_records_fail_alone_and_the_limit_stops_the_shard() {
    let mut cluster = Cluster::on_services();
    let table = "CREATE TABLE sink (record_key VARBINARY(20) NOT NULL, attempt INT NOT NULL)";
    cluster.block_on(cluster.ledger().execute_script(table)).unwrap();
    let job = |name: &str, params: &str| {
        format!(
            "[job.{name}]\nhandler = {{ rust = \"records\" }}\nparams = {{ {params} }}\n\
             retry = {{ attempts = 3, first = \"50ms\", max = \"50ms\" }}\n"
        )
    };
    let jobs = job("within", "broken = [2, 3, 7], flaky = [5, 12], skip_limit = 3")
        + &job(
            "beyond",
            &format!("broken = [2, 3, 7, 11], skip_limit = 3, mended = \"{}\"", cluster.path("mended").display()),
        );
    cluster.apply(&jobs);
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    cluster.wait_workers(1);
    let within = cluster.trigger("within");
    assert_eq!(cluster.wait_end(within, BOUND).phase, Phase::Success);
    let sink = |cluster: &Cluster, of: &str| cluster.number(&format!("SELECT {of} FROM sink"));
    assert_eq!((sink(&cluster, "COUNT(*)"), sink(&cluster, "COUNT(DISTINCT record_key)")), (17, 17));
    assert_eq!(sink(&cluster, "COUNT(CASE WHEN attempt = 2 THEN 1 END)"), 2, "the flaky ones, and they alone");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM once_records"), 0);
    let attempts = cluster.block_on(cluster.ledger().attempts(within, 10)).unwrap();
    let failed = attempts.iter().find(|a| a.outcome == "failed").unwrap().message.clone().unwrap();
    assert!(failed.contains("2 records are still to be done") && failed.contains("not this time"), "{failed}");
    let result = attempts.iter().find(|a| a.outcome == "success").unwrap().message.clone().unwrap();
    assert!(result.contains("\"count\":3") && result.contains("it is broken"), "{result}");

    cluster.block_on(cluster.ledger().execute_script("DELETE FROM sink")).unwrap();
    let beyond = cluster.trigger("beyond");
    assert_eq!(cluster.wait_end(beyond, BOUND).phase, Phase::Failed);
    let shard = cluster.block_on(cluster.ledger().shards(beyond, 0, 1)).unwrap().remove(0);
    assert_eq!(shard.checkpoint, Some(shardcron_sdk::Checkpoint::Number(10)), "the last position before it");
    let done = "(SELECT COUNT(*) FROM sink WHERE record_key IN ('1','4','5','6','8','9','10'))";
    assert_eq!(cluster.number(&format!("SELECT {done}")), 7);
    let reason = cluster.json(&["dead", "list"])[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("record '11' failed: it is broken; the 3 records"), "{reason}");
    let show = cluster.json(&["executions", "show", &beyond.to_string()]);
    let keys: Vec<&str> = show["records"].as_array().unwrap().iter().map(|r| r["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["11", "2", "3", "7"], "{show}");

    // Mended and sent back: it goes on at 11, and nothing before it is done again.
    std::fs::write(cluster.path("mended"), "11\n").unwrap();
    cluster.json(&["executions", "retry", &beyond.to_string(), "--reason", "11 is mended"]);
    assert_eq!(cluster.wait_end(beyond, BOUND).phase, Phase::Success);
    assert_eq!((sink(&cluster, "COUNT(*)"), sink(&cluster, "COUNT(DISTINCT record_key)")), (17, 17));
    assert_eq!(cluster.number(&format!("SELECT {done}")), 7);
    let before = sink(&cluster, "COUNT(CASE WHEN attempt = 1 THEN 1 END)");
    assert_eq!(before, 11, "what was done before, 12 to 15 of the batch that 11 stopped among it, is not done again");
    let skipped = "SELECT COUNT(*) FROM sink WHERE record_key IN ('2', '3', '7')";
    assert_eq!(cluster.number(skipped), 0, "what was skipped is never tried again");
}

/// A server that takes 1 MB at a time, programs that print 5 MiB and results of 20 MiB: each run keeps its real end, what is kept of it is cut
/// to the limits of the README and says so, and no connection is lost by it (B-02).
#[test]
fn b_02_what_is_larger_than_a_packet_ends_as_it_ended() {
    let server = testkit::Sql::start().unwrap();
    server.execute("SET GLOBAL max_allowed_packet = 1048576").unwrap();
    let services = testkit::shared();
    let redis = services.redis_url().to_owned();
    let mut cluster = Cluster::on(&server.url(), Some(services.fresh_vhost()), Some(redis));
    let many = |letter: char| format!("head -c 5242880 /dev/zero | tr '\\0' {letter}");
    let huge =
        "printf '{\"shardcron\":\"result\",\"summary\":\"'; head -c 20971520 /dev/zero | tr '\\0' y; printf '\"}\\n'";
    let programs =
        [("loud", many('o')), ("bad", format!("{}; {} >&2; exit 3", many('o'), many('e'))), ("line", huge.to_owned())];
    let mut jobs = String::new();
    for (name, script) in &programs {
        jobs += &format!(
            "[job.{name}]\nhandler = {{ exec = [\"sh\", \"-c\", {}] }}\nretry = {{ attempts = 1 }}\n",
            serde_json::json!(script)
        );
    }
    jobs += "[job.huge]\nhandler = { rust = \"huge\" }\n";
    jobs += "[job.sorry]\nhandler = { rust = \"huge\" }\nparams = { fail = 1 }\n";
    cluster.apply(&jobs);
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    cluster.wait_log("worker-1", "worker runs", BOUND);
    cluster.wait_log("scheduler-1", "jobs loaded", BOUND);
    let management = services.management_of(cluster.amqp_url());
    let all = ["loud", "bad", "line", "huge", "sorry"].map(|job| {
        testkit::wait_until_some("RabbitMQ to take a trigger", BOUND, || {
            let sent = management.publish("amq.default", "shardcron.triggers", job, &serde_json::json!({}));
            sent.ok().filter(|routed| *routed)
        });
        let of = testkit::wait_until_some("its execution", BOUND, || {
            cluster.block_on(cluster.ledger().executions(Some(job), None, 1)).unwrap().pop()
        });
        (job, of.id)
    });
    let of = |job: &str| all.iter().find(|(name, _)| *name == job).unwrap().1;
    for (job, id) in all {
        let wanted = if ["bad", "sorry"].contains(&job) { Phase::Failed } else { Phase::Success };
        assert_eq!(cluster.wait_end(id, BOUND).phase, wanted, "{job}");
    }
    let attempt = |job: &str| {
        let mut all = cluster.block_on(cluster.ledger().attempts(of(job), 10)).unwrap();
        assert_eq!(all.len(), 1, "{job}: none was tried again: {all:?}");
        all.remove(0)
    };
    let result = |job: &str| -> serde_json::Value {
        let text = attempt(job).message.unwrap();
        assert!(text.len() <= 64 << 10, "{job}: {} bytes", text.len());
        serde_json::from_str(&text).unwrap()
    };
    let loud = result("loud");
    assert_eq!(
        (&loud["truncated"], &loud["exit_code"], &loud["stdout_bytes"]),
        (&true.into(), &0.into(), &(5 << 20).into())
    );
    assert_eq!(result("line")["truncated"], true, "a line that is too long for a message is output");
    let huge = result("huge");
    assert!(huge["truncated"] == true && huge["bytes"].as_u64().unwrap() > 20 << 20, "{huge}");
    assert!(huge["beginning"].as_str().unwrap().starts_with("{\"text\":"), "{huge}");
    let (bad, sorry) = (attempt("bad").message.unwrap(), attempt("sorry").message.unwrap());
    assert!(bad.contains("exit code 3") && bad.len() <= 4 << 10, "{bad}");
    assert!(sorry.contains("[truncated, ") && sorry.len() <= 4 << 10, "{}", sorry.len());
    // MySQL does not say it at its usual verbosity. A look that is given up on a slow machine is a lost client too, but not for this.
    if server.flavour() == testkit::Flavour::MariaDb {
        let lost = || server.log().unwrap().contains("Got a packet bigger than");
        assert!(!lost(), "no client was lost to a packet: {}", server.log().unwrap());
        let _refused = server.execute(&format!("SELECT LENGTH('{}')", "x".repeat(2 << 20)));
        testkit::wait_for("the server to say that this one was", BOUND, lost);
    }
    for job in ["loud", "bad", "line", "huge"] {
        let output = cluster.cli(&["logs", &of(job).to_string()]);
        assert!(output.stdout.len() < (1 << 20) + 1_000, "{job}: {} bytes are kept", output.stdout.len());
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(text.contains(" bytes"), "{job}: what was cut is said: {}", &text[text.len() - 200..]);
    }
    for name in ["scheduler-1", "worker-1"] {
        let log = cluster.log(name);
        assert!(
            !log.contains("ledger_away") && !log.contains("gone away") && !log.contains("run again"),
            "{name}: {log}"
        );
    }
}

/// The first shard of a map does not end well while records of it are open, whatever its handler says and whoever was killed meanwhile:
/// the execution fails, in words that name them, and nothing that was emitted runs. Sent back, the open ones are done and no others.
#[test]
fn a_maps_first_shard_with_open_records_fails_and_is_sent_back() {
    let mut cluster = Cluster::embedded();
    let table = "CREATE TABLE sink (record_key VARBINARY(20) NOT NULL, attempt INT NOT NULL)";
    cluster.block_on(cluster.ledger().execute_script(table)).unwrap();
    let mended = cluster.path("mended");
    cluster.apply(&format!(
        "[job.pay]\nhandler = {{ rust = \"map\" }}\nshards = {{ map = {{ reduce = true }} }}\nparams = {{ mended = \"{}\" }}\n\
         retry = {{ attempts = 2, first = \"50ms\", max = \"50ms\" }}\n",
        mended.display()
    ));
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    let id = cluster.trigger("pay");
    let sink = "SELECT COUNT(*) FROM sink";
    testkit::wait_for("the records that can be done", BOUND, || cluster.number(sink) == 4);
    cluster.kill("worker-1");
    start_worker(&mut cluster, "worker-2");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.phase, row.shards_total, row.failed), (Phase::Failed, 1, 1), "nothing has grown: {row:?}");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM results"), 0);
    let why = "2 records are still to be done: '3' (tried 2 times: the bank is closed), '5' (tried 2 times: the bank is closed)";
    let reason = cluster.json(&["dead", "list"])[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains(why), "{reason}");
    let shown = cluster.cli(&["executions", "show", &id.to_string()]).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(why), "{shown}");
    assert_eq!(cluster.number(sink), 4, "what was done is not done again");

    std::fs::write(&mended, "").unwrap();
    cluster.json(&["executions", "retry", &id.to_string(), "--reason", "the bank is open"]);
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(
        (row.phase, row.shards_total),
        (Phase::Success, 6),
        "itself, four that it emitted, the reducing one: {row:?}"
    );
    cluster.assert_exact(id, 6);
    let done = |which: &str| cluster.number(&format!("{sink} WHERE {which}"));
    assert_eq!((cluster.number(sink), done("HEX(record_key) IN ('33', '35')"), done("attempt = 3")), (6, 2, 2));
    assert_eq!(cluster.number("SELECT COUNT(DISTINCT record_key) FROM sink"), 6);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM once_records"), 0);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM emitted WHERE attempt <> 3"), 0);
    let shards = cluster.json(&["executions", "show", &id.to_string(), "--shards"])["shards"].clone();
    for shard in &shards.as_array().unwrap()[1..5] {
        assert_eq!(shard["slice"]["task"]["payload"]["attempt"], 3, "{shard}");
    }
}
