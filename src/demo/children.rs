//! The demo's processes: this same program, once for each role.

use crate::config::Config;
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Scheduler,
    Worker,
}

/// The processes by name. Dropped, they are killed.
pub struct Children {
    dir: PathBuf,
    variables: Vec<(&'static str, String)>,
    running: Vec<(String, Role, Child)>,
}

impl Children {
    pub fn new(dir: &Path, config: &Config) -> Self {
        let embedded = config.broker.url.is_none();
        let mut variables = vec![
            ("SHARDCRON_LEDGER_URL", config.ledger.url.clone()),
            ("SHARDCRON_BROKER_URL", config.broker.url.clone().unwrap_or_default()),
            ("SHARDCRON_BROKER_PREFIX", config.broker.prefix.clone()),
            ("SHARDCRON_REDIS_URL", config.redis.url.clone().unwrap_or_default()),
            ("SHARDCRON_REDIS_PREFIX", config.redis.prefix.clone()),
            ("SHARDCRON_HTTP_LISTEN", "127.0.0.1:0".to_owned()),
            ("SHARDCRON_LOG_FILTER", config.log.filter.clone()),
            // A demo's patience: who is silent for a second and a half is lost.
            ("SHARDCRON_WORKER_LOST_AFTER", "1500ms".to_owned()),
            ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "200ms".to_owned()),
            ("SHARDCRON_SCHEDULER_LEASE_TTL", "2s".to_owned()),
            ("SHARDCRON_WORKER_TIERS", "core=2".to_owned()),
        ];
        if embedded {
            variables.push(("SHARDCRON_BROKER_POLL", "20ms".to_owned()));
        }
        Children { dir: dir.to_owned(), variables, running: Vec::new() }
    }

    pub fn log_of(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    pub fn start(&mut self, role: Role, name: &str) -> Result<()> {
        let program = std::env::current_exe().context("this program's own path")?;
        let log = File::create(self.log_of(name)).with_context(|| self.log_of(name).display().to_string())?;
        let (word, name_variable) = match role {
            Role::Scheduler => ("scheduler", "SHARDCRON_SCHEDULER_NAME"),
            Role::Worker => ("worker", "SHARDCRON_WORKER_NAME"),
        };
        let child = Command::new(program)
            .arg(word)
            // A configuration file of the place where the demo is tried must not change the show.
            .current_dir(&self.dir)
            .env_remove("SHARDCRON_CONFIG")
            .envs(self.variables.iter().map(|(k, v)| (k, v)))
            .env(name_variable, name)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        self.running.push((name.to_owned(), role, child));
        Ok(())
    }

    pub fn pid_of(&self, name: &str) -> Option<u32> {
        self.running.iter().find(|(n, ..)| n == name).map(|(.., child)| child.id())
    }

    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let pid = self.pid_of(name).with_context(|| format!("{name} does not run"))?;
        kill(Pid::from_raw(i32::try_from(pid)?), signal).with_context(|| format!("{signal} to {name}"))
    }

    /// SIGKILL, as by the kernel.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let at = self.running.iter().position(|(n, ..)| n == name).with_context(|| format!("{name} does not run"))?;
        let (.., mut child) = self.running.remove(at);
        child.kill().with_context(|| format!("killing {name}"))?;
        child.wait().with_context(|| format!("waiting for {name}"))?;
        Ok(())
    }

    /// A process that has ended by itself, which none should.
    pub fn ended(&mut self) -> Option<String> {
        self.running
            .iter_mut()
            .find_map(|(name, _, child)| matches!(child.try_wait(), Ok(Some(_))).then(|| name.clone()))
    }

    /// Asks all to end, and waits.
    pub async fn stop_all(&mut self) {
        for (.., child) in &self.running {
            if let Ok(pid) = i32::try_from(child.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        for (.., child) in &mut self.running {
            while matches!(child.try_wait(), Ok(None)) && std::time::Instant::now() < until {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (.., child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
