//! What must be true, told by every call that the ledger answered, in the ledger's own order.
//!
//! A second ledger of the domain's machines, beside the real one: each answer of the SQL is compared with what `shard::apply` and
//! `execution::apply` say, and each accepted step with the invariants.

use super::life::LifeId;
use super::sharding::Key;
use shardcron_domain::invariants::{self, InvariantId, Violation};
use shardcron_domain::job::{OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::{ShardPlan, check_cover};
use shardcron_domain::shard::{self, Checkpoint, Effect, Event, Phase, Rejection, Shard, apply};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, execution};
use shardcron_store::{AttemptOutcome, Ended, FireAction, FireIntent, FireOutcome, Recorded, TakeOver, TakenOver};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// An invariant.
    Invariant(Violation),
    /// The ledger and the domain's machines disagree.
    Rules(String),
    /// What the processes said of themselves does not keep the rules.
    Trace(String),
    /// A process ended itself for a fault of its own.
    Fatal(String),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Invariant(violation) => violation.fmt(f),
            Broken::Rules(seen) => write!(f, "the ledger and the rules disagree: {seen}"),
            Broken::Trace(deviation) => write!(f, "the trace does not conform: {deviation}"),
            Broken::Fatal(why) => write!(f, "a process ended itself: {why}"),
        }
    }
}

impl From<Violation> for Broken {
    fn from(violation: Violation) -> Self {
        Broken::Invariant(violation)
    }
}

pub(crate) type Checked = Result<(), Broken>;

fn broken_cover(id: ExecutionId, seen: String) -> Broken {
    Violation { id: InvariantId::S5, seen: format!("{id}: {seen}") }.into()
}

pub(super) fn broken(id: InvariantId, seen: String) -> Checked {
    Err(Violation { id, seen }.into())
}

pub(crate) struct Row {
    pub(crate) shard: Shard,
    claimed_ms: i64,
}

impl Row {
    pub(super) fn fresh() -> Self {
        Row { shard: Shard::new(), claimed_ms: 0 }
    }
}

pub(crate) struct Run {
    pub(crate) job: JobId,
    pub(crate) nominal_ms: i64,
    overlap: OverlapPolicy,
    pub(super) plan: ShardPlan,
    /// What its first shard emitted, if it is a map.
    pub(super) emitted: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) counters: execution::Execution,
}

#[derive(Default)]
pub(crate) struct Oracle {
    epoch: i64,
    /// Who holds the lease by its store, and until when.
    lease: Option<(LifeId, i64)>,
    lease_forgotten_ms: Option<i64>,
    pub(crate) runs: BTreeMap<ExecutionId, Run>,
    /// Decided fire keys, with the execution that was made.
    keys: BTreeMap<(JobId, String), Option<ExecutionId>>,
    /// Fire keys that wait, with their instants.
    waiting: BTreeMap<(JobId, String), i64>,
    /// Decided instants of the schedules.
    pub(crate) decided: BTreeSet<(JobId, i64)>,
    /// Who spoke in which process life.
    owners: BTreeMap<LifeId, Incarnation>,
    pub(crate) refused: u64,
    pub(crate) results: u64,
    ack_horizon_ms: i64,
    /// What attempts said that they emitted.
    pub(super) emitting: BTreeMap<AttemptRef, Vec<String>>,
    /// Records whose effects outside were done.
    pub(super) told: BTreeSet<Key>,
    /// Records that were given up.
    pub(super) skipped: BTreeSet<Key>,
}

impl Oracle {
    pub(crate) fn new(ack_horizon_ms: i64) -> Self {
        Oracle { ack_horizon_ms, ..Oracle::default() }
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.epoch)
    }

    pub(crate) fn attempt_now(&self, at: AttemptRef) -> u32 {
        self.row(at).map_or(at.attempt, |row| row.shard.attempt)
    }

    pub(super) fn row(&self, at: AttemptRef) -> Option<&Row> {
        self.runs.get(&at.execution)?.rows.get(at.index as usize)
    }

    fn row_mut(&mut self, at: AttemptRef) -> Option<&mut Row> {
        self.runs.get_mut(&at.execution)?.rows.get_mut(at.index as usize)
    }

    // ---- leaders ------------------------------------------------------------------------------------------------------

    pub(crate) fn epoch_begun(&mut self, epoch: Epoch) -> Checked {
        if epoch.0 <= self.epoch {
            return broken(InvariantId::L1, format!("epoch {epoch} begins after epoch {}", self.epoch));
        }
        self.epoch = epoch.0;
        Ok(())
    }

    pub(crate) fn led(&self, epoch: Epoch) -> Checked {
        Ok(invariants::check_epoch(epoch, self.epoch())?)
    }

    pub(crate) fn lease_taken(&mut self, who: LifeId, until_ms: i64) {
        self.lease = Some((who, until_ms));
    }

    pub(crate) fn lease_released(&mut self, who: LifeId) {
        self.lease = self.lease.filter(|(holder, _)| *holder != who);
    }

    pub(crate) fn lease_forgotten(&mut self, now_ms: i64) {
        self.lease = None;
        self.lease_forgotten_ms = Some(now_ms);
    }

    /// L2, where the lease store kept its memory.
    pub(crate) fn acts(&self, who: LifeId, now_ms: i64, ttl_ms: i64) -> Checked {
        if self.lease_forgotten_ms.is_some_and(|at| now_ms - at <= ttl_ms) {
            return Ok(());
        }
        let ends_ms = self.lease.filter(|(holder, _)| *holder == who).map(|(_, until)| until);
        Ok(invariants::check_trust(now_ms, ends_ms)?)
    }

    pub(crate) fn fired(&mut self, epoch: Epoch, intents: &[FireIntent], outcomes: &[FireOutcome]) -> Checked {
        self.led(epoch)?;
        for (intent, outcome) in intents.iter().zip(outcomes) {
            let key = (intent.job, intent.fire_key.clone());
            let waited = match outcome {
                FireOutcome::Fired(_) | FireOutcome::Skipped { .. } => self.waiting.remove(&key).is_some(),
                _ => false,
            };
            match (outcome, &intent.action) {
                (FireOutcome::Fired(id), FireAction::Fire(new)) => {
                    match self.keys.get(&key) {
                        // The answer to an earlier call was lost, and this is the same execution.
                        Some(Some(known)) if known == id => continue,
                        Some(None) if waited => {}
                        Some(_) => invariants::check_fire_key(&intent.fire_key, 2)?,
                        None => {}
                    }
                    self.keys.insert(key, Some(*id));
                    let shards = new.plan.count();
                    check_cover(&new.plan).map_err(|seen| broken_cover(*id, seen.to_string()))?;
                    let run = Run {
                        job: intent.job,
                        nominal_ms: intent.nominal_ms,
                        overlap: new.overlap,
                        plan: new.plan.clone(),
                        emitted: Vec::new(),
                        rows: (0..shards).map(|_| Row::fresh()).collect(),
                        counters: execution::Execution::new(shards),
                    };
                    self.runs.insert(*id, run);
                    self.check_overlap(intent.job, new.overlap)?;
                }
                (FireOutcome::Skipped { .. }, _) => {
                    self.keys.insert(key, None);
                }
                (FireOutcome::Duplicate(_), _) if !self.keys.contains_key(&key) => {
                    return Err(Broken::Rules(format!("{} is a duplicate of nothing", intent.fire_key)));
                }
                (FireOutcome::Duplicate(_), _) => {}
                (FireOutcome::Waiting { .. }, _) => {
                    self.waiting.insert(key.clone(), intent.nominal_ms);
                    self.keys.insert(key, None);
                }
                (FireOutcome::Stale | FireOutcome::Busy | FireOutcome::NotYet, _) => continue,
                (FireOutcome::Fired(id), FireAction::Record { .. } | FireAction::Hold { .. }) => {
                    return Err(Broken::Rules(format!("{id} was made although it was not to be")));
                }
            }
            if intent.scheduled {
                self.decided.insert((intent.job, intent.nominal_ms));
            }
        }
        Ok(())
    }

    fn check_overlap(&self, job: JobId, policy: OverlapPolicy) -> Checked {
        let active = self.runs.values().filter(|r| r.job == job && !r.counters.phase.is_terminal()).count();
        Ok(invariants::check_overlap(policy, active)?)
    }

    /// A1 for triggers: who is answered has been decided.
    pub(crate) fn trigger_settled(&self, fire_key: &str) -> Checked {
        if self.keys.keys().any(|(_, key)| key == fire_key) {
            return Ok(());
        }
        broken(InvariantId::A1, format!("the trigger {fire_key} was settled before it was decided"))
    }

    // ---- shards -------------------------------------------------------------------------------------------------------

    /// One event on one shard, and what the ledger said to it. `known`: the call may be the second of two, and finds what the first
    /// one did.
    pub(super) fn step(
        &mut self,
        at: AttemptRef,
        event: &Event,
        (policy, now_ms): (&RetryPolicy, i64),
        (verdict, known): (Result<(), &Rejection>, bool),
    ) -> Checked {
        let Some(run) = self.runs.get_mut(&at.execution) else {
            return match verdict {
                Ok(()) => Err(Broken::Rules(format!("{at} is of an execution that was never fired"))),
                Err(_) => Ok(()),
            };
        };
        let Some(row) = run.rows.get_mut(at.index as usize) else {
            return Err(Broken::Rules(format!("{at} is beyond its plan")));
        };
        match (apply(&row.shard, event, policy, now_ms), verdict) {
            (Ok((next, effect)), Ok(())) => {
                invariants::check_accepted(at.attempt, &row.shard)?;
                invariants::check_event(&row.shard, event, &next)?;
                row.shard = next;
                if let Some(Effect::Settle(phase @ (Phase::Success | Phase::Failed))) = effect {
                    let (succeeded, failed) = (u32::from(phase == Phase::Success), u32::from(phase == Phase::Failed));
                    self.results += u64::from(succeeded);
                    run.counters = execution::apply(&run.counters, execution::Event::Settled { succeeded, failed })
                        .map_err(|e| Broken::Rules(format!("{at}: {e}")))?;
                    // A reducing shard is cancelled when another has failed.
                    if let (1, Some(last)) = (run.counters.cancelled, run.rows.last_mut()) {
                        last.shard.phase = Phase::Cancelled;
                    }
                }
                Ok(())
            }
            (Err(_), Ok(())) if known => Ok(()),
            (Err(refusal), Ok(())) => {
                invariants::check_accepted(at.attempt, &row.shard)?;
                Err(Broken::Rules(format!("{at}: {event:?} was accepted, and {refusal}: {:?}", row.shard)))
            }
            (Err(_), Err(_)) => {
                self.refused += 1;
                Ok(())
            }
            (Ok(_), Err(refusal)) => {
                Err(Broken::Rules(format!("{at}: {event:?} was refused ({refusal}): {:?}", row.shard)))
            }
        }
    }

    pub(crate) fn claimed<T>(
        &mut self,
        who: (LifeId, Incarnation),
        attempts: &[AttemptRef],
        verdicts: &[Result<T, Rejection>],
        (now_ms, true_ms): (i64, i64),
    ) -> Checked {
        let (life, owner) = who;
        self.owners.insert(life, owner);
        for (at, verdict) in attempts.iter().zip(verdicts) {
            let event = Event::Claim { attempt: at.attempt, owner };
            let mine = |row: &Row| row.shard.owner == Some(owner) && row.shard.attempt == at.attempt;
            let known = self.row(*at).is_some_and(mine);
            self.step(*at, &event, (&RetryPolicy::default(), now_ms), (verdict.as_ref().map(|_| ()), known))?;
            if verdict.is_ok() {
                self.may_run(*at, owner)?;
            }
            if let (Ok(_), false, Some(row)) = (verdict, known, self.row_mut(*at)) {
                row.claimed_ms = true_ms;
            }
        }
        Ok(())
    }

    pub(crate) fn recorded(
        &mut self,
        owner: Incarnation,
        ends: &[Ended],
        verdicts: &[Result<Recorded, Rejection>],
        now_ms: i64,
    ) -> Checked {
        for (end, verdict) in ends.iter().zip(verdicts) {
            let (attempt, at) = (end.attempt.attempt, end.attempt);
            let event = match &end.outcome {
                AttemptOutcome::Success { .. } => Event::Succeed { attempt, owner },
                AttemptOutcome::Failure { class, .. } => Event::Fail { attempt, owner, class: *class, seed: end.seed },
                AttemptOutcome::HandBack => Event::HandBack { attempt, owner },
            };
            self.step(at, &event, (&end.retry, now_ms), (verdict.as_ref().map(|_| ()), false))?;
            self.same_phase(at, verdict.as_ref().ok())?;
        }
        Ok(())
    }

    pub(crate) fn reclaimed(
        &mut self,
        epoch: Epoch,
        reclaims: &[(shardcron_domain::recovery::Reclaim, RetryPolicy)],
        verdicts: &[Result<Recorded, Rejection>],
        now_ms: i64,
    ) -> Checked {
        self.led(epoch)?;
        for ((reclaim, policy), verdict) in reclaims.iter().zip(verdicts) {
            let at = reclaim.attempt;
            let event = Event::Reclaim { attempt: at.attempt, owner: reclaim.owner, reason: reclaim.reason };
            self.step(at, &event, (policy, now_ms), (verdict.as_ref().map(|_| ()), false))?;
            self.same_phase(at, verdict.as_ref().ok())?;
        }
        Ok(())
    }

    /// What a refused take-over meant depends on the message's past, which the ledger alone knows; what an accepted one did does not.
    pub(crate) fn taken_over(
        &mut self,
        (life, by): (LifeId, Incarnation),
        wanted: &[TakeOver],
        verdicts: &[Result<TakenOver, Rejection>],
        (now_ms, true_ms): (i64, i64),
    ) -> Checked {
        self.owners.insert(life, by);
        for (entry, verdict) in wanted.iter().zip(verdicts) {
            let (at, Ok(taken)) = (entry.message, verdict) else { continue };
            let Some(shard) = self.row(at).map(|row| row.shard.clone()) else { continue };
            let known = match taken {
                TakenOver::Running { attempt, .. } => shard.owner == Some(by) && shard.attempt == attempt.attempt,
                TakenOver::Ended(_) => false,
            };
            let owner = shard.owner.unwrap_or(by);
            let event = Event::TakeOver { attempt: shard.attempt, owner, by, reason: entry.reason };
            self.step(at, &event, (&entry.retry, now_ms), (Ok(()), known))?;
            self.may_run(at, by)?;
            match taken {
                TakenOver::Ended(recorded) => self.same_phase(at, Some(recorded))?,
                TakenOver::Running { .. } => {
                    if let (false, Some(row)) = (known, self.row_mut(at)) {
                        row.claimed_ms = true_ms;
                    }
                }
            }
        }
        Ok(())
    }

    fn same_phase(&self, at: AttemptRef, recorded: Option<&Recorded>) -> Checked {
        match (recorded, self.row(at)) {
            (Some(recorded), Some(row)) if recorded.phase != row.shard.phase => Err(Broken::Rules(format!(
                "{at} is {} and said to be {}",
                row.shard.phase.word(),
                recorded.phase.word()
            ))),
            _ => Ok(()),
        }
    }

    pub(crate) fn advanced(
        &mut self,
        owner: Incarnation,
        at: AttemptRef,
        (from, to): (Option<Checkpoint>, Checkpoint),
        verdict: Result<(), &Rejection>,
    ) -> Checked {
        let known = self.row(at).is_some_and(|row| {
            row.shard.checkpoint.as_ref() == Some(&to)
                && row.shard.owner == Some(owner)
                && row.shard.attempt == at.attempt
        });
        let event = Event::Advance { attempt: at.attempt, owner, from, to };
        // The clock has no part in it.
        self.step(at, &event, (&RetryPolicy::default(), 0), (verdict, known))
    }

    pub(crate) fn cancelled(&mut self, id: ExecutionId) -> Checked {
        let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
        if run.counters.phase.is_terminal() {
            return Ok(());
        }
        run.counters = execution::apply(&run.counters, execution::Event::Cancel)
            .map_err(|e| Broken::Rules(format!("{id}: {e}")))?;
        for row in &mut run.rows {
            if let Ok((next, _)) = apply(&row.shard, &Event::Cancel, &RetryPolicy::default(), 0) {
                invariants::check_shard_step(&row.shard, &next)?;
                row.shard = next;
            }
        }
        Ok(())
    }

    /// Failed shards that a person sent back.
    pub(crate) fn reopened(&mut self, id: ExecutionId, shards: &[AttemptRef], now_ms: i64) -> Checked {
        for at in shards {
            let event = Event::Reopen { attempt: at.attempt };
            self.step(*at, &event, (&RetryPolicy::default(), now_ms), (Ok(()), false))?;
        }
        let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
        let shards = u32::try_from(shards.len()).unwrap_or(u32::MAX);
        run.counters = execution::apply(&run.counters, execution::Event::Reopen { shards })
            .map_err(|e| Broken::Rules(format!("{id}: {e}")))?;
        // A reducing shard that was cancelled waits again.
        if let (1.., Some(last)) = (run.counters.held, run.rows.last_mut()) {
            last.shard = Shard::new();
        }
        let (job, overlap) = (run.job, run.overlap);
        self.check_overlap(job, overlap)
    }

    /// A1.
    pub(crate) fn acked(&self, life: LifeId, at: AttemptRef, now_ms: i64) -> Checked {
        let Some(row) = self.row(at) else {
            return broken(InvariantId::A1, format!("{at} was acked, and the ledger has no such shard"));
        };
        let nobody = Incarnation(uuid::Uuid::nil());
        let owner = self.owners.get(&life).copied().unwrap_or(nobody);
        let past_horizon = now_ms - row.claimed_ms >= self.ack_horizon_ms;
        Ok(invariants::check_ack(&row.shard, at.attempt, owner, past_horizon)?)
    }

    // ---- the end ------------------------------------------------------------------------------------------------------

    /// The first shard of what was due by then that has not ended.
    pub(crate) fn unfinished(&self, until_ms: i64) -> Option<String> {
        if let Some(((job, key), _)) = self.waiting.iter().find(|(_, nominal_ms)| **nominal_ms <= until_ms) {
            return Some(format!("the firing {key} of job {job:?} waits"));
        }
        self.runs.iter().filter(|(_, run)| run.nominal_ms <= until_ms).find_map(|(id, run)| {
            let (index, row) = (0_u32..).zip(&run.rows).find(|(_, row)| !row.shard.phase.is_terminal())?;
            Some(format!("shard {id}/{index} is {:?}", row.shard))
        })
    }

    /// Whether the real ledger holds what this one does.
    pub(crate) fn compare(&self, id: ExecutionId, rows: &[shardcron_store::ShardRow]) -> Checked {
        let Some(run) = self.runs.get(&id) else {
            return Err(Broken::Rules(format!("execution {id} was never fired")));
        };
        for (index, row) in (0_u32..).zip(&run.rows) {
            let Some(real) = rows.iter().find(|r| r.index == index) else {
                // Rows are written before they are handed out; those of a cancelled execution may never be.
                if row.shard.phase == shard::Phase::Cancelled || row.shard == Shard::new() {
                    continue;
                }
                return Err(Broken::Rules(format!("shard {id}/{index} has no row")));
            };
            let same = real.phase == row.shard.phase
                && real.attempt == row.shard.attempt
                && real.failures == row.shard.failures
                && real.checkpoint == row.shard.checkpoint;
            if !same {
                return Err(Broken::Rules(format!("shard {id}/{index} is {real:?} and should be {:?}", row.shard)));
            }
        }
        Ok(())
    }
}
