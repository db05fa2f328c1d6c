//! The ways that are Rust handlers: the flights whose plane is not in the register, each step slow enough to be killed in.

use super::target::FOUND;
use shardcron_sdk::{
    Batch, Checkpoint, EffectError, Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice,
    SqlValue, Transaction, async_trait, values,
};
use std::time::Duration;

/// Flights of one transaction.
pub const STEP: i64 = 1_000;
/// Steps without an order, of which only each of so many has a checkpoint.
const STEPS_OF_A_CHECKPOINT: i64 = 3;
const FIND: &str = "SELECT f.id, f.tailnum FROM demo_flights f LEFT JOIN demo_planes p ON p.tailnum = f.tailnum \
                    WHERE f.id BETWEEN ? AND ? AND p.tailnum IS NULL";

/// Adds the handlers of the scenario.
pub fn with_ways(registry: Registry) -> Registry {
    registry.with("ways-transaction", InTransaction).with("ways-once", Once).with("ways-map", Mapped)
}

fn number(context: &ShardContext, name: &str) -> i64 {
    context.params.get(name).and_then(serde_json::Value::as_i64).unwrap_or(0)
}

/// A part of the step's pause. A kill is to come between any two of its statements.
async fn pause(context: &ShardContext, parts: u64) {
    let ms = number(context, "pause_ms").unsigned_abs();
    tokio::time::sleep(Duration::from_millis(ms / parts)).await;
}

fn range(context: &ShardContext) -> Result<(i64, i64), ShardError> {
    match context.slice {
        ShardSlice::Range { from, to } => Ok((from, to)),
        _ => Err(ShardError::permanent("the job needs a range")),
    }
}

fn begin(context: &ShardContext, from: i64) -> i64 {
    match context.checkpoint {
        Some(Checkpoint::Number(done)) => done + 1,
        _ => from,
    }
}

async fn find(tx: &mut Transaction<'_>, from: i64, to: i64) -> Result<Vec<Vec<SqlValue>>, EffectError> {
    tx.query(FIND, &values![from, to]).await
}

async fn insert(tx: &mut Transaction<'_>, found: &[Vec<SqlValue>]) -> Result<u64, EffectError> {
    if found.is_empty() {
        return Ok(0);
    }
    let places = vec!["(?,?)"; found.len()].join(",");
    let args: Vec<SqlValue> = found.iter().flat_map(|row| row.iter().cloned()).collect();
    tx.execute(&format!("INSERT INTO {FOUND} (flight_id, tailnum) VALUES {places}"), &args).await
}

/// `rust = "ways-transaction"`: what a step finds and its checkpoint are one transaction.
struct InTransaction;

#[async_trait]
impl ShardHandler for InTransaction {
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let (from, to) = range(&context)?;
        let mut next = begin(&context, from);
        while next <= to {
            if context.should_stop() {
                return Err(ShardError::stopped("told to stop"));
            }
            let end = to.min(next + STEP - 1);
            let mut tx = context.transaction().await?;
            let found = find(&mut tx, next, end).await?;
            pause(tx.context(), 2).await;
            insert(&mut tx, &found).await?;
            pause(tx.context(), 2).await;
            tx.commit(Checkpoint::Number(end), (end - next + 1).unsigned_abs()).await?;
            next = end + 1;
        }
        Ok(ShardOutput::rows(to.abs_diff(from) + 1))
    }
}

/// `rust = "ways-once"`: each unmatched flight is a record that is worked on once. Shards of an even index note their records in a
/// transaction before that of the effects; the others go without an order, and only the records say what is done.
struct Once;

#[async_trait]
impl ShardHandler for Once {
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let (from, to) = range(&context)?;
        while let Some(batch) = context.left_over().await? {
            let mut tx = context.transaction().await?;
            insert_open(&mut tx, &batch).await?;
            tx.settle(batch);
            tx.commit_records(0).await?;
        }
        let mut next = begin(&context, from);
        while next <= to {
            if context.should_stop() {
                return Err(ShardError::stopped("told to stop"));
            }
            let end = to.min(next + STEP - 1);
            let keys = {
                let mut tx = context.transaction().await?;
                keys_of(&find(&mut tx, next, end).await?)
            };
            if context.attempt.index.is_multiple_of(2) {
                noted_first(&mut context, keys, end).await?;
            } else {
                let covered = end == to || (end / STEP) % STEPS_OF_A_CHECKPOINT == 0;
                without_an_order(&mut context, keys, covered.then_some(end)).await?;
            }
            next = end + 1;
        }
        Ok(ShardOutput::default())
    }
}

async fn noted_first(context: &mut ShardContext, keys: Vec<Vec<u8>>, end: i64) -> Result<(), EffectError> {
    let batch = context.once(keys).await?;
    pause(context, 3).await;
    let mut tx = context.transaction().await?;
    let rows = insert_open(&mut tx, &batch).await?;
    pause(tx.context(), 3).await;
    tx.settle(batch);
    tx.commit(Checkpoint::Number(end), rows).await?;
    pause(context, 3).await;
    Ok(())
}

async fn without_an_order(
    context: &mut ShardContext,
    keys: Vec<Vec<u8>>,
    covered: Option<i64>,
) -> Result<(), EffectError> {
    let mut tx = context.transaction().await?;
    let batch = tx.once(keys).await?;
    let rows = insert_open(&mut tx, &batch).await?;
    pause(tx.context(), 2).await;
    tx.settle(batch);
    match covered {
        Some(end) => tx.commit(Checkpoint::Number(end), rows).await?,
        None => tx.commit_records(rows).await?,
    }
    pause(context, 2).await;
    Ok(())
}

fn keys_of(found: &[Vec<SqlValue>]) -> Vec<Vec<u8>> {
    let id = |row: &Vec<SqlValue>| match row.first() {
        Some(SqlValue::Int(id)) => Some(id.to_string().into_bytes()),
        _ => None,
    };
    found.iter().filter_map(id).collect()
}

async fn insert_open(tx: &mut Transaction<'_>, batch: &Batch) -> Result<u64, EffectError> {
    let open = batch.open().into_iter().filter_map(|n| std::str::from_utf8(batch.key(n)).ok()?.parse::<i64>().ok());
    let ids: Vec<SqlValue> = open.map(SqlValue::from).collect();
    if ids.is_empty() {
        return Ok(0);
    }
    let places = vec!["?"; ids.len()].join(",");
    let sql =
        format!("INSERT INTO {FOUND} (flight_id, tailnum) SELECT id, tailnum FROM demo_flights WHERE id IN ({places})");
    tx.execute(&sql, &ids).await
}

/// `rust = "ways-map"`: the first shard emits runs of flights, those insert what they find, and the last one adds up.
struct Mapped;

#[async_trait]
impl ShardHandler for Mapped {
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        match context.slice.clone() {
            ShardSlice::Map { .. } => emit(&context).await,
            ShardSlice::Task { payload, .. } => {
                let end = |name: &str| {
                    let end = payload.get(name).and_then(serde_json::Value::as_i64);
                    end.ok_or_else(|| ShardError::permanent(format!("a task without '{name}': {payload}")))
                };
                task(&mut context, end("from")?, end("to")?).await
            }
            ShardSlice::Reduce { .. } => add_up(&context).await,
            other => Err(ShardError::permanent(format!("the job needs a map, not {other}"))),
        }
    }
}

async fn emit(context: &ShardContext) -> Result<ShardOutput, ShardError> {
    let (flights, tasks) = (number(context, "flights"), number(context, "tasks").max(1));
    for n in 0..tasks {
        let (from, to) = (flights * n / tasks + 1, flights * (n + 1) / tasks);
        context.emit(serde_json::json!({ "from": from, "to": to })).await?;
        tokio::time::sleep(Duration::from_millis(number(context, "emit_pause_ms").unsigned_abs())).await;
    }
    Ok(ShardOutput::default())
}

async fn task(context: &mut ShardContext, from: i64, to: i64) -> Result<ShardOutput, ShardError> {
    // An attempt that died between its commit and its result has done everything.
    let done = context.checkpoint == Some(Checkpoint::Number(to));
    let mut tx = context.transaction().await?;
    let found = find(&mut tx, from, to).await?;
    if !done {
        insert(&mut tx, &found).await?;
        pause(tx.context(), 1).await;
        tx.commit(Checkpoint::Number(to), found.len() as u64).await?;
    }
    let summary = Some(serde_json::json!({ "unmatched": found.len() }));
    Ok(ShardOutput { summary, ..ShardOutput::rows(to.abs_diff(from) + 1) })
}

async fn add_up(context: &ShardContext) -> Result<ShardOutput, ShardError> {
    let (mut total, mut next) = (0, 0);
    loop {
        let page = context.sub_results(next).await?;
        let Some(last) = page.last() else { break };
        next = last.number + 1;
        let unmatched = |summary: &serde_json::Value| summary.get("unmatched").and_then(serde_json::Value::as_u64);
        total += page.iter().filter_map(|result| unmatched(result.summary.as_ref()?)).sum::<u64>();
    }
    Ok(ShardOutput { summary: Some(serde_json::json!({ "total": total })), ..ShardOutput::default() })
}
