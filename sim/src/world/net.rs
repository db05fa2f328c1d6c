//! Calls, and what becomes of them on the way.

use super::World;
use super::ledger::{ActiveRun, End, Firing, RunningRow};
use super::plan::Class;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};

/// Without an answer for this long, a call has failed, as far as its caller knows.
const TIMEOUT_MS: i64 = 2_000;

/// A process's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Node {
    Scheduler(usize),
    Worker(usize),
}

/// What a call goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Port {
    Ledger,
    Broker,
    Redis,
}

/// A delivery's tag, valid for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tag {
    pub(crate) generation: u64,
    pub(crate) number: u64,
}

/// What a publish is for.
#[derive(Clone, Debug)]
pub(crate) enum Why {
    /// A round: each execution's shards from here.
    Round(Vec<(ExecutionId, u32)>),
    Redispatch,
    Stranded,
}

#[derive(Clone, Debug)]
pub(crate) enum Request {
    Acquire {
        start: i64,
    },
    Renew {
        start: i64,
    },
    BeginEpoch {
        start: i64,
    },
    Load(Epoch),
    Fire(Epoch, Vec<Firing>),
    Active(Epoch),
    Depth(Epoch),
    /// The depth again, before what looks stranded is asked for; whether the queue need not be empty for that.
    StrandedDepth(Epoch, ExecutionId, bool),
    Stranded(Epoch, ExecutionId),
    Publish(Epoch, Why, Vec<AttemptRef>),
    MarkFirsts(Epoch, Vec<(ExecutionId, u32)>),
    MarkAgain(Epoch, Vec<AttemptRef>),
    RedispatchDue(Epoch),
    Running(Epoch),
    Workers(Epoch, Vec<RunningRow>),
    Reclaim(Epoch, Vec<Reclaim>),
    Beat {
        sent: i64,
    },
    Hints(Vec<AttemptRef>),
    Claim(Vec<AttemptRef>),
    Advance(AttemptRef, Option<Checkpoint>, Checkpoint),
    Record(Vec<End>),
    Finish(Vec<AttemptRef>),
    Ack(Vec<Tag>),
    /// Under this connection.
    Consume(u64),
    Prefetch(u16),
}

#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Done,
    /// Whether the lease is the caller's now.
    Lease(bool),
    Epoch(Epoch),
    Deposed,
    Jobs(Vec<(JobId, Option<i64>)>),
    Outcomes(Vec<Option<ExecutionId>>),
    Active(Vec<ActiveRun>),
    /// Ready messages and consumers.
    Depth(u32, u32),
    Attempts(Vec<AttemptRef>),
    Confirmed(Vec<bool>),
    Running(Vec<RunningRow>),
    Workers(Vec<(Incarnation, i64)>),
    Hints(Vec<bool>),
    Claims(Vec<Result<Option<Checkpoint>, Rejection>>),
    Verdict(Result<(), Rejection>),
    Ends(Vec<Result<(), Rejection>>),
}

#[derive(Clone, Debug)]
pub(crate) enum Timer {
    Start,
    Lease,
    Trigger(u64),
    Reload,
    Redispatch,
    Survey,
    Sweep,
    Step,
    Beat,
    Fence,
    Claims,
    Ends,
    TooEarly(AttemptRef, Vec<Tag>),
    Progress(AttemptRef),
    Handler(AttemptRef),
    Horizon(AttemptRef),
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Chaos,
    Calm,
    Look,
    Heal(Node, Port),
    PortBack(Port),
    Arrive { from: Node, life: u32, request: Request, answer_at: Option<i64> },
    Answer { to: Node, life: u32, request: Request, reply: Option<Reply> },
    Timer { node: Node, life: u32, timer: Timer },
    Deliver { worker: usize, life: u32, tag: Tag, attempt: AttemptRef },
    Renewed { worker: usize, life: u32, generation: u64 },
}

impl Request {
    fn port(&self) -> Port {
        match self {
            Request::Acquire { .. }
            | Request::Renew { .. }
            | Request::Workers(..)
            | Request::Beat { .. }
            | Request::Hints(_)
            | Request::Finish(_) => Port::Redis,
            Request::Depth(_)
            | Request::StrandedDepth(..)
            | Request::Publish(..)
            | Request::Ack(_)
            | Request::Consume(_)
            | Request::Prefetch(_) => Port::Broker,
            _ => Port::Ledger,
        }
    }
}

impl World {
    pub(crate) fn life(&self, node: Node) -> u32 {
        match node {
            Node::Scheduler(s) => self.schedulers[s].life,
            Node::Worker(w) => self.workers[w].life,
        }
    }

    fn paused_until(&self, node: Node) -> i64 {
        match node {
            Node::Scheduler(s) => self.schedulers[s].paused_until,
            Node::Worker(w) => self.workers[w].paused_until,
        }
    }

    pub(crate) fn wall(&self, node: Node) -> i64 {
        let offset = match node {
            Node::Scheduler(s) => self.schedulers[s].offset_ms,
            Node::Worker(w) => self.workers[w].offset_ms,
        };
        self.now + offset
    }

    pub(crate) fn timer(&mut self, node: Node, delay: i64, timer: Timer) {
        let life = self.life(node);
        self.push(self.now + delay, Event::Timer { node, life, timer });
    }

    fn latency(&mut self) -> i64 {
        if self.chaos && self.plan.has(Class::Slow) && self.dice.percent(8) {
            return self.dice.of(50, 2_500);
        }
        self.dice.of(1, 4)
    }

    pub(crate) fn call(&mut self, from: Node, request: Request) {
        let (life, port) = (self.life(from), request.port());
        // A renewal is given less time, so that another one fits into the trust window.
        let patience = if matches!(request, Request::Renew { .. }) { super::scheduler::TTL_MS / 3 } else { TIMEOUT_MS };
        let gives_up = self.now + patience;
        // What goes over a worker's connection to the broker gets lost with the connection only.
        let framed = matches!(request, Request::Ack(_) | Request::Prefetch(_));
        let lossy = self.chaos && self.plan.has(Class::LostCalls) && !framed;
        let lost = self.is_cut(from, port) || (lossy && self.dice.percent(4));
        let arrives = self.now + self.latency();
        let back = arrives + self.latency();
        let unanswered = back >= gives_up || (lossy && self.dice.percent(4));
        if lost || unanswered {
            let answer = Event::Answer { to: from, life, request: request.clone(), reply: None };
            self.push(gives_up, answer);
        }
        if !lost {
            let answer_at = (!unanswered).then_some(back);
            self.push(arrives, Event::Arrive { from, life, request, answer_at });
        }
    }

    fn is_cut(&self, node: Node, port: Port) -> bool {
        self.cuts().contains(&(node, port)) || self.away().contains(&port)
    }

    pub(crate) fn happen(&mut self, event: Event) {
        let node = match &event {
            Event::Answer { to: node, life, .. } | Event::Timer { node, life, .. } => Some((*node, *life)),
            Event::Deliver { worker, life, .. } | Event::Renewed { worker, life, .. } => {
                Some((Node::Worker(*worker), *life))
            }
            _ => None,
        };
        if let Some((node, life)) = node {
            if self.life(node) != life {
                return;
            }
            let until = self.paused_until(node);
            if until > self.now {
                return self.push(until, event);
            }
        }
        match event {
            Event::Chaos => self.chaos(),
            Event::Heal(node, port) => self.heal(node, port),
            Event::PortBack(port) => self.back(port),
            Event::Arrive { from, life, request, answer_at } => {
                let reply = self.execute(from, life, &request);
                if let Some(at) = answer_at {
                    // A server that went away in between takes the answer with it.
                    let reply = Some(reply).filter(|_| !self.is_cut(from, request.port()));
                    self.push(at, Event::Answer { to: from, life, request, reply });
                }
            }
            Event::Answer { to: Node::Scheduler(s), request, reply, .. } => self.scheduler_hears(s, request, reply),
            Event::Answer { to: Node::Worker(w), request, reply, .. } => self.worker_hears(w, request, reply),
            Event::Timer { node: Node::Scheduler(s), timer, .. } => self.scheduler_timer(s, timer),
            Event::Timer { node: Node::Worker(w), timer, .. } => self.worker_timer(w, timer),
            Event::Deliver { worker, tag, attempt, .. } => self.delivered(worker, tag, attempt),
            Event::Renewed { worker, generation, .. } => self.renewed(worker, generation),
            Event::Calm | Event::Look => {}
        }
    }

    /// A call arrives at its port: one step, with everything that it changes.
    fn execute(&mut self, from: Node, life: u32, request: &Request) -> Reply {
        match request.port() {
            Port::Ledger => self.ask_ledger(from, life, request),
            Port::Broker => self.ask_broker(from, life, request),
            Port::Redis => self.ask_redis(from, life, request),
        }
    }
}
