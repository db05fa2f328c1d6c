//! The command line.

use crate::commands;
use crate::config::Config;
use crate::output::Out;
use crate::{demo, serve};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// What the command line says.
#[derive(Parser)]
#[command(name = "shardcron", version, about = "Distributed cron for heavy batch work", long_about = None, max_term_width = 120)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 misused.\n\nTry first:  shardcron demo")]
pub struct Cli {
    /// Configuration file (default: shardcron.toml here, if there is one)
    #[arg(long, global = true, value_name = "FILE", env = "SHARDCRON_CONFIG")]
    config: Option<PathBuf>,
    /// Answer in JSON
    #[arg(long, global = true)]
    json: bool,
    /// The ledger: mysql://user:password@host/database or sqlite://file
    #[arg(long, global = true, value_name = "URL")]
    ledger: Option<String>,
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand)]
enum Command {
    /// Show the main job on real input, with a worker killed in the middle
    #[command(
        after_help = "Examples:\n  shardcron demo\n  shardcron demo --keep /tmp/demo\n  shardcron demo --cluster    # on the services of the configuration"
    )]
    Demo(demo::DemoArgs),
    /// Run a scheduler and a worker in one process
    Up,
    /// Run a scheduler; any number may run, one leads
    Scheduler,
    /// Run a worker; any number may run
    Worker,
    /// Work with jobs
    #[command(subcommand)]
    Jobs(commands::jobs::JobsCommand),
    /// Make a job file of what another scheduler keeps; needs no service
    #[command(subcommand)]
    Import(commands::import::ImportCommand),
    /// Fire a job by hand
    #[command(
        after_help = "Examples:\n  shardcron trigger reconcile-flights --wait\n  shardcron trigger settle --param date=2013-01-31 --request-id settle-2013-01-31\n  shardcron trigger settle --only-shards 3,5                  # again, these two only\n  shardcron trigger settle --at 2026-12-24T18:00:00+01:00     # kept, and fired then"
    )]
    Trigger(commands::trigger::TriggerArgs),
    /// Run past instants of a job's schedule
    #[command(
        after_help = "Examples:\n  shardcron backfill settle --from 2026-03-01T00:00:00Z --to 2026-03-08T00:00:00Z --dry-run\n  shardcron backfill settle --from 2026-03-01T00:00:00Z --force --param reason=late-data\n\nOne instant at a time (up to 8 where the overlap policy is allow), oldest first, while the job is free."
    )]
    Backfill(commands::backfill::BackfillArgs),
    /// Say why a job did or did not run
    #[command(
        after_help = "Examples:\n  shardcron explain settle                               # the latest decision\n  shardcron explain settle --at 2026-03-08T02:30:00-05:00\n  shardcron explain settle --at 2026-03-08T02:30         # a local time of the job's zone\n  shardcron explain settle --since 12h"
    )]
    Explain(commands::explain::ExplainArgs),
    /// Look at executions, retry or cancel them
    #[command(subcommand)]
    Executions(commands::executions::ExecutionsCommand),
    /// Show what the attempts of an execution wrote
    #[command(
        after_help = "Examples:\n  shardcron logs 019ad5c1-4c7b-7e52-8e0f-7d9d3f2f6a10\n  shardcron logs 019ad5c1-4c7b-7e52-8e0f-7d9d3f2f6a10 3 -f     # follow shard 3 until the execution ends\n  shardcron logs 019ad5c1-4c7b-7e52-8e0f-7d9d3f2f6a10 --attempt 2 --json\n\nKept of each attempt: the first 256 KiB and the last 768 KiB; what is cut is marked."
    )]
    Logs(commands::logs::LogsArgs),
    /// List workers
    Workers,
    /// Look at what could not be processed, try it again or drop it
    #[command(subcommand)]
    Dead(commands::dead::DeadCommand),
    /// Bring the ledger's tables to this version
    Migrate,
    /// Delete what is older than the configuration's retention
    #[command(
        long_about = "Delete what is older than the configuration's retention: executions with their shards and results, decisions, \
                      dead letters. The leader does the same by itself; in small steps, so that a running cluster is not disturbed.",
        after_help = "Examples:\n  shardcron prune\n  SHARDCRON_RETENTION_SUCCESS=7d shardcron prune --json"
    )]
    Prune,
    /// Check every service and say what to mend
    Doctor,
}

/// Parameters as `key=value`, and other shards than the job's.
#[derive(Args, Clone, Debug, Default)]
pub struct Params {
    /// A parameter; numbers, true, false and JSON are taken as such, everything else as text. May be repeated
    #[arg(long = "param", value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    /// Cut the job's data into this many shards
    #[arg(long, value_name = "N")]
    pub shard_count: Option<u32>,
    /// Run these shards only, by their positions from 0
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    pub only_shards: Vec<u32>,
}

/// The program's entry: reads the command line and the environment, and runs.
#[must_use]
pub fn main() -> ExitCode {
    run_with(std::env::args_os(), shardcron_sdk::Registry::default())
}

/// The whole program with handlers of one's own: what a worker program calls from its `main`.
///
/// ```no_run
/// use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
///
/// struct Greet;
///
/// #[async_trait]
/// impl ShardHandler for Greet {
///     async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
///         println!("shard {} of {}", context.attempt.index, context.shards_total);
///         Ok(ShardOutput::rows(1))
///     }
/// }
///
/// fn main() -> std::process::ExitCode {
///     shardcron::run_with(std::env::args_os(), Registry::default().with("greet", Greet))
/// }
/// ```
#[must_use]
pub fn run_with(
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
    registry: shardcron_sdk::Registry,
) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let mut config = match Config::load(cli.config.as_deref(), |name| std::env::var(name).ok()) {
        Ok(config) => config,
        Err(e) => {
            eprintln!("shardcron: {e:#}");
            return ExitCode::from(2);
        }
    };
    if let Some(url) = cli.ledger {
        config.ledger.url = url;
    }
    match run(cli.command, config, Out { json: cli.json }, registry) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("shardcron: {e:#}");
            ExitCode::from(if e.downcast_ref::<commands::Misuse>().is_some() { 2 } else { 1 })
        }
    }
}

fn run(command: Command, config: Config, out: Out, registry: shardcron_sdk::Registry) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(&args, &config, out),
        Command::Up => serve::serve(config, serve::Roles { scheduler: true, worker: true }, registry),
        Command::Scheduler => serve::serve(config, serve::Roles { scheduler: true, worker: false }, registry),
        Command::Worker => serve::serve(config, serve::Roles { scheduler: false, worker: true }, registry),
        Command::Jobs(command) => commands::run(commands::jobs::run(command, config, out)),
        Command::Import(command) => commands::import::run(command, out),
        Command::Trigger(args) => commands::run(commands::trigger::run(args, config, out)),
        Command::Backfill(args) => commands::run(commands::backfill::run(args, config, out)),
        Command::Explain(args) => commands::run(commands::explain::run(args, config, out)),
        Command::Executions(command) => commands::run(commands::executions::run(command, config, out)),
        Command::Logs(args) => commands::run(commands::logs::run(args, config, out)),
        Command::Workers => commands::run(commands::workers::run(config, out)),
        Command::Dead(command) => commands::run(commands::dead::run(command, config, out)),
        Command::Migrate => commands::run(commands::migrate::run(config, out)),
        Command::Prune => commands::run(commands::prune::run(config, out)),
        Command::Doctor => commands::run(commands::doctor::run(config, out)),
    }
}
