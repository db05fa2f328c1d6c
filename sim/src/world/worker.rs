//! A worker, after `actors`' consumer, recorder, attempt and heartbeat.

use super::World;
use super::ledger::{End, Outcome};
use super::net::{Node, Reply, Request, Tag, Timer};
use super::plan::Class;
use crate::guard::Mutation;
use shardcron_domain::flow::{Pace, worth_changing};
use shardcron_domain::invariants;
use shardcron_domain::limits::GROUP_COMMIT_ENTRIES;
use shardcron_domain::liveness::must_fence;
use shardcron_domain::shard::{Checkpoint, FailureClass, Rejection};
use shardcron_domain::{AttemptRef, Incarnation};
use std::collections::{BTreeMap, VecDeque};
use uuid::Uuid;

/// A worker that has not beaten for this long is lost.
pub(crate) const LOST_AFTER_MS: i64 = 15_000;
const TOO_EARLY_MS: i64 = 1_000;
const RETRY_MS: i64 = 300;
/// How long a forgotten attempt goes on after its limit: longer than the supervisor's grace.
const FORGOTTEN_MS: i64 = 45_000;

/// The incarnation of a worker's life.
pub(crate) fn incarnation(worker: usize, life: u32) -> Incarnation {
    Incarnation(Uuid::from_u128((u128::from(life) << 64) | (worker as u128)))
}

/// What the handler of a running attempt will do.
#[derive(Clone, Copy, Debug)]
struct Script {
    began: i64,
    outcome: Outcome,
    kills: bool,
}

#[derive(Debug, Default)]
struct Entry {
    tags: Vec<Tag>,
    checkpoint: Option<Checkpoint>,
    script: Option<Script>,
}

#[derive(Debug, Default)]
pub(crate) struct Worker {
    pub(crate) life: u32,
    pub(crate) paused_until: i64,
    pub(crate) offset_ms: i64,
    started: bool,
    prefetch: u16,
    pace: Pace,
    held: VecDeque<(AttemptRef, Vec<Tag>)>,
    entries: BTreeMap<AttemptRef, Entry>,
    ready: VecDeque<AttemptRef>,
    claiming: usize,
    running: usize,
    claims: Vec<AttemptRef>,
    /// The batch whose commit is under way.
    claim_batch: Vec<AttemptRef>,
    ends: Vec<End>,
    end_batch: Vec<End>,
    last_taken: i64,
}

impl Worker {
    pub(crate) fn new(_place: usize) -> Self {
        Worker::default()
    }

    /// The process ends; its host's clock stays.
    pub(crate) fn end(&mut self) {
        *self = Worker { life: self.life + 1, offset_ms: self.offset_ms, ..Worker::default() };
    }
}

impl World {
    pub(crate) fn worker_timer(&mut self, w: usize, timer: Timer) {
        let node = Node::Worker(w);
        match timer {
            Timer::Start => self.start_worker(w),
            Timer::Beat => {
                let sent = self.now;
                self.call(node, Request::Beat { sent });
            }
            Timer::Fence => {
                if must_fence(self.now - self.workers[w].last_taken, LOST_AFTER_MS) {
                    return self.fence(w);
                }
                self.timer(node, LOST_AFTER_MS / 30, Timer::Fence);
            }
            Timer::Claims => self.call(node, Request::Claim(self.workers[w].claim_batch.clone())),
            Timer::Ends => self.call(node, Request::Record(self.workers[w].end_batch.clone())),
            Timer::TooEarly(attempt, tags) => {
                self.workers[w].held.push_back((attempt, tags));
                self.pump(w);
            }
            Timer::Progress(attempt) => self.progress(w, attempt),
            Timer::Handler(attempt) => self.handler_ends(w, attempt),
            Timer::Horizon(attempt) => {
                if let Some(entry) = self.workers[w].entries.get_mut(&attempt) {
                    let tags = std::mem::take(&mut entry.tags);
                    self.ack(w, attempt, tags, true);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn worker_hears(&mut self, w: usize, request: Request, reply: Option<Reply>) {
        match request {
            Request::Beat { sent } => match reply {
                Some(_) => {
                    self.workers[w].last_taken = sent;
                    self.begin_to_consume(w);
                    let next = (sent + LOST_AFTER_MS / 3 - self.now).max(0);
                    self.timer(Node::Worker(w), next, Timer::Beat);
                }
                None => self.timer(Node::Worker(w), LOST_AFTER_MS / 15, Timer::Beat),
            },
            Request::Hints(batch) => self.hinted(w, batch, reply),
            Request::Claim(batch) => match reply {
                Some(Reply::Claims(verdicts)) => self.claimed(w, batch, verdicts),
                // Asked until it is answered.
                _ => self.timer(Node::Worker(w), RETRY_MS, Timer::Claims),
            },
            Request::Record(batch) => match reply {
                Some(Reply::Ends(verdicts)) => self.recorded(w, batch, verdicts),
                _ => self.timer(Node::Worker(w), RETRY_MS, Timer::Ends),
            },
            Request::Advance(attempt, _, to) => match reply {
                Some(Reply::Verdict(Ok(()))) => {
                    if let Some(entry) = self.workers[w].entries.get_mut(&attempt) {
                        entry.checkpoint = Some(to);
                    }
                }
                Some(_) => self.superseded(w, attempt),
                None => {}
            },
            Request::Consume(generation) if reply.is_none() && generation == self.broker.generation(w) => {
                self.call(Node::Worker(w), Request::Consume(generation));
            }
            _ => {}
        }
    }

    fn start_worker(&mut self, w: usize) {
        let (now, node) = (self.now, Node::Worker(w));
        let worker = &mut self.workers[w];
        worker.last_taken = now;
        worker.prefetch = u16::try_from(self.plan.concurrency).unwrap_or(1);
        let prefetch = worker.prefetch;
        self.timer(node, 0, Timer::Beat);
        self.timer(node, LOST_AFTER_MS / 30, Timer::Fence);
        self.call(node, Request::Prefetch(prefetch));
    }

    /// Nobody vouches for what a worker without a heartbeat runs, so it takes nothing before its first beat is taken.
    fn begin_to_consume(&mut self, w: usize) {
        if !std::mem::replace(&mut self.workers[w].started, true) {
            let generation = self.broker.generation(w);
            self.call(Node::Worker(w), Request::Consume(generation));
        }
    }

    /// Stops all handlers, throws their results away and hands their shards back. The ledger has the last word on each; what
    /// does not reach it is taken back when the heartbeat is missed.
    fn fence(&mut self, w: usize) {
        let give = |attempt: &AttemptRef| End { attempt: *attempt, outcome: Outcome::HandBack, seed: 0 };
        let ends: Vec<End> = self.workers[w].entries.keys().map(give).collect();
        self.call(Node::Worker(w), Request::Record(ends));
        self.crash_worker(w, "fenced itself");
    }

    pub(crate) fn delivered(&mut self, w: usize, tag: Tag, attempt: AttemptRef) {
        let mut tags = vec![tag];
        if self.options.mutation == Some(Mutation::AckBeforeCommit) {
            self.ack(w, attempt, std::mem::take(&mut tags), false);
        }
        match self.workers[w].entries.get_mut(&attempt) {
            // Delivered again while it is here: one attempt, acked by every tag that it has.
            Some(entry) => entry.tags.extend(tags),
            None => self.workers[w].held.push_back((attempt, tags)),
        }
        self.pump(w);
    }

    /// The connection was lost and is back.
    pub(crate) fn renewed(&mut self, w: usize, generation: u64) {
        let worker = &mut self.workers[w];
        if !worker.started {
            return;
        }
        // What was held comes again under new tags; what is under way goes on, and is acked by its new tag.
        worker.held.retain(|(_, tags)| tags.iter().any(|t| t.generation >= generation));
        worker.entries.values_mut().for_each(|e| e.tags.retain(|t| t.generation >= generation));
        self.call(Node::Worker(w), Request::Consume(generation));
        self.pump(w);
    }

    /// Starts what can be started and claims what will be needed soon.
    fn pump(&mut self, w: usize) {
        let concurrency = self.plan.concurrency;
        while self.workers[w].running < concurrency {
            let Some(attempt) = self.workers[w].ready.pop_front() else { break };
            self.begin(w, attempt);
        }
        let worker = &mut self.workers[w];
        let most = concurrency + worker.pace.ahead(concurrency);
        let mut room = most.saturating_sub(worker.running + worker.ready.len() + worker.claiming);
        while room > 0 {
            let Some((attempt, tags)) = worker.held.pop_front() else { break };
            match worker.entries.get_mut(&attempt) {
                Some(entry) => entry.tags.extend(tags),
                None => {
                    worker.entries.insert(attempt, Entry { tags, ..Entry::default() });
                    worker.claims.push(attempt);
                    worker.claiming += 1;
                    room -= 1;
                }
            }
        }
        let wanted = worker.pace.prefetch(concurrency);
        if worth_changing(worker.prefetch, wanted) {
            worker.prefetch = wanted;
            self.call(Node::Worker(w), Request::Prefetch(wanted));
        }
        self.commit_claims(w);
    }

    /// The next batch, if none is under way. Redis is asked first.
    fn commit_claims(&mut self, w: usize) {
        let worker = &mut self.workers[w];
        if worker.claim_batch.is_empty() && !worker.claims.is_empty() {
            let take = worker.claims.len().min(GROUP_COMMIT_ENTRIES);
            worker.claim_batch = worker.claims.drain(..take).collect();
            let batch = worker.claim_batch.clone();
            self.call(Node::Worker(w), Request::Hints(batch));
        }
    }

    fn hinted(&mut self, w: usize, batch: Vec<AttemptRef>, reply: Option<Reply>) {
        let done = match reply {
            Some(Reply::Hints(done)) => done,
            // Only an accelerator: without an answer the ledger alone decides.
            _ => vec![false; batch.len()],
        };
        let (dropped, open): (Vec<_>, Vec<_>) = batch.into_iter().zip(done).partition(|(_, done)| *done);
        let open: Vec<AttemptRef> = open.into_iter().map(|(attempt, _)| attempt).collect();
        for (attempt, _) in dropped {
            self.workers[w].claiming -= 1;
            self.settle(w, attempt);
        }
        self.workers[w].claim_batch = open.clone();
        if open.is_empty() {
            self.pump(w);
        } else {
            self.call(Node::Worker(w), Request::Claim(open));
        }
    }

    fn claimed(&mut self, w: usize, batch: Vec<AttemptRef>, verdicts: Vec<Result<Option<Checkpoint>, Rejection>>) {
        self.workers[w].claim_batch.clear();
        for (attempt, verdict) in batch.into_iter().zip(verdicts) {
            let worker = &mut self.workers[w];
            worker.claiming = worker.claiming.saturating_sub(1);
            match verdict {
                Ok(checkpoint) => {
                    if let Some(entry) = worker.entries.get_mut(&attempt) {
                        entry.checkpoint = checkpoint;
                        worker.ready.push_back(attempt);
                    }
                }
                Err(Rejection::NotYet) => {
                    if let Some(entry) = worker.entries.remove(&attempt) {
                        self.timer(Node::Worker(w), TOO_EARLY_MS, Timer::TooEarly(attempt, entry.tags));
                    }
                }
                Err(_) => self.settle(w, attempt),
            }
        }
        self.pump(w);
    }

    fn begin(&mut self, w: usize, attempt: AttemptRef) {
        let node = Node::Worker(w);
        let Some(run) = self.ledger.executions.get(&attempt.execution) else { return };
        let Some(job) = self.ledger.job(run.job) else { return };
        let (work_ms, timeout) = (job.work_ms, job.spec.timeout.span().map(|s| s.as_ms()));
        let mut takes = self.dice.of(1, work_ms);
        let mut script = Script { began: self.now, outcome: Outcome::Success, kills: false };
        if self.chaos {
            // A poison shard is one for each of its attempts.
            let poison = attempt.execution.0.as_u128() ^ u128::from(attempt.index);
            script.kills = self.plan.has(Class::Poison) && poison.is_multiple_of(29);
            if self.plan.has(Class::FailHandlers) && self.dice.percent(15) {
                let permanent = self.dice.percent(10);
                let class = if permanent { FailureClass::Permanent } else { FailureClass::Transient };
                script.outcome = Outcome::Failure(class);
            }
        } else {
            takes = takes.min(self.plan.calm_work_ms);
        }
        if let Some(limit) = timeout.filter(|limit| takes > *limit) {
            takes = limit;
            script.outcome = Outcome::Failure(FailureClass::Timeout);
        }
        if let Some(limit) = timeout
            && self.chaos
            && self.plan.has(Class::ForgetfulHandlers)
            && self.dice.percent(5)
        {
            takes = limit + FORGOTTEN_MS;
            script.outcome = Outcome::Success;
        }
        let horizon = self.plan.ack_horizon_ms;
        let worker = &mut self.workers[w];
        let Some(entry) = worker.entries.get_mut(&attempt) else { return };
        entry.script = Some(script);
        worker.running += 1;
        self.timer(node, takes, Timer::Handler(attempt));
        if takes > horizon {
            self.timer(node, horizon, Timer::Horizon(attempt));
        }
        if takes > 20 {
            self.timer(node, takes / 2, Timer::Progress(attempt));
        }
    }

    /// The handler sets a checkpoint.
    fn progress(&mut self, w: usize, attempt: AttemptRef) {
        let Some(entry) = self.workers[w].entries.get(&attempt) else { return };
        let from = entry.checkpoint.clone();
        let reached = if let Some(Checkpoint::Number(n)) = from { n + 1 } else { 1 };
        self.call(Node::Worker(w), Request::Advance(attempt, from, Checkpoint::Number(reached)));
    }

    /// The ledger has given the shard to another attempt: the handler stops, and there is nothing to record.
    fn superseded(&mut self, w: usize, attempt: AttemptRef) {
        let worker = &mut self.workers[w];
        let runs = worker.entries.get_mut(&attempt).and_then(|e| e.script.take()).is_some();
        if runs {
            worker.running -= 1;
            self.settle(w, attempt);
            self.pump(w);
        }
    }

    fn handler_ends(&mut self, w: usize, attempt: AttemptRef) {
        let (now, seed) = (self.now, self.dice.bits());
        let worker = &mut self.workers[w];
        let Some(script) = worker.entries.get_mut(&attempt).and_then(|e| e.script.take()) else { return };
        if script.kills {
            return self.crash_worker(w, "a poison shard");
        }
        worker.running -= 1;
        worker.pace.observe((now - script.began) as f64);
        worker.ends.push(End { attempt, outcome: script.outcome, seed });
        // Work has turned long: what was claimed ahead for short work would wait here for longer than anybody expects.
        let keep = 2 * worker.pace.ahead(self.plan.concurrency);
        let excess = worker.ready.split_off(worker.ready.len().min(keep));
        worker.ends.extend(excess.into_iter().map(|attempt| End { attempt, outcome: Outcome::HandBack, seed: 0 }));
        self.commit_ends(w);
        self.pump(w);
    }

    fn commit_ends(&mut self, w: usize) {
        let worker = &mut self.workers[w];
        if worker.end_batch.is_empty() && !worker.ends.is_empty() {
            let take = worker.ends.len().min(GROUP_COMMIT_ENTRIES);
            worker.end_batch = worker.ends.drain(..take).collect();
            let batch = worker.end_batch.clone();
            self.call(Node::Worker(w), Request::Record(batch));
        }
    }

    fn recorded(&mut self, w: usize, batch: Vec<End>, verdicts: Vec<Result<(), Rejection>>) {
        self.workers[w].end_batch.clear();
        let taken = batch.iter().zip(&verdicts).filter(|(_, v)| v.is_ok()).map(|(e, _)| e.attempt).collect();
        self.call(Node::Worker(w), Request::Finish(taken));
        for (end, verdict) in batch.into_iter().zip(verdicts) {
            if let Err(rejection) = verdict {
                self.note(|| format!("worker {w}: the end of {} was refused: {rejection}", end.attempt));
            }
            self.settle(w, end.attempt);
        }
        self.commit_ends(w);
        self.pump(w);
    }

    /// Forgets the attempt and acks its deliveries.
    fn settle(&mut self, w: usize, attempt: AttemptRef) {
        if let Some(entry) = self.workers[w].entries.remove(&attempt) {
            self.ack(w, attempt, entry.tags, false);
        }
    }

    fn ack(&mut self, w: usize, attempt: AttemptRef, tags: Vec<Tag>, past_horizon: bool) {
        if tags.is_empty() {
            return;
        }
        if let Some(shard) = self.ledger.shard(attempt) {
            let me = incarnation(w, self.workers[w].life);
            let checked = invariants::check_ack(shard, attempt.attempt, me, past_horizon);
            self.check(checked);
        }
        self.call(Node::Worker(w), Request::Ack(tags));
    }
}
