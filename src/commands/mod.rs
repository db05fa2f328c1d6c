//! The commands that ask and answer; those that stay are in `serve`.

pub mod backfill;
pub mod dead;
mod dead_letters;
pub mod doctor;
pub mod executions;
pub mod explain;
pub mod import;
pub mod jobs;
pub mod logs;
pub mod migrate;
pub mod operate;
pub mod pause;
pub mod prune;
pub mod trigger;
pub mod workers;

use crate::config::Config;
use crate::wiring::{self, Wired};
use anyhow::{Context, Result};
use std::future::Future;
use std::process::ExitCode;
use std::time::Duration;

/// The command was used wrongly: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Misuse(pub String);

/// Runs a command on a small runtime of its own.
pub fn run(command: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    crate::serve::log_plainly();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("the runtime")?;
    let result = runtime.block_on(command);
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

/// Connects for one command: a person is waiting, so a server that is away is an error after a while and not a reason to wait.
pub async fn connect(config: &Config) -> Result<Wired> {
    let name = format!("shardcron-cli-{}", std::process::id());
    let wired =
        tokio::time::timeout(Duration::from_secs(15), wiring::connect(config, &name)).await.map_err(|_| {
            anyhow::anyhow!(
                "the ledger {} is not reachable; is it up, and is ledger.url right?",
                shardcron_domain::address::masked(&config.ledger.url)
            )
        })??;
    Ok(wired)
}

/// For a command that only looks: a SQLite file that is not there is an error, not a file to be made.
pub async fn connect_to_look(config: &Config) -> Result<Wired> {
    if let Some(path) = config.ledger.url.strip_prefix("sqlite:").map(|p| p.strip_prefix("//").unwrap_or(p))
        && !std::path::Path::new(path.split('?').next().unwrap_or(path)).exists()
    {
        let hint = "name the ledger with --ledger or SHARDCRON_LEDGER_URL, or make one with: shardcron jobs apply FILE";
        return Err(Misuse(format!("there is no ledger at {}; {hint}", config.ledger.url)).into());
    }
    connect_migrated(config).await
}

/// Like [`connect`], with the tables there.
pub async fn connect_migrated(config: &Config) -> Result<Wired> {
    let wired = connect(config).await?;
    if config.ledger.migrate {
        crate::wiring::migrate(&*wired.ports.ledger).await.context("bringing the ledger's tables up to date")?;
    }
    Ok(wired)
}

/// Who does it, for the audit table.
pub fn who() -> String {
    let named = std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).ok().filter(|name| !name.is_empty());
    // Where nothing says it, as in a container, the system knows who runs this; at least by number.
    let user = named.unwrap_or_else(|| {
        let uid = nix::unistd::Uid::effective();
        nix::unistd::User::from_uid(uid).ok().flatten().map_or_else(|| format!("uid {uid}"), |user| user.name)
    });
    format!("{user} (command line)")
}

/// Milliseconds UTC.
pub fn now_ms() -> i64 {
    use shardcron_actors::Clock;
    shardcron_actors::SystemClock::default().now_ms()
}
