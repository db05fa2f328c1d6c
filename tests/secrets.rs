//! Passwords and tokens: in no log at its most talkative, in no view, in no error, and on no command line (Z-05).

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_domain::execution::Phase;
use std::time::Duration;
use support::{Cluster, get, web_of};

const BOUND: Duration = Duration::from_secs(60);

/// One request to a service of the test: its address, and what it was asked with. It answers 202 and says no more.
fn service_of_one_call() -> (String, std::sync::mpsc::Receiver<String>) {
    use std::io::{BufRead, BufReader, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (asked, requests) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let head: Vec<String> =
                BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let _ = stream.write_all(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = asked.send(head.join("\n"));
        }
    });
    (url, requests)
}

fn password(url: &str) -> String {
    let (_, rest) = url.split_once("://").unwrap();
    rest.rsplit_once('@').and_then(|(who, _)| Some(who.split_once(':')?.1.to_owned())).unwrap_or_default()
}

/// What everybody on the machine may read of all processes.
fn command_lines() -> String {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("cmdline"));
    processes
        .filter_map(|file| std::fs::read(file).ok())
        .map(|line| String::from_utf8_lossy(&line).into_owned())
        .collect()
}

/// Says that it has its password, by its length, and waits for the test.
const REPORT: &str = "echo ${#PASSWORD} $MODE > begun.new; mv begun.new begun; until [ -e done ]; do sleep 0.05; done";

/// Neither a header's secret nor the password of a service nor the address of a callback is in a log at its most talkative, in an answer
/// of the web server or of a command, or on a command line (Z-05).
#[test]
fn z_05_no_secret_is_in_a_log_a_view_or_a_command_line() {
    let services = testkit::shared();
    let mut cluster = Cluster::on_services();
    let (service, requests) = service_of_one_call();
    for (name, value) in [
        ("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0"),
        ("SHARDCRON_LOG_FILTER", "trace"),
        ("SHARDCRON_WORKER_ALLOW_HTTP", &service),
        ("SHARDCRON_WORKER_ALLOW_SECRETS", "env:SETTLE_KEY"),
        ("SETTLE_KEY", "s3cret-of-the-test"),
        ("SHARDCRON_WORKER_PASS_ENV", "PASSWORD"),
        ("PASSWORD", "passw0rd-of-the-test"),
    ] {
        cluster.set(name, value);
    }
    cluster.apply(&format!(
        "[job.settle]\n[job.settle.handler.http]\nurl = \"{service}/settle\"\ncallback = true\n\
         headers = {{ Authorization = {{ env = \"SETTLE_KEY\", prefix = \"Bearer \" }} }}\n\
         [job.report]\nhandler = {{ exec = {{ run = [\"sh\", \"-c\", \"{REPORT}\"], env = {{ MODE = \"full\" }}, limits = {{ open_files = 64 }} }} }}\n"
    ));
    cluster.start_all(1, 1);
    // A program that has a password of the worker's by its environment. While it runs, everybody on the machine may see what its processes
    // were started with: of all processes, whoever they belong to.
    let report = cluster.trigger("report");
    testkit::wait_for("the program to run", BOUND, || cluster.path("begun").exists());
    assert_eq!(std::fs::read_to_string(cluster.path("begun")).unwrap(), "20 full\n", "it has its password");
    let mut seen = vec![("the command lines of all processes".to_owned(), command_lines())];
    assert!(seen[0].1.contains("full") || seen[0].1.contains("begun"), "the program's is among them");
    std::fs::write(cluster.path("done"), "").unwrap();
    let execution = cluster.trigger("settle");
    let request = requests.recv_timeout(BOUND).unwrap();
    let header = |name: &str| {
        let found = request.lines().find_map(|l| l.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)));
        found.unwrap_or_else(|| panic!("{name}: {request}")).1.to_owned()
    };
    assert_eq!(header("authorization"), "Bearer s3cret-of-the-test");
    for name in ["scheduler-1", "worker-1"] {
        for path in
            ["/", "/healthz", "/livez", "/metrics", "/workers", "/jobs", "/jobs/pending", "/callbacks/x", "/none"]
        {
            seen.push((format!("{name}{path}"), get(&format!("{}{path}", web_of(&cluster, name))).1));
        }
    }
    let callback = header("shardcron-callback");
    let taken = ureq::post(&callback).send(r#"{"rows":1}"#).unwrap();
    assert_eq!(taken.status().as_u16(), 202);
    assert_eq!(cluster.wait_end(execution, BOUND).phase, Phase::Success);
    assert_eq!(cluster.wait_end(report, BOUND).phase, Phase::Success);
    let (id, report) = (execution.to_string(), report.to_string());
    for arguments in [
        &["doctor"][..],
        &["jobs", "list"],
        &["jobs", "show", "settle"],
        &["jobs", "show", "report"],
        &["jobs", "versions", "settle"],
        &["executions", "list"],
        &["executions", "show", &id, "--shards"],
        &["executions", "show", &report, "--shards"],
        &["logs", &id],
        &["logs", &report],
        &["explain", "settle"],
        &["dead", "list"],
        &["workers"],
        &["migrate"],
    ] {
        for arguments in [arguments.to_vec(), [arguments, &["--json"]].concat()] {
            let output = cluster.cli(&arguments);
            let text =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            assert!(!text.is_empty() || arguments[0] == "logs", "{arguments:?}");
            seen.push((arguments.join(" "), text));
        }
    }
    seen.push(("the command lines afterwards".to_owned(), command_lines()));
    for name in ["scheduler-1", "worker-1"] {
        let log = cluster.log(name);
        assert!(log.contains("TRACE") || log.contains("DEBUG"), "{name} is talkative");
        seen.push((format!("the log of {name}"), log));
        let trace = std::fs::read_to_string(cluster.path(&format!("{name}.trace"))).unwrap();
        assert!(!trace.is_empty());
        seen.push((format!("the trace of {name}"), trace));
    }
    let secrets = [
        "s3cret-of-the-test".to_owned(),
        "passw0rd-of-the-test".to_owned(),
        password(cluster.ledger_url()),
        password(cluster.amqp_url()),
        password(services.redis_url()),
        callback[callback.len() - 64..].to_owned(),
    ];
    for secret in secrets.iter().filter(|secret| secret.len() > 7) {
        for (what, text) in &seen {
            let at = text.find(secret.as_str());
            let around = at.map(|at| &text[text.floor_char_boundary(at.saturating_sub(200))..at]);
            assert!(around.is_none(), "{what} holds a secret of {} characters, after: {around:?}", secret.len());
        }
    }
}

/// A secret that somebody writes into a job is refused, wherever it stands, and the refusal quotes nothing of it; neither does what is said of
/// a file that can't be read.
#[test]
fn z_05_a_secret_in_a_job_file_is_refused_and_not_quoted() {
    let cluster = Cluster::embedded();
    let file = cluster.path("jobs.toml").display().to_string();
    for (handler, words) in [
        ("exec = { run = [\"sh\"], env = { PASSWORD = \"hush-hush\" } }", "pass_env"),
        ("exec = { run = [\"sh\"], env = { DB_TOKEN = \"hush-hush\" } }", "pass_env"),
        ("exec = { run = [\"sh\"], env = \"hush-hush\" }", "a text, expected a map"),
        ("exec = { run = [\"sh\"], env = { PASSWORD = \"hush-hush } }", "line 2"),
        ("http = { url = \"https://h/\", headers = { Authorization = \"Bearer hush-hush\" } }", "Authorization"),
        ("http = { url = \"https://h/\", headers = { \"X-Api-Key\" = \"hush-hush\" } }", "X-Api-Key"),
        ("http = { url = \"https://h/\", headers = { Cookie = [\"hush-hush\"] } }", "where the worker has a secret"),
        ("http = { url = \"https://me:hush-hush@h/\" }", "header"),
        (
            "http = { url = \"https://h/\", headers = { Authorization = { prefix = \"hush-hush\" } } }",
            "a secret has one of",
        ),
        ("sql = \"SELECT 1\", database = \"mysql://me:hush-hush@h/db\"", "database"),
    ] {
        std::fs::write(&file, format!("[job.a]\nhandler = {{ {handler} }}\n")).unwrap();
        for command in ["validate", "apply"] {
            for json in [&[][..], &["--json"]] {
                let output = cluster.cli(&[&["jobs", command, &file], json].concat());
                let said =
                    [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
                assert_eq!(output.status.code(), Some(2), "{command} {handler}: {said}");
                assert!(said.contains(words), "{command} {handler}: {said}");
                assert!(!said.contains("hush"), "{command} {handler}: {said}");
            }
        }
    }
    assert_eq!(cluster.number("SELECT COUNT(*) FROM jobs"), 0);
}

/// Services that are not there, that do not take the password, and addresses that can't be read: what is said of them, at the most talkative
/// level, holds nothing of the password, as it is written or as it is meant.
#[test]
fn z_05_no_error_about_an_address_holds_its_password() {
    let services = testkit::shared();
    let wrong = |url: &str| {
        let place = url.rsplit_once('@').map_or_else(|| url.split_once("://").unwrap().1, |(_, place)| place);
        let (scheme, user) = (url.split_once("://").unwrap().0, url.split([':', '/', '@']).nth(3).unwrap_or("me"));
        format!("{scheme}://{user}:hush-hush@{place}")
    };
    let amqp = services.fresh_vhost();
    let real = [
        ("SHARDCRON_LEDGER_URL", wrong(&services.fresh_database())),
        ("SHARDCRON_BROKER_URL", wrong(&amqp)),
        ("SHARDCRON_REDIS_URL", wrong(services.redis_url())),
    ];
    let forms = |scheme: &str, rest: &str| {
        let there = "127.0.0.1:1";
        [
            format!("{scheme}://me:hush-hush@{there}/{rest}"),
            format!("{scheme}://me:hush%40hush@{there}/{rest}"),
            format!("{scheme}://me:hu/sh@hush@{there}/{rest}"),
            format!("{scheme}://me:hu?sh#hush@{there}/{rest}"),
            format!("{scheme}://hush-hush@{there}/{rest}"),
            format!("{scheme}://me:hush-hush@127.0.0.1:port/{rest}"),
            format!("{scheme}://me:hush-hush/{rest}"),
            format!("{scheme}:/me:hush-hush@{there}/{rest}"),
            format!("{scheme}://{there}/{rest}?password=hush-hush"),
            format!("http://me:hush-hush@{there}/{rest}"),
        ]
    };
    let mut all: Vec<(&str, String)> = real.to_vec();
    for (name, scheme, rest) in [
        ("SHARDCRON_LEDGER_URL", "mysql", "db"),
        ("SHARDCRON_BROKER_URL", "amqp", "%2f"),
        ("SHARDCRON_REDIS_URL", "redis", "0"),
    ] {
        all.extend(forms(scheme, rest).into_iter().map(|url| (name, url)));
    }
    let cluster = Cluster::embedded();
    // All at once: those that are not there are waited for, for some seconds each.
    let shown: usize = std::thread::scope(|scope| {
        let look = |(name, url): &(&str, String)| {
            let output = cluster.cli_with(&[(name, url), ("SHARDCRON_LOG_FILTER", "trace")], &["doctor"]);
            let said =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            assert_eq!(output.status.code(), Some(1), "{name} = {url}: {said}");
            for part in ["hush", "sh@", "hu/", "hu?"] {
                assert!(!said.contains(part), "{name} = {url}: {said}");
            }
            usize::from(said.contains("…@127.0.0.1"))
        };
        let all: Vec<_> = all.iter().map(|one| scope.spawn(move || look(one))).collect();
        all.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert!(shown > all.len() / 3, "people see which server it is: {shown} of {}", all.len());
    // Processes that wait for services that are not there, or for the right password.
    for (n, (name, url)) in real.iter().enumerate() {
        let mut cluster = Cluster::embedded();
        cluster.set("SHARDCRON_LOG_FILTER", "trace");
        cluster.set("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0");
        cluster.set(name, url);
        for role in ["scheduler", "worker"] {
            cluster.start(role, role);
            let words = ["waiting for the ledger", "broker is not there yet", "redis"][n];
            cluster.wait_log(role, words, BOUND);
            let log = cluster.log(role);
            assert!(!log.contains("hush"), "{role} with {name}: {log}");
        }
    }
}
