//! Takes the shards of lost workers and of hung attempts back. A snapshot in, a plan out, both by the domain.

use super::dispatcher::{DispatcherActor, RedispatchNow};
use super::{Deposed, SchedulerOptions, TermChanged};
use crate::guardian::Ping;
use crate::heads::Heads;
use crate::leadership::Term;
use crate::ports::{Ports, tell};
use crate::telemetry;
use actix::prelude::*;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::liveness::{Liveness, Observer, Sighting};
use shardcron_domain::recovery::{self, FirstSeen, Reclaim, RunningShard};
use shardcron_domain::{AttemptRef, Epoch, Incarnation};
use shardcron_store::{Overview, RunningRow, SeenWorker, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash as _, Hasher as _};
use std::time::Duration;

/// Running shards that one sweep looks at. More can't run on a fleet that this program is made for.
const RUNNING_MAX: usize = 100_000;
/// Shards taken back in one transaction.
pub(super) const RECLAIM_BATCH: usize = 500;

pub(super) struct SupervisorActor {
    ports: Ports,
    options: SchedulerOptions,
    heads: Heads,
    dispatcher: Addr<DispatcherActor>,
    deposed: Deposed,
    term: Option<Term>,
    observer: Observer,
    seen: FirstSeen,
    sweeping: bool,
    blind: bool,
    tiers: BTreeSet<String>,
    /// A look between two sweeps, at the moment at which somebody may turn out to be lost.
    look: Option<SpawnHandle>,
}

impl SupervisorActor {
    pub(super) fn new(
        ports: Ports,
        options: SchedulerOptions,
        heads: Heads,
        dispatcher: Addr<DispatcherActor>,
        deposed: Deposed,
    ) -> Self {
        SupervisorActor {
            ports,
            options,
            heads,
            dispatcher,
            deposed,
            term: None,
            observer: Observer::default(),
            seen: FirstSeen::default(),
            sweeping: false,
            blind: false,
            tiers: BTreeSet::new(),
            look: None,
        }
    }

    fn trusted(&self) -> Option<&Term> {
        self.term.as_ref().filter(|t| t.trusted(self.ports.clock.mono_ms()))
    }

    fn may_act(&self) -> Option<Epoch> {
        self.trusted().map(|t| t.epoch)
    }

    fn sweep(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.may_act() else { return };
        if self.sweeping {
            return;
        }
        self.sweeping = true;
        let (ports, me) = (self.ports.clone(), ctx.address());
        let work = async move {
            let running = ports.ledger.running(RUNNING_MAX).await?;
            // Nobody owns anything: nobody has to be asked about.
            let addressees = ports.ledger.addressees().await?;
            let nobody = running.is_empty() && addressees.is_empty();
            let workers = if nobody { Vec::new() } else { ports.presence.workers().await? };
            Ok(Snapshot { running, addressees, workers, overview: ports.ledger.overview().await? })
        };
        self.ports.run(work, move |result| tell(me, Swept { epoch, result }));
    }

    /// What to take back, who is gone for whom shards wait, and in how many milliseconds to look again before the next sweep.
    fn plan(&mut self, Snapshot { running, addressees, workers, .. }: &Snapshot) -> Plan {
        let now = self.ports.clock.mono_ms();
        let lost_after_ms = self.options.lost_after.as_millis() as i64;
        let owners: BTreeSet<Incarnation> = running.iter().map(|r| r.owner).chain(addressees.iter().copied()).collect();
        let beats: BTreeMap<Incarnation, i64> = workers.iter().map(|w| (w.beat.incarnation, w.age_ms)).collect();
        let sighted = |owner| beats.get(owner).map_or(Sighting::Absent, |age_ms| Sighting::Beat { age_ms: *age_ms });
        let liveness: BTreeMap<Incarnation, Liveness> = owners
            .iter()
            .map(|owner| (*owner, self.observer.judge(*owner, sighted(owner), lost_after_ms, now)))
            .collect();
        let again = owners
            .iter()
            .filter_map(|owner| self.observer.next_look_ms(*owner, sighted(owner), lost_after_ms, now))
            .min();
        self.observer.retain(&owners.into_iter().collect::<Vec<_>>());
        let told: BTreeMap<AttemptRef, u64> = workers.iter().flat_map(|w| w.beat.progress.iter().copied()).collect();
        let shards: Vec<RunningShard> = running
            .iter()
            .map(|r| RunningShard {
                attempt: r.attempt,
                owner: r.owner,
                timeout_ms: r.timeout_ms,
                stall_ms: r.stall_ms,
                progress: progress(r, told.get(&r.attempt).copied()),
            })
            .collect();
        let lost = |who: &&Incarnation| liveness.get(who) == Some(&Liveness::Lost);
        let lost = addressees.iter().filter(lost).copied().collect();
        Plan { reclaim: recovery::reconcile(&shards, &liveness, &mut self.seen, now), lost, again }
    }

    /// A look before the next sweep, if somebody may be found lost before it. Sweeps alone would find a loss up to two of them late.
    fn look_again(&mut self, in_ms: Option<i64>, ctx: &mut Context<Self>) {
        if let Some(earlier) = self.look.take() {
            ctx.cancel_future(earlier);
        }
        let wait = in_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
        if let Some(wait) = wait.filter(|wait| *wait < self.options.sweep_every) {
            self.look = Some(ctx.run_later(wait, |actor, ctx| actor.sweep(ctx)));
        }
    }

    /// Ends the broadcast shards that wait for workers which are gone. Those that run there are taken back first.
    fn abandon(&self, term: Term, lost: Vec<Incarnation>) {
        let (ports, deposed, epoch) = (self.ports.clone(), self.deposed.clone(), term.epoch);
        self.ports.io.spawn(async move {
            for who in lost {
                // The one before may have taken longer than the lease lasts (L2).
                if !term.trusted(ports.clock.mono_ms()) {
                    return;
                }
                match ports.ledger.abandon(epoch, who, ports.ledger_now_ms()).await {
                    Ok(shards) if shards.is_empty() => {}
                    Ok(shards) => {
                        tracing::warn!(worker_incarnation = %who, shards = shards.len(), "shards of broadcasts were for a worker that is gone")
                    }
                    Err(StoreError::Deposed { .. }) => return deposed.report(epoch),
                    Err(e) => tracing::debug!(error = %e, "a lost worker's broadcast shards could not be ended yet"),
                }
            }
        });
    }

    fn reclaim(&self, term: Term, plan: Vec<Reclaim>) {
        let (ports, heads) = (self.ports.clone(), self.heads.clone());
        let (dispatcher, deposed) = (self.dispatcher.clone(), self.deposed.clone());
        self.ports.io.spawn(async move {
            for batch in plan.chunks(RECLAIM_BATCH) {
                match reclaim(&ports, &heads, &term, batch).await {
                    Ok(taken) if taken > 0 => tell(dispatcher.clone(), RedispatchNow).await,
                    Ok(_) => {}
                    Err(StoreError::Deposed { .. }) => return deposed.report(term.epoch),
                    Err(e) => {
                        tracing::debug!(error = %e, "shards could not be taken back yet; the next sweep tries again")
                    }
                }
            }
        });
    }
}

/// What a sweep found.
struct Plan {
    reclaim: Vec<Reclaim>,
    /// Workers that are gone, and that shards of broadcasts wait for.
    lost: Vec<Incarnation>,
    /// Milliseconds until somebody may turn out to be lost.
    again: Option<i64>,
}

struct Snapshot {
    running: Vec<RunningRow>,
    /// Workers for which shards of broadcasts wait.
    addressees: Vec<Incarnation>,
    workers: Vec<SeenWorker>,
    overview: Overview,
}

/// A number that changes with everything that shows that an attempt moves: its checkpoint, its records, what its worker tells.
fn progress(row: &RunningRow, told: Option<u64>) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    (&row.checkpoint, row.rows_done, told).hash(&mut hasher);
    hasher.finish()
}

async fn reclaim(ports: &Ports, heads: &Heads, term: &Term, batch: &[Reclaim]) -> Result<u64, StoreError> {
    let mut with_policy = Vec::with_capacity(batch.len());
    for reclaim in batch {
        let retry = match heads.get(reclaim.attempt.execution).await {
            Ok(head) => head.spec.retry,
            Err(e) if e.is_transient() => return Err(e),
            Err(e) => {
                // One that can't be read must not keep the others' shards from being taken back.
                tracing::warn!(execution_id = %reclaim.attempt.execution, error = %e, "taking a shard back under the default retry policy");
                RetryPolicy::default()
            }
        };
        with_policy.push((*reclaim, retry));
    }
    // The looks, or the batch before, may have taken longer than the lease lasts (L2). Whoever leads then looks anew.
    if !term.trusted(ports.clock.mono_ms()) {
        return Ok(0);
    }
    let verdicts = ports.ledger.reclaim(term.epoch, &with_policy, ports.ledger_now_ms()).await?;
    let mut taken = 0;
    let mut by_owner: BTreeMap<(Incarnation, &'static str), u64> = BTreeMap::new();
    for (reclaim, verdict) in batch.iter().zip(verdicts) {
        let reason = reclaim.reason.word();
        if verdict.is_ok() {
            taken += 1;
            telemetry::takeover(reason, 1);
            *by_owner.entry((reclaim.owner, reason)).or_default() += 1;
        }
    }
    for ((owner, reason), shards) in by_owner {
        tracing::warn!(worker_incarnation = %owner, reason, shards, "took shards back");
    }
    Ok(taken)
}

impl Actor for SupervisorActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(self.options.sweep_every, |actor, ctx| actor.sweep(ctx));
    }
}

impl Handler<Ping> for SupervisorActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

impl Handler<TermChanged> for SupervisorActor {
    type Result = ();

    fn handle(&mut self, TermChanged(leading): TermChanged, _: &mut Self::Context) {
        self.term = leading.0;
        self.observer = Observer::default();
        self.seen = FirstSeen::default();
        (self.sweeping, self.blind) = (false, false);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Swept {
    epoch: Epoch,
    result: Result<Snapshot, StoreError>,
}

impl Handler<Swept> for SupervisorActor {
    type Result = ();

    fn handle(&mut self, Swept { epoch, result }: Swept, ctx: &mut Self::Context) {
        if self.term.as_ref().map(|t| t.epoch) != Some(epoch) {
            return;
        }
        self.sweeping = false;
        let snapshot = match result {
            Ok(snapshot) => snapshot,
            Err(e) => {
                // Nothing may be concluded about anybody from a store that does not answer.
                if !std::mem::replace(&mut self.blind, true) {
                    tracing::warn!(error = %e, "the supervisor can't see; no shard is taken from anybody until it can");
                }
                return;
            }
        };
        if std::mem::take(&mut self.blind) {
            tracing::info!("the supervisor sees again");
        }
        self.show(&snapshot.overview);
        let Plan { reclaim: plan, lost, again } = self.plan(&snapshot);
        self.look_again(again, ctx);
        let Some(term) = self.trusted().filter(|term| term.epoch == epoch).cloned() else { return };
        if !plan.is_empty() {
            self.reclaim(term.clone(), plan);
        }
        if !lost.is_empty() {
            self.abandon(term, lost);
        }
    }
}

impl SupervisorActor {
    fn show(&mut self, overview: &Overview) {
        let mut gone = std::mem::take(&mut self.tiers);
        for tier in &overview.tiers {
            telemetry::tier_counts(&tier.tier, tier.waiting, tier.running);
            gone.remove(&tier.tier);
            self.tiers.insert(tier.tier.clone());
        }
        for tier in gone {
            telemetry::tier_counts(&tier, 0, 0);
        }
    }
}
