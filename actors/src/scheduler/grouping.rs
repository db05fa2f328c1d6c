//! How many shards of large executions travel in one message: what the dispatcher remembers between two surveys.

use crate::ports::Ports;
use shardcron_domain::ExecutionId;
use shardcron_domain::grouping::{self, EndRate, WORTH_A_LOOK};
use shardcron_domain::job::Takeover;
use shardcron_store::ActiveExecution;
use std::collections::{HashMap, HashSet};
use tokio::time::Instant;

/// Large executions whose specification one survey reads; the next one goes on.
const READ_AT_ONCE: usize = 8;

/// The large executions. Bounded by what is active.
#[derive(Default)]
pub(super) struct Grouping {
    large: HashMap<ExecutionId, Large>,
}

struct Large {
    /// The job's own.
    limit: Option<u32>,
    rate: EndRate,
    /// Shards that had ended at the last look, and when that was.
    last: (u32, Instant),
}

/// Executions and their jobs' limits, as a survey has read them.
pub(super) type Limits = Vec<(ExecutionId, Option<u32>)>;

impl Grouping {
    /// Whose limits are known.
    pub(super) fn known(&self) -> HashSet<ExecutionId> {
        self.large.keys().copied().collect()
    }

    /// Takes in a survey.
    pub(super) fn look(&mut self, active: &[ActiveExecution], limits: Limits) {
        let now = Instant::now();
        let alive: HashMap<ExecutionId, u32> = active.iter().filter(|a| is_large(a)).map(|a| (a.id, a.ended)).collect();
        self.large.retain(|id, _| alive.contains_key(id));
        for (id, large) in &mut self.large {
            let ended = alive.get(id).copied().unwrap_or_default();
            let (before, then) = large.last;
            let elapsed_ms = u64::try_from(now.duration_since(then).as_millis()).unwrap_or(u64::MAX);
            if large.rate.observe(ended.saturating_sub(before), elapsed_ms) {
                large.last = (ended, now);
            }
        }
        for (id, limit) in limits {
            if let Some(ended) = alive.get(&id) {
                self.large.entry(id).or_insert(Large { limit, rate: EndRate::default(), last: (*ended, now) });
            }
        }
    }

    /// Shards for each message of an execution of which `left` have not been handed out.
    pub(super) fn size(&self, execution: ExecutionId, left: u32, consumers: u32) -> u32 {
        self.large.get(&execution).map_or(1, |large| grouping::size(large.rate, large.limit, left, consumers))
    }
}

fn is_large(active: &ActiveExecution) -> bool {
    active.shards_total.saturating_sub(active.dispatched) >= WORTH_A_LOOK
}

/// Reads the limits of large executions that are not `known`. What can't be read travels singly, and the next survey tries again.
pub(super) async fn limits(ports: &Ports, active: &[ActiveExecution], known: &HashSet<ExecutionId>) -> Limits {
    let mut limits = Vec::new();
    for execution in active.iter().filter(|a| is_large(a) && !known.contains(&a.id)).take(READ_AT_ONCE) {
        match ports.ledger.execution_head(execution.id).await {
            // A message that comes again is a reason there to take its shards over at once, and a run comes again with those of its
            // shards that are long done, or tried elsewhere by now.
            Ok(Some(head)) if head.spec.takeover == Takeover::Immediate => limits.push((execution.id, Some(1))),
            Ok(Some(head)) => limits.push((execution.id, head.spec.shards.group)),
            Ok(None) => {}
            Err(e) => {
                tracing::debug!(execution_id = %execution.id, error = %e, "the execution's specification could not be read");
                break;
            }
        }
    }
    limits
}
