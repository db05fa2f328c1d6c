//! The worker process: a consumer for each tier, one recorder, one heartbeat.

mod addressed;
mod attempt;
mod caching;
mod cancel;
mod consumer;
mod effects;
mod emits;
mod heartbeat;
mod output;
mod progress;
mod recorder;

use crate::guardian::{Guardian, OnFatal, StandDown};
pub use caching::caches;

use crate::heads::Heads;
use crate::io::Stage;
use crate::ports::{Ports, tell};
use actix::prelude::*;
use shardcron_broker::BrokerError;
use shardcron_domain::Incarnation;
use shardcron_domain::cache::PreloadQuery;
use shardcron_domain::job::HandlerSpec;
use shardcron_sdk::cache::Caches;
use shardcron_sdk::{ShardContext, ShardError, ShardHandler};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Finds the handler of a job, or says in a permanent error why this worker does not run it.
pub type Resolve = Arc<dyn Fn(&HandlerSpec) -> Result<Arc<dyn ShardHandler>, ShardError> + Send + Sync>;

/// Finds the keys of a query of a job's preload; none if it fails. `None` in the options: no keys are found by queries.
pub type PreloadKeys =
    Arc<dyn Fn(PreloadQuery, ShardContext) -> futures_util::future::BoxFuture<'static, Arc<[String]>> + Send + Sync>;

/// One tier that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierOptions {
    /// Its name.
    pub name: String,
    /// Attempts at the same time.
    pub concurrency: usize,
}

/// What a worker needs to know beyond its ports.
#[derive(Clone)]
pub struct WorkerOptions {
    /// Its name, for people.
    pub name: String,
    /// The host that it runs on, for people.
    pub host: String,
    /// The tiers that it serves.
    pub tiers: Vec<TierOptions>,
    /// A worker that has not beaten for this long is lost. It beats three times as often, and fences itself at two thirds.
    pub lost_after: Duration,
    /// A delivery whose shard runs longer than this is acked; from then on the heartbeat alone vouches for it.
    pub ack_horizon: Duration,
    /// Finds handlers.
    pub resolve: Resolve,
    /// What handlers keep in memory beyond an attempt, and beyond an incarnation.
    pub caches: Caches,
    /// Asks the queries of preloads.
    pub preload_keys: Option<PreloadKeys>,
}

/// Shared between the actors of one worker.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) running: AtomicU32,
    pub(crate) draining: AtomicBool,
    pub(crate) cancels: Arc<cancel::Cancels>,
    progress: Arc<progress::Watched>,
    outputs: Arc<output::Outputs>,
    caches: Caches,
    preload_keys: Option<PreloadKeys>,
    taken_over: Arc<caching::TakenOver>,
}

/// Why a worker's life ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It could not renew its presence for two thirds of the lost-after time, so it stopped its handlers and threw their results
    /// away. It may live again under a new incarnation.
    Fenced,
}

/// What can be asked of a worker at any time.
#[derive(Clone)]
pub struct WorkerStatus {
    /// Its process life.
    pub incarnation: Incarnation,
    shared: Arc<Shared>,
}

impl WorkerStatus {
    /// Attempts that run now.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.shared.running.load(Ordering::Relaxed)
    }
}

/// A running worker: one incarnation.
pub struct Worker {
    ports: Ports,
    status: WorkerStatus,
    consumers: Vec<Addr<consumer::ConsumerActor>>,
    recorder: Addr<recorder::RecorderActor>,
    heartbeat: Addr<heartbeat::HeartbeatActor>,
    guardian: Addr<Guardian>,
    ended: watch::Receiver<Option<WorkerEnd>>,
    stages: Vec<Stage>,
}

impl Worker {
    /// Starts one incarnation. Must be called within an actix `System`. Waits until the broker lets it consume.
    ///
    /// # Errors
    /// The broker refuses for good: a sentence for the person who configures it.
    pub async fn start(ports: Ports, options: WorkerOptions, on_fatal: Arc<OnFatal>) -> Result<Self, BrokerError> {
        let incarnation = Incarnation(ports.entropy.id());
        // Nobody vouches for what a worker without a heartbeat runs, so it takes nothing before its first beat is taken.
        heartbeat::first_beat(&ports, incarnation, &options).await;
        let (caches, preload_keys) = (options.caches.clone(), options.preload_keys.clone());
        let shared = Arc::new(Shared { caches, preload_keys, ..Shared::default() });
        ports.io.spawn(cancel::watch(ports.clone(), Arc::downgrade(&shared.cancels)));
        ports.io.spawn(output::write(ports.clone(), Arc::downgrade(&shared.outputs), shared.outputs.wake()));
        let (ended_tx, ended) = watch::channel(None);
        let mut stages: Vec<Stage> = (0..2).map(|_| ports.io.stage()).collect();

        let heads = Heads::new(ports.ledger.clone());
        let actor = recorder::RecorderActor::new(ports.clone(), heads.clone(), incarnation);
        let recorder = stages[0].start(actor);
        let mut watched = vec![("recorder", recorder.clone().recipient())];
        let mut consumers = Vec::new();
        for tier in &options.tiers {
            let stage = ports.io.stage();
            let parts = consumer::Parts {
                ports: ports.clone(),
                heads: heads.clone(),
                resolve: options.resolve.clone(),
                owner: incarnation,
                tier: tier.clone(),
                ack_horizon: options.ack_horizon,
                lost_after: options.lost_after,
                // The fence comes at two thirds; the last third is for stopping, with something to spare.
                fenced_grace: options.lost_after / 4,
                recorder: recorder.clone(),
                shared: shared.clone(),
            };
            let first = u16::try_from(tier.concurrency).unwrap_or(u16::MAX).max(1);
            let (broker, name) = (ports.broker.clone(), tier.name.clone());
            let joined = ports.io.spawn(async move {
                broker.declare(std::slice::from_ref(&name)).await.or_else(only_if_refused)?;
                broker.consume(&name, first).await
            });
            let source = joined.await.map_err(|e| BrokerError::Unavailable(e.to_string()))??;
            let acker = Arc::new(addressed::Beside(source.acker));
            let actor = consumer::ConsumerActor::new(parts, acker, first);
            let addr = stage.start(actor);
            ports.io.spawn(consumer::feed(source.deliveries, addr.clone()));
            watched.push(("consumer", addr.clone().recipient()));
            consumers.push(addr);
            stages.push(stage);
        }
        let tiers = options.tiers.iter().map(|tier| tier.name.clone()).zip(consumers.iter().cloned()).collect();
        ports.io.spawn(addressed::poll(ports.clone(), incarnation, tiers, Arc::downgrade(&shared)));
        let actor = heartbeat::HeartbeatActor::new(
            ports.clone(),
            incarnation,
            options,
            shared.clone(),
            consumers.clone(),
            ended_tx,
        );
        let heartbeat = stages[1].start(actor);
        watched.push(("heartbeat", heartbeat.clone().recipient()));
        let guardian = Guardian::new(watched, on_fatal).start();
        let status = WorkerStatus { incarnation, shared };
        Ok(Worker { ports, status, consumers, recorder, heartbeat, guardian, ended, stages })
    }

    /// A view that stays valid.
    #[must_use]
    pub fn status(&self) -> WorkerStatus {
        self.status.clone()
    }

    /// Waits until the incarnation ends by itself.
    pub async fn ended(&mut self) -> WorkerEnd {
        match self.ended.wait_for(Option::is_some).await {
            Ok(end) => end.unwrap_or(WorkerEnd::Fenced),
            Err(_) => WorkerEnd::Fenced,
        }
    }

    /// Stops in order: take nothing new, let what is claimed finish within `limit`, give back what is left then, record, ack, leave.
    /// Costs no attempt and no duplicate. `hurry`: cancelled, the limit comes at once.
    pub async fn drain(self, limit: Duration, hurry: CancellationToken) {
        self.status.shared.draining.store(true, Ordering::Relaxed);
        tell(self.guardian, StandDown).await;
        let drains = self.consumers.iter().map(|c| c.send(consumer::Drain(limit)));
        let drained = futures_util::future::join_all(drains);
        tokio::pin!(drained);
        tokio::select! {
            biased;
            _ = &mut drained => {}
            () = hurry.cancelled() => {
                futures_util::future::join_all(self.consumers.iter().map(|c| c.send(consumer::Hurry))).await;
                drained.await;
            }
        }
        tell(self.recorder, recorder::Flush).await;
        tell(self.heartbeat, heartbeat::Stop).await;
        let (presence, who) = (self.ports.presence.clone(), self.status.incarnation);
        let left = self.ports.io.spawn(async move { presence.leave(who).await });
        if let Ok(Err(e)) = left.await {
            tracing::debug!(error = %e, "could not leave; the worker will be seen as lost, with nothing of its own");
        }
        for stage in self.stages {
            stage.stop();
        }
    }

    /// Ends a fenced incarnation: waits until its handlers have stopped and their shards are handed back (the ledger refuses that
    /// where somebody has taken them), then stops. Costs no try.
    pub async fn discard(self) {
        tell(self.guardian, StandDown).await;
        let drains = self.consumers.iter().map(|c| c.send(consumer::Drain(Duration::ZERO)));
        futures_util::future::join_all(drains).await;
        tell(self.recorder, recorder::Flush).await;
        for stage in self.stages {
            stage.stop();
        }
    }
}

/// An unreachable broker is waited for by `consume`; only a refusal ends the start.
fn only_if_refused(error: BrokerError) -> Result<(), BrokerError> {
    match error {
        BrokerError::Unavailable(_) => Ok(()),
        refused @ BrokerError::Refused(_) => Err(refused),
    }
}
