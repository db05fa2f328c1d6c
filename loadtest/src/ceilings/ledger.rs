//! The database alone: two guarded state changes and a result row for each shard, in batches, in as few round trips as there can
//! be. On tables like the ledger's own, beside them.

use anyhow::{Context, Result, bail};
use shardcron_store::SqlArg;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;

/// Batches of the sizes that group commit makes; the best counts.
const BATCHES: [u32; 3] = [128, 256, 512];
const CONNECTIONS: u32 = 4;
const EXECUTION: &str = "x'00000000000070008000000000000001'";
const OWNER: &str = "x'00000000000070008000000000000002'";
const INSERT_ROWS: u32 = 1_000;

/// Shards per second, at the best batch size.
///
/// # Errors
/// The database does not answer or does not keep what it was told.
pub async fn measure(url: &str, shards: u32) -> Result<f64> {
    let options = SqlOptions { max_connections: CONNECTIONS, ..SqlOptions::default() };
    let db = SqlLedger::connect(url, options).await.context("the database")?;
    db.execute_script(
        "DROP TABLE IF EXISTS ceiling_shards; DROP TABLE IF EXISTS ceiling_results; \
         CREATE TABLE ceiling_shards LIKE shards; CREATE TABLE ceiling_results LIKE results",
    )
    .await
    .context("tables for the ledger's ceiling")?;
    let mut best: f64 = 0.0;
    for batch in BATCHES {
        best = best.max(round(&db, shards, batch).await?);
    }
    db.execute_script("DROP TABLE ceiling_shards; DROP TABLE ceiling_results").await?;
    Ok(best)
}

async fn round(db: &SqlLedger, shards: u32, batch: u32) -> Result<f64> {
    db.execute_script("TRUNCATE TABLE ceiling_shards; TRUNCATE TABLE ceiling_results").await?;
    for from in (0..shards).step_by(INSERT_ROWS as usize) {
        let rows = list(from..shards.min(from + INSERT_ROWS), |text, index| write!(text, "({EXECUTION},{index})"));
        db.execute_script(&format!("INSERT INTO ceiling_shards (execution_id, shard_index) VALUES {rows}")).await?;
    }
    let next = Arc::new(AtomicU32::new(0));
    let mut tasks = JoinSet::new();
    let began = Instant::now();
    for _ in 0..CONNECTIONS {
        let (db, next) = (db.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let from = next.fetch_add(batch, Ordering::Relaxed);
                if from >= shards {
                    return Ok::<_, shardcron_store::StoreError>(());
                }
                move_batch(&db, from, shards.min(from + batch)).await?;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.context("a task of the ledger's ceiling")?.context("the ledger's ceiling")?;
    }
    let rate = f64::from(shards) / began.elapsed().as_secs_f64();
    let check = "SELECT COUNT(*) FROM ceiling_shards s JOIN ceiling_results r \
                 ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index WHERE s.state = 2";
    let kept = db.query(check, &[]).await?;
    if kept.first().and_then(|row| row.first()) != Some(&SqlArg::Int(i64::from(shards))) {
        bail!("the database kept {kept:?} of {shards} shards");
    }
    Ok(rate)
}

/// One transaction for the claim and one for the result, as the program has them.
async fn move_batch(db: &SqlLedger, from: u32, to: u32) -> shardcron_store::Result<()> {
    let indexes = list(from..to, |text, index| write!(text, "{index}"));
    let of_batch = format!("execution_id = {EXECUTION} AND shard_index IN ({indexes}) AND attempt = 1");
    db.execute_script(&format!(
        "UPDATE ceiling_shards SET state = 1, owner = {OWNER}, claimed_ms = 1 WHERE {of_batch} AND state = 0"
    ))
    .await?;
    let results = list(from..to, |text, index| write!(text, "({EXECUTION},{index},1,{OWNER},1,2)"));
    db.execute_script(&format!(
        "START TRANSACTION; \
         UPDATE ceiling_shards SET state = 2, owner = NULL WHERE {of_batch} AND state = 1 AND owner = {OWNER}; \
         INSERT INTO ceiling_results (execution_id, shard_index, attempt, owner, started_ms, ended_ms) VALUES {results}; \
         COMMIT"
    ))
    .await
}

fn list(indexes: std::ops::Range<u32>, item: impl Fn(&mut String, u32) -> std::fmt::Result) -> String {
    let mut text = String::new();
    for index in indexes {
        if !text.is_empty() {
            text.push(',');
        }
        // Writing to a String can't fail.
        let _ = item(&mut text, index);
    }
    text
}
