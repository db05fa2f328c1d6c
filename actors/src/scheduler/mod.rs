//! The scheduler process: a lease task and three actors, one arbiter each.

mod asked;
mod delays;
mod dispatcher;
mod external;
mod grouping;
mod intent;
mod loading;
mod plan_files;
mod plans;
mod retention;
mod round;
mod stand_in;
mod supervisor;
#[cfg(test)]
mod tests;
mod trigger;
mod turns;

pub use retention::RetentionOptions;

use crate::guardian::{Guardian, OnFatal, StandDown};
use crate::heads::Heads;
use crate::io::Stage;
use crate::leadership::{LeaderState, Leading, LeaseTask};
use crate::ports::{Ports, tell};
use actix::prelude::*;
use shardcron_domain::Epoch;
use shardcron_domain::fallback::{STAND_IN_PREFIX, Scope};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// What a scheduler needs to know beyond its ports.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Its name, for people; part of the lease's value.
    pub name: String,
    /// How long the lease lasts without renewal.
    pub lease_ttl: Duration,
    /// A worker that has not beaten for this long is lost.
    pub lost_after: Duration,
    /// How often the supervisor looks.
    pub sweep_every: Duration,
    /// A handed-out shard that nobody has started this long after its queue ran empty is handed out again.
    pub republish_after: Duration,
    /// The tiers whose queues exist from the start; others come with the jobs that name them.
    pub tiers: Vec<String>,
    /// How long what has ended is kept.
    pub retention: RetentionOptions,
    /// What a stand-in does of the work; `None`: a scheduler, which does all of it.
    pub scope: Option<Scope>,
}

impl SchedulerOptions {
    /// The defaults of the design, under a name.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        SchedulerOptions {
            name: name.into(),
            lease_ttl: Duration::from_secs(5),
            lost_after: Duration::from_secs(15),
            sweep_every: Duration::from_secs(1),
            republish_after: Duration::from_secs(5),
            tiers: vec!["core".into(), "bulk".into()],
            retention: RetentionOptions::default(),
            scope: None,
        }
    }
}

/// What can be asked of a scheduler at any time.
#[derive(Clone)]
pub struct SchedulerStatus {
    state: watch::Receiver<LeaderState>,
}

impl SchedulerStatus {
    /// Leading or standing by.
    #[must_use]
    pub fn leader_state(&self) -> LeaderState {
        self.state.borrow().clone()
    }

    /// Waits for the next change.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A running scheduler.
pub struct Scheduler {
    status: SchedulerStatus,
    shutdown: CancellationToken,
    lease_task: tokio::task::JoinHandle<()>,
    guardian: Addr<Guardian>,
    trigger: Addr<trigger::TriggerActor>,
    stages: Vec<Stage>,
}

/// The term has begun, or ended.
#[derive(Clone, Message)]
#[rtype(result = "()")]
pub(crate) struct TermChanged(pub(crate) Leading);

/// Lets an actor say that the ledger refused its epoch.
#[derive(Clone)]
pub(crate) struct Deposed(mpsc::Sender<Epoch>);

impl Deposed {
    pub(crate) fn report(&self, epoch: Epoch) {
        // A full channel means that it has been reported already.
        let _ = self.0.try_send(epoch);
    }
}

impl Scheduler {
    /// Starts the lease task and the actors. Must be called within an actix `System`; returns at once.
    pub fn start(ports: Ports, options: SchedulerOptions, on_fatal: Arc<OnFatal>) -> Self {
        let (leading_tx, leading_rx) = watch::channel(Leading::default());
        let (state_tx, state_rx) = watch::channel(LeaderState::Standby { why: "starting".into(), held_by: None });
        let (deposed_tx, deposed_rx) = mpsc::channel(16);
        let deposed = Deposed(deposed_tx);
        let shutdown = CancellationToken::new();
        let heads = Heads::new(ports.ledger.clone());
        let stages: Vec<Stage> = (0..3).map(|_| ports.io.stage()).collect();

        let actor = dispatcher::DispatcherActor::new(ports.clone(), options.clone(), deposed.clone());
        let dispatcher = stages[0].start(actor);
        let actor = trigger::TriggerActor::new(
            ports.clone(),
            (options.scope.clone(), options.lost_after),
            dispatcher.clone(),
            deposed.clone(),
        );
        let trigger = stages[1].start(actor);
        let actor =
            supervisor::SupervisorActor::new(ports.clone(), options.clone(), heads, dispatcher.clone(), deposed);
        let supervisor = stages[2].start(actor);

        let watched = vec![
            ("trigger", trigger.clone().recipient()),
            ("dispatcher", dispatcher.clone().recipient()),
            ("supervisor", supervisor.clone().recipient()),
        ];
        let guardian = Guardian::new(watched, on_fatal).start();

        let kind = if options.scope.is_some() { STAND_IN_PREFIX } else { "" };
        let token = format!("{kind}{}/{}", options.name, ports.entropy.id());
        let task = LeaseTask {
            ports: ports.clone(),
            token,
            ttl: options.lease_ttl,
            leading: leading_tx,
            state: state_tx,
            deposed: deposed_rx,
            shutdown: shutdown.clone(),
        };
        let lease_task = ports.io.spawn(task.run());
        ports.io.spawn(retention::run(ports.clone(), options.retention, leading_rx.clone()));
        ports.io.spawn(announce(leading_rx, (dispatcher, trigger.clone(), supervisor)));
        Scheduler { status: SchedulerStatus { state: state_rx }, shutdown, lease_task, guardian, trigger, stages }
    }

    /// A view that stays valid.
    #[must_use]
    pub fn status(&self) -> SchedulerStatus {
        self.status.clone()
    }

    /// Stops in order: no new firing, the one under way is finished, the lease is released, so that another leads at once.
    pub async fn shut_down(self) {
        tell(self.guardian, StandDown).await;
        tell(self.trigger, trigger::Finish).await;
        self.shutdown.cancel();
        let _ = self.lease_task.await;
        for stage in self.stages {
            stage.stop();
        }
    }
}

type Actors = (Addr<dispatcher::DispatcherActor>, Addr<trigger::TriggerActor>, Addr<supervisor::SupervisorActor>);

/// Tells the actors about each change of the term. A slow actor can't hold up the lease task this way.
async fn announce(mut leading: watch::Receiver<Leading>, (dispatcher, trigger, supervisor): Actors) {
    loop {
        let now = leading.borrow_and_update().clone();
        // The dispatcher first: it must be ready for what the trigger fires.
        tell(dispatcher.clone(), TermChanged(now.clone())).await;
        tell(trigger.clone(), TermChanged(now.clone())).await;
        tell(supervisor.clone(), TermChanged(now)).await;
        if leading.changed().await.is_err() {
            return;
        }
    }
}
