//! `shardcron prune`

use super::connect_to_look;
use crate::config::Config;
use crate::output::{Out, counted, line};
use anyhow::Result;
use shardcron_store::{PruneCursor, Pruned};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Deletes everything that is older than the configuration's retention, in small steps; a running cluster is not disturbed.
pub async fn run(config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    let before = config.retention.options().before(super::now_ms());
    let (mut cursor, mut all) = (PruneCursor::default(), Pruned::default());
    while cursor != PruneCursor::Done {
        let began = Instant::now();
        all += wired.ports.ledger.prune(&before, &mut cursor).await?;
        // As long as the step took: half of the time belongs to everybody else.
        tokio::time::sleep(began.elapsed().min(Duration::from_secs(1))).await;
    }
    out.answer(&all, || {
        if all.rows == 0 {
            let kept = &config.retention;
            line(&format!(
                "nothing is old enough (kept: success {}, failed {}, decisions {})",
                kept.success, kept.failed, kept.decisions
            ));
            return;
        }
        line(&format!(
            "deleted {}, {} and {} ({}; the slowest statement took {} ms)",
            counted(all.executions, "execution"),
            counted(all.decisions, "decision"),
            counted(all.dead_letters, "dead letter"),
            counted(all.rows, "row"),
            all.longest_ms
        ));
    });
    Ok(ExitCode::SUCCESS)
}
