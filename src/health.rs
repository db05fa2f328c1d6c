//! What only the process knows of its own health, for `/healthz`.

use crate::serve::Roles;
use shardcron_actors::modes::Entered;
use shardcron_actors::{Clock, LeaderState, SchedulerStatus, SystemClock};
use shardcron_broker::BrokerState;
use shardcron_domain::modes::Mode;
use shardcron_web::{Degraded, Dependency, ProcessHealth};
use std::collections::BTreeMap;
use tokio::sync::watch;

type InModes = BTreeMap<Mode, Entered>;

/// Keeps it up to date.
pub async fn report(
    mut broker: watch::Receiver<BrokerState>,
    mut modes: watch::Receiver<InModes>,
    mut scheduler: Option<SchedulerStatus>,
    roles: Roles,
    health: watch::Sender<ProcessHealth>,
) {
    loop {
        let state = scheduler.as_ref().map(SchedulerStatus::leader_state);
        let now_in = modes.borrow_and_update().clone();
        let transport = transport(&broker.borrow_and_update(), &now_in);
        let names = [(roles.scheduler, "scheduler"), (roles.worker, "worker")];
        health.send_replace(ProcessHealth {
            roles: names.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).to_owned()).collect(),
            leading: matches!(state, Some(LeaderState::Leading(_))),
            lease_held: state.as_ref().map(|s| match s {
                LeaderState::Leading(_) => true,
                LeaderState::Standby { held_by, .. } => held_by.is_some(),
            }),
            dependencies: vec![transport],
            degraded: now_in.iter().map(|(mode, entered)| degraded(*mode, entered)).collect(),
            problems: Vec::new(),
        });
        tokio::select! {
            changed = broker.changed() => if changed.is_err() { return },
            changed = modes.changed() => if changed.is_err() { return },
            () = async { match &mut scheduler { Some(s) => s.changed().await, None => std::future::pending().await } } => {}
        }
    }
}

/// The broker is needed unless its absence is a mode in which the work goes on.
fn transport(state: &BrokerState, modes: &InModes) -> Dependency {
    match state {
        BrokerState::Up => Dependency::up("broker", None),
        BrokerState::Blocked(why) => Dependency::down("broker", format!("it takes no messages: {why}")).optional(),
        BrokerState::Away(why) if modes.contains_key(&Mode::BrokerAway) => {
            Dependency::down("broker", why.clone()).optional()
        }
        BrokerState::Away(why) => Dependency::down("broker", why.clone()),
    }
}

fn degraded(mode: Mode, entered: &Entered) -> Degraded {
    let ago_ms = i64::try_from(entered.since.elapsed().as_millis()).unwrap_or(i64::MAX);
    let since_ms = SystemClock::default().now_ms().saturating_sub(ago_ms);
    Degraded::new(mode, since_ms, entered.reason.clone())
}
