//! A leader's dispatcher and supervisor, after `actors`' actors of these names.

use super::World;
use super::ledger::{ActiveRun, RunningRow};
use super::net::{Node, Reply, Request, Timer, Why};
use super::worker::LOST_AFTER_MS;
use crate::guard::Mutation;
use shardcron_domain::dispatch::{self, Cursor, DrainRate};
use shardcron_domain::liveness::{Liveness, Observer, Sighting};
use shardcron_domain::recovery::{self, FirstSeen, RunningShard};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const REDISPATCH_MS: i64 = 250;
pub(crate) const SURVEY_MS: i64 = 1_000;
pub(crate) const SWEEP_MS: i64 = 1_000;
const IDLE_MS: i64 = 200;
const FULL_MS: i64 = 100;
const REPUBLISH_AFTER_MS: i64 = 5_000;
const PATIENCE_MAX_MS: i64 = 120_000;

#[derive(Debug)]
struct Progress {
    ended: u32,
    still_since: i64,
    patience: i64,
    /// Looks in a row that found it standing still.
    strikes: u32,
}

impl Progress {
    fn new(ended: u32, now: i64) -> Self {
        Progress { ended, still_since: now, patience: REPUBLISH_AFTER_MS, strikes: 0 }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Dispatcher {
    cursors: Vec<Cursor>,
    turn: usize,
    rate: DrainRate,
    busy: bool,
    depth: Option<(u32, u32)>,
    /// Ready messages when last looked, and when; and what has been published since.
    last_look: Option<(u32, i64)>,
    published: u32,
    /// Where the executions of the round under way stood before it.
    round: Vec<(ExecutionId, u32)>,
    progress: BTreeMap<ExecutionId, Progress>,
    redispatching: bool,
    surveying: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    observer: Observer,
    seen: FirstSeen,
    sweeping: bool,
}

impl World {
    pub(crate) fn dispatch_hears(&mut self, s: usize, request: Request, reply: Option<Reply>) {
        let of = |epoch: Epoch| self.schedulers[s].epoch() == Some(epoch);
        match request {
            Request::Active(epoch) if of(epoch) => self.surveyed(s, reply),
            Request::Depth(epoch) if of(epoch) => self.round_done(s, reply),
            Request::Publish(epoch, Why::Round(firsts), attempts) if of(epoch) => {
                self.round_published(s, epoch, (firsts, attempts), reply);
            }
            Request::MarkFirsts(epoch, marks) if of(epoch) => self.round_marked(s, epoch, marks, reply),
            Request::RedispatchDue(epoch) if of(epoch) => match reply {
                Some(Reply::Attempts(due)) if !due.is_empty() => {
                    self.call(Node::Scheduler(s), Request::Publish(epoch, Why::Redispatch, due));
                }
                _ => self.schedulers[s].dispatcher.redispatching = false,
            },
            Request::Publish(epoch, Why::Redispatch, attempts) if of(epoch) => {
                let confirmed = confirmed(&attempts, &reply);
                if confirmed.is_empty() {
                    self.schedulers[s].dispatcher.redispatching = false;
                } else {
                    self.call(Node::Scheduler(s), Request::MarkAgain(epoch, confirmed));
                }
            }
            Request::MarkAgain(epoch, _) if of(epoch) => {
                self.schedulers[s].dispatcher.redispatching = false;
                if matches!(reply, Some(Reply::Deposed)) {
                    self.deposed(s);
                }
            }
            Request::StrandedDepth(epoch, execution, anyway) => match reply {
                // Without a consumer it would help nobody.
                Some(Reply::Depth(ready, consumers)) if consumers > 0 && (ready == 0 || anyway) => {
                    self.call(Node::Scheduler(s), Request::Stranded(epoch, execution));
                }
                _ => {}
            },
            Request::Stranded(epoch, execution) => match reply {
                Some(Reply::Attempts(stranded)) if !stranded.is_empty() => {
                    self.note(|| format!("scheduler {s} hands out again: {} shards of {execution}", stranded.len()));
                    self.call(Node::Scheduler(s), Request::Publish(epoch, Why::Stranded, stranded));
                }
                _ => {}
            },
            Request::Running(epoch) if of(epoch) => self.running_read(s, epoch, reply),
            Request::Workers(epoch, running) if of(epoch) => self.swept(s, epoch, &running, reply),
            Request::Reclaim(epoch, _) if of(epoch) => match reply {
                Some(Reply::Deposed) => self.deposed(s),
                Some(_) => self.redispatch(s),
                None => {}
            },
            _ => {}
        }
    }

    pub(crate) fn take_in(&mut self, s: usize, active: ActiveRun) {
        let ActiveRun { id: execution, shards_total, dispatched, .. } = active;
        if dispatched < shards_total {
            let cursors = &mut self.schedulers[s].dispatcher.cursors;
            if !cursors.iter().any(|c| c.execution == execution) {
                cursors.push(Cursor { execution, next: dispatched, shards_total });
            }
            self.step(s);
        }
    }

    /// One round: as much as the window lets through.
    pub(crate) fn step(&mut self, s: usize) {
        let Some(epoch) = self.may_act(s) else { return };
        let node = Node::Scheduler(s);
        let dispatcher = &mut self.schedulers[s].dispatcher;
        if dispatcher.busy {
            return;
        }
        dispatcher.cursors.retain(|c| c.next < c.shards_total);
        if dispatcher.cursors.is_empty() {
            return;
        }
        // Without a fresh look at the queue nothing is published.
        let Some((ready, consumers)) = dispatcher.depth.take() else {
            dispatcher.busy = true;
            return self.call(node, Request::Depth(epoch));
        };
        let budget = dispatch::window(dispatcher.rate, consumers).saturating_sub(ready);
        let picks = dispatch::pick(&mut dispatcher.cursors, &mut dispatcher.turn, budget);
        if picks.is_empty() {
            return self.timer(node, FULL_MS, Timer::Step);
        }
        dispatcher.busy = true;
        dispatcher.round = picks.iter().map(|p| (p.execution, p.from)).collect();
        let shards = picks.iter().flat_map(|p| (p.from..p.to).map(move |index| (p.execution, index)));
        let attempts = shards.map(|(execution, index)| AttemptRef { execution, index, attempt: 1 }).collect();
        let firsts = dispatcher.round.clone();
        self.call(node, Request::Publish(epoch, Why::Round(firsts), attempts));
    }

    /// Notes each execution up to its first message that is not confirmed.
    fn round_published(
        &mut self,
        s: usize,
        epoch: Epoch,
        (firsts, attempts): (Vec<(ExecutionId, u32)>, Vec<AttemptRef>),
        reply: Option<Reply>,
    ) {
        let confirmed = confirmed(&attempts, &reply);
        let mut marks = firsts;
        for at in &confirmed {
            // In the order of the shards, so that a gap ends it.
            if let Some((_, to)) = marks.iter_mut().find(|(id, to)| *id == at.execution && *to == at.index) {
                *to += 1;
            }
        }
        self.schedulers[s].dispatcher.published += confirmed.len() as u32;
        self.call(Node::Scheduler(s), Request::MarkFirsts(epoch, marks));
    }

    fn round_marked(&mut self, s: usize, epoch: Epoch, marks: Vec<(ExecutionId, u32)>, reply: Option<Reply>) {
        let dispatcher = &mut self.schedulers[s].dispatcher;
        let before = std::mem::take(&mut dispatcher.round);
        let reached = match reply {
            Some(Reply::Deposed) => return self.deposed(s),
            Some(_) => marks,
            None => before,
        };
        for (execution, to) in reached {
            if let Some(cursor) = dispatcher.cursors.iter_mut().find(|c| c.execution == execution) {
                cursor.next = to;
            }
        }
        self.call(Node::Scheduler(s), Request::Depth(epoch));
    }

    fn round_done(&mut self, s: usize, reply: Option<Reply>) {
        let now = self.now;
        let dispatcher = &mut self.schedulers[s].dispatcher;
        dispatcher.busy = false;
        let Some(Reply::Depth(ready, consumers)) = reply else {
            return self.timer(Node::Scheduler(s), IDLE_MS, Timer::Step);
        };
        let published = std::mem::take(&mut dispatcher.published);
        if let Some((ready_then, then)) = dispatcher.last_look {
            let drained = (ready_then + published).saturating_sub(ready);
            dispatcher.rate.observe(drained.into(), now.abs_diff(then));
        }
        dispatcher.last_look = Some((ready, now));
        dispatcher.depth = Some((ready, consumers));
        self.step(s);
    }

    pub(crate) fn redispatch(&mut self, s: usize) {
        let Some(epoch) = self.may_act(s) else { return };
        if !std::mem::replace(&mut self.schedulers[s].dispatcher.redispatching, true) {
            self.call(Node::Scheduler(s), Request::RedispatchDue(epoch));
        }
    }

    pub(crate) fn survey(&mut self, s: usize) {
        let Some(epoch) = self.may_act(s) else { return };
        if !std::mem::replace(&mut self.schedulers[s].dispatcher.surveying, true) {
            self.call(Node::Scheduler(s), Request::Active(epoch));
        }
    }

    fn surveyed(&mut self, s: usize, reply: Option<Reply>) {
        self.schedulers[s].dispatcher.surveying = false;
        let Some(Reply::Active(active)) = reply else { return };
        self.find_stranded(s, &active);
        for run in active {
            self.take_in(s, run);
        }
        self.step(s);
    }

    /// Handed out, not ended, and nothing moves.
    fn find_stranded(&mut self, s: usize, active: &[ActiveRun]) {
        let Some(epoch) = self.may_act(s) else { return };
        let (now, only_if_empty) = (self.now, self.options.mutation == Some(Mutation::OnlyIfEmpty));
        let progress = &mut self.schedulers[s].dispatcher.progress;
        progress.retain(|id, _| active.iter().any(|a| a.id == *id));
        let mut still = Vec::new();
        for run in active.iter().filter(|a| a.dispatched > 0) {
            let known = progress.entry(run.id).or_insert_with(|| Progress::new(run.ended, now));
            if known.ended != run.ended {
                *known = Progress::new(run.ended, now);
            } else if now - known.still_since >= known.patience {
                known.still_since = now;
                known.strikes += 1;
                // A queue that is never empty when it is looked at must not hide what is lost for ever.
                let anyway = known.strikes >= 3 && !only_if_empty;
                if anyway || only_if_empty {
                    // So that work which merely waits in a worker's hands is not doubled again and again.
                    known.patience = (known.patience * 2).min(PATIENCE_MAX_MS);
                }
                still.push((run.id, anyway));
            }
        }
        for (execution, anyway) in still {
            self.call(Node::Scheduler(s), Request::StrandedDepth(epoch, execution, anyway));
        }
    }

    pub(crate) fn sweep(&mut self, s: usize) {
        let Some(epoch) = self.may_act(s) else { return };
        if !std::mem::replace(&mut self.schedulers[s].supervisor.sweeping, true) {
            self.call(Node::Scheduler(s), Request::Running(epoch));
        }
    }

    fn running_read(&mut self, s: usize, epoch: Epoch, reply: Option<Reply>) {
        match reply {
            Some(Reply::Running(running)) if running.is_empty() => {
                self.swept(s, epoch, &running, Some(Reply::Workers(Vec::new())));
            }
            Some(Reply::Running(running)) => self.call(Node::Scheduler(s), Request::Workers(epoch, running)),
            _ => self.schedulers[s].supervisor.sweeping = false,
        }
    }

    fn swept(&mut self, s: usize, epoch: Epoch, running: &[RunningRow], reply: Option<Reply>) {
        let now = self.now;
        let supervisor = &mut self.schedulers[s].supervisor;
        supervisor.sweeping = false;
        // Nothing may be concluded about anybody from a store that does not answer.
        let Some(Reply::Workers(workers)) = reply else { return };
        let owners: BTreeSet<Incarnation> = running.iter().map(|r| r.owner).collect();
        let beats: BTreeMap<Incarnation, i64> = workers.into_iter().collect();
        let mut liveness: BTreeMap<Incarnation, Liveness> = BTreeMap::new();
        for owner in &owners {
            let sighting = beats.get(owner).map_or(Sighting::Absent, |age_ms| Sighting::Beat { age_ms: *age_ms });
            liveness.insert(*owner, supervisor.observer.judge(*owner, sighting, LOST_AFTER_MS, now));
        }
        supervisor.observer.retain(&owners.into_iter().collect::<Vec<_>>());
        let shards: Vec<RunningShard> = running
            .iter()
            .map(|r| RunningShard {
                attempt: r.attempt,
                owner: r.owner,
                timeout_ms: r.timeout_ms,
                stall_ms: None,
                progress: 0,
            })
            .collect();
        let plan = recovery::reconcile(&shards, &liveness, &mut supervisor.seen, now);
        if !plan.is_empty() && self.may_act(s) == Some(epoch) {
            self.note(|| format!("scheduler {s} takes back {plan:?}"));
            self.call(Node::Scheduler(s), Request::Reclaim(epoch, plan));
        }
    }
}

fn confirmed(attempts: &[AttemptRef], reply: &Option<Reply>) -> Vec<AttemptRef> {
    let Some(Reply::Confirmed(answers)) = reply else { return Vec::new() };
    attempts.iter().zip(answers).filter(|(_, taken)| **taken).map(|(attempt, _)| *attempt).collect()
}
