//! The ledger in memory. A call is a transaction: all of it, at one instant.

use super::net::{Node, Reply, Request};
use super::plan::{Job, Plan};
use super::worker::incarnation;
use super::{BEGIN_MS, World};
use crate::guard::{Mutation, admit, step};
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::firing::{DecisionKind, JobNow, Verdict, decide, schedule_key};
use shardcron_domain::invariants::{self, InvariantId, Tally, Violation};
use shardcron_domain::limits::{QUEUE_WINDOW_MAX, REDISPATCH_BATCH};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, Effect, Event, FailureClass, Phase, Rejection, Shard};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};
use std::collections::{BTreeMap, BTreeSet};

/// What is to be written at one instant.
#[derive(Clone, Debug)]
pub(crate) struct Firing {
    pub(crate) job: JobId,
    pub(crate) nominal_ms: i64,
    /// The execution that it makes, or why it makes none.
    pub(crate) action: Result<ExecutionId, DecisionKind>,
    /// The job's next instant, with the last firing of a batch.
    pub(crate) next: Option<Option<i64>>,
}

/// An active execution, as the dispatcher reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActiveRun {
    pub(crate) id: ExecutionId,
    pub(crate) shards_total: u32,
    pub(crate) dispatched: u32,
    pub(crate) ended: u32,
}

/// A running shard, as the supervisor reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningRow {
    pub(crate) attempt: AttemptRef,
    pub(crate) owner: Incarnation,
    pub(crate) timeout_ms: Option<i64>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Success,
    Failure(FailureClass),
    HandBack,
}

/// An attempt's end, to be recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) attempt: AttemptRef,
    pub(crate) outcome: Outcome,
    pub(crate) seed: u64,
}

#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) shard: Shard,
    results: usize,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) job: JobId,
    nominal_ms: i64,
    counters: Execution,
    dispatched: u32,
    pub(crate) rows: Vec<Row>,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    mutation: Option<Mutation>,
    pub(crate) jobs: Vec<Job>,
    next: Vec<Option<i64>>,
    pub(crate) paused: Vec<bool>,
    pub(crate) epoch: Epoch,
    decisions: BTreeMap<(JobId, i64), DecisionKind>,
    pub(crate) executions: BTreeMap<ExecutionId, Run>,
    pub(crate) active: BTreeSet<ExecutionId>,
    redispatch: BTreeMap<(ExecutionId, u32), (u32, i64)>,
    pub(crate) results: u64,
    pub(crate) refused: u64,
}

type Checked<T> = Result<T, Violation>;

impl Ledger {
    pub(crate) fn new(plan: &Plan, mutation: Option<Mutation>) -> Self {
        Ledger {
            mutation,
            next: plan.jobs.iter().map(|j| Some(j.first_ms)).collect(),
            paused: vec![false; plan.jobs.len()],
            jobs: plan.jobs.clone(),
            epoch: Epoch(0),
            decisions: BTreeMap::new(),
            executions: BTreeMap::new(),
            active: BTreeSet::new(),
            redispatch: BTreeMap::new(),
            results: 0,
            refused: 0,
        }
    }

    pub(crate) fn job(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(usize::try_from(id.0).ok()?)
    }

    pub(crate) fn shard(&self, attempt: AttemptRef) -> Option<&Shard> {
        self.executions.get(&attempt.execution)?.rows.get(attempt.index as usize).map(|row| &row.shard)
    }

    fn admit(&mut self, writer: Epoch) -> Checked<bool> {
        let admitted = admit(self.mutation, writer, self.epoch)?;
        self.refused += u64::from(!admitted);
        Ok(admitted)
    }

    fn fire(&mut self, writer: Epoch, batch: &[Firing]) -> Checked<Reply> {
        if !self.admit(writer)? {
            return Ok(Reply::Deposed);
        }
        let mut outcomes = Vec::with_capacity(batch.len());
        for firing in batch {
            outcomes.push(self.settle_firing(firing)?);
        }
        Ok(Reply::Outcomes(outcomes))
    }

    fn settle_firing(&mut self, firing: &Firing) -> Checked<Option<ExecutionId>> {
        let Firing { job, nominal_ms, action, next } = firing;
        let place = usize::try_from(job.0).unwrap_or(usize::MAX);
        let Some(spec) = self.jobs.get(place).map(|j| j.spec.clone()) else { return Ok(None) };
        if let (Some(next), Some(slot)) = (next, self.next.get_mut(place)) {
            *slot = *next;
        }
        let of_key = |(_, run): &(&ExecutionId, &Run)| run.job == *job && run.nominal_ms == *nominal_ms;
        let existing = self.executions.iter().find(of_key).map(|(id, _)| *id);
        let active: Vec<ExecutionId> =
            self.active.iter().filter(|id| self.executions.get(id).is_some_and(|r| r.job == *job)).copied().collect();
        let decided = self.decisions.contains_key(&(*job, *nominal_ms));
        let paused_by = self.paused[place].then(|| "ops".to_owned());
        let kind = match action {
            Err(_) if decided => return Ok(None),
            Err(kind) => *kind,
            Ok(id) => {
                match decide(spec.overlap, &JobNow { paused_by, active, existing, decided, ..JobNow::default() }, true)
                {
                    Verdict::Duplicate(Some(existing)) if existing == *id => return Ok(Some(existing)),
                    // The simulated jobs' policies are skip and allow, which neither wait nor replace.
                    Verdict::Duplicate(_) | Verdict::Wait(..) | Verdict::NotYet | Verdict::Replace(_) => {
                        return Ok(None);
                    }
                    Verdict::Skip(kind, ..) => kind,
                    Verdict::Fire => {
                        let shards = ShardPlan::from_spec(&spec.shards).map_or(1, |plan| plan.count());
                        let rows = (0..shards).map(|_| Row { shard: Shard::new(), results: 0 }).collect();
                        let (counters, nominal_ms) = (Execution::new(shards), *nominal_ms);
                        self.executions.insert(*id, Run { job: *job, nominal_ms, counters, dispatched: 0, rows });
                        self.active.insert(*id);
                        DecisionKind::Fired
                    }
                }
            }
        };
        self.decisions.insert((*job, *nominal_ms), kind);
        let twins = self.executions.iter().filter(of_key).count();
        invariants::check_fire_key(&schedule_key(*nominal_ms), twins)?;
        let run = self.active.iter().filter(|id| self.executions.get(id).is_some_and(|r| r.job == *job)).count();
        invariants::check_overlap(spec.overlap, run)?;
        Ok(match (kind, action) {
            (DecisionKind::Fired, Ok(id)) => Some(*id),
            _ => None,
        })
    }

    /// One event on one shard, and everything that follows from it in the same transaction.
    fn write(&mut self, at: AttemptRef, event: &Event, now_ms: i64) -> Checked<Result<(), Rejection>> {
        let Some(run) = self.executions.get_mut(&at.execution) else { return Ok(Err(Rejection::NoSuchShard)) };
        let retry = usize::try_from(run.job.0).ok().and_then(|j| self.jobs.get(j)).map(|j| j.spec.retry);
        let Some(row) = run.rows.get_mut(at.index as usize) else { return Ok(Err(Rejection::NoSuchShard)) };
        let (next, effect) = match step(self.mutation, &row.shard, event, (&retry.unwrap_or_default(), now_ms))? {
            Ok(done) => done,
            Err(rejection) => {
                self.refused += 1;
                return Ok(Err(rejection));
            }
        };
        row.shard = next;
        if matches!(event, Event::Succeed { .. }) {
            row.results += 1;
            self.results += 1;
            invariants::check_results(row.results)?;
        }
        match effect {
            Some(Effect::Redispatch { not_before_ms }) => {
                self.redispatch.insert((at.execution, at.index), (row.shard.attempt, not_before_ms));
            }
            Some(Effect::Settle(phase)) => {
                let (succeeded, failed) = (u32::from(phase == Phase::Success), u32::from(phase == Phase::Failed));
                let settled = execution::Event::Settled { succeeded, failed };
                run.counters = execution::apply(&run.counters, settled)
                    .map_err(|e| Violation { id: InvariantId::S1, seen: e.to_string() })?;
                if run.counters.phase.is_terminal() {
                    self.active.remove(&at.execution);
                }
            }
            None => {}
        }
        Ok(Ok(()))
    }

    fn claim(&mut self, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Checked<Reply> {
        let mut claims = Vec::with_capacity(attempts.len());
        for at in attempts {
            // By this call or by an earlier one whose answer was lost.
            let mine = |s: &Shard| s.phase == Phase::Running && s.attempt == at.attempt && s.owner == Some(owner);
            let verdict = if self.shard(*at).is_some_and(mine) {
                Ok(())
            } else {
                self.write(*at, &Event::Claim { attempt: at.attempt, owner }, now_ms)?
            };
            claims.push(verdict.map(|()| self.shard(*at).and_then(|s| s.checkpoint.clone())));
        }
        Ok(Reply::Claims(claims))
    }

    fn record(&mut self, owner: Incarnation, ends: &[End], now_ms: i64) -> Checked<Reply> {
        let mut verdicts = Vec::with_capacity(ends.len());
        for End { attempt: at, outcome, seed } in ends {
            let event = match outcome {
                Outcome::Success => Event::Succeed { attempt: at.attempt, owner },
                Outcome::Failure(class) => Event::Fail { attempt: at.attempt, owner, class: *class, seed: *seed },
                Outcome::HandBack => Event::HandBack { attempt: at.attempt, owner },
            };
            verdicts.push(self.write(*at, &event, now_ms)?);
        }
        Ok(Reply::Ends(verdicts))
    }

    fn advance(
        &mut self,
        owner: Incarnation,
        at: AttemptRef,
        (from, to): (Option<Checkpoint>, Checkpoint),
    ) -> Checked<Reply> {
        Ok(Reply::Verdict(self.write(at, &Event::Advance { attempt: at.attempt, owner, from, to }, 0)?))
    }

    fn reclaim(&mut self, writer: Epoch, plan: &[Reclaim], now_ms: i64) -> Checked<Reply> {
        if !self.admit(writer)? {
            return Ok(Reply::Deposed);
        }
        for Reclaim { attempt, owner, reason } in plan {
            let event = Event::Reclaim { attempt: attempt.attempt, owner: *owner, reason: *reason };
            // A refused one has moved on by itself.
            let _ = self.write(*attempt, &event, now_ms)?;
        }
        Ok(Reply::Done)
    }

    fn mark_firsts(&mut self, writer: Epoch, firsts: &[(ExecutionId, u32)]) -> Checked<Reply> {
        if !self.admit(writer)? {
            return Ok(Reply::Deposed);
        }
        for (id, below) in firsts {
            if let Some(run) = self.executions.get_mut(id) {
                run.dispatched = run.dispatched.max(*below);
            }
        }
        Ok(Reply::Done)
    }

    fn mark_again(&mut self, writer: Epoch, again: &[AttemptRef]) -> Checked<Reply> {
        if !self.admit(writer)? {
            return Ok(Reply::Deposed);
        }
        for at in again {
            let key = (at.execution, at.index);
            if self.redispatch.get(&key).is_some_and(|(attempt, _)| *attempt == at.attempt) {
                self.redispatch.remove(&key);
            }
        }
        Ok(Reply::Done)
    }

    fn redispatch_due(&self, now_ms: i64) -> Vec<AttemptRef> {
        let due = self.redispatch.iter().filter(|(_, (_, not_before))| *not_before <= now_ms);
        due.map(|((execution, index), (attempt, _))| AttemptRef {
            execution: *execution,
            index: *index,
            attempt: *attempt,
        })
        .take(REDISPATCH_BATCH)
        .collect()
    }

    fn stranded(&self, execution: ExecutionId, now_ms: i64) -> Vec<AttemptRef> {
        let Some(run) = self.executions.get(&execution) else { return Vec::new() };
        let waits = |index: &u32, s: &Shard| {
            let handed_out = s.attempt > 1 || *index < run.dispatched;
            let again = self.redispatch.contains_key(&(execution, *index));
            s.phase == Phase::Pending && s.not_before_ms <= now_ms && handed_out && !again
        };
        (0_u32..)
            .zip(&run.rows)
            .filter(|(index, row)| waits(index, &row.shard))
            .map(|(index, row)| AttemptRef { execution, index, attempt: row.shard.attempt })
            .take(QUEUE_WINDOW_MAX as usize)
            .collect()
    }

    fn active_runs(&self) -> Vec<ActiveRun> {
        let of = |id: &ExecutionId| {
            let run = self.executions.get(id)?;
            let (shards_total, ended) = (run.counters.shards_total, run.counters.ended());
            Some(ActiveRun { id: *id, shards_total, dispatched: run.dispatched, ended })
        };
        self.active.iter().filter_map(of).collect()
    }

    fn running(&self) -> Vec<RunningRow> {
        let mut rows = Vec::new();
        for execution in &self.active {
            let Some(run) = self.executions.get(execution) else { continue };
            let timeout = self.job(run.job).and_then(|j| j.spec.timeout.span()).map(|s| s.as_ms());
            for (index, row) in (0_u32..).zip(&run.rows) {
                if let Some(owner) = row.shard.owner {
                    let attempt = AttemptRef { execution: *execution, index, attempt: row.shard.attempt };
                    rows.push(RunningRow { attempt, owner, timeout_ms: timeout });
                }
            }
        }
        rows
    }

    pub(crate) fn cancel(&mut self, id: ExecutionId) -> Checked<()> {
        let Some(run) = self.executions.get_mut(&id) else { return Ok(()) };
        let Ok(after) = execution::apply(&run.counters, execution::Event::Cancel) else { return Ok(()) };
        for row in run.rows.iter_mut().filter(|row| !row.shard.phase.is_terminal()) {
            if let Ok((next, _)) = step(self.mutation, &row.shard, &Event::Cancel, (&Default::default(), 0))? {
                row.shard = next;
            }
        }
        run.counters = after;
        self.active.remove(&id);
        self.redispatch.retain(|(execution, _), _| *execution != id);
        Ok(())
    }

    fn instants(&self, job: &Job, until_ms: i64) -> Vec<i64> {
        let mut instants = Vec::new();
        let mut next = Some(job.first_ms);
        while let Some(instant) = next.filter(|i| *i <= until_ms) {
            instants.push(instant);
            next = job.schedule.next_after(instant).ok().flatten();
        }
        instants
    }

    /// What was due by `until_ms` and is not decided and ended; empty if nothing.
    pub(crate) fn unfinished(&self, until_ms: i64) -> String {
        for (id, job) in (0_i64..).zip(&self.jobs) {
            let missing =
                self.instants(job, until_ms).into_iter().find(|i| !self.decisions.contains_key(&(JobId(id), *i)));
            if let Some(instant) = missing {
                return format!("{} is not decided at {}", job.spec.name, instant - BEGIN_MS);
            }
        }
        let open = self.active.iter().find_map(|id| {
            let run = self.executions.get(id).filter(|run| run.nominal_ms <= until_ms)?;
            let (index, row) = (0_u32..).zip(&run.rows).find(|(_, row)| !row.shard.phase.is_terminal())?;
            Some(format!("shard {id}/{index} is {:?}", row.shard))
        });
        open.unwrap_or_default()
    }

    /// The oracle's counts over everything that was due.
    pub(crate) fn check_all(&self, until_ms: i64) -> Checked<()> {
        for (id, job) in (0_i64..).zip(&self.jobs) {
            let of_job = self.decisions.keys().filter(|(j, _)| *j == JobId(id)).map(|(_, instant)| (*instant, 1));
            invariants::check_decisions(&self.instants(job, until_ms), &of_job.collect())?;
        }
        for run in self.executions.values().filter(|run| run.nominal_ms <= until_ms) {
            let terminal = run.rows.iter().filter(|row| row.shard.phase.is_terminal()).count() as u64;
            let results = run.rows.iter().map(|row| row.results as u64).sum();
            let recorded_twice = run.rows.iter().filter(|row| row.results > 1).count() as u64;
            let (shards_total, counted) = (run.rows.len() as u64, run.counters.ended().into());
            invariants::check_tally(&Tally { shards_total, terminal, results, recorded_twice, counted })?;
        }
        Ok(())
    }
}

impl World {
    pub(crate) fn ask_ledger(&mut self, from: Node, life: u32, request: &Request) -> Reply {
        let owner = match from {
            Node::Worker(w) => incarnation(w, life),
            Node::Scheduler(_) => incarnation(usize::MAX, life),
        };
        // The caller's clock, as the stores are told the time by whoever calls.
        let now_ms = self.wall(from);
        let ledger = &mut self.ledger;
        let reply = match request {
            Request::BeginEpoch { .. } => {
                ledger.epoch = Epoch(ledger.epoch.0 + 1);
                Ok(Reply::Epoch(ledger.epoch))
            }
            Request::Load(_) => Ok(Reply::Jobs((0..).map(JobId).zip(ledger.next.iter().copied()).collect())),
            Request::Fire(epoch, batch) => ledger.fire(*epoch, batch),
            Request::Active(_) => Ok(Reply::Active(ledger.active_runs())),
            Request::Stranded(_, execution) => Ok(Reply::Attempts(ledger.stranded(*execution, now_ms))),
            Request::MarkFirsts(epoch, firsts) => ledger.mark_firsts(*epoch, firsts),
            Request::MarkAgain(epoch, again) => ledger.mark_again(*epoch, again),
            Request::RedispatchDue(_) => Ok(Reply::Attempts(ledger.redispatch_due(now_ms))),
            Request::Running(_) => Ok(Reply::Running(ledger.running())),
            Request::Reclaim(epoch, plan) => ledger.reclaim(*epoch, plan, now_ms),
            Request::Claim(attempts) => ledger.claim(owner, attempts, now_ms),
            Request::Advance(at, from, to) => ledger.advance(owner, *at, (from.clone(), to.clone())),
            Request::Record(ends) => ledger.record(owner, ends, now_ms),
            _ => Ok(Reply::Done),
        };
        self.check(reply).unwrap_or(Reply::Done)
    }
}
