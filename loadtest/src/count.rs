//! `handler = { rust = "count" }`: each record adds 1 to its counter, in one of the three ways in which that happens once.

use shardcron_sdk::{
    Batch, Checkpoint, EffectError, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait,
    values,
};

/// The counters: `id` from 1, `n` from 0.
pub const COUNTERS: &str = "effects_counters";
/// Records of one transaction: few, so that there are many moments to be killed at.
const STEP: i64 = 20;
/// Steps without an order, of which only each of so many has a checkpoint.
const STEPS_OF_A_CHECKPOINT: i64 = 5;

/// See above; which of the ways is said by the shard's index.
pub struct Count;

fn key(id: i64) -> Vec<u8> {
    format!("record-{id}").into_bytes()
}

#[async_trait]
impl ShardHandler for Count {
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Range { from, to } = context.slice else {
            return Err(ShardError::permanent("the job needs a range"));
        };
        // What an attempt that died had begun with and not ended; with its effects in the same transaction it is simply done again.
        while let Some(batch) = context.left_over().await? {
            let mut tx = context.transaction().await?;
            add(&mut tx, &batch).await?;
            tx.settle(batch);
            tx.commit_records(0).await?;
        }
        let mut next = match context.checkpoint {
            Some(Checkpoint::Number(done)) => done + 1,
            _ => from,
        };
        let way = context.attempt.index % 3;
        while next <= to {
            if context.should_stop() {
                return Err(ShardError::stopped("told to stop"));
            }
            let end = to.min(next + STEP - 1);
            match way {
                0 => in_a_transaction(&mut context, next, end).await?,
                1 => noted_first(&mut context, next, end).await?,
                _ => without_an_order(&mut context, next, end, to).await?,
            }
            next = end + 1;
        }
        Ok(ShardOutput::rows(to.abs_diff(from) + 1))
    }
}

/// Effects and checkpoint in one transaction.
async fn in_a_transaction(context: &mut ShardContext, from: i64, to: i64) -> Result<(), EffectError> {
    let mut tx = context.transaction().await?;
    let sql = format!("UPDATE {COUNTERS} SET n = n + 1 WHERE id BETWEEN ? AND ?");
    let rows = tx.execute(&sql, &values![from, to]).await?;
    tx.commit(Checkpoint::Number(to), rows).await
}

/// Records are noted in a transaction of ours before, and settled in that of their effects.
async fn noted_first(context: &mut ShardContext, from: i64, to: i64) -> Result<(), EffectError> {
    let batch = context.once((from..=to).map(key)).await?;
    let mut tx = context.transaction().await?;
    let rows = add(&mut tx, &batch).await?;
    tx.settle(batch);
    tx.commit(Checkpoint::Number(to), rows).await
}

/// Only the records say what is done, until a checkpoint covers them.
async fn without_an_order(context: &mut ShardContext, from: i64, to: i64, last: i64) -> Result<(), EffectError> {
    let mut tx = context.transaction().await?;
    let batch = tx.once((from..=to).map(key)).await?;
    let rows = add(&mut tx, &batch).await?;
    tx.settle(batch);
    if to == last || (to / STEP) % STEPS_OF_A_CHECKPOINT == 0 {
        tx.commit(Checkpoint::Number(to), rows).await
    } else {
        tx.commit_records(rows).await
    }
}

async fn add(tx: &mut shardcron_sdk::Transaction<'_>, batch: &Batch) -> Result<u64, EffectError> {
    let ids: Vec<String> = batch
        .open()
        .into_iter()
        .filter_map(|n| std::str::from_utf8(batch.key(n)).ok()?.strip_prefix("record-").map(str::to_owned))
        .collect();
    if ids.is_empty() {
        return Ok(0);
    }
    let places = vec!["?"; ids.len()].join(",");
    let args: Vec<_> = ids.iter().map(|id| id.parse::<i64>().unwrap_or_default().into()).collect();
    tx.execute(&format!("UPDATE {COUNTERS} SET n = n + 1 WHERE id IN ({places})"), &args).await
}
