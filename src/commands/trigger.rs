//! `shardcron trigger JOB`

use super::{Misuse, connect_to_look, jobs::unknown, who};
use crate::cli::Params;
use crate::config::Config;
use crate::output::{Out, counted, draws, line, seconds};
use crate::wiring::Wired;
use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use shardcron_broker::BrokerError;
use shardcron_domain::execution::Phase;
use shardcron_domain::firing::{DecisionKind, request_key};
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::override_plan::ShardsWanted;
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
    /// The instant that it is for, in RFC 3339 with its zone; one in the future is kept and fired then
    #[arg(long, value_name = "INSTANT")]
    at: Option<String>,
    /// Wait for the end; exit code 0 only if every shard ended well
    #[arg(long)]
    wait: bool,
    /// How long to wait for a scheduler to take the trigger, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
}

/// Runs it.
pub async fn run(args: TriggerArgs, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    let Some(job) = wired.ports.ledger.job(&args.job).await? else { return Err(unknown(&wired, &args.job).await?) };
    let params = parse_params(&args.params.params)?;
    if let Some(at) = &args.at {
        shardcron_domain::units::parse_instant(at).map_err(Misuse)?;
    }
    let request_id = match args.request_id {
        Some(id) => shardcron_domain::trigger::check_request_id(id).map_err(|e| Misuse(e.0))?,
        None => uuid::Uuid::now_v7().to_string(),
    };
    let request = TriggerRequest {
        job: args.job.clone(),
        params,
        request_id: Some(request_id.clone()),
        at: args.at,
        shards: shards_wanted(&args.params),
        by: Some(who()),
        backfill: None,
    };
    if let (Some(wanted), Ok(spec)) = (&request.shards, &job.spec) {
        wanted.plan(&spec.shards).map_err(Misuse)?;
    }
    send(&wired, &request, Duration::from_secs(args.patience)).await?;
    let key = request_key(&request_id);
    let mut decision = wait_for_decision(&wired, job.id, &key, Duration::from_secs(args.patience)).await?;
    while args.wait && decision.as_ref().is_some_and(|d| d.kind == DecisionKind::Waiting) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        decision = wired.ports.ledger.decision(job.id, &key).await?;
    }
    let Some(decision) = decision else {
        anyhow::bail!(
            "no scheduler took the trigger within {} s; it stays where it is and fires when one leads. Is a scheduler running? \
             ('shardcron doctor' says). The request id is {request_id}",
            args.patience
        );
    };
    let (Some(execution), DecisionKind::Fired) = (decision.execution, decision.kind) else {
        let reason = decision.reason.clone().unwrap_or_else(|| "not fired".into());
        let waits = decision.kind == DecisionKind::Waiting;
        let answer = json!({ "outcome": decision.kind.word(), "execution": decision.execution, "message": reason, "request_id": request_id });
        out.answer(&answer, || line(&format!("{}: {reason}", if waits { "waiting" } else { "not fired" })));
        return Ok(if waits { ExitCode::SUCCESS } else { ExitCode::FAILURE });
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
            line(&format!(
                "{} failed; see: shardcron executions show {execution}",
                counted(row.failed.into(), "shard")
            ));
        }
    });
    Ok(if row.phase == Phase::Success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sends a trigger. The broker's connection is made in the background, so the first message waits for it.
pub async fn send(wired: &Wired, request: &TriggerRequest, patience: Duration) -> Result<()> {
    let until = Instant::now() + patience;
    loop {
        match wired.ports.broker.send_trigger(request).await {
            Ok(()) => return Ok(()),
            Err(BrokerError::Unavailable(_)) if Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
            Err(e) => return Err(e.into()),
        }
    }
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

/// The shards that are asked for, if others than the job's.
pub fn shards_wanted(params: &Params) -> Option<ShardsWanted> {
    let only = (!params.only_shards.is_empty()).then(|| params.only_shards.clone());
    let wanted = ShardsWanted { count: params.shard_count, only };
    (wanted != ShardsWanted::default()).then_some(wanted)
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
