//! Fires what is due. Everything it does is a batch in one ledger transaction under the leader's epoch; an instant's identity is
//! its nominal time, never the time of waking (case S-19).

use super::delays::{self, Delayed};
use super::dispatcher::DispatcherActor;
use super::intent::{Ready, account, announce, scheduled_intent};
use super::loading::Loading;
use super::stand_in::StandIn;
use super::{Deposed, TermChanged, external, turns};
use crate::guardian::Ping;
use crate::leadership::Term;
use crate::ports::{Backoff, Ports, tell};
use actix::prelude::*;
use shardcron_domain::fallback::Scope;
use shardcron_domain::firing::{self, DecisionKind, Intent};
use shardcron_domain::limits::FIRINGS_PER_WRITE;
use shardcron_domain::wheel::Wheel;
use shardcron_domain::{Epoch, JobId};
use shardcron_store::{FireAction, FireIntent, FireOutcome, StoreError};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// How often the leader asks the ledger whether any job has changed.
const REVISION_EVERY: Duration = Duration::from_millis(500);
/// The longest sleep of the timer; a clock that is set is noticed within this.
const LOOK_AGAIN_MS: i64 = 1_000;

/// How often a leader that must not act looks whether it may again.
const IN_DOUBT: Duration = Duration::from_millis(100);
/// A firing transaction of this length is worth a line, and so is a job that cannot be decided about for as long.
const SLOW: Duration = Duration::from_secs(1);
/// At most so often.
const SAY_EVERY_MS: i64 = 60_000;
/// When a job whose row somebody held is looked at again.
const HELD_AGAIN: Duration = Duration::from_millis(200);

/// Holds all schedules and fires them.
pub(super) struct TriggerActor {
    pub(super) ports: Ports,
    /// A worker that has not beaten for this long is not broadcast to.
    lost_after: Duration,
    dispatcher: Addr<DispatcherActor>,
    pub(super) deposed: Deposed,
    term: Option<Term>,
    /// Ends the pump of the term's external triggers.
    pump: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
    /// Ends the rounds of the term over what waits and what follows.
    turns: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
    pub(super) jobs: HashMap<JobId, Ready>,
    pub(super) loading: Loading,
    pub(super) wheel: Wheel,
    pub(super) stand_in: StandIn,
    /// Jobs with a fixed delay whose last execution has not ended, as far as is known.
    pub(super) delayed: Delayed,
    /// Looked at and not yet written, oldest first.
    queue: VecDeque<Queued>,
    writing: bool,
    /// When it was last said that somebody holds jobs, and that the ledger is slow.
    held_said: Option<i64>,
    slow_said: Option<i64>,
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
    pub(super) fn new(
        ports: Ports,
        (scope, lost_after): (Option<Scope>, Duration),
        dispatcher: Addr<DispatcherActor>,
        deposed: Deposed,
    ) -> Self {
        TriggerActor {
            ports,
            lost_after,
            dispatcher,
            deposed,
            term: None,
            pump: None,
            turns: None,
            jobs: HashMap::new(),
            loading: Loading::default(),
            wheel: Wheel::default(),
            stand_in: StandIn::new(scope),
            delayed: Delayed::default(),
            queue: VecDeque::new(),
            writing: false,
            held_said: None,
            slow_said: None,
            backoff: None,
            timer: None,
            finish: None,
        }
    }

    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.term.as_ref().map(|t| t.epoch)
    }

    /// Something is on its way to the ledger, or about to be.
    pub(super) fn is_writing(&self) -> bool {
        self.writing || !self.queue.is_empty()
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
        if !self.is_writing() && !self.loading.reading {
            for (job, _) in self.wheel.take_due(now, FIRINGS_PER_WRITE) {
                self.look(job, now);
            }
        }
        self.write(ctx);
        if self.loading.wanted {
            self.load(ctx);
        }
        let wait = self.wheel.next_ms().map_or(LOOK_AGAIN_MS, |next| (next - now).clamp(0, LOOK_AGAIN_MS));
        if !self.writing && !self.loading.reading {
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
        let looked = match (&ready.recipe, &ready.schedule) {
            (Err(fault), _) => Err(fault.clone()),
            (Ok(_), None) => return,
            (Ok(recipe), Some(schedule)) => {
                firing::due(schedule, &recipe.misfire, next_fire_ms, now_ms).map_err(|e| e.to_string())
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
            let began = Instant::now();
            let result = ledger.fire(epoch, &batch, clock.now_ms()).await;
            Written { epoch, batch, result, took: began.elapsed() }
        };
        self.ports.run(work.instrument(span), move |written| tell(me, written));
    }

    fn written(&mut self, batch: &[FireIntent], outcomes: Vec<FireOutcome>, ctx: &mut Context<Self>) {
        let mut held: HashMap<JobId, i64> = HashMap::new();
        let now = self.ports.clock.now_ms();
        for (intent, outcome) in batch.iter().zip(outcomes) {
            if matches!(outcome, FireOutcome::Stale) {
                self.loading.stale(intent.job);
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
            let name = ready.map_or("", |r| &*r.name);
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
        self.queue.retain(|queued| !held.contains_key(&queued.intent.job));
        let epoch = self.epoch();
        let now_ms = self.ports.clock.now_ms();
        if let Some((job, nominal_ms)) = held.iter().min_by_key(|(_, nominal_ms)| **nominal_ms)
            && now_ms - nominal_ms > SLOW.as_millis() as i64
            && self.held_said.is_none_or(|said| now_ms - said > SAY_EVERY_MS)
        {
            let job = self.jobs.get(job).map_or("", |ready| &*ready.name);
            let late_ms = now_ms - nominal_ms;
            tracing::warn!(
                job,
                jobs = held.len(),
                late_ms,
                "another transaction holds the rows of some jobs; they fire when it ends"
            );
            self.held_said = Some(now_ms);
        }
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
            lost_after: self.lost_after,
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
        ctx.run_interval(REVISION_EVERY, |actor, ctx| actor.look_for_changes(ctx));
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
        self.forget_jobs();
        self.queue.clear();
        self.delayed = Delayed::default();
        (self.writing, self.backoff) = (false, None);
        if self.term.is_some() && self.finish.is_none() {
            self.load(ctx);
            self.start_pump();
            self.start_turns();
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Written {
    epoch: Epoch,
    batch: Vec<FireIntent>,
    result: Result<Vec<FireOutcome>, StoreError>,
    took: Duration,
}

impl Handler<Written> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Written { epoch, batch, result, took }: Written, ctx: &mut Self::Context) {
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
                self.watch_pace(batch.len(), took);
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
        // In turns with what is due, so that a backlog does not keep changes out, nor many changes the firings.
        if self.loading.wanted && self.queue.is_empty() {
            self.load(ctx);
        }
        if !self.loading.reading {
            self.tick(ctx);
        }
    }
}

impl TriggerActor {
    /// Lateness that comes from the database is said to come from there (case M-05).
    fn watch_pace(&mut self, firings: usize, took: Duration) {
        let now_ms = self.ports.clock.now_ms();
        if took > SLOW && self.slow_said.is_none_or(|said| now_ms - said > SAY_EVERY_MS) {
            let took_ms = took.as_millis() as u64;
            tracing::warn!(
                firings,
                took_ms,
                "the ledger is slow: one transaction of firings took this long, and what is due waits for it"
            );
            self.slow_said = Some(now_ms);
        }
    }

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
