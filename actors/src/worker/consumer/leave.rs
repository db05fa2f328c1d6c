//! How a consumer stops: in order at a shutdown, at once behind the fence.

use super::ConsumerActor;
use actix::prelude::*;
use std::time::Duration;
use tokio::sync::oneshot;

/// Take nothing new, requeue what is not claimed, finish what is within the limit. Answers when nothing is left.
///
/// What is claimed and waits for a slot is run: it is some 100 ms of work (`shardcron_domain::flow`), and giving it back would cost
/// each shard an attempt's number. Only what is still waiting at the limit is given back.
#[derive(Message)]
#[rtype(result = "()")]
pub(in crate::worker) struct Drain(pub(in crate::worker) Duration);

impl Handler<Drain> for ConsumerActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Drain(limit): Drain, ctx: &mut Self::Context) -> Self::Result {
        self.draining = true;
        let (acker, io) = (self.acker.clone(), self.parts.ports.io.clone());
        let stopped = io.spawn(async move { acker.stop().await });
        self.requeue_held();
        if limit.is_zero() {
            self.end_of_time(ctx);
        } else {
            ctx.run_later(limit, Self::end_of_time);
        }
        let (done, wait) = oneshot::channel();
        self.drained.push(done);
        self.check_drained();
        Box::pin(async move {
            let _ = stopped.await;
            let _ = wait.await;
        })
    }
}

/// The drain's limit comes now.
#[derive(Message)]
#[rtype(result = "()")]
pub(in crate::worker) struct Hurry;

impl Handler<Hurry> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, _: Hurry, ctx: &mut Self::Context) {
        if self.draining && !self.out_of_time {
            self.end_of_time(ctx);
        }
    }
}

impl ConsumerActor {
    pub(super) fn end_of_time(&mut self, ctx: &mut Context<Self>) {
        self.out_of_time = true;
        self.stop.cancel();
        self.give_back_ready(0, ctx);
        self.check_drained();
    }
}

/// Stop all handlers, throw their results away, hand their shards back: somebody may be about to take them. The ledger has the
/// last word on each.
#[derive(Message)]
#[rtype(result = "()")]
pub(in crate::worker) struct Fence;

impl Handler<Fence> for ConsumerActor {
    type Result = ();

    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        self.fenced = true;
        self.draining = true;
        self.fence.cancel();
        self.stop.cancel();
        self.requeue_held();
        self.give_back_ready(0, ctx);
    }
}
