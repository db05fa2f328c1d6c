//! The program as its operator meets it: start-up without services, health, configuration, job files.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::Value;
use shardcron_domain::execution::Phase;
use std::time::Duration;
use support::{Cluster, get, web_of};
use testkit::{Redis, Relay, wait_for};

const BOUND: Duration = Duration::from_secs(60);
const JOB: &str = "[job.demo]\nhandler = { rust = \"noop\" }\nshards = { modulo = 8 }\noverlap = \"allow\"\n";

/// Schedulers and workers wait for services that are not up yet, say so in one line, and work without a restart (D-07).
#[test]
fn d_07_processes_start_before_their_services() {
    let services = testkit::shared();
    let redis = Redis::start().unwrap();
    let port = |url: &str| {
        url.rsplit_once('@').map_or(url, |(_, r)| r).split(['/', ':']).nth(1).unwrap().parse::<u16>().unwrap()
    };
    let (database, vhost) = (services.fresh_database(), services.fresh_vhost());
    let (mut sql, mut amqp) = (Relay::start(port(&database)).unwrap(), Relay::start(port(&vhost)).unwrap());
    let mut redis_relay = Relay::start(redis.port()).unwrap();
    let mut cluster = Cluster::on(&database, Some(amqp.url(&vhost)), Some(redis_relay.url(&redis.url())));
    cluster.set("SHARDCRON_LEDGER_URL", &sql.url(&database));
    for relay in [&mut sql, &mut amqp, &mut redis_relay] {
        relay.cut();
    }
    cluster.start_all(1, 1);
    for name in ["scheduler-1", "worker-1"] {
        cluster.wait_log(name, "waiting for the ledger", BOUND);
    }
    sql.heal().unwrap();
    cluster.wait_log("scheduler-1", "broker is not there yet", BOUND);
    amqp.heal().unwrap();
    redis_relay.heal().unwrap();
    cluster.apply(JOB);
    let execution = cluster.trigger("demo");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    assert_eq!(cluster.log("worker-1").matches("waiting for the ledger").count(), 1, "one line, not a stack of them");
}

#[test]
fn health_metrics_workers_and_pending_are_served_by_every_process() {
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
    cluster.apply(&(JOB.to_owned() + "[job.long]\nhandler = { exec = [\"sleep\", \"20\"] }\ntier = \"bulk\"\n"));
    cluster.start_all(1, 1);
    let (scheduler, worker) = (web_of(&cluster, "scheduler-1"), web_of(&cluster, "worker-1"));
    let execution = cluster.trigger("demo");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    let long = cluster.trigger("long");
    wait_for("the long shard to run", BOUND, || cluster.execution(long).running == Some(1));

    let (status, health) = get(&format!("{scheduler}/healthz"));
    let health: Value = serde_json::from_str(&health).unwrap();
    assert_eq!((status, health["status"].as_str()), (200, Some("ok")), "{health}");
    assert_eq!(health["leader"]["epoch"], 1, "{health}");
    assert!(health["dependencies"].as_array().unwrap().iter().all(|d| d["ok"] == true), "{health}");

    let (_, metrics) = get(&format!("{scheduler}/metrics"));
    for name in [
        "shardcron_leader 1",
        "shardcron_epoch 1",
        "shardcron_decisions_total{kind=\"fired\"} 2",
        "shardcron_publish_window{tier=\"core\"}",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    let (_, metrics) = get(&format!("{worker}/metrics"));
    assert!(metrics.contains("shardcron_results_recorded_total{tier=\"core\",outcome=\"success\"} 8"), "{metrics}");
    assert!(metrics.contains("shardcron_group_commit_entries_bucket{lane=\"record\""), "{metrics}");
    assert!(!metrics.contains(&execution.to_string()), "ids are no labels");

    let (_, workers) = get(&format!("{worker}/workers"));
    assert!(workers.contains("worker-1"), "{workers}");
    let (_, pending) = get(&format!("{worker}/jobs/pending"));
    assert!(pending.contains(&long.to_string()) && pending.contains("bulk"), "{pending}");
}

/// A job that is applied again unchanged keeps its version and its next instant; a changed one is a new version, and an
/// execution stays with the version that it was fired under.
#[test]
fn a_01_applying_unchanged_jobs_changes_nothing() {
    let cluster = Cluster::embedded();
    let file = "[job.often]\nschedule = { every = \"6m\" }\nhandler = { rust = \"noop\" }\n";
    cluster.apply(file);
    let before = cluster.json(&["jobs", "list"]);
    for _ in 0..3 {
        cluster.apply(file);
    }
    assert_eq!(cluster.json(&["jobs", "list"])["jobs"], before["jobs"]);
    cluster.apply(&file.replace("6m", "7m"));
    assert_eq!(cluster.json(&["jobs", "list"])["jobs"][0]["version"], 2);
}

/// Faults of a job file are misuse: exit code 2, with file, line, job and key; nothing of the file is applied.
#[test]
fn a_faulty_job_file_is_refused_as_a_whole() {
    let cluster = Cluster::embedded();
    let path = cluster.path("bad.toml");
    std::fs::write(&path, "[job.good]\nhandler = { rust = \"noop\" }\n\n[job.bad]\nhandler = { rust = \"noop\" }\nretry = { attempts = 0 }\n").unwrap();
    let output = cluster.cli(&["jobs", "apply", &path.display().to_string()]);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("bad.toml, line 6: job 'bad': retry.attempts"), "{words}");
    assert_eq!(cluster.json(&["jobs", "list"])["jobs"], Value::Array(Vec::new()));
}

#[test]
fn next_needs_no_service_and_prints_utc() {
    let cluster = Cluster::embedded();
    let path = cluster.path("jobs.toml");
    std::fs::write(
        &path,
        "[job.nightly]\nschedule = { cron = \"30 2 * * *\", timezone = \"America/New_York\" }\nhandler = { rust = \"noop\" }\n\
         [job.never]\nschedule = { cron = \"0 0 30 2 *\" }\nhandler = { rust = \"noop\" }\n",
    )
    .unwrap();
    let file = path.display().to_string();
    let answer = cluster.json(&["jobs", "next", &file, "--from", "2025-03-08T12:00:00Z", "--count", "2"]);
    assert_eq!(answer[0]["job"], "never");
    assert_eq!(answer[0]["next"], Value::Array(Vec::new()));
    // 9 March 2025: 02:30 does not exist in New York; the first real instant after the gap is 03:00 EDT.
    assert_eq!(answer[1]["job"], "nightly");
    assert_eq!(answer[1]["zone"], "America/New_York");
    assert_eq!(answer[1]["next"], serde_json::json!(["2025-03-09T07:00:00Z", "2025-03-10T06:30:00Z"]));
    assert_eq!(answer[1]["marks"][0]["mark"], "clock_change");
    let people = cluster.cli(&["jobs", "next", &file, "--from", "2025-03-08T12:00:00Z", "--count", "2"]);
    let people = String::from_utf8_lossy(&people.stdout).into_owned();
    assert!(people.contains("Sun 2025-03-09 03:00:00 EDT  2025-03-09T07:00:00Z  clocks go forward"), "{people}");
    assert!(people.contains("02:30 does not exist, fires 03:00") && people.contains("never"), "{people}");
    let skips = cluster.path("skips.toml");
    let schedule = "{ cron = \"30 2 * * *\", timezone = \"America/New_York\", dst = { gap = \"skip\" } }";
    std::fs::write(&skips, format!("[job.skips]\nschedule = {schedule}\nhandler = {{ rust = \"noop\" }}\n")).unwrap();
    let skips = skips.display().to_string();
    let lost = cluster.json(&["jobs", "next", &skips, "--from", "2025-03-08T12:00:00Z", "--count", "1"]);
    assert_eq!(lost[0]["next"], serde_json::json!(["2025-03-10T06:30:00Z"]));
    assert_eq!(
        (&lost[0]["marks"][0]["mark"], &lost[0]["marks"][0]["at"]),
        (&serde_json::json!("clock_change"), &serde_json::json!("2025-03-09T07:00:00Z"))
    );
    let people = cluster.cli(&["jobs", "next", &skips, "--from", "2025-03-08T12:00:00Z", "--count", "1"]);
    let people = String::from_utf8_lossy(&people.stdout).into_owned();
    assert!(people.contains("02:30 does not exist, does not fire"), "{people}");
    for count in ["0", "10001", "-1", "many"] {
        let refused = cluster.cli(&["jobs", "next", &file, &format!("--count={count}")]);
        assert_eq!(refused.status.code(), Some(2), "{count}");
    }
    let missing = cluster.cli(&["jobs", "next", "no-such-job"]);
    assert_eq!(missing.status.code(), Some(2), "{}", String::from_utf8_lossy(&missing.stderr));
    std::fs::write(&path, "[job.bad]\nschedule = { cron = \"0 61 * * *\" }\nhandler = { rust = \"noop\" }\n").unwrap();
    let bad = cluster.cli(&["jobs", "next", &file, "--json"]);
    let words = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert!(bad.status.code() == Some(2) && words.contains("job 'bad'"), "{words}");
}

#[test]
fn next_knows_applied_jobs_and_marks_exceptions() {
    let cluster = Cluster::embedded();
    std::fs::write(cluster.path("holidays.txt"), "# two days\n2026-12-25..2026-12-26 Christmas\n").unwrap();
    cluster.apply(
        "[job.daily]\nhandler = { rust = \"noop\" }\n\
         schedule = { cron = \"0 9 * * *\", except = [\"calendar: holidays.txt\"] }\n",
    );
    // The calendar is frozen into the job: its file is no longer needed.
    std::fs::remove_file(cluster.path("holidays.txt")).unwrap();
    let answer = cluster.json(&["jobs", "next", "daily", "--from", "2026-12-24T12:00:00Z", "--count", "1"]);
    assert_eq!(answer[0]["next"], serde_json::json!(["2026-12-27T09:00:00Z"]));
    assert_eq!(answer[0]["marks"][0]["mark"], "skipped_exception");
    assert_eq!(answer[0]["marks"][0]["instants"], 2);
    assert!(answer[0]["marks"][0]["text"].as_str().unwrap().contains("Christmas"), "{answer}");
}

/// All faults of all files at once, and hints, which change no exit code (I-09).
#[test]
fn i_09_validate_tells_every_fault_and_hints_at_typos() {
    let cluster = Cluster::embedded();
    let folder = cluster.path("jobs.d");
    std::fs::create_dir(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("a.toml", "[job.often]\nschedule = { cron = \"* 3 * * *\" }\nhandler = { rust = \"noop\" }\n");
    write("notes.txt", "not a job file");
    let folder = folder.display().to_string();
    let valid = cluster.json(&["jobs", "validate", &folder]);
    assert_eq!(valid["valid"], serde_json::json!(["often"]));
    assert!(valid["hints"][0]["hint"].as_str().unwrap().contains("fires 60 times"), "{valid}");
    assert_eq!(cluster.cli(&["jobs", "validate", &folder]).status.code(), Some(0));
    write(
        "b.toml",
        "[job.often]\nhandler = { rust = \"noop\" }\n\n[job.x]\nhandler = { rust = \"noop\" }\ntier = \"X\"\ntimeout = 1\n",
    );
    let refused = cluster.cli(&["jobs", "validate", &folder]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{words}");
    for wanted in ["b.toml, line 6: job 'x': tier", "b.toml, line 7: job 'x'", "a.toml, line 1, too"] {
        assert!(words.contains(wanted), "{wanted}: {words}");
    }
}

/// `* 3 * * *` is accepted as it stands, and whoever looks at what comes of it, before or after, is told that it fires 60 times (I-09).
/// There is no form for jobs in the web server, so the command line is where they look.
#[test]
fn i_09_a_star_for_the_minute_is_taken_and_told() {
    let cluster = Cluster::embedded();
    let file = cluster.path("often.toml").display().to_string();
    std::fs::write(&file, "[job.often]\nschedule = { cron = \"* 3 * * *\" }\nhandler = { rust = \"noop\" }\n").unwrap();
    let words = "fires 60 times";
    let said = |arguments: &[&str]| {
        let output = cluster.cli(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let applied = said(&["jobs", "apply", &file]);
    assert!(applied.contains("created") && applied.contains(words), "{applied}");
    let instant = |day: u32, minute: usize| format!("2026-01-0{day}T03:{minute:02}:00Z");
    let mut all: Vec<String> = (0..60).map(|minute| instant(1, minute)).collect();
    all.push(instant(2, 0));
    for target in [file.as_str(), "often"] {
        let look = ["jobs", "next", target, "--from", "2026-01-01T00:00:00Z", "--count", "61"];
        let preview = cluster.json(&look);
        assert_eq!(preview[0]["next"], serde_json::json!(all), "each minute of one hour of each day");
        assert!(preview[0]["hints"][0].as_str().is_some_and(|hint| hint.contains(words)), "{preview}");
        let text = said(&look);
        assert!(text.contains("03:00") && text.contains("03:59") && text.contains(words), "{text}");
    }
    let once = file.replace("often", "once");
    std::fs::write(&once, "[job.once]\nschedule = { cron = \"0 3 * * *\" }\nhandler = { rust = \"noop\" }\n").unwrap();
    assert!(!said(&["jobs", "next", &once]).contains("hint"), "what is meant gets none");
}

/// A server whose tables have the row format of old ones unless a statement says otherwise, and three processes that migrate at once: all end
/// well, each step is there once, none of the indexes is too long, and nothing at all happens the second time. Who comes while one migrates
/// waits (B-04). The versions of the case: a server that says that it is MySQL 5.7 is refused in words before anything is made; the others
/// are those that the test is run with.
#[test]
fn b_04_three_processes_migrate_whatever_the_row_format() {
    let server = testkit::Sql::start_with(&["--innodb-default-row-format=compact"]).unwrap();
    let mut cluster = Cluster::embedded();
    let migrate = |cluster: &Cluster| {
        std::thread::scope(|scope| {
            let three = [(); 3].map(|()| scope.spawn(|| cluster.cli(&["migrate"])));
            for output in three.map(|process| process.join().unwrap()) {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
        });
    };
    cluster.set("SHARDCRON_LEDGER_URL", &server.create_database("fresh").unwrap());
    migrate(&cluster);
    let tables = "SELECT table_name, row_format, create_time FROM information_schema.tables WHERE table_schema = 'fresh' ORDER BY 1";
    let steps = "SELECT version, installed_on, success, HEX(checksum) FROM fresh.shardcron_migrations ORDER BY 1";
    let (made, done) = (server.execute(tables).unwrap(), server.execute(steps).unwrap());
    let compact: Vec<&str> = made.lines().filter(|line| !line.contains("\tDynamic\t")).collect();
    assert!(compact.len() == 1 && compact[0].starts_with("shardcron_migrations\tCompact"), "{compact:?}");
    let versions: Vec<&str> = done.lines().map(|line| line.split('\t').next().unwrap()).collect();
    let mut once = versions.clone();
    once.dedup();
    assert!(versions == once && versions.len() >= 11, "each step once: {versions:?}");
    migrate(&cluster);
    assert_eq!(
        (server.execute(tables).unwrap(), server.execute(steps).unwrap()),
        (made, done),
        "nothing happens again"
    );

    // One that migrates, for as long as this connection has its lock.
    let url = server.create_database("waited").unwrap();
    cluster.set("SHARDCRON_LEDGER_URL", &url);
    let one = shardcron_store::sql::SqlOptions { max_connections: 1, ..Default::default() };
    let other = cluster.block_on(shardcron_store::sql::SqlLedger::connect(&url, one)).unwrap();
    let ask = |text: &str| cluster.block_on(other.query(text, &[])).unwrap();
    ask("SELECT GET_LOCK('shardcron:waited', 0)");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| cluster.cli(&["migrate"]));
        let waits = "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User lock'";
        wait_for("a process that waits", BOUND, || server.execute(waits).unwrap() == "1");
        let made = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = 'waited'";
        assert_eq!(server.execute(made).unwrap(), "0", "it makes nothing meanwhile");
        ask("SELECT RELEASE_LOCK('shardcron:waited')");
        let output = waiting.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_ne!(server.execute(made).unwrap(), "0");
    });
}

/// An account that may not make tables is told so, at once and with the server's words; nobody waits for it to get better (B-04).
#[test]
fn b_04_an_account_that_may_not_make_tables_is_told_so() {
    let url = testkit::shared().fresh_database();
    let name = url.rsplit_once('/').unwrap().1;
    let user = format!(
        "r{}",
        testkit::unique_prefix().chars().filter(char::is_ascii_alphanumeric).take(12).collect::<String>()
    );
    let make =
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'read-only'; GRANT SELECT ON `{name}`.* TO '{user}'@'%'");
    testkit::execute_at(&url, &make).unwrap();
    let place = url.rsplit_once('@').unwrap().1;
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_LEDGER_URL", &format!("mysql://{user}:read-only@{place}"));
    for command in ["migrate", "scheduler", "worker"] {
        let output = cluster.cli(&[command]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        assert!(
            said.contains("can't be brought up to date") && said.contains("CREATE command denied"),
            "{command}: {said}"
        );
    }
    testkit::execute_at(&url, &format!("DROP USER '{user}'@'%'")).unwrap();
}

/// A server that is too old, as this one says of itself, is refused in a sentence by whoever would migrate it, and left as it is (B-04).
#[test]
fn b_04_a_server_that_is_too_old_is_refused_before_anything_is_made() {
    // MySQL prints its version and ends if it is given one.
    if !testkit::execute_at(testkit::shared().sql_url(), "SELECT VERSION()").unwrap().contains("MariaDB") {
        return;
    }
    let old = testkit::Sql::start_with(&["--version=5.7.44-log"]).unwrap();
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_LEDGER_URL", &old.url());
    for command in [&["migrate"][..], &["scheduler"], &["worker"]] {
        let output = cluster.cli(command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        assert!(said.contains("5.7.44-log is too old; MySQL 8.0 or MariaDB 10.6 is the least"), "{command:?}: {said}");
    }
    let made = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE()";
    assert_eq!(old.execute(made).unwrap(), "0", "nothing was made");
}

/// An address that others can reach needs a token; there is none by default (Z-01).
#[test]
fn z_01_an_open_address_without_a_token_is_refused() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_HTTP_LISTEN", "0.0.0.0:0");
    let output = cluster.cli(&["scheduler"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("token"), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A file of certificates that can't be used is said at the start and by the doctor, and not in the night at a call.
#[test]
fn certificates_that_cannot_be_read_keep_a_worker_from_starting() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_WORKER_HTTP_CA", "/nowhere/ca.pem");
    let output = cluster.cli(&["worker"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("http_ca = \"/nowhere/ca.pem\""), "{said}");
    let report = cluster.cli(&["doctor"]);
    let said = String::from_utf8_lossy(&report.stdout);
    assert!(
        report.status.code() == Some(1) && said.contains("BAD  services") && said.contains("/nowhere/ca.pem"),
        "{said}"
    );
}

/// The doctor reaches each database that is configured, and shows no password (Z-05).
#[test]
fn z_05_the_doctor_looks_at_each_database_and_shows_no_password() {
    let mut cluster = Cluster::embedded();
    let there = testkit::shared().fresh_database();
    let secret = there.split(':').nth(2).and_then(|rest| rest.split('@').next()).unwrap().to_owned();
    std::fs::write(cluster.path("url"), "mysql://app:hush-hush@127.0.0.1:1/orders").unwrap();
    let file = format!(
        "[databases]\ncrm = \"env:CRM_URL\"\naway = \"file:{}\"\nnobody = \"env:NOT_SET\"\nlocal = \"sqlite:///nowhere/x.db\"\n",
        cluster.path("url").display()
    );
    std::fs::write(cluster.path("shardcron.toml"), file).unwrap();
    cluster.set("CRM_URL", &there);
    let output = cluster.cli(&["doctor"]);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{report}");
    let line = |name: &str| {
        let found: Vec<&str> = report.lines().filter(|line| line.contains(&format!("databases.{name} "))).collect();
        assert_eq!(found.len(), 1, "{name}: {report}");
        found[0].to_owned()
    };
    assert!(
        line("crm").starts_with("ok") && (line("crm").contains("MariaDB") || line("crm").contains("MySQL")),
        "{report}"
    );
    assert!(line("away").starts_with("BAD") && line("away").contains("mysql://app:…@127.0.0.1:1/orders"), "{report}");
    assert!(line("nobody").contains("the variable NOT_SET is not set"), "{report}");
    assert!(line("local").contains("there is no file /nowhere/x.db"), "{report}");
    assert!(!report.contains(&secret) && !report.contains("hush"), "{report}");
    // A worker can't do without; it says which key.
    let worker = cluster.cli(&["worker"]);
    let said = String::from_utf8_lossy(&worker.stderr);
    assert!(!worker.status.success() && said.contains("databases.nobody: the variable NOT_SET"), "{said}");
    assert!(!said.contains("hush") && !said.contains(&secret), "{said}");
}

#[test]
fn e_06_the_doctor_names_what_must_be_mended() {
    let redis = Redis::start_with(&["--maxmemory-policy", "allkeys-lru"]).unwrap();
    let services = testkit::shared();
    let cluster = Cluster::on(&services.fresh_database(), Some(services.fresh_vhost()), Some(redis.url()));
    let output = cluster.cli(&["doctor"]);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("BAD") && report.contains("noeviction"), "{report}");
    let secret = services.sql_url().split(':').nth(2).and_then(|r| r.split('@').next()).unwrap();
    assert!(!report.contains(secret), "Z-05: a password in the report");
    let healthy = Cluster::on_services().cli(&["doctor"]);
    assert_eq!(healthy.status.code(), Some(0), "{}", String::from_utf8_lossy(&healthy.stdout));
}

/// Logs in JSON are one object a line, with the ids as fields.
#[test]
fn logs_in_json_on_request() {
    let mut cluster = Cluster::embedded();
    cluster.set("SHARDCRON_LOG_FORMAT", "json");
    cluster.apply(JOB);
    cluster.start("up", "all");
    let execution = cluster.trigger("demo");
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    cluster.wait_log("all", "\"message\":\"fired\"", BOUND);
    let lines: Vec<Value> = cluster.log("all").lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(lines.iter().any(|l| l["message"] == "fired" && l["execution_id"] == execution.to_string()), "{lines:?}");
}

/// Paused jobs don't fire by themselves, and say so; the pause is not undone by the scheduler (S-18).
#[test]
fn s_18_a_paused_job_stays_paused() {
    let mut cluster = Cluster::embedded();
    cluster.apply(
        "[job.tick]\nschedule = { cron = \"* * * * * *\" }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n",
    );
    cluster.start("up", "all");
    wait_for("a firing", BOUND, || cluster.number("SELECT COUNT(*) FROM executions") > 0);
    assert!(cluster.cli(&["jobs", "pause", "tick"]).status.success());
    wait_for("skipped instants", BOUND, || cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 3") >= 2);
    let fired = cluster.number("SELECT COUNT(*) FROM executions");
    wait_for("more skipped instants", BOUND, || cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 3") >= 4);
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions"), fired);
    assert!(cluster.json(&["jobs", "list"])["jobs"][0]["state"].as_str().unwrap().starts_with("paused by"));
    assert!(cluster.cli(&["jobs", "resume", "tick"]).status.success());
    wait_for("it to fire again", BOUND, || cluster.number("SELECT COUNT(*) FROM executions") > fired);
}
