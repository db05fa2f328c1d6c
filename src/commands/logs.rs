//! `shardcron logs`: output of attempts, line by line, as it comes in.

use super::{Misuse, connect_to_look};
use crate::config::Config;
use crate::output::{Out, line};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use shardcron_domain::ExecutionId;
use shardcron_domain::output::Stream;
use shardcron_domain::units::rfc3339;
use shardcron_store::{Ledger, OutputQuery, OutputRow};
use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How often who follows asks.
const EVERY: Duration = Duration::from_millis(300);
/// Rows of one look; each has 16 KiB at most.
const PAGE: usize = 500;
/// For how long a row with a smaller id may become visible after one with a larger id.
const UNSETTLED: Duration = Duration::from_secs(3);
/// A line without an end is shown in parts of this size.
const LINE_BYTES: usize = 64 * 1024;

/// What to show.
#[derive(Args)]
pub struct LogsArgs {
    /// The execution
    execution: ExecutionId,
    /// One shard only, by its number from 0
    shard: Option<u32>,
    /// Go on as output comes in, until the execution ends
    #[arg(short = 'f', long)]
    follow: bool,
    /// One attempt only, from 1
    #[arg(long, value_name = "N")]
    attempt: Option<u32>,
}

/// Shows it.
pub async fn run(args: LogsArgs, config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(&config).await?;
    let ledger = &*wired.ports.ledger;
    let Some(execution) = ledger.execution(args.execution).await? else {
        let hint = "'shardcron executions list' shows them";
        return Err(Misuse(format!("there is no execution {}; {hint}", args.execution)).into());
    };
    if let Some(shard) = args.shard.filter(|shard| *shard >= execution.shards_total) {
        let last = execution.shards_total.saturating_sub(1);
        return Err(Misuse(format!("there is no shard {shard}; the execution has the shards 0 to {last}")).into());
    }
    let query = OutputQuery { execution: args.execution, shard: args.shard, attempt: args.attempt, after: 0 };
    let mut reader = Reader { query, seen: VecDeque::new() };
    let mut lines = Lines { out, many: execution.shards_total > 1 && args.shard.is_none(), ..Lines::default() };
    loop {
        // Asked before the rows: what was written before the end is there when the end is.
        let over = !args.follow || ledger.execution(args.execution).await?.is_none_or(|e| e.phase.is_terminal());
        while let Some(rows) = reader.next(ledger).await? {
            rows.iter().for_each(|row| lines.show(row));
        }
        if over {
            break;
        }
        tokio::time::sleep(EVERY).await;
    }
    lines.finish();
    if lines.rows == 0 && !out.json {
        eprintln!("nothing was written, or it is not kept any more");
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads rows once each, in the order in which they become visible.
struct Reader {
    query: OutputQuery,
    /// Rows behind `query.after` that have been shown, with when.
    seen: VecDeque<(i64, Instant)>,
}

impl Reader {
    /// Rows that have not been shown; `None` if there is none now.
    async fn next(&mut self, ledger: &dyn Ledger) -> Result<Option<Vec<OutputRow>>> {
        let mut from = self.query;
        loop {
            let page = ledger.output(&from, PAGE).await?;
            let full = page.len() == PAGE;
            let last = page.last().map(|row| row.id);
            let new: Vec<OutputRow> =
                page.into_iter().filter(|row| !self.seen.iter().any(|(id, _)| *id == row.id)).collect();
            if !new.is_empty() {
                let now = Instant::now();
                self.seen.extend(new.iter().map(|row| (row.id, now)));
                self.settle();
                return Ok(Some(new));
            }
            match last {
                // A page of rows that have all been shown: behind it there may be others.
                Some(last) if full => from.after = last,
                _ => return Ok(None),
            }
        }
    }

    /// What was shown long enough ago, or is one page long, is not read again.
    fn settle(&mut self) {
        while self.seen.front().is_some_and(|(_, at)| at.elapsed() > UNSETTLED) || self.seen.len() > PAGE {
            if let Some((id, _)) = self.seen.pop_front() {
                self.query.after = self.query.after.max(id);
            }
        }
        let after = self.query.after;
        self.seen.retain(|(id, _)| *id > after);
    }
}

#[derive(Default)]
struct Attempt {
    /// Where its output goes on, if nothing is cut.
    position: u64,
    /// Lines without an end yet.
    partial: BTreeMap<Stream, Vec<u8>>,
}

/// Puts lines together and prints them.
struct Lines {
    out: Out,
    many: bool,
    attempts: BTreeMap<(u32, u32), Attempt>,
    rows: u64,
}

impl Default for Lines {
    fn default() -> Self {
        Lines { out: Out { json: false }, many: false, attempts: BTreeMap::new(), rows: 0 }
    }
}

impl Lines {
    fn show(&mut self, row: &OutputRow) {
        self.rows += 1;
        let (at, of) = ((row.shard, row.attempt), &row.chunk);
        let attempt = self.attempts.entry(at).or_default();
        let mut ready: Vec<(Stream, Vec<u8>)> = Vec::new();
        if of.position > attempt.position {
            ready.extend(std::mem::take(&mut attempt.partial));
            let cut = of.position - attempt.position;
            ready.push((Stream::Log, format!("… {cut} bytes cut …").into_bytes()));
        }
        attempt.position = attempt.position.max(of.position + of.bytes.len() as u64);
        let partial = attempt.partial.entry(of.stream).or_default();
        partial.extend_from_slice(&of.bytes);
        while let Some(end) =
            partial.iter().position(|b| *b == b'\n').or((partial.len() > LINE_BYTES).then_some(LINE_BYTES))
        {
            let mut one: Vec<u8> = partial.drain(..=end.min(partial.len() - 1)).collect();
            if one.last() == Some(&b'\n') {
                one.pop();
            }
            ready.push((of.stream, one));
        }
        for (stream, text) in ready {
            self.print(at, row.at_ms, stream, &text);
        }
    }

    fn finish(&mut self) {
        for (at, attempt) in std::mem::take(&mut self.attempts) {
            for (stream, text) in attempt.partial.into_iter().filter(|(_, text)| !text.is_empty()) {
                self.print(at, super::now_ms(), stream, &text);
            }
        }
    }

    fn print(&self, (shard, attempt): (u32, u32), at_ms: i64, stream: Stream, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        if self.out.json {
            let at = rfc3339(at_ms);
            return line(
                &json!({ "shard": shard, "attempt": attempt, "at": at, "stream": stream.word(), "text": text })
                    .to_string(),
            );
        }
        let whose = match (self.many, attempt > 1) {
            (true, _) => format!("{shard}#{attempt} | "),
            (false, true) => format!("#{attempt} | "),
            (false, false) => String::new(),
        };
        let mark = if stream == Stream::Log { "- " } else { "" };
        line(&format!("{whose}{mark}{}", harmless(&text)));
    }
}

/// Without what would move the cursor, change the title or set colours of a person's terminal.
fn harmless(text: &str) -> String {
    text.trim_end_matches('\r').chars().map(|c| if c.is_control() && c != '\t' { '\u{FFFD}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_09_a_terminal_is_not_moved_by_output() {
        assert_eq!(harmless("a\tb\u{1b}[31mred\u{1b}[0m\r"), "a\tb\u{FFFD}[31mred\u{FFFD}[0m");
        assert_eq!(harmless("smile 😀 \0"), "smile 😀 \u{FFFD}");
    }
}
