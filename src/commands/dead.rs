//! `shardcron dead …`

use super::dead_letters::{Choice, chosen, drop_all, replay_all, show};
use super::{Misuse, connect_to_look};
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use shardcron_store::{DeadKind, DeadQuery};
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum DeadCommand {
    /// List dead letters, newest first: shards whose attempts are used up, and messages that could not be read
    List {
        /// How many
        #[arg(long, default_value_t = 50)]
        limit: usize,
        /// Shards of this job only
        #[arg(long)]
        job: Option<String>,
        /// Of this kind only
        #[arg(long)]
        kind: Option<Kind>,
    },
    /// Show one with everything that is known: the whole reason, the attempts, the message's text
    Show {
        /// Its number
        id: i64,
    },
    /// Try again: a shard runs on from its checkpoint with all its tries, a message is sent as a trigger
    #[command(
        after_help = "Examples:\n  shardcron dead replay 17\n  shardcron dead replay 17-25 --reason 'the bank is back'\n  shardcron dead replay --all --job settle\n  shardcron dead replay 31 --body '{\"job\": \"settle\", \"params\": {\"date\": \"2026-03-01\"}}'\n\nA message without a request_id of its own gets dead-letter-NUMBER, so that a replay that is sent twice fires once."
    )]
    Replay {
        #[command(flatten)]
        letters: Letters,
        /// Another text instead of the message's own
        #[arg(long, value_name = "JSON")]
        body: Option<String>,
        /// Why; kept in the audit
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
        /// How long to wait for a scheduler to decide about a message, in seconds
        #[arg(long, default_value_t = 10)]
        patience: u64,
    },
    /// Take dead letters away that nothing is to be done about
    #[command(
        after_help = "Example:\n  shardcron dead drop 17-25 --reason 'test messages'\n\nThe audit keeps who dropped what, and why."
    )]
    Drop {
        #[command(flatten)]
        letters: Letters,
        /// Why; kept in the audit
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

/// The kinds, as the command line has them.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Kind {
    /// A shard without a try left
    Shard,
    /// A message that was refused
    Message,
}

impl From<Kind> for DeadKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Shard => DeadKind::Shard,
            Kind::Message => DeadKind::Message,
        }
    }
}

/// Which dead letters are meant.
#[derive(Args, Clone, Debug)]
pub struct Letters {
    /// Their numbers: 17, or 17-25
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with = "all")]
    ids: Vec<String>,
    /// All there are when the command begins
    #[arg(long)]
    all: bool,
    /// Of these, shards of this job only
    #[arg(long)]
    job: Option<String>,
    /// Of these, this kind only
    #[arg(long)]
    kind: Option<Kind>,
}

impl Letters {
    fn choice(self) -> Result<Choice, Misuse> {
        let ids = self.ids.iter().map(|text| range(text)).collect::<Result<Vec<_>, _>>()?;
        Ok(Choice {
            named: !self.all,
            query: DeadQuery { ids, job: self.job, kind: self.kind.map(Into::into), after: Some(0) },
        })
    }
}

/// Reads `17` and `17-25`.
fn range(text: &str) -> Result<(i64, i64), Misuse> {
    let number = |part: &str| match part.trim().parse::<u32>() {
        Ok(number) => Ok(i64::from(number)),
        Err(_) => Err(Misuse(format!("'{text}' is no dead letter's number; write 17, or 17-25"))),
    };
    match text.split_once('-') {
        Some((from, to)) => Ok((number(from)?, number(to)?)),
        None => Ok((number(text)?, number(text)?)),
    }
}

/// Runs one.
pub async fn run(command: DeadCommand, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    match command {
        DeadCommand::List { limit, job, kind } => {
            let query = DeadQuery { job, kind: kind.map(Into::into), ..DeadQuery::default() };
            let rows = wired.ports.ledger.dead_letters(&query, limit.clamp(1, 1_000)).await?;
            out.answer(&rows, || list(&rows));
            Ok(ExitCode::SUCCESS)
        }
        DeadCommand::Show { id } => show(&wired, id, out).await,
        DeadCommand::Replay { letters, body, reason, patience } => {
            let letters = chosen(&wired, letters.choice()?).await?;
            replay_all(&wired, letters, (body, reason, patience), out).await
        }
        DeadCommand::Drop { letters, reason } => {
            let letters = chosen(&wired, letters.choice()?).await?;
            drop_all(&wired, letters, reason, out).await
        }
    }
}

fn list(rows: &[shardcron_store::DeadRow]) {
    if rows.is_empty() {
        line("nothing is dead");
        return;
    }
    table(
        &["id", "when", "what", "job", "where or text", "why"],
        rows.iter().map(|r| {
            let place = match (&r.shard, &r.text) {
                (Some((execution, index)), _) => format!("{execution}/{index}"),
                (None, Some(text)) => shorten(text),
                (None, None) => String::new(),
            };
            let job = r.job.clone().unwrap_or_else(|| "-".into());
            vec![r.id.to_string(), instant(Some(r.at_ms)), r.kind.clone(), job, place, shorten(&r.reason)]
        }),
    );
}

/// One line of at most eighty characters, without what would disturb a terminal.
fn shorten(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(80).collect();
    if text.chars().count() > 80 { format!("{clean}…") } else { clean }
}
