//! A trace that conforms, and what falsifies it.

use super::*;
use crate::shard::{Checkpoint, FailureClass, Phase, ReclaimReason, TakeOverReason};
use crate::trace::End;
use uuid::Uuid;

fn execution() -> ExecutionId {
    ExecutionId(Uuid::from_u128(7))
}

fn at(attempt: u32) -> AttemptRef {
    AttemptRef { execution: execution(), index: 0, attempt }
}

fn worker(n: u128) -> Incarnation {
    Incarnation(Uuid::from_u128(n))
}

#[derive(Default)]
struct Run(Vec<TraceLine>);

impl Run {
    fn say(&mut self, life: &str, event: TraceEvent) -> &mut Self {
        let seq = self.0.iter().filter(|l| l.life == life).count() as u64 + 1;
        self.0.push(TraceLine { life: life.into(), seq, event });
        self
    }

    fn fired() -> Self {
        let (job, fire_key, epoch) = (1, "key".to_owned(), Epoch(1));
        let mut run = Run::default();
        run.say("leader", TraceEvent::EpochBegun { epoch });
        let execution = Some(execution());
        run.say("leader", TraceEvent::Firing { epoch, job, fire_key: fire_key.clone(), execution, shards: 1 });
        run.say("leader", TraceEvent::Decided { epoch, job, fire_key, outcome: FIRED.into(), execution });
        run.dispatched(1);
        run
    }

    fn dispatched(&mut self, attempt: u32) -> &mut Self {
        self.say("leader", TraceEvent::Dispatched { epoch: Epoch(1), at: at(attempt) })
    }

    fn claim(&mut self, n: u128, attempt: u32) -> &mut Self {
        let (life, owner, at) = (format!("worker-{n}"), worker(n), at(attempt));
        self.say(&life, TraceEvent::Delivered { at });
        self.say(&life, TraceEvent::Claiming { owner, at });
        self.say(&life, TraceEvent::Claimed { owner, at })
    }

    fn recording(&mut self, n: u128, attempt: u32, end: End) -> &mut Self {
        let (life, owner, at) = (format!("worker-{n}"), worker(n), at(attempt));
        self.say(&life, TraceEvent::Recording { owner, at, end, attempts: 3 })
    }

    fn recorded(&mut self, n: u128, attempt: u32, (end, became): (End, Phase)) -> &mut Self {
        let (life, owner, at) = (format!("worker-{n}"), worker(n), at(attempt));
        self.say(&life, TraceEvent::Recorded { owner, at, end, became })
    }

    fn ack(&mut self, n: u128, attempt: u32) -> &mut Self {
        self.say(&format!("worker-{n}"), TraceEvent::Acked { at: at(attempt) })
    }

    fn reclaim(&mut self, n: u128, attempt: u32, became: Phase) -> &mut Self {
        let (epoch, at, owner, reason) = (Epoch(1), at(attempt), worker(n), ReclaimReason::WorkerLost);
        self.say("leader", TraceEvent::Reclaiming { epoch, at, owner, reason, attempts: 3 });
        self.say("leader", TraceEvent::Reclaimed { epoch, at, became: Some(became) })
    }

    fn wrong(&self) -> String {
        check(&self.0).unwrap_err().sentence
    }
}

const WELL: (End, Phase) = (End::Success, Phase::Success);
const AGAIN: (End, Phase) = (End::Failure(FailureClass::Transient), Phase::Pending);

/// Failed once, lost once, done by the third attempt.
fn long_life() -> Run {
    let mut run = Run::fired();
    run.claim(1, 1).recording(1, 1, AGAIN.0).recorded(1, 1, AGAIN).ack(1, 1).dispatched(2);
    run.claim(2, 2).reclaim(2, 2, Phase::Pending).dispatched(3);
    run.claim(1, 3).recording(1, 3, WELL.0).recorded(1, 3, WELL).ack(1, 3);
    // The zombie wakes up.
    run.recording(2, 2, WELL.0);
    run.say("worker-2", TraceEvent::RecordRefused { at: at(2), reason: "stale_attempt".into() });
    run.ack(2, 2);
    run
}

#[test]
fn a_long_life_conforms_in_whatever_order_it_is_read() {
    let mut run = long_life();
    let summary = check(&run.0).unwrap();
    assert_eq!((summary.executions, summary.shards, summary.recorded, summary.acked), (1, 1, 2, 3));
    assert_eq!(summary.presumed, 0);
    run.0.reverse();
    assert_eq!(check(&run.0).unwrap(), summary);
    // And as the lines of a file.
    let read = run.0.iter().map(|line| serde_json::from_str(&serde_json::to_string(line).unwrap()).unwrap());
    assert_eq!(read.collect::<Vec<TraceLine>>(), run.0);
}

#[test]
fn an_ack_before_the_record_is_found() {
    let mut run = Run::fired();
    run.claim(1, 1).recording(1, 1, WELL.0).ack(1, 1).recorded(1, 1, WELL);
    assert!(run.wrong().contains("acked before the ledger has answered"), "{}", run.wrong());
    let mut at_delivery = Run::fired();
    at_delivery.say("worker-1", TraceEvent::Delivered { at: at(1) }).ack(1, 1);
    assert!(at_delivery.wrong().contains("(A1)"));
    // Too early is no answer, and a label is a label.
    assert_eq!(crate::shard::Rejection::NotYet.label(), crate::trace::NOT_YET);
    let mut too_early = Run::fired();
    too_early.say("worker-1", TraceEvent::Claiming { owner: worker(1), at: at(1) });
    too_early.say("worker-1", TraceEvent::ClaimRefused { at: at(1), reason: crate::trace::NOT_YET.into() }).ack(1, 1);
    assert!(too_early.wrong().contains("(A1)"));
}

#[test]
fn a_second_record_is_found_at_the_same_and_at_another_worker() {
    let mut run = long_life();
    run.recording(1, 3, WELL.0).recorded(1, 3, WELL);
    assert!(run.wrong().contains("a second time (S1)"), "{}", run.wrong());
    let mut twins = Run::fired();
    twins.claim(1, 1).recording(1, 1, WELL.0).recorded(1, 1, WELL).ack(1, 1);
    twins.claim(2, 1).recording(2, 1, WELL.0).recorded(2, 1, WELL).ack(2, 1);
    assert!(twins.wrong().contains("(S1)"), "{}", twins.wrong());
}

#[test]
fn a_record_of_a_stale_attempt_is_found() {
    let mut run = Run::fired();
    run.claim(1, 1).reclaim(1, 1, Phase::Pending).dispatched(2).claim(2, 2);
    run.recording(1, 1, WELL.0).recorded(1, 1, WELL).ack(1, 1);
    assert!(run.wrong().contains("attempt 1 ended a second time"), "{}", run.wrong());
}

#[test]
fn an_attempt_that_nothing_led_to_is_found() {
    let mut run = Run::fired();
    run.claim(1, 1).claim(2, 2);
    assert!(run.wrong().contains("nothing ended attempt 1"), "{}", run.wrong());
    let mut after_the_end = Run::fired();
    after_the_end.claim(1, 1).recording(1, 1, WELL.0).recorded(1, 1, WELL).ack(1, 1).claim(2, 2);
    assert!(after_the_end.wrong().contains("(S3)"), "{}", after_the_end.wrong());
}

#[test]
fn a_step_that_its_process_did_not_live_to_tell_is_presumed() {
    let mut run = Run::fired();
    run.claim(1, 1).recording(1, 1, AGAIN.0).dispatched(2).claim(2, 2);
    assert_eq!(check(&run.0).unwrap().presumed, 1);
    // A claim whose answer nobody heard.
    let mut unheard = Run::fired();
    unheard.say("worker-1", TraceEvent::Claiming { owner: worker(1), at: at(1) });
    unheard.reclaim(1, 1, Phase::Pending).dispatched(2).claim(2, 2);
    assert_eq!(check(&unheard.0).unwrap().presumed, 1);
}

#[test]
fn a_checkpoint_whose_answer_was_lost_is_presumed_where_the_next_attempt_goes_on_from_it() {
    let number = |n| Checkpoint::Number(n);
    let mut run = Run::fired();
    run.claim(1, 1);
    // Taken, and the answer lost; then refused, since the worker does not know where it stands.
    for to in [26, 52] {
        run.say("worker-1", TraceEvent::Advancing { owner: worker(1), at: at(1), from: None, to: number(to) });
    }
    run.reclaim(1, 1, Phase::Pending).dispatched(2).claim(2, 2);
    for (from, to) in [(26, 52), (52, 78)] {
        let (owner, at, from) = (worker(2), at(2), Some(number(from)));
        run.say("worker-2", TraceEvent::Advancing { owner, at, from, to: number(to) });
        run.say("worker-2", TraceEvent::Advanced { owner, at, to: number(to) });
    }
    assert_eq!(check(&run.0).unwrap().presumed, 1);
    let (owner, at, to) = (worker(2), at(2), number(90));
    run.say("worker-2", TraceEvent::Advancing { owner, at, from: Some(number(52)), to: to.clone() });
    run.say("worker-2", TraceEvent::Advanced { owner, at, to });
    assert!(run.wrong().contains("does not follow"), "{}", run.wrong());
}

#[test]
fn a_shard_that_is_taken_over_goes_on_without_a_claim() {
    let reason = TakeOverReason::Redelivered;
    let taken = |run: &mut Run| {
        run.claim(1, 1);
        let (owner, by) = (worker(2), worker(2));
        run.say("worker-2", TraceEvent::Claiming { owner, at: at(1) });
        run.say("worker-2", TraceEvent::ClaimRefused { at: at(1), reason: "already_running".into() });
        run.say("worker-2", TraceEvent::TakingOver { by, at: at(1), reason, attempts: 3 });
        run.say("worker-2", TraceEvent::TakenOver { by, at: at(2), message: 1, reason, attempts: 3 });
    };
    let mut run = Run::fired();
    taken(&mut run);
    run.recording(2, 2, WELL.0).recorded(2, 2, WELL).ack(2, 1);
    assert_eq!(check(&run.0).unwrap().presumed, 0);
    // The message that it was taken over by stands for it: acked before its end, it is acked too early.
    let mut early = Run::fired();
    taken(&mut early);
    early.ack(2, 1);
    assert!(early.wrong().contains("(A1)"), "{}", early.wrong());
    // And the first owner's result comes too late.
    run.recording(1, 1, WELL.0).recorded(1, 1, WELL);
    assert!(run.wrong().contains("attempt 1 ended a second time"), "{}", run.wrong());
}

#[test]
fn a_shard_that_is_taken_away_by_its_first_message_ends_at_the_attempt_that_it_had_come_to() {
    let reason = TakeOverReason::Redelivered;
    let mut run = Run::fired();
    run.claim(1, 1);
    for n in [2, 3] {
        let (life, by) = (format!("worker-{n}"), worker(u128::from(n)));
        run.say(&life, TraceEvent::TakingOver { by, at: at(1), reason, attempts: 3 });
        run.say(&life, TraceEvent::TakenOver { by, at: at(n), message: 1, reason, attempts: 3 });
    }
    let by = worker(4);
    run.say("worker-4", TraceEvent::TakingOver { by, at: at(1), reason, attempts: 3 });
    run.say("worker-4", TraceEvent::TakenAway { by, at: at(1), reason, attempts: 3, became: Phase::Failed });
    assert_eq!(check(&run.0).unwrap().presumed, 0);
    // Nobody can end it after that.
    run.recording(3, 3, WELL.0).recorded(3, 3, WELL);
    assert!(run.wrong().contains("attempt 3 ended a second time"), "{}", run.wrong());
}

#[test]
fn a_wrong_end_of_a_budget_is_found() {
    let mut run = Run::fired();
    run.claim(1, 1).recording(1, 1, AGAIN.0).recorded(1, 1, (AGAIN.0, Phase::Failed));
    assert!(run.wrong().contains("by the rules it is pending"), "{}", run.wrong());
}

#[test]
fn leaders_are_held_to_their_epochs_and_keys() {
    let mut run = Run::fired();
    run.say("other", TraceEvent::EpochBegun { epoch: Epoch(1) });
    assert!(run.wrong().contains("begins a second time (L1)"));
    let mut usurper = Run::fired();
    usurper.say("other", TraceEvent::Dispatched { epoch: Epoch(1), at: at(1) });
    assert!(usurper.wrong().contains("which it never began"));
    let mut twice = Run::fired();
    let execution = Some(ExecutionId(Uuid::from_u128(8)));
    let (epoch, job, fire_key) = (Epoch(1), 1, "key".to_owned());
    twice.say("leader", TraceEvent::Decided { epoch, job, fire_key, outcome: FIRED.into(), execution });
    assert!(twice.wrong().contains("(F1)"));
}

#[test]
fn a_missing_line_is_found() {
    let mut run = long_life();
    run.0.remove(5);
    assert!(run.wrong().contains("is missing"));
}

/// Three failures, and a fourth attempt: only if somebody sent the shard back.
#[test]
fn a_failed_shard_runs_again_only_if_somebody_sent_it_back() {
    const DEAD: (End, Phase) = (End::Failure(FailureClass::Permanent), Phase::Failed);
    let lives = |between: &[TraceEvent]| {
        let mut run = Run::fired();
        run.claim(1, 1).recording(1, 1, DEAD.0).recorded(1, 1, DEAD).ack(1, 1);
        for event in between {
            run.say("person", event.clone());
        }
        run.dispatched(2).claim(2, 2).recording(2, 2, WELL.0).recorded(2, 2, WELL).ack(2, 2);
        run
    };
    let (asked, answered) = (TraceEvent::Reopening { execution: execution() }, TraceEvent::Reopened { at: at(1) });
    assert_eq!(check(&lives(&[asked.clone(), answered]).0).unwrap().presumed, 0);
    assert_eq!(check(&lives(&[asked]).0).unwrap().presumed, 1, "the person's process died before the answer");
    assert!(lives(&[]).wrong().contains("the shard is failed at attempt 1"), "{}", lives(&[]).wrong());
}

/// A broadcast's shard whose worker is gone ends without a claim, and may be sent back.
#[test]
fn a_shard_that_nobody_claimed_may_be_abandoned_and_sent_back() {
    let reopened = |run: &mut Run| {
        run.say("person", TraceEvent::Reopening { execution: execution() });
        run.say("person", TraceEvent::Reopened { at: at(1) });
        run.claim(2, 2).recording(2, 2, End::Success).recorded(2, 2, (End::Success, Phase::Success));
    };
    let mut silent = Run::fired();
    reopened(&mut silent);
    assert!(check(&silent.0).unwrap_err().sentence.contains("never claimed"));
    let asked = TraceEvent::Abandoning { epoch: Epoch(1), worker: worker(1) };
    let mut killed = Run::fired();
    killed.say("leader", asked.clone());
    reopened(&mut killed);
    assert!(check(&killed.0).unwrap().presumed > 0, "its process died before the answer");
    let mut said = Run::fired();
    said.say("leader", asked).say("leader", TraceEvent::Abandoned { at: at(1) });
    reopened(&mut said);
    assert_eq!(check(&said.0).unwrap().presumed, 0);
}

/// A good end that was answered with open records, and a bad one whose process died before the answer.
#[test]
fn what_an_attempt_is_presumed_to_have_come_to_leads_to_the_next_one() {
    let bad = End::Failure(FailureClass::Transient);
    let mut run = Run::fired();
    run.claim(1, 1).recording(1, 1, End::Success).recording(1, 1, bad);
    run.dispatched(2).claim(2, 2).recording(2, 2, End::Success).recorded(2, 2, (End::Success, Phase::Success));
    assert_eq!(check(&run.0).unwrap().presumed, 1);
    let mut never = Run::fired();
    never.claim(1, 1).recording(1, 1, End::Success);
    never.dispatched(2).claim(2, 2);
    assert!(check(&never.0).is_err(), "nothing follows a good end");
}
