//! Firings that wait, replace what runs, or are held up by a pause of more than one job.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::execution::Phase;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::{Epoch, ExecutionId, JobId};
use shardcron_store::*;

conformance!(
    o_01_a_queue_fires_in_order_and_is_bounded,
    o_01_what_waits_survives_a_change_of_the_leader,
    o_02_a_retry_in_waiting_holds_the_queue,
    o_07_cancel_running_replaces_and_fences,
    a_batch_may_replace_what_it_made_itself,
    s_18_a_pause_of_all_stops_the_schedule_and_no_person,
    a_future_trigger_is_held_and_then_decided,
    a_backfill_replaces_decisions_and_never_runs_twice,
    epochs_are_kept_with_when_they_were_seen,
    ends_are_watched_from_the_firing_on,
    circles_and_unknown_upstreams_are_refused,
);

fn with(job: JobId, key: &str, overlap: OverlapPolicy) -> (ExecutionId, FireIntent) {
    let new = new_execution(1, overlap);
    (new.id, intent(job, key, new))
}

const QUEUE: OverlapPolicy = OverlapPolicy::Queue { limit: 2 };

/// Asks as the leader does: a job that another transaction holds, and be it a given up one that is still rolled back, is asked for
/// again.
async fn fire_one(ledger: &impl Ledger, epoch: Epoch, intent: FireIntent, now_ms: i64) -> FireOutcome {
    let held_for = std::time::Instant::now();
    loop {
        match ledger.fire(epoch, std::slice::from_ref(&intent), now_ms).await.unwrap().remove(0) {
            FireOutcome::Busy if held_for.elapsed() < std::time::Duration::from_secs(10) => {}
            outcome => return outcome,
        }
    }
}

/// The waiting row's own firing, as the leader makes it.
fn turn(row: &WaitingRow, overlap: OverlapPolicy) -> (ExecutionId, FireIntent) {
    let (id, mut intent) = with(row.job, &row.fire_key, overlap);
    intent.extra = FireExtra { waiting: Some(row.at), watches: Vec::new(), request: row.request.clone() };
    intent.scheduled = row.scheduled;
    (id, intent)
}

async fn end_well(ledger: &impl Ledger, id: ExecutionId) {
    let me = worker();
    assert!(ledger.claim(me, &[attempt(id, 0, 1)], T0).await.unwrap()[0].is_ok());
    assert!(ledger.record(me, &[success(attempt(id, 0, 1))], T0 + 1).await.unwrap()[0].is_ok());
}

async fn o_01_a_queue_fires_in_order_and_is_bounded(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (first, intent) = with(job, "1", QUEUE);
    assert_eq!(fire_one(ledger, epoch, intent, T0).await, FireOutcome::Fired(first));
    for key in ["2", "3"] {
        let outcome = fire_one(ledger, epoch, with(job, key, QUEUE).1, T0 + 1).await;
        assert!(matches!(&outcome, FireOutcome::Waiting { blocking: Some(b), .. } if *b == first), "{outcome:?}");
        let again = fire_one(ledger, epoch, with(job, key, QUEUE).1, T0 + 1).await;
        assert_eq!(again, FireOutcome::Duplicate(None), "it waits already");
    }
    let full = fire_one(ledger, epoch, with(job, "4", QUEUE).1, T0 + 2).await;
    assert!(
        matches!(&full, FireOutcome::Skipped { kind: DecisionKind::SkippedOverlap, reason, .. } if reason.contains("2 of 2")),
        "{full:?}"
    );
    let heads = ledger.waiting_heads(T0 + 9, 10).await.unwrap();
    assert_eq!(heads.len(), 1, "the first only");
    assert_eq!((heads[0].fire_key.as_str(), heads[0].active), ("2", 1));
    assert_eq!(fire_one(ledger, epoch, turn(&heads[0], QUEUE).1, T0 + 3).await, FireOutcome::NotYet);
    end_well(ledger, first).await;
    // Free, and still not for a later instant: it is behind the waiting ones, which leave no room.
    let late = fire_one(ledger, epoch, with(job, "5", QUEUE).1, T0 + 4).await;
    assert!(matches!(late, FireOutcome::Skipped { .. }), "{late:?}");
    let (second, its_turn) = turn(&heads[0], QUEUE);
    assert_eq!(fire_one(ledger, epoch, its_turn.clone(), T0 + 5).await, FireOutcome::Fired(second));
    assert_eq!(fire_one(ledger, epoch, its_turn, T0 + 5).await, FireOutcome::Fired(second), "the answer was lost");
    let decision = ledger.decision(job, "2").await.unwrap().unwrap();
    assert_eq!((decision.kind, decision.execution, decision.decided_ms), (DecisionKind::Fired, Some(second), T0 + 5));
    assert!(decision.reason.unwrap().contains(&format!("execution {first}")), "it says for whom it waited");
    assert_eq!(ledger.waiting_heads(T0 + 9, 10).await.unwrap()[0].fire_key, "3");
    assert_eq!(ledger.waiting_count(job).await.unwrap(), 1);
}

async fn o_01_what_waits_survives_a_change_of_the_leader(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let old = ledger.begin_epoch("a", T0).await.unwrap();
    let (first, intent) = with(job, "1", QUEUE);
    fire_one(ledger, old, intent, T0).await;
    fire_one(ledger, old, with(job, "2", QUEUE).1, T0).await;
    end_well(ledger, first).await;
    let new = world.again().await.begin_epoch("b", T0 + 1).await.unwrap();
    let head = ledger.waiting_heads(T0 + 2, 10).await.unwrap().remove(0);
    let (id, its_turn) = turn(&head, QUEUE);
    let late = ledger.fire(old, std::slice::from_ref(&its_turn), T0 + 2).await.unwrap_err();
    assert!(matches!(late, StoreError::Deposed { .. }));
    assert_eq!(fire_one(ledger, new, its_turn.clone(), T0 + 2).await, FireOutcome::Fired(id));
    // Another leader's try at the row that is gone.
    let (_, twin) = turn(&head, QUEUE);
    assert_eq!(fire_one(ledger, new, twin, T0 + 3).await, FireOutcome::Duplicate(Some(id)));
    assert!(ledger.waiting_heads(T0 + 9, 10).await.unwrap().is_empty());
}

async fn o_02_a_retry_in_waiting_holds_the_queue(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (first, intent) = with(job, "1", QUEUE);
    fire_one(ledger, epoch, intent, T0).await;
    fire_one(ledger, epoch, with(job, "2", QUEUE).1, T0).await;
    let me = worker();
    ledger.claim(me, &[attempt(first, 0, 1)], T0).await.unwrap();
    ledger.record(me, &[failure(attempt(first, 0, 1))], T0 + 1).await.unwrap()[0].as_ref().unwrap();
    let head = ledger.waiting_heads(T0 + 2, 10).await.unwrap().remove(0);
    assert_eq!(
        fire_one(ledger, epoch, turn(&head, QUEUE).1, T0 + 2).await,
        FireOutcome::NotYet,
        "O1: it will run again"
    );
    let skip = fire_one(ledger, epoch, with(job, "3", OverlapPolicy::Skip).1, T0 + 2).await;
    assert!(matches!(skip, FireOutcome::Skipped { kind: DecisionKind::SkippedOverlap, .. }));
}

async fn o_07_cancel_running_replaces_and_fences(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (first, intent) = with(job, "1", OverlapPolicy::CancelRunning);
    fire_one(ledger, epoch, intent, T0).await;
    let me = worker();
    ledger.claim(me, &[attempt(first, 0, 1)], T0).await.unwrap();
    assert!(ledger.cancelled(&[first]).await.unwrap().is_empty());
    let (second, intent) = with(job, "2", OverlapPolicy::CancelRunning);
    assert_eq!(fire_one(ledger, epoch, intent, T0 + 5).await, FireOutcome::Fired(second));
    assert_eq!(ledger.cancelled(&[first, second]).await.unwrap(), [first]);
    let old = ledger.execution(first).await.unwrap().unwrap();
    assert_eq!((old.phase, old.cancelled, old.ended_ms), (Phase::Cancelled, 1, Some(T0 + 5)));
    assert!(ledger.record(me, &[success(attempt(first, 0, 1))], T0 + 6).await.unwrap()[0].is_err(), "fenced");
    let why = ledger.cancellation(first).await.unwrap().unwrap();
    assert!(why.reason.contains(&second.to_string()), "{why:?}");
    let decision = ledger.decision(job, "2").await.unwrap().unwrap();
    assert!(decision.reason.unwrap().contains(&first.to_string()));
    assert!(ledger.running(10).await.unwrap().is_empty());
}

async fn a_batch_may_replace_what_it_made_itself(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let all: Vec<(ExecutionId, FireIntent)> =
        ["1", "2", "3"].iter().map(|key| with(job, key, OverlapPolicy::CancelRunning)).collect();
    let intents: Vec<FireIntent> = all.iter().map(|(_, intent)| intent.clone()).collect();
    let outcomes = ledger.fire(epoch, &intents, T0).await.unwrap();
    assert!(outcomes.iter().all(|o| matches!(o, FireOutcome::Fired(_))), "{outcomes:?}");
    let mut phases = Vec::new();
    for (id, _) in &all {
        phases.push(ledger.execution(*id).await.unwrap().unwrap().phase);
    }
    assert_eq!(phases, [Phase::Cancelled, Phase::Cancelled, Phase::Running]);
}

async fn s_18_a_pause_of_all_stops_the_schedule_and_no_person(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    for (scope, words) in [("all", "ops (with all jobs)"), ("tier:core", "ops (with all of tier core)")] {
        assert!(ledger.set_scope_paused(scope, Some("ops"), "ops", T0).await.unwrap());
        assert!(!ledger.set_scope_paused(scope, Some("eve"), "eve", T0).await.unwrap(), "it is paused already");
        let outcome = fire_one(ledger, epoch, with(job, scope, OverlapPolicy::Allow).1, T0).await;
        assert!(
            matches!(&outcome, FireOutcome::Skipped { kind: DecisionKind::SkippedPaused, reason, .. } if reason.contains(words)),
            "{outcome:?}"
        );
        let (id, mut by_hand) = with(job, &format!("request:{scope}"), OverlapPolicy::Allow);
        by_hand.scheduled = false;
        assert_eq!(fire_one(ledger, epoch, by_hand, T0).await, FireOutcome::Fired(id));
        assert_eq!(ledger.pauses().await.unwrap().len(), 1);
        assert!(ledger.set_scope_paused(scope, None, "ops", T0).await.unwrap());
        assert!(!ledger.set_scope_paused(scope, None, "ops", T0).await.unwrap());
    }
    assert!(ledger.set_scope_paused("tier:bulk", Some("ops"), "ops", T0).await.unwrap());
    let (id, free) = with(job, "free", OverlapPolicy::Allow);
    assert_eq!(fire_one(ledger, epoch, free, T0).await, FireOutcome::Fired(id), "another tier's pause");
}

async fn a_future_trigger_is_held_and_then_decided(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (_, mut asked) = with(job, "request:later", OverlapPolicy::Skip);
    asked.scheduled = false;
    asked.action = FireAction::Hold { until_ms: T0 + 1_000, reason: "it waits for its instant".into() };
    asked.extra.request.params.insert("day".into(), 7.into());
    assert!(matches!(fire_one(ledger, epoch, asked.clone(), T0).await, FireOutcome::Waiting { blocking: None, .. }));
    assert_eq!(fire_one(ledger, epoch, asked, T0).await, FireOutcome::Duplicate(None), "sent twice");
    assert!(ledger.waiting_heads(T0 + 999, 10).await.unwrap().is_empty());
    let head = ledger.waiting_heads(T0 + 1_000, 10).await.unwrap().remove(0);
    assert_eq!((head.at.kind, head.request.params["day"].as_i64()), (WaitingKind::Future, Some(7)));
    // Its time has come: from here on the policy decides, as about any other.
    let (running, other) = with(job, "k", OverlapPolicy::Allow);
    fire_one(ledger, epoch, other, T0).await;
    let queued = fire_one(ledger, epoch, turn(&head, QUEUE).1, T0 + 1_000).await;
    assert!(matches!(queued, FireOutcome::Waiting { blocking: Some(b), .. } if b == running), "{queued:?}");
    let head = ledger.waiting_heads(T0 + 1_001, 10).await.unwrap().remove(0);
    assert_eq!((head.at.kind, head.request.params["day"].as_i64()), (WaitingKind::Queued, Some(7)));
    end_well(ledger, running).await;
    let (id, its_turn) = turn(&head, QUEUE);
    assert_eq!(fire_one(ledger, epoch, its_turn, T0 + 1_002).await, FireOutcome::Fired(id));
}

async fn a_backfill_replaces_decisions_and_never_runs_twice(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    let (_, mut missed) = with(job, "1", OverlapPolicy::Skip);
    missed.action = FireAction::Record { kind: DecisionKind::Coalesced, reason: "missed by 99 s".into() };
    fire_one(ledger, epoch, missed, T0).await;
    let (ran, intent) = with(job, "2", OverlapPolicy::Skip);
    fire_one(ledger, epoch, intent, T0).await;
    end_well(ledger, ran).await;
    let new = NewBackfill {
        job,
        request_id: "fill".into(),
        from_ms: T0,
        to_ms: T0 + 9,
        forced: false,
        who: "ops".into(),
        already: 0,
        instants: vec![("1".into(), T0), ("2".into(), T0 + 1), ("3".into(), T0 + 2)],
        request: FiringRequest { note: Some("backfill by ops".into()), ..FiringRequest::default() },
    };
    assert!(ledger.begin_backfill(epoch, &new, T0).await.unwrap());
    assert!(!ledger.begin_backfill(epoch, &new, T0).await.unwrap(), "the message came twice");
    assert_eq!(ledger.backfill(job, "fill").await.unwrap().unwrap().left, 3);
    let mut fired = Vec::new();
    loop {
        let Some(head) = ledger.waiting_heads(T0 + 9, 10).await.unwrap().pop() else { break };
        assert_eq!(head.at.kind, WaitingKind::Backfill);
        let (id, its_turn) = turn(&head, OverlapPolicy::Skip);
        match fire_one(ledger, epoch, its_turn, T0 + 9).await {
            FireOutcome::Fired(_) => {
                fired.push(head.fire_key.clone());
                let next = ledger.waiting_heads(T0 + 9, 10).await.unwrap().pop();
                if let Some(next) = next {
                    let waits = fire_one(ledger, epoch, turn(&next, OverlapPolicy::Skip).1, T0 + 9).await;
                    assert!(matches!(waits, FireOutcome::NotYet | FireOutcome::Duplicate(_)), "{waits:?}");
                }
                end_well(ledger, id).await;
            }
            FireOutcome::Duplicate(of) => assert_eq!((head.fire_key.as_str(), of), ("2", Some(ran))),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fired, ["1", "3"], "what ran is not run again");
    let row = ledger.backfill(job, "fill").await.unwrap().unwrap();
    assert_eq!((row.instants, row.left, row.who.as_str()), (3, 0, "ops"));
    let decision = ledger.decision(job, "1").await.unwrap().unwrap();
    let reason = decision.reason.unwrap();
    assert!(reason.contains("backfill by ops") && reason.contains("coalesced: missed by 99 s"), "{reason}");
    assert_eq!(decision.kind, DecisionKind::Fired);
}

async fn epochs_are_kept_with_when_they_were_seen(world: World) {
    let ledger = &world.ledger;
    let first = ledger.begin_epoch("a/1", T0).await.unwrap();
    ledger.touch_epoch(first, T0 + 500).await.unwrap();
    ledger.touch_epoch(first, T0 + 100).await.unwrap();
    let second = ledger.begin_epoch("b/1", T0 + 5_000).await.unwrap();
    let rows = ledger.epochs(None, 10).await.unwrap();
    assert_eq!(rows.iter().map(|r| r.epoch).collect::<Vec<_>>(), [second, first]);
    assert_eq!((rows[1].holder.as_str(), rows[1].from_ms, rows[1].seen_ms), ("a/1", T0, T0 + 500));
    assert_eq!(ledger.epochs(Some(first), 10).await.unwrap(), rows[1..]);
}

async fn ends_are_watched_from_the_firing_on(world: World) {
    let ledger = &world.ledger;
    let up = apply(ledger, "up").await;
    let down = apply(ledger, "down").await;
    let epoch = ledger.begin_epoch("a", T0).await.unwrap();
    fire_one(ledger, epoch, with(up, "0", OverlapPolicy::Allow).1, T0).await;
    let mut spec = spec("down");
    spec.after = Some(shardcron_domain::after::AfterSpec::of(&["up"]));
    ledger.apply_jobs(&[(spec, None)], "test", T0).await.unwrap();
    let (first, intent) = with(up, "1", OverlapPolicy::Allow);
    fire_one(ledger, epoch, intent, T0).await;
    let (second, intent) = with(up, "2", OverlapPolicy::Allow);
    fire_one(ledger, epoch, intent, T0).await;
    assert!(ledger.watches(10).await.unwrap().is_empty(), "nothing has ended");
    end_well(ledger, second).await;
    let rows = ledger.watches(10).await.unwrap();
    let seen: Vec<_> = rows.iter().map(|r| (r.execution, r.phase, r.upstream.as_str(), r.job_name.as_str())).collect();
    assert_eq!(
        seen,
        [(first, Phase::Running, "up", "down"), (second, Phase::Success, "up", "down")],
        "since it follows"
    );
    let summary = ledger.result_summary(second, 100).await.unwrap().unwrap();
    assert_eq!((summary.shards, summary.failed, summary.rows), (1, 0, Some(10)));
    let (_, mut follow) = with(down, &format!("after:{second}"), OverlapPolicy::Allow);
    follow.version = 2;
    follow.extra.watches = vec![rows[1].id];
    assert!(matches!(fire_one(ledger, epoch, follow.clone(), T0).await, FireOutcome::Fired(_)));
    assert!(matches!(
        fire_one(
            ledger,
            epoch,
            FireIntent { action: FireAction::Fire(new_execution(1, OverlapPolicy::Allow)), ..follow },
            T0
        )
        .await,
        FireOutcome::Duplicate(Some(_))
    ));
    assert!(ledger.watches(10).await.unwrap().is_empty(), "the other one still runs");
    end_well(ledger, first).await;
    let left = ledger.watches(10).await.unwrap();
    assert_eq!(left.iter().map(|r| r.execution).collect::<Vec<_>>(), [first]);
    assert!(ledger.drop_watches(Epoch(epoch.0 - 1), &[left[0].id]).await.is_err(), "fenced");
    ledger.drop_watches(epoch, &[left[0].id]).await.unwrap();
    assert!(ledger.watches(10).await.unwrap().is_empty());
}

fn follower(name: &str, of: &[&str]) -> (shardcron_domain::JobSpec, Option<i64>) {
    (shardcron_domain::JobSpec { after: Some(shardcron_domain::after::AfterSpec::of(of)), ..spec(name) }, None)
}

async fn circles_and_unknown_upstreams_are_refused(world: World) {
    let ledger = &world.ledger;
    apply(ledger, "load-flights").await;
    let refused = |e: StoreError| e.to_string();
    let unknown = ledger.apply_jobs(&[follower("b", &["load-flight"])], "test", T0).await.unwrap_err();
    assert!(refused(unknown).contains("did you mean 'load-flights'"));
    assert!(ledger.job("b").await.unwrap().is_none(), "nothing of it is written");
    let same_file = [follower("b", &["load-flights", "a"]), (spec("a"), None)];
    ledger.apply_jobs(&same_file, "test", T0).await.unwrap();
    let circle = ledger.apply_jobs(&[follower("a", &["b"])], "test", T0).await.unwrap_err();
    assert!(refused(circle).contains("a → b → a"));
    assert_eq!(ledger.job("a").await.unwrap().unwrap().version, 1);
    // Without its arrow the other way round is none.
    ledger.apply_jobs(&[(spec("b"), None)], "test", T0).await.unwrap();
    ledger.apply_jobs(&[follower("a", &["b"])], "test", T0).await.unwrap();
}
