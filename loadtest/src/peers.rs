//! Other schedulers on the same machine, each by a small program of its own under `peers/`: installed when they are asked for, and
//! said to be absent, with the reason, where they can't be.

use crate::report::Peer;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::Command;

/// What installing or building may take.
const PREPARE: Duration = Duration::from_secs(600);
/// What a measurement may take beyond the measured time: start, waiting for the first instant, end.
const BESIDE: Duration = Duration::from_secs(120);

/// What each peer gets to do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Jobs that fire once a minute.
    pub jobs: u32,
    /// How long is measured.
    pub seconds: u32,
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// Measures all peers, one after the other.
///
/// # Errors
/// There is no place for what is installed.
pub async fn measure(load: Load, redis_url: &str, tell: impl Fn(&str)) -> Result<Vec<Peer>> {
    let place = tempfile::Builder::new().prefix("shardcron-peers-").tempdir().context("a folder for the peers")?;
    tell("installing the peers written in Python");
    let python = python(&place).await;
    let mut peers = Vec::new();
    for (name, script) in [("APScheduler", "apscheduler_peer.py"), ("celery beat", "celery_peer.py")] {
        tell(name);
        let run = async {
            let python = python.as_ref().map_err(|e| anyhow::anyhow!("{e:#}"))?;
            let mut command = Command::new(python);
            command.arg(sources().join(script)).args(["--redis", redis_url]);
            ask(command, load).await
        };
        peers.push(run.await.unwrap_or_else(|e| absent(name, &e)));
    }
    tell("tokio-cron-scheduler");
    let run = async {
        let program = tokio_cron(&place).await?;
        ask(Command::new(program), load).await
    };
    peers.push(run.await.unwrap_or_else(|e| absent("tokio-cron-scheduler", &e)));
    Ok(peers)
}

fn absent(name: &str, why: &anyhow::Error) -> Peer {
    Peer { name: name.to_owned(), absent: Some(format!("could not be measured: {why:#}")), ..Peer::default() }
}

async fn python(place: &TempDir) -> Result<PathBuf> {
    let home = place.path().join("python");
    let mut make = Command::new("python3");
    make.args(["-m", "venv"]).arg(&home);
    finish(make, PREPARE).await.context("python3 -m venv (Debian: python3-venv)")?;
    let python = home.join("bin").join("python");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(sources().join("requirements.txt"));
    finish(install, PREPARE).await.context("pip install")?;
    Ok(python)
}

async fn tokio_cron(place: &TempDir) -> Result<PathBuf> {
    let target = place.path().join("target");
    let mut build = Command::new("cargo");
    build.args(["build", "--release", "--quiet", "--locked", "--manifest-path"]);
    build.arg(sources().join("tokio-cron").join("Cargo.toml")).env("CARGO_TARGET_DIR", &target);
    finish(build, PREPARE).await.context("cargo build")?;
    Ok(target.join("release").join("tokio-cron-peer"))
}

/// Its last line is its answer.
async fn ask(mut command: Command, load: Load) -> Result<Peer> {
    command.args(["--jobs", &load.jobs.to_string(), "--seconds", &load.seconds.to_string()]);
    let patience = Duration::from_secs(u64::from(load.seconds)) + BESIDE;
    let said = finish(command, patience).await?;
    let line = said.lines().last().context("it said nothing")?;
    serde_json::from_str(line).with_context(|| format!("it said '{line}'"))
}

async fn finish(mut command: Command, patience: Duration) -> Result<String> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(patience, command.output())
        .await
        .with_context(|| format!("not ready within {} s", patience.as_secs()))??;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}", output.status, said.lines().last().unwrap_or("it said nothing"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
