//! Hands shards to the broker: windowed, fair, at least once. The ledger is the outbox; what the broker has confirmed is noted
//! there, and what is not noted is handed out again by whoever leads next.

use super::round::{Done, Fault, Round, redispatch, republish};
use super::{Deposed, SchedulerOptions, TermChanged};
use crate::guardian::Ping;
use crate::leadership::Term;
use crate::ports::{Ports, tell};
use crate::telemetry;
use actix::prelude::*;
use shardcron_broker::{BrokerError, BrokerState, Depth};
use shardcron_domain::dispatch::{self, Cursor, DrainRate};
use shardcron_domain::limits::QUEUE_WINDOW_MAX;
use shardcron_domain::{Epoch, ExecutionId};
use shardcron_store::{ActiveExecution, StoreError};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};
use tracing::Instrument;

/// How long a tier with nothing to hand out rests before its queue is looked at again.
const IDLE: Duration = Duration::from_millis(200);
/// The rest while the window is full: about a tenth of what the window holds.
const FULL: Duration = Duration::from_millis(25);
const REDISPATCH_EVERY: Duration = Duration::from_millis(100);
/// How often the ledger is asked what is active: finds what an announcement lost, and what stands still.
const SURVEY_EVERY: Duration = Duration::from_millis(1_000);

/// A tier's share of the work.
#[derive(Default)]
struct Tier {
    cursors: Vec<Cursor>,
    materialized: HashMap<ExecutionId, u32>,
    turn: usize,
    rate: DrainRate,
    busy: bool,
    depth: Option<Depth>,
    /// Ready messages when last looked, how many have been published since, and when that was: for the drain rate.
    last_look: Option<(u32, Instant)>,
}

/// How an execution went on between two surveys.
struct Progress {
    ended: u32,
    still_since: Instant,
    /// Doubles with each republication, so that work which merely waits in a worker's hands is not doubled again and again.
    patience: Duration,
}

pub(super) struct DispatcherActor {
    ports: Ports,
    options: SchedulerOptions,
    deposed: Deposed,
    term: Option<Term>,
    tiers: BTreeMap<String, Tier>,
    progress: HashMap<ExecutionId, Progress>,
    redispatching: bool,
    surveying: bool,
    outage: bool,
}

/// The trigger actor made an execution.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct NewExecution(pub(super) ActiveExecution);

/// Shards have become due again; look now instead of at the next interval.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct RedispatchNow;

impl DispatcherActor {
    pub(super) fn new(ports: Ports, options: SchedulerOptions, deposed: Deposed) -> Self {
        DispatcherActor {
            ports,
            options,
            deposed,
            term: None,
            tiers: BTreeMap::new(),
            progress: HashMap::new(),
            redispatching: false,
            surveying: false,
            outage: false,
        }
    }

    fn may_act(&self) -> Option<Epoch> {
        self.term.as_ref().filter(|t| t.trusted(self.ports.clock.mono_ms())).map(|t| t.epoch)
    }

    fn take_in(&mut self, active: ActiveExecution, ctx: &mut Context<Self>) {
        if active.dispatched >= active.shards_total {
            return;
        }
        let tier = self.tiers.entry(active.tier.clone()).or_default();
        tier.materialized.entry(active.id).or_insert(active.materialized);
        if !tier.cursors.iter().any(|c| c.execution == active.id) {
            tier.cursors.push(Cursor {
                execution: active.id,
                next: active.dispatched,
                shards_total: active.shards_total,
            });
        }
        self.step(&active.tier, ctx);
    }

    /// One round of a tier: as much as its window lets through. The next one begins when this one has been noted in the ledger.
    fn step(&mut self, name: &str, ctx: &mut Context<Self>) {
        let Some(epoch) = self.may_act() else { return };
        let blocked = !matches!(*self.ports.broker.state().borrow(), BrokerState::Up);
        let Some(tier) = self.tiers.get_mut(name) else { return };
        if tier.busy || blocked {
            return;
        }
        tier.cursors.retain(|c| c.next < c.shards_total);
        let depth = tier.depth.take();
        let picks = match depth {
            // Without a fresh look at the queue nothing is published: a window that is guessed is no window.
            Some(depth) => {
                let window =
                    if depth.unbounded { QUEUE_WINDOW_MAX } else { dispatch::window(tier.rate, depth.consumers) };
                telemetry::publish_window(name, window);
                let budget = if depth.unbounded { window } else { window.saturating_sub(depth.ready) };
                dispatch::pick(&mut tier.cursors, &mut tier.turn, budget)
            }
            None if tier.cursors.is_empty() => return,
            None => Vec::new(),
        };
        if depth.is_some() && picks.is_empty() {
            if !tier.cursors.is_empty() {
                self.later(name, FULL, ctx);
            }
            return;
        }
        tier.busy = true;
        let round = Round {
            ports: self.ports.clone(),
            epoch,
            tier: name.to_owned(),
            materialized: picks
                .iter()
                .map(|p| (p.execution, tier.materialized.get(&p.execution).copied().unwrap_or(0)))
                .collect(),
            picks,
            tiers: self.options.tiers.clone(),
        };
        let me = ctx.address();
        let span = tracing::info_span!("dispatch", tier = name, epoch = epoch.0);
        self.ports.run(round.run().instrument(span), move |done| tell(me, RoundDone { epoch, done }));
    }

    fn later(&self, name: &str, wait: Duration, ctx: &mut Context<Self>) {
        let name = name.to_owned();
        ctx.run_later(wait, move |actor, ctx| actor.step(&name, ctx));
    }

    fn redispatch(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.may_act() else { return };
        if self.redispatching || !matches!(*self.ports.broker.state().borrow(), BrokerState::Up) {
            return;
        }
        self.redispatching = true;
        let (ports, me) = (self.ports.clone(), ctx.address());
        self.ports.run(async move { redispatch(&ports, epoch).await }, move |result| {
            tell(me, Redispatched { epoch, result })
        });
    }

    fn survey(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.may_act() else { return };
        if self.surveying {
            return;
        }
        self.surveying = true;
        let (ledger, me) = (self.ports.ledger.clone(), ctx.address());
        self.ports
            .run(async move { ledger.active_executions().await }, move |result| tell(me, Surveyed { epoch, result }));
    }

    /// Handed out, not ended, and nothing moves: asks the ledger for what is still pending and hands that out again.
    fn find_stranded(&mut self, active: &[ActiveExecution]) {
        let Some(epoch) = self.may_act() else { return };
        let now = Instant::now();
        self.progress.retain(|id, _| active.iter().any(|a| a.id == *id));
        for execution in active.iter().filter(|a| a.dispatched >= a.shards_total) {
            let patience = self.options.republish_after;
            let progress = self.progress.entry(execution.id).or_insert(Progress {
                ended: execution.ended,
                still_since: now,
                patience,
            });
            if progress.ended != execution.ended {
                *progress = Progress { ended: execution.ended, still_since: now, patience };
                continue;
            }
            if now.duration_since(progress.still_since) < progress.patience {
                continue;
            }
            progress.still_since = now;
            progress.patience = (progress.patience * 2).min(Duration::from_secs(120));
            let (ports, tier, id) = (self.ports.clone(), execution.tier.clone(), execution.id);
            self.ports.io.spawn(async move {
                if let Err(e) = republish(&ports, epoch, &tier, id).await {
                    tracing::debug!(execution_id = %id, error = %e, "stranded shards could not be handed out again yet");
                }
            });
        }
    }
}

impl Actor for DispatcherActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1_024);
        ctx.run_interval(REDISPATCH_EVERY, |actor, ctx| actor.redispatch(ctx));
        ctx.run_interval(SURVEY_EVERY, |actor, ctx| actor.survey(ctx));
    }
}

impl Handler<Ping> for DispatcherActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

impl Handler<TermChanged> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, TermChanged(leading): TermChanged, ctx: &mut Self::Context) {
        self.term = leading.0;
        self.tiers.clear();
        self.progress.clear();
        (self.redispatching, self.surveying, self.outage) = (false, false, false);
        if self.term.is_some() {
            let (ports, tiers) = (self.ports.clone(), self.options.tiers.clone());
            self.ports.io.spawn(async move {
                match ports.broker.declare(&tiers).await {
                    Ok(()) => {}
                    Err(BrokerError::Unavailable(why)) => {
                        tracing::debug!(reason = %why, "queues are declared with the first dispatch")
                    }
                    Err(e @ BrokerError::Refused(_)) => tracing::error!(error = %e, "queues could not be declared"),
                }
            });
            self.survey(ctx);
        }
    }
}

impl Handler<NewExecution> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, NewExecution(active): NewExecution, ctx: &mut Self::Context) {
        if self.term.is_some() {
            self.take_in(active, ctx);
        }
    }
}

impl Handler<RedispatchNow> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, _: RedispatchNow, ctx: &mut Self::Context) {
        self.redispatch(ctx);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct RoundDone {
    epoch: Epoch,
    done: Done,
}

impl Handler<RoundDone> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, RoundDone { epoch, done }: RoundDone, ctx: &mut Self::Context) {
        if self.term.as_ref().map(|t| t.epoch) != Some(epoch) {
            return;
        }
        let Some(tier) = self.tiers.get_mut(&done.tier) else { return };
        tier.busy = false;
        tier.materialized.extend(done.materialized);
        for (execution, to) in done.reached {
            if let Some(cursor) = tier.cursors.iter_mut().find(|c| c.execution == execution) {
                cursor.next = to;
            }
        }
        let unfinished: Vec<ExecutionId> =
            tier.cursors.iter().filter(|c| c.next < c.shards_total).map(|c| c.execution).collect();
        tier.materialized.retain(|id, _| unfinished.contains(id));
        tier.observe(done.published, done.depth);
        let name = done.tier;
        match done.fault {
            None => {
                if std::mem::take(&mut self.outage) {
                    tracing::info!("dispatch goes on");
                }
                self.step(&name, ctx);
            }
            Some(Fault::Deposed) => self.deposed.report(epoch),
            Some(fault) => {
                if !std::mem::replace(&mut self.outage, true) {
                    let why = match fault {
                        Fault::Ledger(e) => e.to_string(),
                        Fault::Broker(why) => why,
                        Fault::Deposed => String::new(),
                    };
                    tracing::warn!(tier = %name, error = %why, "dispatch pauses; what is fired waits in the ledger");
                }
                self.later(&name, IDLE, ctx);
            }
        }
    }
}

impl Tier {
    fn observe(&mut self, published: u32, depth: Option<Depth>) {
        self.depth = depth;
        let (Some(depth), now) = (depth, Instant::now()) else { return };
        if let Some((ready_then, then)) = self.last_look {
            let drained = (ready_then + published).saturating_sub(depth.ready);
            self.rate.observe(drained.into(), now.duration_since(then).as_millis().min(u128::from(u64::MAX)) as u64);
        }
        self.last_look = Some((depth.ready, now));
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Redispatched {
    epoch: Epoch,
    result: Result<(usize, bool), StoreError>,
}

impl Handler<Redispatched> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, Redispatched { epoch, result }: Redispatched, ctx: &mut Self::Context) {
        if self.term.as_ref().map(|t| t.epoch) != Some(epoch) {
            return;
        }
        self.redispatching = false;
        match result {
            Ok((_, true)) => self.redispatch(ctx),
            Ok(_) => {}
            Err(StoreError::Deposed { .. }) => self.deposed.report(epoch),
            Err(e) => tracing::debug!(error = %e, "retries could not be handed out yet"),
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Surveyed {
    epoch: Epoch,
    result: Result<Vec<ActiveExecution>, StoreError>,
}

impl Handler<Surveyed> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, Surveyed { epoch, result }: Surveyed, ctx: &mut Self::Context) {
        if self.term.as_ref().map(|t| t.epoch) != Some(epoch) {
            return;
        }
        self.surveying = false;
        match result {
            Ok(active) => {
                self.find_stranded(&active);
                for execution in active {
                    self.take_in(execution, ctx);
                }
                // A tier that rests because nothing was announced to it is looked at here too.
                let names: Vec<String> = self.tiers.keys().cloned().collect();
                for name in names {
                    self.step(&name, ctx);
                }
            }
            Err(e) => tracing::debug!(error = %e, "the active executions could not be read"),
        }
    }
}
