//! Jobs: versions, deletion, sources, concurrent changes, and what a replaced schedule still owes. Against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::JobSpec;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::units::Span;
use shardcron_store::*;

conformance!(
    f2_a_replaced_schedule_owes_what_is_due,
    a_change_is_refused_if_somebody_was_faster,
    a_deleted_job_leaves_its_history_and_its_name,
    a_source_knows_its_jobs,
    versions_are_kept_with_their_authors,
    s_16_a_delayed_job_is_armed_once_it_is_idle,
);

fn every(name: &str, mins: u64) -> JobSpec {
    let every = ScheduleSpec { every: Some(Span::mins(mins)), ..ScheduleSpec::default() };
    JobSpec { schedule: Some(every), ..spec(name) }
}

fn change(spec: JobSpec, expected: Option<Expected>) -> JobChanges {
    let apply = vec![JobChange { spec, next_fire_ms: Some(T0 + 9), expected }];
    JobChanges { apply, ..JobChanges::default() }
}

async fn f2_a_replaced_schedule_owes_what_is_due(world: World) {
    let ledger = &world.ledger;
    let change = async |spec: JobSpec, fresh, now| {
        ledger.apply_jobs(&[(spec, fresh)], "ci", now).await.unwrap();
        let job = ledger.job("job").await.unwrap().unwrap();
        let all = ledger.jobs().await.unwrap();
        assert_eq!(all[0].owed, job.owed, "one job and all jobs say the same");
        let owed: Vec<(u64, i64)> =
            job.owed.iter().map(|(schedule, upto)| (schedule.every.unwrap().0 / 60_000, upto - T0)).collect();
        (job.next_fire_ms.map(|next| next - T0), owed)
    };
    assert_eq!(change(every("job", 5), Some(T0), T0 - 1).await, (Some(0), vec![]));
    let other_tier = JobSpec { tier: "bulk".into(), ..every("job", 5) };
    assert_eq!(change(other_tier, Some(T0 + 300_000), T0 + 10).await, (Some(0), vec![]), "due, and the same schedule");
    assert_eq!(change(every("job", 60), Some(T0 + 3_600_000), T0 + 20).await, (Some(0), vec![(5, 20)]));
    assert_eq!(
        change(every("job", 7), Some(T0 + 1), T0 + 20).await,
        (Some(0), vec![(5, 20)]),
        "in the same millisecond"
    );
    assert_eq!(change(spec("job"), None, T0 + 30).await, (Some(0), vec![(5, 20), (7, 30)]), "no schedule any more");
    assert_eq!(change(every("job", 9), Some(T0 + 99), T0 + 40).await, (Some(0), vec![(5, 20), (7, 30)]));
    // The leader decides and moves on: nothing is owed any more.
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let job = ledger.job("job").await.unwrap().unwrap();
    let mut due = intent(job.id, "k", new_execution(1, OverlapPolicy::Allow));
    (due.version, due.next_fire_ms) = (job.version, Some(Some(T0 + 540_000)));
    assert!(matches!(ledger.fire(epoch, &[due], T0 + 50).await.unwrap()[0], FireOutcome::Fired(_)));
    assert_eq!(ledger.job("job").await.unwrap().unwrap().owed, []);
    assert_eq!(
        change(every("job", 8), Some(T0 + 480_000), T0 + 60).await,
        (Some(480_000), vec![]),
        "not due: from now"
    );
    ledger.execute_script("UPDATE jobs SET spec = '{}', next_fire_ms = 1").await.unwrap();
    assert_eq!(change(every("job", 9), Some(T0 + 540_000), T0 + 70).await, (Some(540_000), vec![]), "unreadable");
    // While nobody decides, the list is bounded.
    ledger.execute_script(&format!("UPDATE jobs SET next_fire_ms = {T0}")).await.unwrap();
    let mut refused = None;
    for n in 0..60 {
        let result = ledger.apply_jobs(&[(every("job", 10 + n), Some(T0 + 1))], "ci", T0 + 100 + n as i64).await;
        refused = result.err();
        if refused.is_some() {
            break;
        }
    }
    let Some(StoreError::Conflict(words)) = refused else { panic!("{refused:?}") };
    assert!(words.contains("'job' was changed 50 times") && words.contains("start a scheduler"), "{words}");
}

async fn a_change_is_refused_if_somebody_was_faster(world: World) {
    let ledger = &world.ledger;
    let apply = async |spec: JobSpec, expected| ledger.change_jobs(&change(spec, expected), "anna", T0).await;
    let words = |result: Result<Changed>| match result {
        Err(StoreError::Conflict(words)) => words,
        other => panic!("{other:?}"),
    };
    let gone = words(apply(every("job", 5), Some(Expected::Version(3))).await);
    assert!(gone.contains("'job' is gone"), "{gone}");
    assert!(ledger.job("job").await.unwrap().is_none());
    apply(every("job", 5), Some(Expected::Absent)).await.unwrap();
    let there = words(apply(every("job", 6), Some(Expected::Absent)).await);
    assert!(there.contains("is at version 1, changed by anna at 2026-03-01T00:00:00Z"), "{there}");
    apply(every("job", 6), Some(Expected::Version(1))).await.unwrap();
    words(apply(every("job", 7), Some(Expected::Version(1))).await);
    let same = apply(every("job", 6), Some(Expected::Version(1))).await.unwrap();
    assert_eq!(same.applied[0].outcome, ApplyOutcome::Unchanged, "both wanted the same");
    // Nothing of a refused call is kept, the jobs without a conflict included.
    let mut both = change(every("other", 5), None);
    both.apply.extend(change(every("job", 7), Some(Expected::Version(1))).apply);
    words(ledger.change_jobs(&both, "bert", T0).await);
    assert!(ledger.job("other").await.unwrap().is_none());
    let stale = JobChanges { delete: vec![("job".into(), 1)], ..JobChanges::default() };
    words(ledger.change_jobs(&stale, "bert", T0).await);
    assert_eq!(ledger.job("job").await.unwrap().unwrap().version, 2);
}

async fn a_deleted_job_leaves_its_history_and_its_name(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, execution) = fired(ledger, 4).await;
    let revision = ledger.jobs_revision().await.unwrap();
    let delete = JobChanges { delete: vec![("job".into(), 1), ("none".into(), 1)], ..JobChanges::default() };
    let changed = ledger.change_jobs(&delete, "anna", T0 + 5).await.unwrap();
    assert_eq!(changed.deleted, ["job"]);
    assert_ne!(ledger.jobs_revision().await.unwrap(), revision, "the leader sees it");
    assert!(ledger.job("job").await.unwrap().is_none() && ledger.jobs().await.unwrap().is_empty());
    assert!(!ledger.set_paused("job", Some("ops"), "ops", T0).await.unwrap());
    assert_eq!(ledger.change_jobs(&delete, "anna", T0 + 6).await.unwrap().deleted, Vec::<String>::new(), "once");
    // What runs goes on, and the history still names it.
    let me = worker();
    assert!(ledger.claim(me, &[attempt(execution, 0, 1)], T0).await.unwrap()[0].is_ok());
    assert!(ledger.record(me, &[success(attempt(execution, 0, 1))], T0).await.unwrap()[0].is_ok());
    assert_eq!(ledger.executions(Some("job"), None, 9).await.unwrap()[0].job, "job");
    let late = intent(job, "late", new_execution(1, OverlapPolicy::Allow));
    assert_eq!(
        ledger.fire(epoch, &[late], T0).await.unwrap(),
        [FireOutcome::Stale],
        "a leader that has not looked again"
    );
    // The name comes back as the same job, one version on, and is not paused.
    ledger.change_jobs(&change(spec("job"), Some(Expected::Absent)), "bert", T0 + 7).await.unwrap();
    let again = ledger.job("job").await.unwrap().unwrap();
    assert_eq!((again.id, again.version, again.next_fire_ms, again.paused_by), (job, 2, Some(T0 + 9), None));
}

async fn a_source_knows_its_jobs(world: World) {
    let ledger = &world.ledger;
    let apply = async |names: &[&str], source: Option<&str>| {
        let apply =
            names.iter().map(|name| JobChange { spec: spec(name), next_fire_ms: None, expected: None }).collect();
        let changes = JobChanges { apply, source: source.map(str::to_owned), ..JobChanges::default() };
        ledger.change_jobs(&changes, "ci", T0).await.unwrap()
    };
    let of = async |source| {
        let jobs = ledger.jobs_of_source(source).await.unwrap();
        jobs.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    apply(&["b", "a"], Some("/x")).await;
    apply(&["c"], Some("/y")).await;
    apply(&["d"], None).await;
    assert_eq!(
        (of("/x").await, of("/y").await, of("/z").await),
        (vec!["a".into(), "b".into()], vec!["c".into()], vec![])
    );
    let revision = ledger.jobs_revision().await.unwrap();
    apply(&["b"], Some("/y")).await;
    assert_eq!(
        (of("/x").await, of("/y").await),
        (vec!["a".into()], vec!["b".into(), "c".into()]),
        "the last one has it"
    );
    assert_eq!(ledger.jobs_revision().await.unwrap(), revision, "and the job is not changed by that");
    apply(&["b"], None).await;
    assert_eq!(of("/y").await, ["b", "c"]);
}

async fn versions_are_kept_with_their_authors(world: World) {
    let ledger = &world.ledger;
    for n in 1..=3 {
        let who = format!("author-{n}");
        ledger.change_jobs(&change(every("job", n), None), &who, T0 + n as i64).await.unwrap();
    }
    let all = ledger.job_versions("job", 2).await.unwrap();
    let seen: Vec<_> = all.iter().map(|v| (v.version, v.created_ms - T0, v.who.as_deref().unwrap_or(""))).collect();
    assert_eq!(seen, [(3, 3, "author-3"), (2, 2, "author-2")]);
    let first = ledger.job_version("job", 1).await.unwrap().unwrap();
    assert_eq!(first.spec.unwrap().schedule, every("job", 1).schedule);
    assert!(ledger.job_version("job", 4).await.unwrap().is_none());
    assert!(ledger.job_versions("none", 9).await.unwrap().is_empty());
}

async fn s_16_a_delayed_job_is_armed_once_it_is_idle(world: World) {
    let ledger = &world.ledger;
    ledger.apply_jobs(&[(spec("job"), None)], "test", T0).await.unwrap();
    let job = ledger.job("job").await.unwrap().unwrap().id;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let arming = |version, next_fire_ms| Arming { job, version, next_fire_ms };
    assert_eq!(ledger.idle_since(&[job]).await.unwrap(), [(job, None)], "it never ran");
    assert_eq!(ledger.arm(epoch, &[arming(2, T0)]).await.unwrap(), [], "another version's delay");
    assert_eq!(ledger.arm(epoch, &[arming(1, T0)]).await.unwrap(), [arming(1, T0)]);
    assert_eq!(ledger.idle_since(&[job]).await.unwrap(), [], "it has its instant");
    assert_eq!(ledger.arm(epoch, &[arming(1, T0 + 1)]).await.unwrap(), [], "and keeps it");
    let new = new_execution(1, OverlapPolicy::Skip);
    let id = new.id;
    let due = FireIntent { next_fire_ms: Some(None), ..intent(job, "1", new) };
    assert_eq!(ledger.fire(epoch, &[due], T0).await.unwrap(), [FireOutcome::Fired(id)]);
    assert_eq!(ledger.idle_since(&[job]).await.unwrap(), [], "it runs");
    let me = worker();
    ledger.claim(me, &[attempt(id, 0, 1)], T0).await.unwrap();
    ledger.record(me, &[success(attempt(id, 0, 1))], T0 + 70).await.unwrap();
    let ended = ledger.execution(id).await.unwrap().unwrap().ended_ms;
    assert_eq!(ledger.idle_since(&[job]).await.unwrap(), [(job, ended)], "since its end");
    // An instant that was decided against counts from its decision.
    let skip =
        FireAction::Record { kind: shardcron_domain::firing::DecisionKind::SkippedMisfire, reason: "late".into() };
    let (_, mut skipped) = (0, intent(job, "2", new_execution(1, OverlapPolicy::Skip)));
    (skipped.action, skipped.nominal_ms, skipped.next_fire_ms) = (skip, T0 + 100, Some(None));
    ledger.fire(epoch, &[skipped], T0 + 500).await.unwrap();
    assert_eq!(ledger.idle_since(&[job]).await.unwrap(), [(job, Some(T0 + 500))]);
    let other = world.again().await.begin_epoch("b", T0).await.unwrap();
    assert!(matches!(ledger.arm(epoch, &[arming(1, T0)]).await, Err(StoreError::Deposed { .. })));
    assert_eq!(ledger.arm(other, &[arming(1, T0)]).await.unwrap().len(), 1);
}
