//! Random events, applied to the domain's machine and to each adapter: the same verdicts, and the same row after every step.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::reopen::Refused;
use shardcron_domain::shard::{
    Checkpoint, Effect, Event, FailureClass, Phase, ReclaimReason, Rejection, Shard, TakeOverReason, apply,
};
use shardcron_domain::{ExecutionId, Incarnation, invariants};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(the_adapter_does_what_the_domain_says, batches_do_what_single_events_do);

const TRIES: u32 = 3;

fn seed() -> u64 {
    let seed = std::env::var("SHARDCRON_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    println!("SHARDCRON_SEED={seed}");
    seed
}

fn checkpoint(rng: &mut StdRng) -> Option<Checkpoint> {
    match rng.random_range(0..5) {
        0 => None,
        1..=3 => Some(Checkpoint::Number(rng.random_range(0..4))),
        _ => Some(Checkpoint::Text(["a", "a ", "1"][rng.random_range(0..3)].into())),
    }
}

/// Mostly what may happen next, sometimes anything.
fn event(rng: &mut StdRng, shard: &Shard, workers: &[Incarnation; 2]) -> Event {
    let likely = rng.random_bool(0.7);
    let attempt = if likely { shard.attempt } else { rng.random_range(0..5) };
    let owner = shard.owner.filter(|_| likely).unwrap_or(workers[rng.random_range(0..2)]);
    let class = [
        FailureClass::Transient,
        FailureClass::Timeout,
        FailureClass::Permanent,
        FailureClass::NotBefore { wait_ms: 900 },
    ][rng.random_range(0..4)];
    match rng.random_range(0..14) {
        0..=3 => Event::Claim { attempt, owner },
        4..=5 => {
            let from = if likely { shard.checkpoint.clone() } else { checkpoint(rng) };
            let to = checkpoint(rng).unwrap_or(Checkpoint::Number(1));
            Event::Advance { attempt, owner, from, to }
        }
        6 => Event::Succeed { attempt, owner },
        7..=8 => Event::Fail { attempt, owner, class, seed: rng.random() },
        9 => Event::Reclaim { attempt, owner, reason: ReclaimReason::Hung },
        10 => Event::HandBack { attempt, owner },
        // Only of the attempt that is there: what a message of an earlier one may do has its own test.
        11 => {
            let by = workers[rng.random_range(0..2)];
            Event::TakeOver { attempt: shard.attempt, owner, by, reason: TakeOverReason::Redelivered }
        }
        // Whatever the attempt is: a person names the shard.
        12 => Event::Reopen { attempt: shard.attempt },
        _ if rng.random_bool(0.1) => Event::Cancel,
        _ => Event::Claim { attempt, owner },
    }
}

struct Subject {
    ledger: SqlLedger,
    epoch: shardcron_domain::Epoch,
    id: ExecutionId,
}

impl Subject {
    /// The event at the adapter.
    async fn put(&self, index: u32, event: &Event, now: i64) -> Result<(), Rejection> {
        let at = |n: u32| attempt(self.id, index, n);
        let retry = policy(TRIES);
        let one = |mut v: Verdicts<Recorded>| v.remove(0).map(drop);
        let record = async |owner: Incarnation, attempt: u32, outcome: AttemptOutcome, seed: u64| {
            let ended = Ended { seed, retry, ..end(at(attempt), outcome) };
            self.ledger.record(owner, &[ended], now).await.unwrap().remove(0).map(drop)
        };
        match event {
            Event::Claim { attempt, owner } => {
                self.ledger.claim(*owner, &[at(*attempt)], now).await.unwrap().remove(0).map(drop)
            }
            Event::Advance { attempt, owner, from, to } => {
                self.ledger.advance(*owner, at(*attempt), from.clone(), to.clone(), 1).await.unwrap()
            }
            Event::Succeed { attempt, owner } => {
                record(*owner, *attempt, AttemptOutcome::Success { rows: None, summary: None }, 0).await
            }
            Event::Fail { attempt, owner, class, seed } => {
                let outcome = AttemptOutcome::Failure { class: *class, message: "x".into() };
                record(*owner, *attempt, outcome, *seed).await
            }
            Event::HandBack { attempt, owner } => record(*owner, *attempt, AttemptOutcome::HandBack, 0).await,
            Event::TakeOver { attempt, owner, by, reason } => {
                let wanted = TakeOver { message: at(*attempt), from: Some(*owner), reason: *reason, retry };
                self.ledger.take_over(*by, &[wanted], now).await.unwrap().remove(0).map(drop)
            }
            Event::Reclaim { attempt, owner, reason } => {
                let reclaim = Reclaim { attempt: at(*attempt), owner: *owner, reason: *reason };
                one(self.ledger.reclaim(self.epoch, &[(reclaim, retry)], now).await.unwrap())
            }
            Event::Reopen { .. } => {
                let shards = ReopenShards::These(vec![index]);
                let wanted = Reopen { execution: self.id, shards, who: "test".into(), reason: None };
                match self.ledger.reopen(&wanted, now).await.unwrap() {
                    Ok(reopened) => {
                        assert_eq!(reopened.shards.len(), 1);
                        Ok(())
                    }
                    Err(Refused::NotFailed { found: Some(Phase::Pending | Phase::Running), .. }) => {
                        Err(Rejection::NotEnded)
                    }
                    Err(Refused::NotFailed { found: Some(phase), .. }) => Err(Rejection::Terminal(phase)),
                    // None of the execution has failed: nor has this one.
                    Err(Refused::NothingFailed(_)) => {
                        let row = self.ledger.shards(self.id, index, 1).await.unwrap().remove(0);
                        Err(if row.phase.is_terminal() { Rejection::Terminal(row.phase) } else { Rejection::NotEnded })
                    }
                    Err(refused) => panic!("{refused}"),
                }
            }
            Event::Abandon | Event::Cancel => unreachable!("it is no worker's"),
        }
    }

    async fn check(&self, index: u32, shard: &Shard, told: &str) {
        let row = self.ledger.shards(self.id, index, 1).await.unwrap().remove(0);
        let seen = (row.phase, row.attempt, row.failures, row.owner, &row.checkpoint);
        assert_eq!(seen, (shard.phase, shard.attempt, shard.failures, shard.owner, &shard.checkpoint), "{told}");
    }
}

/// Whether the event is an advance that would have brought the shard to where it stands.
fn stands_already(shard: &Shard, event: &Event) -> bool {
    let Event::Advance { from, to, .. } = event else { return false };
    let before = Shard { checkpoint: from.clone(), ..shard.clone() };
    shard.checkpoint.as_ref() == Some(to) && apply(&before, event, &policy(TRIES), 0).is_ok()
}

use shardcron_store::ledger::Verdicts;
type Result<T, E> = std::result::Result<T, E>;

async fn the_adapter_does_what_the_domain_says(world: World) {
    let mut rng = StdRng::seed_from_u64(seed());
    let shards = 40;
    let (epoch, _, id) = fired(&world.ledger, shards).await;
    let subject = Subject { ledger: world.ledger.clone(), epoch, id };
    let workers = [worker(), worker()];
    for index in 0..shards {
        let mut shard = Shard::new();
        let mut now = T0;
        for step in 0..14 {
            now += rng.random_range(0..1_500);
            let event = event(&mut rng, &shard, &workers);
            if event == Event::Cancel {
                continue;
            }
            let told = format!("shard {index}, step {step}: {event:?} at {shard:?}");
            let expected = match apply(&shard, &event, &policy(TRIES), now) {
                Ok((next, effect)) => {
                    invariants::check_event(&shard, &event, &next).unwrap();
                    shard = next;
                    Ok(effect)
                }
                // The one difference that the port asks for: the answer to an earlier claim may have been lost.
                Err(Rejection::AlreadyRunning(owner)) if matches!(event, Event::Claim { owner: o, .. } if o == owner) => {
                    Ok(None)
                }
                // And its twin: the answer to an earlier advance to this very checkpoint may have been lost.
                Err(Rejection::CheckpointGap) if stands_already(&shard, &event) => Ok(None),
                Err(rejection) => Err(rejection),
            };
            assert_eq!(subject.put(index, &event, now).await, expected.map(drop), "{told}");
            subject.check(index, &shard, &told).await;
            let due = world.ledger.redispatch_due(i64::MAX, &[], 10_000).await.unwrap();
            let waiting = due.iter().find(|d| d.attempt.index == index).map(|d| d.attempt.attempt);
            if let Ok(Some(Effect::Redispatch { .. })) = expected {
                assert_eq!(waiting, Some(shard.attempt), "{told}");
            }
        }
    }
    let (tally, _) = world.ledger.tally(id).await.unwrap();
    assert_eq!(tally.terminal, tally.counted);
    assert_eq!(tally.recorded_twice, 0);
    world.ledger.cancel(id, "test", "test", T0).await.unwrap();
    invariants::check_tally(&world.ledger.tally(id).await.unwrap().0).unwrap();
}

/// Whole batches of ends, with doubles and strangers in them, against the same ends applied one by one to the machine.
async fn batches_do_what_single_events_do(world: World) {
    let mut rng = StdRng::seed_from_u64(seed());
    let (_, _, id) = fired(&world.ledger, 64).await;
    let workers = [worker(), worker()];
    let mut shards: Vec<Shard> = vec![Shard::new(); 64];
    let mut now = T0;
    for round in 0..25 {
        now += 2_000;
        for owner in workers {
            let batch: Vec<_> = (0..rng.random_range(1..20))
                .map(|_| {
                    let index = rng.random_range(0..64_u32);
                    let current = shards[index as usize].attempt;
                    attempt(id, index, if rng.random_bool(0.9) { current } else { current + 1 })
                })
                .collect();
            let answers = world.ledger.claim(owner, &batch, now).await.unwrap();
            let mut given = std::collections::HashSet::new();
            for (at, answer) in batch.iter().zip(answers) {
                let shard = &mut shards[at.index as usize];
                let mine = shard.owner == Some(owner) && shard.attempt == at.attempt;
                let expected = match apply(shard, &Event::Claim { attempt: at.attempt, owner }, &policy(TRIES), now) {
                    Ok((next, _)) => {
                        *shard = next;
                        given.insert(*at);
                        Ok(shard.checkpoint.clone())
                    }
                    Err(_) if mine && given.insert(*at) => Ok(shard.checkpoint.clone()),
                    Err(rejection) => Err(rejection),
                };
                assert_eq!(answer.map(|c| c.checkpoint), expected, "round {round}: {at} by {owner}");
            }
            let ends: Vec<_> = (0..rng.random_range(1..20))
                .map(|_| {
                    let index = rng.random_range(0..64_u32);
                    let at = attempt(id, index, shards[index as usize].attempt);
                    Ended { retry: policy(TRIES), ..if rng.random_bool(0.6) { success(at) } else { failure(at) } }
                })
                .collect();
            let answers = world.ledger.record(owner, &ends, now).await.unwrap();
            for (ended, answer) in ends.iter().zip(answers) {
                let shard = &mut shards[ended.attempt.index as usize];
                let attempt = ended.attempt.attempt;
                let event = match ended.outcome {
                    AttemptOutcome::Success { .. } => Event::Succeed { attempt, owner },
                    _ => Event::Fail { attempt, owner, class: FailureClass::Transient, seed: ended.seed },
                };
                let expected = apply(shard, &event, &policy(TRIES), now).map(|(next, _)| {
                    *shard = next;
                    shard.phase
                });
                assert_eq!(answer.map(|r| r.phase), expected, "round {round}: {}", ended.attempt);
            }
        }
    }
    for (row, shard) in world.ledger.shards(id, 0, 64).await.unwrap().iter().zip(&shards) {
        assert_eq!(
            (row.phase, row.attempt, row.failures, row.owner),
            (shard.phase, shard.attempt, shard.failures, shard.owner)
        );
    }
    let (tally, _) = world.ledger.tally(id).await.unwrap();
    assert_eq!((tally.terminal, tally.recorded_twice), (tally.counted, 0));
}
