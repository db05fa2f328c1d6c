//! `shardcron executions …`

use super::{Misuse, connect_migrated};
use crate::config::Config;
use crate::output::{Out, instant, line, number, seconds, table};
use anyhow::Result;
use clap::Subcommand;
use serde_json::json;
use shardcron_domain::ExecutionId;
use shardcron_domain::shard::Phase;
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum ExecutionsCommand {
    /// List executions, newest first
    List {
        /// Of this job only
        #[arg(long)]
        job: Option<String>,
        /// Older than this execution (to page on)
        #[arg(long)]
        before: Option<ExecutionId>,
        /// How many
        #[arg(long, default_value_t = 20)]
        limit: usize,
    },
    /// Show one execution with its shards that have not ended well and its attempts that ended badly
    Show {
        /// Its id
        execution: ExecutionId,
        /// All shards
        #[arg(long)]
        shards: bool,
    },
}

/// Runs one.
pub async fn run(command: ExecutionsCommand, config: Config, out: Out) -> Result<ExitCode> {
    match command {
        ExecutionsCommand::List { job, before, limit } => list(job.as_deref(), before, limit, &config, out).await,
        ExecutionsCommand::Show { execution, shards } => show(execution, shards, &config, out).await,
    }
}

async fn list(
    job: Option<&str>,
    before: Option<ExecutionId>,
    limit: usize,
    config: &Config,
    out: Out,
) -> Result<ExitCode> {
    let wired = connect_migrated(config).await?;
    let rows = wired.ports.ledger.executions(job, before, limit.clamp(1, 1_000)).await?;
    out.answer(&rows, || {
        table(
            &["execution", "job", "for", "state", "shards", "well", "failed", "took"],
            rows.iter().map(|r| {
                vec![
                    r.id.to_string(),
                    r.job.clone(),
                    instant(Some(r.nominal_ms)),
                    r.phase.word().into(),
                    number(r.shards_total.into()),
                    number(r.succeeded.into()),
                    number(r.failed.into()),
                    r.ended_ms.map_or_else(|| "-".into(), |e| seconds(e - r.fired_ms)),
                ]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}

async fn show(id: ExecutionId, all: bool, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_migrated(config).await?;
    let ledger = &wired.ports.ledger;
    let Some(row) = ledger.execution(id).await? else {
        return Err(Misuse(format!("there is no execution {id}; 'shardcron executions list' shows them")).into());
    };
    let shards = ledger.shards(id, 0, 1_000).await?;
    let attempts = ledger.attempts(id, 1_000).await?;
    let shown: Vec<_> = shards.iter().filter(|s| all || s.phase != Phase::Success).collect();
    out.answer(&json!({ "execution": row, "shards": shards, "attempts": attempts }), || {
        line(&format!("execution  {}", row.id));
        line(&format!("job        {} (version {})", row.job, row.version));
        line(&format!(
            "fired      {} for {} ({}), epoch {}",
            instant(Some(row.fired_ms)),
            instant(Some(row.nominal_ms)),
            row.fire_key,
            row.epoch
        ));
        line(&format!("state      {}", row.phase.word()));
        line(&format!(
            "shards     {} in all, {} well, {} failed, {} cancelled",
            row.shards_total, row.succeeded, row.failed, row.cancelled
        ));
        if let Some(ended) = row.ended_ms {
            line(&format!("took       {}", seconds(ended - row.fired_ms)));
        }
        if !shown.is_empty() {
            line("");
            table(
                &["shard", "state", "attempt", "failures", "worker", "checkpoint", "rows"],
                shown.iter().map(|s| {
                    let checkpoint =
                        s.checkpoint.as_ref().and_then(|c| serde_json::to_string(c).ok()).unwrap_or_else(|| "-".into());
                    let owner = s.owner.map_or_else(|| "-".into(), |o| o.to_string());
                    vec![
                        s.index.to_string(),
                        s.phase.word().into(),
                        s.attempt.to_string(),
                        s.failures.to_string(),
                        owner,
                        checkpoint,
                        number(s.rows_done),
                    ]
                }),
            );
        }
        let bad: Vec<_> = attempts.iter().filter(|a| a.outcome != "success").collect();
        if !bad.is_empty() {
            line("");
            table(
                &["shard", "attempt", "ended", "after", "why"],
                bad.iter().map(|a| {
                    vec![
                        a.index.to_string(),
                        a.attempt.to_string(),
                        a.outcome.clone(),
                        seconds(a.ended_ms - a.started_ms),
                        a.message.clone().unwrap_or_default(),
                    ]
                }),
            );
        }
    });
    Ok(ExitCode::SUCCESS)
}
