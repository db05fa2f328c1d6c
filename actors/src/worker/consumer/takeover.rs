//! A shard whose message came again while the ledger holds another worker for its owner: take it over, or leave it to the supervisor.
//!
//! The broker's `redelivered` proves nothing: it is a reason to ask. The attempt's number decides, in the ledger.

use super::super::recorder::{ClaimVerdict, NoClaim, until_answered};
use super::{ConsumerActor, Entry, Parts, Step};
use crate::ports::tell;
use crate::telemetry;
use actix::prelude::*;
use shardcron_domain::job::Takeover;
use shardcron_domain::shard::{Checkpoint, Rejection, TakeOverReason};
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_store::{ExecutionHead, TakeOver, TakenOver};
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

/// For this long after a consumer's own channel was made anew a redelivery says nothing of others: the broker itself was away, and
/// everybody's messages come again, those of the living too.
const RENEWED_QUIET: Duration = Duration::from_secs(5);

/// A redelivered message whose attempt the ledger does not grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    message: AttemptRef,
    /// Who runs that very attempt; `None` if a later one is under way, which the message may stand for.
    from: Option<Incarnation>,
}

impl ConsumerActor {
    /// A delivery that came again and whose shard runs at somebody else: its owner may be gone.
    pub(super) fn candidate(&mut self, attempt: AttemptRef, verdict: &ClaimVerdict) -> Option<Candidate> {
        if self.draining {
            return None;
        }
        let from = match verdict {
            Err(NoClaim::Refused(Rejection::AlreadyRunning(owner))) if *owner != self.parts.owner => Some(*owner),
            Err(NoClaim::Refused(Rejection::StaleAttempt { .. })) => None,
            _ => return None,
        };
        let entry = self.entries.get_mut(&attempt).filter(|entry| entry.redelivered)?;
        entry.step = Step::TakingOver;
        Some(Candidate { message: attempt, from })
    }

    pub(super) fn ask_to_take_over(&mut self, candidates: Vec<Candidate>, ctx: &mut Context<Self>) {
        if candidates.is_empty() {
            return;
        }
        self.claiming += candidates.len();
        let may_be_immediate = self.renewed.is_none_or(|at| at.elapsed() > RENEWED_QUIET);
        let (parts, me) = (self.parts.clone(), ctx.address());
        self.parts.ports.io.spawn(async move {
            let answers = take_over(&parts, &candidates, may_be_immediate).await;
            tell(me, TakeOversSettled(answers)).await;
        });
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct TakeOversSettled(Vec<(AttemptRef, Option<TakenOver>)>);

impl Handler<TakeOversSettled> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, TakeOversSettled(answers): TakeOversSettled, ctx: &mut Self::Context) {
        self.claiming = self.claiming.saturating_sub(answers.len());
        let mut answered = Vec::new();
        for (message, answer) in answers {
            match answer {
                Some(TakenOver::Running { attempt, checkpoint }) => {
                    telemetry::takeover("redelivered", 1);
                    self.rename(message, attempt, checkpoint);
                }
                Some(TakenOver::Ended(recorded)) => {
                    telemetry::takeover("redelivered", 1);
                    telemetry::recorded(&self.parts.tier.name, "failed");
                    tracing::warn!(attempt = %message, "that was the shard's last try");
                    self.show_end(message, &recorded);
                    answered.push(message);
                }
                None => {
                    tracing::debug!(attempt = %message, "a delivery is not wanted: its owner may live, and the supervisor decides");
                    telemetry::refused("claim", "already_running");
                    answered.push(message);
                }
            }
        }
        self.settle(answered.into_iter(), Step::TakingOver);
        self.go_on(ctx);
    }
}

impl ConsumerActor {
    /// The message that came for one attempt stands for another from now on: it is acked when that one's end is recorded.
    fn rename(&mut self, message: AttemptRef, attempt: AttemptRef, checkpoint: Option<Checkpoint>) {
        let Some(entry) = self.entries.remove(&message) else { return };
        match self.entries.get_mut(&attempt) {
            // It runs here already: an earlier answer was lost, and the message came once more.
            Some(running) => running.tags.extend(entry.tags),
            None => {
                self.entries.insert(attempt, Entry { step: Step::Claimed, ..entry });
                self.ready.push_back((attempt, checkpoint));
            }
        }
    }
}

/// For each candidate what became of it; `None`: it is left to the supervisor.
async fn take_over(
    parts: &Parts,
    candidates: &[Candidate],
    may_be_immediate: bool,
) -> Vec<(AttemptRef, Option<TakenOver>)> {
    let (mut wanted, mut asking) = (Vec::new(), Vec::new());
    for candidate in candidates {
        // Left to the supervisor if the ledger does not answer: this is a short cut, and nothing that must happen.
        let Ok(head) = parts.heads.get(candidate.message.execution).await else { continue };
        let Candidate { message, from } = *candidate;
        let entry = |reason| TakeOver { message, from, reason, retry: head.spec.retry };
        if may_be_immediate && is_immediate(parts, &head) {
            wanted.push(entry(TakeOverReason::Redelivered));
        } else if from.is_some() {
            asking.push(entry(TakeOverReason::OwnerGone));
        }
    }
    if !asking.is_empty() {
        let gone = gone(parts).await;
        wanted.extend(asking.into_iter().filter(|w| w.from.is_some_and(|from| gone.contains(&from))));
    }
    let mut taken = HashMap::new();
    if !wanted.is_empty() {
        let ports = &parts.ports;
        let call = || ports.ledger.take_over(parts.owner, &wanted, ports.ledger_now_ms());
        for (entry, verdict) in wanted.iter().zip(until_answered(ports, "take-overs", call).await) {
            match verdict {
                Ok(done) => {
                    tracing::warn!(attempt = %entry.message, reason = ?entry.reason, "took a shard over from its worker");
                    taken.insert(entry.message, done);
                }
                Err(why) => {
                    tracing::debug!(attempt = %entry.message, reason = %why, "a shard was not to be taken over")
                }
            }
        }
    }
    candidates.iter().map(|c| (c.message, taken.remove(&c.message))).collect()
}

/// The job asks for it, and its handler here says that its effects are fenced.
fn is_immediate(parts: &Parts, head: &ExecutionHead) -> bool {
    if head.spec.takeover != Takeover::Immediate {
        return false;
    }
    let fenced = (parts.resolve)(&head.spec.handler).is_ok_and(|handler| handler.effects_are_fenced());
    if !fenced {
        tracing::warn!(
            job = %head.spec.name,
            "takeover = \"immediate\" is not followed: the handler does not say that its effects are fenced \
             (ShardHandler::effects_are_fenced); its shards wait for the end of the heartbeat"
        );
    }
    fenced
}

/// Whose heartbeat has ended. Only those that the store remembers: one that it does not know may have been forgotten, and the
/// supervisor gives it time.
async fn gone(parts: &Parts) -> BTreeSet<Incarnation> {
    let lost_after_ms = i64::try_from(parts.lost_after.as_millis()).unwrap_or(i64::MAX);
    let seen = parts.ports.presence.workers().await.unwrap_or_default();
    seen.into_iter().filter(|w| w.age_ms > lost_after_ms).map(|w| w.beat.incarnation).collect()
}
