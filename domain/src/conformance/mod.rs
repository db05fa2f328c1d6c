//! Whether what the processes of a run said of themselves could have been said by processes that keep the rules.
//!
//! The clocks of processes differ, so nothing is ordered by time. What orders a trace is what orders the ledger: the numbers of a
//! life's own events, the epochs, and the attempts of a shard. Within an attempt the order is its owner's, and its end is last.
//! Along it, each shard is folded through [`crate::shard::apply`].
//!
//! A process that was killed may have done what it said that it was about to do, and never said that it did. Such a step is taken
//! as done where what follows needs it, and only there.

mod story;

use self::story::Story;
use crate::ids::{AttemptRef, Epoch, ExecutionId, Incarnation, ShardRef};
use crate::trace::{ALREADY_DONE, FIRED, NOT_YET, TraceEvent, TraceLine};
use std::collections::{BTreeMap, BTreeSet};

/// The first thing that does not conform, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{life} #{seq}: {sentence}")]
pub struct Deviation {
    /// The process life that said it.
    pub life: String,
    /// The number of the event there.
    pub seq: u64,
    /// What is wrong with it.
    pub sentence: String,
}

/// What was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Process lives.
    pub lives: usize,
    /// Events.
    pub events: usize,
    /// Executions that were fired.
    pub executions: usize,
    /// Shards that anything was said about.
    pub shards: usize,
    /// Ends that were recorded.
    pub recorded: usize,
    /// Deliveries that were acked.
    pub acked: usize,
    /// Steps that were taken as done although their process never said so.
    pub presumed: usize,
}

/// Looks at the lines of all processes of a run, in any order.
///
/// # Errors
/// The first deviation.
pub fn check(lines: &[TraceLine]) -> Result<Summary, Deviation> {
    let mut lives: BTreeMap<&str, Vec<&TraceLine>> = BTreeMap::new();
    for line in lines {
        lives.entry(&line.life).or_default().push(line);
    }
    let mut all = Fold::default();
    for said in lives.values_mut() {
        said.sort_by_key(|line| line.seq);
        all.life(said)?;
    }
    let mut summary = Summary {
        lives: lives.len(),
        events: lines.len(),
        executions: all.fired.values().filter(|made| made.is_some()).count(),
        shards: all.shards.len(),
        ..Summary::default()
    };
    for line in lines {
        summary.recorded += usize::from(matches!(line.event, TraceEvent::Recorded { .. }));
        summary.acked += usize::from(matches!(line.event, TraceEvent::Acked { .. }));
    }
    for (shard, story) in &all.shards {
        all.known(*shard, story)?;
        summary.presumed += story.fold(all.reopening.contains(&shard.execution), all.abandoning)?;
    }
    Ok(summary)
}

fn deviation<T>(line: &TraceLine, sentence: impl Into<String>) -> Result<T, Deviation> {
    Err(Deviation { life: line.life.clone(), seq: line.seq, sentence: sentence.into() })
}

/// What a worker's life has come to with an attempt.
#[derive(Clone, Copy, Debug, Default)]
struct Local {
    claiming: bool,
    claimed: bool,
    recording: bool,
    recorded: bool,
    /// The ledger has answered for its delivery.
    answered: bool,
    /// The attempt of the message that it was taken over by.
    message: Option<u32>,
}

/// The whole trace, sorted by what it is about.
#[derive(Default)]
struct Fold<'a> {
    epochs: BTreeMap<Epoch, &'a str>,
    owners: BTreeMap<Incarnation, &'a str>,
    /// Executions that may have been made, with their shards.
    asked: BTreeMap<ExecutionId, u32>,
    fired: BTreeMap<(i64, &'a str), Option<ExecutionId>>,
    shards: BTreeMap<ShardRef, Story<'a>>,
    /// Executions of which failed shards may have been sent back, whether or not anybody heard the answer.
    reopening: BTreeSet<ExecutionId>,
    /// Somebody was about to end shards that waited for a lost worker.
    abandoning: bool,
}

impl<'a> Fold<'a> {
    /// One life, in its own order.
    fn life(&mut self, said: &[&'a TraceLine]) -> Result<(), Deviation> {
        let mut attempts: BTreeMap<AttemptRef, Local> = BTreeMap::new();
        let mut last_epoch = Epoch(0);
        for (expected, line) in (1..).zip(said) {
            if line.seq != expected {
                return deviation(line, format!("event {expected} of this life is missing"));
            }
            if let Some(owner) = worker_of(&line.event)
                && *self.owners.entry(owner).or_insert(&line.life) != line.life
            {
                return deviation(line, format!("{owner} is the incarnation of another process life"));
            }
            if let Some(at) = shard_of(&line.event) {
                local(&mut attempts, line, at)?;
            }
            if let TraceEvent::EpochBegun { epoch } = line.event {
                if epoch <= last_epoch || self.epochs.insert(epoch, &line.life).is_some() {
                    return deviation(line, format!("epoch {epoch} begins a second time (L1)"));
                }
                last_epoch = epoch;
            }
            if let Some(epoch) = of_leader(&line.event)
                && self.epochs.get(&epoch).copied() != Some(line.life.as_str())
            {
                return deviation(line, format!("it acts under epoch {epoch}, which it never began (L1)"));
            }
            self.decide(line)?;
            if let Some(at) = shard_of(&line.event) {
                self.shards.entry(at.shard()).or_default().lines.push(line);
            }
        }
        Ok(())
    }

    fn decide(&mut self, line: &'a TraceLine) -> Result<(), Deviation> {
        match &line.event {
            TraceEvent::Firing { execution: Some(id), shards, .. } => {
                let asked = self.asked.entry(*id).or_default();
                *asked = (*shards).max(*asked);
            }
            // Whoever grew it and whoever fired it are two processes, and their lines come in any order.
            TraceEvent::Growing { execution, shards } => {
                let asked = self.asked.entry(*execution).or_default();
                *asked = (*shards).max(*asked);
            }
            TraceEvent::Abandoning { .. } => self.abandoning = true,
            TraceEvent::Reopening { execution } => {
                self.reopening.insert(*execution);
            }
            TraceEvent::Decided { job, fire_key, outcome, execution, .. } if outcome == FIRED => {
                let key = (*job, fire_key.as_str());
                if let Some(Some(earlier)) = self.fired.insert(key, *execution)
                    && Some(earlier) != *execution
                {
                    return deviation(line, format!("{fire_key} made a second execution beside {earlier} (F1)"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A shard is of an execution that somebody at least asked for.
    fn known(&self, shard: ShardRef, story: &Story<'_>) -> Result<(), Deviation> {
        let Some(first) = story.lines.first() else { return Ok(()) };
        match self.asked.get(&shard.execution) {
            None => deviation(first, format!("nobody fired the execution {}", shard.execution)),
            Some(shards) if shard.index >= *shards => {
                deviation(first, format!("shard {shard} is beyond the {shards} of its plan (S5)"))
            }
            Some(_) => Ok(()),
        }
    }
}

/// A1, and that no answer comes before its question.
fn local(attempts: &mut BTreeMap<AttemptRef, Local>, line: &TraceLine, at: AttemptRef) -> Result<(), Deviation> {
    let state = attempts.entry(at).or_default();
    match line.event {
        TraceEvent::TakenOver { message, .. } => {
            (state.claimed, state.message) = (true, Some(message));
            attempts.entry(AttemptRef { attempt: message, ..at }).or_default().answered = false;
        }
        TraceEvent::TakenAway { .. } => state.answered = true,
        TraceEvent::Claiming { .. } => state.claiming = true,
        TraceEvent::ClaimRefused { ref reason, .. } if reason == ALREADY_DONE => state.answered = true,
        TraceEvent::Claimed { .. } | TraceEvent::ClaimRefused { .. } if !state.claiming => {
            return deviation(line, format!("{at} has an answer to a claim that was not made"));
        }
        TraceEvent::Claimed { .. } => state.claimed = true,
        TraceEvent::Recording { .. } if !state.claimed => {
            return deviation(line, format!("{at} is to be recorded without having been claimed here"));
        }
        TraceEvent::Recording { .. } => state.recording = true,
        TraceEvent::Recorded { .. } | TraceEvent::RecordRefused { .. } if !state.recording => {
            return deviation(line, format!("{at} has an answer to a record that was not made"));
        }
        TraceEvent::Recorded { .. } if state.recorded => {
            return deviation(line, format!("{at} is recorded a second time (S1)"));
        }
        // It is held, and claimed again later.
        TraceEvent::ClaimRefused { ref reason, .. } if reason == NOT_YET => {}
        TraceEvent::Recorded { .. }
        | TraceEvent::ClaimRefused { .. }
        | TraceEvent::RecordRefused { .. }
        | TraceEvent::PastHorizon { .. } => {
            state.recorded |= matches!(line.event, TraceEvent::Recorded { .. });
            state.answered = true;
            if let Some(message) = state.message {
                attempts.entry(AttemptRef { attempt: message, ..at }).or_default().answered = true;
            }
        }
        TraceEvent::Acked { .. } if !state.answered => {
            return deviation(line, format!("{at} is acked before the ledger has answered for it (A1)"));
        }
        _ => {}
    }
    Ok(())
}

/// The worker for which something is asked of the ledger.
fn worker_of(event: &TraceEvent) -> Option<Incarnation> {
    match event {
        TraceEvent::Claiming { owner, .. }
        | TraceEvent::Claimed { owner, .. }
        | TraceEvent::Advancing { owner, .. }
        | TraceEvent::Advanced { owner, .. }
        | TraceEvent::Recording { owner, .. }
        | TraceEvent::Recorded { owner, .. } => Some(*owner),
        TraceEvent::TakingOver { by, .. } | TraceEvent::TakenOver { by, .. } | TraceEvent::TakenAway { by, .. } => {
            Some(*by)
        }
        _ => None,
    }
}

fn of_leader(event: &TraceEvent) -> Option<Epoch> {
    match event {
        TraceEvent::Firing { epoch, .. }
        | TraceEvent::Decided { epoch, .. }
        | TraceEvent::Dispatched { epoch, .. }
        | TraceEvent::Reclaiming { epoch, .. }
        | TraceEvent::Reclaimed { epoch, .. }
        | TraceEvent::Abandoning { epoch, .. } => Some(*epoch),
        _ => None,
    }
}

fn shard_of(event: &TraceEvent) -> Option<AttemptRef> {
    match event {
        TraceEvent::Dispatched { at, .. }
        | TraceEvent::Reclaiming { at, .. }
        | TraceEvent::Reclaimed { at, .. }
        | TraceEvent::TakingOver { at, .. }
        | TraceEvent::TakenOver { at, .. }
        | TraceEvent::TakenAway { at, .. }
        | TraceEvent::Reopened { at }
        | TraceEvent::Abandoned { at }
        | TraceEvent::Delivered { at }
        | TraceEvent::Claiming { at, .. }
        | TraceEvent::Claimed { at, .. }
        | TraceEvent::ClaimRefused { at, .. }
        | TraceEvent::Advancing { at, .. }
        | TraceEvent::Advanced { at, .. }
        | TraceEvent::Recording { at, .. }
        | TraceEvent::Recorded { at, .. }
        | TraceEvent::RecordRefused { at, .. }
        | TraceEvent::PastHorizon { at }
        | TraceEvent::Acked { at } => Some(*at),
        TraceEvent::EpochBegun { .. }
        | TraceEvent::Firing { .. }
        | TraceEvent::Growing { .. }
        | TraceEvent::Decided { .. }
        | TraceEvent::Abandoning { .. }
        | TraceEvent::Reopening { .. } => None,
    }
}

#[cfg(test)]
mod tests;
