//! A cluster of real processes on real services, for the tests of the whole program.

#![allow(
    dead_code,
    clippy::unwrap_used,
    missing_docs,
    reason = "each test file uses its part of it; a fault of the set-up ends the test"
)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shardcron_broker::rabbitmq::{RabbitMq, RabbitOptions};
use shardcron_domain::trace::TraceLine;
use shardcron_domain::{ExecutionId, conformance};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::{ExecutionRow, Ledger, SqlArg};
use std::fs::File;
use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The bounds hold for a machine that has time for the cluster. Where more runs than there are processors, everything waits for its
/// turn in proportion.
pub fn slack() -> u32 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap();
    let load: f64 = load.split(' ').next().unwrap().parse().unwrap();
    let processors = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    (load / processors).clamp(1.0, 8.0).round() as u32
}

/// One process of the cluster.
pub struct Process {
    pub name: String,
    child: Child,
}

/// Processes, their services, and a way to look into the ledger. Dropped, everything is killed; if the test fails, the ends of the
/// processes' logs are printed.
pub struct Cluster {
    dir: TempDir,
    variables: Vec<(String, String)>,
    pub processes: Vec<Process>,
    runtime: tokio::runtime::Runtime,
    ledger: SqlLedger,
    ledger_url: String,
    amqp_url: Option<String>,
    conforms: bool,
}

impl Cluster {
    /// On RabbitMQ, Redis and MySQL or MariaDB, with a database, a vhost and a key prefix of its own.
    pub fn on_services() -> Self {
        let services = testkit::shared();
        Self::on(&services.fresh_database(), Some(services.fresh_vhost()), Some(services.redis_url().to_owned()))
    }

    /// On SQLite in one folder, without any service.
    pub fn embedded() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let mut cluster = Self::on(&url, None, None);
        cluster.dir = dir;
        cluster
    }

    /// On the given services.
    pub fn on(ledger_url: &str, amqp_url: Option<String>, redis_url: Option<String>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let ledger = runtime.block_on(SqlLedger::connect(ledger_url, SqlOptions::default())).unwrap();
        runtime.block_on(ledger.migrate()).unwrap();
        let variables = [
            ("SHARDCRON_LEDGER_URL", ledger_url.to_owned()),
            ("SHARDCRON_BROKER_URL", amqp_url.clone().unwrap_or_default()),
            ("SHARDCRON_REDIS_URL", redis_url.unwrap_or_default()),
            ("SHARDCRON_REDIS_PREFIX", testkit::unique_prefix()),
            ("SHARDCRON_HTTP_LISTEN", "off".to_owned()),
            ("SHARDCRON_WORKER_LOST_AFTER", "2s".to_owned()),
            ("SHARDCRON_SCHEDULER_LEASE_TTL", "2s".to_owned()),
            ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms".to_owned()),
            ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "1s".to_owned()),
            ("SHARDCRON_WORKER_TIERS", "core=4,bulk=2".to_owned()),
            ("SHARDCRON_WORKER_ALLOW_EXEC", "sh,sleep,false,true,cat".to_owned()),
            ("SHARDCRON_LOG_FILTER", "info,shardcron_actors=debug,shardcron_broker=debug".to_owned()),
        ];
        let variables = variables.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        Cluster {
            dir: tempfile::tempdir().unwrap(),
            variables,
            processes: Vec::new(),
            runtime,
            ledger,
            ledger_url: ledger_url.to_owned(),
            amqp_url,
            conforms: true,
        }
    }

    /// Sets a variable for the processes that are started from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.retain(|(k, _)| k != name);
        self.variables.push((name.to_owned(), value.to_owned()));
    }

    /// A variable as the processes have it.
    pub fn variable(&self, name: &str) -> String {
        self.variables.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()).unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn ledger_url(&self) -> &str {
        &self.ledger_url
    }

    pub fn amqp_url(&self) -> &str {
        self.amqp_url.as_deref().unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardcron"));
        command.args(arguments).current_dir(self.dir.path()).env_remove("SHARDCRON_CONFIG").stdin(Stdio::null());
        command.envs(self.variables.iter().map(|(k, v)| (k, v)));
        command
    }

    /// Starts a process; its name is also the scheduler's or worker's.
    pub fn start(&mut self, role: &str, name: &str) -> u32 {
        let command = self.command(&[role]);
        self.spawn(command, name)
    }

    /// Starts another program as a process of the cluster.
    pub fn start_program(&mut self, mut command: Command, name: &str) -> u32 {
        command.current_dir(self.dir.path()).env_remove("SHARDCRON_CONFIG").stdin(Stdio::null());
        command.envs(self.variables.iter().map(|(k, v)| (k, v)));
        self.spawn(command, name)
    }

    fn spawn(&mut self, mut command: Command, name: &str) -> u32 {
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log"))).unwrap();
        let child = command
            .env("SHARDCRON_SCHEDULER_NAME", name)
            .env("SHARDCRON_WORKER_NAME", name)
            .env("SHARDCRON_LOG_TRACE_FILE", self.path(&format!("{name}.trace")))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let pid = child.id();
        self.processes.push(Process { name: name.to_owned(), child });
        pid
    }

    pub fn start_all(&mut self, schedulers: usize, workers: usize) {
        for n in 1..=schedulers {
            self.start("scheduler", &format!("scheduler-{n}"));
        }
        for n in 1..=workers {
            self.start("worker", &format!("worker-{n}"));
        }
    }

    pub fn signal(&self, name: &str, signal: Signal) {
        let process = self.processes.iter().find(|p| p.name == name).unwrap_or_else(|| panic!("{name} does not run"));
        kill(Pid::from_raw(process.child.id() as i32), signal).unwrap();
    }

    /// SIGKILL, and its end awaited.
    pub fn kill(&mut self, name: &str) {
        let at = self.processes.iter().position(|p| p.name == name).unwrap_or_else(|| panic!("{name} does not run"));
        let mut process = self.processes.remove(at);
        process.child.kill().unwrap();
        process.child.wait().unwrap();
    }

    /// SIGTERM, and its orderly end awaited; returns how long it took.
    pub fn terminate(&mut self, name: &str, bound: Duration) -> Duration {
        self.signal(name, Signal::SIGTERM);
        let began = Instant::now();
        let at = self.processes.iter().position(|p| p.name == name).unwrap();
        let mut process = self.processes.remove(at);
        let status = testkit::wait_until_some(&format!("{name} to end"), bound, || process.child.try_wait().unwrap());
        assert!(status.success(), "{name} ended with {status}");
        began.elapsed()
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// Runs a command of the program.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        // People change what has ended, too: a trace without them would not conform.
        self.command(arguments).env("SHARDCRON_LOG_TRACE_FILE", self.path("cli.trace")).output().unwrap()
    }

    /// The same with other variables, which are its alone.
    pub fn cli_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        let mut command = self.command(arguments);
        command.env("SHARDCRON_LOG_TRACE_FILE", self.path("cli.trace")).envs(variables.iter().copied());
        command.output().unwrap()
    }

    /// Runs a command with `--json` and reads its answer.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.cli(&[arguments, &["--json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(text.trim())
            .unwrap_or_else(|e| panic!("{arguments:?}: {e}: {text} {}", String::from_utf8_lossy(&output.stderr)))
    }

    pub fn apply(&self, jobs: &str) {
        let file = self.path("jobs.toml");
        std::fs::write(&file, jobs).unwrap();
        let output = self.cli(&["jobs", "apply", &file.display().to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Fires a job and returns the execution.
    pub fn trigger(&self, job: &str) -> ExecutionId {
        let answer = self.json(&["trigger", job]);
        answer["execution"].as_str().unwrap_or_else(|| panic!("not fired: {answer}")).parse().unwrap()
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn ledger(&self) -> &SqlLedger {
        &self.ledger
    }

    /// A client of the cluster's RabbitMQ, connected.
    pub fn rabbit(&self) -> RabbitMq {
        self.block_on(async {
            let rabbit =
                RabbitMq::connect(self.amqp_url(), RabbitOptions { name: "test".into(), ..RabbitOptions::default() })
                    .unwrap();
            let mut state = shardcron_broker::Broker::state(&rabbit);
            state.wait_for(|s| *s == shardcron_broker::BrokerState::Up).await.unwrap();
            rabbit
        })
    }

    pub fn execution(&self, id: ExecutionId) -> ExecutionRow {
        self.block_on(self.ledger.execution(id)).unwrap().unwrap()
    }

    /// Waits for the execution's end.
    pub fn wait_end(&self, id: ExecutionId, bound: Duration) -> ExecutionRow {
        testkit::wait_until_some(&format!("execution {id} to end"), bound, || {
            Some(self.execution(id)).filter(|row| row.phase.is_terminal())
        })
    }

    /// Waits until so many shards of an execution have ended.
    pub fn wait_ended(&self, id: ExecutionId, shards: u32, bound: Duration) -> ExecutionRow {
        testkit::wait_until_some(&format!("{shards} shards of {id} to end"), bound, || {
            Some(self.execution(id)).filter(|row| row.succeeded + row.failed >= shards)
        })
    }

    /// One number from the ledger.
    pub fn number(&self, sql: &str) -> i64 {
        let rows = self.block_on(self.ledger.query(sql, &[])).unwrap();
        match rows.first().and_then(|r| r.first()) {
            Some(SqlArg::Int(n)) => *n,
            other => panic!("{sql}: {other:?}"),
        }
    }

    /// What must hold of an execution that has ended, counted from the tables (S1, S2): every shard ended once, one result each.
    pub fn assert_exact(&self, id: ExecutionId, shards: u32) {
        let (tally, _) = self.block_on(self.ledger.tally(id)).unwrap();
        shardcron_domain::invariants::check_tally(&tally).unwrap();
        assert_eq!(
            (tally.shards_total, tally.results, tally.counted),
            (shards.into(), shards.into(), shards.into()),
            "{tally:?}"
        );
    }

    /// The same where some have ended badly: every shard ended once, and no result twice.
    pub fn assert_exact_ends(&self, id: ExecutionId, shards: u32) {
        let (tally, _) = self.block_on(self.ledger.tally(id)).unwrap();
        assert_eq!((tally.shards_total, tally.terminal, tally.counted), (shards.into(), shards.into(), shards.into()));
        assert_eq!(tally.recorded_twice, 0, "{tally:?}");
    }

    /// Waits for a line in a process's log.
    pub fn wait_log(&self, name: &str, words: &str, bound: Duration) {
        testkit::wait_for(&format!("'{words}' in the log of {name}"), bound, || self.log(name).contains(words));
    }

    /// Waits until so many workers beat.
    pub fn wait_workers(&self, count: usize) {
        testkit::wait_for(&format!("{count} workers"), Duration::from_secs(30), || {
            self.json(&["workers"])
                .as_array()
                .is_some_and(|w| w.iter().filter(|w| w["state"] == "alive").count() >= count)
        });
    }

    /// The name of the scheduler that leads, once the ledger's epoch is beyond `after`.
    pub fn wait_leader(&self, after: i64) -> (String, i64) {
        testkit::wait_until_some("a leader", Duration::from_secs(30), || {
            let leader = self.block_on(self.ledger.leadership()).ok()?;
            let name = leader.holder.split('/').next()?.to_owned();
            (leader.epoch.0 > after).then_some((name, leader.epoch.0))
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        if self.conforms && !std::thread::panicking() {
            self.check_traces();
        }
        if std::thread::panicking() {
            let logs = std::fs::read_dir(self.dir.path()).into_iter().flatten().flatten().map(|e| e.path());
            for path in logs.filter(|p| p.extension().is_some_and(|e| e == "log")) {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                eprintln!("== {}\n{}", path.display(), lines[lines.len().saturating_sub(40)..].join("\n"));
            }
        }
    }
}

impl Cluster {
    /// What `/healthz` of a process says; it must listen (`SHARDCRON_HTTP_LISTEN`).
    pub fn health(&self, name: &str) -> Value {
        serde_json::from_str(&get(&format!("{}/healthz", web_of(self, name))).1).unwrap()
    }

    /// The modes that a process is in.
    pub fn modes(&self, name: &str) -> Vec<String> {
        let health = self.health(name);
        let modes = health["degraded"].as_array().unwrap().iter();
        modes.map(|m| m["mode"].as_str().unwrap().to_owned()).collect()
    }

    /// Takes processes that ended by themselves off the list; true if there was one.
    pub fn reap(&mut self) -> bool {
        let before = self.processes.len();
        self.processes.retain_mut(|p| matches!(p.child.try_wait(), Ok(None)));
        self.processes.len() < before
    }
}

/// Where a process says that its web server listens.
pub fn web_of(cluster: &Cluster, name: &str) -> String {
    testkit::wait_until_some("the web server", Duration::from_secs(60), || {
        let log = cluster.log(name);
        let at = log.find("local_addr=")? + "local_addr=".len();
        Some(format!("http://{}", log[at..].split_whitespace().next()?))
    })
}

/// A GET, with the status and the body.
pub fn get(url: &str) -> (u16, String) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let mut response = agent.get(url).call().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

impl Cluster {
    /// The test itself writes as a worker or a leader would: what the processes say is not all that happened.
    pub fn test_plays_a_part(&mut self) {
        self.conforms = false;
    }

    /// Whether what all processes said of themselves keeps the rules, over all their lives. They must have ended: the files of
    /// processes that run are no picture of one moment.
    fn check_traces(&self) {
        let files = std::fs::read_dir(self.dir.path()).into_iter().flatten().flatten().map(|e| e.path());
        let mut lines: Vec<TraceLine> = Vec::new();
        for path in files.filter(|p| p.extension().is_some_and(|e| e == "trace")) {
            let text = std::fs::read_to_string(&path).unwrap();
            let read =
                |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{}: {e}: {line}", path.display()));
            lines.extend(text.lines().map(read));
        }
        match conformance::check(&lines) {
            Ok(summary) => println!("the traces conform: {summary:?}"),
            Err(deviation) => panic!("the traces do not conform: {deviation}"),
        }
    }
}

/// A program of an example that serves: started, listening, and ended when dropped.
pub struct Program {
    child: Child,
    pub url: String,
}

impl Program {
    /// Starts it and waits for its first line, `listening on <address>`.
    pub fn listening(program: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).to_owned();
        Program { child, url }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
