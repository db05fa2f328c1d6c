//! `shardcron executions retry` and `cancel`.

use super::{Misuse, connect_to_look, now_ms, trigger::wait_for_end, who};
use crate::config::Config;
use crate::output::{Out, counted, line, seconds};
use crate::wiring::Wired;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use shardcron_domain::execution::Phase;
use shardcron_domain::limits::REOPEN_BATCH;
use shardcron_domain::reopen::Refused;
use shardcron_domain::{AttemptRef, ExecutionId};
use shardcron_store::{Reopen, ReopenShards, Reopened};
use std::collections::BTreeSet;
use std::process::ExitCode;

/// What `retry` may be told.
#[derive(Args)]
pub struct RetryArgs {
    /// Its id
    execution: ExecutionId,
    /// All shards that failed (also if nothing else is said)
    #[arg(long, conflicts_with = "shard")]
    failed: bool,
    /// These shards: 3, or 7-9; may be repeated
    #[arg(long, value_name = "N", value_delimiter = ',')]
    shard: Vec<String>,
    /// Why; kept with the execution and in the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Wait for the end; exit code 0 only if every shard ended well
    #[arg(long)]
    wait: bool,
}

/// What `cancel` may be told.
#[derive(Args)]
pub struct CancelArgs {
    /// Its id
    execution: ExecutionId,
    /// Why; kept with the execution
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// Sends shards back, batch by batch.
pub(super) async fn reopen(wired: &Wired, mut wanted: Reopen) -> Result<std::result::Result<Reopened, Refused>> {
    let mut all = Reopened::default();
    loop {
        match wired.ports.ledger.reopen(&wanted, now_ms()).await? {
            Ok(batch) => {
                all.shards.extend(batch.shards);
                all.letters += batch.letters;
                all.followers += batch.followers;
                let Some(from) = batch.next else { return Ok(Ok(all)) };
                wanted.shards = ReopenShards::Failed { from };
            }
            // What was sent back stands; the rest has been taken up by somebody else meanwhile.
            Err(Refused::NothingFailed(_)) if !all.shards.is_empty() => return Ok(Ok(all)),
            Err(refused) if !all.shards.is_empty() => anyhow::bail!(
                "{} run again; the rest could not be sent back: {refused}",
                counted(all.shards.len() as u64, "shard")
            ),
            Err(refused) => return Ok(Err(refused)),
        }
    }
}

/// Runs failed shards again.
pub(super) async fn retry(args: RetryArgs, config: &Config, out: Out) -> Result<ExitCode> {
    let shards = match args.shard.as_slice() {
        [] => ReopenShards::Failed { from: 0 },
        named => ReopenShards::These(positions(named)?),
    };
    let wired = connect_to_look(config).await?;
    let id = args.execution;
    let wanted = Reopen { execution: id, shards, who: who(), reason: args.reason };
    let reopened = match reopen(&wired, wanted).await? {
        Ok(reopened) => reopened,
        Err(refused @ (Refused::NoSuchExecution(_) | Refused::NotFailed { .. })) => {
            return Err(Misuse(refused.to_string()).into());
        }
        Err(refused) => anyhow::bail!("{refused}"),
    };
    let ended = if args.wait { Some(wait_for_end(&wired, id, !out.json).await?) } else { None };
    let answer = json!({
        "execution": id,
        "shards": reopened.shards.iter().map(next).collect::<Vec<_>>(),
        "letters_settled": reopened.letters,
        "followers_told": reopened.followers,
        "ended": ended,
    });
    out.answer(&answer, || {
        let first: Vec<String> = reopened
            .shards
            .iter()
            .take(5)
            .map(|at| format!("{} (attempt {})", at.index, at.attempt.saturating_add(1)))
            .collect();
        let more = if reopened.shards.len() > first.len() { ", …" } else { "" };
        let count = counted(reopened.shards.len() as u64, "shard");
        line(&format!("running again: {count} of execution {id}: {}{more}", first.join(", ")));
        if let Some(row) = &ended {
            let took = row.ended_ms.unwrap_or(row.fired_ms) - row.fired_ms;
            let (well, total) = (row.succeeded, row.shards_total);
            line(&format!("{}: {well} of {total} shards well, {}", row.phase.word(), seconds(took)));
        }
    });
    let well = ended.is_none_or(|row| row.phase == Phase::Success);
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn next(at: &AttemptRef) -> serde_json::Value {
    json!({ "index": at.index, "attempt": at.attempt.saturating_add(1) })
}

/// Reads `3` and `7-9`.
fn positions(named: &[String]) -> Result<Vec<u32>, Misuse> {
    let mut all = BTreeSet::new();
    for text in named {
        let number = |part: &str| {
            part.trim().parse::<u32>().map_err(|_| Misuse(format!("'{text}' is no shard; write 3, or 7-9")))
        };
        let (from, to) = match text.split_once('-') {
            Some((from, to)) => (number(from)?, number(to)?),
            None => (number(text)?, number(text)?),
        };
        if from > to {
            return Err(Misuse(format!("'{text}' ends before it begins")));
        }
        if (to - from) as usize >= REOPEN_BATCH || all.len() > REOPEN_BATCH {
            return Err(Misuse(format!(
                "more than {REOPEN_BATCH} shards; --failed takes all that failed, however many"
            )));
        }
        all.extend(from..=to);
    }
    Ok(all.into_iter().collect())
}

/// Cancels an execution.
pub(super) async fn cancel(args: CancelArgs, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let (ledger, id, by) = (&wired.ports.ledger, args.execution, who());
    let why = args.reason.unwrap_or_else(|| format!("cancelled by {by}"));
    let Some(phase) = ledger.cancel(id, &by, &why, now_ms()).await? else {
        return Err(Misuse(Refused::NoSuchExecution(id).to_string()).into());
    };
    let cancelled = phase == Phase::Cancelled;
    let row = ledger.execution(id).await?;
    let never = row.map_or(0, |row| row.cancelled);
    out.answer(&json!({ "execution": id, "state": phase.word(), "shards_cancelled": never }), || {
        if cancelled {
            line(&format!(
                "cancelled: execution {id}, {}. Those that run are being stopped; their results are refused from now on",
                counted(never.into(), "shard")
            ));
        } else {
            line(&format!("execution {id} had ended before ({}); nothing was changed", phase.word()));
        }
    });
    Ok(if cancelled { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::positions;

    #[test]
    fn shards_are_named_one_by_one_or_in_ranges() {
        let read = |words: &[&str]| positions(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        assert_eq!(read(&["3", "7-9", "8"]).unwrap(), [3, 7, 8, 9]);
        for (wrong, words) in
            [("x", "is no shard"), ("9-7", "ends before"), ("-1", "is no shard"), ("0-4294967295", "--failed")]
        {
            let sentence = read(&[wrong]).unwrap_err().to_string();
            assert!(sentence.contains(words), "{wrong}: {sentence}");
        }
    }
}
