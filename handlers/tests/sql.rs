//! The sql handler over a ledger that loses answers, goes away, and gives the shard to others.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::{Fault, OneShard};
use proptest::prelude::*;
use shardcron_domain::shard::{FailureClass, Phase};
use shardcron_handlers::{SqlHandler, SqlLimits, SqlTemplate};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Checkpoint, ShardError, ShardHandler, ShardOutput, ShardSlice};
use std::sync::Arc;
use std::time::Duration;

const RANGE: ShardSlice = ShardSlice::Range { from: 1, to: 10 };

fn quick() -> SqlLimits {
    SqlLimits {
        first_wait: Duration::from_micros(50),
        max_wait: Duration::from_millis(1),
        patience: Duration::from_secs(30),
        deadlocks: 3,
        contended: Duration::from_secs(30),
        stop_grace: Duration::from_millis(20),
    }
}

fn ledger_for(test: &TestContext, faults: &[Fault]) -> Arc<OneShard> {
    let context = test.context();
    let shard = OneShard::running(context.attempt.attempt, context.owner, context.checkpoint.clone());
    Arc::new(shard.with_faults(faults.iter().copied()))
}

fn handler(ledger: &Arc<OneShard>, chunk: Option<u32>) -> SqlHandler {
    let template =
        SqlTemplate::parse("INSERT INTO t SELECT * FROM f WHERE id BETWEEN :shard_from AND :shard_to").unwrap();
    SqlHandler::new(ledger.clone(), template, chunk, quick())
}

async fn run(test: &TestContext, ledger: &Arc<OneShard>, chunk: Option<u32>) -> Result<ShardOutput, ShardError> {
    handler(ledger, chunk).run(test.context()).await
}

fn effects(ledger: &OneShard) -> Vec<(i64, i64)> {
    ledger.inner.lock().unwrap().effects.iter().map(|(_, from, to)| (*from, *to)).collect()
}

#[tokio::test]
async fn without_chunks_one_step_with_the_result() {
    let test = TestContext::new(RANGE);
    let ledger = ledger_for(&test, &[]);
    let output = run(&test, &ledger, None).await.unwrap();
    assert_eq!(output, ShardOutput { rows: Some(10), summary: None, committed: true });
    let inner = ledger.inner.lock().unwrap();
    assert_eq!((inner.shard.phase, inner.calls), (Phase::Success, 1));
    assert!(inner.seen[0].advance.is_none());
}

#[tokio::test]
async fn chunks_go_step_by_step_and_the_last_one_ends_the_shard() {
    let test = TestContext::new(RANGE);
    let ledger = ledger_for(&test, &[]);
    assert_eq!(run(&test, &ledger, Some(4)).await.unwrap().rows, Some(10));
    assert_eq!(effects(&ledger), [(1, 4), (5, 8), (9, 10)]);
    let inner = ledger.inner.lock().unwrap();
    assert_eq!((inner.shard.phase, &inner.shard.checkpoint), (Phase::Success, &Some(Checkpoint::Number(10))));
    assert_eq!(inner.seen.iter().filter(|step| step.finish.is_some()).count(), 1);
}

#[tokio::test]
async fn a_later_attempt_goes_on_behind_the_checkpoint() {
    let test = TestContext::new(RANGE).resumed(3, Checkpoint::Number(4));
    let ledger = ledger_for(&test, &[]);
    assert_eq!(run(&test, &ledger, Some(4)).await.unwrap().rows, Some(6));
    assert_eq!(effects(&ledger), [(5, 8), (9, 10)]);
}

#[tokio::test]
async fn a_checkpoint_at_the_end_only_lacks_the_result() {
    let test = TestContext::new(RANGE).resumed(2, Checkpoint::Number(10));
    let ledger = ledger_for(&test, &[]);
    run(&test, &ledger, Some(4)).await.unwrap();
    assert_eq!(effects(&ledger), []);
    assert_eq!(ledger.inner.lock().unwrap().shard.phase, Phase::Success);
}

#[tokio::test]
async fn the_ends_of_the_number_line_are_reached_and_not_passed() {
    for (from, to) in [(i64::MAX - 5, i64::MAX), (i64::MIN, i64::MIN + 5)] {
        let test = TestContext::new(ShardSlice::Range { from, to });
        let ledger = ledger_for(&test, &[]);
        assert_eq!(run(&test, &ledger, Some(4)).await.unwrap().rows, Some(6));
        assert_eq!(effects(&ledger), [(from, from + 3), (from + 4, to)]);
    }
}

#[tokio::test]
async fn a_lost_answer_in_the_middle_and_at_the_end_is_read_back() {
    for chunk in [None, Some(4), Some(10)] {
        for lost_at in 0..3 {
            let test = TestContext::new(RANGE);
            let mut faults = vec![Fault::None; lost_at];
            faults.extend([Fault::AnswerLost, Fault::Away]);
            let ledger = ledger_for(&test, &faults);
            ledger.inner.lock().unwrap().reads_away = 1;
            let output = run(&test, &ledger, chunk).await.unwrap();
            assert!(output.committed);
            let done = effects(&ledger);
            let keys: i64 = done.iter().map(|(from, to)| to - from + 1).sum();
            assert_eq!(keys, 10, "every key once: {done:?}");
            assert_eq!(ledger.inner.lock().unwrap().shard.phase, Phase::Success);
        }
    }
}

#[tokio::test]
async fn a_shard_that_is_somebody_elses_is_left_alone() {
    for fault in [Fault::TakenAway, Fault::Cancelled, Fault::FinishedElsewhere] {
        for chunk in [None, Some(4)] {
            let test = TestContext::new(RANGE);
            // The answer is lost before, so that a success by another attempt could be mistaken for our own.
            let ledger = ledger_for(&test, &[Fault::Away, fault]);
            let error = run(&test, &ledger, chunk).await.unwrap_err();
            assert!(error.stopped && error.message.contains("superseded"), "{fault:?}: {error:?}");
            assert_eq!(effects(&ledger), [], "{fault:?}");
        }
    }
}

#[tokio::test]
async fn deadlocks_are_repeated_and_wrong_statements_are_not() {
    let test = TestContext::new(RANGE);
    let ledger = ledger_for(&test, &[Fault::Deadlock; 3]);
    run(&test, &ledger, None).await.unwrap();
    let ledger = ledger_for(&test, &[Fault::Deadlock; 4]);
    assert_eq!(run(&test, &ledger, None).await.unwrap_err().class, FailureClass::Transient);
    let ledger = ledger_for(&test, &[Fault::Refused]);
    let error = run(&test, &ledger, None).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Permanent);
    assert!(error.message.contains("no such table: x") && error.message.contains("same way"), "{error}");
    assert_eq!(ledger.inner.lock().unwrap().calls, 1);
}

#[tokio::test]
async fn a_ledger_that_stays_away_is_waited_for_within_bounds() {
    let test = TestContext::new(RANGE);
    let limits = SqlLimits { patience: Duration::from_millis(5), ..quick() };
    let ledger = ledger_for(&test, &[Fault::Away; 1_000]);
    let template = SqlTemplate::parse("SELECT :shard_from, :shard_to").unwrap();
    let error = SqlHandler::new(ledger, template, None, limits).run(test.context()).await.unwrap_err();
    assert_eq!((error.class, error.stopped), (FailureClass::Transient, false));
    let test = TestContext::new(RANGE).timeout(Duration::from_millis(10));
    let ledger = ledger_for(&test, &[Fault::Away; 10_000]);
    assert_eq!(run(&test, &ledger, None).await.unwrap_err().class, FailureClass::Timeout);
}

#[tokio::test]
async fn a_stop_ends_it_between_chunks_and_cuts_a_step_that_hangs() {
    let test = TestContext::new(RANGE);
    test.stop();
    let ledger = ledger_for(&test, &[]);
    assert!(run(&test, &ledger, Some(4)).await.unwrap_err().stopped);
    assert_eq!(ledger.inner.lock().unwrap().calls, 0);
    let test = TestContext::new(RANGE);
    let ledger = ledger_for(&test, &[Fault::None, Fault::Hangs]);
    let (outcome, ()) = tokio::join!(run(&test, &ledger, Some(4)), async {
        while ledger.inner.lock().unwrap().calls < 2 {
            tokio::task::yield_now().await;
        }
        test.stop();
    });
    assert!(outcome.unwrap_err().stopped);
    assert_eq!(ledger.inner.lock().unwrap().shard.checkpoint, Some(Checkpoint::Number(4)), "what was committed stands");
}

#[tokio::test]
async fn chunks_need_a_range_and_a_checkpoint_of_their_kind() {
    let test = TestContext::new(ShardSlice::Modulo { total: 1, item: 0 });
    let ledger = ledger_for(&test, &[]);
    assert_eq!(run(&test, &ledger, Some(4)).await.unwrap_err().class, FailureClass::Permanent);
    let test = TestContext::new(RANGE).resumed(2, Checkpoint::Text("page 7".into()));
    let error = run(&test, &ledger, Some(4)).await.unwrap_err();
    assert!(error.message.contains("page 7"), "{error}");
}

fn any_fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        3 => Just(Fault::AnswerLost),
        2 => Just(Fault::Away),
        1 => Just(Fault::Deadlock),
        1 => Just(Fault::TakenAway),
        1 => Just(Fault::FinishedElsewhere),
        1 => Just(Fault::Cancelled),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// S4, S5: whatever answers are lost, no key is done twice and none is left out of what is reported as done.
    #[test]
    fn no_key_twice_and_none_missing(
        faults in proptest::collection::vec(any_fault(), 0..12),
        reads_away in 0usize..3,
        chunk in proptest::option::of(1u32..12),
    ) {
        let test = TestContext::new(RANGE);
        let ledger = ledger_for(&test, &faults);
        ledger.inner.lock().unwrap().reads_away = reads_away;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let outcome = runtime.block_on(run(&test, &ledger, chunk));
        let mut keys: Vec<i64> = effects(&ledger).into_iter().flat_map(|(from, to)| from..=to).collect();
        let done = keys.len();
        keys.dedup();
        prop_assert_eq!(keys.len(), done, "a key was done twice");
        prop_assert_eq!(&keys, &(1..=done as i64).collect::<Vec<_>>(), "a gap");
        let phase = ledger.inner.lock().unwrap().shard.phase;
        match outcome {
            Ok(output) => {
                prop_assert!(output.committed && phase == Phase::Success && done == 10);
                prop_assert!(output.rows.is_none_or(|rows| rows == 10));
            }
            Err(error) => prop_assert!(error.stopped || error.class == FailureClass::Transient, "{:?}", error),
        }
    }
}
