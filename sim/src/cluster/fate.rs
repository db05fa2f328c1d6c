//! Starts the processes, does to them what the seed says, stops doing it, and waits until everything has ended.

use super::life::{LifeId, PORTS, Port};
use super::plan::Class;
use super::process::{Order, Process};
use super::{BEGIN_MS, Broken, Late, SETTLE_MS, World};
use shardcron_broker::BrokerState;
use shardcron_domain::invariants::{self, InvariantId, Violation};
use shardcron_domain::trace::TraceEvent;
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{Ledger as _, OpsLedger as _, Reopen, ReopenShards};
use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio::time::Instant;

/// How often a calm cluster is looked at.
const LOOK_EVERY_MS: i64 = 250;
/// More than any seed has needed by far: something turns in a circle.
const CALLS_MAX: u64 = 3_000_000;

/// What is to happen at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Start(usize),
    Resume(LifeId),
    Heal(usize, Port),
    Back(Port),
    Unblock,
    Reconnect(u64),
    Chaos,
    Trigger,
    Calm,
    Look,
}

pub(super) struct Control {
    world: Arc<World>,
    orders: mpsc::UnboundedReceiver<Order>,
    lates: Option<mpsc::UnboundedReceiver<Late>>,
    agenda: BTreeSet<(i64, u64, Act)>,
    sequence: u64,
    nodes: Vec<Option<Process>>,
    lives: Vec<u32>,
    jobs: Vec<JobId>,
    blocked: bool,
    triggers: u64,
    faults: u64,
    stop_ms: i64,
    settled_ms: Option<i64>,
}

/// The end of a wait.
enum Next {
    Order(Order),
    Due,
}

impl Control {
    pub(super) fn new(
        world: &Arc<World>,
        orders: mpsc::UnboundedReceiver<Order>,
        lates: mpsc::UnboundedReceiver<Late>,
    ) -> Self {
        let nodes = world.plan.nodes();
        Control {
            world: world.clone(),
            orders,
            lates: Some(lates),
            agenda: BTreeSet::new(),
            sequence: 0,
            nodes: (0..nodes).map(|_| None).collect(),
            lives: vec![0; nodes],
            jobs: Vec::new(),
            blocked: false,
            triggers: 0,
            faults: 0,
            stop_ms: BEGIN_MS + world.plan.chaos_ms,
            settled_ms: None,
        }
    }

    /// Returns the faults that were injected, and how long after them everything had ended.
    pub(super) async fn live(mut self) -> (u64, i64) {
        self.apply_jobs();
        for node in 0..self.nodes.len() {
            let after = self.world.dice(|d| d.of(0, 500));
            self.at(after, Act::Start(node));
        }
        self.at(self.world.dice(|d| d.of(500, 3_000)), Act::Chaos);
        if self.world.plan.trigger_every_ms > 0 {
            self.at(1_000, Act::Trigger);
        }
        self.at(self.world.plan.chaos_ms, Act::Calm);
        // What is under way in the network belongs to no process.
        let network = LocalSet::new();
        if let Some(lates) = self.lates.take() {
            network.spawn_local(carry(lates));
        }
        let mut network = pin!(network);
        while self.settled_ms.is_none() && !self.world.is_broken() {
            let next = {
                let mut wait =
                    pin!(next(&mut self.orders, self.agenda.first().map(|(at, _, _)| *at - self.world.now_ms())));
                let nodes = &mut self.nodes;
                poll_fn(|cx| {
                    if let Poll::Ready(next) = wait.as_mut().poll(cx) {
                        return Poll::Ready(next);
                    }
                    let _ = network.as_mut().poll(cx);
                    for process in nodes.iter_mut().flatten().filter(|p| !p.paused) {
                        if let Some(set) = &mut process.set {
                            let _ = Pin::new(set).poll(cx);
                        }
                    }
                    Poll::Pending
                })
                .await
            };
            match next {
                Next::Order(order) => self.obey(order),
                Next::Due => self.due(),
            }
        }
        self.nodes.clear();
        (self.faults, self.settled_ms.unwrap_or_default())
    }

    fn at(&mut self, after_ms: i64, act: Act) {
        self.sequence += 1;
        self.agenda.insert((self.world.now_ms() + after_ms, self.sequence, act));
    }

    fn note(&self, line: impl FnOnce() -> String) {
        self.world.note(|| format!("-- {}", line()));
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Look => {}
            Order::Ended(life) => self.end(life, "in order"),
            Order::Kill(life, why) => self.end(life, why),
        }
    }

    fn due(&mut self) {
        while let Some((_, _, act)) = self.agenda.first().copied().filter(|(at, _, _)| *at <= self.world.now_ms()) {
            self.agenda.pop_first();
            match act {
                Act::Start(node) => self.start(node),
                Act::Resume(life) => self.resume(life),
                Act::Heal(node, port) => self.heal(node, port),
                Act::Back(port) => self.back(port),
                Act::Unblock => self.unblock(),
                Act::Reconnect(consumer) => self.world.queues(|queues, dice| queues.reconnect(consumer, dice)),
                Act::Chaos => self.chaos(),
                Act::Trigger => self.trigger(),
                Act::Calm => self.calm(),
                Act::Look => self.look(),
            }
        }
        if self.world.calls() > CALLS_MAX {
            self.violate(InvariantId::P1, format!("no end after {CALLS_MAX} calls"));
        }
    }

    fn violate(&self, id: InvariantId, seen: String) {
        self.world.check(Err(Broken::Invariant(Violation { id, seen })));
    }

    // ---- people -------------------------------------------------------------------------------------------------------

    fn apply_jobs(&mut self) {
        let world = self.world.clone();
        let jobs: Vec<_> = world.plan.jobs.iter().map(|job| (job.spec.clone(), Some(job.first_ms))).collect();
        let applied = world.real(world.sql().apply_jobs(&jobs, "simulation", BEGIN_MS));
        let records = world.real(world.sql().jobs());
        match (applied, records) {
            (Ok(_), Ok(records)) => {
                // In the plan's order, whatever the ledger's is.
                let by_name: BTreeMap<String, JobId> = records.into_iter().map(|r| (r.name, r.id)).collect();
                self.jobs = world.plan.jobs.iter().filter_map(|job| by_name.get(&job.spec.name).copied()).collect();
            }
            (Err(e), _) | (_, Err(e)) => world.check(Err(Broken::Rules(format!("the jobs could not be applied: {e}")))),
        }
    }

    /// Somebody triggers a job, sometimes with an id that was used before.
    fn trigger(&mut self) {
        let world = self.world.clone();
        if !world.chaos() || world.plan.jobs.is_empty() {
            return;
        }
        let wait = world.dice(|d| d.of(200, world.plan.trigger_every_ms.max(200)));
        self.at(wait, Act::Trigger);
        let job = &world.plan.jobs[world.dice(|d| d.index(world.plan.jobs.len()))].spec.name;
        self.triggers += 1;
        let known = i64::try_from(self.triggers).unwrap_or(i64::MAX);
        let payload = match world.dice(|d| d.of(0, 2)) {
            0 => format!(r#"{{"job":"{job}"}}"#),
            1 => format!(r#"{{"job":"{job}","request_id":"person-{}"}}"#, self.triggers),
            _ => format!(r#"{{"job":"{job}","request_id":"person-{}"}}"#, world.dice(|d| d.of(1, known))),
        };
        self.note(|| format!("somebody triggers {payload}"));
        world.queues(|queues, _| queues.send_trigger(payload.into_bytes()));
    }

    fn cancel(&mut self) {
        let world = self.world.clone();
        let open: Vec<ExecutionId> = world.oracle(|o| {
            o.runs.iter().filter(|(_, run)| !run.counters.phase.is_terminal()).map(|(id, _)| *id).collect()
        });
        if open.is_empty() {
            return;
        }
        let id = open[world.dice(|d| d.index(open.len()))];
        self.note(|| format!("somebody cancels {id}"));
        match world.real(world.sql().cancel(id, "simulation", "a fault", world.now_ms())) {
            Ok(_) => world.check(world.oracle(|o| o.cancelled(id))),
            Err(e) => world.check(Err(Broken::Rules(format!("{id} could not be cancelled: {e}")))),
        }
    }

    /// Somebody sends the failed shards of an execution back, whether it has ended or not.
    fn retry(&mut self) {
        let world = self.world.clone();
        let failed: Vec<ExecutionId> =
            world.oracle(|o| o.runs.iter().filter(|(_, run)| run.counters.failed > 0).map(|(id, _)| *id).collect());
        if failed.is_empty() {
            return;
        }
        let id = failed[world.dice(|d| d.index(failed.len()))];
        self.note(|| format!("somebody retries {id}"));
        // All of them, or one.
        let one = world.dice(|d| d.percent(30)).then(|| world.oracle(|o| o.first_failed(id))).flatten();
        let shards = one.map_or(ReopenShards::Failed { from: 0 }, |index| ReopenShards::These(vec![index]));
        let wanted = Reopen { execution: id, shards, who: "simulation".into(), reason: None };
        let now_ms = world.now_ms();
        // As the command's own process would say it.
        let person = LifeId { node: usize::MAX, number: 1 };
        world.witness(person, TraceEvent::Reopening { execution: id });
        let answer = world.real(world.sql().reopen(&wanted, now_ms));
        for at in answer.iter().flatten().flat_map(|reopened| &reopened.shards) {
            world.witness(person, TraceEvent::Reopened { at: *at });
        }
        match answer {
            Ok(Ok(reopened)) => world.check(world.oracle(|o| o.reopened(id, &reopened.shards, now_ms))),
            // Cancelled, or another execution of the job runs.
            Ok(Err(_)) => {}
            Err(e) => world.check(Err(Broken::Rules(format!("{id} could not be retried: {e}")))),
        }
    }

    fn pause_job(&mut self) {
        let world = self.world.clone();
        let job = &world.plan.jobs[world.dice(|d| d.index(world.plan.jobs.len()))].spec.name;
        let paused = world.dice(|d| d.percent(50)).then_some("simulation");
        self.note(|| format!("{job} is {}", paused.map_or("resumed", |_| "paused")));
        if let Err(e) = world.real(world.sql().set_paused(job, paused, "simulation", world.now_ms())) {
            world.check(Err(Broken::Rules(format!("{job} could not be paused: {e}"))));
        }
    }

    // ---- processes ----------------------------------------------------------------------------------------------------

    fn start(&mut self, node: usize) {
        if self.nodes[node].is_some() {
            return;
        }
        self.lives[node] += 1;
        let id = LifeId { node, number: self.lives[node] };
        self.note(|| format!("{id:?} starts"));
        self.nodes[node] = Some(Process::start(&self.world, id, self.broker_state(node)));
    }

    fn end(&mut self, life: LifeId, why: &str) {
        if self.nodes[life.node].as_ref().is_none_or(|p| p.id != life) {
            return;
        }
        self.note(|| format!("{life:?} ends: {why}"));
        // Its actors and tasks are dropped here; what it had sent is under way.
        self.nodes[life.node] = None;
        self.world.queues(|queues, dice| queues.forget(life, dice));
        let wait = self.world.dice(|d| d.of(50, 4_000));
        self.at(wait, Act::Start(life.node));
    }

    fn resume(&mut self, life: LifeId) {
        let now = self.world.now_ms();
        if let Some(process) = self.nodes[life.node].as_mut().filter(|p| p.id == life && p.paused) {
            process.paused = false;
            self.world.net(|net| net.resumed[life.node] = now);
            self.note(|| format!("{life:?} goes on"));
        }
    }

    // ---- connections --------------------------------------------------------------------------------------------------

    fn broker_state(&self, node: usize) -> BrokerState {
        if self.world.net(|net| net.is_cut(node, Port::Broker)) {
            return BrokerState::Away("cut off".into());
        }
        if self.blocked { BrokerState::Blocked("memory alarm".into()) } else { BrokerState::Up }
    }

    fn tell_broker_states(&self) {
        for (node, process) in self.nodes.iter().enumerate() {
            if let Some(process) = process {
                process.broker.send_replace(self.broker_state(node));
            }
        }
    }

    fn disconnect(&mut self, lost: impl Fn(LifeId) -> bool) -> Vec<u64> {
        self.tell_broker_states();
        self.world.queues(|queues, dice| queues.disconnect(lost, dice))
    }

    /// All consumers of nodes that can reach the broker again.
    fn reconnect(&mut self, nodes: impl Fn(usize) -> bool) {
        self.tell_broker_states();
        let world = self.world.clone();
        let cut = |life: LifeId| world.net(|net| net.is_cut(life.node, Port::Broker));
        let lost = world.queues(|queues, _| queues.disconnected(|life| nodes(life.node) && !cut(life)));
        self.reconnect_soon(lost);
    }

    fn reconnect_soon(&mut self, consumers: Vec<u64>) {
        for id in consumers {
            let wait = self.world.dice(|d| d.of(10, 1_500));
            self.at(wait, Act::Reconnect(id));
        }
    }

    fn heal(&mut self, node: usize, port: Port) {
        self.world.net(|net| net.cuts.remove(&(node, port)));
        if port == Port::Broker {
            self.reconnect(|n| n == node);
        }
    }

    fn back(&mut self, port: Port) {
        self.world.net(|net| net.away.remove(&port));
        if port == Port::Broker {
            self.reconnect(|_| true);
        }
    }

    fn unblock(&mut self) {
        self.blocked = false;
        self.tell_broker_states();
    }

    // ---- faults -------------------------------------------------------------------------------------------------------

    fn chaos(&mut self) {
        let world = self.world.clone();
        if !world.chaos() {
            return;
        }
        let wait = world.dice(|d| d.of(100, world.plan.fault_every_ms));
        self.at(wait, Act::Chaos);
        if world.plan.classes.is_empty() {
            return;
        }
        let class = world.plan.classes[world.dice(|d| d.index(world.plan.classes.len()))];
        self.faults += 1;
        self.strike(class);
    }

    fn any_node(&self) -> usize {
        self.world.dice(|d| d.index(self.nodes.len()))
    }

    fn any_port(&self) -> Port {
        PORTS[self.world.dice(|d| d.index(PORTS.len()))]
    }

    fn strike(&mut self, class: Class) {
        let node = self.any_node();
        let life = self.nodes[node].as_ref().map(|p| p.id);
        match (class, life) {
            (Class::Crash, Some(life)) => self.end(life, "killed"),
            (Class::Pause, Some(life)) => self.pause(life),
            (Class::Restart, Some(life)) => {
                self.note(|| format!("{life:?} is told to end"));
                if let Some(process) = &self.nodes[node] {
                    process.terminate.cancel();
                }
            }
            (Class::Clock, _) => {
                let offset = self.world.dice(|d| d.of(-20_000, 20_000));
                self.note(|| format!("node {node}: the clock is off by {offset} ms"));
                self.world.net(|net| net.offsets[node] = offset);
            }
            (Class::Cut, _) => self.cut(node),
            (Class::Away, _) => self.take_away(),
            (Class::Flush, _) if self.world.plan.redis => {
                self.note(|| "the Redis forgets everything".into());
                self.world.redis(|redis| redis.flush());
                let now = self.world.now_ms();
                self.world.oracle(|o| o.lease_forgotten(now));
            }
            (Class::Purge, _) => {
                self.note(|| "the queues are purged".into());
                self.world.queues(|queues, _| queues.purge());
            }
            (Class::DeleteQueue, _) => {
                let tiers = &self.world.plan.tiers;
                let tier = if tiers.len() > 1 { self.world.dice(|d| d.index(tiers.len())) } else { 0 };
                self.note(|| format!("the queue of {} is deleted", tiers[tier]));
                let lost = self.world.queues(|queues, _| queues.delete(&tiers[tier]));
                self.reconnect_soon(lost);
            }
            (Class::Block, _) => {
                let time = self.world.dice(|d| d.of(500, 8_000));
                self.note(|| format!("the broker takes nothing for {time} ms"));
                self.blocked = true;
                self.tell_broker_states();
                self.at(time, Act::Unblock);
            }
            (Class::Reconnect, Some(life)) => {
                self.note(|| format!("{life:?} loses its connection to the broker"));
                let lost = self.disconnect(|l| l == life);
                self.reconnect_soon(lost);
            }
            (Class::Cancel, _) => self.cancel(),
            (Class::PauseJob, _) => self.pause_job(),
            (Class::Retry, _) => self.retry(),
            // Drawn where they strike, or there is nobody to strike.
            _ => {}
        }
    }

    /// Short ones, ones around the trust window and the lease, and ones that are longer than a worker's life.
    fn pause(&mut self, life: LifeId) {
        let time = self.world.dice(|d| match d.index(3) {
            0 => d.of(50, 3_000),
            1 => d.of(2_000, 6_000),
            _ => d.of(8_000, 25_000),
        });
        self.note(|| format!("{life:?} pauses for {time} ms"));
        if let Some(process) = &mut self.nodes[life.node] {
            process.paused = true;
            self.at(time, Act::Resume(life));
        }
    }

    fn cut(&mut self, node: usize) {
        let (port, time) = (self.any_port(), self.world.dice(|d| d.of(500, 20_000)));
        self.note(|| format!("node {node} is cut off from {port:?} for {time} ms"));
        self.world.net(|net| net.cuts.insert((node, port)));
        self.at(time, Act::Heal(node, port));
        if port == Port::Broker {
            self.disconnect(|life| life.node == node);
        }
    }

    fn take_away(&mut self) {
        let (port, time) = (self.any_port(), self.world.dice(|d| d.of(500, 10_000)));
        self.note(|| format!("{port:?} is away for {time} ms"));
        self.world.net(|net| net.away.insert(port));
        self.at(time, Act::Back(port));
        if port == Port::Broker {
            self.disconnect(|_| true);
        }
    }

    /// The faults stop: everybody can reach everything, wakes up, and has the right time.
    fn calm(&mut self) {
        self.note(|| "the faults stop".into());
        self.world.end_chaos();
        self.world.net(|net| {
            net.cuts.clear();
            net.away.clear();
            net.offsets.iter_mut().for_each(|offset| *offset = 0);
        });
        self.unblock();
        self.reconnect(|_| true);
        let paused: Vec<LifeId> = self.nodes.iter().flatten().filter(|p| p.paused).map(|p| p.id).collect();
        paused.into_iter().for_each(|life| self.resume(life));
        self.at(LOOK_EVERY_MS, Act::Look);
    }

    // ---- the end ------------------------------------------------------------------------------------------------------

    fn look(&mut self) {
        let since = self.world.now_ms() - self.stop_ms;
        match self.unfinished() {
            None => {
                self.world.check(self.close());
                self.settled_ms = Some(since);
            }
            Some(what) if since > SETTLE_MS => {
                self.violate(InvariantId::P1, format!("{since} ms after the last fault: {what}"));
            }
            Some(_) => self.at(LOOK_EVERY_MS, Act::Look),
        }
    }

    fn instants(&self, n: usize) -> Vec<i64> {
        let job = &self.world.plan.jobs[n];
        let mut instants = Vec::new();
        let mut next = Some(job.first_ms);
        while let Some(instant) = next.filter(|i| *i <= self.stop_ms) {
            instants.push(instant);
            next = job.schedule.next_after(instant).ok().flatten();
        }
        instants
    }

    fn unfinished(&self) -> Option<String> {
        for (n, id) in self.jobs.iter().enumerate() {
            let missing = self
                .world
                .oracle(|o| self.instants(n).into_iter().find(|instant| !o.decided.contains(&(*id, *instant))));
            if let Some(instant) = missing {
                return Some(format!("job-{n} is not decided at {}", instant - BEGIN_MS));
            }
        }
        let waiting = self.world.queues(|queues, _| queues.triggers_waiting());
        if waiting > 0 {
            return Some(format!("{waiting} triggers wait"));
        }
        self.world.oracle(|o| o.unfinished(self.stop_ms))
    }

    /// The counts, from the real ledger's own rows.
    fn close(&self) -> super::Checked {
        let fault = |e: shardcron_store::StoreError| Broken::Rules(format!("the ledger can't be read: {e}"));
        let (world, sql) = (&self.world, self.world.sql());
        for (n, id) in self.jobs.iter().enumerate() {
            let rows = world.real(sql.decisions(*id, BEGIN_MS - 1, self.stop_ms, usize::MAX >> 1)).map_err(fault)?;
            let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
            for row in rows.iter().filter(|row| !row.fire_key.starts_with("request:")) {
                *counts.entry(row.nominal_ms).or_default() += 1;
            }
            invariants::check_decisions(&self.instants(n), &counts)?;
        }
        let due: Vec<ExecutionId> =
            world.oracle(|o| o.runs.iter().filter(|(_, r)| r.nominal_ms <= self.stop_ms).map(|(id, _)| *id).collect());
        for id in due {
            let (tally, _) = world.real(sql.tally(id)).map_err(fault)?;
            invariants::check_tally(&tally)?;
            let rows = world.real(sql.shards(id, 0, 1_000)).map_err(fault)?;
            world.oracle(|o| o.compare(id, &rows))?;
            super::closing::effects(world, &self.jobs, id)?;
        }
        world.conforms()
    }
}

async fn next(orders: &mut mpsc::UnboundedReceiver<Order>, wait_ms: Option<i64>) -> Next {
    let until = Instant::now() + Duration::from_millis(wait_ms.unwrap_or(SETTLE_MS).max(0).unsigned_abs());
    tokio::select! {
        biased;
        Some(order) = orders.recv() => Next::Order(order),
        () = tokio::time::sleep_until(until) => Next::Due,
    }
}

/// Carries what comes late to where it was sent.
async fn carry(mut lates: mpsc::UnboundedReceiver<Late>) {
    while let Some((after_ms, effect)) = lates.recv().await {
        tokio::task::spawn_local(async move {
            super::life::sleep_ms(after_ms).await;
            effect();
        });
    }
}
