//! A scheduler: the lease, the trust window and the trigger, after `actors`' lease task and trigger actor.

use super::World;
use super::dispatch::{Dispatcher, Supervisor};
use super::ledger::{ActiveRun, Firing};
use super::net::{Node, Reply, Request, Timer};
use crate::guard::Mutation;
use shardcron_domain::firing::{self, Intent};
use shardcron_domain::invariants;
use shardcron_domain::limits::FIRINGS_PER_WRITE;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::wheel::Wheel;
use shardcron_domain::{Epoch, ExecutionId, JobId};
use std::collections::{BTreeMap, VecDeque};
use uuid::Uuid;

/// How long the lease lasts.
pub(crate) const TTL_MS: i64 = 5_000;
/// The part of it that is not trusted.
const MARGIN_MS: i64 = TTL_MS / 10;
/// The longest sleep of the trigger's timer.
const LOOK_AGAIN_MS: i64 = 1_000;
const RETRY_MS: i64 = 500;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Term {
    pub(crate) epoch: Epoch,
    trusted_until: i64,
    /// How often Redis had lost its memory when the lease was last confirmed.
    flushes: u64,
}

#[derive(Debug, Default)]
struct Trigger {
    wheel: Wheel,
    /// Looked at and not yet written, with the job's instant after it.
    queue: VecDeque<(Firing, Option<i64>)>,
    writing: bool,
    loading: bool,
    /// Only the timer that was set last counts.
    timer: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    pub(crate) life: u32,
    pub(crate) paused_until: i64,
    pub(crate) offset_ms: i64,
    term: Option<Term>,
    /// Redis's flushes when the lease call under way was made.
    flushes: u64,
    trigger: Trigger,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) supervisor: Supervisor,
}

impl Scheduler {
    pub(crate) fn new(_place: usize) -> Self {
        Scheduler::default()
    }

    /// The process ends; its host's clock stays.
    pub(crate) fn end(&mut self) {
        *self = Scheduler { life: self.life + 1, offset_ms: self.offset_ms, ..Scheduler::default() };
    }

    pub(crate) fn epoch(&self) -> Option<Epoch> {
        self.term.map(|t| t.epoch)
    }
}

impl World {
    pub(crate) fn scheduler_timer(&mut self, s: usize, timer: Timer) {
        let node = Node::Scheduler(s);
        match timer {
            Timer::Start => {
                for part in [Timer::Lease, Timer::Redispatch, Timer::Survey, Timer::Sweep] {
                    let delay = self.dice.of(0, 500);
                    self.timer(node, delay, part);
                }
            }
            Timer::Lease => {
                let start = self.now;
                self.schedulers[s].flushes = self.redis.flushes;
                let leads = self.schedulers[s].term.is_some();
                self.call(node, if leads { Request::Renew { start } } else { Request::Acquire { start } });
            }
            Timer::Trigger(set) if set == self.schedulers[s].trigger.timer => self.tick(s),
            Timer::Reload => self.load(s),
            Timer::Redispatch => {
                self.timer(node, super::dispatch::REDISPATCH_MS, Timer::Redispatch);
                self.redispatch(s);
            }
            Timer::Survey => {
                self.timer(node, super::dispatch::SURVEY_MS, Timer::Survey);
                self.survey(s);
            }
            Timer::Sweep => {
                self.timer(node, super::dispatch::SWEEP_MS, Timer::Sweep);
                self.sweep(s);
            }
            Timer::Step => self.step(s),
            _ => {}
        }
    }

    pub(crate) fn scheduler_hears(&mut self, s: usize, request: Request, reply: Option<Reply>) {
        match request {
            Request::Acquire { start } => match reply {
                Some(Reply::Lease(true)) => self.call(Node::Scheduler(s), Request::BeginEpoch { start }),
                Some(_) => self.timer(Node::Scheduler(s), TTL_MS / 3, Timer::Lease),
                // Any error while acquiring means: not the leader.
                None => self.timer(Node::Scheduler(s), RETRY_MS, Timer::Lease),
            },
            Request::BeginEpoch { start } => self.epoch_begun(s, start, reply),
            Request::Renew { start } => self.renewal(s, start, reply),
            Request::Load(epoch) if self.schedulers[s].epoch() == Some(epoch) => self.loaded(s, reply),
            Request::Fire(epoch, batch) if self.schedulers[s].epoch() == Some(epoch) => self.written(s, batch, reply),
            other => self.dispatch_hears(s, other, reply),
        }
    }

    /// The epoch under which the scheduler may act now, and whether L2 holds of that.
    pub(crate) fn may_act(&mut self, s: usize) -> Option<Epoch> {
        let scheduler = &self.schedulers[s];
        let term = scheduler.term.filter(|t| self.now < t.trusted_until)?;
        if term.flushes == self.redis.flushes {
            let mine = (Node::Scheduler(s), scheduler.life);
            let ends = self.redis.lease.filter(|(who, _)| *who == mine).map(|(_, ends)| ends);
            let checked = invariants::check_trust(self.now, ends);
            self.check(checked);
        }
        Some(term.epoch)
    }

    fn epoch_begun(&mut self, s: usize, start: i64, reply: Option<Reply>) {
        let Some(Reply::Epoch(epoch)) = reply else { return self.timer(Node::Scheduler(s), RETRY_MS, Timer::Lease) };
        self.timer(Node::Scheduler(s), TTL_MS / 3, Timer::Lease);
        let trusted_until = start + TTL_MS - MARGIN_MS;
        // The ledger may have taken longer to answer than the lease lasts.
        if self.now < trusted_until {
            self.note(|| format!("scheduler {s} leads under epoch {epoch}"));
            let flushes = self.schedulers[s].flushes;
            self.new_term(s, Some(Term { epoch, trusted_until, flushes }));
        }
    }

    fn renewal(&mut self, s: usize, start: i64, reply: Option<Reply>) {
        let scheduler = &mut self.schedulers[s];
        let next = match (&mut scheduler.term, reply) {
            (None, _) => 0,
            (Some(term), Some(Reply::Lease(true))) => {
                term.trusted_until = start + TTL_MS - MARGIN_MS;
                term.flushes = scheduler.flushes;
                (start + TTL_MS / 3 - self.now).max(0)
            }
            (Some(_), Some(_)) => {
                self.end_term(s, "the lease is lost");
                0
            }
            (Some(term), None) => {
                if self.now >= term.trusted_until {
                    self.end_term(s, "the lease could not be renewed");
                }
                0
            }
        };
        self.timer(Node::Scheduler(s), next, Timer::Lease);
    }

    fn end_term(&mut self, s: usize, why: &str) {
        self.note(|| format!("scheduler {s} stands by: {why}"));
        self.new_term(s, None);
    }

    /// The ledger has refused this epoch.
    pub(crate) fn deposed(&mut self, s: usize) {
        self.end_term(s, "the ledger refused its epoch");
    }

    fn new_term(&mut self, s: usize, term: Option<Term>) {
        let scheduler = &mut self.schedulers[s];
        scheduler.term = term;
        let timer = scheduler.trigger.timer + 1;
        scheduler.trigger = Trigger { timer, ..Trigger::default() };
        scheduler.dispatcher = Dispatcher::default();
        scheduler.supervisor = Supervisor::default();
        if term.is_some() {
            self.load(s);
            self.survey(s);
        }
    }

    fn load(&mut self, s: usize) {
        let trigger = &mut self.schedulers[s].trigger;
        if trigger.loading {
            return;
        }
        trigger.loading = true;
        if let Some(epoch) = self.schedulers[s].epoch() {
            self.call(Node::Scheduler(s), Request::Load(epoch));
        }
    }

    fn loaded(&mut self, s: usize, reply: Option<Reply>) {
        let trigger = &mut self.schedulers[s].trigger;
        trigger.loading = false;
        let Some(Reply::Jobs(jobs)) = reply else { return self.timer(Node::Scheduler(s), RETRY_MS, Timer::Reload) };
        trigger.wheel = Wheel::default();
        jobs.into_iter().for_each(|(job, next)| trigger.wheel.set(job, next));
        self.tick(s);
    }

    fn set_trigger(&mut self, s: usize, delay: i64) {
        let trigger = &mut self.schedulers[s].trigger;
        trigger.timer += 1;
        let timer = Timer::Trigger(trigger.timer);
        self.timer(Node::Scheduler(s), delay, timer);
    }

    /// Looks at what is due, queues it, and writes the next batch.
    fn tick(&mut self, s: usize) {
        if self.schedulers[s].term.is_none() {
            return;
        }
        if self.may_act(s).is_none() {
            // The same term may be trusted again, if the renewal under way comes through: look again, or nothing would.
            if self.options.mutation != Some(Mutation::ForgetTimer) {
                self.set_trigger(s, LOOK_AGAIN_MS);
            }
            return;
        }
        let now = self.wall(Node::Scheduler(s));
        let trigger = &mut self.schedulers[s].trigger;
        if trigger.queue.is_empty() && !trigger.writing && !trigger.loading {
            for (job, next) in trigger.wheel.take_due(now, FIRINGS_PER_WRITE) {
                self.look(s, job, next, now);
            }
        }
        self.write(s);
        let trigger = &self.schedulers[s].trigger;
        if !trigger.writing && !trigger.loading {
            let wait = trigger.wheel.next_ms().map_or(LOOK_AGAIN_MS, |next| (next - now).clamp(0, LOOK_AGAIN_MS));
            self.set_trigger(s, wait);
        }
    }

    fn look(&mut self, s: usize, id: JobId, next_fire_ms: i64, now_ms: i64) {
        let Some(job) = self.ledger.job(id) else { return };
        // The schedules of this world can all be computed.
        let Ok(due) = firing::due(&job.schedule, &job.spec.misfire, next_fire_ms, now_ms) else { return };
        let nominals: Vec<i64> = due.intents.iter().map(Intent::nominal_ms).collect();
        for (i, intent) in due.intents.into_iter().enumerate() {
            let following = nominals.get(i + 1).copied().or(due.next_fire_ms);
            let nominal_ms = intent.nominal_ms();
            let action = match intent {
                Intent::Fire { .. } => {
                    let time = u128::from(self.now.unsigned_abs()) << 64;
                    Ok(ExecutionId(Uuid::from_u128(time | u128::from(self.dice.bits()))))
                }
                Intent::Record { kind, .. } => Err(kind),
            };
            let firing = Firing { job: id, nominal_ms, action, next: None };
            self.schedulers[s].trigger.queue.push_back((firing, following));
        }
    }

    fn write(&mut self, s: usize) {
        let trigger = &mut self.schedulers[s].trigger;
        if trigger.writing || trigger.queue.is_empty() {
            return;
        }
        let mut batch = Vec::new();
        let mut last_of: BTreeMap<JobId, (usize, Option<i64>)> = BTreeMap::new();
        for (firing, following) in trigger.queue.drain(..trigger.queue.len().min(FIRINGS_PER_WRITE)) {
            last_of.insert(firing.job, (batch.len(), following));
            batch.push(firing);
        }
        for (at, following) in last_of.into_values() {
            batch[at].next = Some(following);
        }
        trigger.writing = true;
        if let Some(epoch) = self.schedulers[s].epoch() {
            self.call(Node::Scheduler(s), Request::Fire(epoch, batch));
        }
    }

    fn written(&mut self, s: usize, batch: Vec<Firing>, reply: Option<Reply>) {
        self.schedulers[s].trigger.writing = false;
        match reply {
            Some(Reply::Outcomes(outcomes)) => {
                for (firing, fired) in batch.iter().zip(outcomes) {
                    if let Some(next) = firing.next {
                        self.schedulers[s].trigger.wheel.set(firing.job, next);
                    }
                    if let Some(id) = fired {
                        self.note(|| format!("scheduler {s} fired {id} of job {}", firing.job));
                        self.announce(s, firing.job, id);
                    }
                }
                self.tick(s);
            }
            Some(_) => self.deposed(s),
            None => {
                self.put_back(s, batch);
                self.set_trigger(s, RETRY_MS);
            }
        }
    }

    /// Tells the dispatcher of a new execution.
    fn announce(&mut self, s: usize, job: JobId, id: ExecutionId) {
        let Some(job) = self.ledger.job(job) else { return };
        let shards_total = ShardPlan::from_spec(&job.spec.shards).map_or(1, |plan| plan.count());
        self.take_in(s, ActiveRun { id, shards_total, dispatched: 0, ended: 0 });
    }

    fn put_back(&mut self, s: usize, batch: Vec<Firing>) {
        let mut next_of: BTreeMap<JobId, i64> = BTreeMap::new();
        for mut firing in batch.into_iter().rev() {
            let own = firing.next.take();
            let later = next_of.insert(firing.job, firing.nominal_ms);
            self.schedulers[s].trigger.queue.push_front((firing, own.flatten().or(later)));
        }
    }
}
