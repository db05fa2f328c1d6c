//! Who may do what, and what comes of it.

use super::ledger::{Row, attempt_ref};
use super::state::{Bounds, Entry, FAULTS, Fault, Leader, Message, Outcome, State, Step, Taken, Worker, incarnation};
use crate::guard::Mutation;
use shardcron_domain::Incarnation;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::invariants::{self, InvariantId, Violation};
use shardcron_domain::liveness::{Liveness, Observer, Sighting, confirm_ms};
use shardcron_domain::recovery::{FirstSeen, HUNG_GRACE_MS, Reclaim, RunningShard, reconcile};
use shardcron_domain::shard::{Checkpoint, Event, FailureClass, Phase};
use stateright::{Model, Property};
use std::collections::BTreeMap;

const LOST_AFTER_MS: i64 = 15_000;
const TIMEOUT_MS: i64 = 60_000;
/// Deliveries that a worker has at hand.
const ENTRIES: usize = 2;

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Protocol(pub Bounds);

/// One step. Leaders and workers by their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A scheduler acquires the next epoch.
    Begin(usize),
    /// It writes a firing.
    Fire(usize),
    /// It reads the outbox.
    Read(usize),
    /// It publishes what it has read.
    Publish(usize),
    /// It notes what it has published.
    Mark(usize),
    /// It looks at the running shards and their owners and makes a plan.
    Sweep(usize),
    /// It carries the plan out.
    Reclaim(usize),
    /// It hands out again what nobody has any more.
    Republish(usize, Message),
    /// The broker delivers to a worker.
    Deliver(usize, Message),
    /// A worker claims.
    Claim(usize, Message),
    /// A handler sets a checkpoint.
    Advance(usize, Message),
    /// A handler ends well.
    Succeed(usize, Message),
    /// A worker records an end.
    Record(usize, Message),
    /// A worker acks.
    Ack(usize, Message),
    /// A silent worker is heard again.
    Wake(usize),
    /// A silent worker stops itself and throws everything away.
    Fence(usize),
    /// Something goes wrong with a leader, a worker or a message.
    Wrong(Fault, usize, Option<Message>),
    /// The same step, but its answer does not arrive.
    Unanswered(Unanswered, usize, Option<Message>),
}

/// Transactions whose answers can be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unanswered {
    /// [`Action::Fire`].
    Fire,
    /// [`Action::Mark`].
    Mark,
    /// [`Action::Claim`].
    Claim,
    /// [`Action::Record`].
    Record,
}

impl Action {
    /// Whether it is one of those that a world without faults doesn't have.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(self, Action::Wrong(..) | Action::Unanswered(..))
    }
}

impl Protocol {
    /// What can happen without anything going wrong.
    pub fn progress(&self, state: &State, actions: &mut Vec<Action>) {
        let current = |l: &Leader| l.epoch == Some(state.ledger.epoch);
        for (l, leader) in state.leaders.iter().enumerate() {
            if !state.leaders.iter().any(current) {
                actions.push(Action::Begin(l));
            }
            if leader.epoch.is_none() {
                continue;
            }
            if leader.next < self.0.instants {
                actions.push(Action::Fire(l));
            }
            match leader.in_hand {
                None if state.ledger.to_hand_out().is_some() => actions.push(Action::Read(l)),
                None => {}
                Some((_, false)) => actions.push(Action::Publish(l)),
                Some((_, true)) => actions.push(Action::Mark(l)),
            }
            if !leader.plan.is_empty() {
                actions.push(Action::Reclaim(l));
            } else if !plan(state, 0).is_empty() {
                actions.push(Action::Sweep(l));
            }
            let stranded = state.ledger.handed_out().filter(|m| !state.on_its_way(*m));
            actions.extend(stranded.map(|m| Action::Republish(l, m)));
        }
        for (w, worker) in state.workers.iter().enumerate() {
            let room = worker.entries.len() < ENTRIES;
            let arrives = state.queue.keys().filter(|m| room || worker.entries.contains_key(m));
            actions.extend(arrives.map(|m| Action::Deliver(w, *m)));
            for (message, entry) in &worker.entries {
                self.entry(w, *message, entry, actions);
            }
            if worker.silent {
                actions.extend([Action::Wake(w), Action::Fence(w)]);
            }
        }
    }

    fn entry(&self, w: usize, message: Message, entry: &Entry, actions: &mut Vec<Action>) {
        match entry.step {
            Step::Held | Step::Claiming => actions.push(Action::Claim(w, message)),
            Step::Running(checkpoint) => {
                actions.push(Action::Succeed(w, message));
                if self.0.checkpoints && checkpoint == 0 {
                    actions.push(Action::Advance(w, message));
                }
            }
            Step::Ended(_) => actions.push(Action::Record(w, message)),
            Step::Settled => actions.push(Action::Ack(w, message)),
        }
    }

    fn faults(&self, state: &State, actions: &mut Vec<Action>) {
        if state.faults >= self.0.faults {
            return;
        }
        for fault in FAULTS {
            match fault {
                Fault::Lose | Fault::Duplicate => {
                    actions.extend(state.queue.keys().map(|m| Action::Wrong(fault, 0, Some(*m))));
                }
                Fault::LostAnswer => unanswered(state, actions),
                _ => {
                    for place in 0..2 {
                        self.faults_at(state, fault, place, actions);
                    }
                }
            }
        }
    }

    fn faults_at(&self, state: &State, fault: Fault, place: usize, actions: &mut Vec<Action>) {
        let (leader, worker) = (&state.leaders[place], &state.workers[place]);
        let leads = leader.epoch == Some(state.ledger.epoch);
        let whole = match fault {
            Fault::TakeOver => !leads && state.leaders.iter().any(|l| l.epoch == Some(state.ledger.epoch)),
            Fault::LeaderCrash => leader.epoch.is_some(),
            Fault::WorkerCrash => !worker.entries.is_empty(),
            Fault::Silence => !worker.silent && !worker.entries.is_empty(),
            Fault::Disconnect => worker.entries.values().any(|e| e.tags > 0),
            Fault::Hang => leader.epoch.is_some() && leader.plan.is_empty() && !plan(state, hung_at()).is_empty(),
            _ => false,
        };
        if whole {
            actions.push(Action::Wrong(fault, place, None));
        }
        if matches!(fault, Fault::Fail | Fault::HandBack) {
            let running = worker.entries.iter().filter(|(_, e)| matches!(e.step, Step::Running(_)));
            actions.extend(running.map(|(m, _)| Action::Wrong(fault, place, Some(*m))));
        }
    }

    fn step(&self, state: &mut State, action: Action) -> Result<(), Violation> {
        match action {
            Action::Begin(l) => {
                let epoch = state.ledger.begin_epoch();
                state.leaders[l] = Leader { epoch: Some(epoch), next: state.ledger.next, ..Leader::default() };
            }
            Action::Wrong(fault, place, message) => {
                state.faults += 1;
                return self.wrong(state, fault, place, message);
            }
            Action::Unanswered(call, place, message) => {
                state.faults += 1;
                return self.unheard(state, call, place, message);
            }
            Action::Fire(l)
            | Action::Read(l)
            | Action::Publish(l)
            | Action::Mark(l)
            | Action::Sweep(l)
            | Action::Reclaim(l) => return self.leader(state, action, l),
            Action::Republish(_, message) => state.enqueue(message, 1),
            Action::Deliver(w, message) => return self.deliver(state, w, message),
            Action::Claim(w, m)
            | Action::Advance(w, m)
            | Action::Succeed(w, m)
            | Action::Record(w, m)
            | Action::Ack(w, m) => return self.worker(state, action, (w, m)),
            Action::Wake(w) => state.workers[w].silent = false,
            Action::Fence(w) => end_process(state, w),
        }
        Ok(())
    }

    fn leader(&self, state: &mut State, action: Action, l: usize) -> Result<(), Violation> {
        let State { ledger, leaders, .. } = state;
        let leader = &mut leaders[l];
        let Some(epoch) = leader.epoch else { return Ok(()) };
        let admitted = match action {
            Action::Fire(_) => {
                let instant = leader.next;
                leader.next += 1;
                ledger.fire(&self.0, epoch, instant)?
            }
            Action::Read(_) => {
                leader.in_hand = ledger.to_hand_out().map(|m| (m, false));
                true
            }
            Action::Publish(_) => {
                if let Some((message, published)) = &mut leader.in_hand {
                    *published = true;
                    let message = *message;
                    state.enqueue(message, 1);
                }
                return Ok(());
            }
            Action::Mark(_) => match leader.in_hand.take() {
                Some((message, _)) => ledger.mark(&self.0, epoch, message)?,
                None => true,
            },
            Action::Reclaim(_) => {
                let plan = std::mem::take(&mut leader.plan);
                ledger.reclaim(&self.0, epoch, &plan)?
            }
            _ => {
                let plan = plan(state, 0);
                state.leaders[l].plan = plan;
                return Ok(());
            }
        };
        if !admitted {
            *leader = Leader::default();
        }
        Ok(())
    }

    fn deliver(&self, state: &mut State, w: usize, message: Message) -> Result<(), Violation> {
        state.dequeue(message);
        let early = self.0.mutation == Some(Mutation::AckBeforeCommit);
        let tags = u8::from(!early);
        state.workers[w].entries.entry(message).or_insert(Entry { step: Step::Held, tags: 0 }).tags += tags;
        if early { check_ack(state, w, message) } else { Ok(()) }
    }

    fn worker(&self, state: &mut State, action: Action, (w, message): (usize, Message)) -> Result<(), Violation> {
        let owner = incarnation(w, state.workers[w].life);
        let attempt = u32::from(message.attempt);
        let Some(entry) = state.workers[w].entries.get(&message).copied() else { return Ok(()) };
        let next = match (action, entry.step) {
            (Action::Claim(..), _) => {
                if state.ledger.claim(&self.0, message, owner)? {
                    let checkpoint = state.ledger.row(message).and_then(|r| r.shard.checkpoint.as_ref());
                    Step::Running(u8::from(checkpoint.is_some()))
                } else {
                    Step::Settled
                }
            }
            (Action::Advance(..), Step::Running(from)) => {
                let from = (from > 0).then(|| Checkpoint::Number(from.into()));
                let event = Event::Advance { attempt, owner, from, to: Checkpoint::Number(1) };
                match state.ledger.apply(&self.0, message, &event)? {
                    Ok(()) => Step::Running(1),
                    // The handler is told that it is superseded, and stops.
                    Err(_) => Step::Settled,
                }
            }
            (Action::Succeed(..), _) => Step::Ended(Outcome::Success),
            (Action::Record(..), Step::Ended(outcome)) => {
                // A refusal settles the delivery as well: the ledger has given the shard to another attempt.
                let _ = state.ledger.apply(&self.0, message, &event_of(outcome, attempt, owner))?;
                Step::Settled
            }
            _ => {
                state.workers[w].entries.remove(&message);
                return if entry.tags > 0 { check_ack(state, w, message) } else { Ok(()) };
            }
        };
        state.workers[w].entries.insert(message, Entry { step: next, tags: entry.tags });
        Ok(())
    }

    fn wrong(&self, state: &mut State, fault: Fault, place: usize, m: Option<Message>) -> Result<(), Violation> {
        match (fault, m) {
            (Fault::TakeOver, _) => return self.step(state, Action::Begin(place)),
            (Fault::LeaderCrash, _) => state.leaders[place] = Leader::default(),
            (Fault::WorkerCrash, _) => end_process(state, place),
            (Fault::Silence, _) => state.workers[place].silent = true,
            (Fault::Disconnect, _) => {
                let entries = &mut state.workers[place].entries;
                let again: Vec<(Message, u8)> = entries.iter().map(|(m, e)| (*m, e.tags)).collect();
                entries.retain(|_, e| e.step != Step::Held);
                entries.values_mut().for_each(|e| e.tags = 0);
                again.into_iter().for_each(|(m, copies)| state.enqueue(m, copies));
            }
            (Fault::Lose, Some(message)) => state.dequeue(message),
            (Fault::Duplicate, Some(message)) => state.enqueue(message, 1),
            (Fault::Fail | Fault::HandBack, Some(message)) => {
                let outcome = if fault == Fault::Fail { Outcome::Failure } else { Outcome::HandBack };
                if let Some(entry) = state.workers[place].entries.get_mut(&message) {
                    entry.step = Step::Ended(outcome);
                }
            }
            (Fault::Hang, _) => state.leaders[place].plan = plan(state, hung_at()),
            (Fault::Lose | Fault::Duplicate | Fault::Fail | Fault::HandBack, None) | (Fault::LostAnswer, _) => {}
        }
        Ok(())
    }

    /// The transaction commits; whoever asked for it asks again.
    fn unheard(&self, state: &mut State, call: Unanswered, place: usize, m: Option<Message>) -> Result<(), Violation> {
        let before = (state.leaders[place].clone(), state.workers[place].clone());
        let action = match (call, m) {
            (Unanswered::Fire, _) => Action::Fire(place),
            (Unanswered::Mark, _) => Action::Mark(place),
            (Unanswered::Claim, Some(m)) => Action::Claim(place, m),
            (Unanswered::Record, Some(m)) => Action::Record(place, m),
            (Unanswered::Claim | Unanswered::Record, None) => return Ok(()),
        };
        self.step(state, action)?;
        (state.leaders[place], state.workers[place]) = before;
        // A claim that is under way is not forgotten with the connection: it is asked until it is answered.
        let entry = m.and_then(|m| state.workers[place].entries.get_mut(&m)).filter(|e| e.step == Step::Held);
        if let Some(entry) = entry {
            entry.step = Step::Claiming;
        }
        Ok(())
    }
}

fn hung_at() -> i64 {
    TIMEOUT_MS + HUNG_GRACE_MS + 1
}

fn event_of(outcome: Outcome, attempt: u32, owner: Incarnation) -> Event {
    match outcome {
        Outcome::Success => Event::Succeed { attempt, owner },
        Outcome::Failure => Event::Fail { attempt, owner, class: FailureClass::Transient, seed: 0 },
        Outcome::HandBack => Event::HandBack { attempt, owner },
    }
}

fn check_ack(state: &State, w: usize, message: Message) -> Result<(), Violation> {
    let Some(row) = state.ledger.row(message) else { return Ok(()) };
    invariants::check_ack(&row.shard, message.attempt.into(), incarnation(w, state.workers[w].life), false)
}

/// A worker's process ends: the broker delivers again, and a new process takes the place.
fn end_process(state: &mut State, w: usize) {
    let ended = std::mem::take(&mut state.workers[w]);
    state.workers[w].life = ended.life + 1;
    ended.entries.into_iter().for_each(|(m, e)| state.enqueue(m, e.tags));
}

/// What the supervisor would take back, `after_ms` after it first saw what runs.
fn plan(state: &State, after_ms: i64) -> Vec<Taken> {
    let running: Vec<(Message, Incarnation)> = state.ledger.running().collect();
    let mut observer = Observer::default();
    let judge = |(_, owner): &(Message, Incarnation)| {
        let alive = |(w, worker): (usize, &Worker)| incarnation(w, worker.life) == *owner && !worker.silent;
        let age_ms = if state.workers.iter().enumerate().any(alive) { 0 } else { LOST_AFTER_MS + 1 };
        // Seen twice, as the supervisor has to: the first time it only suspects.
        observer.judge(*owner, Sighting::Beat { age_ms }, LOST_AFTER_MS, -confirm_ms(LOST_AFTER_MS));
        (*owner, observer.judge(*owner, Sighting::Beat { age_ms }, LOST_AFTER_MS, 0))
    };
    let liveness: BTreeMap<Incarnation, Liveness> = running.iter().map(judge).collect();
    let shards: Vec<RunningShard> = running
        .iter()
        .map(|(m, owner)| RunningShard {
            attempt: attempt_ref(*m),
            owner: *owner,
            timeout_ms: Some(TIMEOUT_MS),
            stall_ms: None,
            progress: 0,
        })
        .collect();
    let mut seen = FirstSeen::default();
    if after_ms > 0 {
        reconcile(&shards, &BTreeMap::new(), &mut seen, 0);
    }
    let of =
        |r: Reclaim| running.iter().find(|(m, _)| attempt_ref(*m) == r.attempt).map(|(m, _)| (*m, r.owner, r.reason));
    reconcile(&shards, &liveness, &mut seen, after_ms).into_iter().filter_map(of).collect()
}

fn unanswered(state: &State, actions: &mut Vec<Action>) {
    for (l, leader) in state.leaders.iter().enumerate().filter(|(_, l)| l.epoch == Some(state.ledger.epoch)) {
        if usize::from(leader.next) < state.ledger.decisions.len() {
            actions.push(Action::Unanswered(Unanswered::Fire, l, None));
        }
        if leader.in_hand.is_some_and(|(_, published)| published) {
            actions.push(Action::Unanswered(Unanswered::Mark, l, None));
        }
    }
    for (w, worker) in state.workers.iter().enumerate() {
        for (message, entry) in &worker.entries {
            match entry.step {
                Step::Held | Step::Claiming => actions.push(Action::Unanswered(Unanswered::Claim, w, Some(*message))),
                Step::Ended(_) => actions.push(Action::Unanswered(Unanswered::Record, w, Some(*message))),
                Step::Running(_) | Step::Settled => {}
            }
        }
    }
}

fn rows(state: &State) -> impl Iterator<Item = (u8, &Row)> {
    state.ledger.runs.iter().flat_map(|run| run.rows.iter().map(|row| (run.instant, row)))
}

fn running(worker: &Worker) -> impl Iterator<Item = &Message> {
    worker.entries.iter().filter(|(_, e)| matches!(e.step, Step::Running(_))).map(|(m, _)| m)
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(&self.0)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // Behind a broken invariant there is nothing to learn.
        if state.broken.is_none() {
            self.progress(state, actions);
            self.faults(state, actions);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        if let Err(violation) = self.step(&mut state, action) {
            state.broken = Some(violation.id);
        }
        state.rename();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! holds {
            ($($id:ident),*) => { vec![$(Property::<Self>::always(stringify!($id), |_, s| s.broken != Some(InvariantId::$id))),*] };
        }
        let mut all: Vec<Property<Self>> = holds!(F1, S1, S2, S3, S4, L1, A1, O1);
        all.push(Property::always("P1", |model, state| {
            let mut actions = Vec::new();
            model.progress(state, &mut actions);
            !actions.is_empty() || state.broken.is_some() || state.ledger.finished()
        }));
        // The world is rich enough to be worth exploring.
        all.push(Property::sometimes("a dead letter", |_, s| rows(s).any(|(_, row)| row.shard.phase == Phase::Failed)));
        all.push(Property::sometimes("a success at the second attempt", |_, s| {
            rows(s).any(|(_, row)| row.shard.phase == Phase::Success && row.shard.attempt > 1)
        }));
        all.push(Property::sometimes("two workers run the same shard", |_, s: &State| {
            let [one, other]: &[Worker; 2] = &s.workers;
            running(one).any(|m| running(other).any(|n| (m.instant, m.index) == (n.instant, n.index)))
        }));
        all.push(Property::sometimes("two leaders at once", |_, s: &State| {
            s.leaders.iter().all(|l| l.epoch.is_some())
        }));
        if self.0.instants > 1 {
            all.push(Property::sometimes("an overlap is skipped", |_, s: &State| {
                s.ledger.decisions.contains(&Some(DecisionKind::SkippedOverlap))
            }));
        }
        all
    }
}
