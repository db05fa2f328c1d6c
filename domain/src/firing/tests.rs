use super::*;
use crate::units::{Span, parse_instant};

fn every_5m() -> Schedule {
    ScheduleSpec { every: Some(Span::mins(5)), ..ScheduleSpec::default() }.compile().unwrap()
}

fn at(text: &str) -> i64 {
    parse_instant(&format!("2026-03-01T{text}Z")).unwrap()
}

fn look(policy: Misfire) -> (Vec<i64>, Vec<DecisionKind>, Option<i64>) {
    let policy = MisfirePolicy { policy, ..MisfirePolicy::default() };
    let due = due(&every_5m(), &policy, at("10:05:00"), at("10:31:20")).unwrap();
    let fired =
        due.intents.iter().filter_map(|i| if let Intent::Fire { nominal_ms } = i { Some(*nominal_ms) } else { None });
    let not = due.intents.iter().filter_map(|i| if let Intent::Record { kind, .. } = i { Some(*kind) } else { None });
    (fired.collect(), not.collect(), due.next_fire_ms)
}

#[test]
fn m_01_skip_lists_what_was_missed() {
    let (fired, not, next) = look(Misfire::Skip);
    assert_eq!((fired.len(), not.len(), next), (0, 6, Some(at("10:35:00"))));
    assert!(not.iter().all(|k| *k == DecisionKind::SkippedMisfire));
}

#[test]
fn m_01_fire_once_fires_the_latest() {
    let (fired, not, next) = look(Misfire::FireOnce);
    assert_eq!((fired, not.len(), next), (vec![at("10:30:00")], 5, Some(at("10:35:00"))));
}

#[test]
fn m_01_fire_all_fires_each_in_order() {
    let (fired, _, _) = look(Misfire::FireAll);
    let all: Vec<i64> =
        ["10:05", "10:10", "10:15", "10:20", "10:25", "10:30"].iter().map(|t| at(&format!("{t}:00"))).collect();
    assert_eq!(fired, all);
}

#[test]
fn within_the_grace_a_late_instant_simply_fires() {
    let due = due(&every_5m(), &MisfirePolicy::default(), at("10:05:00"), at("10:05:59")).unwrap();
    assert_eq!(due.intents, [Intent::Fire { nominal_ms: at("10:05:00") }]);
}

#[test]
fn m_02_a_long_downtime_is_worked_off_in_bounded_passes() {
    let every_second = ScheduleSpec { every: Some(Span::secs(1)), ..ScheduleSpec::default() }.compile().unwrap();
    let policy = MisfirePolicy::default();
    let (mut next, now) = (at("00:00:00"), at("03:00:00"));
    let (mut seen, mut fired) = (0, 0);
    while next <= now {
        let due = due(&every_second, &policy, next, now).unwrap();
        assert!(due.intents.len() <= MISSED_INSTANTS + 1);
        seen += due.intents.len();
        fired += due.intents.iter().filter(|i| matches!(i, Intent::Fire { .. })).count();
        next = due.next_fire_ms.unwrap();
    }
    // Every second has a decision; those within the grace of a minute fire, the older ones are coalesced into them.
    assert_eq!((seen, fired), (3 * 3_600 + 1, 61));
}

/// All passes after a downtime: what fired, how many instants have a decision, and how many passes it took.
fn passes(policy: &MisfirePolicy, missed: i64) -> (Vec<i64>, usize, usize) {
    let every_second = ScheduleSpec { every: Some(Span::secs(1)), ..ScheduleSpec::default() }.compile().unwrap();
    let (mut next, last) = (at("00:00:00"), at("00:00:00") + (missed - 1) * 1_000);
    let now = last + 999;
    let (mut fired, mut seen, mut passes) = (Vec::new(), 0, 0);
    while next <= now {
        let due = due(&every_second, policy, next, now).unwrap();
        seen += due.intents.len();
        let fires = due.intents.iter().filter(|i| matches!(i, Intent::Fire { .. }));
        fired.extend(fires.map(Intent::nominal_ms));
        next = due.next_fire_ms.unwrap();
        passes += 1;
    }
    (fired, seen, passes)
}

#[test]
fn m_02_the_latest_fire_wherever_a_pass_is_cut() {
    for missed in [1_000, 1_001, 1_050, 1_999, 2_001, 2_050, 3_500] {
        for (kind, limit) in [(Misfire::FireAll, 100), (Misfire::FireAll, 1_000), (Misfire::FireOnce, 100)] {
            let policy = MisfirePolicy { policy: kind, limit, grace: Span::secs(0) };
            let (fired, seen, _) = passes(&policy, missed);
            let most = if kind == Misfire::FireOnce { 1 } else { i64::from(limit) };
            let latest: Vec<i64> = (missed - most..missed).map(|i| at("00:00:00") + i * 1_000).collect();
            assert_eq!(fired, latest, "{missed} missed, {kind:?} {limit}");
            assert_eq!(seen as i64, missed, "each has its decision");
        }
    }
}

#[test]
fn m_02_what_is_within_the_grace_does_not_use_up_the_limit() {
    // 1,051 missed by more than the grace of a minute, 60 within it: the latest 100 of the former fire with all of the latter.
    let policy = MisfirePolicy { policy: Misfire::FireAll, limit: 100, ..MisfirePolicy::default() };
    let (fired, seen, passes) = passes(&policy, 1_111);
    let latest: Vec<i64> = (951..1_111).map(|i| at("00:00:00") + i * 1_000).collect();
    assert_eq!((fired, seen, passes), (latest, 1_111, 2));
}

#[test]
fn a_changed_job_owes_what_is_due() {
    let every = |mins| ScheduleSpec { every: Some(Span::mins(mins)), ..ScheduleSpec::default() };
    let (old, new) = (every(5), every(60));
    let (due, now, fresh) = (at("10:00:00"), at("10:00:30"), Some(at("11:00:00")));
    let change = |new: Option<&ScheduleSpec>, old_next| {
        let before = BeforeChange { schedule: Some(&old), next_fire_ms: old_next, owes: false };
        let after = next_after_change(before, new, fresh, now);
        (after.next_fire_ms, after.owed_upto_ms)
    };
    assert_eq!(change(Some(&old), Some(due)), (Some(due), None), "the same schedule: nothing changes");
    assert_eq!(change(Some(&old), None), (fresh, None), "it could not be computed and may be now");
    assert_eq!(change(Some(&new), Some(due)), (Some(due), Some(now)), "due: the old schedule decides up to now");
    assert_eq!(change(Some(&new), Some(now + 1)), (fresh, None), "not due: from now");
    assert_eq!(change(None, Some(due)), (Some(due), Some(now)), "also where no schedule follows");
    assert_eq!(change(None, Some(now + 1)), (None, None));
    let none = BeforeChange { schedule: None, next_fire_ms: None, owes: false };
    let first = next_after_change(none, Some(&new), fresh, now);
    assert_eq!((first.next_fire_ms, first.owed_upto_ms), (fresh, None));
    let owing = BeforeChange { schedule: None, next_fire_ms: Some(due), owes: true };
    let kept = next_after_change(owing, Some(&new), fresh, now);
    assert_eq!((kept.next_fire_ms, kept.owed_upto_ms), (Some(due), None), "what was owed before stays owed");
    // What the leader makes of it: each of the old schedule's instants, then the new one's from now on.
    let compiled = new.compile().unwrap().after(vec![(old.compile().unwrap(), at("10:12:00"))]);
    let looked = due_of(&compiled, due, at("11:00:05"));
    assert_eq!(looked, ["10:00:00", "10:05:00", "10:10:00", "11:00:00"].map(at));
}

fn due_of(schedule: &Schedule, next: i64, now: i64) -> Vec<i64> {
    let due = due(schedule, &MisfirePolicy::default(), next, now).unwrap();
    due.intents.iter().map(Intent::nominal_ms).collect()
}

#[test]
fn s_10_a_changed_zone_is_evaluated_from_now() {
    let monthly = |zone: &str| ScheduleSpec {
        cron: Some("0 5 1 * *".into()),
        timezone: Some(zone.into()),
        ..ScheduleSpec::default()
    };
    let instant = |text| parse_instant(text).unwrap();
    let now = instant("2026-05-17T16:00:00Z");
    let (old, new) = (monthly("UTC"), monthly("Europe/Paris"));
    let fresh = new.compile().unwrap().next_after(now).unwrap();
    let next_fire_ms = Some(instant("2026-06-01T05:00:00Z"));
    let before = BeforeChange { schedule: Some(&old), next_fire_ms, owes: false };
    let after = next_after_change(before, Some(&new), fresh, now);
    assert_eq!(after.next_fire_ms, Some(instant("2026-06-01T03:00:00Z")));
    assert_eq!(after.owed_upto_ms, None);
}

#[test]
fn decisions_inside_the_transaction() {
    let running = ExecutionId(uuid::Uuid::from_u128(7));
    let idle = JobNow::default();
    let busy = JobNow { active: vec![running], ..JobNow::default() };
    let paused = JobNow { paused_by: Some("ops".into()), ..JobNow::default() };
    assert_eq!(decide(OverlapPolicy::Skip, &idle, true), Verdict::Fire);
    assert!(
        matches!(decide(OverlapPolicy::Skip, &busy, true), Verdict::Skip(DecisionKind::SkippedOverlap, _, Some(e)) if e == running)
    );
    assert_eq!(decide(OverlapPolicy::Allow, &busy, true), Verdict::Fire);
    assert!(matches!(decide(OverlapPolicy::Skip, &paused, true), Verdict::Skip(DecisionKind::SkippedPaused, ..)));
    assert_eq!(decide(OverlapPolicy::Skip, &paused, false), Verdict::Fire);
    let done = JobNow { existing: Some(running), ..busy };
    assert_eq!(decide(OverlapPolicy::Skip, &done, true), Verdict::Duplicate(Some(running)));
}
#[test]
fn o_07_a_queue_is_bounded_and_in_order() {
    let running = ExecutionId(uuid::Uuid::from_u128(7));
    let queue = OverlapPolicy::Queue { limit: 2 };
    let now = |active: bool, waiting, turn| JobNow {
        active: active.then_some(running).into_iter().collect(),
        waiting,
        turn,
        ..JobNow::default()
    };
    assert_eq!(decide(queue, &now(false, 0, false), true), Verdict::Fire);
    assert!(matches!(decide(queue, &now(true, 0, false), true), Verdict::Wait(_, Some(e)) if e == running));
    assert!(matches!(decide(queue, &now(true, 1, false), false), Verdict::Wait(..)));
    assert!(
        matches!(decide(queue, &now(true, 2, false), true), Verdict::Skip(DecisionKind::SkippedOverlap, why, Some(e)) if e == running && why.contains("2 of 2"))
    );
    assert!(matches!(decide(queue, &now(false, 1, false), true), Verdict::Wait(_, None)), "not before the waiting one");
    assert!(matches!(decide(queue, &now(false, 2, false), true), Verdict::Skip(DecisionKind::SkippedOverlap, ..)));
    assert_eq!(decide(queue, &now(true, 2, true), true), Verdict::NotYet);
    assert_eq!(decide(queue, &now(false, 2, true), true), Verdict::Fire);
    let paused = JobNow { paused_by: Some("ops".into()), ..now(false, 2, true) };
    assert!(matches!(decide(queue, &paused, true), Verdict::Skip(DecisionKind::SkippedPaused, ..)));
    assert_eq!(decide(queue, &paused, false), Verdict::Fire, "asked for by a person");
}

#[test]
fn o_01_what_runs_is_replaced_or_waited_for() {
    let running = ExecutionId(uuid::Uuid::from_u128(7));
    let busy = JobNow { active: vec![running], ..JobNow::default() };
    assert_eq!(decide(OverlapPolicy::CancelRunning, &busy, true), Verdict::Replace(vec![running]));
    assert_eq!(decide(OverlapPolicy::CancelRunning, &JobNow::default(), true), Verdict::Fire);
    let turn = JobNow { turn: true, ..busy };
    for policy in [OverlapPolicy::Skip, OverlapPolicy::CancelRunning, OverlapPolicy::Queue { limit: 1 }] {
        assert_eq!(decide(policy, &turn, false), Verdict::NotYet, "a backfill neither skips nor cancels");
    }
    assert_eq!(decide(OverlapPolicy::Allow, &turn, false), Verdict::Fire);
}
