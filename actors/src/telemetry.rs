//! The metrics that the actors emit, in one place. Labels are bounded: tiers, kinds, reasons; never an id.

use metrics::{counter, gauge, histogram};

pub(crate) fn leader(epoch: Option<i64>) {
    gauge!("shardcron_leader").set(if epoch.is_some() { 1.0 } else { 0.0 });
    if let Some(epoch) = epoch {
        gauge!("shardcron_epoch").set(epoch as f64);
    }
}

pub(crate) fn decision(kind: &'static str) {
    counter!("shardcron_decisions_total", "kind" => kind).increment(1);
}

pub(crate) fn firing_lateness(lateness_ms: i64) {
    histogram!("shardcron_firing_lateness_seconds").record(lateness_ms.max(0) as f64 / 1_000.0);
}

pub(crate) fn publish_window(tier: &str, window: u32) {
    gauge!("shardcron_publish_window", "tier" => tier.to_owned()).set(f64::from(window));
}

pub(crate) fn republished(count: usize) {
    counter!("shardcron_republished_total").increment(count as u64);
}

pub(crate) fn takeover(reason: &'static str, count: u64) {
    counter!("shardcron_takeovers_total", "reason" => reason).increment(count);
}

pub(crate) fn recorded(tier: &str, outcome: &'static str) {
    counter!("shardcron_results_recorded_total", "tier" => tier.to_owned(), "outcome" => outcome).increment(1);
}

pub(crate) fn retried() {
    counter!("shardcron_retries_total").increment(1);
}

pub(crate) fn refused(at: &'static str, reason: &'static str) {
    counter!("shardcron_refused_total", "at" => at, "reason" => reason).increment(1);
}

pub(crate) fn group_commit(lane: &'static str, entries: usize, seconds: f64) {
    histogram!("shardcron_group_commit_entries", "lane" => lane).record(entries as f64);
    histogram!("shardcron_group_commit_seconds", "lane" => lane).record(seconds);
}

pub(crate) fn worker_running(tier: &str, running: usize) {
    gauge!("shardcron_worker_running", "tier" => tier.to_owned()).set(running as f64);
}

pub(crate) fn tier_counts(tier: &str, waiting: u64, running: u64) {
    gauge!("shardcron_shards_waiting", "tier" => tier.to_owned()).set(waiting as f64);
    gauge!("shardcron_shards_running", "tier" => tier.to_owned()).set(running as f64);
}

pub(crate) fn ledger_away(away: bool) {
    gauge!("shardcron_ledger_away").set(if away { 1.0 } else { 0.0 });
}
