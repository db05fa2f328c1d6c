//! A worker that stands in while no scheduler leads: it watches the lease, stands for election, fires what must not wait, and gives
//! way to the first scheduler that comes.

use crate::config::Config;
use shardcron_actors::guardian::OnFatal;
use shardcron_actors::{LeaderState, Ports, Scheduler, SchedulerOptions, SchedulerStatus};
use shardcron_domain::fallback::{Held, Scope, Vigil, is_stand_in};
use shardcron_domain::modes::Mode;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// One worker's readiness to stand in.
pub struct StandIn {
    ports: Ports,
    options: SchedulerOptions,
    after: Duration,
    on_fatal: Arc<OnFatal>,
    shutdown: CancellationToken,
}

impl StandIn {
    /// Under a worker's name, with what a scheduler would have for options.
    pub fn new(
        config: &Config,
        name: String,
        ports: Ports,
        options: SchedulerOptions,
        (on_fatal, shutdown): (Arc<OnFatal>, CancellationToken),
    ) -> Self {
        let scope = Scope {
            tiers: config.fallback.tiers.iter().cloned().collect(),
            at_most_every: config.fallback.at_most_every,
        };
        let options = SchedulerOptions { name, scope: Some(scope), ..options };
        StandIn { ports, options, after: config.fallback_after().as_std(), on_fatal, shutdown }
    }

    /// Until the shutdown. Must run within an actix `System`.
    pub async fn run(self) {
        while !self.shutdown.is_cancelled() {
            tokio::select! {
                () = self.vacancy() => {}
                () = self.shutdown.cancelled() => return,
            }
            tracing::info!("no scheduler holds the lease; standing for election");
            let scheduler = Scheduler::start(self.ports.clone(), self.options.clone(), self.on_fatal.clone());
            self.stand_in(scheduler.status()).await;
            scheduler.shut_down().await;
            self.ports.modes.leave(Mode::SchedulersAway);
        }
    }

    /// Waits until nobody has held the lease for long enough, or another worker holds it.
    async fn vacancy(&self) {
        let (mut vigil, patience) = (Vigil::default(), self.options.lease_ttl / 2);
        loop {
            tokio::time::sleep(patience).await;
            let lease = self.ports.lease.clone();
            let look = self.ports.io.spawn(async move { tokio::time::timeout(patience, lease.holder()).await });
            let held = match look.await {
                Ok(Ok(Ok(holder))) => Held::by(holder.as_deref()),
                _ => Held::Unknown,
            };
            let after_ms = i64::try_from(self.after.as_millis()).unwrap_or(i64::MAX);
            if vigil.observe(held, after_ms, self.ports.clock.mono_ms()) {
                return;
            }
        }
    }

    /// Until a scheduler holds the lease.
    async fn stand_in(&self, mut status: SchedulerStatus) {
        loop {
            match status.leader_state() {
                LeaderState::Leading(_) => {
                    let reason = format!("nobody had held the schedulers' lease for {:?}", self.after);
                    self.ports.modes.enter(Mode::SchedulersAway, &reason);
                }
                LeaderState::Standby { held_by: Some(holder), .. } if !is_stand_in(&holder) => {
                    tracing::info!(scheduler = %holder, "a scheduler is there");
                    return;
                }
                LeaderState::Standby { .. } => self.ports.modes.leave(Mode::SchedulersAway),
            }
            tokio::select! {
                () = status.changed() => {}
                () = self.shutdown.cancelled() => return,
            }
        }
    }
}
