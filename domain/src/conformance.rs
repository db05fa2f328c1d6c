//! Whether what the processes of a run said of themselves could have been said by processes that keep the rules.
//!
//! The clocks of processes differ, so nothing is ordered by time. What orders a trace is what orders the ledger: the numbers of a
//! life's own events, the epochs, and the attempts of a shard. Within an attempt the order is its owner's, and its end is last.
//! Along it, each shard is folded through [`shard::apply`].
//!
//! A process that was killed may have done what it said that it was about to do, and never said that it did. Such a step is taken
//! as done where what follows needs it, and only there.

use crate::ids::{AttemptRef, Epoch, ExecutionId, Incarnation, ShardRef};
use crate::invariants::check_shard_step;
use crate::job::RetryPolicy;
use crate::shard::{self, Checkpoint, Event, Phase, ReclaimReason, Shard, apply};
use crate::trace::{ALREADY_DONE, End, TraceEvent, TraceLine};
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
        summary.presumed += story.fold()?;
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
                local(attempts.entry(at).or_default(), line, at)?;
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
                self.asked.insert(*id, *shards);
            }
            TraceEvent::Decided { job, fire_key, outcome, execution, .. } if outcome == "fired" => {
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
fn local(state: &mut Local, line: &TraceLine, at: AttemptRef) -> Result<(), Deviation> {
    match line.event {
        TraceEvent::Claiming { .. } => {
            state.claiming = true;
            state.answered = false;
        }
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
        TraceEvent::Recorded { .. } => (state.recorded, state.answered) = (true, true),
        TraceEvent::ClaimRefused { .. } | TraceEvent::RecordRefused { .. } | TraceEvent::PastHorizon { .. } => {
            state.answered = true;
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
        _ => None,
    }
}

fn of_leader(event: &TraceEvent) -> Option<Epoch> {
    match event {
        TraceEvent::Firing { epoch, .. }
        | TraceEvent::Decided { epoch, .. }
        | TraceEvent::Dispatched { epoch, .. }
        | TraceEvent::Reclaiming { epoch, .. }
        | TraceEvent::Reclaimed { epoch, .. } => Some(*epoch),
        _ => None,
    }
}

fn shard_of(event: &TraceEvent) -> Option<AttemptRef> {
    match event {
        TraceEvent::Dispatched { at, .. }
        | TraceEvent::Reclaiming { at, .. }
        | TraceEvent::Reclaimed { at, .. }
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
        TraceEvent::EpochBegun { .. } | TraceEvent::Firing { .. } | TraceEvent::Decided { .. } => None,
    }
}

/// All that was said about one shard, life by life, each in its own order.
#[derive(Default)]
struct Story<'a> {
    lines: Vec<&'a TraceLine>,
}

/// What ended an attempt.
struct Ending<'a> {
    line: &'a TraceLine,
    event: Event,
    attempts: u32,
    /// Where it led, if anybody said so.
    became: Option<Phase>,
}

impl<'a> Story<'a> {
    /// Folds the shard through its machine, attempt by attempt. Returns how many steps had to be presumed.
    fn fold(&self) -> Result<usize, Deviation> {
        let mut shard = Shard::new();
        let mut presumed = 0;
        let numbers: BTreeSet<u32> = self.lines.iter().filter_map(|l| shard_of(&l.event)).map(|at| at.attempt).collect();
        let Some(last) = numbers.last().copied() else { return Ok(0) };
        for number in 1..=last {
            if shard.phase != Phase::Pending || shard.attempt != number {
                let line = self.of(last).next().or(self.lines.first().copied());
                let Some(line) = line else { return Ok(presumed) };
                let (at, word) = (shard.attempt, shard.phase.word());
                // Messages of attempts that are long over travel on; only what the ledger took must fit.
                return match self.of(number..=last).find(|l| taken(&l.event)) {
                    Some(line) => deviation(line, format!("attempt {number} was taken, and the shard is {word} at attempt {at} (S3)")),
                    None if self.exists(number, last) => {
                        deviation(line, format!("attempt {number} exists, and the shard is {word} at attempt {at} (S3)"))
                    }
                    None => Ok(presumed),
                };
            }
            let needed = number < last && self.exists(number + 1, last);
            presumed += self.attempt(number, needed, &mut shard)?;
        }
        Ok(presumed)
    }

    fn of(&self, numbers: impl Numbers) -> impl Iterator<Item = &'a TraceLine> {
        self.lines.iter().copied().filter(move |l| shard_of(&l.event).is_some_and(|at| numbers.has(at.attempt)))
    }

    /// Whether anything says that the ledger has come to an attempt: it was handed out, or taken.
    fn exists(&self, from: u32, to: u32) -> bool {
        self.of(from..=to).any(|l| matches!(l.event, TraceEvent::Dispatched { .. }) || taken(&l.event))
    }

    fn attempt(&self, number: u32, needed: bool, shard: &mut Shard) -> Result<usize, Deviation> {
        let mut presumed = 0;
        let claims = self.of(number).filter_map(|l| match l.event {
            TraceEvent::Claimed { owner, .. } => Some((l, owner)),
            _ => None,
        });
        let mut owner: Option<Incarnation> = None;
        for (line, claimer) in claims {
            match owner {
                Some(first) if first != claimer => {
                    return deviation(line, format!("attempt {number} was claimed by {first}, too (S1)"));
                }
                _ => owner = Some(claimer),
            }
        }
        let ending = self.ending(number, owner, needed)?;
        let Some(claimer) = owner.or(ending.as_ref().map(|(e, _)| owner_of(&e.event))) else {
            return match self.of(number).next() {
                Some(line) if needed => {
                    deviation(line, format!("attempt {} exists, and attempt {number} was never claimed (S3)", number + 1))
                }
                _ => Ok(0),
            };
        };
        let Some(first) = self.of(number).next() else { return Ok(0) };
        presumed += usize::from(owner.is_none());
        self.step(first, shard, &Event::Claim { attempt: number, owner: claimer }, 0)?;
        presumed += self.advances(number, claimer, shard)?;
        match ending {
            Some((ending, said)) => {
                presumed += usize::from(!said);
                self.step(ending.line, shard, &ending.event, ending.attempts)?;
                match ending.became {
                    Some(phase) if phase != shard.phase => deviation(
                        ending.line,
                        format!("attempt {number} left the shard {}, and by the rules it is {}", phase.word(), shard.phase.word()),
                    ),
                    _ => Ok(presumed),
                }
            }
            None if needed => deviation(
                first,
                format!("attempt {} exists, and nothing ended attempt {number} of {claimer} (S3)", number + 1),
            ),
            None => Ok(presumed),
        }
    }

    /// What ended an attempt, and whether its process said so. Only one thing can.
    fn ending(
        &self,
        number: u32,
        owner: Option<Incarnation>,
        needed: bool,
    ) -> Result<Option<(Ending<'a>, bool)>, Deviation> {
        let mut said: Option<Ending<'a>> = None;
        for line in self.of(number) {
            let Some(ending) = self.said_end(line, number) else { continue };
            if let Some(first) = &said {
                let sentence = format!("attempt {number} ended a second time; {} #{} ended it (S1)", first.line.life, first.line.seq);
                return deviation(line, sentence);
            }
            if owner.is_some_and(|owner| owner_of(&ending.event) != owner) {
                return deviation(line, format!("attempt {number} was ended for another worker than the one that claimed it"));
            }
            said = Some(ending);
        }
        if let Some(ending) = said {
            return Ok(Some((ending, true)));
        }
        // Somebody was about to end it, and may have died before the answer, or have heard a refusal of its own second try.
        let presumed = self.of(number).filter(|_| needed).find_map(|line| {
            let ending = about_to_end(line, number)?;
            owner.is_none_or(|owner| owner_of(&ending.event) == owner).then_some(ending)
        });
        Ok(presumed.map(|ending| (ending, false)))
    }

    fn said_end(&self, line: &'a TraceLine, number: u32) -> Option<Ending<'a>> {
        let became = match line.event {
            TraceEvent::Recorded { became, .. } => became,
            TraceEvent::Reclaimed { became: Some(became), .. } => became,
            _ => return None,
        };
        // The question has what the answer lacks.
        let question = self.of(number).filter(|l| l.life == line.life && l.seq < line.seq).filter_map(|l| {
            let same = matches!(l.event, TraceEvent::Reclaiming { .. }) == matches!(line.event, TraceEvent::Reclaimed { .. });
            about_to_end(l, number).filter(|_| same)
        });
        question.last().map(|asked| Ending { line, became: Some(became), ..asked })
    }

    /// Checkpoints in their owner's order. One that nobody confirmed is taken where the next one goes on from it.
    fn advances(&self, number: u32, owner: Incarnation, shard: &mut Shard) -> Result<usize, Deviation> {
        let mut presumed = 0;
        let mine: Vec<&TraceLine> = self.of(number).filter(|l| worker_of(&l.event) == Some(owner)).collect();
        for (n, line) in mine.iter().enumerate() {
            let TraceEvent::Advancing { from, to, .. } = &line.event else { continue };
            let answered = mine[n..].iter().any(|l| matches!(&l.event, TraceEvent::Advanced { to: done, .. } if done == to));
            let gone_on = || mine[n + 1..].iter().any(|l| goes_on(&l.event, to));
            if shard.checkpoint.as_ref() == Some(to) || !(answered || gone_on()) {
                continue;
            }
            presumed += usize::from(!answered);
            let event = Event::Advance { attempt: number, owner, from: from.clone(), to: to.clone() };
            self.step(line, shard, &event, 0)?;
        }
        Ok(presumed)
    }

    fn step(&self, line: &TraceLine, shard: &mut Shard, event: &Event, attempts: u32) -> Result<(), Deviation> {
        let policy = RetryPolicy { attempts: attempts.max(1), ..RetryPolicy::default() };
        // No clock has a part in it: whether a retry's time had come is the ledger's to say.
        match apply(shard, event, &policy, i64::MAX / 2) {
            Ok((next, _)) => {
                let next = Shard { not_before_ms: 0, ..next };
                check_shard_step(shard, &next).or_else(|broken| deviation(line, broken.to_string()))?;
                *shard = next;
                Ok(())
            }
            Err(refusal) => deviation(line, format!("the ledger took {event:?}, and by the rules {refusal}")),
        }
    }
}

/// One number, or a range of them.
trait Numbers {
    fn has(&self, number: u32) -> bool;
}

impl Numbers for u32 {
    fn has(&self, number: u32) -> bool {
        *self == number
    }
}

impl Numbers for std::ops::RangeInclusive<u32> {
    fn has(&self, number: u32) -> bool {
        self.contains(&number)
    }
}

fn goes_on(event: &TraceEvent, from: &Checkpoint) -> bool {
    matches!(event, TraceEvent::Advancing { from: Some(at), .. } if at == from)
}

/// Whether the ledger has accepted a write of the attempt.
fn taken(event: &TraceEvent) -> bool {
    matches!(
        event,
        TraceEvent::Claimed { .. }
            | TraceEvent::Advanced { .. }
            | TraceEvent::Recorded { .. }
            | TraceEvent::Reclaimed { became: Some(_), .. }
    )
}

fn about_to_end(line: &TraceLine, attempt: u32) -> Option<Ending<'_>> {
    let (event, attempts) = match line.event {
        TraceEvent::Recording { owner, end, attempts, .. } => (end_event(end, attempt, owner), attempts),
        TraceEvent::Reclaiming { owner, reason, attempts, .. } => (reclaim(attempt, owner, reason), attempts),
        _ => return None,
    };
    Some(Ending { line, event, attempts, became: None })
}

fn end_event(end: End, attempt: u32, owner: Incarnation) -> Event {
    match end {
        End::Success => Event::Succeed { attempt, owner },
        End::Failure(class) => Event::Fail { attempt, owner, class, seed: 0 },
        End::HandBack => Event::HandBack { attempt, owner },
    }
}

fn reclaim(attempt: u32, owner: Incarnation, reason: ReclaimReason) -> shard::Event {
    Event::Reclaim { attempt, owner, reason }
}

fn owner_of(event: &Event) -> Incarnation {
    match event {
        Event::Claim { owner, .. }
        | Event::Advance { owner, .. }
        | Event::Succeed { owner, .. }
        | Event::Fail { owner, .. }
        | Event::Reclaim { owner, .. }
        | Event::HandBack { owner, .. } => *owner,
        Event::Cancel => Incarnation(uuid::Uuid::nil()),
    }
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
