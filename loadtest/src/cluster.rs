//! The real program's processes: this same executable, once for each role. Started, killed and measured by their ids.

use crate::procfs;
use crate::services::Services;
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LOG_TAIL_LINES: usize = 20;
/// What a process may take to hand back and leave before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `shardcron scheduler`
    Scheduler,
    /// `shardcron worker`
    Worker,
}

/// How the processes are configured, where it differs from the program's defaults.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Tiers with their concurrency, as `core=8`.
    pub tiers: String,
    /// More variables of the configuration.
    pub variables: Vec<(&'static str, String)>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        ClusterOptions { tiers: "core=8".into(), variables: Vec::new() }
    }
}

struct Process {
    name: String,
    role: Role,
    child: Child,
}

/// Variables that a process has for itself, by its name; they win over those that all have.
pub type OwnVariables = Box<dyn Fn(&str) -> Result<Vec<(&'static str, String)>> + Send + Sync>;

/// The processes by name. Dropped, they are killed.
pub struct Cluster {
    dir: TempDir,
    variables: Vec<(&'static str, String)>,
    own: Option<OwnVariables>,
    running: Vec<Process>,
    started: BTreeMap<&'static str, u32>,
}

/// Has this process end when the one that started it is gone, however that went. The other end of standard input is held by it
/// and by nobody else; a parent-death signal would need unsafe code.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let mut nothing = [0; 16];
        while matches!(std::io::stdin().read(&mut nothing), Ok(n) if n > 0) {}
        std::process::exit(1);
    });
}

impl Cluster {
    /// No process yet.
    ///
    /// # Errors
    /// There is no place for the logs.
    pub fn new(services: &Services, options: ClusterOptions) -> Result<Self> {
        let mut variables = vec![
            ("SHARDCRON_LEDGER_URL", services.sql_url.clone()),
            ("SHARDCRON_BROKER_URL", services.amqp_url.clone()),
            ("SHARDCRON_BROKER_PREFIX", services.prefix.clone()),
            ("SHARDCRON_REDIS_URL", services.redis_url.clone()),
            ("SHARDCRON_REDIS_PREFIX", services.prefix.clone()),
            ("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0".to_owned()),
            ("SHARDCRON_WORKER_TIERS", options.tiers),
        ];
        variables.extend(options.variables);
        let dir = tempfile::Builder::new().prefix("shardcron-loadtest-").tempdir().context("a folder for the logs")?;
        Ok(Cluster { dir, variables, own: None, running: Vec::new(), started: BTreeMap::new() })
    }

    /// Says what the processes that are started from now on have for themselves.
    pub fn give_each(&mut self, own: OwnVariables) {
        self.own = Some(own);
    }

    /// Where the logs and the processes' working directory are.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// Leaves the folder there when this is dropped; gives its path.
    pub fn keep_folder(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }

    /// Starts a process; gives its name.
    ///
    /// # Errors
    /// This program can't be started again.
    pub fn start(&mut self, role: Role) -> Result<String> {
        let (word, name_variable) = match role {
            Role::Scheduler => ("scheduler", "SHARDCRON_SCHEDULER_NAME"),
            Role::Worker => ("worker", "SHARDCRON_WORKER_NAME"),
        };
        let number = self.started.entry(word).or_insert(0);
        *number += 1;
        let name = format!("{word}-{number}");
        let log = File::create(self.log_of(&name)).with_context(|| format!("the log of {name}"))?;
        let own = self.own.as_ref().map_or_else(|| Ok(Vec::new()), |own| own(&name))?;
        let program = std::env::current_exe().context("this program's own path")?;
        let mut command = Command::new(program);
        for (variable, _) in std::env::vars_os() {
            // Only what the scenario says may configure what it measures; but the log's filter is for the person who looks.
            if variable.to_string_lossy().starts_with("SHARDCRON_") && variable != "SHARDCRON_LOG" {
                command.env_remove(variable);
            }
        }
        let child = command
            .args([crate::AS_SHARDCRON, word])
            .current_dir(self.dir.path())
            .envs(self.variables.iter().map(|(k, v)| (k, v)))
            .envs(own)
            .env(name_variable, &name)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        self.running.push(Process { name: name.clone(), role, child });
        Ok(name)
    }

    /// The names of the processes of a role that run.
    pub fn names(&self, role: Role) -> Vec<String> {
        self.running.iter().filter(|p| p.role == role).map(|p| p.name.clone()).collect()
    }

    /// Names and ids of all that run.
    pub fn pids(&self) -> Vec<(String, u32)> {
        self.running.iter().map(|p| (p.name.clone(), p.child.id())).collect()
    }

    /// SIGKILL, as by the kernel.
    ///
    /// # Errors
    /// There is no such process.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let at = self.running.iter().position(|p| p.name == name).with_context(|| format!("{name} does not run"))?;
        let mut process = self.running.remove(at);
        process.child.kill().with_context(|| format!("killing {name}"))?;
        process.child.wait().with_context(|| format!("waiting for {name}"))?;
        Ok(())
    }

    /// SIGKILL for all: what follows is to have the machine to itself.
    pub fn kill_all(&mut self) {
        for mut process in self.running.drain(..) {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }

    /// A signal to a process, such as SIGSTOP.
    ///
    /// # Errors
    /// There is no such process.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let process = self.running.iter().find(|p| p.name == name).with_context(|| format!("{name} does not run"))?;
        let pid = Pid::from_raw(i32::try_from(process.child.id()).context("a process id")?);
        nix::sys::signal::kill(pid, signal).with_context(|| format!("sending {signal} to {name}"))
    }

    /// All of a process's log.
    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.log_of(name)).unwrap_or_default()
    }

    /// The incarnations that a worker has said it had, in hexadecimal digits without dashes, as the ledger names owners.
    pub fn incarnations(&self, name: &str) -> Vec<String> {
        let log = self.log(name);
        let said = log.lines().filter(|line| line.contains("worker runs"));
        let ids = said.filter_map(|line| line.split("worker_incarnation=").nth(1)?.split_whitespace().next());
        ids.map(|id| id.replace('-', "").to_uppercase()).collect()
    }

    /// An error if a process has ended by itself, which none should, with the end of its log.
    ///
    /// # Errors
    /// See above.
    pub fn check(&mut self) -> Result<()> {
        let ended = self.running.iter_mut().find_map(|p| match p.child.try_wait() {
            Ok(Some(status)) => Some((p.name.clone(), status)),
            _ => None,
        });
        match ended {
            Some((name, status)) => {
                bail!("{name} ended by itself ({status}); the end of its log:\n{}", self.tail_of(&name))
            }
            None => Ok(()),
        }
    }

    /// Starts another in the place of each process that has ended by itself, so that what follows has all it needs.
    ///
    /// # Errors
    /// This program can't be started again.
    pub fn restart_ended(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        self.running.retain_mut(|p| {
            let gone = matches!(p.child.try_wait(), Ok(Some(_)));
            ended.extend(gone.then_some(p.role));
            !gone
        });
        ended.into_iter().try_for_each(|role| self.start(role).map(drop))
    }

    /// The end of a process's log.
    pub fn tail_of(&self, name: &str) -> String {
        let text = self.log(name);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
    }

    fn log_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    /// Asks all to end in order, and waits; what takes too long is killed when this is dropped.
    pub async fn stop(mut self) {
        for (name, _) in self.pids() {
            // An error means that it is gone already.
            let _ = self.signal(&name, Signal::SIGTERM);
        }
        let until = Instant::now() + STOP_PATIENCE;
        while Instant::now() < until && self.running.iter_mut().any(|p| matches!(p.child.try_wait(), Ok(None))) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in &mut self.running {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// Peak memory by process, in MiB.
pub fn memory(pids: &[(String, u32)]) -> BTreeMap<String, f64> {
    pids.iter().filter_map(|(name, pid)| Some((name.clone(), tenths(procfs::peak_rss_mib(*pid)?)))).collect()
}

fn tenths(mib: f64) -> f64 {
    (mib * 10.0).round() / 10.0
}

/// Processor seconds by part: the workers together, everything else by its name.
pub fn cpu(pids: &[(String, u32)]) -> BTreeMap<String, f64> {
    let mut parts = BTreeMap::new();
    for (name, pid) in pids {
        let part = match name.rsplit_once('-') {
            Some((role @ ("worker" | "scheduler"), _)) => format!("{role}s"),
            _ => name.clone(),
        };
        *parts.entry(part).or_insert(0.0) += procfs::cpu_seconds(*pid).unwrap_or(0.0);
    }
    parts
}
