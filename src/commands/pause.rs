//! `shardcron jobs pause` and `resume`

use super::{Misuse, connect_to_look, jobs::unknown, now_ms, who};
use crate::config::Config;
use crate::output::{Out, line};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

/// Of what.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub struct PauseArgs {
    /// A job's name
    job: Option<String>,
    /// All jobs
    #[arg(long)]
    all: bool,
    /// All jobs of this tier
    #[arg(long, value_name = "TIER")]
    tier: Option<String>,
}

/// Runs it.
pub async fn run(args: PauseArgs, paused: bool, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let who = who();
    let by = paused.then_some(who.as_str());
    let word = if paused { "paused" } else { "resumed" };
    let Some(name) = &args.job else {
        let (scope, words) = match &args.tier {
            Some(tier) => {
                shardcron_domain::job::check_name(tier, 32).map_err(Misuse)?;
                (format!("tier:{tier}"), format!("all jobs of tier {tier}"))
            }
            None => ("all".to_owned(), "all jobs".to_owned()),
        };
        let changed = wired.ports.ledger.set_scope_paused(&scope, by, &who, now_ms()).await?;
        out.answer(&json!({ "scope": scope, "state": word, "changed": changed }), || {
            let note = if changed { "" } else { " (already)" };
            line(&format!("{words}: {word}{note}"));
        });
        return Ok(ExitCode::SUCCESS);
    };
    if !wired.ports.ledger.set_paused(name, by, &who, now_ms()).await? {
        return Err(unknown(&wired, name).await?);
    }
    out.answer(&json!({ "job": name, "state": word }), || line(&format!("{name} is {word}")));
    Ok(ExitCode::SUCCESS)
}
