//! `sim`: simulates seeds, and says how to see one that fails.

use clap::{Parser, ValueEnum};
use sim::cluster::{self, Host};
use sim::world;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// Shardcron under faults, in virtual time, from seeds.
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
    /// What is simulated.
    #[arg(long, value_enum, default_value_t = Kind::Cluster)]
    world: Kind,
    /// Seeds at the same time; all cores by default.
    #[arg(long)]
    threads: Option<usize>,
}

/// What can be simulated.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// The program's own actors on its own SQL.
    Cluster,
    /// The protocol alone, over the domain's functions: larger clusters, and a hundred times as fast.
    Protocol,
}

/// What is said of a seed.
#[derive(Default)]
struct Line {
    seed: u64,
    trace: Vec<String>,
    broken: Option<String>,
    faults: u64,
    executions: u64,
    results: u64,
    refused: u64,
    settled_ms: i64,
}

fn main() -> ExitCode {
    match simulate(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        // A reader that has gone away has seen enough, but not that all is well.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("the simulation could not run: {e}");
            ExitCode::FAILURE
        }
    }
}

impl Arguments {
    fn live(&self, host: &Host, seed: u64) -> io::Result<Line> {
        let describe = |what: String, at_ms: i64| format!("{what} (after {at_ms} ms)");
        Ok(match self.world {
            Kind::Cluster => {
                let options = cluster::Options { trace: self.trace, ..cluster::Options::default() };
                let report = cluster::run(host, seed, options)?;
                Line {
                    seed,
                    trace: report.trace,
                    broken: report.broken.map(|(what, at_ms)| describe(what.to_string(), at_ms)),
                    faults: report.faults,
                    executions: report.executions as u64,
                    results: report.results,
                    refused: report.refused,
                    settled_ms: report.settled_ms,
                }
            }
            Kind::Protocol => {
                let report = world::run(seed, world::Options { trace: self.trace, ..world::Options::default() });
                Line {
                    seed,
                    trace: report.trace,
                    broken: report.broken.map(|(what, at_ms)| describe(what.to_string(), at_ms)),
                    faults: report.faults,
                    executions: report.executions as u64,
                    results: report.results,
                    refused: report.refused,
                    settled_ms: report.settled_ms,
                }
            }
        })
    }

    fn replay(&self, seed: u64) -> String {
        let world = match self.world {
            Kind::Cluster => "",
            Kind::Protocol => " --world protocol",
        };
        format!("cargo run --release -p sim -- --seed {seed} --trace{world}")
    }
}

/// Returns how many seeds failed.
fn simulate(arguments: &Arguments) -> io::Result<u64> {
    let (first, seeds) = arguments.seed.map_or((arguments.first, arguments.seeds), |seed| (seed, 1));
    let host = Host::new()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments.threads.unwrap_or(cores).max(1);
    let (next, end) = (AtomicU64::new(first), first.saturating_add(seeds));
    let (sender, lines) = mpsc::sync_channel::<io::Result<Line>>(threads);
    let mut out = io::stdout().lock();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, host) = (sender.clone(), &next, &host);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || sender.send(arguments.live(host, seed)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        say(arguments, seeds, lines, &mut out)
    })
}

fn say(
    arguments: &Arguments,
    seeds: u64,
    lines: mpsc::Receiver<io::Result<Line>>,
    out: &mut impl Write,
) -> io::Result<u64> {
    let (mut failed, mut sum) = (0, Line::default());
    for line in lines {
        let line = line?;
        for text in &line.trace {
            writeln!(out, "{text}")?;
        }
        if let Some(broken) = &line.broken {
            failed += 1;
            writeln!(out, "seed {}: {broken}; replay: {}", line.seed, arguments.replay(line.seed))?;
        }
        sum.settled_ms = sum.settled_ms.max(line.settled_ms);
        sum.executions += line.executions;
        sum.results += line.results;
        sum.refused += line.refused;
        sum.faults += line.faults;
    }
    writeln!(
        out,
        "faults={} executions={} results={} refused_writes={} slowest_settling_ms={}",
        sum.faults, sum.executions, sum.results, sum.refused, sum.settled_ms
    )?;
    writeln!(out, "seeds={seeds} failed={failed}")?;
    Ok(failed)
}
