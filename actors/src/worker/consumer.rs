//! One tier of a worker: takes deliveries, has them claimed, runs them, has their ends recorded, and only then acks (A1).
//!
//! ```text
//! delivery ─▶ held ─▶ claiming ─▶ claimed ─▶ running ─▶ recording ─▶ acked
//!                        ├── refused ──────────────────────────────▶ acked (the ledger says that it is not wanted)
//!                        └── somebody else's, and it came again ─▶ taking over ─▶ claimed, or acked
//! ```
//! How many are held and claimed ahead of the free slots follows from how long shards take (`shardcron_domain::flow`).

mod leave;
mod takeover;

pub(super) use leave::{Drain, Fence, Hurry};

use super::attempt::{Attempt, End, Leftover};
use super::recorder::{Claim, ClaimVerdict, ClaimsSettled, EndsSettled, NoClaim, Record, RecorderActor};
use super::{Resolve, Shared, TierOptions};
use crate::guardian::Ping;
use crate::heads::Heads;
use crate::ports::{Ports, tell};
use crate::telemetry;
use actix::prelude::*;
use shardcron_broker::{Acker, Arrival, Deliveries, Delivery, Tag};
use shardcron_domain::flow::{Pace, worth_changing};
use shardcron_domain::invariants::InvariantId;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::{Checkpoint, Phase, Rejection};
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_store::{AttemptOutcome, Ended, Recorded};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The wait before a claim that came too early (clocks differ) is tried again.
const TOO_EARLY: Duration = Duration::from_secs(1);

/// Attempts that take this long are not what one claims ahead for.
const LONG: Duration = Duration::from_secs(1);

/// What a consumer is made of.
#[derive(Clone)]
pub(super) struct Parts {
    pub(super) ports: Ports,
    pub(super) heads: Heads,
    pub(super) resolve: Resolve,
    pub(super) owner: Incarnation,
    pub(super) tier: TierOptions,
    pub(super) ack_horizon: Duration,
    pub(super) lost_after: Duration,
    /// See `Attempt::fenced_grace`.
    pub(super) fenced_grace: Duration,
    pub(super) recorder: Addr<RecorderActor>,
    pub(super) shared: Arc<Shared>,
}

/// Where a delivery is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Claiming,
    TakingOver,
    Claimed,
    Running,
    Recording,
}

struct Entry {
    step: Step,
    /// More than one if the broker delivered the attempt twice while it was here.
    tags: Vec<Tag>,
    /// The broker says that it has delivered one of them before.
    redelivered: bool,
}

impl Entry {
    fn add(&mut self, delivery: &Delivery) {
        self.tags.push(delivery.tag);
        self.redelivered |= delivery.redelivered;
    }
}

pub(super) struct ConsumerActor {
    parts: Parts,
    acker: Arc<dyn Acker>,
    prefetch: u16,
    pace: Pace,
    /// Not claimed yet.
    held: VecDeque<Delivery>,
    entries: HashMap<AttemptRef, Entry>,
    /// Claimed and not started.
    ready: VecDeque<(AttemptRef, Option<Checkpoint>)>,
    claiming: usize,
    running: usize,
    /// Tells the handlers of this tier to stop.
    stop: CancellationToken,
    /// Tells them, before that, that it is because of the fence.
    fence: CancellationToken,
    draining: bool,
    /// The drain's limit has passed: nothing is started any more.
    out_of_time: bool,
    fenced: bool,
    drained: Vec<oneshot::Sender<()>>,
    /// When the channel was last made anew after it had been lost.
    renewed: Option<Instant>,
}

/// Passes what arrives on to the actor, which answers when it has taken it: a full actor slows the broker down.
pub(super) async fn feed(mut deliveries: Box<dyn Deliveries>, consumer: Addr<ConsumerActor>) {
    while let Some(arrival) = deliveries.next().await {
        tell(consumer.clone(), Arrived(arrival)).await;
    }
}

impl ConsumerActor {
    pub(super) fn new(parts: Parts, acker: Arc<dyn Acker>, prefetch: u16) -> Self {
        ConsumerActor {
            parts,
            acker,
            prefetch,
            pace: Pace::default(),
            held: VecDeque::new(),
            entries: HashMap::new(),
            ready: VecDeque::new(),
            claiming: 0,
            running: 0,
            stop: CancellationToken::new(),
            fence: CancellationToken::new(),
            draining: false,
            out_of_time: false,
            fenced: false,
            drained: Vec::new(),
            renewed: None,
        }
    }

    fn take_in(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            match self.entries.get_mut(&delivery.message.attempt) {
                // Delivered again while it is here: one attempt, acked by every tag that it has.
                Some(entry) => entry.add(&delivery),
                None => self.held.push_back(delivery),
            }
        }
    }

    /// Starts what can be started and claims what will be needed soon.
    fn pump(&mut self, ctx: &mut Context<Self>) {
        if self.fenced || self.out_of_time {
            return;
        }
        while self.running < self.parts.tier.concurrency {
            let Some((attempt, checkpoint)) = self.ready.pop_front() else { break };
            self.start(attempt, checkpoint, ctx);
        }
        if self.draining {
            return;
        }
        let most = self.parts.tier.concurrency + self.pace.ahead(self.parts.tier.concurrency);
        let room = most.saturating_sub(self.running + self.ready.len() + self.claiming);
        let mut batch = Vec::new();
        while batch.len() < room {
            let Some(delivery) = self.held.pop_front() else { break };
            let attempt = delivery.message.attempt;
            match self.entries.get_mut(&attempt) {
                Some(entry) => entry.add(&delivery),
                None => {
                    let (tags, redelivered) = (vec![delivery.tag], delivery.redelivered);
                    self.entries.insert(attempt, Entry { step: Step::Claiming, tags, redelivered });
                    batch.push(attempt);
                }
            }
        }
        if !batch.is_empty() {
            self.claiming += batch.len();
            // The recorder's mailbox has room for everything that consumers can hold.
            if self.parts.recorder.try_send(Claim { attempts: batch, from: ctx.address() }).is_err() {
                tracing::error!("the recorder does not take claims; the guardian will end this process");
            }
        }
        let wanted = self.pace.prefetch(self.parts.tier.concurrency);
        if worth_changing(self.prefetch, wanted) {
            self.prefetch = wanted;
            let acker = self.acker.clone();
            self.parts.ports.io.spawn(async move { acker.set_prefetch(wanted).await });
        }
    }

    fn start(&mut self, attempt: AttemptRef, checkpoint: Option<Checkpoint>, ctx: &mut Context<Self>) {
        let Some(entry) = self.entries.get_mut(&attempt) else { return };
        entry.step = Step::Running;
        self.running += 1;
        self.show_running(1);
        let stop = self.stop.child_token();
        let listed = self.parts.shared.cancels.list(attempt, stop.clone());
        let run = Attempt {
            ports: self.parts.ports.clone(),
            heads: self.parts.heads.clone(),
            resolve: self.parts.resolve.clone(),
            owner: self.parts.owner,
            attempt,
            checkpoint,
            stop,
            fence: self.fence.clone(),
            fenced_grace: self.parts.fenced_grace,
            shared: self.parts.shared.clone(),
        };
        let me = ctx.address();
        let horizon = self.parts.ack_horizon;
        self.parts.ports.io.spawn(async move {
            // Off the list when the attempt has ended.
            let _listed = listed;
            let run = run.run();
            tokio::pin!(run);
            let (end, took, leftover) = tokio::select! {
                biased;
                done = &mut run => done,
                () = tokio::time::sleep(horizon) => {
                    // RabbitMQ's consumer_timeout would close the channel under a long shard; the ledger holds it as running.
                    tell(me.clone(), PastHorizon(attempt)).await;
                    run.await
                }
            };
            tell(me.clone(), Finished { attempt, end, took, frees: leftover.is_none() }).await;
            if let Some(leftover) = leftover {
                wait_for(leftover, attempt).await;
                tell(me, SlotFree).await;
            }
        });
    }

    fn show_running(&self, change: i64) {
        let shared = &self.parts.shared.running;
        let _ = shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add_signed(change as i32));
        telemetry::worker_running(&self.parts.tier.name, self.running);
    }

    /// Acks what the ledger has answered for (A1): an end that it took or refused, or a claim that it refused.
    /// `answered`: the step at which that answer finds a delivery; at any other the ack would come before it.
    fn settle(&mut self, attempts: impl Iterator<Item = AttemptRef>, answered: Step) {
        let entries = attempts.filter_map(|a| self.entries.remove(&a));
        let seen = entries
            .inspect(|e| telemetry::check(InvariantId::A1, e.step == answered, "acked before the ledger answered"));
        let tags: Vec<Tag> = seen.flat_map(|e| e.tags).collect();
        if !tags.is_empty() {
            let acker = self.acker.clone();
            self.parts.ports.io.spawn(async move { acker.ack(&tags).await });
        }
    }

    fn record(&mut self, ended: Ended, ctx: &mut Context<Self>) {
        if let Some(entry) = self.entries.get_mut(&ended.attempt) {
            entry.step = Step::Recording;
        }
        if self.parts.recorder.try_send(Record { ended, from: ctx.address() }).is_err() {
            tracing::error!("the recorder does not take results; the guardian will end this process");
        }
    }

    /// Hands back what is claimed and not started, but for the first `keep`.
    fn give_back_ready(&mut self, keep: usize, ctx: &mut Context<Self>) {
        let now_ms = self.parts.ports.clock.now_ms();
        let excess = self.ready.split_off(self.ready.len().min(keep));
        for (attempt, _) in excess {
            let outcome = AttemptOutcome::HandBack;
            self.record(
                Ended {
                    attempt,
                    outcome,
                    started_ms: now_ms,
                    ended_ms: now_ms,
                    retry: RetryPolicy::default(),
                    seed: 0,
                },
                ctx,
            );
        }
    }

    fn requeue_held(&mut self) {
        let tags: Vec<Tag> = std::mem::take(&mut self.held).into_iter().map(|d| d.tag).collect();
        if !tags.is_empty() {
            let acker = self.acker.clone();
            self.parts.ports.io.spawn(async move { acker.requeue(&tags).await });
        }
    }

    fn check_drained(&mut self) {
        if self.entries.is_empty() {
            for done in self.drained.drain(..) {
                let _ = done.send(());
            }
        }
    }
}

impl Actor for ConsumerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4_096);
    }
}

impl Handler<Ping> for ConsumerActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Arrived(pub(super) Arrival);

impl Handler<Arrived> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, Arrived(arrival): Arrived, ctx: &mut Self::Context) {
        match arrival {
            Arrival::Shards(deliveries) => self.take_in(deliveries),
            Arrival::Renewed { generation } => {
                self.renewed = Some(Instant::now());
                // What was held comes again under new tags; what is under way goes on, and is acked by its new tag.
                self.held.retain(|d| d.tag.generation >= generation);
                for entry in self.entries.values_mut() {
                    entry.tags.retain(|t| t.generation >= generation);
                }
            }
        }
        if self.draining || self.fenced {
            self.requeue_held();
        } else {
            self.pump(ctx);
        }
    }
}

impl Handler<ClaimsSettled> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, ClaimsSettled(answers): ClaimsSettled, ctx: &mut Self::Context) {
        self.claiming = self.claiming.saturating_sub(answers.len());
        let (mut unwanted, mut candidates) = (Vec::new(), Vec::new());
        for (attempt, verdict) in answers {
            if let Some(candidate) = self.candidate(attempt, &verdict) {
                candidates.push(candidate);
            } else if let Some(refused) = self.take_verdict(attempt, verdict, ctx) {
                unwanted.push(refused);
            }
        }
        self.ask_to_take_over(candidates, ctx);
        self.settle(unwanted.into_iter(), Step::Claiming);
        self.go_on(ctx);
    }
}

impl ConsumerActor {
    /// Returns the attempt if its delivery is to be acked without having been run.
    fn take_verdict(
        &mut self,
        attempt: AttemptRef,
        verdict: ClaimVerdict,
        ctx: &mut Context<Self>,
    ) -> Option<AttemptRef> {
        match verdict {
            Ok(claimed) => {
                if let Some(entry) = self.entries.get_mut(&attempt) {
                    entry.step = Step::Claimed;
                    self.ready.push_back((attempt, claimed.checkpoint));
                }
                None
            }
            Err(NoClaim::Refused(Rejection::NotYet)) if self.draining => {
                let entry = self.entries.remove(&attempt)?;
                let acker = self.acker.clone();
                self.parts.ports.io.spawn(async move { acker.requeue(&entry.tags).await });
                None
            }
            Err(NoClaim::Refused(Rejection::NotYet)) => {
                let entry = self.entries.remove(&attempt)?;
                ctx.run_later(TOO_EARLY, move |actor, ctx| {
                    let again = entry.tags.into_iter().map(|tag| again(attempt, tag));
                    actor.held.extend(again);
                    actor.pump(ctx);
                });
                None
            }
            Err(NoClaim::Refused(rejection)) => {
                telemetry::refused("claim", rejection.label());
                tracing::debug!(attempt = %attempt, reason = %rejection, "a delivery is not wanted");
                Some(attempt)
            }
            Err(NoClaim::Done) => {
                telemetry::refused("claim", "already_done");
                Some(attempt)
            }
        }
    }
}

fn again(attempt: AttemptRef, tag: Tag) -> Delivery {
    let message =
        shardcron_domain::messages::ShardMessage { v: shardcron_domain::messages::ENVELOPE_VERSION, attempt, epoch: 0 };
    Delivery { message, redelivered: true, tag }
}

/// Waits until a handler that could not be ended has ended by itself.
async fn wait_for(leftover: Leftover, attempt: AttemptRef) {
    tracing::warn!(attempt = %attempt, "the handler was dropped and may still run; its slot stays taken until it ends");
    // Cancelled, ended late, panicked: whatever it says is refused, and nobody asks.
    let _ = leftover.await;
    tracing::info!(attempt = %attempt, "the handler that had been dropped has ended");
}

/// A handler that outlived its attempt has ended.
#[derive(Message)]
#[rtype(result = "()")]
struct SlotFree;

impl Handler<SlotFree> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, _: SlotFree, ctx: &mut Self::Context) {
        self.running = self.running.saturating_sub(1);
        self.show_running(-1);
        self.pump(ctx);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Finished {
    attempt: AttemptRef,
    end: End,
    took: Duration,
    /// Whether its slot is free now: a handler that can't be ended keeps it.
    frees: bool,
}

impl Handler<Finished> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, Finished { attempt, end, took, frees }: Finished, ctx: &mut Self::Context) {
        if frees {
            self.running = self.running.saturating_sub(1);
            self.show_running(-1);
        }
        let end = if self.fenced { end.discarded() } else { end };
        self.pace.observe(took.as_secs_f64() * 1_000.0);
        telemetry::attempt(&self.parts.tier.name, end.word(), took.as_secs_f64());
        // Work has turned long: what was claimed ahead for short work would wait here for longer than anybody expects, and be
        // taken for hung. A hiccup of the machine is not that.
        if took >= LONG {
            self.give_back_ready(2 * self.pace.ahead(self.parts.tier.concurrency), ctx);
        }
        match end {
            End::Record(ended) => self.record(ended, ctx),
            End::Committed => {
                telemetry::recorded(&self.parts.tier.name, "success");
                // The handler has recorded it itself: running is where its answer finds it.
                self.settle(std::iter::once(attempt), Step::Running);
            }
        }
        self.check_drained();
        self.pump(ctx);
    }
}

impl ConsumerActor {
    /// After answers of the ledger: starts what may start, gives back what may not any more.
    fn go_on(&mut self, ctx: &mut Context<Self>) {
        if self.fenced || self.out_of_time {
            self.give_back_ready(0, ctx);
        }
        self.check_drained();
        self.pump(ctx);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct PastHorizon(AttemptRef);

impl Handler<PastHorizon> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, PastHorizon(attempt): PastHorizon, _: &mut Self::Context) {
        let Some(entry) = self.entries.get_mut(&attempt) else { return };
        let tags = std::mem::take(&mut entry.tags);
        self.parts.ports.trace.say(|| TraceEvent::PastHorizon { at: attempt });
        let acker = self.acker.clone();
        self.parts.ports.io.spawn(async move { acker.ack(&tags).await });
    }
}

impl Handler<EndsSettled> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, EndsSettled(answers): EndsSettled, ctx: &mut Self::Context) {
        for (ended, verdict) in &answers {
            self.account(ended, verdict);
        }
        self.settle(answers.into_iter().map(|(ended, _)| ended.attempt), Step::Recording);
        self.check_drained();
        self.pump(ctx);
    }
}

impl ConsumerActor {
    fn account(&self, ended: &Ended, verdict: &Result<Recorded, Rejection>) {
        let tier = &self.parts.tier.name;
        match (verdict, &ended.outcome) {
            (Err(rejection), _) => {
                telemetry::refused("record", rejection.label());
                tracing::info!(attempt = %ended.attempt, reason = %rejection, "a late result was refused");
            }
            (Ok(_), AttemptOutcome::Success { .. }) => telemetry::recorded(tier, "success"),
            (Ok(_), AttemptOutcome::HandBack) => telemetry::recorded(tier, "handed_back"),
            (Ok(recorded), AttemptOutcome::Failure { message, .. }) => {
                telemetry::recorded(tier, if recorded.phase == Phase::Failed { "failed" } else { "retry" });
                if recorded.phase != Phase::Failed {
                    telemetry::retried(tier);
                }
                tracing::warn!(attempt = %ended.attempt, error = %message, shard_is = recorded.phase.word(), "an attempt failed");
            }
        }
        if let Ok(recorded) = verdict {
            self.show_end(ended.attempt, recorded);
        }
    }

    fn show_end(&self, attempt: AttemptRef, recorded: &Recorded) {
        if let Some(phase) = recorded.execution_ended {
            tracing::info!(execution_id = %attempt.execution, phase = phase.word(), "execution ended");
        }
    }
}
