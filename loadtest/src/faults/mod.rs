//! The fault matrix on real services: each fault on each part, under load, counted by the oracle and measured from the ledger.

mod cell;
mod inject;
mod links;
mod load;
mod matrix;
mod measure;
mod resources;
pub mod soak;
mod table;

use crate::services::ServiceArgs;
use crate::session::Voice;
use anyhow::{Context, Result};
use cell::Outcome;
use clap::Args;
use futures_util::{StreamExt, stream};
use matrix::{Cell, Timings};
use std::path::PathBuf;
use table::Row;

/// What can be said.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    loadtest faults                                           the whole matrix once\n  \
    loadtest faults --cell leader/killed --cell redis/cut     two cells\n  \
    loadtest faults --runs 20 --jobs 2 --write docs/reliability.md\n\n\
    Exit code 0 only if every run of every cell kept its bound and lost, doubled and missed nothing.")]
pub struct FaultsArgs {
    /// Only this cell, as PART/FAULT; may be repeated
    #[arg(long = "cell", value_name = "PART/FAULT")]
    cells: Vec<Cell>,
    /// How often each cell is run; the worst of its runs is reported
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    runs: u32,
    /// Cells at the same time, each with services and processes of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    jobs: u32,
    /// With short times (lease and lost-after 2 s) instead of the program's defaults
    #[arg(long)]
    fast: bool,
    /// Write the table into this file, between its markers
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// Runs the cells. True: all are green.
///
/// # Errors
/// The answer can't be written.
pub async fn run(args: FaultsArgs) -> Result<bool> {
    let mut cells = if args.cells.is_empty() { Cell::all() } else { args.cells };
    let mut seen = std::collections::BTreeSet::new();
    cells.retain(|cell| seen.insert(*cell));
    let timings = if args.fast { Timings::FAST } else { Timings::DEFAULT };
    let voice = Voice::new(args.json);
    let total = cells.len() as u64 * u64::from(args.runs);
    voice.count(total, "runs");
    // One run of every cell before the second of any: what breaks is seen early.
    let runs = (0..args.runs).flat_map(|_| cells.iter().copied());
    let services = args.services;
    let mut outcomes = stream::iter(runs)
        .map(|cell| tokio::spawn(cell::run(cell, timings, services.clone())))
        .buffer_unordered(args.jobs as usize);
    let mut rows: Vec<Row> = cells.iter().map(|cell| Row::new(*cell, cell.rule(timings))).collect();
    while let Some(outcome) = outcomes.next().await {
        let outcome = outcome.context("a cell's task")?;
        tell(&voice, &outcome);
        voice.advance();
        if let Some(row) = rows.iter_mut().find(|row| row.cell == outcome.cell) {
            row.add(&outcome);
        }
    }
    voice.done();
    if args.json {
        crate::report::json(&rows.iter().map(Row::answer).collect::<Vec<_>>())?;
    } else {
        print!("{}", table::text(&rows));
    }
    if let Some(file) = &args.write {
        table::write(file, &rows, args.fast).await?;
    }
    Ok(rows.iter().all(Row::ok))
}

fn tell(voice: &Voice, outcome: &Outcome) {
    if outcome.ok() {
        let time = outcome.recovered.unwrap_or_default().as_secs_f64();
        voice.line(&format!("{:<20} {time:>6.2} s of {} s", outcome.cell.to_string(), outcome.rule.bound.as_secs()));
        return;
    }
    voice.note(&format!("{}: FAILED", outcome.cell));
    for problem in &outcome.problems {
        voice.note(&format!("  {problem}"));
    }
    if let Some(logs) = &outcome.logs {
        voice.note(&format!("  the logs of its processes are in {}", logs.display()));
    }
}
