//! Hands shards to the broker: windowed, fair, at least once. The ledger is the outbox; what the broker has confirmed is noted
//! there, and what is not noted is handed out again by whoever leads next.

use super::grouping::{self, Grouping, Limits};
use super::round::{Done, Fault, Round, align, redispatch, republish};
use super::{Deposed, SchedulerOptions, TermChanged};
use crate::guardian::Ping;
use crate::leadership::Term;
use crate::ports::{Ports, tell};
use crate::telemetry;
use actix::prelude::*;
use shardcron_broker::{BrokerError, Depth, Way};
use shardcron_domain::dispatch::{self, Cursor, DrainRate};
use shardcron_domain::limits::QUEUE_WINDOW_MAX;
use shardcron_domain::plan::ADDRESSED;
use shardcron_domain::{Epoch, ExecutionId};
use shardcron_store::{ActiveExecution, StoreError};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// How long a tier with nothing to hand out rests before its queue is looked at again.
const IDLE: Duration = Duration::from_millis(200);
/// The rest while the window is full: about a tenth of what the window holds.
const FULL: Duration = Duration::from_millis(25);
const REDISPATCH_EVERY: Duration = Duration::from_millis(100);
/// How often the ledger is asked what is active: finds what an announcement lost, and what stands still.
const SURVEY_EVERY: Duration = Duration::from_millis(1_000);

/// Executions that are looked after by one survey; the next one goes on.
const REPUBLISH_AT_ONCE: usize = 50;
/// Work that waits this long without any worker for its tier is worth a line.
const UNSERVED_AFTER: Duration = Duration::from_secs(30);

/// A tier's share of the work.
#[derive(Default)]
struct Tier {
    cursors: Vec<Cursor>,
    /// The executions of the cursors.
    known: HashSet<ExecutionId>,
    materialized: HashMap<ExecutionId, u32>,
    turn: usize,
    unserved: Unserved,
    rate: DrainRate,
    busy: bool,
    depth: Option<Depth>,
    /// Consumers at the last look that is believed.
    consumers: u32,
    /// Ready messages when last looked, how many have been published since, and when that was: for the drain rate.
    last_look: Option<(u32, Instant)>,
}

/// Since when work waits that no worker takes, and whether that has been said.
#[derive(Default)]
struct Unserved {
    since: Option<Instant>,
    said: bool,
}

/// How an execution went on between two surveys.
struct Progress {
    ended: u32,
    still_since: Instant,
    /// Doubles with each republication, so that work which merely waits in a worker's hands is not doubled again and again.
    patience: Duration,
    /// Looks in a row that found it standing still.
    strikes: u32,
}

pub(super) struct DispatcherActor {
    ports: Ports,
    options: SchedulerOptions,
    deposed: Deposed,
    term: Option<Term>,
    tiers: BTreeMap<String, Tier>,
    progress: HashMap<ExecutionId, Progress>,
    grouping: Grouping,
    redispatching: bool,
    surveying: bool,
    /// The cursors when the survey under way began: what it does not find of these has ended.
    surveyed: HashSet<ExecutionId>,
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
            grouping: Grouping::default(),
            redispatching: false,
            surveying: false,
            surveyed: HashSet::new(),
            outage: false,
        }
    }

    fn may_act(&self) -> Option<Epoch> {
        self.term.as_ref().filter(|t| t.trusted(self.ports.clock.mono_ms())).map(|t| t.epoch)
    }

    /// First attempts of other tiers wait; what has begun there goes on.
    fn covers(&self, tier: &str) -> bool {
        self.options.scope.as_ref().is_none_or(|scope| scope.covers(tier))
    }

    fn take_in(&mut self, active: &ActiveExecution) {
        if active.dispatched >= active.shards_total || !self.covers(&active.tier) || active.tier.starts_with(ADDRESSED)
        {
            return;
        }
        let tier = self.tiers.entry(active.tier.clone()).or_default();
        if tier.known.insert(active.id) {
            tier.materialized.insert(active.id, active.materialized);
            let (next, shards_total) = (active.dispatched, active.shards_total);
            tier.cursors.push(Cursor { execution: active.id, next, shards_total });
        }
    }

    /// One round of a tier: as much as its window lets through. The next one begins when this one has been noted in the ledger.
    fn step(&mut self, name: &str, ctx: &mut Context<Self>) {
        let Some(epoch) = self.may_act() else { return };
        let blocked = self.ports.broker.way() == Way::Closed;
        let Some(tier) = self.tiers.get_mut(name) else { return };
        if tier.busy || blocked {
            return;
        }
        tier.forget_finished();
        let depth = tier.depth.take();
        tier.watch_served(name, depth);
        let picks = match depth {
            // Without a fresh look at the queue nothing is published: a window that is guessed is no window.
            Some(depth) => {
                let window =
                    if depth.unbounded { QUEUE_WINDOW_MAX } else { dispatch::window(tier.rate, depth.consumers) };
                telemetry::publish_window(name, window);
                dispatch::pick(&mut tier.cursors, &mut tier.turn, window.saturating_sub(depth.ready))
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
        let consumers = depth.map_or(0, |depth| depth.consumers);
        let left =
            |execution| tier.cursors.iter().find(|c| c.execution == execution).map_or(0, |c| c.shards_total - c.next);
        let sizes: Vec<u32> =
            picks.iter().map(|p| self.grouping.size(p.execution, left(p.execution), consumers)).collect();
        let round = Round {
            ports: self.ports.clone(),
            epoch,
            tier: name.to_owned(),
            materialized: picks
                .iter()
                .map(|p| (p.execution, tier.materialized.get(&p.execution).copied().unwrap_or(0)))
                .collect(),
            picks: picks.into_iter().zip(sizes).collect(),
            tiers: self.options.tiers.clone(),
            gone: Vec::new(),
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
        if self.redispatching || self.ports.broker.way() == Way::Closed {
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
        self.surveyed = self.tiers.values().flat_map(|t| t.known.iter().copied()).collect();
        let (ports, me) = (self.ports.clone(), ctx.address());
        let known = self.grouping.known();
        let look = async move {
            let active = ports.ledger.active_executions().await?;
            let handed_out = active.iter().any(|a| a.dispatched > a.ended);
            match align(&ports, epoch, handed_out).await {
                Ok(()) => {}
                Err(e @ StoreError::Deposed { .. }) => return Err(e),
                Err(e) => tracing::debug!(error = %e, "workers could not be told about the broker yet"),
            }
            let limits = grouping::limits(&ports, &active, &known).await;
            Ok((active, limits))
        };
        self.ports.run(look, move |result| tell(me, Surveyed { epoch, result }));
    }

    /// Takes off what was there when the survey began and is not among the active any more: it has ended, or was cancelled.
    fn drop_ended(&mut self, active: &[ActiveExecution]) {
        let alive: HashSet<ExecutionId> = active.iter().map(|a| a.id).collect();
        let before = std::mem::take(&mut self.surveyed);
        for tier in self.tiers.values_mut() {
            for cursor in &mut tier.cursors {
                if before.contains(&cursor.execution) && !alive.contains(&cursor.execution) {
                    cursor.next = cursor.shards_total;
                }
            }
            tier.forget_finished();
        }
    }

    /// Handed out, not ended, and nothing moves: asks the ledger for what is still pending and hands that out again.
    fn find_stranded(&mut self, active: &[ActiveExecution]) {
        let Some(epoch) = self.may_act() else { return };
        let now = Instant::now();
        let ids: HashSet<ExecutionId> = active.iter().map(|a| a.id).collect();
        self.progress.retain(|id, _| ids.contains(id));
        let mut due = 0;
        for execution in active.iter().filter(|a| a.dispatched > 0) {
            let patience = self.options.republish_after;
            let fresh = Progress { ended: execution.ended, still_since: now, patience, strikes: 0 };
            let progress = self.progress.entry(execution.id).or_insert(fresh);
            if progress.ended != execution.ended {
                *progress = Progress { ended: execution.ended, still_since: now, patience, strikes: 0 };
                continue;
            }
            if now.duration_since(progress.still_since) < progress.patience || due >= REPUBLISH_AT_ONCE {
                continue;
            }
            due += 1;
            progress.still_since = now;
            progress.strikes += 1;
            let anyway = progress.strikes >= 3;
            if anyway {
                progress.patience = (progress.patience * 2).min(Duration::from_secs(120));
            }
            let (ports, tier, id) = (self.ports.clone(), execution.tier.clone(), execution.id);
            self.ports.io.spawn(async move {
                if let Err(e) = republish(&ports, epoch, &tier, id, anyway).await {
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
        self.grouping = Grouping::default();
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
            self.take_in(&active);
            self.step(&active.tier, ctx);
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
        let reached: HashMap<ExecutionId, u32> = done.reached.into_iter().collect();
        for cursor in &mut tier.cursors {
            if done.gone.contains(&cursor.execution) {
                cursor.next = cursor.shards_total;
            } else if let Some(to) = reached.get(&cursor.execution) {
                cursor.next = *to;
            }
        }
        tier.forget_finished();
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
    /// Drops the cursors of executions that have nothing left to hand out.
    fn forget_finished(&mut self) {
        if self.cursors.iter().all(|c| c.next < c.shards_total) {
            return;
        }
        self.cursors.retain(|c| c.next < c.shards_total);
        self.known = self.cursors.iter().map(|c| c.execution).collect();
        self.materialized.retain(|id, _| self.known.contains(id));
    }

    /// Says once that work waits for a tier that nobody serves: a misspelt tier would otherwise wait in silence.
    fn watch_served(&mut self, name: &str, depth: Option<Depth>) {
        let Some(depth) = depth else { return };
        if depth.unbounded || depth.consumers > 0 || self.cursors.is_empty() {
            self.unserved = Unserved::default();
            return;
        }
        let since = *self.unserved.since.get_or_insert_with(Instant::now);
        if since.elapsed() > UNSERVED_AFTER && !std::mem::replace(&mut self.unserved.said, true) {
            let executions = self.cursors.len();
            tracing::warn!(
                tier = name,
                executions,
                "no worker serves this tier and its shards wait; start one with SHARDCRON_WORKER_TIERS={name}=4, or mend the job's tier"
            );
        }
    }

    fn observe(&mut self, published: u32, depth: Option<Depth>) {
        // RabbitMQ answers (0, 0) for a queue that is slow to answer. Believed only the second time in a row.
        let vanished = |d: &Depth| d.ready == 0 && d.consumers == 0 && !d.unbounded;
        let depth = depth.filter(|d| !vanished(d) || std::mem::replace(&mut self.consumers, 0) == 0);
        self.depth = depth;
        let (Some(depth), now) = (depth, Instant::now()) else { return };
        self.consumers = depth.consumers;
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
    result: Result<(Vec<ActiveExecution>, Limits), StoreError>,
}

impl Handler<Surveyed> for DispatcherActor {
    type Result = ();

    fn handle(&mut self, Surveyed { epoch, result }: Surveyed, ctx: &mut Self::Context) {
        if self.term.as_ref().map(|t| t.epoch) != Some(epoch) {
            return;
        }
        self.surveying = false;
        match result {
            Ok((active, limits)) => {
                self.find_stranded(&active);
                self.grouping.look(&active, limits);
                self.drop_ended(&active);
                for execution in &active {
                    self.take_in(execution);
                }
                // A tier that rests because nothing was announced to it is looked at here too.
                let names: Vec<String> = self.tiers.keys().cloned().collect();
                for name in names {
                    self.step(&name, ctx);
                }
            }
            Err(StoreError::Deposed { .. }) => self.deposed.report(epoch),
            Err(e) => tracing::debug!(error = %e, "the active executions could not be read"),
        }
    }
}
