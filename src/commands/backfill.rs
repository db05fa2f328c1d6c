//! `shardcron backfill JOB`

use super::trigger::{parse_params, send, shards_wanted};
use super::{Misuse, connect_to_look, jobs::unknown, now_ms, who};
use crate::cli::Params;
use crate::config::Config;
use crate::output::{Out, draws, line, number, table};
use crate::wiring::Wired;
use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use shardcron_domain::backfill::{self, BackfillRequest, Plan};
use shardcron_domain::firing::schedule_key;
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::units::rfc3339;
use shardcron_store::{BackfillRow, JobRecord};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What can be said.
#[derive(Args)]
pub struct BackfillArgs {
    /// The job's name
    job: String,
    /// The first instant that may be meant, in RFC 3339 with its zone
    #[arg(long)]
    from: String,
    /// The first one beyond; now if absent
    #[arg(long)]
    to: Option<String>,
    /// Run those that ran, too, under fire keys of their own: <instant>/again:<request id>
    #[arg(long)]
    force: bool,
    /// Show what would run, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// How many instants the range may have
    #[arg(long)]
    max: Option<usize>,
    #[command(flatten)]
    params: Params,
    /// The same id backfills once, however often it is sent
    #[arg(long)]
    request_id: Option<String>,
    /// Do not wait until every instant has had its turn
    #[arg(long)]
    detach: bool,
    /// How long to wait for a scheduler to take the request, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
}

/// Runs it.
pub async fn run(args: BackfillArgs, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    let Some(record) = wired.ports.ledger.job(&args.job).await? else { return Err(unknown(&wired, &args.job).await?) };
    let request_id = match &args.request_id {
        Some(id) => shardcron_domain::trigger::check_request_id(id.clone()).map_err(|e| Misuse(e.0))?,
        None => uuid::Uuid::now_v7().to_string(),
    };
    let fill = BackfillRequest {
        from: args.from.clone(),
        to: args.to.clone().unwrap_or_else(|| rfc3339(now_ms())),
        force: args.force,
        max: args.max,
    };
    let plan = look(&wired, &record, &fill, &request_id).await?;
    if args.dry_run {
        show_plan(&plan, out);
        return Ok(ExitCode::SUCCESS);
    }
    let request = TriggerRequest {
        job: args.job.clone(),
        params: parse_params(&args.params.params)?,
        request_id: Some(request_id.clone()),
        shards: shards_wanted(&args.params),
        by: Some(who()),
        backfill: Some(fill),
        ..TriggerRequest::default()
    };
    let patience = Duration::from_secs(args.patience);
    send(&wired, &request, patience).await?;
    let taken = wait_for_begin(&wired, &record, &request_id, patience).await?;
    let row = if args.detach { taken } else { wait_for_turns(&wired, &record, &request_id, !out.json).await? };
    out.answer(&row, || {
        line(&format!(
            "backfill {}: {} of {} instants have had their turn; {} ran before and were left alone",
            row.request_id,
            number((row.instants - row.left).into()),
            number(row.instants.into()),
            number(row.already.into())
        ));
        line(&format!("see: shardcron explain {} --since {}", args.job, rfc3339(row.from_ms)));
    });
    Ok(ExitCode::SUCCESS)
}

/// What the leader will find, so that a mistake is said before anything is sent.
async fn look(wired: &Wired, record: &JobRecord, fill: &BackfillRequest, request_id: &str) -> Result<Plan> {
    let spec = record.spec.as_ref().map_err(|e| anyhow::anyhow!("job '{}' can't be read: {e}", record.name))?;
    let Some(schedule) = spec.compiled_schedule()? else {
        return Err(Misuse(format!(
            "job '{}' has no schedule, so there are no instants to fill in; use: shardcron trigger {} --at INSTANT",
            record.name, record.name
        ))
        .into());
    };
    let range = fill.range(now_ms()).map_err(Misuse)?;
    let instants = backfill::instants(&schedule, range).map_err(Misuse)?;
    let keys: Vec<String> = instants.iter().map(|ms| schedule_key(*ms)).collect();
    let ran = wired.ports.ledger.ran(record.id, &keys).await?.into_iter().collect();
    Ok(backfill::plan(&instants, &ran, fill.force, request_id))
}

fn show_plan(plan: &Plan, out: Out) {
    let mut rows: Vec<(i64, String, &str)> = plan.run.iter().map(|(key, ms)| (*ms, key.clone(), "would run")).collect();
    rows.extend(plan.already.iter().map(|ms| (*ms, schedule_key(*ms), "ran, left alone")));
    rows.sort();
    let as_json: Vec<_> =
        rows.iter().map(|(ms, key, what)| json!({ "instant": rfc3339(*ms), "fire_key": key, "what": what })).collect();
    out.answer(&json!({ "run": plan.run.len(), "already": plan.already.len(), "instants": as_json }), || {
        table(
            &["instant", "fire key", "what"],
            rows.iter().map(|(ms, key, what)| vec![rfc3339(*ms), key.clone(), (*what).into()]),
        );
        line(&format!("{} would run, {} ran and would be left alone", plan.run.len(), plan.already.len()));
    });
}

async fn wait_for_begin(wired: &Wired, record: &JobRecord, id: &str, patience: Duration) -> Result<BackfillRow> {
    let until = Instant::now() + patience;
    loop {
        if let Some(row) = wired.ports.ledger.backfill(record.id, id).await? {
            return Ok(row);
        }
        if Instant::now() >= until {
            bail!(
                "no scheduler took the backfill within {} s; it stays where it is and begins when one leads. Is a scheduler \
                 running? ('shardcron doctor' says; 'shardcron dead list' shows what was refused). The request id is {id}",
                patience.as_secs()
            );
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until each instant has had its turn. The command may be ended at any time: the leader goes on.
async fn wait_for_turns(wired: &Wired, record: &JobRecord, id: &str, show: bool) -> Result<BackfillRow> {
    let bar = if show && draws() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) =
        ProgressStyle::with_template("{elapsed_precise} [{bar:40}] {pos}/{len} instants (Ctrl-C leaves it running)")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    loop {
        let Some(row) = wired.ports.ledger.backfill(record.id, id).await? else {
            bail!("backfill {id} is not in the ledger any more")
        };
        bar.set_length(row.instants.into());
        bar.set_position((row.instants - row.left).into());
        if row.left == 0 {
            bar.finish_and_clear();
            return Ok(row);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
