//! `sim`: simulates seeds, and says how to see one that fails.

use clap::Parser;
use sim::world::{self, Options};
use std::io::{self, Write};
use std::process::ExitCode;

/// The protocol of Shardcron under faults, in virtual time, from seeds.
#[derive(Parser)]
struct Arguments {
    /// How many seeds to simulate.
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// One seed only.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// Print what happens, one line for each event.
    #[arg(long, requires = "seed")]
    trace: bool,
}

fn main() -> ExitCode {
    match simulate(&mut io::stdout().lock()) {
        Ok(0) => ExitCode::SUCCESS,
        // A reader that has gone away has seen enough, but not that all is well.
        Ok(_) | Err(_) => ExitCode::FAILURE,
    }
}

/// Returns how many seeds failed.
fn simulate(out: &mut impl Write) -> io::Result<u64> {
    let arguments = Arguments::parse();
    let (first, seeds) = arguments.seed.map_or((arguments.first, arguments.seeds), |seed| (seed, 1));
    let options = Options { trace: arguments.trace, ..Options::default() };
    let (mut failed, mut slowest_ms) = (0, 0);
    let (mut executions, mut results, mut refused, mut faults) = (0, 0, 0, 0);
    for seed in first..first.saturating_add(seeds) {
        let report = world::run(seed, options);
        for line in &report.trace {
            writeln!(out, "{line}")?;
        }
        if let Some((violation, at_ms)) = &report.broken {
            failed += 1;
            writeln!(
                out,
                "seed {seed}: {violation} (after {at_ms} ms); replay: cargo run --release -p sim -- --seed {seed} --trace"
            )?;
        }
        slowest_ms = slowest_ms.max(report.settled_ms);
        executions += report.executions;
        results += report.results;
        refused += report.refused;
        faults += report.faults;
    }
    writeln!(
        out,
        "faults={faults} executions={executions} results={results} refused_writes={refused} slowest_settling_ms={slowest_ms}"
    )?;
    writeln!(out, "seeds={seeds} failed={failed}")?;
    Ok(failed)
}
