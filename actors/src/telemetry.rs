//! The metrics that the actors emit, in one place. Labels are bounded: tiers, kinds, reasons; never an id.

use metrics::{counter, gauge, histogram};
use shardcron_domain::invariants::InvariantId;
use shardcron_domain::metric_names as names;

pub(crate) fn leader(epoch: Option<i64>) {
    gauge!(names::LEADER).set(if epoch.is_some() { 1.0 } else { 0.0 });
    if let Some(epoch) = epoch {
        gauge!(names::EPOCH).set(epoch as f64);
    }
}

pub(crate) fn decision(kind: &'static str) {
    counter!(names::DECISIONS, names::LABEL_KIND => kind).increment(1);
}

pub(crate) fn firing_lateness(lateness_ms: i64) {
    histogram!(names::FIRING_LATENESS).record(lateness_ms.max(0) as f64 / 1_000.0);
}

pub(crate) fn publish_window(tier: &str, window: u32) {
    gauge!(names::PUBLISH_WINDOW, names::LABEL_TIER => tier.to_owned()).set(f64::from(window));
}

pub(crate) fn republished(count: usize) {
    counter!(names::REPUBLISHED).increment(count as u64);
}

pub(crate) fn takeover(reason: &'static str, count: u64) {
    counter!(names::TAKEOVERS, names::LABEL_REASON => reason).increment(count);
}

pub(crate) fn recorded(tier: &str, outcome: &'static str) {
    counter!(names::RESULTS_RECORDED, names::LABEL_TIER => tier.to_owned(), names::LABEL_OUTCOME => outcome)
        .increment(1);
}

pub(crate) fn retried(tier: &str) {
    counter!(names::RETRIES, names::LABEL_TIER => tier.to_owned()).increment(1);
}

pub(crate) fn attempt(tier: &str, outcome: &'static str, seconds: f64) {
    histogram!(names::ATTEMPT_SECONDS, names::LABEL_TIER => tier.to_owned(), names::LABEL_OUTCOME => outcome)
        .record(seconds);
}

pub(crate) fn refused(at: &'static str, reason: &'static str) {
    counter!(names::REFUSED, names::LABEL_AT => at, names::LABEL_REASON => reason).increment(1);
}

pub(crate) fn group_commit(lane: &'static str, entries: usize, seconds: f64) {
    histogram!(names::GROUP_COMMIT_ENTRIES, names::LABEL_LANE => lane).record(entries as f64);
    histogram!(names::GROUP_COMMIT_SECONDS, names::LABEL_LANE => lane).record(seconds);
}

pub(crate) fn worker_running(tier: &str, running: usize) {
    gauge!(names::WORKER_RUNNING, names::LABEL_TIER => tier.to_owned()).set(running as f64);
}

pub(crate) fn tier_counts(tier: &str, waiting: u64, running: u64) {
    gauge!(names::SHARDS_WAITING, names::LABEL_TIER => tier.to_owned()).set(waiting as f64);
    gauge!(names::SHARDS_RUNNING, names::LABEL_TIER => tier.to_owned()).set(running as f64);
}

pub(crate) fn cache(cache: &str, outcome: &'static str) {
    counter!(names::CACHE, names::LABEL_CACHE => cache.to_owned(), names::LABEL_OUTCOME => outcome).increment(1);
}

pub(crate) fn ledger_away(away: bool) {
    gauge!(names::LEDGER_AWAY).set(if away { 1.0 } else { 0.0 });
}

/// An invariant of the running program: a panic in debug builds, a metric and an error line in release.
pub(crate) fn check(id: InvariantId, holds: bool, seen: &'static str) {
    debug_assert!(holds, "invariant {id} is broken: {seen}");
    if !holds {
        counter!(names::INVARIANT_VIOLATIONS, names::LABEL_ID => id.to_string()).increment(1);
        tracing::error!(invariant = %id, seen, "an invariant is broken; this is a bug, please report it with this log");
    }
}
