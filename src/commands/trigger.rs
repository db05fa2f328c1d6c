//! `shardcron trigger JOB`

use super::{Misuse, connect_migrated, jobs::unknown};
use crate::cli::Params;
use crate::config::Config;
use crate::output::{Out, draws, line, seconds};
use crate::wiring::Wired;
use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use shardcron_domain::execution::Phase;
use shardcron_domain::firing::request_key;
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{DecisionRow, ExecutionRow};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct TriggerArgs {
    /// The job's name
    job: String,
    #[command(flatten)]
    params: Params,
    /// The same id fires once, however often it is sent
    #[arg(long)]
    request_id: Option<String>,
    /// Wait for the end; exit code 0 only if every shard ended well
    #[arg(long)]
    wait: bool,
    /// How long to wait for a scheduler to take the trigger, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
}

/// Runs it.
pub async fn run(args: TriggerArgs, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_migrated(&config).await?;
    let Some(job) = wired.ports.ledger.job(&args.job).await? else { return Err(unknown(&wired, &args.job).await?) };
    let params = parse_params(&args.params.params)?;
    let request_id = match args.request_id {
        Some(id) => shardcron_domain::trigger::check_request_id(id).map_err(|e| Misuse(e.0))?,
        None => uuid::Uuid::now_v7().to_string(),
    };
    let request = TriggerRequest { job: args.job.clone(), params, request_id: Some(request_id.clone()) };
    wired.ports.broker.send_trigger(&request).await?;
    let decision =
        wait_for_decision(&wired, job.id, &request_key(&request_id), Duration::from_secs(args.patience)).await?;
    let Some(decision) = decision else {
        anyhow::bail!(
            "no scheduler took the trigger within {} s; it stays where it is and fires when one leads. Is a scheduler running? \
             ('shardcron doctor' says). The request id is {request_id}",
            args.patience
        );
    };
    let (Some(execution), true) = (decision.execution, decision.reason.is_none()) else {
        let reason = decision.reason.clone().unwrap_or_else(|| "not fired".into());
        out.answer(
            &json!({ "outcome": decision.kind.word(), "execution": decision.execution, "message": reason }),
            || {
                line(&format!("not fired: {reason}"));
            },
        );
        return Ok(ExitCode::FAILURE);
    };
    if !args.wait {
        out.answer(&json!({ "outcome": "fired", "execution": execution, "request_id": request_id }), || {
            line(&format!("fired: execution {execution}"));
        });
        return Ok(ExitCode::SUCCESS);
    }
    let row = wait_for_end(&wired, execution, !out.json).await?;
    out.answer(&row, || {
        let took = row.ended_ms.unwrap_or(row.fired_ms) - row.fired_ms;
        line(&format!(
            "{}: execution {execution}, {} of {} shards well, {}",
            row.phase.word(),
            row.succeeded,
            row.shards_total,
            seconds(took)
        ));
        if row.failed > 0 {
            line(&format!("{} shards failed; see: shardcron executions show {execution}", row.failed));
        }
    });
    Ok(if row.phase == Phase::Success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads `key=value`: JSON where it is JSON, else text.
pub fn parse_params(params: &[String]) -> Result<shardcron_store::Params> {
    let mut map = shardcron_store::Params::new();
    for param in params {
        let (key, text) =
            param.split_once('=').ok_or_else(|| Misuse(format!("'{param}' is not written like key=value")))?;
        let value = serde_json::from_str(text).unwrap_or_else(|_| serde_json::Value::String(text.to_owned()));
        map.insert(key.to_owned(), value);
    }
    Ok(map)
}

/// Waits until the leader has decided about a fire key.
pub async fn wait_for_decision(
    wired: &Wired,
    job: JobId,
    key: &str,
    patience: Duration,
) -> Result<Option<DecisionRow>> {
    let until = Instant::now() + patience;
    loop {
        if let Some(decision) = wired.ports.ledger.decision(job, key).await? {
            return Ok(Some(decision));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits for the end of an execution, with a bar where somebody looks.
pub async fn wait_for_end(wired: &Wired, id: ExecutionId, show: bool) -> Result<ExecutionRow> {
    let bar = if show && draws() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} [{bar:40}] {pos}/{len} shards {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    loop {
        let Some(row) = wired.ports.ledger.execution(id).await? else {
            anyhow::bail!("execution {id} is not in the ledger")
        };
        bar.set_length(row.shards_total.into());
        bar.set_position((row.succeeded + row.failed + row.cancelled).into());
        bar.set_message(format!("({} running)", row.running.unwrap_or(0)));
        if row.phase.is_terminal() {
            bar.finish_and_clear();
            return Ok(row);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
