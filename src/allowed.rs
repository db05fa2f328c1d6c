//! What a worker's configuration lets jobs do beyond its programs: services, secrets, and what becomes of leftovers.

use crate::config::WorkerConfig;
use anyhow::{Result, bail};
use serde::Deserialize;
use shardcron_domain::http_call::Origin;

/// What happens to processes that left their program's group and run on after its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leftovers {
    /// They are named in the log and in the attempt's output.
    #[default]
    Report,
    /// They are killed, too.
    Kill,
}

/// An entry that means nothing would be found out by the first job that needs it.
pub(crate) fn check(worker: &WorkerConfig) -> Result<()> {
    for entry in worker.allow_http.iter().filter(|entry| *entry != "*") {
        Origin::of(entry).map_err(|why| anyhow::anyhow!("worker.allow_http: {why}"))?;
    }
    let wrong = |entry: &&String| !entry.starts_with("env:") && !entry.starts_with("file:/");
    if let Some(entry) = worker.allow_secrets.iter().find(wrong) {
        bail!("worker.allow_secrets: '{entry}' is not written like env:NAME or file:/run/secrets/name");
    }
    if let Some(url) = &worker.callback_url {
        Origin::of(url).map_err(|why| anyhow::anyhow!("worker.callback_url: {why}"))?;
        if url.contains(['?', '#']) {
            bail!(
                "worker.callback_url: the addresses of callbacks are put behind it, so it ends with a host or a path"
            );
        }
    }
    if !matches!(worker.cgroup.as_str(), "auto" | "off") && !worker.cgroup.starts_with('/') {
        bail!(
            "worker.cgroup = \"{}\": a folder such as \"/sys/fs/cgroup/shardcron\", \"auto\" or \"off\" is possible",
            worker.cgroup
        );
    }
    Ok(())
}
