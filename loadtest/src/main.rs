//! Load scenarios, with faults and an independent count of what was lost or recorded twice.
//!
//! Owns: starting the services and the real program's processes, putting load and faults on them, measuring them, and the oracle
//! that counts from the ledger's tables. A scenario is one file under `scenarios`.
//!
//! Must not: believe the program's own counters, reach anything but the loopback address, or end a process that it did not start.

mod ceilings;
mod cluster;
mod count;
mod faults;
mod handlers;
mod oracle;
mod peers;
mod procfs;
mod report;
mod rows;
mod scenarios;
mod services;
mod session;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// What the command line says.
#[derive(Parser)]
#[command(
    name = "loadtest",
    version,
    about = "Load scenarios for Shardcron, with faults and an oracle",
    max_term_width = 120
)]
#[command(after_help = "Exit codes: 0 nothing lost and nothing recorded twice, 1 otherwise, 2 misused.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the scenarios
    List,
    /// Run no-op shards end to end in a cluster, beside what RabbitMQ and the database can do alone
    Throughput(scenarios::throughput::ThroughputArgs),
    /// Fire many jobs on time, and say how late they were
    Precision(scenarios::precision::PrecisionArgs),
    /// Kill workers at random under load
    WorkerKill(scenarios::worker_kill::WorkerKillArgs),
    /// Have each record add 1 to a counter while workers are killed, and see that every counter is 1
    Effects(scenarios::effects::EffectsArgs),
    /// Run very many tiny shards singly and grouped, with small jobs beside them
    Groups(scenarios::groups::GroupsArgs),
    /// Measure what it costs to work on a record once, beside the insert of a bare row
    Once(scenarios::once::OnceArgs),
    /// Cut a lopsided job anew by the durations of its last run, and say how even that makes it
    Skew(scenarios::skew::SkewArgs),
    /// Run the same job in every way to write one, each with workers killed, and count its effects where they went
    Ways(scenarios::ways::WaysArgs),
    /// Put each fault on each part, on real services under load, and count what was lost, doubled or missed
    Faults(faults::FaultsArgs),
    /// Put random faults on a cluster for long, and see that nothing is lost and nothing grows
    Soak(faults::soak::SoakArgs),
}

/// The first argument that makes this program the one that is tested. Not a `clap` command, because what follows it is the other
/// program's own command line.
const AS_SHARDCRON: &str = "shardcron";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).peekable();
    if arguments.peek().is_some_and(|first| first == AS_SHARDCRON) {
        cluster::end_with_parent();
        return shardcron::run_with(arguments, handlers::registry());
    }
    let result = match Cli::parse().command {
        Command::List => {
            scenarios::list();
            return ExitCode::SUCCESS;
        }
        Command::Throughput(args) => session::run(scenarios::throughput::run(args)),
        Command::Precision(args) => session::run(scenarios::precision::run(args)),
        Command::WorkerKill(args) => session::run(scenarios::worker_kill::run(args)),
        Command::Effects(args) => session::run(scenarios::effects::run(args)),
        Command::Groups(args) => session::run(scenarios::groups::run(args)),
        Command::Once(args) => session::run(scenarios::once::run(args)),
        Command::Skew(args) => session::run(scenarios::skew::run(args)),
        Command::Ways(args) => session::run(scenarios::ways::run(args)),
        Command::Faults(args) => session::run(faults::run(args)),
        Command::Soak(args) => session::run(faults::soak::run(args)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("loadtest: {e:#}");
            ExitCode::FAILURE
        }
    }
}
