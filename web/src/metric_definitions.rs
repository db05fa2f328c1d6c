//! What every metric of the program means, in which unit, and in which buckets a histogram counts.
//!
//! The names stand in `shardcron_domain::metric_names`. The recorder has to be installed before anything else in `main`: what is
//! counted before is lost.

use crate::server::WebError;
use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use shardcron_domain::metric_names as names;
use std::time::Duration;

/// Without this, histograms would keep every single value until somebody scrapes.
const UPKEEP: Duration = Duration::from_secs(5);

/// Lateness: from a wheel's tick to a fail-over and beyond a misfire's grace.
const LATENESS_SECONDS: [f64; 13] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 600.0];
/// A commit: from memory speed to a disk that is in trouble.
const COMMIT_SECONDS: [f64; 12] = [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
/// Attempts: from a no-op to the default timeout and beyond.
const ATTEMPT_SECONDS: [f64; 14] =
    [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1_800.0, 7_200.0];
/// Batches, up to `limits::GROUP_COMMIT_ENTRIES`.
const ENTRIES: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// A recorder with the program's buckets.
///
/// # Errors
/// Never with the buckets above; the exporter checks them at run time.
pub fn build_recorder() -> Result<PrometheusRecorder, WebError> {
    let buckets: [(&str, &[f64]); 4] = [
        (names::FIRING_LATENESS, &LATENESS_SECONDS),
        (names::GROUP_COMMIT_SECONDS, &COMMIT_SECONDS),
        (names::ATTEMPT_SECONDS, &ATTEMPT_SECONDS),
        (names::GROUP_COMMIT_ENTRIES, &ENTRIES),
    ];
    // A histogram that nobody thought of here becomes buckets, too, and not a summary that can't be added up over processes.
    let mut builder = PrometheusBuilder::new().set_buckets(&ATTEMPT_SECONDS).map_err(metrics_error)?;
    for (name, values) in buckets {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), values).map_err(metrics_error)?;
    }
    Ok(builder.build_recorder())
}

/// Installs the recorder for the whole process, describes all metrics, and keeps the histograms small from then on by a task
/// on `runtime`. Once in a process, first thing in `main`.
///
/// # Errors
/// A recorder is installed already.
pub fn install_metrics(runtime: &tokio::runtime::Handle) -> Result<PrometheusHandle, WebError> {
    let recorder = build_recorder()?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(metrics_error)?;
    describe();
    let kept = handle.clone();
    runtime.spawn(async move {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            ticks.tick().await;
            kept.run_upkeep();
        }
    });
    Ok(handle)
}

fn metrics_error(error: impl std::fmt::Display) -> WebError {
    WebError::Metrics(error.to_string())
}

/// Describes every metric to the recorder that is in force.
pub fn describe() {
    describe_gauge!(names::SHARDS_WAITING, Unit::Count, "shards that have not started, by tier");
    describe_gauge!(names::SHARDS_RUNNING, Unit::Count, "shards that run, by tier");
    describe_counter!(
        names::RESULTS_RECORDED,
        Unit::Count,
        "ends of attempts that the ledger took, by outcome and tier"
    );
    describe_counter!(names::REPUBLISHED, Unit::Count, "shards handed out again because the transport had lost them");
    describe_counter!(names::CACHE, Unit::Count, "questions to the caches of handlers, by cache and outcome");
    describe_gauge!(names::LEDGER_AWAY, Unit::Count, "1 while this worker holds results because the ledger is away");
    describe_counter!(names::RETRIES, Unit::Count, "attempts after the first that were handed out, by tier");
    describe_counter!(
        names::REFUSED,
        Unit::Count,
        "stale, late or double writes that the ledger refused, by reason and place"
    );
    describe_histogram!(names::FIRING_LATENESS, Unit::Seconds, "from a nominal instant to its decision in the ledger");
    describe_counter!(names::DECISIONS, Unit::Count, "decisions about instants, fired or not, by kind");
    describe_histogram!(names::GROUP_COMMIT_ENTRIES, Unit::Count, "entries of a group commit, by lane");
    describe_histogram!(names::GROUP_COMMIT_SECONDS, Unit::Seconds, "how long a group commit took, by lane");
    describe_histogram!(names::ATTEMPT_SECONDS, Unit::Seconds, "how long an attempt ran, by tier and outcome");
    describe_gauge!(names::PUBLISH_WINDOW, Unit::Count, "messages that may stand in a tier's queue now");
    describe_counter!(names::PROGRAM_COUNTER, Unit::Count, "what programs of exec handlers count, by job and name");
    describe_gauge!(names::PROGRAM_GAUGE, Unit::Count, "what programs of exec handlers measure, by job and name");
    describe_counter!(names::HTTP_CALLBACKS, Unit::Count, "callbacks of services, by outcome: taken or refused");
    describe_counter!(names::HTTP_REQUESTS, Unit::Count, "requests of http handlers, by outcome");
    describe_gauge!(names::LEADER, Unit::Count, "1 while this process leads");
    describe_gauge!(names::EPOCH, Unit::Count, "the latest epoch that this process knows");
    describe_gauge!(names::WORKER_RUNNING, Unit::Count, "attempts that this worker runs now, by tier");
    describe_counter!(names::TAKEOVERS, Unit::Count, "shards taken from their owners, by reason");
    describe_counter!(names::INVARIANT_VIOLATIONS, Unit::Count, "broken invariants; anything but 0 is a bug");
    describe_counter!(
        names::SQL_ANSWERS_LOST,
        Unit::Count,
        "sql steps whose answer was lost and read back from the ledger"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_have_explicit_buckets_and_help() {
        let recorder = build_recorder().expect("buckets");
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            metrics::histogram!(names::GROUP_COMMIT_ENTRIES, names::LABEL_LANE => "claim").record(100.0);
            metrics::histogram!(names::FIRING_LATENESS).record(0.02);
            metrics::counter!(names::TAKEOVERS, names::LABEL_REASON => "hung").increment(1);
        });
        handle.run_upkeep();
        let text = handle.render();
        assert!(text.contains("shardcron_group_commit_entries_bucket{lane=\"claim\",le=\"128\"} 1"), "{text}");
        assert!(text.contains("shardcron_firing_lateness_seconds_bucket{le=\"0.025\"} 1"), "{text}");
        assert!(text.contains("# HELP shardcron_takeovers_total"), "{text}");
        assert!(text.contains("shardcron_takeovers_total{reason=\"hung\"} 1"), "{text}");
    }
}
