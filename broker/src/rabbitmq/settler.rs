//! The settling half of a consumer: turns tags into frames on the channel that they came by.

use super::acks::{AckTracker, Frame};
use crate::metric_definitions as m;
use crate::port::Tag;
use futures_util::FutureExt;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shared by the consumer's task and its acker.
#[derive(Default)]
pub(super) struct Settler {
    live: Mutex<Option<Live>>,
}

struct Live {
    generation: u64,
    channel: Channel,
    tracker: AckTracker,
}

impl Settler {
    /// A new channel; all tags of earlier ones are void.
    pub(super) fn install(&self, generation: u64, channel: Channel) {
        *self.lock() = Some(Live { generation, channel, tracker: AckTracker::default() });
    }

    /// The channel is lost or given up; its open deliveries go back to the queue.
    pub(super) fn clear(&self) {
        *self.lock() = None;
    }

    /// Notes deliveries.
    pub(super) fn delivered(&self, generation: u64, tag: u64) {
        if let Some(live) = self.lock().as_mut().filter(|l| l.generation == generation) {
            live.tracker.delivered(tag);
        }
    }

    /// Acks what is settled.
    pub(super) fn ack(&self, tags: &[Tag]) {
        let mut guard = self.lock();
        let Some(live) = guard.as_mut() else { return };
        let frames = live.tracker.ack(numbers(tags, live.generation));
        count(&frames);
        for Frame { tag, multiple } in frames {
            // The first poll puts the frame into lapin's queue; what is awaited beyond that is only its way to the socket. Not
            // awaiting keeps frames in order under this lock (one that names an answered tag closes the channel) and means that a
            // stuck socket can't hold up who acks. What is queued is bounded by the prefetch.
            // A failure means that the channel is gone: then the message comes again, and the ledger knows it.
            let _ = live.channel.basic_ack(tag, BasicAckOptions { multiple }).now_or_never();
        }
    }

    /// Gives deliveries back.
    pub(super) fn requeue(&self, tags: &[Tag]) {
        let mut guard = self.lock();
        let Some(live) = guard.as_mut() else { return };
        let frames = live.tracker.requeue(numbers(tags, live.generation));
        metrics::counter!(m::ACK_FRAMES, "kind" => "requeue").increment(frames.len() as u64);
        for Frame { tag, multiple } in frames {
            let _ = live.channel.basic_nack(tag, BasicNackOptions { multiple, requeue: true }).now_or_never();
        }
    }

    /// Whether tags of this generation can still be settled.
    pub(super) fn is_live(&self, generation: u64) -> bool {
        self.lock().as_ref().is_some_and(|l| l.generation == generation && l.channel.status().connected())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn numbers(tags: &[Tag], generation: u64) -> impl Iterator<Item = u64> {
    tags.iter().filter(move |t| t.generation == generation).map(|t| t.number)
}

fn count(frames: &[Frame]) {
    let multiple = frames.iter().filter(|f| f.multiple).count() as u64;
    let single = frames.len() as u64 - multiple;
    for (kind, number) in [("multiple", multiple), ("single", single)] {
        if number > 0 {
            metrics::counter!(m::ACK_FRAMES, "kind" => kind).increment(number);
        }
    }
}
