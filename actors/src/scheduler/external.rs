//! Triggers by people and programs: read, fired under the leader's epoch, answered, and only then settled.

use super::Deposed;
use super::asked::{self, Refused};
use super::dispatcher::DispatcherActor;
use super::intent::{account, announce};
use crate::leadership::Term;
use crate::ports::{Backoff, Ports};
use actix::Addr;
use shardcron_broker::{BrokerError, KeptIn, TriggerDelivery, Triggers};
use shardcron_domain::messages::TriggerReply;
use shardcron_domain::trigger;
use shardcron_store::{FireAction, FireIntent, FireOutcome, NewBackfill, StoreError};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// One term's taking of external triggers.
pub(super) struct Pump {
    pub(super) ports: Ports,
    pub(super) dispatcher: Addr<DispatcherActor>,
    pub(super) deposed: Deposed,
    pub(super) term: Term,
    pub(super) stop: CancellationToken,
}

/// What is remembered of a delivery over its tries.
struct Case {
    own_id: uuid::Uuid,
    dead: Option<KeptIn>,
}

enum Asked {
    Firing(FireIntent),
    Backfill(NewBackfill),
}

/// What a trigger became: an answer for its sender, or why it has to be tried again.
enum Handled {
    Answer(TriggerReply),
    Again(String),
    Deposed,
}

impl Pump {
    /// Takes triggers until it is told to stop; what it has begun it finishes, so that what is committed is also acked.
    pub(super) async fn run(self) {
        let Some(mut triggers) = self.source().await else { return };
        loop {
            let batch = tokio::select! {
                biased;
                batch = triggers.next() => batch,
                () = self.stop.cancelled() => None,
            };
            let Some(batch) = batch else { break };
            for delivery in &batch {
                if !self.settle_one(&mut triggers, delivery).await {
                    return;
                }
            }
        }
        triggers.stop().await;
    }

    async fn source(&self) -> Option<Box<dyn Triggers>> {
        let mut backoff = self.ports.backoff();
        loop {
            let source = tokio::select! {
                biased;
                source = self.ports.broker.triggers() => source,
                () = self.stop.cancelled() => return None,
            };
            match source {
                Ok(triggers) => return Some(triggers),
                Err(BrokerError::Unavailable(why)) => tracing::debug!(reason = %why, "triggers can't be taken yet"),
                Err(e @ BrokerError::Refused(_)) => tracing::error!(error = %e, "triggers can't be taken"),
            }
            self.pause(&mut backoff).await;
        }
    }

    async fn pause(&self, backoff: &mut Backoff) {
        tokio::select! {
            biased;
            () = tokio::time::sleep(backoff.next()) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// False: nothing more is to be taken. What is not settled comes again, to whoever leads then.
    async fn settle_one(&self, triggers: &mut Box<dyn Triggers>, delivery: &TriggerDelivery) -> bool {
        let mut backoff = self.ports.backoff();
        // Drawn once for each delivery, not for each try: a firing whose answer was lost must be found again under its key.
        let mut case = Case { own_id: self.ports.entropy.id(), dead: None };
        loop {
            let span = tracing::info_span!("trigger", epoch = self.term.epoch.0);
            match self.handle(delivery, &mut case).instrument(span).await {
                Handled::Answer(reply) => {
                    triggers.settle(delivery, &reply).await;
                    return true;
                }
                Handled::Deposed => return false,
                Handled::Again(_) if self.stop.is_cancelled() => return false,
                Handled::Again(why) => {
                    tracing::debug!(reason = %why, "a trigger could not be fired yet");
                    self.pause(&mut backoff).await;
                }
            }
        }
    }

    /// `Some`: it may not write now (L2). Asked at the beginning, and again before each write: the looks at the job and at what ran may
    /// have taken longer than the lease lasts.
    fn in_doubt(&self) -> Option<Handled> {
        let trusted = self.term.trusted(self.ports.clock.mono_ms());
        (!trusted).then(|| Handled::Again("the lease is in doubt".into()))
    }

    async fn handle(&self, delivery: &TriggerDelivery, case: &mut Case) -> Handled {
        if let Some(again) = self.in_doubt() {
            return again;
        }
        let request = match trigger::parse(&delivery.payload, delivery.routed_to.as_deref()) {
            Ok(request) => request,
            Err(e) => return self.reject(delivery, case, e.to_string()).await,
        };
        let record = match self.ports.ledger.job(&request.job).await {
            Ok(Some(record)) => record,
            Ok(None) => return self.reject_unknown(delivery, case, &request.job).await,
            Err(e) => return Handled::Again(e.to_string()),
        };
        let of_transport = || delivery.transport_id.as_deref().map(trigger::transport_request_id);
        let request_id = request.request_id.clone().or_else(of_transport);
        let id = request_id.unwrap_or_else(|| case.own_id.to_string());
        let prepared = match &request.backfill {
            Some(fill) => asked::backfill(&self.ports, &record, (&request, fill, &id)).await.map(Asked::Backfill),
            None => asked::firing(&self.ports, &record, (&request, &id, case.own_id)).await.map(Asked::Firing),
        };
        let outcome = match prepared {
            Ok(Asked::Firing(intent)) => self.fire(&record.name, intent).await,
            Ok(Asked::Backfill(new)) => self.begin_backfill(&record.name, &new).await,
            Err(Refused::Now(e)) => return Handled::Again(e.to_string()),
            Err(Refused::For(sentence)) => Err(sentence),
        };
        match outcome {
            Ok(handled) => handled,
            // Trying again would be refused again, and everything behind it would wait.
            Err(sentence) => self.reject(delivery, case, sentence).await,
        }
    }

    async fn begin_backfill(&self, job: &str, new: &NewBackfill) -> Result<Handled, String> {
        if let Some(again) = self.in_doubt() {
            return Ok(again);
        }
        let now_ms = self.ports.clock.now_ms();
        let reply = |outcome: &str, message: String| {
            Handled::Answer(TriggerReply { outcome: outcome.into(), execution: None, message })
        };
        match self.ports.ledger.begin_backfill(self.term.epoch, new, now_ms).await {
            Ok(true) => {
                tracing::info!(job, request_id = %new.request_id, instants = new.instants.len(), already = new.already, forced = new.forced, "backfilling");
                let message = format!(
                    "backfill {} of job '{job}': {} instants to run, {} ran before and are left alone",
                    new.request_id,
                    new.instants.len(),
                    new.already
                );
                Ok(reply("backfilling", message))
            }
            Ok(false) => {
                Ok(reply("duplicate", format!("duplicate of backfill {}, which has begun before", new.request_id)))
            }
            Err(StoreError::Deposed { .. }) => {
                self.deposed.report(self.term.epoch);
                Ok(Handled::Deposed)
            }
            Err(e) if e.is_transient() => Ok(Handled::Again(e.to_string())),
            Err(e) => Err(e.to_string()),
        }
    }

    async fn fire(&self, job: &str, intent: FireIntent) -> Result<Handled, String> {
        if let Some(again) = self.in_doubt() {
            return Ok(again);
        }
        let now_ms = self.ports.clock.now_ms();
        let outcome = match self.ports.ledger.fire(self.term.epoch, std::slice::from_ref(&intent), now_ms).await {
            Ok(mut outcomes) => outcomes.pop().unwrap_or(FireOutcome::Stale),
            Err(StoreError::Deposed { .. }) => {
                self.deposed.report(self.term.epoch);
                return Ok(Handled::Deposed);
            }
            Err(e) if e.is_transient() => return Ok(Handled::Again(e.to_string())),
            Err(e) => return Err(e.to_string()),
        };
        account(job, &intent, &outcome, now_ms - intent.nominal_ms);
        let reply = |outcome: &str, execution: Option<String>, message: String| {
            Handled::Answer(TriggerReply { outcome: outcome.into(), execution, message })
        };
        Ok(match outcome {
            FireOutcome::Fired(id) => {
                if let FireAction::Fire(new) = &intent.action {
                    announce(&self.dispatcher, new);
                }
                reply("fired", Some(id.to_string()), format!("job '{job}' fired"))
            }
            FireOutcome::Duplicate(of) => {
                let of = of.map(|id| id.to_string());
                let sentence = format!(
                    "duplicate of {}: this request was decided before",
                    of.as_deref().unwrap_or("an earlier request")
                );
                reply("duplicate", of, sentence)
            }
            FireOutcome::Skipped { reason, blocking, .. } => {
                reply("skipped", blocking.map(|id| id.to_string()), reason)
            }
            FireOutcome::Waiting { reason, blocking } => reply("waiting", blocking.map(|id| id.to_string()), reason),
            FireOutcome::Busy => Handled::Again(format!("job '{job}' is held by another transaction")),
            FireOutcome::Stale | FireOutcome::NotYet => Handled::Again(format!("job '{job}' changed meanwhile")),
        })
    }

    async fn reject_unknown(&self, delivery: &TriggerDelivery, case: &mut Case, name: &str) -> Handled {
        match self.ports.ledger.jobs().await {
            Ok(jobs) => {
                self.reject(delivery, case, trigger::unknown_job(name, jobs.iter().map(|j| j.name.as_str())).0).await
            }
            Err(e) => Handled::Again(e.to_string()),
        }
    }

    /// Keeps the message where people look, in the ledger and in the dead queue, before it is settled. The copy in the ledger is the
    /// one that counts; should the process die between the two, the message comes again and is kept twice, not lost.
    async fn reject(&self, delivery: &TriggerDelivery, case: &mut Case, sentence: String) -> Handled {
        let kept_in = match case.dead {
            Some(kept_in) => kept_in,
            None => match self.ports.broker.put_dead(&delivery.payload, &sentence).await {
                Ok(kept_in) => {
                    tracing::warn!(reason = %sentence, "a trigger was refused");
                    crate::telemetry::decision("rejected");
                    *case.dead.insert(kept_in)
                }
                Err(e) => return Handled::Again(e.to_string()),
            },
        };
        let kept = match kept_in {
            KeptIn::Ledger => Ok(()),
            KeptIn::Queue => {
                self.ports.ledger.put_dead_message(&sentence, &delivery.payload, self.ports.clock.now_ms()).await
            }
        };
        match kept {
            Ok(()) => Handled::Answer(TriggerReply { outcome: "rejected".into(), execution: None, message: sentence }),
            Err(e) => Handled::Again(e.to_string()),
        }
    }
}
