//! What `shardcron explain` says, situation by situation, against files that people can read. `UPDATE_GOLDEN=1` writes them anew;
//! read the difference before you commit it.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use shardcron_domain::ExecutionId;
use shardcron_domain::execution::Phase;
use shardcron_domain::explain::*;
use shardcron_domain::firing::{DecisionKind, schedule_key};
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::units::{parse_instant, rfc3339};
use std::path::PathBuf;

fn at(text: &str) -> i64 {
    parse_instant(&format!("2026-{text}Z")).unwrap()
}

fn job() -> JobFacts {
    JobFacts {
        name: "settle".into(),
        zone: Some("Europe/Berlin".into()),
        since_ms: Some(at("01-01T00:00:00")),
        paused_by: None,
        kept_since_ms: None,
    }
}

fn epochs() -> Vec<EpochFacts> {
    let epoch = |epoch, holder: &str, from: &str, seen: &str| EpochFacts {
        epoch,
        holder: format!("{holder}/0197"),
        from_ms: at(from),
        seen_ms: at(seen),
    };
    vec![
        epoch(7, "scheduler-1", "03-01T00:00:00", "03-10T01:29:58"),
        epoch(8, "scheduler-2", "03-10T01:30:06", "03-12T00:00:00"),
        epoch(9, "scheduler-1", "03-12T04:00:00", "03-20T12:00:00"),
    ]
}

fn execution(n: u128, phase: Phase) -> ExecutionFacts {
    ExecutionFacts {
        id: ExecutionId(uuid::Uuid::from_u128((0x0197 << 112) | n)),
        version: 3,
        phase,
        shards: 4,
        succeeded: 4,
        failed: 0,
        fired_ms: at("03-09T01:30:00"),
        ended_ms: Some(at("03-09T01:30:00") + 2_100),
        cancelled: None,
        attempts: Vec::new(),
    }
}

fn decision(nominal_ms: i64, kind: DecisionKind, decided_ms: i64, epoch: i64) -> DecisionFacts {
    DecisionFacts {
        fire_key: schedule_key(nominal_ms),
        nominal_ms,
        due_ms: nominal_ms,
        kind,
        reason: None,
        decided_ms,
        epoch,
        execution: None,
    }
}

fn due(nominal_ms: i64, decisions: Vec<DecisionFacts>) -> InstantFacts {
    InstantFacts { nominal_ms, place: Place::Due, clock_change: None, decisions }
}

fn golden(name: &str, job: &JobFacts, instant: &InstantFacts, epochs: &[EpochFacts]) -> Explanation {
    let explained = explain(job, instant, epochs, at("03-20T12:00:01"));
    let text = format!("{}\n{}\n", explained.what, explained.sentences.join("\n"));
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/explain/{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, wanted, "{}", path.display());
    explained
}

const NINTH: &str = "03-09T01:30:00";

#[test]
fn fired_on_time() {
    let t = at(NINTH);
    let mut fired = decision(t, DecisionKind::Fired, t + 12, 7);
    fired.execution = Some(execution(1, Phase::Success));
    assert_eq!(golden("fired_on_time", &job(), &due(t, vec![fired]), &epochs()).what, "fired");
}

#[test]
fn fired_late_by_a_fail_over() {
    let t = at("03-10T01:30:00");
    let mut fired = decision(t, DecisionKind::Fired, t + 6_250, 8);
    fired.execution = Some(execution(2, Phase::Success));
    golden("fired_late_by_a_fail_over", &job(), &due(t, vec![fired]), &epochs());
}

#[test]
fn fired_late_because_nobody_led() {
    let t = at("03-12T01:30:00");
    let fired = decision(t, DecisionKind::Fired, at("03-12T04:00:00") + 400, 9);
    golden("fired_late_because_nobody_led", &job(), &due(t, vec![fired]), &epochs());
}

#[test]
fn fired_late_by_a_slow_ledger() {
    let t = at("03-14T01:30:00");
    golden(
        "fired_late_by_a_slow_ledger",
        &job(),
        &due(t, vec![decision(t, DecisionKind::Fired, t + 55_000, 9)]),
        &epochs(),
    );
}

#[test]
fn skipped_by_overlap() {
    let t = at(NINTH);
    let blocking = execution(3, Phase::Running);
    let reason = format!("execution {} of the job still runs, and its overlap policy is skip", blocking.id);
    let mut skipped = decision(t, DecisionKind::SkippedOverlap, t + 9, 7);
    (skipped.reason, skipped.execution) =
        (Some(reason), Some(ExecutionFacts { ended_ms: None, succeeded: 1, ..blocking }));
    golden("skipped_by_overlap", &job(), &due(t, vec![skipped]), &epochs());
}

#[test]
fn coalesced_after_a_downtime() {
    let t = at("03-12T01:30:00");
    let mut record = decision(t, DecisionKind::Coalesced, at("03-12T04:00:00") + 400, 9);
    record.reason = Some("missed by 9000 s (grace 1m); made up for by a later instant".into());
    golden("coalesced_after_a_downtime", &job(), &due(t, vec![record]), &epochs());
}

#[test]
fn skipped_by_a_pause() {
    let t = at(NINTH);
    let mut skipped = decision(t, DecisionKind::SkippedPaused, t + 3, 7);
    skipped.reason = Some("the job is paused by ops (with all jobs)".into());
    golden("skipped_by_a_pause", &job(), &due(t, vec![skipped]), &epochs());
}

#[test]
fn skipped_by_an_exception() {
    let t = at(NINTH);
    let mut skipped = decision(t, DecisionKind::SkippedException, t + 3, 7);
    skipped.reason = Some("excepted by '2026-03-09'".into());
    golden("skipped_by_an_exception", &job(), &due(t, vec![skipped]), &epochs());
}

#[test]
fn not_an_instant_because_the_clock_jumped() {
    // 02:30 in New York on 8 March 2026 does not exist; the schedule moves it to 03:00.
    let spec = ScheduleSpec {
        cron: Some("30 2 * * *".into()),
        timezone: Some("America/New_York".into()),
        ..ScheduleSpec::default()
    };
    let schedule = spec.compile().unwrap();
    let t = at("03-08T07:30:00");
    let (before, after) = neighbours(&schedule, t).unwrap();
    assert_eq!(
        (before.map(rfc3339).as_deref(), after.map(rfc3339).as_deref()),
        (Some("2026-03-08T07:00:00Z"), Some("2026-03-09T06:30:00Z"))
    );
    let facts = InstantFacts {
        nominal_ms: t,
        place: Place::Beside(before, after),
        clock_change: before.and_then(|b| schedule.clock_change(b)),
        decisions: Vec::new(),
    };
    let job = JobFacts { zone: Some("America/New_York".into()), ..job() };
    assert_eq!(golden("not_an_instant_because_the_clock_jumped", &job, &facts, &epochs()).what, "not_due");
}

#[test]
fn nobody_leads() {
    let t = at("03-20T12:00:00");
    let old: Vec<EpochFacts> = epochs().into_iter().take(2).collect();
    assert_eq!(golden("nobody_leads", &job(), &due(t, Vec::new()), &old).what, "no_leader");
    let never = explain(&job(), &due(t, Vec::new()), &[], t + 1);
    assert_eq!(never.what, "no_leader");
}

#[test]
fn nothing_recorded_is_a_fault() {
    let t = at(NINTH);
    assert_eq!(golden("nothing_recorded_is_a_fault", &job(), &due(t, Vec::new()), &epochs()).what, "fault");
}

#[test]
fn shards_that_failed() {
    let t = at(NINTH);
    let attempt = |shard, attempt, outcome: &str, took_ms, message: Option<&str>| AttemptFacts {
        shard,
        attempt,
        outcome: outcome.into(),
        took_ms,
        message: message.map(str::to_owned),
    };
    let attempts = vec![
        attempt(3, 1, "worker_lost", 8_000, Some("its worker was lost")),
        attempt(3, 2, "failed", 2_000, Some("exit code 1: connection refused.")),
        attempt(3, 3, "timeout", 1_800_000, Some("timed out after 30m")),
        attempt(0, 1, "success", 900, None),
    ];
    let mut fired = decision(t, DecisionKind::Fired, t + 12, 7);
    fired.execution = Some(ExecutionFacts { succeeded: 3, failed: 1, attempts, ..execution(4, Phase::Failed) });
    golden("shards_that_failed", &job(), &due(t, vec![fired]), &epochs());
}

#[test]
fn waited_in_the_queue_and_replaced() {
    let t = at(NINTH);
    let mut fired = decision(t, DecisionKind::Fired, t + 65_000, 7);
    fired.reason = Some(
        "waited since 2026-03-09T01:30:00Z: execution 0197 of the job still runs; it waits, first in the queue".into(),
    );
    let cancelled = ExecutionFacts {
        succeeded: 1,
        cancelled: Some("replaced by execution 0198 for 2026-03-09T01:35:00Z, as the overlap policy says".into()),
        ..execution(5, Phase::Cancelled)
    };
    fired.execution = Some(cancelled);
    golden("waited_in_the_queue_and_replaced", &job(), &due(t, vec![fired]), &epochs());
}

#[test]
fn not_fired_because_of_its_upstream() {
    let t = at(NINTH);
    let mut skipped = decision(t, DecisionKind::SkippedUpstream, t + 3_300, 7);
    skipped.fire_key = "after:01970000-0000-0000-0000-000000000006".into();
    skipped.reason =
        Some("execution 0197 of upstream job 'load' ended failed, and the job follows a success only".into());
    let facts = InstantFacts {
        place: Place::Unknown("has no schedule of its own: it fires after load".into()),
        ..due(t, vec![skipped])
    };
    golden("not_fired_because_of_its_upstream", &job(), &facts, &epochs());
}

#[test]
fn fired_by_hand_beside_the_schedule() {
    let t = at(NINTH);
    let own = decision(t, DecisionKind::Fired, t + 5, 7);
    let mut by_hand = decision(t, DecisionKind::Fired, at("03-15T09:00:00"), 9);
    by_hand.fire_key = "request:again-1".into();
    by_hand.reason = Some("asked for by ops".into());
    golden("fired_by_hand_beside_the_schedule", &job(), &due(t, vec![by_hand, own]), &epochs());
}

#[test]
fn the_future_and_the_time_before() {
    let future = due(at("03-21T01:30:00"), Vec::new());
    let paused = JobFacts { paused_by: Some("ops".into()), ..job() };
    assert_eq!(golden("the_future_while_paused", &paused, &future, &epochs()).what, "future");
    let young = JobFacts { since_ms: Some(at("03-10T00:00:00")), ..job() };
    assert_eq!(golden("before_the_job", &young, &due(at(NINTH), Vec::new()), &epochs()).what, "before_the_job");
    let old = JobFacts { kept_since_ms: Some(at("03-10T00:00:00")), ..job() };
    assert_eq!(explain(&old, &due(at(NINTH), Vec::new()), &epochs(), at("03-20T12:00:01")).what, "forgotten");
    let just = explain(&job(), &due(at("03-20T11:59:55"), Vec::new()), &epochs(), at("03-20T12:00:01"));
    assert_eq!(just.what, "undecided", "it may still be on its way");
}
