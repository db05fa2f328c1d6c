//! The demo's job as a Rust handler: finds the flights whose plane is not in the register. See `examples/reconcile-flights/job.toml`
//! for the same in SQL alone, and `examples/reconcile-flights/rust.toml` for this one's job.

use shardcron_sdk::{
    Checkpoint, Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, SqlValue, async_trait,
    values,
};
use std::collections::HashSet;

/// Flights of one transaction.
const STEP: i64 = 1_000;

/// `handler = { rust = "reconcile" }`
pub struct Reconcile;

#[async_trait]
impl ShardHandler for Reconcile {
    /// Everything it does is in transactions that check the attempt: `takeover = "immediate"` may be said of its jobs.
    fn effects_are_fenced(&self) -> bool {
        true
    }

    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Range { from, to } = context.slice else {
            return Err(ShardError::permanent("the job needs shards of a range of flights"));
        };
        let mut next = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { from };
        while next <= to {
            if context.should_stop() {
                return Err(ShardError::stopped("told to stop"));
            }
            let end = to.min(next + STEP - 1);
            reconcile(&mut context, next, end).await?;
            next = end + 1;
        }
        Ok(ShardOutput::rows(to.abs_diff(from) + 1))
    }
}

/// A step: what it finds, and that it has looked, in one transaction.
async fn reconcile(context: &mut ShardContext, from: i64, to: i64) -> Result<(), ShardError> {
    let mut tx = context.transaction().await?;
    let flights =
        tx.query("SELECT id, carrier, tailnum FROM demo_flights WHERE id BETWEEN ? AND ?", &values![from, to]).await?;
    let register = tx
        .query(
            "SELECT DISTINCT p.tailnum FROM demo_planes p JOIN demo_flights f ON f.tailnum = p.tailnum \
             WHERE f.id BETWEEN ? AND ?",
            &values![from, to],
        )
        .await?;
    let known: HashSet<&str> = register.iter().filter_map(|row| row.first()?.as_str()).collect();
    let unmatched: Vec<&Vec<SqlValue>> = flights
        .iter()
        .filter(|row| row.get(2).and_then(SqlValue::as_str).is_none_or(|tail| !known.contains(tail)))
        .collect();
    if !unmatched.is_empty() {
        let places = vec!["(?,?,?)"; unmatched.len()].join(",");
        let args: Vec<SqlValue> = unmatched.iter().flat_map(|row| row.iter().cloned()).collect();
        tx.execute(&format!("INSERT INTO demo_unmatched (flight_id, carrier, tailnum) VALUES {places}"), &args).await?;
    }
    tx.commit(Checkpoint::Number(to), flights.len() as u64).await?;
    Ok(())
}

fn main() -> std::process::ExitCode {
    shardcron::run_with(std::env::args_os(), Registry::default().with("reconcile", Reconcile))
}
