//! What goes wrong, and that it stops.

use super::World;
use super::net::{Event, Node, Port, Timer};
use super::plan::Class;
use std::collections::BTreeSet;

/// Who can't reach what.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    pub(crate) between: BTreeSet<(Node, Port)>,
    pub(crate) away: BTreeSet<Port>,
}

impl World {
    pub(crate) fn cuts(&self) -> &BTreeSet<(Node, Port)> {
        &self.cut.between
    }

    pub(crate) fn away(&self) -> &BTreeSet<Port> {
        &self.cut.away
    }

    /// One fault, and when the next one comes.
    pub(crate) fn chaos(&mut self) {
        if !self.chaos {
            return;
        }
        let wait = self.dice.of(100, self.plan.fault_every_ms);
        self.push(self.now + wait, Event::Chaos);
        if self.plan.classes.is_empty() {
            return;
        }
        let class = self.plan.classes[self.dice.index(self.plan.classes.len())];
        self.faults += 1;
        self.strike(class);
    }

    fn any_worker(&mut self) -> usize {
        self.dice.index(self.workers.len())
    }

    fn any_node(&mut self) -> Node {
        let all = self.schedulers.len() + self.workers.len();
        match self.dice.index(all) {
            n if n < self.schedulers.len() => Node::Scheduler(n),
            n => Node::Worker(n - self.schedulers.len()),
        }
    }

    fn strike(&mut self, class: Class) {
        match class {
            Class::CrashWorker => {
                let w = self.any_worker();
                self.crash_worker(w, "killed");
            }
            Class::CrashScheduler => {
                let s = self.dice.index(self.schedulers.len());
                self.crash_scheduler(s);
            }
            Class::PauseWorker => {
                let (w, time) = (self.any_worker(), self.pause_time());
                self.note(|| format!("worker {w} pauses for {time} ms"));
                self.workers[w].paused_until = self.now + time;
            }
            Class::PauseScheduler => {
                let (s, time) = (self.dice.index(self.schedulers.len()), self.pause_time());
                self.note(|| format!("scheduler {s} pauses for {time} ms"));
                self.schedulers[s].paused_until = self.now + time;
            }
            Class::Clock => self.set_clock(),
            Class::CutLedger => self.cut_off(Port::Ledger),
            Class::CutBroker => self.cut_off(Port::Broker),
            Class::CutRedis => self.cut_off(Port::Redis),
            Class::LedgerAway => self.take_away(Port::Ledger),
            Class::RedisAway => self.take_away(Port::Redis),
            Class::Purge => {
                self.note(|| "the queue is purged".into());
                self.broker.purge();
            }
            Class::Reconnect => {
                let (w, keep) = (self.any_worker(), !self.plan.has(Class::Purge));
                self.lose_connection(w, keep);
            }
            Class::FlushRedis => {
                self.note(|| "redis forgets everything".into());
                self.redis.flush();
            }
            Class::Cancel => {
                let active = self.ledger.active.len();
                let chosen = self.dice.index(active);
                if let Some(id) = self.ledger.active.iter().nth(chosen).copied() {
                    self.note(|| format!("execution {id} is cancelled"));
                    let result = self.ledger.cancel(id);
                    self.check(result);
                }
            }
            Class::PauseJob => {
                let job = self.dice.index(self.ledger.paused.len());
                if let Some(paused) = self.ledger.paused.get_mut(job) {
                    *paused = !*paused;
                }
            }
            // These are drawn where they strike.
            Class::Slow
            | Class::LostCalls
            | Class::Duplicate
            | Class::LoseMessages
            | Class::Reorder
            | Class::FailHandlers
            | Class::ForgetfulHandlers
            | Class::Poison => {}
        }
    }

    /// Short ones, ones around the trust window and the lease, and ones that are longer than a worker's life.
    fn pause_time(&mut self) -> i64 {
        match self.dice.index(3) {
            0 => self.dice.of(50, 3_000),
            1 => self.dice.of(4_000, 6_000),
            _ => self.dice.of(8_000, 25_000),
        }
    }

    fn set_clock(&mut self) {
        let (node, offset) = (self.any_node(), self.dice.of(-20_000, 20_000));
        self.note(|| format!("{node:?}: the clock is off by {offset} ms"));
        match node {
            Node::Scheduler(s) => self.schedulers[s].offset_ms = offset,
            Node::Worker(w) => self.workers[w].offset_ms = offset,
        }
    }

    fn cut_off(&mut self, port: Port) {
        let (node, time) = (self.any_node(), self.dice.of(500, 20_000));
        self.note(|| format!("{node:?} is cut off from {port:?} for {time} ms"));
        self.cut.between.insert((node, port));
        self.push(self.now + time, Event::Heal(node, port));
        if let (Node::Worker(w), Port::Broker) = (node, port) {
            self.broker.disconnect(w, true);
            self.deliver();
        }
    }

    fn take_away(&mut self, port: Port) {
        let time = self.dice.of(500, 12_000);
        self.note(|| format!("{port:?} is away for {time} ms"));
        self.cut.away.insert(port);
        self.push(self.now + time, Event::PortBack(port));
    }

    pub(crate) fn heal(&mut self, node: Node, port: Port) {
        let was = self.cut.between.remove(&(node, port));
        if let (true, Node::Worker(w), Port::Broker) = (was, node, port) {
            self.reconnect(w);
        }
    }

    pub(crate) fn back(&mut self, port: Port) {
        self.cut.away.remove(&port);
    }

    fn lose_connection(&mut self, w: usize, keep: bool) {
        self.note(|| format!("worker {w} loses its connection to the broker"));
        self.broker.disconnect(w, keep);
        self.deliver();
        self.reconnect(w);
    }

    fn reconnect(&mut self, w: usize) {
        let (life, delay) = (self.workers[w].life, self.dice.of(10, 1_000));
        let generation = self.broker.generation(w);
        self.push(self.now + delay, Event::Renewed { worker: w, life, generation });
    }

    pub(crate) fn crash_worker(&mut self, w: usize, why: &str) {
        self.note(|| format!("worker {w} ends: {why}"));
        let restart = self.dice.of(100, 3_000);
        self.broker.disconnect(w, true);
        self.deliver();
        self.workers[w].end();
        self.timer(Node::Worker(w), restart, Timer::Start);
    }

    fn crash_scheduler(&mut self, s: usize) {
        self.note(|| format!("scheduler {s} is killed"));
        let restart = self.dice.of(100, 8_000);
        self.schedulers[s].end();
        self.timer(Node::Scheduler(s), restart, Timer::Start);
    }

    /// The faults stop: everybody can reach everything, wakes up, and has the right time.
    pub(crate) fn calm(&mut self) {
        self.note(|| "the faults stop".into());
        self.chaos = false;
        self.cut.away.clear();
        for (node, port) in std::mem::take(&mut self.cut.between) {
            if let (Node::Worker(w), Port::Broker) = (node, port) {
                self.reconnect(w);
            }
        }
        let now = self.now;
        for scheduler in &mut self.schedulers {
            scheduler.paused_until = scheduler.paused_until.min(now);
            scheduler.offset_ms = 0;
        }
        for worker in &mut self.workers {
            worker.paused_until = worker.paused_until.min(now);
            worker.offset_ms = 0;
        }
    }
}
