//! The model's ledger: every function is one transaction.

use super::state::{Bounds, Message, Taken};
use crate::guard::{admit, step};
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::firing::{DecisionKind, JobNow, Verdict, decide};
use shardcron_domain::invariants::{self, Violation};
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::shard::{Effect, Event, Phase, Rejection, Shard};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation};
use uuid::Uuid;

/// One shard's row, with what stands about it in other tables.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// The shard.
    pub shard: Shard,
    /// The attempt that is to be handed out and not noted as handed out.
    pub outbox: Option<u8>,
    /// Result rows.
    pub results: u8,
}

/// One execution with its shards.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// The instant that it was fired for.
    pub instant: u8,
    /// The epoch that fired it.
    pub epoch: u8,
    /// Its counters.
    pub counters: Execution,
    /// Its shards.
    pub rows: Vec<Row>,
}

/// The whole ledger.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    /// The leader's row.
    pub epoch: u8,
    /// The job's next instant.
    pub next: u8,
    /// The decision at each instant.
    pub decisions: Vec<Option<DecisionKind>>,
    /// The executions, in the order of their firing.
    pub runs: Vec<Run>,
}

/// What a transaction did: whether it was admitted and accepted, or which invariant it broke.
pub type Done = Result<bool, Violation>;

fn id_of(run: &Run) -> ExecutionId {
    ExecutionId(Uuid::from_u128((u128::from(run.epoch) << 8) | u128::from(run.instant)))
}

impl Ledger {
    /// Before the first leader.
    #[must_use]
    pub fn new(bounds: &Bounds) -> Self {
        Ledger { epoch: 0, next: 0, decisions: vec![None; usize::from(bounds.instants)], runs: Vec::new() }
    }

    /// A shard's row.
    #[must_use]
    pub fn row(&self, message: Message) -> Option<&Row> {
        let run = self.runs.iter().find(|r| r.instant == message.instant)?;
        run.rows.get(usize::from(message.index))
    }

    fn row_mut(&mut self, message: Message) -> Option<&mut Row> {
        let run = self.runs.iter_mut().find(|r| r.instant == message.instant)?;
        run.rows.get_mut(usize::from(message.index))
    }

    /// The oldest entry of the outbox.
    #[must_use]
    pub fn to_hand_out(&self) -> Option<Message> {
        self.messages(|row| row.outbox).next()
    }

    /// Pending shards that have been handed out, and the attempts that they wait for.
    pub fn handed_out(&self) -> impl Iterator<Item = Message> {
        let waits = |row: &Row| row.shard.phase == Phase::Pending && row.outbox.is_none();
        self.messages(move |row| waits(row).then_some(row.shard.attempt as u8))
    }

    /// Running shards with their owners.
    pub fn running(&self) -> impl Iterator<Item = (Message, Incarnation)> {
        self.messages(|row| (row.shard.phase == Phase::Running).then_some(row.shard.attempt as u8))
            .filter_map(|m| Some((m, self.row(m)?.shard.owner?)))
    }

    fn messages(&self, attempt_of: impl Fn(&Row) -> Option<u8>) -> impl Iterator<Item = Message> {
        self.runs
            .iter()
            .flat_map(|run| (0_u8..).zip(&run.rows).map(move |(i, row)| (run.instant, i, row)))
            .filter_map(move |(instant, index, row)| attempt_of(row).map(|attempt| Message { instant, index, attempt }))
    }

    /// Whether every instant is decided and everything that was fired has ended.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.decisions.iter().all(Option::is_some)
            && self
                .runs
                .iter()
                .all(|run| run.counters.phase.is_terminal() && run.rows.iter().all(|row| row.shard.phase.is_terminal()))
    }

    /// The next epoch begins.
    pub fn begin_epoch(&mut self) -> u8 {
        self.epoch += 1;
        self.epoch
    }

    /// One firing: fence, decision, execution with its shards, next instant.
    pub fn fire(&mut self, bounds: &Bounds, epoch: u8, instant: u8) -> Done {
        if !admit(bounds.mutation, Epoch(epoch.into()), Epoch(self.epoch.into()))? {
            return Ok(false);
        }
        let decided = self.decisions.get(usize::from(instant)).copied().flatten();
        let existing = self.runs.iter().find(|r| r.instant == instant).map(id_of);
        let active: Vec<ExecutionId> =
            self.runs.iter().filter(|r| !r.counters.phase.is_terminal()).map(id_of).collect();
        let now = JobNow { active, existing, decided: decided.is_some(), ..JobNow::default() };
        let kind = match decide(OverlapPolicy::Skip, &now, true) {
            // The model's policy is skip, which neither waits nor replaces.
            Verdict::Duplicate(_) | Verdict::Wait(..) | Verdict::NotYet | Verdict::Replace(_) => None,
            Verdict::Skip(kind, ..) => Some(kind),
            Verdict::Fire => {
                let row = Row { shard: Shard::new(), outbox: Some(1), results: 0 };
                let counters = Execution::new(bounds.shards.into());
                self.runs.push(Run { instant, epoch, counters, rows: vec![row; usize::from(bounds.shards)] });
                Some(DecisionKind::Fired)
            }
        };
        if let (Some(kind), Some(slot)) = (kind, self.decisions.get_mut(usize::from(instant))) {
            *slot = Some(kind);
        }
        self.next = self.next.max(instant + 1);
        let of_key = self.runs.iter().filter(|r| r.instant == instant).count();
        invariants::check_fire_key(&instant.to_string(), of_key)?;
        let running = self.runs.iter().filter(|r| !r.counters.phase.is_terminal()).count();
        invariants::check_overlap(OverlapPolicy::Skip, running)?;
        Ok(true)
    }

    /// Notes that a message was taken by the broker.
    pub fn mark(&mut self, bounds: &Bounds, epoch: u8, message: Message) -> Done {
        if !admit(bounds.mutation, Epoch(epoch.into()), Epoch(self.epoch.into()))? {
            return Ok(false);
        }
        // Only the attempt that was published: a later one that waits has its own turn.
        if let Some(row) = self.row_mut(message)
            && row.outbox == Some(message.attempt)
        {
            row.outbox = None;
        }
        Ok(true)
    }

    /// Takes shards from their owners, all in one transaction.
    pub fn reclaim(&mut self, bounds: &Bounds, epoch: u8, plan: &[Taken]) -> Done {
        if !admit(bounds.mutation, Epoch(epoch.into()), Epoch(self.epoch.into()))? {
            return Ok(false);
        }
        for (message, owner, reason) in plan {
            let event = Event::Reclaim { attempt: message.attempt.into(), owner: *owner, reason: *reason };
            // A refused one has moved on by itself.
            let _ = self.apply(bounds, *message, &event)?;
        }
        Ok(true)
    }

    /// Whether the worker may run the attempt. One that runs there already was claimed by a call whose answer was lost.
    pub fn claim(&mut self, bounds: &Bounds, message: Message, owner: Incarnation) -> Done {
        let attempt = message.attempt.into();
        let mine = self.row(message).is_some_and(|row| {
            let Shard { phase, attempt: current, owner: has, .. } = &row.shard;
            *phase == Phase::Running && *current == attempt && *has == Some(owner)
        });
        if mine {
            return Ok(true);
        }
        Ok(self.apply(bounds, message, &Event::Claim { attempt, owner })?.is_ok())
    }

    /// An attempt's event and everything that follows from it.
    ///
    /// # Errors
    /// It was accepted and breaks an invariant.
    pub fn apply(
        &mut self,
        bounds: &Bounds,
        message: Message,
        event: &Event,
    ) -> Result<Result<(), Rejection>, Violation> {
        let retry = bounds.retry();
        let Some(row) = self.row_mut(message) else { return Ok(Err(Rejection::NoSuchShard)) };
        let (next, effect) = match step(bounds.mutation, &row.shard, event, (&retry, 0))? {
            Ok(done) => done,
            Err(rejection) => return Ok(Err(rejection)),
        };
        row.shard = next;
        if matches!(event, Event::Succeed { .. }) {
            row.results += 1;
            invariants::check_results(row.results.into())?;
        }
        match effect {
            Some(Effect::Redispatch { .. }) => row.outbox = Some(row.shard.attempt as u8),
            Some(Effect::Settle(phase)) => self.settle(message.instant, phase)?,
            None => {}
        }
        Ok(Ok(()))
    }

    fn settle(&mut self, instant: u8, phase: Phase) -> Result<(), Violation> {
        let (succeeded, failed) = (u32::from(phase == Phase::Success), u32::from(phase == Phase::Failed));
        let Some(run) = self.runs.iter_mut().find(|r| r.instant == instant) else { return Ok(()) };
        // Refused only if more shards end than there are.
        run.counters = execution::apply(&run.counters, execution::Event::Settled { succeeded, failed })
            .map_err(|e| Violation { id: invariants::InvariantId::S1, seen: e.to_string() })?;
        Ok(())
    }
}

/// The attempt as the domain names it.
#[must_use]
pub fn attempt_ref(message: Message) -> AttemptRef {
    let execution = ExecutionId(Uuid::from_u128(message.instant.into()));
    AttemptRef { execution, index: message.index.into(), attempt: message.attempt.into() }
}
