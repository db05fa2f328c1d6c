//! The settling half of a consumer: turns tags into frames on the channel that they came by.

use super::acks::{AckTracker, Frame};
use crate::groups::{Groups, Settled};
use crate::metric_definitions as m;
use crate::port::Tag;
use futures_util::FutureExt;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use shardcron_domain::limits;
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
    groups: Groups,
}

/// A message holds at most `GROUP_MAX` shards: the part of a tag's number that says which.
const PART_BITS: u32 = 6;
const _: () = assert!(limits::GROUP_MAX <= 1 << PART_BITS);

/// The number of a tag: the server's number of the message, and which of its shards it is.
pub(super) fn number_of(message: u64, part: u32) -> u64 {
    (message << PART_BITS) | u64::from(part)
}

fn message_and_part(number: u64) -> (u64, u32) {
    (number >> PART_BITS, (number & ((1 << PART_BITS) - 1)) as u32)
}

impl Settler {
    /// A new channel; all tags of earlier ones are void.
    pub(super) fn install(&self, generation: u64, channel: Channel) {
        *self.lock() = Some(Live { generation, channel, tracker: AckTracker::default(), groups: Groups::default() });
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

    /// Notes that a delivery holds several shards; before any of them is handed on.
    pub(super) fn grouped(&self, generation: u64, tag: u64, parts: u32) {
        if let Some(live) = self.lock().as_mut().filter(|l| l.generation == generation) {
            live.groups.open(tag, parts);
        }
    }

    /// Acks what is settled.
    pub(super) fn ack(&self, tags: &[Tag]) {
        self.settle(tags, false);
    }

    /// Gives deliveries back. A message with several shards goes back when all of them are settled: what had ended by then is refused by
    /// the ledger when it comes again.
    pub(super) fn requeue(&self, tags: &[Tag]) {
        self.settle(tags, true);
    }

    fn settle(&self, tags: &[Tag], requeue: bool) {
        let mut guard = self.lock();
        let Some(live) = guard.as_mut() else { return };
        let (mut acked, mut given_back) = (Vec::new(), Vec::new());
        for tag in tags.iter().filter(|t| t.generation == live.generation) {
            let (message, part) = message_and_part(tag.number);
            match live.groups.settle(message, part, requeue) {
                Settled::Ack => acked.push(message),
                Settled::Requeue => given_back.push(message),
                Settled::NotYet => {}
            }
        }
        live.ack(acked);
        live.requeue(given_back);
    }

    /// Whether tags of this generation can still be settled.
    pub(super) fn is_live(&self, generation: u64) -> bool {
        self.lock().as_ref().is_some_and(|l| l.generation == generation && l.channel.status().connected())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live {
    fn ack(&mut self, messages: Vec<u64>) {
        let frames = self.tracker.ack(messages);
        count(&frames);
        for Frame { tag, multiple } in frames {
            // The first poll puts the frame into lapin's queue; what is awaited beyond that is only its way to the socket. Not
            // awaiting keeps frames in order under this lock (one that names an answered tag closes the channel) and means that a
            // stuck socket can't hold up who acks. What is queued is bounded by the prefetch.
            // A failure means that the channel is gone: then the message comes again, and the ledger knows it.
            let _ = self.channel.basic_ack(tag, BasicAckOptions { multiple }).now_or_never();
        }
    }

    fn requeue(&mut self, messages: Vec<u64>) {
        let frames = self.tracker.requeue(messages);
        metrics::counter!(m::ACK_FRAMES, "kind" => "requeue").increment(frames.len() as u64);
        for Frame { tag, multiple } in frames {
            let _ = self.channel.basic_nack(tag, BasicNackOptions { multiple, requeue: true }).now_or_never();
        }
    }
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
