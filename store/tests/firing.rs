//! Jobs and firings: every case runs against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::limits::FIRE_KEY_BYTES;
use shardcron_domain::{Epoch, ExecutionId, JobId};
use shardcron_store::*;

conformance!(
    g_06_f1_a_fire_key_makes_one_execution,
    two_intents_of_one_job_in_one_batch,
    o_05_overlap_skip_names_the_execution_in_the_way,
    s_18_a_pause_survives_the_schedulers_write,
    l1_a_deposed_leader_writes_nothing,
    a_01_applying_the_same_jobs_changes_nothing,
    a_changed_job_makes_its_intents_stale,
    m_06_one_unreadable_job_does_not_hide_the_others,
    i_02_i_03_fire_keys_are_compared_whole_and_never_cut,
    i_07_keys_are_compared_and_parameters_are_not,
    decisions_without_an_execution_are_recorded_once,
    a_midnight_of_many_jobs,
);

async fn fire_one(ledger: &impl Ledger, epoch: Epoch, intent: FireIntent) -> FireOutcome {
    ledger.fire(epoch, &[intent], T0).await.unwrap().remove(0)
}

fn skip_intent(job: JobId, key: &str) -> (ExecutionId, FireIntent) {
    let new = new_execution(1, OverlapPolicy::Skip);
    (new.id, intent(job, key, new))
}

async fn g_06_f1_a_fire_key_makes_one_execution(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (id, first) = skip_intent(job, "k1");
    assert_eq!(fire_one(ledger, epoch, first.clone()).await, FireOutcome::Fired(id));
    assert_eq!(fire_one(ledger, epoch, first).await, FireOutcome::Fired(id), "the answer to the first call was lost");
    let (_, mut second) = skip_intent(job, "k1");
    second.next_fire_ms = Some(Some(T0 + 60_000));
    assert_eq!(fire_one(ledger, epoch, second).await, FireOutcome::Duplicate(Some(id)));
    assert_eq!(ledger.job("job").await.unwrap().unwrap().next_fire_ms, Some(T0 + 60_000), "the instant moves on");
    assert_eq!(ledger.executions(None, None, 9).await.unwrap().len(), 1);
    let decision = ledger.decision(job, "k1").await.unwrap().unwrap();
    assert_eq!((decision.kind, decision.execution, decision.epoch), (DecisionKind::Fired, Some(id), epoch));
}

async fn two_intents_of_one_job_in_one_batch(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let ((id, a), (_, b), (_, c)) = (skip_intent(job, "a"), skip_intent(job, "b"), skip_intent(job, "a"));
    let outcomes = ledger.fire(epoch, &[a, b, c], T0).await.unwrap();
    assert_eq!(outcomes[0], FireOutcome::Fired(id));
    assert!(
        matches!(&outcomes[1], FireOutcome::Skipped { kind: DecisionKind::SkippedOverlap, blocking: Some(b), .. } if *b == id)
    );
    assert_eq!(outcomes[2], FireOutcome::Duplicate(Some(id)));
}

async fn o_05_overlap_skip_names_the_execution_in_the_way(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (id, first) = skip_intent(job, "1");
    fire_one(ledger, epoch, first).await;
    for key in ["request:a", "request:b", "message"] {
        let (_, mut other) = skip_intent(job, key);
        other.scheduled = false;
        let outcome = fire_one(ledger, epoch, other).await;
        assert!(
            matches!(&outcome, FireOutcome::Skipped { blocking: Some(b), reason, .. } if *b == id && reason.contains(&id.to_string())),
            "{outcome:?}"
        );
    }
    let me = worker();
    ledger.claim(me, &[attempt(id, 0, 1)], T0).await.unwrap();
    ledger.record(me, &[success(attempt(id, 0, 1))], T0).await.unwrap();
    let (next, free) = skip_intent(job, "2");
    assert_eq!(fire_one(ledger, epoch, free).await, FireOutcome::Fired(next));
}

async fn s_18_a_pause_survives_the_schedulers_write(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let before = ledger.jobs_revision().await.unwrap();
    // The leader has read the job; now an operator pauses it; now the leader writes.
    let (_, mut due) = skip_intent(job, "1");
    due.next_fire_ms = Some(Some(T0 + 1));
    assert!(ledger.set_paused("job", Some("ops"), "ops", T0).await.unwrap());
    let outcome = fire_one(ledger, epoch, due).await;
    assert!(matches!(outcome, FireOutcome::Skipped { kind: DecisionKind::SkippedPaused, .. }), "{outcome:?}");
    let stored = ledger.job("job").await.unwrap().unwrap();
    assert_eq!((stored.paused_by.as_deref(), stored.next_fire_ms), (Some("ops"), Some(T0 + 1)));
    let (id, mut by_hand) = skip_intent(job, "request:1");
    by_hand.scheduled = false;
    assert_eq!(fire_one(ledger, epoch, by_hand).await, FireOutcome::Fired(id), "a pause does not stop a person");
    assert!(ledger.set_paused("job", None, "ops", T0).await.unwrap());
    assert!(ledger.jobs_revision().await.unwrap() >= before + 2);
    assert!(!ledger.set_paused("no-job", None, "ops", T0).await.unwrap());
}

async fn l1_a_deposed_leader_writes_nothing(world: World) {
    let ledger = &world.ledger;
    let (old, job, id) = fired(ledger, 4).await;
    let other = world.again().await;
    let new = other.begin_epoch("b", T0).await.unwrap();
    assert!(new > old);
    let deposed = |e: StoreError| matches!(e, StoreError::Deposed { mine, current } if mine == old && current == new);
    assert!(deposed(ledger.fire(old, &[skip_intent(job, "late").1], T0).await.unwrap_err()));
    assert!(deposed(ledger.materialize(old, id, 4).await.unwrap_err()));
    assert!(deposed(ledger.mark_dispatched(old, &[(id, 4)], &[]).await.unwrap_err()));
    assert!(deposed(ledger.reclaim(old, &[], T0).await.unwrap_err()));
    assert_eq!(ledger.decision(job, "late").await.unwrap().map(|d| d.kind), None);
    let leads = ledger.leadership().await.unwrap();
    assert_eq!((leads.epoch, leads.holder.as_str(), leads.since_ms), (new, "b", T0));
}

async fn a_01_applying_the_same_jobs_changes_nothing(world: World) {
    let ledger = &world.ledger;
    let apply = async |specs: &[JobSpec], next| {
        let batch: Vec<_> = specs.iter().map(|s| (s.clone(), Some(next))).collect();
        ledger.apply_jobs(&batch, "ci", T0).await.unwrap()
    };
    let mut specs = vec![scheduled("a", 5), scheduled("b", 5)];
    assert!(apply(&specs, T0).await.iter().all(|a| a.outcome == ApplyOutcome::Created && a.version == 1));
    let revision = ledger.jobs_revision().await.unwrap();
    for n in 1..10 {
        assert!(apply(&specs, T0 + n).await.iter().all(|a| a.outcome == ApplyOutcome::Unchanged));
    }
    assert_eq!(ledger.jobs_revision().await.unwrap(), revision);
    specs[1].tier = "bulk".into();
    let applied = apply(&specs, T0 + 99).await;
    assert_eq!((applied[0].outcome, applied[1].outcome), (ApplyOutcome::Unchanged, ApplyOutcome::Updated));
    assert_eq!(applied[1].version, 2);
    let jobs = ledger.jobs().await.unwrap();
    assert_eq!(
        jobs.iter().map(|j| (j.version, j.next_fire_ms)).collect::<Vec<_>>(),
        [(1, Some(T0)), (2, Some(T0))],
        "the schedule is the same, and so is what was due"
    );
    assert_ne!(ledger.jobs_revision().await.unwrap(), revision);
    let twice = [(spec("a"), None), (spec("a"), None)];
    assert!(matches!(ledger.apply_jobs(&twice, "ci", T0).await, Err(StoreError::Invalid(_))));
}

use shardcron_domain::JobSpec;
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::units::Span;

fn scheduled(name: &str, mins: u64) -> JobSpec {
    let every = ScheduleSpec { every: Some(Span::mins(mins)), ..ScheduleSpec::default() };
    JobSpec { schedule: Some(every), ..spec(name) }
}

async fn a_changed_job_makes_its_intents_stale(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    ledger.apply_jobs(&[(scheduled("job", 5), Some(T0 + 5))], "ci", T0).await.unwrap();
    let (_, mut old) = skip_intent(job, "1");
    old.next_fire_ms = Some(Some(T0 + 77));
    assert_eq!(fire_one(ledger, epoch, old).await, FireOutcome::Stale);
    assert_eq!(fire_one(ledger, epoch, skip_intent(JobId(999_999), "1").1).await, FireOutcome::Stale);
    assert_eq!(ledger.job("job").await.unwrap().unwrap().next_fire_ms, Some(T0 + 5));
    assert!(ledger.decision(job, "1").await.unwrap().is_none());
}

async fn m_06_one_unreadable_job_does_not_hide_the_others(world: World) {
    let ledger = &world.ledger;
    let batch: Vec<_> = (0..20).map(|n| (spec(&format!("job-{n:02}")), Some(T0))).collect();
    ledger.apply_jobs(&batch, "test", T0).await.unwrap();
    ledger.execute_script("UPDATE jobs SET spec = '{\"schedule\":\"garbage' WHERE name = 'job-07'").await.unwrap();
    let jobs = ledger.jobs().await.unwrap();
    assert_eq!(jobs.len(), 20);
    let bad: Vec<_> = jobs.iter().filter(|j| j.spec.is_err()).map(|j| j.name.as_str()).collect();
    assert_eq!(bad, ["job-07"]);
}

async fn i_02_i_03_fire_keys_are_compared_whole_and_never_cut(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let mut ids = Vec::new();
    // Two that differ in their last letter only, at the longest that there is: neither is cut to the other.
    let long = |end: char| "x".repeat(FIRE_KEY_BYTES - 1) + &end.to_string();
    let (one, other) = (long('a'), long('b'));
    for key in ["k1", "k1 ", "k1\t", "K1", "k1é", "k1e\u{301}", &one, &other] {
        let new = new_execution(1, OverlapPolicy::Allow);
        ids.push((key, new.id));
        assert_eq!(fire_one(ledger, epoch, intent(job, key, new.clone())).await, FireOutcome::Fired(new.id), "{key:?}");
    }
    for (key, id) in ids {
        assert_eq!(ledger.decision(job, key).await.unwrap().unwrap().execution, Some(id), "{key:?}");
    }
    for bad in ["k1\0".to_owned(), "x".repeat(FIRE_KEY_BYTES + 1), "x".repeat(300), "x".repeat(4_000)] {
        let refused = ledger.fire(epoch, &[skip_intent(job, &bad).1], T0).await;
        assert!(matches!(refused, Err(StoreError::Invalid(_))), "i_03: refused and not cut: {refused:?}");
    }
}

async fn i_07_keys_are_compared_and_parameters_are_not(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    for (key, value) in
        [("1", serde_json::json!(11497)), ("2", serde_json::json!("11497")), ("3", serde_json::json!(11497))]
    {
        let mut new = new_execution(1, OverlapPolicy::Allow);
        new.params.insert("id".into(), value.clone());
        let id = new.id;
        assert_eq!(fire_one(ledger, epoch, intent(job, key, new)).await, FireOutcome::Fired(id));
        assert_eq!(ledger.execution_head(id).await.unwrap().unwrap().params["id"], value);
    }
}

async fn decisions_without_an_execution_are_recorded_once(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let record = |key: &str, nominal_ms, kind| FireIntent {
        action: FireAction::Record { kind, reason: "it's late".into() },
        nominal_ms,
        ..skip_intent(job, key).1
    };
    let batch = [
        record("1", T0, DecisionKind::Coalesced),
        record("2", T0 + 1, DecisionKind::SkippedMisfire),
        record("1", T0, DecisionKind::SkippedMisfire),
    ];
    let outcomes = ledger.fire(epoch, &batch, T0 + 9).await.unwrap();
    assert!(matches!(outcomes[0], FireOutcome::Skipped { kind: DecisionKind::Coalesced, blocking: None, .. }));
    assert_eq!(outcomes[2], FireOutcome::Duplicate(None));
    assert!(ledger.fire(epoch, &batch, T0 + 9).await.unwrap().iter().all(|o| *o == FireOutcome::Duplicate(None)));
    let decisions = ledger.decisions(job, T0, T0 + 1, 9).await.unwrap();
    assert_eq!(
        decisions.iter().map(|d| d.kind).collect::<Vec<_>>(),
        [DecisionKind::Coalesced, DecisionKind::SkippedMisfire]
    );
    assert_eq!((decisions[0].reason.as_deref(), decisions[0].decided_ms), (Some("it's late"), T0 + 9));
    assert_eq!(ledger.decisions(job, T0 + 1, T0 + 9, 9).await.unwrap().len(), 1);
}

async fn a_midnight_of_many_jobs(world: World) {
    let ledger = &world.ledger;
    let batch: Vec<_> = (0..1_000).map(|n| (spec(&format!("job-{n:04}")), Some(T0))).collect();
    ledger.apply_jobs(&batch, "test", T0).await.unwrap();
    let jobs = ledger.jobs().await.unwrap();
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let began = std::time::Instant::now();
    for chunk in jobs.chunks(shardcron_domain::limits::FIRINGS_PER_WRITE) {
        let intents: Vec<_> = chunk
            .iter()
            .map(|job| FireIntent {
                next_fire_ms: Some(Some(T0 + 86_400_000)),
                extra: Default::default(),
                ..intent(job.id, "midnight", new_execution(4, OverlapPolicy::Skip))
            })
            .collect();
        let outcomes = ledger.fire(epoch, &intents, T0).await.unwrap();
        assert!(outcomes.iter().all(|o| matches!(o, FireOutcome::Fired(_))));
    }
    println!("{}: 1,000 jobs fired in {:?}", ledger.dialect_name(), began.elapsed());
    assert_eq!(ledger.active_executions().await.unwrap().len(), 1_000);
    assert!(ledger.jobs().await.unwrap().iter().all(|j| j.next_fire_ms == Some(T0 + 86_400_000)));
    let too_many: Vec<_> = (0..=250).map(|n| skip_intent(jobs[0].id, &n.to_string()).1).collect();
    assert!(matches!(ledger.fire(epoch, &too_many, T0).await, Err(StoreError::Invalid(_))));
}
