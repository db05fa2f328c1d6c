//! Fires what is due. Everything it does is a batch in one ledger transaction under the leader's epoch; an instant's identity is
//! its nominal time, never the time of waking (case S-19).

use super::delays::{self, Delayed};
use super::dispatcher::DispatcherActor;
use super::intent::{Ready, account, announce, scheduled_intent, with_owed};
use super::stand_in::{LastFired, StandIn};
use super::{Deposed, TermChanged, external, turns};
use crate::guardian::Ping;
use crate::leadership::Term;
use crate::ports::{Backoff, Ports, tell};
use actix::prelude::*;
use shardcron_domain::fallback::Scope;
use shardcron_domain::firing::{self, DecisionKind, Intent};
use shardcron_domain::job::JobSpec;
use shardcron_domain::limits::FIRINGS_PER_WRITE;
use shardcron_domain::schedule::ExceptionPool;
use shardcron_domain::wheel::Wheel;
use shardcron_domain::{Epoch, JobId};
use shardcron_store::{FireAction, FireIntent, FireOutcome, JobRecord, StoreError};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// How often the leader asks the ledger whether any job has changed.
const REVISION_EVERY: Duration = Duration::from_millis(500);
/// The longest sleep of the timer; a clock that is set is noticed within this.
const LOOK_AGAIN_MS: i64 = 1_000;

/// How often a leader that must not act looks whether it may again.
const IN_DOUBT: Duration = Duration::from_millis(100);
/// When a job whose row somebody held is looked at again.
const HELD_AGAIN: Duration = Duration::from_millis(200);

/// Holds all schedules and fires them.
pub(super) struct TriggerActor {
    pub(super) ports: Ports,
    dispatcher: Addr<DispatcherActor>,
    pub(super) deposed: Deposed,
    term: Option<Term>,
    /// Ends the pump of the term's external triggers.
    pump: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
    /// Ends the rounds of the term over what waits and what follows.
    turns: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
    pub(super) jobs: HashMap<JobId, Ready>,
    revision: Option<i64>,
    wheel: Wheel,
    stand_in: StandIn,
    /// Jobs with a fixed delay whose last execution has not ended, as far as is known.
    pub(super) delayed: Delayed,
    /// Looked at and not yet written, oldest first.
    queue: VecDeque<Queued>,
    writing: bool,
    loading: bool,
    /// A change that was seen while a write was under way.
    reload: bool,
    backoff: Option<Backoff>,
    timer: Option<SpawnHandle>,
    finish: Option<oneshot::Sender<()>>,
}

struct Queued {
    intent: FireIntent,
    /// The job's next instant once this one is written.
    following: Option<i64>,
}

impl TriggerActor {
    pub(super) fn new(ports: Ports, scope: Option<Scope>, dispatcher: Addr<DispatcherActor>, deposed: Deposed) -> Self {
        TriggerActor {
            ports,
            dispatcher,
            deposed,
            term: None,
            pump: None,
            turns: None,
            jobs: HashMap::new(),
            revision: None,
            wheel: Wheel::default(),
            stand_in: StandIn::new(scope),
            delayed: Delayed::default(),
            queue: VecDeque::new(),
            writing: false,
            loading: false,
            reload: false,
            backoff: None,
            timer: None,
            finish: None,
        }
    }

    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.term.as_ref().map(|t| t.epoch)
    }

    fn load(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.epoch() else { return };
        if self.loading {
            return;
        }
        if self.writing || !self.queue.is_empty() {
            self.reload = true;
            return;
        }
        (self.loading, self.reload) = (true, false);
        let (ledger, me) = (self.ports.ledger.clone(), ctx.address());
        let look_back = self.stand_in.look_back(ledger.clone(), self.ports.clock.now_ms());
        let work = async move {
            // The revision first: a change between the two reads is seen again by the next poll.
            let revision = ledger.jobs_revision().await?;
            Ok((revision, ledger.jobs().await?, look_back.await?))
        };
        self.ports.run(work, move |result| tell(me, Loaded { epoch, result }));
    }

    /// Looks at what is due, queues it, and writes the next batch.
    pub(super) fn tick(&mut self, ctx: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        let Some(term) = &self.term else { return };
        if self.finish.is_some() {
            return;
        }
        if !term.trusted(self.ports.clock.mono_ms()) {
            // The lease may yet be renewed in this same term, and then nothing else would wake this actor.
            self.timer = Some(ctx.run_later(IN_DOUBT, |actor, ctx| actor.tick(ctx)));
            return;
        }
        let now = self.ports.clock.now_ms();
        if self.queue.is_empty() && !self.writing && !self.loading {
            for (job, _) in self.wheel.take_due(now, FIRINGS_PER_WRITE) {
                self.look(job, now);
            }
        }
        self.write(ctx);
        let wait = self.wheel.next_ms().map_or(LOOK_AGAIN_MS, |next| (next - now).clamp(0, LOOK_AGAIN_MS));
        if !self.writing && !self.loading {
            let wait = Duration::from_millis(wait.unsigned_abs());
            self.timer = Some(ctx.run_later(wait, |actor, ctx| actor.tick(ctx)));
        }
    }

    /// Puts a job on the wheel for its next instant, or among those that wait for an end.
    pub(super) fn plan(&mut self, id: JobId, next_ms: Option<i64>) {
        let Some(ready) = self.jobs.get_mut(&id) else { return };
        ready.next_ms = next_ms;
        let schedule = ready.schedule.as_ref();
        // What can't be computed is looked at by its instant, and found out there.
        let due_at = |next| schedule.and_then(|schedule| schedule.due_at(next).ok()).unwrap_or(next);
        self.wheel.set(id, next_ms.map(due_at));
        if next_ms.is_none() && schedule.is_some_and(|schedule| schedule.delay_ms().is_some()) {
            self.delayed.wait(id);
        }
    }

    fn look(&mut self, id: JobId, now_ms: i64) {
        let Some(ready) = self.jobs.get(&id) else { return };
        let Some(next_fire_ms) = ready.next_ms else { return };
        let looked = match (&ready.spec, &ready.schedule) {
            (Err(fault), _) => Err(fault.clone()),
            (Ok(_), None) => return,
            (Ok(spec), Some(schedule)) => {
                firing::due(schedule, &spec.misfire, next_fire_ms, now_ms).map_err(|e| e.to_string())
            }
        };
        match looked {
            Ok(due) => {
                let nominals: Vec<i64> = due.intents.iter().map(Intent::nominal_ms).collect();
                for (i, intent) in self.stand_in.thin_out(id, due.intents).into_iter().enumerate() {
                    let following = nominals.get(i + 1).copied().or(due.next_fire_ms);
                    self.queue.push_back(Queued {
                        intent: scheduled_intent(ready, intent, self.ports.entropy.id()),
                        following,
                    });
                }
            }
            Err(reason) => {
                // Never the silent end of a job: an alert now, a decision in the ledger, and the job's list shows it.
                tracing::error!(job = %ready.name, error = %reason, "the schedule can't be computed; the job will not fire by itself");
                let intent = Intent::Record { nominal_ms: next_fire_ms, kind: DecisionKind::InvalidSchedule, reason };
                self.queue.push_back(Queued {
                    intent: scheduled_intent(ready, intent, self.ports.entropy.id()),
                    following: None,
                });
            }
        }
    }

    fn write(&mut self, ctx: &mut Context<Self>) {
        let (Some(epoch), false, false) = (self.epoch(), self.writing, self.queue.is_empty()) else { return };
        let mut batch: Vec<FireIntent> = Vec::new();
        let mut last_of: HashMap<JobId, (usize, Option<i64>)> = HashMap::new();
        for queued in self.queue.drain(..self.queue.len().min(FIRINGS_PER_WRITE)) {
            last_of.insert(queued.intent.job, (batch.len(), queued.following));
            batch.push(queued.intent);
        }
        // Only the last intent of a job moves its next instant, to the instant after it: a crash between two batches goes on there.
        for (at, following) in last_of.into_values() {
            batch[at].next_fire_ms = Some(following);
        }
        self.writing = true;
        let (ledger, clock, me) = (self.ports.ledger.clone(), self.ports.clock.clone(), ctx.address());
        let span = tracing::info_span!("fire", epoch = epoch.0, firings = batch.len());
        let work = async move {
            let result = ledger.fire(epoch, &batch, clock.now_ms()).await;
            (batch, result)
        };
        self.ports.run(work.instrument(span), move |(batch, result)| tell(me, Written { epoch, batch, result }));
    }

    fn written(&mut self, batch: &[FireIntent], outcomes: Vec<FireOutcome>, ctx: &mut Context<Self>) {
        let mut held: HashMap<JobId, i64> = HashMap::new();
        let now = self.ports.clock.now_ms();
        for (intent, outcome) in batch.iter().zip(outcomes) {
            if matches!(outcome, FireOutcome::Stale) {
                self.reload = true;
                continue;
            }
            if matches!(outcome, FireOutcome::Busy) {
                let first = held.entry(intent.job).or_insert(intent.nominal_ms);
                *first = (*first).min(intent.nominal_ms);
                continue;
            }
            if let Some(next) = intent.next_fire_ms {
                self.plan(intent.job, next);
            }
            let ready = self.jobs.get(&intent.job);
            let name = ready.map_or("", |r| r.name.as_str());
            let due_ms = ready.and_then(|r| r.schedule.as_ref()?.due_at(intent.nominal_ms).ok());
            account(name, intent, &outcome, now - due_ms.unwrap_or(intent.nominal_ms));
            if let (FireOutcome::Fired(_), FireAction::Fire(new)) = (&outcome, &intent.action) {
                self.stand_in.fired(intent.job, intent.nominal_ms);
                announce(&self.dispatcher, new);
            }
        }
        if !held.is_empty() {
            self.look_later(held, ctx);
        }
    }

    /// Jobs whose rows somebody holds are looked at again from their first instant that was not decided; what was queued behind it
    /// is made again then, so that no later instant passes it.
    fn look_later(&mut self, held: HashMap<JobId, i64>, ctx: &mut Context<Self>) {
        tracing::debug!(jobs = held.len(), "some jobs are held by another transaction; their firings will be late");
        self.queue.retain(|queued| !held.contains_key(&queued.intent.job));
        let epoch = self.epoch();
        ctx.run_later(HELD_AGAIN, move |actor, ctx| {
            // A new term, or jobs that were loaded anew, have their instants from the ledger.
            if actor.epoch() == epoch {
                for (job, next) in held {
                    if actor.wheel.get(job).is_none_or(|at| at > next) && actor.jobs.contains_key(&job) {
                        actor.plan(job, Some(next));
                    }
                }
                actor.tick(ctx);
            }
        });
    }

    fn start_pump(&mut self) {
        // Triggers by message wait for a scheduler: taken by a stand-in, those for other tiers' jobs would hold up the rest.
        let Some(term) = self.term.clone().filter(|_| self.stand_in.is_scheduler()) else { return };
        let stop = CancellationToken::new();
        let pump = external::Pump {
            ports: self.ports.clone(),
            dispatcher: self.dispatcher.clone(),
            deposed: self.deposed.clone(),
            term,
            stop: stop.clone(),
        };
        self.pump = Some((stop, self.ports.io.spawn(pump.run())));
    }

    fn start_turns(&mut self) {
        let Some(term) = self.term.clone() else { return };
        let stop = CancellationToken::new();
        let turns = turns::Turns {
            scope: self.stand_in.scope().cloned(),
            ports: self.ports.clone(),
            dispatcher: self.dispatcher.clone(),
            deposed: self.deposed.clone(),
            term,
            stop: stop.clone(),
        };
        self.turns = Some((stop, self.ports.io.spawn(turns.run())));
    }
}

impl Actor for TriggerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1_024);
        ctx.run_interval(REVISION_EVERY, |actor, ctx| {
            let Some(epoch) = actor.epoch() else { return };
            let (ledger, me) = (actor.ports.ledger.clone(), ctx.address());
            actor
                .ports
                .run(async move { ledger.jobs_revision().await }, move |result| tell(me, Revision { epoch, result }));
        });
        ctx.run_interval(delays::LOOK_EVERY, |actor, ctx| actor.look_at_delayed(ctx));
    }
}

impl Handler<Ping> for TriggerActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

impl Handler<TermChanged> for TriggerActor {
    type Result = ();

    fn handle(&mut self, TermChanged(leading): TermChanged, ctx: &mut Self::Context) {
        for (stop, _) in self.pump.take().into_iter().chain(self.turns.take()) {
            stop.cancel();
        }
        self.term = leading.0;
        self.jobs.clear();
        self.queue.clear();
        self.wheel = Wheel::default();
        self.delayed = Delayed::default();
        self.revision = None;
        (self.writing, self.loading, self.reload, self.backoff) = (false, false, false, None);
        if self.term.is_some() && self.finish.is_none() {
            self.load(ctx);
            self.start_pump();
            self.start_turns();
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Revision {
    epoch: Epoch,
    result: Result<i64, StoreError>,
}

impl Handler<Revision> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Revision { epoch, result }: Revision, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            return;
        }
        match result {
            Ok(revision) if self.revision != Some(revision) => self.load(ctx),
            Ok(_) => {}
            Err(e) => tracing::debug!(error = %e, "the jobs' revision could not be read"),
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Loaded {
    epoch: Epoch,
    result: Result<(i64, Vec<JobRecord>, LastFired), StoreError>,
}

impl Handler<Loaded> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Loaded { epoch, result }: Loaded, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            return;
        }
        self.loading = false;
        match result {
            Ok((revision, records, last_fired)) => {
                self.backoff = None;
                self.revision = Some(revision);
                self.jobs.clear();
                self.wheel = Wheel::default();
                self.delayed.clear();
                let mut pool = ExceptionPool::default();
                for record in records {
                    if let Some(last) = last_fired.get(&record.name) {
                        self.stand_in.fired(record.id, *last);
                    }
                    self.take_in(record, &mut pool);
                }
                self.look_at_delayed(ctx);
                tracing::debug!(jobs = self.jobs.len(), scheduled = self.wheel.len(), "jobs loaded");
                self.tick(ctx);
            }
            Err(e) => {
                if self.backoff.is_none() {
                    tracing::warn!(error = %e, "the jobs could not be loaded; trying until it works");
                }
                let wait = self.backoff.get_or_insert_with(|| self.ports.backoff()).next();
                ctx.run_later(wait, |actor, ctx| actor.load(ctx));
            }
        }
    }
}

impl TriggerActor {
    fn take_in(&mut self, record: JobRecord, pool: &mut ExceptionPool) {
        // A stand-in leaves other tiers' instants undecided, and those of a job of no known tier: the next scheduler decides them.
        let tier = record.spec.as_ref().ok().map(|spec| spec.tier.as_str());
        if !self.stand_in.is_scheduler() && !tier.is_some_and(|tier| self.stand_in.covers(tier)) {
            return;
        }
        let JobRecord { id, name, version, next_fire_ms, .. } = record;
        let read = record.spec.and_then(|spec| {
            let schedule = with_owed(&spec, &record.owed).map_err(|e| e.to_string())?;
            Ok((spec, schedule))
        });
        // One job that can't be used must not stop the others (case M-06). It stays on the wheel: its instant gets a decision.
        let (spec, schedule) = match read {
            Ok((spec, schedule)) => (Ok(JobSpec { schedule: None, ..spec }), schedule),
            Err(fault) => {
                tracing::error!(job = %name, fault = %fault, "this job can't be used and will not fire by itself; apply it again");
                (Err(fault), None)
            }
        };
        let schedule = schedule.map(|mut schedule| {
            schedule.share(pool);
            schedule
        });
        self.jobs.insert(id, Ready { id, name, version, spec, schedule, next_ms: None });
        self.plan(id, next_fire_ms);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Written {
    epoch: Epoch,
    batch: Vec<FireIntent>,
    result: Result<Vec<FireOutcome>, StoreError>,
}

impl Handler<Written> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Written { epoch, batch, result }: Written, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            // The term ended meanwhile. What was written stands; what was not, the next leader finds by the jobs' next instants.
            if let Some(done) = self.finish.take() {
                let _ = done.send(());
            }
            return;
        }
        self.writing = false;
        match result {
            Ok(outcomes) => {
                if self.backoff.take().is_some() {
                    tracing::info!("the ledger takes firings again");
                }
                self.written(&batch, outcomes, ctx);
            }
            Err(StoreError::Deposed { .. }) => {
                self.deposed.report(epoch);
                return;
            }
            Err(e) => {
                if self.backoff.is_none() {
                    tracing::warn!(error = %e, due = batch.len() + self.queue.len(), "the ledger did not take the firings; trying until it does");
                }
                self.put_back(batch);
                let wait = self.backoff.get_or_insert_with(|| self.ports.backoff()).next();
                ctx.run_later(wait, |actor, ctx| actor.tick(ctx));
                return;
            }
        }
        if let Some(done) = self.finish.take() {
            let _ = done.send(());
            return;
        }
        if self.reload && self.queue.is_empty() {
            self.load(ctx);
        } else {
            self.tick(ctx);
        }
    }
}

impl TriggerActor {
    fn put_back(&mut self, batch: Vec<FireIntent>) {
        let mut next_of: HashMap<JobId, Option<i64>> = HashMap::new();
        for mut intent in batch.into_iter().rev() {
            let own_next = intent.next_fire_ms.take();
            let later = next_of.insert(intent.job, Some(intent.nominal_ms)).flatten();
            let following = own_next.flatten().or(later);
            self.queue.push_front(Queued { intent, following });
        }
    }
}

/// No new firing; answers when the one under way is in the ledger.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Finish;

impl Handler<Finish> for TriggerActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Finish, _: &mut Self::Context) -> Self::Result {
        let tasks: Vec<_> = self
            .pump
            .take()
            .into_iter()
            .chain(self.turns.take())
            .map(|(stop, ended)| {
                stop.cancel();
                ended
            })
            .collect();
        let (done, wait) = oneshot::channel();
        if self.writing {
            self.finish = Some(done);
        } else {
            let _ = done.send(());
            self.term = None;
        }
        Box::pin(async move {
            // A trigger whose firing is committed is acked before the lease goes, or the next leader would fire it again.
            let both = async {
                let _ = wait.await;
                for task in tasks {
                    let _ = task.await;
                }
            };
            let _ = tokio::time::timeout(Duration::from_secs(5), both).await;
        })
    }
}
