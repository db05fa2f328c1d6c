//! Speaks for the incarnation, and fences it when it can't be heard.

use super::consumer::{ConsumerActor, Fence};
use super::{Shared, WorkerEnd, WorkerOptions};
use crate::guardian::Ping;
use crate::ports::{Ports, tell};
use actix::prelude::*;
use shardcron_domain::Incarnation;
use shardcron_domain::liveness::must_fence;
use shardcron_sdk::cache::Caches;
use shardcron_store::{Result, WorkerBeat};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;

pub(super) struct HeartbeatActor {
    ports: Ports,
    beat: WorkerBeat,
    caches: Caches,
    lost_after: Duration,
    shared: Arc<Shared>,
    consumers: Vec<Addr<ConsumerActor>>,
    ended: watch::Sender<Option<WorkerEnd>>,
    /// By the monotonic clock, when the last beat that was taken had been sent.
    last_taken_ms: i64,
    under_way: bool,
    fenced: bool,
    failing: bool,
}

impl HeartbeatActor {
    pub(super) fn new(
        ports: Ports,
        incarnation: Incarnation,
        options: WorkerOptions,
        shared: Arc<Shared>,
        consumers: Vec<Addr<ConsumerActor>>,
        ended: watch::Sender<Option<WorkerEnd>>,
    ) -> Self {
        let beat = beat(&ports, incarnation, &options);
        let last_taken_ms = ports.clock.mono_ms();
        HeartbeatActor {
            ports,
            beat,
            caches: options.caches.clone(),
            lost_after: options.lost_after,
            shared,
            consumers,
            ended,
            last_taken_ms,
            under_way: false,
            fenced: false,
            failing: false,
        }
    }

    fn send_beat(&mut self, ctx: &mut Context<Self>) {
        if self.under_way || self.fenced {
            return;
        }
        self.under_way = true;
        self.beat.running = self.shared.running.load(Ordering::Relaxed);
        self.beat.progress = self.shared.progress.counts();
        self.beat.hot_keys = self.caches.hot_keys();
        self.beat.draining = self.shared.draining.load(Ordering::Relaxed);
        self.beat.modes = self.ports.modes.names();
        let (beat, lost_after) = (self.beat.clone(), self.lost_after);
        let (presence, sent_ms, me) = (self.ports.presence.clone(), self.ports.clock.mono_ms(), ctx.address());
        // Bounded, so that one call that hangs does not take the place of the next.
        let work = async move { tokio::time::timeout(lost_after / 3, presence.beat(&beat, lost_after)).await };
        self.ports.run(work, move |answer| {
            let result = answer.ok();
            tell(me, Beaten { sent_ms, result })
        });
    }

    fn look(&mut self) {
        let silent_ms = self.ports.clock.mono_ms() - self.last_taken_ms;
        if self.fenced || !must_fence(silent_ms, self.lost_after.as_millis() as i64) {
            return;
        }
        self.fenced = true;
        tracing::error!(
            silent_ms,
            "no heartbeat was taken for two thirds of the lost-after time: stopping all handlers and handing their shards back"
        );
        let (consumers, ended) = (self.consumers.clone(), self.ended.clone());
        actix::spawn(async move {
            futures_util::future::join_all(consumers.iter().map(|c| c.send(Fence))).await;
            ended.send_replace(Some(WorkerEnd::Fenced));
        });
    }
}

fn beat(ports: &Ports, incarnation: Incarnation, options: &WorkerOptions) -> WorkerBeat {
    WorkerBeat {
        incarnation,
        name: options.name.clone(),
        host: options.host.clone(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").into(),
        started_ms: ports.clock.now_ms(),
        tiers: options
            .tiers
            .iter()
            .map(|t| (t.name.clone(), u32::try_from(t.concurrency).unwrap_or(u32::MAX)))
            .collect(),
        running: 0,
        draining: false,
        progress: Vec::new(),
        hot_keys: Vec::new(),
        modes: ports.modes.names(),
    }
}

/// Beats until a beat is taken; said once, not at each try.
pub(super) async fn first_beat(ports: &Ports, incarnation: Incarnation, options: &WorkerOptions) {
    let (presence, beat, lost_after) = (ports.presence.clone(), beat(ports, incarnation, options), options.lost_after);
    let mut backoff = ports.backoff();
    let beats = ports.io.spawn(async move {
        let mut said = false;
        while let Err(e) = presence.beat(&beat, lost_after).await {
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(error = %e, "no heartbeat is taken; the worker takes no shards until one is");
            }
            tokio::time::sleep(backoff.next()).await;
        }
    });
    let _ = beats.await;
}

impl Actor for HeartbeatActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.send_beat(ctx);
        ctx.run_interval(self.lost_after / 3, |actor, ctx| actor.send_beat(ctx));
        ctx.run_interval((self.lost_after / 30).max(Duration::from_millis(10)), |actor, _| actor.look());
    }
}

impl Handler<Ping> for HeartbeatActor {
    type Result = ();
    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

#[derive(Message)]
#[rtype(result = "()")]
struct Beaten {
    sent_ms: i64,
    /// `None`: no answer in time.
    result: Option<Result<()>>,
}

impl Handler<Beaten> for HeartbeatActor {
    type Result = ();

    fn handle(&mut self, Beaten { sent_ms, result }: Beaten, ctx: &mut Self::Context) {
        self.under_way = false;
        let why = match result {
            Some(Ok(())) => {
                self.last_taken_ms = sent_ms;
                if std::mem::take(&mut self.failing) {
                    tracing::info!("heartbeats are taken again");
                }
                return;
            }
            Some(Err(e)) => e.to_string(),
            None => "no answer in time".into(),
        };
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(error = %why, "a heartbeat was not taken; trying again");
        }
        ctx.run_later(self.lost_after / 15, |actor, ctx| actor.send_beat(ctx));
    }
}

/// No more beats.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Stop;

impl Handler<Stop> for HeartbeatActor {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        self.fenced = true; // nothing to fence any more
        ctx.stop();
    }
}
