//! `shardcron executions …`

use super::{Misuse, connect_to_look};
use crate::config::Config;
use crate::output::{Out, counted, instant, line, number, seconds, table};
use anyhow::Result;
use clap::Subcommand;
use serde_json::json;
use shardcron_domain::ExecutionId;
use shardcron_domain::once::{RecordRow, key_text};
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::shard::Phase;
use shardcron_store::{Ledger, ShardRow};
use std::process::ExitCode;

/// Emitted shards whose payloads are read one by one.
const PAYLOADS_SHOWN: usize = 1_000;

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
    /// Run the failed shards of an execution again, each from its last checkpoint and with all its tries
    #[command(
        after_help = "Examples:\n  shardcron executions retry 019a… --reason 'the bank is back'     # all that failed\n  shardcron executions retry 019a… --shard 3 --shard 7-9\n  shardcron executions retry 019a… --failed --wait\n\nThe execution runs again under its own plan and its job's version of then. Attempt numbers go on rising; the dead\nletters of these shards are settled. Refused while another execution of the job runs, unless its overlap policy is allow."
    )]
    Retry(super::operate::RetryArgs),
    /// Cancel an execution: what runs is stopped within a second, what waits never starts
    #[command(
        after_help = "Example:\n  shardcron executions cancel 019a… --reason 'wrong date'\n\nFinal: a cancelled execution can't be retried; fire the job again. Exit code 1 if it had ended before."
    )]
    Cancel(super::operate::CancelArgs),
}

/// Runs one.
pub async fn run(command: ExecutionsCommand, config: Config, out: Out) -> Result<ExitCode> {
    match command {
        ExecutionsCommand::List { job, before, limit } => list(job.as_deref(), before, limit, &config, out).await,
        ExecutionsCommand::Show { execution, shards } => show(execution, shards, &config, out).await,
        ExecutionsCommand::Retry(args) => super::operate::retry(args, &config, out).await,
        ExecutionsCommand::Cancel(args) => super::operate::cancel(args, &config, out).await,
    }
}

async fn list(
    job: Option<&str>,
    before: Option<ExecutionId>,
    limit: usize,
    config: &Config,
    out: Out,
) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
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

/// Shards in pages, so that a failed one behind a thousand good ones is found; at most a thousand are shown unless all are asked for.
async fn shards(ledger: &dyn Ledger, id: ExecutionId, all: bool) -> Result<Vec<ShardRow>> {
    const PAGE: usize = 5_000;
    let mut found = Vec::new();
    let mut from = 0;
    loop {
        let page = ledger.shards(id, from, PAGE).await?;
        let Some(last) = page.last() else { break };
        from = last.index + 1;
        let full = page.len() == PAGE;
        found.extend(page.into_iter().filter(|s| all || s.phase != Phase::Success));
        if !full || (!all && found.len() >= 1_000) {
            break;
        }
    }
    if !all {
        found.truncate(1_000);
    }
    Ok(found)
}

/// Records that failed or were skipped, of shards that have not ended well.
const RECORDS_SHOWN: usize = 1_000;

fn record(row: &RecordRow) -> serde_json::Value {
    json!({
        "shard": row.shard,
        "key": key_text(&row.key),
        "state": row.state.word(),
        "attempt": row.attempt,
        "tries": row.tries,
        "why": row.message,
    })
}

/// What each shard works on: out of the plan, or as the first shard emitted it.
async fn slices(
    ledger: &dyn Ledger,
    id: ExecutionId,
    plan: Option<&ShardPlan>,
    shards: &[ShardRow],
) -> Result<Vec<Option<ShardSlice>>> {
    let mut slices = Vec::with_capacity(shards.len());
    let Some(plan) = plan else { return Ok(vec![None; shards.len()]) };
    let emitted = match plan {
        ShardPlan::Map { .. } => ledger.emitted_count(id).await?,
        _ => 0,
    };
    for (shown, shard) in shards.iter().enumerate() {
        slices.push(match (plan.slice(shard.index), plan) {
            (None, ShardPlan::Map { .. }) if shard.index > emitted => Some(ShardSlice::Reduce { tasks: emitted }),
            (None, ShardPlan::Map { .. }) if shown < PAYLOADS_SHOWN => {
                let text = ledger.emitted(id, shard.index).await?;
                let payload = text.and_then(|text| serde_json::from_str(&text).ok());
                payload.map(|payload| ShardSlice::Task { number: shard.index - 1, payload })
            }
            (slice, _) => slice,
        });
    }
    Ok(slices)
}

fn with_slice(shard: &ShardRow, slice: Option<&ShardSlice>) -> serde_json::Value {
    let mut value = json!(shard);
    if let (Some(fields), Some(slice)) = (value.as_object_mut(), slice) {
        fields.insert("slice".into(), json!(slice));
    }
    value
}

async fn show(id: ExecutionId, all: bool, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let ledger = &wired.ports.ledger;
    let Some(row) = ledger.execution(id).await? else {
        return Err(Misuse(format!("there is no execution {id}; 'shardcron executions list' shows them")).into());
    };
    let shards = shards(&**ledger, id, all).await?;
    let attempts = ledger.attempts(id, 1_000).await?;
    let records = ledger.record_report(id, RECORDS_SHOWN).await?;
    let named = records.iter().map(record).collect::<Vec<_>>();
    let rounds = ledger.reopenings(id).await?;
    let cancellation = ledger.cancellation(id).await?;
    // Gone with its job's version, or written by another version of this program: the rest is still worth showing.
    let plan = ledger.execution_head(id).await.ok().flatten().map(|head| head.plan);
    let slices = slices(&**ledger, id, plan.as_ref(), &shards).await?;
    let as_json: Vec<_> = shards.iter().zip(&slices).map(|(shard, slice)| with_slice(shard, slice.as_ref())).collect();
    let words = plan.as_ref().map(ToString::to_string);
    let answer = json!({
        "execution": row, "plan": words, "shards": as_json, "attempts": attempts, "rounds": rounds,
        "cancelled": cancellation, "records": named
    });
    out.answer(&answer, || {
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
        if let Some(words) = &words {
            line(&format!("plan       {words}"));
        }
        if let Some(ended) = row.ended_ms {
            line(&format!("took       {}", seconds(ended - row.fired_ms)));
        }
        if let Some(why) = &cancellation {
            line(&format!("cancelled  {} by {}: {}", instant(Some(why.at_ms)), why.who, why.reason));
        }
        for round in &rounds {
            let reason = round.reason.as_deref().map(|text| format!(": {text}")).unwrap_or_default();
            let (at, who, shards) = (instant(Some(round.at_ms)), &round.who, counted(round.shards, "shard"));
            line(&format!("retried    {at} by {who}, {shards}{reason}"));
        }
        if !shards.is_empty() {
            line("");
            table(
                &["shard", "slice", "state", "attempt", "failures", "worker", "checkpoint", "rows"],
                shards.iter().zip(&slices).map(|(s, slice)| {
                    let checkpoint =
                        s.checkpoint.as_ref().and_then(|c| serde_json::to_string(c).ok()).unwrap_or_else(|| "-".into());
                    let owner = s.owner.map_or_else(|| "-".into(), |o| o.to_string());
                    vec![
                        s.index.to_string(),
                        slice.as_ref().map_or_else(|| "-".into(), ToString::to_string),
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
        if !records.is_empty() {
            line("");
            table(
                &["shard", "record", "state", "tries", "why"],
                records.iter().map(|r| {
                    vec![
                        r.shard.to_string(),
                        key_text(&r.key),
                        r.state.word().into(),
                        r.tries.to_string(),
                        r.message.clone().unwrap_or_default(),
                    ]
                }),
            );
        }
    });
    Ok(ExitCode::SUCCESS)
}
