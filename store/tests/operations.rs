//! Failed shards that a person sends back, and dead letters: at each adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::reopen::Refused;
use shardcron_domain::shard::{Checkpoint, FailureClass, Phase, Rejection};
use shardcron_domain::{ExecutionId, ShardRef, execution, invariants};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(
    failed_shards_run_again_under_the_next_attempt,
    what_may_not_run_again_is_refused_with_a_reason,
    a_batch_is_bounded_and_goes_on,
    a_follower_hears_of_the_new_end_once,
    dead_letters_are_found_and_settled,
);

fn all(execution: ExecutionId) -> Reopen {
    Reopen { execution, shards: ReopenShards::Failed { from: 0 }, who: "ops".into(), reason: Some("fixed".into()) }
}

fn permanent(at: shardcron_domain::AttemptRef) -> Ended {
    end(at, AttemptOutcome::Failure { class: FailureClass::Permanent, message: "no such account".into() })
}

/// Runs the given shards' attempt to a permanent failure, and the others to success.
async fn ran(ledger: &SqlLedger, id: ExecutionId, shards: std::ops::Range<u32>, bad: &[u32], n: u32) {
    let me = worker();
    let all: Vec<_> = shards.map(|i| attempt(id, i, n)).collect();
    assert!(ledger.claim(me, &all, T0).await.unwrap().iter().all(std::result::Result::is_ok));
    let ends: Vec<_> =
        all.iter().map(|at| if bad.contains(&at.index) { permanent(*at) } else { success(*at) }).collect();
    assert!(ledger.record(me, &ends, T0).await.unwrap().iter().all(std::result::Result::is_ok));
}

async fn failed_shards_run_again_under_the_next_attempt(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 4).await;
    let me = worker();
    ledger.claim(me, &[attempt(id, 1, 1)], T0).await.unwrap();
    ledger.advance(me, attempt(id, 1, 1), None, Checkpoint::Number(40), 40).await.unwrap().unwrap();
    ledger.record(me, &[permanent(attempt(id, 1, 1))], T0).await.unwrap();
    for (index, bad) in [(0, vec![]), (2, vec![2]), (3, vec![])] {
        ran(ledger, id, index..index + 1, &bad, 1).await;
    }
    assert_eq!(ledger.execution(id).await.unwrap().unwrap().phase, execution::Phase::Failed);
    assert_eq!(ledger.dead_letters(&DeadQuery::default(), 10).await.unwrap().len(), 2);

    let one = Reopen { shards: ReopenShards::These(vec![1]), ..all(id) };
    let reopened = ledger.reopen(&one, T0 + 10).await.unwrap().unwrap();
    assert_eq!((reopened.shards.as_slice(), reopened.letters), ([attempt(id, 1, 1)].as_slice(), 1));
    let row = ledger.execution(id).await.unwrap().unwrap();
    assert_eq!((row.phase, row.failed, row.succeeded, row.ended_ms), (execution::Phase::Running, 1, 2, None));
    // The other one while the first waits: no second execution, and no second round for the first.
    let reopened = ledger.reopen(&all(id), T0 + 20).await.unwrap().unwrap();
    assert_eq!(reopened.shards, [attempt(id, 2, 1)]);
    assert_eq!(ledger.reopen(&all(id), T0 + 30).await.unwrap(), Err(Refused::NothingFailed(id)));
    let due: Vec<_> = ledger.redispatch_due(T0, &[], 10).await.unwrap().iter().map(|d| d.attempt).collect();
    assert!(due.len() == 2 && due.contains(&attempt(id, 1, 2)) && due.contains(&attempt(id, 2, 2)), "{due:?}");

    // The late end of the old round is refused; the new attempt begins where the old one got to, with all its tries.
    let late = ledger.record(me, &[success(attempt(id, 1, 1))], T0).await.unwrap();
    assert_eq!(late, [Err(Rejection::StaleAttempt { named: 1, current: 2 })]);
    let claimed = ledger.claim(me, &[attempt(id, 1, 2)], T0).await.unwrap().remove(0).unwrap();
    assert_eq!(claimed.checkpoint, Some(Checkpoint::Number(40)));
    ledger.record(me, &[failure(attempt(id, 1, 2))], T0).await.unwrap();
    let shard = ledger.shards(id, 1, 1).await.unwrap().remove(0);
    assert_eq!((shard.phase, shard.attempt, shard.failures), (Phase::Pending, 3, 1), "it has tries left");
    ledger.claim(me, &[attempt(id, 1, 3), attempt(id, 2, 2)], T0 + 60_000).await.unwrap();
    let ended = ledger.record(me, &[success(attempt(id, 1, 3)), success(attempt(id, 2, 2))], T0).await.unwrap();
    assert_eq!(ended[1].unwrap().execution_ended, Some(execution::Phase::Success));
    invariants::check_tally(&ledger.tally(id).await.unwrap().0).unwrap();

    let rounds = ledger.reopenings(id).await.unwrap();
    let words: Vec<_> = rounds.iter().map(|r| (r.round, r.who.as_str(), r.reason.as_deref(), r.shards)).collect();
    assert_eq!(words, [(1, "ops", Some("fixed"), 1), (2, "ops", Some("fixed"), 1)]);
    let history = ledger.attempts_of(ShardRef { execution: id, index: 1 }, 10).await.unwrap();
    let history: Vec<_> = history.iter().map(|a| (a.attempt, a.outcome.as_str())).collect();
    assert_eq!(history, [(1, "failed"), (2, "failed"), (3, "success")]);
    assert_eq!(ledger.reopen(&all(id), T0).await.unwrap(), Err(Refused::Ended(id, execution::Phase::Success)));
}

async fn what_may_not_run_again_is_refused_with_a_reason(world: World) {
    let ledger = &world.ledger;
    let (epoch, job, id) = fired(ledger, 2).await;
    let unknown = ExecutionId(uuid::Uuid::from_u128(1));
    assert_eq!(ledger.reopen(&all(unknown), T0).await.unwrap(), Err(Refused::NoSuchExecution(unknown)));
    assert_eq!(ledger.reopen(&all(id), T0).await.unwrap(), Err(Refused::NothingFailed(id)));
    ran(ledger, id, 0..2, &[1], 1).await;
    let named = |shards: &[u32]| Reopen { shards: ReopenShards::These(shards.to_vec()), ..all(id) };
    let well = Err(Refused::NotFailed { index: 0, found: Some(Phase::Success) });
    assert_eq!(ledger.reopen(&named(&[1, 0]), T0).await.unwrap(), well, "and nothing of it is done");
    assert_eq!(ledger.reopen(&named(&[7]), T0).await.unwrap(), Err(Refused::NotFailed { index: 7, found: None }));
    assert_eq!(ledger.execution(id).await.unwrap().unwrap().phase, execution::Phase::Failed);
    assert!(ledger.reopenings(id).await.unwrap().is_empty());

    // Another execution of the job runs, and the job's policy (the default) is skip.
    let other = new_execution(1, OverlapPolicy::Allow);
    let by = other.id;
    assert_eq!(ledger.fire(epoch, &[intent(job, "other", other)], T0).await.unwrap(), [FireOutcome::Fired(by)]);
    let busy = Err(Refused::Busy { by, policy: OverlapPolicy::Skip });
    assert_eq!(ledger.reopen(&all(id), T0).await.unwrap(), busy);
    ledger.cancel(by, "ops", "in the way", T0).await.unwrap();
    assert!(ledger.reopen(&all(by), T0).await.unwrap().unwrap_err().to_string().contains("cancelled"));
    ledger.reopen(&all(id), T0).await.unwrap().unwrap();
    // And it counts as running for the next firing.
    let next = new_execution(1, OverlapPolicy::Skip);
    let outcome = ledger.fire(epoch, &[intent(job, "next", next)], T0).await.unwrap().remove(0);
    assert!(matches!(outcome, FireOutcome::Skipped { blocking: Some(blocking), .. } if blocking == id), "{outcome:?}");
}

async fn a_batch_is_bounded_and_goes_on(world: World) {
    let ledger = &world.ledger;
    let shards = u32::try_from(shardcron_domain::limits::REOPEN_BATCH).unwrap() + 3;
    let (_, _, id) = fired(ledger, shards).await;
    let bad: Vec<u32> = (0..shards).collect();
    for from in (0..shards).step_by(500) {
        let to = (from + 500).min(shards);
        ran(ledger, id, from..to, &bad[from as usize..to as usize], 1).await;
    }
    let first = ledger.reopen(&all(id), T0).await.unwrap().unwrap();
    assert_eq!((first.shards.len(), first.next), (shards as usize - 3, Some(shards - 3)));
    let rest = Reopen { shards: ReopenShards::Failed { from: shards - 3 }, ..all(id) };
    let rest = ledger.reopen(&rest, T0).await.unwrap().unwrap();
    assert_eq!((rest.shards.len(), rest.next, rest.letters), (3, None, 3));
    let too_many = Reopen { shards: ReopenShards::These(bad), ..all(id) };
    assert!(matches!(ledger.reopen(&too_many, T0).await, Err(StoreError::Invalid(_))));
}

/// A job that follows, as the leader's round would ask for its firing.
fn follows(job: shardcron_domain::JobId, of: ExecutionId, watch: i64, action: FireAction) -> FireIntent {
    let extra = FireExtra { watches: vec![watch], ..FireExtra::default() };
    FireIntent { action, extra, ..intent(job, &format!("after:{of}"), new_execution(1, OverlapPolicy::Allow)) }
}

async fn a_follower_hears_of_the_new_end_once(world: World) {
    let ledger = &world.ledger;
    let text = "[job.job]\nhandler = { rust = \"noop\" }\n[job.down]\nhandler = { rust = \"noop\" }\nafter = [\"job\"]\n\
                [job.any]\nhandler = { rust = \"noop\" }\nafter = { jobs = [\"job\"], on = \"end\" }\n";
    let specs = shardcron_domain::jobfile::parse(text).unwrap();
    let specs: Vec<_> = specs.into_iter().map(|spec| (spec, None)).collect();
    ledger.apply_jobs(&specs, "test", T0).await.unwrap();
    let job = async |name: &str| ledger.job(name).await.unwrap().unwrap().id;
    let (up, down, any) = (job("job").await, job("down").await, job("any").await);
    let epoch = ledger.begin_epoch("test", T0).await.unwrap();
    let new = new_execution(1, OverlapPolicy::Allow);
    let id = new.id;
    ledger.fire(epoch, &[intent(up, "key", new)], T0).await.unwrap();
    ledger.mark_dispatched(epoch, &[(id, 1)], &[]).await.unwrap();
    ran(ledger, id, 0..1, &[0], 1).await;
    let note = async |of| ledger.watches(10).await.unwrap().into_iter().find(|w| w.job == of).map(|w| (w.id, w.phase));
    let reason = format!("execution {id} of upstream job 'job' ended failed, and the job follows a success only");
    let skip = FireAction::Record { kind: shardcron_domain::firing::DecisionKind::SkippedUpstream, reason };
    let (watch, _) = note(down).await.unwrap();
    ledger.fire(epoch, &[follows(down, id, watch, skip)], T0).await.unwrap();
    let (watch, _) = note(any).await.unwrap();
    let fire = || FireAction::Fire(new_execution(1, OverlapPolicy::Allow));
    let fired = ledger.fire(epoch, &[follows(any, id, watch, fire())], T0).await.unwrap();
    assert!(matches!(fired[0], FireOutcome::Fired(_)));
    assert!(ledger.watches(10).await.unwrap().is_empty());

    let reopened = ledger.reopen(&all(id), T0 + 5).await.unwrap().unwrap();
    assert_eq!(reopened.followers, 1, "who has fired for this execution does not fire again");
    let decision = ledger.decision(down, &format!("after:{id}")).await.unwrap().unwrap();
    assert!(decision.reason.unwrap().contains("runs again since"));
    ran(ledger, id, 0..1, &[], 2).await;
    let (watch, phase) = note(down).await.unwrap();
    assert_eq!((phase, note(any).await), (execution::Phase::Success, None));
    let wanted = follows(down, id, watch, fire());
    let fired = ledger.fire(epoch, std::slice::from_ref(&wanted), T0 + 9).await.unwrap().remove(0);
    let FireOutcome::Fired(follower) = fired else { panic!("{fired:?}") };
    let again = FireIntent { action: fire(), ..wanted };
    assert_eq!(ledger.fire(epoch, &[again], T0 + 9).await.unwrap(), [FireOutcome::Duplicate(Some(follower))]);
}

async fn dead_letters_are_found_and_settled(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 3).await;
    ran(ledger, id, 0..3, &[0, 1, 2], 1).await;
    ledger.put_dead_message("unknown job 'jbo'", b"{\"job\": \"jbo\"}", T0).await.unwrap();
    let newest = ledger.dead_letters(&DeadQuery::default(), 10).await.unwrap();
    assert_eq!((newest.len(), newest[0].kind.as_str(), newest[0].job.as_deref()), (4, "message", None));
    let of_job = DeadQuery { job: Some("job".into()), after: Some(0), ..DeadQuery::default() };
    let shards = ledger.dead_letters(&of_job, 2).await.unwrap();
    assert_eq!(shards.iter().map(|d| d.shard).collect::<Vec<_>>(), [Some((id, 0)), Some((id, 1))]);
    assert!(shards[0].reason.contains("no such account"));
    let on = DeadQuery { after: Some(shards[1].id), ..of_job };
    assert_eq!(ledger.dead_letters(&on, 2).await.unwrap().len(), 1);
    let first = shards[0].id;
    let range = DeadQuery { ids: vec![(first, first + 1)], kind: Some(DeadKind::Shard), ..DeadQuery::default() };
    assert_eq!(ledger.dead_letters(&range, 10).await.unwrap().len(), 2);
    let ids = vec![first, newest[0].id, 9_999];
    let settled = DeadSettled { ids, action: "dead_drop", who: "ops".into(), why: "the account is closed".into() };
    assert_eq!(ledger.settle_dead(&settled, T0).await.unwrap(), [first, newest[0].id]);
    assert_eq!(ledger.settle_dead(&settled, T0).await.unwrap(), Vec::<i64>::new(), "and only once");
    assert_eq!(ledger.dead_letters(&DeadQuery::default(), 10).await.unwrap().len(), 2);
}
