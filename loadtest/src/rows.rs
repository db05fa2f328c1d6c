//! Numbers out of the ledger, by statements of the load test's own.

use anyhow::{Context, Result, ensure};
use shardcron_store::SqlArg;
use shardcron_store::sql::SqlLedger;

/// Sums are decimals in MySQL, which come as text.
fn number(value: &SqlArg) -> Result<i64> {
    Ok(match value {
        SqlArg::Int(n) => *n,
        SqlArg::Float(n) => *n as i64,
        SqlArg::Text(text) => text.parse().with_context(|| format!("a number that reads '{text}'"))?,
        SqlArg::Null => 0,
    })
}

/// The first row as counts.
///
/// # Errors
/// The ledger does not answer, or answers something else.
pub async fn numbers(ledger: &SqlLedger, sql: &str, args: &[SqlArg]) -> Result<Vec<u64>> {
    let rows = ledger.query(sql, args).await.context("a question to the ledger")?;
    let first = rows.first().context("no answer from the ledger")?;
    first.iter().map(|value| Ok(number(value)?.max(0).unsigned_abs())).collect()
}

/// All rows, two numbers each.
///
/// # Errors
/// The ledger does not answer, or answers something else.
pub async fn pairs(ledger: &SqlLedger, sql: &str, args: &[SqlArg]) -> Result<Vec<(i64, i64)>> {
    let rows = ledger.query(sql, args).await.context("a question to the ledger")?;
    rows.iter()
        .map(|row| {
            ensure!(row.len() == 2, "{} columns instead of two", row.len());
            Ok((number(&row[0])?, number(&row[1])?))
        })
        .collect()
}
