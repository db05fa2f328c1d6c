//! What a program finds in its environment: a short allow-list of the worker's own, and what it is to work on.
//!
//! A job can't set or change a variable (case Z-03: `LD_PRELOAD`), and what the worker itself was started with, such as the
//! password of its database, does not reach a program (case Z-05).

use shardcron_domain::shard::Checkpoint;
use shardcron_domain::units::rfc3339;
use shardcron_sdk::{ShardContext, ShardError, ShardSlice};

/// What passes from the worker to its programs.
const INHERITED: [&str; 4] = ["PATH", "HOME", "LANG", "TZ"];

/// Linux refuses a single variable beyond 128 KiB.
const VALUE_BYTES: usize = 120 * 1024;

/// The variables of an attempt.
pub(crate) fn of(context: &ShardContext) -> Result<Vec<(String, String)>, ShardError> {
    let attempt = context.attempt;
    let mut all: Vec<(String, String)> =
        INHERITED.iter().filter_map(|name| std::env::var(name).ok().map(|value| ((*name).into(), value))).collect();
    let mut put = |name: &str, value: String| all.push((format!("SHARDCRON_{name}"), value));
    put("JOB", context.job.clone());
    put("EXECUTION", attempt.execution.to_string());
    put("SHARD_INDEX", context.shard_index.to_string());
    put("SHARDS_TOTAL", context.shards_total.to_string());
    put("ATTEMPT", attempt.attempt.to_string());
    put("IDEMPOTENCY_KEY", context.idempotency_key());
    put("NOMINAL", rfc3339(context.nominal_ms));
    put("SLICE", serde_json::to_string(&context.slice).unwrap_or_default());
    put("PARAMS", serde_json::to_string(&context.params).unwrap_or_default());
    if let ShardSlice::Range { from, to } = context.slice {
        put("SHARD_FROM", from.to_string());
        put("SHARD_TO", to.to_string());
    }
    match &context.checkpoint {
        Some(Checkpoint::Number(number)) => put("CHECKPOINT", number.to_string()),
        Some(Checkpoint::Text(text)) => put("CHECKPOINT", text.clone()),
        None => {}
    }
    match all.iter().find(|(_, value)| value.len() > VALUE_BYTES) {
        Some((name, value)) => Err(ShardError::permanent(format!(
            "{name} would have {} bytes, and a program's environment has no place for that; cut the job into more shards",
            value.len()
        ))),
        None => Ok(all),
    }
}
