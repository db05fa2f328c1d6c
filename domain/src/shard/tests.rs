use super::*;
use crate::invariants;
use proptest::prelude::*;
use uuid::Uuid;

fn worker(n: u8) -> Incarnation {
    Incarnation(Uuid::from_bytes([n; 16]))
}

fn run(events: &[Event]) -> (Shard, Vec<Result<Option<Effect>, Rejection>>) {
    let policy = RetryPolicy::default();
    let mut shard = Shard::new();
    let mut answers = Vec::new();
    for (i, event) in events.iter().enumerate() {
        match apply(&shard, event, &policy, 1_000_000_000 * (i as i64 + 1)) {
            Ok((next, effect)) => {
                invariants::check_shard_step(&shard, &next).unwrap();
                shard = next;
                answers.push(Ok(effect));
            }
            Err(r) => answers.push(Err(r)),
        }
    }
    (shard, answers)
}

#[test]
fn r_07_results_out_of_order_end_in_success() {
    let claim = Event::Claim { attempt: 1, owner: worker(1) };
    let succeed = Event::Succeed { attempt: 1, owner: worker(1) };
    let (shard, answers) = run(&[succeed.clone(), claim.clone(), succeed.clone(), claim, succeed]);
    assert_eq!(shard.phase, Phase::Success);
    assert_eq!(answers[0], Err(Rejection::NotRunning));
    assert_eq!(answers[3], Err(Rejection::Terminal(Phase::Success)));
    assert_eq!(answers[4], Err(Rejection::Terminal(Phase::Success)));
}

#[test]
fn r_08_the_old_owner_of_a_reclaimed_shard_is_refused() {
    let (shard, answers) = run(&[
        Event::Claim { attempt: 1, owner: worker(1) },
        Event::Reclaim { attempt: 1, owner: worker(1), reason: ReclaimReason::WorkerLost },
        Event::Claim { attempt: 2, owner: worker(2) },
        Event::Succeed { attempt: 1, owner: worker(1) },
        Event::Advance { attempt: 1, owner: worker(1), from: None, to: Checkpoint::Number(5) },
        Event::Succeed { attempt: 2, owner: worker(2) },
    ]);
    assert_eq!(shard.phase, Phase::Success);
    assert_eq!(answers[3], Err(Rejection::StaleAttempt { named: 1, current: 2 }));
    assert_eq!(answers[4], Err(Rejection::StaleAttempt { named: 1, current: 2 }));
}

#[test]
fn t_04_a_shard_that_kills_its_workers_ends_after_its_attempts() {
    let mut events = Vec::new();
    for attempt in 1..=4 {
        events.push(Event::Claim { attempt, owner: worker(attempt as u8) });
        events.push(Event::Reclaim { attempt, owner: worker(attempt as u8), reason: ReclaimReason::WorkerLost });
    }
    let (shard, answers) = run(&events);
    assert_eq!(shard.phase, Phase::Failed);
    assert_eq!(shard.failures, 3);
    assert_eq!(answers.iter().filter(|a| matches!(a, Ok(Some(Effect::Settle(_))))).count(), 1, "settled once");
    assert_eq!(answers[6], Err(Rejection::Terminal(Phase::Failed)));
}

/// However fast the next worker takes it over, each death of a worker costs a try.
#[test]
fn t_04_take_overs_use_up_tries_like_any_loss() {
    let by = |n: u32| worker(n as u8);
    let mut events = vec![Event::Claim { attempt: 1, owner: by(1) }];
    for attempt in 1..=4 {
        let reason = TakeOverReason::Redelivered;
        events.push(Event::TakeOver { attempt, owner: by(attempt), by: by(attempt + 1), reason });
    }
    let (shard, answers) = run(&events);
    assert_eq!((shard.phase, shard.attempt, shard.failures), (Phase::Failed, 3, 3));
    assert_eq!(answers[2], Ok(None), "it went on without a wait");
    assert_eq!(answers[3], Ok(Some(Effect::Settle(Phase::Failed))));
    assert_eq!(answers[4], Err(Rejection::Terminal(Phase::Failed)));
}

#[test]
fn a_take_over_fences_the_owner_and_keeps_the_checkpoint() {
    let by = worker(2);
    let at = Checkpoint::Number(7);
    let (shard, answers) = run(&[
        Event::Claim { attempt: 1, owner: worker(1) },
        Event::Advance { attempt: 1, owner: worker(1), from: None, to: at.clone() },
        Event::TakeOver { attempt: 1, owner: worker(1), by, reason: TakeOverReason::OwnerGone },
        Event::Succeed { attempt: 1, owner: worker(1) },
        Event::TakeOver { attempt: 1, owner: worker(1), by: worker(3), reason: TakeOverReason::Redelivered },
        Event::TakeOver { attempt: 2, owner: by, by, reason: TakeOverReason::Redelivered },
    ]);
    assert_eq!((shard.phase, shard.attempt, shard.owner), (Phase::Running, 2, Some(by)));
    assert_eq!(shard.checkpoint, Some(at));
    assert_eq!(answers[3], Err(Rejection::StaleAttempt { named: 1, current: 2 }));
    assert_eq!(answers[4], Err(Rejection::StaleAttempt { named: 1, current: 2 }), "one of two takes it");
    assert_eq!(answers[5], Err(Rejection::AlreadyRunning(by)));
}

#[test]
fn t_06_attempts_are_counted_as_written() {
    let policy = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
    let mut shard = Shard::new();
    let mut started = Vec::new();
    let mut now = 0;
    while !shard.phase.is_terminal() {
        let attempt = shard.attempt;
        shard = apply(&shard, &Event::Claim { attempt, owner: worker(1) }, &policy, now).unwrap().0;
        started.push(attempt);
        let fail = Event::Fail { attempt, owner: worker(1), class: FailureClass::Transient, seed: 7 };
        shard = apply(&shard, &fail, &policy, now).unwrap().0;
        now = shard.not_before_ms;
    }
    assert_eq!(started, [1, 2, 3, 4]);
}

#[test]
fn a_hand_back_raises_the_fence_but_costs_no_try() {
    let (shard, _) =
        run(&[Event::Claim { attempt: 1, owner: worker(1) }, Event::HandBack { attempt: 1, owner: worker(1) }]);
    assert_eq!((shard.phase, shard.attempt, shard.failures), (Phase::Pending, 2, 0));
}

#[test]
fn a_waiting_retry_is_not_claimed_early() {
    let policy = RetryPolicy::default();
    let shard = Shard { attempt: 2, failures: 1, not_before_ms: 500, ..Shard::new() };
    let claim = Event::Claim { attempt: 2, owner: worker(1) };
    assert_eq!(apply(&shard, &claim, &policy, 499), Err(Rejection::NotYet));
    assert!(apply(&shard, &claim, &policy, 500).is_ok());
}

#[test]
fn s4_checkpoints_only_move_forward_and_never_skip() {
    let at = |from: Option<i64>, to: i64| Event::Advance {
        attempt: 1,
        owner: worker(1),
        from: from.map(Checkpoint::Number),
        to: Checkpoint::Number(to),
    };
    let (shard, answers) = run(&[
        Event::Claim { attempt: 1, owner: worker(1) },
        at(None, 10),
        at(None, 20),
        at(Some(10), 10),
        at(Some(10), 30),
    ]);
    assert_eq!(shard.checkpoint, Some(Checkpoint::Number(30)));
    assert_eq!(answers[2], Err(Rejection::CheckpointGap));
    assert_eq!(answers[3], Err(Rejection::CheckpointGap));
}

fn any_event() -> impl Strategy<Value = Event> {
    let who = (1u32..5, 1u8..4).prop_map(|(attempt, w)| (attempt, worker(w)));
    prop_oneof![
        who.clone().prop_map(|(attempt, owner)| Event::Claim { attempt, owner }),
        who.clone().prop_map(|(attempt, owner)| Event::Succeed { attempt, owner }),
        who.clone().prop_map(|(attempt, owner)| Event::Fail {
            attempt,
            owner,
            class: FailureClass::Transient,
            seed: 1
        }),
        who.clone().prop_map(|(attempt, owner)| Event::Reclaim { attempt, owner, reason: ReclaimReason::Hung }),
        who.clone().prop_map(|(attempt, owner)| Event::HandBack { attempt, owner }),
        (who, any::<Option<u8>>(), any::<u8>()).prop_map(|((attempt, owner), from, to)| Event::Advance {
            attempt,
            owner,
            from: from.map(|f| Checkpoint::Number(f.into())),
            to: Checkpoint::Number(to.into())
        }),
        Just(Event::Abandon),
        Just(Event::Cancel),
    ]
}

proptest! {
    #[test]
    fn any_history_keeps_the_invariants(events in proptest::collection::vec(any_event(), 1..60)) {
        let (_, answers) = run(&events);
        let settled = answers.iter().filter(|a| matches!(a, Ok(Some(Effect::Settle(_))))).count();
        prop_assert!(settled <= 1, "S1: settled {} times", settled);
    }
}

/// A handler may say when the next try makes sense. It is a try all the same.
#[test]
fn a_failure_with_an_instant_waits_for_it_and_costs_a_try() {
    let policy = RetryPolicy { attempts: 2, jitter: 0.0, ..RetryPolicy::default() };
    let class = FailureClass::NotBefore { wait_ms: 3_600_000 };
    let fail = |attempt| Event::Fail { attempt, owner: worker(1), class, seed: 7 };
    let claim = |attempt| Event::Claim { attempt, owner: worker(1) };
    let (running, _) = apply(&Shard::new(), &claim(1), &policy, 10).unwrap();
    let (waiting, effect) = apply(&running, &fail(1), &policy, 1_000).unwrap();
    assert_eq!((waiting.failures, waiting.not_before_ms), (1, 3_601_000));
    assert_eq!(effect, Some(Effect::Redispatch { not_before_ms: 3_601_000 }));
    assert_eq!(apply(&waiting, &claim(2), &policy, 3_600_999).unwrap_err(), Rejection::NotYet);
    let (running, _) = apply(&waiting, &claim(2), &policy, 3_601_000).unwrap();
    let (dead, effect) = apply(&running, &fail(2), &policy, 3_602_000).unwrap();
    assert_eq!((dead.phase, effect), (Phase::Failed, Some(Effect::Settle(Phase::Failed))));
}

/// Decision 0025.
#[test]
fn a_failed_shard_goes_on_under_the_next_attempt_with_all_its_tries() {
    let policy = RetryPolicy::default();
    let reopen = |attempt| Event::Reopen { attempt };
    let failed = Shard {
        phase: Phase::Failed,
        attempt: 3,
        failures: 3,
        checkpoint: Some(Checkpoint::Number(40)),
        ..Shard::new()
    };
    let (next, effect) = apply(&failed, &reopen(3), &policy, 9_000).unwrap();
    invariants::check_event(&failed, &reopen(3), &next).unwrap();
    assert_eq!((next.phase, next.attempt, next.failures), (Phase::Pending, 4, 0));
    assert_eq!((next.not_before_ms, &next.checkpoint), (0, &failed.checkpoint), "at once, from where it got to");
    assert_eq!(effect, Some(Effect::Redispatch { not_before_ms: 0 }));
    // Asked twice, it happens once; and who saw an older state is told so.
    assert_eq!(apply(&next, &reopen(3), &policy, 9_000).unwrap_err(), Rejection::NotEnded);
    assert_eq!(
        apply(&failed, &reopen(2), &policy, 9_000).unwrap_err(),
        Rejection::StaleAttempt { named: 2, current: 3 }
    );
    for phase in [Phase::Success, Phase::Cancelled] {
        let ended = Shard { phase, ..Shard::new() };
        assert_eq!(apply(&ended, &reopen(1), &policy, 9_000).unwrap_err(), Rejection::Terminal(phase));
    }
    // A late write of the old round meets the fence.
    let late = Event::Succeed { attempt: 3, owner: worker(1) };
    assert_eq!(apply(&next, &late, &policy, 9_000).unwrap_err(), Rejection::StaleAttempt { named: 3, current: 4 });
}
