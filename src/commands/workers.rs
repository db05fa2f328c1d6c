//! `shardcron workers`

use super::connect_migrated;
use crate::config::Config;
use crate::output::{Out, line, seconds, table};
use anyhow::Result;
use serde_json::json;
use std::process::ExitCode;

/// Lists the workers that the presence store remembers.
pub async fn run(config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_migrated(&config).await?;
    let mut workers = wired.ports.presence.workers().await?;
    workers.sort_by(|a, b| a.beat.name.cmp(&b.beat.name).then(a.beat.started_ms.cmp(&b.beat.started_ms)));
    let lost_after_ms = config.worker.lost_after.as_ms();
    let state = |w: &shardcron_store::SeenWorker| match (w.age_ms > lost_after_ms, w.beat.draining) {
        (true, _) => "lost",
        (false, true) => "draining",
        (false, false) => "alive",
    };
    let rows: Vec<_> =
        workers.iter().map(|w| json!({ "worker": w.beat, "state": state(w), "age_ms": w.age_ms })).collect();
    out.answer(&rows, || {
        if workers.is_empty() {
            line("no worker has been seen; start one with: shardcron worker");
            return;
        }
        table(
            &["worker", "state", "last beat", "running", "tiers", "host", "pid", "incarnation"],
            workers.iter().map(|w| {
                let tiers: Vec<String> = w.beat.tiers.iter().map(|(name, n)| format!("{name}={n}")).collect();
                vec![
                    w.beat.name.clone(),
                    state(w).into(),
                    format!("{} ago", seconds(w.age_ms)),
                    w.beat.running.to_string(),
                    tiers.join(" "),
                    w.beat.host.clone(),
                    w.beat.pid.to_string(),
                    w.beat.incarnation.to_string(),
                ]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}
