//! The service of `examples/reconcile-http`, as a process of ours.

use super::jobs::{Place, examples};
use anyhow::{Context, Result};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Started and listening; killed when dropped.
pub struct Service {
    child: Child,
    /// Where it listens.
    pub url: String,
}

impl Service {
    /// Starts it on a free port and waits for its first line.
    ///
    /// # Errors
    /// There is no Python, or it says something else.
    pub fn start(place: &Place) -> Result<Self> {
        let child = Command::new("python3")
            .arg(examples().join("reconcile-http/service.py"))
            .arg("0")
            .arg(examples().join("reconcile-flights/data"))
            .arg(place.of_service())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the service, which needs python3")?;
        // From here on it is killed whatever follows.
        let mut service = Service { child, url: String::new() };
        let stdout = service.child.stdout.take().context("the service's output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).context("the service's first line")?;
        let url = line.trim().strip_prefix("listening on ");
        service.url = url.with_context(|| format!("the service did not say where it listens: '{line}'"))?.to_owned();
        Ok(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
