//! The conformance suite of the ledger: every case runs against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, FailureClass, Phase, ReclaimReason, Rejection, TakeOverReason};
use shardcron_domain::{execution, invariants};
use shardcron_store::ledger::PollCursor;
use shardcron_store::*;

conformance!(
    a_shard_goes_its_way,
    r_07_results_out_of_order_end_in_success,
    r_08_the_old_owner_of_a_reclaimed_shard_is_refused,
    take_overs_fence_the_owner_and_follow_the_message,
    claims_twice_in_a_batch_and_again_after_a_lost_answer,
    a_batch_mixes_accepted_and_refused,
    used_up_tries_end_as_a_dead_letter,
    a_later_redispatch_survives_the_note_of_an_earlier_one,
    checkpoints_move_by_compare_and_set,
    b_09_any_bytes_survive,
    cancel_ends_everything,
    polling_goes_round,
    polling_many_small_and_some_large_executions_leaves_nothing_out,
    pollers_are_told_until_there_are_messages,
    stranded_shards_are_found,
    triggers_wait_until_they_are_settled,
    overview_counts_tiers,
    overview_counts_dead_letters_up_to_a_bound,
);

async fn a_shard_goes_its_way(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 4).await;
    let me = worker();
    let all: Vec<_> = (0..4).map(|i| attempt(id, i, 1)).collect();
    let claimed = ledger.claim(me, &all, T0).await.unwrap();
    assert!(claimed.iter().all(|c| c.is_ok()), "{claimed:?}");
    assert_eq!(ledger.running(10).await.unwrap().len(), 4);
    let ends = [success(all[0]), failure(all[1]), success(all[2]), success(all[3])];
    let recorded = ledger.record(me, &ends, T0 + 10).await.unwrap();
    assert_eq!(recorded[0].unwrap().phase, Phase::Success);
    assert_eq!(recorded[1].unwrap().redispatch_at_ms, Some(T0 + 1_010));
    assert!(recorded.iter().all(|r| r.unwrap().execution_ended.is_none()));
    assert!(ledger.redispatch_due(T0 + 1_009, &[], 10).await.unwrap().is_empty());
    let due = ledger.redispatch_due(T0 + 1_010, &[], 10).await.unwrap();
    assert_eq!(due[0].attempt, attempt(id, 1, 2));
    let again = [due[0].attempt];
    assert_eq!(ledger.claim(me, &again, T0 + 1_000).await.unwrap(), [Err(Rejection::NotYet)]);
    assert!(ledger.claim(me, &again, T0 + 1_010).await.unwrap()[0].is_ok());
    let last = ledger.record(me, &[success(again[0])], T0 + 1_020).await.unwrap();
    assert_eq!(last[0].unwrap().execution_ended, Some(execution::Phase::Success));
    let replay = ledger.record(me, &[success(again[0])], T0 + 1_020).await.unwrap();
    assert_eq!(replay, [Err(Rejection::Terminal(Phase::Success))]);
    let (tally, started) = ledger.tally(id).await.unwrap();
    invariants::check_tally(&tally).unwrap();
    assert_eq!((tally.results, tally.counted, started), (4, 4, 5));
    assert_eq!(ledger.rows_done(id).await.unwrap(), 40);
    assert_eq!(ledger.attempts(id, 10).await.unwrap().len(), 5);
    assert_eq!(ledger.execution(id).await.unwrap().unwrap().phase, execution::Phase::Success);
    assert!(ledger.active_executions().await.unwrap().is_empty());
}

async fn r_07_results_out_of_order_end_in_success(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 1).await;
    let (me, at) = (worker(), attempt(id, 0, 1));
    assert_eq!(ledger.record(me, &[success(at)], T0).await.unwrap(), [Err(Rejection::NotRunning)]);
    assert!(ledger.claim(me, &[at], T0).await.unwrap()[0].is_ok());
    assert!(ledger.record(me, &[success(at)], T0).await.unwrap()[0].is_ok());
    assert_eq!(ledger.claim(me, &[at], T0).await.unwrap(), [Err(Rejection::Terminal(Phase::Success))]);
    assert_eq!(ledger.record(me, &[success(at)], T0).await.unwrap(), [Err(Rejection::Terminal(Phase::Success))]);
    assert_eq!(ledger.tally(id).await.unwrap().0.results, 1);
}

async fn r_08_the_old_owner_of_a_reclaimed_shard_is_refused(world: World) {
    let ledger = &world.ledger;
    let (epoch, _, id) = fired(ledger, 1).await;
    let (old, new, first) = (worker(), worker(), attempt(id, 0, 1));
    assert!(ledger.claim(old, &[first], T0).await.unwrap()[0].is_ok());
    ledger.advance(old, first, None, Checkpoint::Number(5), 5).await.unwrap().unwrap();
    let reclaim = Reclaim { attempt: first, owner: old, reason: ReclaimReason::WorkerLost };
    let taken = ledger.reclaim(epoch, &[(reclaim, policy(3))], T0 + 100).await.unwrap();
    assert_eq!(taken[0].unwrap().redispatch_at_ms, Some(T0 + 100));
    let stale = Rejection::StaleAttempt { named: 1, current: 2 };
    assert_eq!(ledger.reclaim(epoch, &[(reclaim, policy(3))], T0 + 100).await.unwrap(), [Err(stale)]);
    assert_eq!(ledger.record(old, &[success(first)], T0).await.unwrap(), [Err(stale)]);
    let moved = ledger.advance(old, first, Some(Checkpoint::Number(5)), Checkpoint::Number(9), 1).await.unwrap();
    assert_eq!(moved, Err(stale));
    let second = attempt(id, 0, 2);
    let claimed = ledger.claim(new, &[second], T0 + 100).await.unwrap();
    assert_eq!(claimed, [Ok(Claimed { checkpoint: Some(Checkpoint::Number(5)) })]);
    assert_eq!(ledger.record(old, &[success(second)], T0).await.unwrap(), [Err(Rejection::NotOwner(new))]);
    assert!(ledger.record(new, &[success(second)], T0 + 200).await.unwrap()[0].is_ok());
    let history = ledger.attempts(id, 10).await.unwrap();
    let seen: Vec<_> = history.iter().map(|a| (a.attempt, a.outcome.as_str(), a.owner)).collect();
    assert_eq!(seen, [(1, "worker_lost", old), (2, "success", new)]);
}

async fn take_overs_fence_the_owner_and_follow_the_message(world: World) {
    let ledger = &world.ledger;
    let (epoch, _, id) = fired(ledger, 2).await;
    let (a, b, c) = (worker(), worker(), worker());
    let message = attempt(id, 0, 1);
    let want = |message, from| TakeOver { message, from, reason: TakeOverReason::Redelivered, retry: policy(3) };
    let taken = async |by, wanted| ledger.take_over(by, &[wanted], T0 + 50).await.unwrap().remove(0);
    assert_eq!(taken(b, want(message, None)).await, Err(Rejection::NotRunning));
    ledger.claim(a, &[message], T0).await.unwrap().remove(0).unwrap();
    ledger.advance(a, message, None, Checkpoint::Number(5), 5).await.unwrap().unwrap();
    assert_eq!(taken(b, want(message, Some(c))).await, Err(Rejection::NotOwner(a)), "somebody else's by now");
    let second = TakenOver::Running { attempt: attempt(id, 0, 2), checkpoint: Some(Checkpoint::Number(5)) };
    assert_eq!(taken(b, want(message, Some(a))).await, Ok(second.clone()));
    assert_eq!(taken(b, want(message, Some(a))).await, Ok(second), "the answer was lost");
    let stale = Rejection::StaleAttempt { named: 1, current: 2 };
    assert_eq!(ledger.record(a, &[success(message)], T0).await.unwrap(), [Err(stale)], "the old owner is fenced");
    // The same message comes a third time: the second owner has died too.
    let third = TakenOver::Running { attempt: attempt(id, 0, 3), checkpoint: Some(Checkpoint::Number(5)) };
    assert_eq!(taken(c, want(message, None)).await, Ok(third));
    let last = taken(a, want(message, None)).await;
    let Ok(TakenOver::Ended(recorded)) = last else { panic!("{last:?}") };
    assert_eq!(recorded.phase, Phase::Failed, "three tries are used up, however fast (T-04)");
    assert_eq!(taken(b, want(message, None)).await, Err(Rejection::Terminal(Phase::Failed)));
    let history = ledger.attempts(id, 10).await.unwrap();
    let seen: Vec<_> = history.iter().map(|h| (h.attempt, h.outcome.as_str(), h.owner)).collect();
    assert_eq!(seen, [(1, "taken_over", a), (2, "taken_over", b), (3, "taken_over", c)]);
    assert!(history.iter().all(|h| h.message.as_deref().is_some_and(|m| m.starts_with("worker lost"))));
    assert_eq!(ledger.dead(10).await.unwrap().len(), 1);
    assert!(ledger.redispatch_due(i64::MAX, &[], 10).await.unwrap().is_empty());
    // A message of an attempt that ended otherwise stands for nothing.
    let (other, next) = (attempt(id, 1, 1), attempt(id, 1, 2));
    ledger.claim(a, &[other], T0).await.unwrap().remove(0).unwrap();
    let reclaim = Reclaim { attempt: other, owner: a, reason: ReclaimReason::WorkerLost };
    ledger.reclaim(epoch, &[(reclaim, policy(3))], T0).await.unwrap()[0].unwrap();
    ledger.claim(b, &[next], T0 + 60).await.unwrap().remove(0).unwrap();
    assert_eq!(taken(c, want(other, None)).await, Err(stale));
    invariants::check_tally(&ledger.tally(id).await.unwrap().0).unwrap_err();
    assert_eq!(ledger.tally(id).await.unwrap().0.recorded_twice, 0);
}

async fn claims_twice_in_a_batch_and_again_after_a_lost_answer(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 3).await;
    let (me, other) = (worker(), worker());
    let (a, b, none) = (attempt(id, 0, 1), attempt(id, 1, 1), attempt(id, 99, 1));
    let answers = ledger.claim(me, &[a, a, b, none, attempt(id, 2, 7)], T0).await.unwrap();
    let none = Err(Rejection::NoSuchShard);
    assert!(answers[0].is_ok() && answers[2].is_ok());
    assert_eq!(answers[1], Err(Rejection::AlreadyRunning(me)));
    assert_eq!((&answers[3], &answers[4]), (&none, &Err(Rejection::UnknownAttempt { named: 7, current: 1 })));
    assert!(ledger.claim(me, &[a, b], T0).await.unwrap().iter().all(|c| c.is_ok()), "the answer was lost");
    assert_eq!(ledger.claim(other, &[a], T0).await.unwrap(), [Err(Rejection::AlreadyRunning(me))]);
}

async fn a_batch_mixes_accepted_and_refused(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 8).await;
    let (me, other) = (worker(), worker());
    let at = |i| attempt(id, i, 1);
    ledger.claim(me, &[at(0), at(1), at(2), at(3)], T0).await.unwrap();
    ledger.claim(other, &[at(4)], T0).await.unwrap();
    // All successes, so the short way is tried first, and has to leave nothing behind when it finds the strangers.
    let ends = [success(at(0)), success(at(4)), success(at(5)), success(at(1)), success(at(99))];
    let answers = ledger.record(me, &ends, T0).await.unwrap();
    assert!(answers[0].is_ok() && answers[3].is_ok());
    assert_eq!(answers[1], Err(Rejection::NotOwner(other)));
    assert_eq!((answers[2], answers[4]), (Err(Rejection::NotRunning), Err(Rejection::NoSuchShard)));
    let back = end(at(3), AttemptOutcome::HandBack);
    let answers = ledger.record(me, &[failure(at(2)), success(at(2)), back, success(at(0))], T0).await.unwrap();
    assert_eq!(answers[0].unwrap().phase, Phase::Pending);
    assert_eq!(answers[1], Err(Rejection::StaleAttempt { named: 1, current: 2 }));
    assert_eq!(answers[2].unwrap().redispatch_at_ms, Some(T0));
    assert_eq!(answers[3], Err(Rejection::Terminal(Phase::Success)));
    let shards = ledger.shards(id, 0, 10).await.unwrap();
    assert_eq!((shards[2].failures, shards[3].failures, shards[3].attempt), (1, 0, 2), "a hand-back costs no try");
    let row = ledger.execution(id).await.unwrap().unwrap();
    assert_eq!((row.succeeded, row.failed, row.running), (2, 0, Some(1)));
}

async fn used_up_tries_end_as_a_dead_letter(world: World) {
    let ledger = &world.ledger;
    let (epoch, _, id) = fired(ledger, 2).await;
    let me = worker();
    let mut now = T0;
    for n in 1..=3 {
        let at = attempt(id, 0, n);
        assert!(ledger.claim(me, &[at], now).await.unwrap()[0].is_ok(), "attempt {n}");
        let recorded = ledger.record(me, &[failure(at)], now).await.unwrap()[0].unwrap();
        assert_eq!(recorded.phase, if n < 3 { Phase::Pending } else { Phase::Failed });
        ledger.mark_dispatched(epoch, &[], &[attempt(id, 0, n + 1)]).await.unwrap();
        now += 2_000;
    }
    let dead = ledger.dead(10).await.unwrap();
    assert_eq!((dead.len(), dead[0].shard, dead[0].reason.as_str()), (1, Some((id, 0)), "it broke"));
    assert!(ledger.redispatch_due(i64::MAX, &[], 10).await.unwrap().is_empty());
    let at = attempt(id, 1, 1);
    ledger.claim(me, &[at], now).await.unwrap();
    let last = ledger.record(me, &[success(at)], now).await.unwrap()[0].unwrap();
    assert_eq!(last.execution_ended, Some(execution::Phase::Failed));
}

async fn a_later_redispatch_survives_the_note_of_an_earlier_one(world: World) {
    let ledger = &world.ledger;
    let (epoch, _, id) = fired(ledger, 1).await;
    let me = worker();
    for n in 1..=2 {
        let at = attempt(id, 0, n);
        ledger.claim(me, &[at], T0 + i64::from(n) * 10_000).await.unwrap();
        ledger.record(me, &[failure(at)], T0 + i64::from(n) * 10_000).await.unwrap()[0].unwrap();
    }
    ledger.mark_dispatched(epoch, &[], &[attempt(id, 0, 2)]).await.unwrap();
    let due = ledger.redispatch_due(i64::MAX, &[], 10).await.unwrap();
    assert_eq!(due.iter().map(|d| d.attempt).collect::<Vec<_>>(), [attempt(id, 0, 3)]);
    ledger.mark_dispatched(epoch, &[(id, 1)], &[attempt(id, 0, 3)]).await.unwrap();
    assert!(ledger.redispatch_due(i64::MAX, &[], 10).await.unwrap().is_empty());
    ledger.mark_dispatched(epoch, &[(id, 0)], &[]).await.unwrap();
    assert_eq!(ledger.active_executions().await.unwrap()[0].dispatched, 1, "the watermark never falls");
}

async fn checkpoints_move_by_compare_and_set(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 1).await;
    let (me, at) = (worker(), attempt(id, 0, 1));
    let n = Checkpoint::Number;
    assert_eq!(ledger.advance(me, at, None, n(1), 1).await.unwrap(), Err(Rejection::NotRunning));
    ledger.claim(me, &[at], T0).await.unwrap();
    assert_eq!(ledger.advance(me, at, None, n(10), 10).await.unwrap(), Ok(()));
    assert_eq!(ledger.advance(me, at, None, n(10), 10).await.unwrap(), Ok(()), "its first answer was lost");
    assert_eq!(ledger.advance(worker(), at, None, n(10), 10).await.unwrap(), Err(Rejection::NotOwner(me)));
    assert_eq!(ledger.advance(me, at, None, n(20), 10).await.unwrap(), Err(Rejection::CheckpointGap));
    assert_eq!(ledger.advance(me, at, Some(n(10)), n(10), 10).await.unwrap(), Err(Rejection::CheckpointGap));
    assert_eq!(ledger.advance(me, at, Some(n(10)), n(20), 10).await.unwrap(), Ok(()));
    let text = Checkpoint::Text("20".into());
    assert_eq!(ledger.advance(me, at, Some(text.clone()), n(30), 1).await.unwrap(), Err(Rejection::CheckpointGap));
    assert_eq!(ledger.advance(me, at, Some(n(20)), text.clone(), 1).await.unwrap(), Ok(()));
    let strange = Checkpoint::Text("a\0b'\"\\🦀 ".into());
    assert_eq!(ledger.advance(me, at, Some(text), strange.clone(), 1).await.unwrap(), Ok(()));
    let row = &ledger.shards(id, 0, 1).await.unwrap()[0];
    assert_eq!((row.checkpoint.as_ref(), row.rows_done), (Some(&strange), 22));
    let long = Checkpoint::Text("x".repeat(2_000));
    assert!(matches!(ledger.advance(me, at, Some(strange), long, 1).await, Err(StoreError::Invalid(_))));
}

async fn b_09_any_bytes_survive(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 3).await;
    let me = worker();
    let at = |i| attempt(id, i, 1);
    ledger.claim(me, &[at(0), at(1), at(2)], T0).await.unwrap();
    let nasty = format!("a\0b \u{1b}[31m '\"\\; -- 🦀 {}", "é".repeat(10_000));
    let class = FailureClass::Permanent;
    let summary = |text: String| AttemptOutcome::Success { rows: None, summary: Some(text) };
    let ends = [
        end(at(0), AttemptOutcome::Failure { class, message: nasty }),
        end(at(1), summary("{\"text\":\"🦀 'quoted' \\\\\"}".into())),
        end(at(2), summary("x".repeat(5 * 1024 * 1024))),
    ];
    assert!(
        ledger.record(me, &ends, T0).await.unwrap().iter().all(|r| r.is_ok()),
        "b_02: a large result is no failure"
    );
    let attempts = ledger.attempts(id, 10).await.unwrap();
    let message = attempts[0].message.as_deref().unwrap();
    assert!(message.starts_with("a\u{FFFD}b \u{1b}[31m '\"\\; -- 🦀 é") && message.ends_with("(cut)"), "{message}");
    assert_eq!(attempts[1].message.as_deref(), Some("{\"text\":\"🦀 'quoted' \\\\\"}"));
    assert_eq!(attempts[2].message.as_deref(), Some("{\"truncated\":true,\"bytes\":5242880}"));
    ledger.put_dead_message("no job", &[0x00, 0xff, 0xfe, 0xc3, 0x28], T0).await.unwrap();
    let dead = ledger.dead(1).await.unwrap();
    assert_eq!(dead[0].text.as_deref(), Some("\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}("));
}

async fn cancel_ends_everything(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, id) = fired(ledger, 3).await;
    let me = worker();
    let at = |i| attempt(id, i, 1);
    ledger.claim(me, &[at(0), at(1)], T0).await.unwrap();
    ledger.record(me, &[success(at(0))], T0).await.unwrap();
    assert_eq!(ledger.cancel(id, "ops", "tests", T0).await.unwrap(), Some(execution::Phase::Cancelled));
    assert_eq!(ledger.cancel(id, "ops", "tests", T0).await.unwrap(), Some(execution::Phase::Cancelled));
    assert_eq!(ledger.record(me, &[success(at(1))], T0).await.unwrap(), [Err(Rejection::Terminal(Phase::Cancelled))]);
    assert_eq!(ledger.claim(me, &[at(2)], T0).await.unwrap(), [Err(Rejection::Terminal(Phase::Cancelled))]);
    let row = ledger.execution(id).await.unwrap().unwrap();
    assert_eq!((row.succeeded, row.cancelled, row.running), (1, 2, Some(0)));
    invariants::check_tally(&ledger.tally(id).await.unwrap().0).unwrap();
    let unknown = shardcron_domain::ExecutionId(uuid::Uuid::from_u128(1));
    assert_eq!(ledger.cancel(unknown, "ops", "tests", T0).await.unwrap(), None);
    // One whose rows are not all written yet gets no more of them, and is complete nevertheless.
    let new = new_execution(5_000, OverlapPolicy::Allow);
    let large = new.id;
    ledger.fire(epoch, &[intent(job, "large", new)], T0).await.unwrap();
    ledger.cancel(large, "ops", "tests", T0).await.unwrap();
    assert_eq!(ledger.materialize(epoch, large, 5_000).await.unwrap(), 1_000);
    invariants::check_tally(&ledger.tally(large).await.unwrap().0).unwrap();
}

async fn polling_goes_round(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, first) = fired(ledger, 5).await;
    let new = new_execution(5, OverlapPolicy::Allow);
    let second = new.id;
    ledger.fire(epoch, &[intent(job, "second", new)], T0).await.unwrap();
    ledger.mark_dispatched(epoch, &[(second, 2)], &[]).await.unwrap();
    let mut cursor = PollCursor::default();
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.extend(ledger.claimable("core", &mut cursor, T0, 3).await.unwrap());
    }
    let expected: Vec<_> = (0..5).map(|i| attempt(first, i, 1)).chain((0..2).map(|i| attempt(second, i, 1))).collect();
    assert_eq!(seen[..7], expected, "each once, before any comes again");
    assert_eq!(seen[7..], expected[..2]);
    assert!(ledger.claimable("bulk", &mut PollCursor::default(), T0, 3).await.unwrap().is_empty());
    // A retry is handed out again only when the dispatcher has taken it up.
    let me = worker();
    ledger.claim(me, &seen[..7], T0).await.unwrap();
    ledger.record(me, &[failure(seen[0])], T0).await.unwrap();
    assert!(ledger.claimable("core", &mut cursor, T0 + 9_000, 9).await.unwrap().is_empty());
    ledger.mark_dispatched(epoch, &[], &[attempt(first, 0, 2)]).await.unwrap();
    assert!(ledger.claimable("core", &mut cursor, T0 + 1, 9).await.unwrap().is_empty());
    assert_eq!(ledger.claimable("core", &mut cursor, T0 + 9_000, 9).await.unwrap(), [attempt(first, 0, 2)]);
}

async fn polling_many_small_and_some_large_executions_leaves_nothing_out(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, first) = fired(ledger, 300).await;
    let mut wanted: Vec<_> = (0..300).map(|i| attempt(first, i, 1)).collect();
    let mut intents = Vec::new();
    let mut marks = Vec::new();
    // More than one look takes into view; among them one that is not handed out as a whole, and one of which nothing is.
    for n in 0..600u32 {
        let shards = if n % 100 == 7 { 40 } else { 1 };
        let new = new_execution(shards, OverlapPolicy::Allow);
        let handed_out = match n {
            7 => 15,
            107 => 0,
            _ => shards,
        };
        wanted.extend((0..handed_out).map(|i| attempt(new.id, i, 1)));
        marks.push((new.id, handed_out));
        intents.push(intent(job, &format!("small-{n}"), new));
    }
    for some in intents.chunks(200) {
        ledger.fire(epoch, some, T0).await.unwrap();
    }
    ledger.mark_dispatched(epoch, &marks, &[]).await.unwrap();
    assert_eq!(ledger.outstanding("core").await.unwrap() as usize, wanted.len());
    let (mut cursor, mut seen, mut looks) = (PollCursor::default(), Vec::new(), 0);
    while seen.len() < wanted.len() {
        seen.extend(ledger.claimable("core", &mut cursor, T0, 64).await.unwrap());
        looks += 1;
        assert!(looks < 50, "{} of {} after {looks} looks", seen.len(), wanted.len());
    }
    seen.truncate(wanted.len());
    wanted.sort_unstable();
    seen.sort_unstable();
    assert!(seen == wanted, "each once, before any comes again");
    // The same, as the leader reads it to send messages for it.
    let (mut after, mut pages) = (None, Vec::new());
    loop {
        let page = ledger.handed_out(after, T0, 100).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.attempt.shard());
        pages.extend(page);
    }
    assert!(pages.iter().all(|row| row.tier == "core"));
    assert!(pages.iter().map(|row| row.attempt).eq(wanted.iter().copied()), "each once, in order");
    // What runs, waits for its retry or has ended is not outstanding.
    let me = worker();
    ledger.claim(me, &wanted[..10], T0).await.unwrap();
    let ends: Vec<_> =
        wanted[..2].iter().map(|a| failure(*a)).chain(wanted[2..5].iter().map(|a| success(*a))).collect();
    ledger.record(me, &ends, T0).await.unwrap();
    assert_eq!(ledger.outstanding("core").await.unwrap() as usize, wanted.len() - 10);
    assert_eq!(ledger.outstanding("bulk").await.unwrap(), 0);
    assert_eq!(ledger.handed_out(None, T0 + 9_000, 9_999).await.unwrap().len(), wanted.len() - 10);
}

async fn pollers_are_told_until_there_are_messages(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, _) = fired(ledger, 1).await;
    let new = new_execution(6, OverlapPolicy::Allow);
    let id = new.id;
    ledger.fire(epoch, &[intent(job, "x", new)], T0).await.unwrap();
    assert_eq!(ledger.polling().await.unwrap(), None);
    ledger.leave_to_pollers(epoch, &[(id, 4)], &[], T0 + 1).await.unwrap();
    assert_eq!(ledger.claimable("core", &mut PollCursor::default(), T0, 9).await.unwrap().len(), 4 + 1);
    let seen = ledger.polling().await.unwrap().unwrap();
    assert_eq!(seen.since_ms, T0 + 1);
    // Something more is left to them while the leader sends messages for what it has read.
    ledger.leave_to_pollers(epoch, &[(id, 6)], &[], T0 + 2).await.unwrap();
    assert!(!ledger.end_polling(epoch, &seen).await.unwrap());
    let seen = ledger.polling().await.unwrap().unwrap();
    assert_eq!(seen.since_ms, T0 + 1, "it has gone on since then");
    let next = ledger.begin_epoch("other", T0).await.unwrap();
    assert!(matches!(ledger.end_polling(epoch, &seen).await, Err(StoreError::Deposed { .. })));
    assert!(matches!(ledger.leave_to_pollers(epoch, &[], &[], T0).await, Err(StoreError::Deposed { .. })));
    assert_eq!(ledger.polling().await.unwrap(), Some(seen), "a deposed leader changes nothing");
    assert!(ledger.end_polling(next, &seen).await.unwrap());
    assert_eq!(ledger.polling().await.unwrap(), None);
    ledger.leave_to_pollers(next, &[], &[], T0 + 5).await.unwrap();
    assert_eq!(ledger.polling().await.unwrap().unwrap().since_ms, T0 + 5);
}

async fn stranded_shards_are_found(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, _) = fired(ledger, 1).await;
    let new = new_execution(6, OverlapPolicy::Allow);
    let id = new.id;
    ledger.fire(epoch, &[intent(job, "x", new)], T0).await.unwrap();
    ledger.mark_dispatched(epoch, &[(id, 4)], &[]).await.unwrap();
    let me = worker();
    ledger.claim(me, &[attempt(id, 0, 1), attempt(id, 1, 1)], T0).await.unwrap();
    ledger.record(me, &[failure(attempt(id, 1, 1))], T0).await.unwrap();
    let lost = ledger.stranded(id, 0, T0 + 9_000, 9).await.unwrap();
    assert_eq!(lost, [attempt(id, 2, 1), attempt(id, 3, 1)], "running, waiting for redispatch, not handed out: no");
    ledger.mark_dispatched(epoch, &[], &[attempt(id, 1, 2)]).await.unwrap();
    let lost = ledger.stranded(id, 0, T0 + 9_000, 2).await.unwrap();
    assert_eq!(lost, [attempt(id, 1, 2), attempt(id, 2, 1)]);
    assert_eq!(ledger.stranded(id, 3, T0 + 9_000, 9).await.unwrap(), [attempt(id, 3, 1)]);
}

async fn triggers_wait_until_they_are_settled(world: World) {
    let ledger = &world.ledger;
    for payload in [&b"one"[..], &[0, 255, 1], b"three"] {
        ledger.put_trigger(payload, T0).await.unwrap();
    }
    let first = ledger.triggers(2).await.unwrap();
    assert_eq!(first.iter().map(|t| t.payload.as_slice()).collect::<Vec<_>>(), [&b"one"[..], &[0, 255, 1]]);
    ledger.settle_triggers(&[first[0].id, first[1].id]).await.unwrap();
    ledger.settle_triggers(&[first[0].id]).await.unwrap();
    assert_eq!(ledger.triggers(9).await.unwrap()[0].payload, b"three");
}

async fn overview_counts_dead_letters_up_to_a_bound(world: World) {
    let ledger = &world.ledger;
    let bound = i64::try_from(shardcron_domain::limits::DEAD_LETTERS_COUNTED).unwrap();
    let letters = |n: i64| {
        let row = |_| vec![SqlArg::Text("message".into()), SqlArg::Int(T0), SqlArg::Text("no job".into())];
        ledger.insert_rows("dead_letters", &["kind", "at_ms", "reason"], (0..n).map(row).collect())
    };
    letters(bound - 1).await.unwrap();
    assert_eq!(ledger.overview().await.unwrap().dead, bound.unsigned_abs() - 1);
    letters(6).await.unwrap();
    assert_eq!(ledger.overview().await.unwrap().dead, bound.unsigned_abs());
}

async fn overview_counts_tiers(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 5).await;
    let me = worker();
    ledger.claim(me, &[attempt(id, 0, 1), attempt(id, 1, 1)], T0).await.unwrap();
    ledger.record(me, &[success(attempt(id, 0, 1))], T0).await.unwrap();
    let overview = ledger.overview().await.unwrap();
    let core = &overview.tiers[0];
    assert_eq!((core.executions, core.waiting, core.running), (1, 3, 1));
    assert_eq!((core.oldest_waiting_ms, overview.dead), (Some(T0), 0));
    let running = ledger.running(10).await.unwrap();
    assert_eq!(running[0].stall_ms, Some(60_000));
    assert_eq!((running[0].attempt, running[0].owner, running[0].timeout_ms), (attempt(id, 1, 1), me, Some(1_800_000)));
    let head = ledger.execution_head(id).await.unwrap().unwrap();
    assert_eq!((head.spec.name.as_str(), head.version, head.nominal_ms), ("job", 1, T0));
    assert_eq!(ledger.executions(Some("job"), None, 5).await.unwrap().len(), 1);
    assert!(ledger.executions(None, Some(id), 5).await.unwrap().is_empty());
    assert!((ledger.server_now_ms().await.unwrap() - T0) > 0);
    assert_eq!(ledger.check_server().await.unwrap(), Vec::<String>::new());
    assert!(ledger.server_version().await.unwrap().contains('.'));
}
