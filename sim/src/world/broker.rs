//! The broker: one queue, a connection for each worker, delivery until the ack, and what can be wrong with that.

use super::World;
use super::net::{Event, Node, Reply, Request, Tag};
use super::plan::Class;
use shardcron_domain::AttemptRef;
use std::collections::{BTreeMap, VecDeque};

#[derive(Debug, Default)]
struct Connection {
    /// Grows with each connection: tags of an earlier one are void.
    generation: u64,
    consuming: bool,
    prefetch: usize,
    unacked: BTreeMap<u64, AttemptRef>,
}

#[derive(Debug)]
pub(crate) struct Broker {
    queue: VecDeque<AttemptRef>,
    connections: Vec<Connection>,
    tags: u64,
}

impl Broker {
    pub(crate) fn new(workers: usize) -> Self {
        Broker { queue: VecDeque::new(), connections: (0..workers).map(|_| Connection::default()).collect(), tags: 0 }
    }

    /// Ends a worker's connection; everything unacked goes back to where it came from.
    pub(crate) fn disconnect(&mut self, worker: usize, keep: bool) {
        let connection = &mut self.connections[worker];
        connection.generation += 1;
        connection.consuming = false;
        let unacked = std::mem::take(&mut connection.unacked);
        if keep {
            unacked.into_values().rev().for_each(|attempt| self.queue.push_front(attempt));
        }
    }

    pub(crate) fn generation(&self, worker: usize) -> u64 {
        self.connections[worker].generation
    }

    pub(crate) fn purge(&mut self) {
        self.queue.clear();
    }
}

impl World {
    pub(crate) fn ask_broker(&mut self, from: Node, life: u32, request: &Request) -> Reply {
        let reply = match (request, from) {
            (Request::Depth(_) | Request::StrandedDepth(..), _) => {
                let consumers = self.broker.connections.iter().filter(|c| c.consuming).count();
                Reply::Depth(self.broker.queue.len() as u32, consumers as u32)
            }
            (Request::Publish(_, _, attempts), _) => Reply::Confirmed(self.publish(attempts)),
            // A process that has ended has no connection to speak through.
            (_, Node::Worker(w)) if self.workers[w].life == life => self.on_connection(w, request),
            _ => Reply::Done,
        };
        self.deliver();
        reply
    }

    fn publish(&mut self, attempts: &[AttemptRef]) -> Vec<bool> {
        let mut confirmed = Vec::with_capacity(attempts.len());
        let chaos = self.chaos;
        for attempt in attempts {
            let refused = chaos && self.plan.has(Class::LostCalls) && self.dice.percent(3);
            confirmed.push(!refused);
            // What is not confirmed may have been taken all the same.
            if refused && self.dice.percent(50) {
                continue;
            }
            if chaos && self.plan.has(Class::LoseMessages) && self.dice.percent(5) {
                continue;
            }
            self.broker.queue.push_back(*attempt);
            if chaos && self.plan.has(Class::Duplicate) && self.dice.percent(10) {
                self.broker.queue.push_back(*attempt);
            }
        }
        confirmed
    }

    fn on_connection(&mut self, w: usize, request: &Request) -> Reply {
        let connection = &mut self.broker.connections[w];
        match request {
            Request::Consume(generation) if *generation == connection.generation => {
                connection.consuming = true;
                connection.prefetch = connection.prefetch.max(1);
            }
            Request::Prefetch(prefetch) => connection.prefetch = usize::from(*prefetch),
            Request::Ack(tags) => {
                for tag in tags.iter().filter(|t| t.generation == connection.generation) {
                    connection.unacked.remove(&tag.number);
                }
            }
            _ => {}
        }
        Reply::Done
    }

    /// Hands out what the consumers have room for.
    pub(crate) fn deliver(&mut self) {
        loop {
            let room = |c: &&Connection| c.consuming && c.unacked.len() < c.prefetch;
            let free = self.broker.connections.iter().filter(room).count();
            if free == 0 || self.broker.queue.is_empty() {
                return;
            }
            let turn = self.dice.index(free);
            let takers = self.broker.connections.iter().enumerate().filter(|(_, c)| room(c));
            let Some(worker) = takers.map(|(w, _)| w).nth(turn) else { return };
            let reorder = self.plan.has(Class::Reorder);
            let at = if reorder { self.dice.index(self.broker.queue.len()) } else { 0 };
            let Some(attempt) = self.broker.queue.remove(at) else { return };
            self.broker.tags += 1;
            let number = self.broker.tags;
            let connection = &mut self.broker.connections[worker];
            connection.unacked.insert(number, attempt);
            let tag = Tag { generation: connection.generation, number };
            let (life, delay) = (self.workers[worker].life, self.dice.of(1, 4));
            self.push(self.now + delay, Event::Deliver { worker, life, tag, attempt });
        }
    }
}
