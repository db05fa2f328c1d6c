//! What it costs to work on a record once, beside the insert of a bare row.

use crate::report;
use crate::services::{ServiceArgs, Services};
use crate::session::{Voice, now_ms};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use shardcron_domain::job::{OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation, jobfile};
use shardcron_handlers::effects::LedgerEffects;
use shardcron_sdk::{Checkpoint, ShardContext};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::{FireAction, FireIntent, Ledger, NewExecution, SqlArg};
use std::sync::Arc;
use std::time::Instant;
use uuid::Uuid;

/// What can be said.
#[derive(Args)]
pub struct OnceArgs {
    /// Records of each measurement
    #[arg(long, default_value_t = 300_000, value_parser = clap::value_parser!(u32).range(1_000..=100_000_000))]
    records: u32,
    /// Records of one batch
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=5_000))]
    batch: u32,
    /// Shards that run at the same time
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    shards: u32,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    services: ServiceArgs,
}

/// The figures.
#[derive(Serialize)]
struct Once {
    records: u32,
    batch: u32,
    shards: u32,
    /// `context.once` and `context.settle`: two transactions of ours for each batch.
    records_per_second: f64,
    /// `tx.once` with the effect (a bare insert) and the checkpoint in the handler's own transaction.
    in_transaction_per_second: f64,
    /// The same rows into a bare table, one transaction for each batch.
    bare_insert_per_second: f64,
    processors: usize,
    optimised: bool,
}

/// Runs it. True: every record was worked on, and no row is left.
///
/// # Errors
/// The database does not start or does not answer.
pub async fn run(args: OnceArgs) -> Result<bool> {
    let voice = Voice::new(args.json);
    let services = Services::start(args.services.clone(), |text| voice.phase(text)).await?;
    let answer = measure(&services, &args, &voice).await;
    let cleaned = services.clean_up(&[]).await;
    voice.done();
    let answer = answer?;
    cleaned?;
    if args.json {
        report::json(&answer)?;
    } else {
        println!("{} records in batches of {}, {} shards at a time", answer.records, answer.batch, answer.shards);
        if !answer.optimised {
            println!("built without optimisation: figures mean nothing; run with cargo run --release");
        }
        println!("  once, in transactions of its own      {:>9.0} records/s", answer.records_per_second);
        println!("  once, in the handler's transaction    {:>9.0} records/s", answer.in_transaction_per_second);
        println!("  bare insert                           {:>9.0} rows/s", answer.bare_insert_per_second);
    }
    Ok(true)
}

async fn measure(services: &Services, args: &OnceArgs, voice: &Voice) -> Result<Once> {
    let options = SqlOptions { max_connections: args.shards + 2, ..SqlOptions::default() };
    let ledger = SqlLedger::connect(&services.sql_url, options).await?;
    ledger.migrate().await?;
    ledger
        .execute_script(
            "CREATE TABLE bare (shard INT NOT NULL, record_key VARBINARY(64) NOT NULL, PRIMARY KEY (shard, record_key)) ENGINE=InnoDB; \
             CREATE TABLE effects LIKE bare",
        )
        .await?;
    voice.phase("bare inserts");
    let bare =
        timed(args, (0..args.shards).map(|shard| bare_inserts(ledger.clone(), shard, part(args))).collect()).await?;
    voice.phase("once, in transactions of its own");
    let contexts = contexts(&ledger, args.shards * 2).await?;
    let (own, users) = contexts.split_at(args.shards as usize);
    let own = timed(args, own.iter().map(|context| on_its_own(context.clone(), part(args))).collect()).await?;
    voice.phase("once, in the handler's transaction");
    let users = timed(args, users.iter().map(|context| in_users(context.clone(), part(args))).collect()).await?;
    let left = ledger.query("SELECT COUNT(*) FROM once_records", &[]).await?;
    ensure!(left == [[SqlArg::Int(0)]], "rows of records are left: {left:?}");
    let effects = ledger.query("SELECT COUNT(*) FROM effects", &[]).await?;
    let (each, batch) = part(args);
    ensure!(effects == [[SqlArg::Int(i64::from(each.div_ceil(batch) * batch * args.shards))]], "effects: {effects:?}");
    Ok(Once {
        records: args.records,
        batch: args.batch,
        shards: args.shards,
        records_per_second: own,
        in_transaction_per_second: users,
        bare_insert_per_second: bare,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        optimised: !cfg!(debug_assertions),
    })
}

/// Records of one shard, and of a batch.
fn part(args: &OnceArgs) -> (u32, u32) {
    (args.records.div_ceil(args.shards), args.batch)
}

/// Runs all at once; records per second.
async fn timed<F>(args: &OnceArgs, work: Vec<F>) -> Result<f64>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let began = Instant::now();
    let tasks: Vec<_> = work.into_iter().map(tokio::spawn).collect();
    for task in tasks {
        task.await.context("a task ended badly")??;
    }
    let (each, batch) = part(args);
    let records = each.div_ceil(batch) * batch * args.shards;
    Ok((f64::from(records) / began.elapsed().as_secs_f64()).round())
}

fn keys(batch: u32, size: u32) -> impl Iterator<Item = Vec<u8>> {
    (0..size).map(move |n| format!("order-{:010}", u64::from(batch) * u64::from(size) + u64::from(n)).into_bytes())
}

async fn bare_inserts(ledger: SqlLedger, shard: u32, (records, batch): (u32, u32)) -> Result<()> {
    for number in 0..records.div_ceil(batch) {
        let text = |key: Vec<u8>| SqlArg::Text(String::from_utf8_lossy(&key).into_owned());
        let rows = keys(number, batch).map(|key| vec![SqlArg::Int(shard.into()), text(key)]).collect();
        ledger.insert_rows("bare", &["shard", "record_key"], rows).await?;
    }
    Ok(())
}

async fn on_its_own(mut context: ShardContext, (records, batch): (u32, u32)) -> Result<()> {
    for number in 0..records.div_ceil(batch) {
        let records = context.once(keys(number, batch)).await?;
        ensure!(records.open().len() == batch as usize, "a record was known");
        context.settle(records, Checkpoint::Number(number.into())).await?;
    }
    Ok(())
}

async fn in_users(mut context: ShardContext, (records, batch): (u32, u32)) -> Result<()> {
    let shard = context.attempt.index;
    for number in 0..records.div_ceil(batch) {
        let mut tx = context.transaction().await?;
        let records = tx.once(keys(number, batch)).await?;
        let open = records.open();
        let places = vec!["(?,?)"; open.len()].join(",");
        let args: Vec<_> = open.iter().flat_map(|n| [shard.into(), records.key(*n).into()]).collect();
        let rows = tx.execute(&format!("INSERT INTO effects (shard, record_key) VALUES {places}"), &args).await?;
        tx.settle(records);
        tx.commit(Checkpoint::Number(number.into()), rows).await?;
    }
    Ok(())
}

/// Running attempts at so many shards, as a worker has them.
async fn contexts(ledger: &SqlLedger, shards: u32) -> Result<Vec<ShardContext>> {
    let job = jobfile::parse("[job.once]\nhandler = { rust = \"once\" }\n").context("the job")?.remove(0);
    ledger.apply_jobs(&[(job, None)], "loadtest", now_ms()).await?;
    let id = ledger.job("once").await?.context("the job")?.id;
    let epoch = ledger.begin_epoch("loadtest", now_ms()).await?;
    let execution = ExecutionId(Uuid::now_v7());
    let new = NewExecution {
        id: execution,
        plan: ShardPlan::Modulo { total: shards },
        params: Default::default(),
        tier: "core".into(),
        timeout_ms: None,
        stall_ms: None,
        overlap: OverlapPolicy::Allow,
    };
    let intent = FireIntent {
        job: id,
        version: 1,
        fire_key: execution.to_string(),
        nominal_ms: now_ms(),
        scheduled: false,
        action: FireAction::Fire(new),
        next_fire_ms: None,
        extra: Default::default(),
    };
    ledger.fire(epoch, &[intent], now_ms()).await?;
    ledger.mark_dispatched(epoch, &[(execution, shards)], &[]).await?;
    let owner = Incarnation(Uuid::now_v7());
    let attempts: Vec<AttemptRef> = (0..shards).map(|index| AttemptRef { execution, index, attempt: 1 }).collect();
    let claims = ledger.claim(owner, &attempts, now_ms()).await?;
    ensure!(claims.iter().all(Result::is_ok), "a claim was refused");
    let port: Arc<dyn Ledger> = Arc::new(ledger.clone());
    Ok(attempts
        .into_iter()
        .map(|attempt| ShardContext {
            attempt,
            owner,
            job: "once".into(),
            shard_index: attempt.index,
            shards_total: shards,
            slice: ShardSlice::Modulo { total: shards, item: attempt.index },
            params: Default::default(),
            nominal_ms: 0,
            checkpoint: None,
            started_ms: now_ms(),
            retry: RetryPolicy::default(),
            deadline: None,
            stop: Default::default(),
            effects: Arc::new(LedgerEffects::new(port.clone(), (owner, attempt), Box::new(|| {}))),
        })
        .collect())
}
