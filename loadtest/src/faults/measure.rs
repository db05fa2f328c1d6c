//! The time to recover, from events in the ledger, and the late ends of a worker that woke as a zombie.

use super::inject::Injected;
use super::load::TICKS;
use super::matrix::Measure;
use crate::oracle::rows_of;
use anyhow::Result;
use shardcron_store::SqlArg;
use shardcron_store::sql::SqlLedger;
use std::path::Path;

/// Milliseconds to recover; `None`: it never did.
///
/// # Errors
/// The ledger does not answer.
pub async fn recovered(
    ledger: &SqlLedger,
    measure: Measure,
    injected: &Injected,
    until_ms: i64,
) -> Result<Option<i64>> {
    match measure {
        Measure::Firing => latest_firing(ledger, injected.at_ms, until_ms).await,
        Measure::Shards => shards_elsewhere(ledger, injected).await,
        Measure::Recorded => held_recorded(ledger, injected).await,
        Measure::Return => resumed(ledger, injected.back_ms).await,
    }
}

/// How late the latest decision of a schedule was, of those that came at or after `from_ms`.
///
/// # Errors
/// The ledger does not answer.
pub async fn latest_firing(ledger: &SqlLedger, from_ms: i64, until_ms: i64) -> Result<Option<i64>> {
    let sql = "SELECT MAX(decided_ms - nominal_ms) FROM decisions \
               WHERE decided_ms >= ? AND nominal_ms <= ? AND fire_key NOT LIKE 'request:%'";
    let rows = rows_of(ledger, sql, &[SqlArg::Int(from_ms), SqlArg::Int(until_ms)]).await?;
    Ok(rows.first().and_then(|row| row.first()?.parse().ok()))
}

/// Until the last shard that the victim had in hand began elsewhere, or was recorded as it was.
async fn shards_elsewhere(ledger: &SqlLedger, injected: &Injected) -> Result<Option<i64>> {
    let sql = "SELECT attempt, started_ms, ended_ms FROM results WHERE HEX(execution_id) = ? AND shard_index = ?";
    let mut last = 0;
    for held in &injected.held {
        let rows = rows_of(ledger, sql, &[SqlArg::Text(held.execution.clone()), SqlArg::Int(held.index)]).await?;
        let numbers: Vec<i64> = rows.into_iter().flatten().filter_map(|text| text.parse().ok()).collect();
        let [attempt, started, ended] = numbers.as_slice() else { return Ok(None) };
        last = last.max(if *attempt == held.attempt { *ended } else { *started } - injected.at_ms);
    }
    Ok(Some(last))
}

/// Until the last execution of which the victim had a shard in hand had ended: its end is written with its last record.
async fn held_recorded(ledger: &SqlLedger, injected: &Injected) -> Result<Option<i64>> {
    let sql = "SELECT ended_ms FROM executions WHERE HEX(id) = ?";
    let mut last = injected.back_ms;
    for held in &injected.held {
        let rows = rows_of(ledger, sql, &[SqlArg::Text(held.execution.clone())]).await?;
        let Some(ended) = rows.first().and_then(|row| row.first()?.parse::<i64>().ok()) else { return Ok(None) };
        last = last.max(ended);
    }
    Ok(Some(last - injected.back_ms))
}

/// Until each job of every second had fired after the return and a shard of that firing was recorded.
async fn resumed(ledger: &SqlLedger, back_ms: i64) -> Result<Option<i64>> {
    let sql = "SELECT MIN(r.ended_ms) FROM executions e JOIN jobs j ON j.id = e.job_id \
               JOIN results r ON r.execution_id = e.id WHERE j.name = ? AND e.fired_ms >= ?";
    let mut last = 0;
    for job in TICKS {
        let rows = rows_of(ledger, sql, &[SqlArg::Text(job.into()), SqlArg::Int(back_ms)]).await?;
        let Some(first) = rows.first().and_then(|row| row.first()?.parse::<i64>().ok()) else { return Ok(None) };
        last = last.max(first - back_ms);
    }
    Ok(Some(last))
}

/// Ends that the victim's handlers came to after it was woken, while the ledger holds the result of another attempt: what was
/// refused. From the handlers' own list of ends, not from what the worker says.
///
/// # Errors
/// The ledger does not answer.
pub async fn refused(ledger: &SqlLedger, injected: &Injected, ends: &Path) -> Result<u64> {
    let sql = "SELECT HEX(owner), attempt FROM results WHERE HEX(execution_id) = ? AND shard_index = ?";
    let mut refused = 0;
    for line in std::fs::read_to_string(ends).unwrap_or_default().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [execution, index, attempt, owner, ended] = words.as_slice() else { continue };
        let owner = owner.replace('-', "").to_uppercase();
        let late = ended.parse::<i64>().is_ok_and(|ended| ended >= injected.back_ms);
        if !late || !injected.incarnations.contains(&owner) {
            continue;
        }
        let shard = [SqlArg::Text(execution.replace('-', "").to_uppercase()), SqlArg::Int(index.parse()?)];
        let rows = rows_of(ledger, sql, &shard).await?;
        if rows.first().is_some_and(|row| row.as_slice() != [owner.as_str(), attempt]) {
            refused += 1;
        }
    }
    Ok(refused)
}
