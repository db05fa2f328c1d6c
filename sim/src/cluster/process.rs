//! The processes. Each is a `LocalSet` that holds all of its actors and tasks: not polled, it is paused; dropped, it is killed.

use super::World;
use super::broker::SimBroker;
use super::handler::SimHandler;
use super::ledger::SimLedger;
use super::life::{Life, LifeId};
use super::stores::SimLive;
use shardcron_actors::guardian::OnFatal;
use shardcron_actors::ledger_time::LedgerTime;
use shardcron_actors::modes::Modes;
use shardcron_actors::{
    Io, Ports, Scheduler, SchedulerOptions, TierOptions, Trace, TraceSink, Worker, WorkerEnd, WorkerOptions,
};
use shardcron_broker::BrokerState;
use shardcron_domain::trace::TraceEvent;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

/// What a node is to do about a process that said something of itself.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// It dies now.
    Kill(LifeId, &'static str),
    /// It has ended in order.
    Ended(LifeId),
    /// Look whether all is well.
    Look,
}

/// A running process.
pub(crate) struct Process {
    pub(crate) id: LifeId,
    /// Taken out while it is polled.
    pub(crate) set: Option<LocalSet>,
    pub(crate) paused: bool,
    /// SIGTERM.
    pub(crate) terminate: CancellationToken,
    /// What it hears of its connection to the broker.
    pub(crate) broker: watch::Sender<BrokerState>,
}

impl Process {
    pub(crate) fn start(world: &Arc<World>, id: LifeId, broker_state: BrokerState) -> Self {
        let life = Life { world: world.clone(), id };
        let (broker, state) = watch::channel(broker_state);
        let terminate = CancellationToken::new();
        let set = LocalSet::new();
        let (orders, end) = (world.orders.clone(), terminate.clone());
        let ports = ports(&life, state);
        set.spawn_local(async move {
            let plan = &life.world.plan;
            if life.id.node < plan.schedulers {
                scheduler(&life, ports, end).await;
            } else {
                worker(&life, ports, end).await;
            }
            let _ = orders.send(Order::Ended(life.id));
        });
        Process { id, set: Some(set), paused: false, terminate, broker }
    }
}

fn ports(life: &Life, state: watch::Receiver<BrokerState>) -> Ports {
    let live = Arc::new(SimLive(life.clone()));
    let ports = Ports {
        ledger: Arc::new(SimLedger(life.clone())),
        broker: Arc::new(SimBroker { life: life.clone(), state }),
        lease: live.clone(),
        presence: live.clone(),
        idempotency: live,
        modes: Modes::default(),
        clock: Arc::new(life.clone()),
        entropy: Arc::new(life.clone()),
        trace: Trace::off(),
        ledger_time: LedgerTime::default(),
        io: Io::here(),
        handlers: Io::here(),
    };
    ports.traced(Trace::to(Arc::new(Witness(life.clone()))))
}

struct Witness(Life);

impl TraceSink for Witness {
    fn note(&self, event: TraceEvent) {
        self.0.world.witness(self.0.id, event);
    }
}

/// A process whose guardian finds an actor gone or silent ends itself. Silent, it may be after a long pause; gone, it is a bug.
fn on_fatal(life: &Life) -> Arc<OnFatal> {
    let life = life.clone();
    Arc::new(Box::new(move |fault: String| {
        if fault.contains("panicked") {
            life.world.check(Err(super::Broken::Fatal(fault)));
        }
        life.world.kill(life.id);
    }))
}

fn ms(ms: i64) -> Duration {
    Duration::from_millis(ms.unsigned_abs())
}

async fn scheduler(life: &Life, ports: Ports, end: CancellationToken) {
    let plan = &life.world.plan;
    let options = SchedulerOptions {
        lease_ttl: ms(plan.lease_ttl_ms),
        lost_after: ms(plan.lost_after_ms),
        tiers: plan.tiers.clone(),
        ..SchedulerOptions::named(format!("scheduler-{}", life.id.node))
    };
    let scheduler = Scheduler::start(ports, options, on_fatal(life));
    end.cancelled().await;
    scheduler.shut_down().await;
}

async fn worker(life: &Life, ports: Ports, end: CancellationToken) {
    let plan = &life.world.plan;
    let handler = Arc::new(SimHandler(life.clone()));
    let options = WorkerOptions {
        name: format!("worker-{}", life.id.node),
        host: "simulated".into(),
        tiers: plan
            .tiers
            .iter()
            .map(|name| TierOptions { name: name.clone(), concurrency: plan.concurrency })
            .collect(),
        lost_after: ms(plan.lost_after_ms),
        ack_horizon: ms(plan.ack_horizon_ms),
        resolve: Arc::new(move |_| Ok(handler.clone())),
        caches: Default::default(),
        preload_keys: None,
    };
    let starting = Worker::start(ports, options, on_fatal(life));
    let started = tokio::select! {
        biased;
        started = starting => started,
        // Nothing has been taken yet: as the program does, it just ends.
        () = end.cancelled() => return,
    };
    let Ok(mut worker) = started else { return };
    tokio::select! {
        biased;
        // A fenced incarnation is followed by another one; here, by another process.
        WorkerEnd::Fenced = worker.ended() => worker.discard().await,
        () = end.cancelled() => worker.drain(ms(5_000), CancellationToken::new()).await,
    }
}
