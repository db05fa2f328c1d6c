//! The lease, the heartbeats and the memory of what is done: all that may be forgotten at any time.

use super::World;
use super::net::{Node, Reply, Request};
use super::scheduler::TTL_MS;
use super::worker::incarnation;
use shardcron_domain::{AttemptRef, Incarnation};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Redis {
    /// Whose the lease is (a scheduler's place and life), and until when.
    pub(crate) lease: Option<((Node, u32), i64)>,
    beats: BTreeMap<Incarnation, i64>,
    done: BTreeSet<AttemptRef>,
    /// How often it lost its memory.
    pub(crate) flushes: u64,
}

impl Redis {
    pub(crate) fn flush(&mut self) {
        *self = Redis { flushes: self.flushes + 1, ..Redis::default() };
    }
}

impl World {
    pub(crate) fn ask_redis(&mut self, from: Node, life: u32, request: &Request) -> Reply {
        let now = self.now;
        let redis = &mut self.redis;
        match request {
            Request::Acquire { .. } => {
                let free = redis.lease.is_none_or(|(who, ends)| who == (from, life) || ends <= now);
                if free {
                    redis.lease = Some(((from, life), now + TTL_MS));
                }
                Reply::Lease(free)
            }
            Request::Renew { .. } => {
                let mine = redis.lease.is_some_and(|(who, ends)| who == (from, life) && ends > now);
                if mine {
                    redis.lease = Some(((from, life), now + TTL_MS));
                }
                Reply::Lease(mine)
            }
            Request::Beat { .. } => {
                if let Node::Worker(w) = from {
                    redis.beats.insert(incarnation(w, life), now);
                }
                Reply::Done
            }
            Request::Workers(..) => Reply::Workers(redis.beats.iter().map(|(who, at)| (*who, now - at)).collect()),
            Request::Hints(attempts) => Reply::Hints(attempts.iter().map(|a| redis.done.contains(a)).collect()),
            Request::Finish(attempts) => {
                redis.done.extend(attempts);
                Reply::Done
            }
            _ => Reply::Done,
        }
    }
}
