//! What a program or a service is told of its shard, as JSON: the same for both.

use serde_json::{Value, json};
use shardcron_domain::units::rfc3339;
use shardcron_sdk::ShardContext;

/// The shard, the attempt, and where an earlier attempt got to.
pub(crate) fn of(context: &ShardContext) -> Value {
    json!({
        "job": context.job,
        "execution": context.attempt.execution.to_string(),
        "shard_index": context.shard_index,
        "shards_total": context.shards_total,
        "attempt": context.attempt.attempt,
        "idempotency_key": context.idempotency_key(),
        "nominal": rfc3339(context.nominal_ms),
        "nominal_ms": context.nominal_ms,
        "slice": context.slice,
        "params": context.params,
        "checkpoint": context.checkpoint,
        "time_left_ms": context.time_left().map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
    })
}
