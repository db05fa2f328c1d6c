//! Tiers that no living worker serves: a misspelt one would let its shards wait in silence.

use crate::wiring::Wired;
use shardcron_domain::JobSpec;
use std::collections::{BTreeMap, BTreeSet};

/// Warns about them on standard error. Of the tiers that every worker has by default only if there is a worker at all, since jobs
/// are often applied before anything runs.
pub async fn warn<'a>(wired: &Wired, jobs: impl Iterator<Item = &'a JobSpec>, lost_after_ms: i64) {
    let Ok(mut workers) = wired.ports.presence.workers().await else { return };
    workers.retain(|w| w.age_ms <= lost_after_ms && !w.beat.draining);
    let served: BTreeSet<&str> =
        workers.iter().flat_map(|w| w.beat.tiers.iter().map(|(tier, _)| tier.as_str())).collect();
    let mut unserved: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for job in jobs {
        let usual = matches!(job.tier.as_str(), "core" | "bulk") && workers.is_empty();
        if !served.contains(job.tier.as_str()) && !usual {
            unserved.entry(&job.tier).or_default().push(&job.name);
        }
    }
    for (tier, names) in unserved {
        let has = served.iter().copied().collect::<Vec<_>>().join(", ");
        let has = if has.is_empty() { "none runs".to_owned() } else { format!("they serve: {has}") };
        eprintln!(
            "warning: no worker serves the tier '{tier}' of {} ({has}); its shards will wait until one is started with \
             SHARDCRON_WORKER_TIERS={tier}=4 or the tier is mended",
            some_of(&names)
        );
    }
}

/// The first few of many names.
fn some_of(names: &[&str]) -> String {
    let first = names.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(5) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
