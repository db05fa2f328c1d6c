//! `shardcron dead …`

use super::connect_to_look;
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use anyhow::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum DeadCommand {
    /// List dead letters, newest first: shards whose attempts are used up, and messages that could not be read
    List {
        /// How many
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
}

/// Runs one.
pub async fn run(command: DeadCommand, config: Config, out: Out) -> Result<ExitCode> {
    let DeadCommand::List { limit } = command;
    let wired = connect_to_look(&config).await?;
    let rows = wired.ports.ledger.dead(limit.clamp(1, 1_000)).await?;
    out.answer(&rows, || {
        if rows.is_empty() {
            line("nothing is dead");
            return;
        }
        table(
            &["id", "when", "what", "where or text", "why"],
            rows.iter().map(|r| {
                let place = match (&r.shard, &r.text) {
                    (Some((execution, index)), _) => format!("{execution}/{index}"),
                    (None, Some(text)) => shorten(text),
                    (None, None) => String::new(),
                };
                vec![r.id.to_string(), instant(Some(r.at_ms)), r.kind.clone(), place, r.reason.clone()]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}

/// One line of at most sixty characters, without what would disturb a terminal.
fn shorten(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(60).collect();
    if text.chars().count() > 60 { format!("{clean}…") } else { clean }
}
