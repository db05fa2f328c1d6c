//! Group commit: claims and ends of all tiers, each lane in batches that share a transaction and an fsync.
//!
//! One commit of a lane is under way at a time; what comes meanwhile is the next batch, so batches grow with the load. While the
//! ledger is away the commit under way is tried until it works: nothing new gets claimed, and the ends that are held are bounded by
//! what had been claimed (`limits::PREFETCH_MAX` for each tier).

use super::consumer::ConsumerActor;
use crate::guardian::Ping;
use crate::heads::Heads;
use crate::ports::{Ports, tell};
use crate::telemetry;
use actix::prelude::*;
use shardcron_domain::limits::{GROUP_COMMIT_ENTRIES, GROUP_COMMIT_WAIT_MS};
use shardcron_domain::shard::Rejection;
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_store::{Claimed, Ended, IdempotencyHint, Recorded, StoreError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::Instrument;

/// Why a claim was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoClaim {
    /// The ledger refused it.
    Refused(Rejection),
    /// Redis remembers that this attempt's end is recorded.
    Done,
}

pub(super) type ClaimVerdict = Result<Claimed, NoClaim>;

/// Claim these for a consumer.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Claim {
    pub(super) attempts: Vec<AttemptRef>,
    pub(super) from: Addr<ConsumerActor>,
}

/// The answers, in the order of the batch.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct ClaimsSettled(pub(super) Vec<(AttemptRef, ClaimVerdict)>);

/// Record this end for a consumer.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Record {
    pub(super) ended: Ended,
    pub(super) from: Addr<ConsumerActor>,
}

/// The answers.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct EndsSettled(pub(super) Vec<(Ended, Result<Recorded, Rejection>)>);

/// A lane: what waits, since when, and whether a commit is under way.
struct Lane<T> {
    waiting: Vec<(T, Addr<ConsumerActor>)>,
    committing: bool,
    timer: bool,
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Lane { waiting: Vec::new(), committing: false, timer: false }
    }
}

impl<T> Lane<T> {
    /// The next batch, if it is time for one.
    fn close(&mut self, now: bool) -> Option<Vec<(T, Addr<ConsumerActor>)>> {
        if self.committing || self.waiting.is_empty() || !(now || self.waiting.len() >= GROUP_COMMIT_ENTRIES) {
            return None;
        }
        self.committing = true;
        let rest = self.waiting.split_off(self.waiting.len().min(GROUP_COMMIT_ENTRIES));
        Some(std::mem::replace(&mut self.waiting, rest))
    }
}

pub(super) struct RecorderActor {
    ports: Ports,
    heads: Heads,
    owner: Incarnation,
    claims: Lane<AttemptRef>,
    ends: Lane<Ended>,
    flushed: Vec<oneshot::Sender<()>>,
}

impl RecorderActor {
    pub(super) fn new(ports: Ports, heads: Heads, owner: Incarnation) -> Self {
        RecorderActor { ports, heads, owner, claims: Lane::default(), ends: Lane::default(), flushed: Vec::new() }
    }

    fn commit_claims(&mut self, now: bool, ctx: &mut Context<Self>) {
        let Some(batch) = self.claims.close(now) else {
            if !self.claims.waiting.is_empty() && !self.claims.committing && !self.claims.timer {
                self.claims.timer = true;
                ctx.run_later(Duration::from_millis(GROUP_COMMIT_WAIT_MS), |actor, ctx| {
                    actor.claims.timer = false;
                    actor.commit_claims(true, ctx);
                });
            }
            return;
        };
        let (ports, heads, owner, me) = (self.ports.clone(), self.heads.clone(), self.owner, ctx.address());
        self.ports.io.spawn(async move {
            let attempts: Vec<AttemptRef> = batch.iter().map(|(a, _)| *a).collect();
            let span = tracing::info_span!("claim", entries = attempts.len());
            let verdicts = claim(&ports, owner, &attempts).instrument(span).await;
            let granted = attempts.iter().zip(&verdicts).filter(|(_, verdict)| verdict.is_ok());
            heads.warm(granted.map(|(attempt, _)| attempt.execution)).await;
            let answers = batch.into_iter().zip(verdicts).map(|((attempt, from), verdict)| ((attempt, verdict), from));
            for (from, answers) in by_consumer(answers) {
                tell(from, ClaimsSettled(answers)).await;
            }
            tell(me, LaneFree::Claims).await;
        });
    }

    fn commit_ends(&mut self, now: bool, ctx: &mut Context<Self>) {
        let Some(batch) = self.ends.close(now) else {
            if !self.ends.waiting.is_empty() && !self.ends.committing && !self.ends.timer {
                self.ends.timer = true;
                ctx.run_later(Duration::from_millis(GROUP_COMMIT_WAIT_MS), |actor, ctx| {
                    actor.ends.timer = false;
                    actor.commit_ends(true, ctx);
                });
            }
            return;
        };
        let (ports, owner, me) = (self.ports.clone(), self.owner, ctx.address());
        self.ports.io.spawn(async move {
            let (ends, from): (Vec<Ended>, Vec<Addr<ConsumerActor>>) = batch.into_iter().unzip();
            let span = tracing::info_span!("record", entries = ends.len());
            let verdicts = record(&ports, owner, &ends).instrument(span).await;
            let answers = ends.into_iter().zip(verdicts).zip(from);
            for (from, answers) in by_consumer(answers) {
                tell(from, EndsSettled(answers)).await;
            }
            tell(me, LaneFree::Ends).await;
        });
    }

    fn answer_flushed(&mut self) {
        let idle = |lane: (bool, bool)| !lane.0 && lane.1;
        let claims = (self.claims.committing, self.claims.waiting.is_empty());
        let ends = (self.ends.committing, self.ends.waiting.is_empty());
        if idle(claims) && idle(ends) {
            for done in self.flushed.drain(..) {
                let _ = done.send(());
            }
        }
    }
}

/// Sorts answers by the consumer that asked; there are as many consumers as tiers, so a list is enough.
fn by_consumer<T>(answers: impl Iterator<Item = (T, Addr<ConsumerActor>)>) -> Vec<(Addr<ConsumerActor>, Vec<T>)> {
    let mut sorted: Vec<(Addr<ConsumerActor>, Vec<T>)> = Vec::new();
    for (answer, from) in answers {
        match sorted.iter_mut().find(|(addr, _)| *addr == from) {
            Some((_, list)) => list.push(answer),
            None => sorted.push((from, vec![answer])),
        }
    }
    sorted
}

/// Asks Redis, then the ledger; until the ledger answers.
async fn claim(ports: &Ports, owner: Incarnation, attempts: &[AttemptRef]) -> Vec<ClaimVerdict> {
    let began = Instant::now();
    // Only an accelerator: without an answer the ledger alone decides.
    let hints = ports.idempotency.begin(attempts).await.unwrap_or_else(|e| {
        tracing::debug!(error = %e, "no idempotency hints; the ledger decides alone");
        vec![IdempotencyHint::Claimed; attempts.len()]
    });
    let open: Vec<AttemptRef> =
        attempts.iter().zip(&hints).filter(|(_, h)| **h != IdempotencyHint::Done).map(|(a, _)| *a).collect();
    let granted = if open.is_empty() {
        Vec::new()
    } else {
        until_answered(ports, "claims", || ports.ledger.claim(owner, &open, ports.ledger_now_ms())).await
    };
    telemetry::group_commit("claim", attempts.len(), began.elapsed().as_secs_f64());
    let mut granted = granted.into_iter();
    let verdict = |hint: &IdempotencyHint| match hint {
        IdempotencyHint::Done => Err(NoClaim::Done),
        _ => match granted.next() {
            Some(answer) => answer.map_err(NoClaim::Refused),
            None => Err(NoClaim::Refused(Rejection::NoSuchShard)),
        },
    };
    hints.iter().map(verdict).collect()
}

async fn record(ports: &Ports, owner: Incarnation, ends: &[Ended]) -> Vec<Result<Recorded, Rejection>> {
    let began = Instant::now();
    let verdicts = until_answered(ports, "results", || ports.ledger.record(owner, ends, ports.ledger_now_ms())).await;
    telemetry::group_commit("record", ends.len(), began.elapsed().as_secs_f64());
    let settled: Vec<AttemptRef> =
        ends.iter().zip(&verdicts).filter(|(_, v)| v.is_ok()).map(|(e, _)| e.attempt).collect();
    if let Err(e) = ports.idempotency.finish(&settled).await {
        tracing::debug!(error = %e, "the idempotency store did not take the marks");
    }
    verdicts
}

/// Tries until the ledger answers. What is not transient can't be mended by waiting either, but giving up would lose results:
/// it is said loudly, and tried on, more slowly.
pub(super) async fn until_answered<T, F>(ports: &Ports, what: &'static str, call: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut backoff = ports.backoff();
    let mut away = false;
    loop {
        match call().await {
            Ok(answer) => {
                if away {
                    tracing::info!(what, "the ledger takes them again");
                    telemetry::ledger_away(false);
                }
                return answer;
            }
            Err(e) => {
                if !std::mem::replace(&mut away, true) {
                    telemetry::ledger_away(true);
                    if e.is_transient() {
                        tracing::warn!(what, error = %e, "the ledger is away; holding what is finished and claiming nothing new");
                    } else {
                        tracing::error!(what, error = %e, "the ledger refuses; holding what is finished and trying on");
                    }
                }
            }
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

impl Actor for RecorderActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        // Room for everything that the consumers can hold, so that their sends never fail.
        ctx.set_mailbox_capacity(32_768);
    }
}

impl Handler<Ping> for RecorderActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

impl Handler<Claim> for RecorderActor {
    type Result = ();

    fn handle(&mut self, Claim { attempts, from }: Claim, ctx: &mut Self::Context) {
        self.claims.waiting.extend(attempts.into_iter().map(|a| (a, from.clone())));
        self.commit_claims(false, ctx);
    }
}

impl Handler<Record> for RecorderActor {
    type Result = ();

    fn handle(&mut self, Record { ended, from }: Record, ctx: &mut Self::Context) {
        self.ends.waiting.push((ended, from));
        self.commit_ends(false, ctx);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
enum LaneFree {
    Claims,
    Ends,
}

impl Handler<LaneFree> for RecorderActor {
    type Result = ();

    fn handle(&mut self, lane: LaneFree, ctx: &mut Self::Context) {
        // What came while the commit was under way has waited long enough.
        match lane {
            LaneFree::Claims => {
                self.claims.committing = false;
                self.commit_claims(true, ctx);
            }
            LaneFree::Ends => {
                self.ends.committing = false;
                self.commit_ends(true, ctx);
            }
        }
        self.answer_flushed();
    }
}

/// Answers when everything that was given before is committed.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Flush;

impl Handler<Flush> for RecorderActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Flush, ctx: &mut Self::Context) -> Self::Result {
        let (done, wait) = oneshot::channel();
        self.flushed.push(done);
        self.commit_claims(true, ctx);
        self.commit_ends(true, ctx);
        self.answer_flushed();
        Box::pin(async move {
            let _ = wait.await;
        })
    }
}
