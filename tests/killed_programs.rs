//! Workers killed with SIGKILL in the middle of what programs and services do in stages: while a program maps, and while a service has
//! still to call back.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod support;

use nix::sys::signal::Signal;
use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::limits::EMITTED_PER_WRITE;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use support::{Cluster, web_of};

const BOUND: Duration = Duration::from_secs(90);
/// Flights whose plane is not in the register, as published with the data.
const UNMATCHED: &str = "\"unmatched\":52606";
/// All of them.
const FLIGHTS: i64 = 336_776;
/// Groups of carriers that the example's program emits.
const GROUPS: u32 = 4;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/map-reduce-programs")
}

fn summaries(cluster: &Cluster, id: ExecutionId) -> i64 {
    let hex: String = id.as_bytes().iter().map(|byte| format!("{byte:02X}")).collect();
    cluster.number(&format!(
        "SELECT COUNT(*) FROM results WHERE HEX(execution_id) = '{hex}' AND summary LIKE '%{UNMATCHED}%'"
    ))
}

/// What the first attempt emits instead of the example's groups: each carrier alone, again and again, more than the worker keeps back
/// (`EMITTED_PER_WRITE`), so that rows of it are in the ledger. Then it is silent until it is killed.
const CUT_OTHERWISE: &str = "    if os.environ[\"SHARDCRON_ATTEMPT\"] == \"1\":
        for carrier in sorted(tails_by_carrier(folder)) * 50:
            say(\"emit\", payload={\"carriers\": [carrier], \"flights\": 0})
        __import__(\"time\").sleep(300)
";

/// A worker dies when hundreds of shards that its program emitted stand in the ledger. They were cut in another way than the next attempt
/// cuts them, and of none of them anything is left: the shards, their slices and the answer are the next attempt's alone.
#[test]
fn a_worker_killed_while_a_program_emits_leaves_each_shard_once() {
    let mut cluster = Cluster::embedded();
    let folder = cluster.path("programs");
    std::fs::create_dir(&folder).unwrap();
    let program = std::fs::read_to_string(example().join("by_carrier.py")).unwrap();
    let emits = "    for flights, carriers in groups:\n        say(\"emit\"";
    assert!(program.contains(emits), "the example emits otherwise by now");
    std::fs::write(folder.join("by_carrier.py"), program.replace(emits, &format!("{CUT_OTHERWISE}{emits}"))).unwrap();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3");
    cluster.set("SHARDCRON_WORKER_WORK_DIR", &folder.display().to_string());
    cluster.set("SHARDCRON_WORKER_LEFTOVERS", "kill");
    let job = std::fs::read_to_string(example().join("job.toml")).unwrap();
    cluster.apply(&job.replace("max = 16", "max = 1000"));
    cluster.start_all(1, 1);
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reconcile-flights/data");
    let answer = cluster.json(&["trigger", "by-carrier", "--param", &format!("folder={}", data.display())]);
    let id: ExecutionId = answer["execution"].as_str().unwrap().parse().unwrap();
    let emitted = |cluster: &Cluster, attempt: u32| {
        cluster.number(&format!("SELECT COUNT(*) FROM emitted WHERE attempt = {attempt}"))
    };
    let written = i64::try_from(EMITTED_PER_WRITE).unwrap();
    testkit::wait_for("emitted shards to be in the ledger", BOUND, || emitted(&cluster, 1) >= written);
    cluster.kill("worker-1");
    assert_eq!(cluster.execution(id).shards_total, 1, "what is emitted is no shard before the good end");
    assert_eq!(emitted(&cluster, 1), written);
    cluster.start("worker", "worker-2");
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}: {}", cluster.json(&["executions", "show", &id.to_string()]));
    assert_eq!(
        (emitted(&cluster, 1), emitted(&cluster, 2)),
        (0, GROUPS.into()),
        "what the dead attempt emitted is gone"
    );
    cluster.assert_exact(id, GROUPS + 2);
    assert_eq!(summaries(&cluster, id), 1, "the reducing shard's answer");
    let shards = cluster.json(&["executions", "show", &id.to_string(), "--shards"])["shards"].clone();
    for shard in &shards.as_array().unwrap()[1..=GROUPS as usize] {
        let payload = &shard["slice"]["task"]["payload"];
        assert!(payload["flights"].as_u64() > Some(0), "cut by the dead attempt: {shard}");
    }
    assert_eq!(shards[GROUPS as usize + 1]["slice"]["reduce"]["tasks"], GROUPS, "{shards}");
    let rows = "SELECT row_count FROM results ORDER BY shard_index DESC LIMIT 1";
    assert_eq!(cluster.number(rows), FLIGHTS, "each flight in one shard");
    let lost = cluster.block_on(shardcron_store::Ledger::attempts(cluster.ledger(), id, 100)).unwrap();
    assert_eq!(lost.iter().filter(|a| a.outcome == "worker_lost").count(), 1, "{lost:?}");
}

/// A request as a service gets it.
struct Request {
    line: String,
    head: String,
    body: String,
}

impl Request {
    fn header(&self, name: &str) -> &str {
        let named = |line: &'_ str| line.split_once(": ").is_some_and(|(n, _)| n.eq_ignore_ascii_case(name));
        let line = self.head.lines().find(|line| named(line)).unwrap_or_else(|| panic!("{name}: {}", self.head));
        &line[name.len() + 2..]
    }
}

/// A service that takes its time: 202 for whatever is asked of it, until it is told that it is done; then GET has the answer.
struct Service {
    url: String,
    requests: Receiver<Request>,
    done: Arc<AtomicBool>,
}

impl Service {
    /// `more`: further lines of the head of a 202.
    fn start(more: &'static str) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (asked, requests) = channel();
        let done = Arc::new(AtomicBool::new(false));
        let is_done = done.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                // A worker that is killed breaks off what it says.
                let Some(request) = read(&mut BufReader::new(&stream)) else { continue };
                let (status, more, body) = match request.line.starts_with("GET ") && is_done.load(Ordering::SeqCst) {
                    true => ("200 OK", "", "{\"rows\":2}"),
                    false => ("202 Accepted", more, ""),
                };
                let head = format!("HTTP/1.1 {status}\r\n{more}content-length: {}\r\nconnection: close", body.len());
                let _ = write!(stream, "{head}\r\n\r\n{body}");
                if asked.send(request).is_err() {
                    return;
                }
            }
        });
        Service { url, requests, done }
    }

    fn next(&self) -> Request {
        self.requests.recv_timeout(BOUND).expect("a request to the service")
    }
}

fn read(stream: &mut impl BufRead) -> Option<Request> {
    let head: Vec<String> = stream.lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let mut request = Request { line: head.first()?.clone(), head: head.join("\n"), body: String::new() };
    if request.line.starts_with("POST ") {
        let mut body = vec![0; request.header("content-length").parse().ok()?];
        stream.read_exact(&mut body).ok()?;
        request.body = String::from_utf8(body).ok()?;
    }
    Some(request)
}

/// What a service brings, and what it is told.
fn call_back(url: &str, body: &str) -> u16 {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    agent.post(url).send(body).unwrap().status().as_u16()
}

fn settle(service: &Service) -> String {
    format!(
        "[job.settle]\nretry = {{ attempts = 3, first = \"50ms\" }}\n[job.settle.handler.http]\nurl = \"{}/settle\"\n\
         callback = true\npoll = {{ first = \"50ms\", max = \"50ms\" }}\n",
        service.url
    )
}

/// Starts a scheduler and a worker whose door is at this port (0: any), and fires the job: the execution, and what the service was asked.
fn asked(cluster: &mut Cluster, service: &Service, port: u16) -> (ExecutionId, Request) {
    cluster.set("SHARDCRON_WORKER_ALLOW_HTTP", &service.url);
    cluster.apply(&settle(service));
    cluster.start("scheduler", "scheduler-1");
    cluster.set("SHARDCRON_HTTP_LISTEN", &format!("127.0.0.1:{port}"));
    cluster.start("worker", "worker-1");
    let id = cluster.trigger("settle");
    (id, service.next())
}

/// The execution's only shard ended once, by the second attempt, with the answer that was meant for it.
fn assert_second_attempt_counts(cluster: &Cluster, id: ExecutionId) {
    let row = cluster.wait_end(id, BOUND);
    assert_eq!(row.phase, Phase::Success, "{row:?}");
    cluster.assert_exact(id, 1);
    assert_eq!(cluster.number("SELECT MAX(row_count) FROM results"), 2, "the answer of the second attempt");
    let attempts = cluster.block_on(shardcron_store::Ledger::attempts(cluster.ledger(), id, 100)).unwrap();
    let mut ends: Vec<_> = attempts.iter().map(|a| (a.attempt, a.outcome.as_str())).collect();
    ends.sort_unstable();
    assert_eq!(ends, [(1, "worker_lost"), (2, "success")], "{attempts:?}");
}

fn still_runs(cluster: &Cluster, id: ExecutionId) {
    let shard = cluster.block_on(shardcron_store::Ledger::shards(cluster.ledger(), id, 0, 1)).unwrap().remove(0);
    assert_eq!((shard.phase, shard.attempt), (shardcron_domain::shard::Phase::Running, 2), "{shard:?}");
    assert_eq!(cluster.number("SELECT COUNT(*) FROM results"), 0);
}

/// A worker is killed while a service has still to call back, and another one is started at its address. The service's late answer to the
/// dead attempt reaches the new process and is refused; the answer to the new attempt ends the shard, once.
#[test]
fn the_late_callback_of_a_killed_workers_attempt_ends_nothing() {
    let mut cluster = Cluster::on_services();
    let service = Service::start("");
    let port = testkit::Port::reserve().unwrap();
    let (id, first) = asked(&mut cluster, &service, port.number());
    assert_eq!(first.header("shardcron-attempt"), "1");
    cluster.kill("worker-1");
    cluster.start("worker", "worker-2");
    let second = service.next();
    assert_eq!(second.header("shardcron-attempt"), "2");
    assert_eq!(first.header("idempotency-key"), second.header("idempotency-key"));
    assert_eq!(first.body, second.body, "a service that remembers keys may compare bodies");
    let (old, new) = (first.header("shardcron-callback"), second.header("shardcron-callback"));
    assert!(old.starts_with(&web_of(&cluster, "worker-2")), "it must reach the successor to show anything: {old}");
    let forged = format!("{}.{}", &new[..new.len() - 65], &old[old.len() - 64..]);
    let late = [("", 410), ("/fail", 410), ("/progress", 410)].map(|(kind, status)| (format!("{old}{kind}"), status));
    for (url, status) in late.iter().map(|(url, status)| (url.as_str(), *status)).chain([(forged.as_str(), 404)]) {
        assert_eq!(call_back(url, "{\"rows\":1000,\"message\":\"late\"}"), status, "{url}");
    }
    still_runs(&cluster, id);
    assert_eq!(call_back(new, "{\"rows\":2}"), 202);
    assert_second_attempt_counts(&cluster, id);
    assert_eq!((call_back(old, "{\"rows\":1000}"), call_back(new, "{\"rows\":2}")), (410, 202));
    assert!(service.requests.try_recv().is_err(), "asked once for each attempt");
}

/// A worker is killed while it asks a service that said where. The next attempt goes on asking there and sends nothing again; the late
/// callback of the first one is refused.
#[test]
fn the_successor_of_a_killed_worker_goes_on_asking_where_the_service_said() {
    let mut cluster = Cluster::embedded();
    let service = Service::start("location: /jobs/7\r\n");
    let port = testkit::Port::reserve().unwrap();
    let (id, first) = asked(&mut cluster, &service, port.number());
    assert!(first.line.starts_with("POST /settle "), "{}", first.line);
    let asked = service.next();
    assert!(asked.line.starts_with("GET /jobs/7 "), "{}", asked.line);
    cluster.kill("worker-1");
    cluster.start("worker", "worker-2");
    let second = std::iter::repeat_with(|| service.next())
        .inspect(|r| assert!(r.line.starts_with("GET /jobs/7 "), "sent again: {}", r.line))
        .find(|r| r.header("shardcron-attempt") == "2")
        .unwrap();
    assert_eq!(first.header("idempotency-key"), second.header("idempotency-key"));
    assert_eq!(call_back(first.header("shardcron-callback"), "{\"rows\":1000}"), 410);
    still_runs(&cluster, id);
    service.done.store(true, Ordering::SeqCst);
    assert_second_attempt_counts(&cluster, id);
    let rest: Vec<Request> = service.requests.try_iter().collect();
    assert!(rest.iter().all(|r| r.line.starts_with("GET /jobs/7 ")), "the request was sent once");
}

/// A worker stands still while a service has still to call back, and is taken for lost. When it goes on, its door is still open: whatever it
/// answers to the service, what comes in there is not counted, and the new attempt waits for its own answer.
#[test]
fn the_callback_of_a_worker_that_was_taken_for_dead_ends_nothing() {
    let mut cluster = Cluster::embedded();
    let service = Service::start("");
    let (id, first) = asked(&mut cluster, &service, 0);
    cluster.signal("worker-1", Signal::SIGSTOP);
    cluster.start("worker", "worker-2");
    let second = service.next();
    assert_eq!(second.header("shardcron-attempt"), "2");
    assert_eq!(first.header("idempotency-key"), second.header("idempotency-key"));
    // The system takes it in, and the worker reads it as soon as it goes on.
    let (host, path) = first.header("shardcron-callback").strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut late = std::net::TcpStream::connect(host).unwrap();
    let body = "{\"rows\":1000}";
    let head = format!("POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\nconnection: close", body.len());
    write!(late, "{head}\r\n\r\n{body}").unwrap();
    cluster.signal("worker-1", Signal::SIGCONT);
    let mut status = String::new();
    BufReader::new(late).read_line(&mut status).unwrap();
    assert!(status.contains(" 202 ") || status.contains(" 410 "), "{status}");
    // In good order: all that it had to record is recorded or refused.
    cluster.terminate("worker-1", BOUND);
    still_runs(&cluster, id);
    assert_eq!(call_back(second.header("shardcron-callback"), "{\"rows\":2}"), 202);
    assert_second_attempt_counts(&cluster, id);
}
