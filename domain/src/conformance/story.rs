//! One shard over a whole run.

use super::{Deviation, deviation, shard_of, worker_of};
use crate::ids::Incarnation;
use crate::invariants::check_event;
use crate::job::RetryPolicy;
use crate::shard::{self, Checkpoint, Event, Phase, ReclaimReason, Shard, TakeOverReason, apply};
use crate::trace::{End, TraceEvent, TraceLine};
use std::collections::BTreeSet;

/// All that was said about one shard, life by life, each in its own order.
#[derive(Default)]
pub(super) struct Story<'a> {
    pub(super) lines: Vec<&'a TraceLine>,
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
    /// Folds the shard through its machine, attempt by attempt. Returns how many steps had to be presumed. `asked`: somebody was about
    /// to send failed shards of the execution back. `abandoning`: somebody was about to end shards that nobody had claimed.
    pub(super) fn fold(&self, asked: bool, abandoning: bool) -> Result<usize, Deviation> {
        let mut shard = Shard::new();
        let mut presumed = 0;
        let numbers: BTreeSet<u32> =
            self.lines.iter().filter_map(|l| shard_of(&l.event)).map(|at| at.attempt).collect();
        let Some(last) = numbers.last().copied() else { return Ok(0) };
        for number in 1..=last {
            presumed += self.reopen(number, (asked, last), &mut shard)?;
            let open = matches!(shard.phase, Phase::Pending | Phase::Running);
            if !open || shard.attempt != number {
                let line = self.of(last).next().or(self.lines.first().copied());
                let Some(line) = line else { return Ok(presumed) };
                let (at, word) = (shard.attempt, shard.phase.word());
                // Messages of attempts that are long over travel on; only what the ledger took must fit.
                return match self.of(number..=last).find(|l| taken(&l.event)) {
                    Some(line) => deviation(
                        line,
                        format!("attempt {number} was taken, and the shard is {word} at attempt {at} (S3)"),
                    ),
                    None if self.exists(number, last) => deviation(
                        line,
                        format!("attempt {number} exists, and the shard is {word} at attempt {at} (S3)"),
                    ),
                    None => Ok(presumed),
                };
            }
            let needed = self.reopened(number).is_some() || (number < last && self.exists(number + 1, last));
            presumed += self.attempt(number, (needed, number == last, abandoning), &mut shard)?;
        }
        Ok(presumed)
    }

    fn reopened(&self, number: u32) -> Option<&'a TraceLine> {
        self.of(number).find(|l| matches!(l.event, TraceEvent::Reopened { .. }))
    }

    /// A failed shard goes on under the next attempt if somebody sent it back, or was about to and what follows needs it.
    fn reopen(&self, number: u32, (asked, last): (bool, u32), shard: &mut Shard) -> Result<usize, Deviation> {
        if shard.phase != Phase::Failed || shard.attempt.saturating_add(1) != number {
            return Ok(0);
        }
        let said = self.reopened(shard.attempt);
        let presumed = || self.of(number..=last).next().filter(|_| asked && self.exists(number, last));
        let Some(line) = said.or_else(presumed) else { return Ok(0) };
        let event = Event::Reopen { attempt: shard.attempt };
        self.step(line, shard, &event, 0)?;
        Ok(usize::from(said.is_none()))
    }

    fn of(&self, numbers: impl Numbers) -> impl Iterator<Item = &'a TraceLine> {
        self.lines.iter().copied().filter(move |l| shard_of(&l.event).is_some_and(|at| numbers.has(at.attempt)))
    }

    /// Whether anything says that the ledger has come to an attempt: it was handed out, or taken.
    fn exists(&self, from: u32, to: u32) -> bool {
        self.of(from..=to).any(|l| matches!(l.event, TraceEvent::Dispatched { .. }) || taken(&l.event))
    }

    fn attempt(
        &self,
        number: u32,
        (needed, last, abandoning): (bool, bool, bool),
        shard: &mut Shard,
    ) -> Result<usize, Deviation> {
        let mut presumed = 0;
        let claims = self.of(number).filter_map(|l| match l.event {
            TraceEvent::Claimed { owner, .. } => Some((l, owner)),
            _ => None,
        });
        // Taken over, it runs without a claim.
        let mut owner: Option<Incarnation> = shard.owner;
        for (line, claimer) in claims {
            match owner {
                Some(first) if first != claimer => {
                    return deviation(line, format!("attempt {number} was claimed by {first}, too (S1)"));
                }
                _ => owner = Some(claimer),
            }
        }
        let ending = self.ending(number, owner, (needed, last))?;
        let Some(claimer) = owner.or(ending.as_ref().map(|(e, _)| owner_of(&e.event))) else {
            // What waited for a worker that is gone ended without a claim.
            let said = self.of(number).find(|l| matches!(l.event, TraceEvent::Abandoned { .. }));
            let line = said.or_else(|| self.of(number).next().filter(|_| needed && abandoning));
            if let Some(line) = line.filter(|_| shard.phase == Phase::Pending) {
                self.step(line, shard, &Event::Abandon, 0)?;
                return Ok(usize::from(said.is_none()));
            }
            return match self.of(number).next() {
                Some(line) if needed => deviation(
                    line,
                    format!("attempt {} exists, and attempt {number} was never claimed (S3)", number + 1),
                ),
                _ => Ok(0),
            };
        };
        let Some(first) = self.of(number).next() else { return Ok(0) };
        presumed += usize::from(owner.is_none());
        if shard.phase == Phase::Pending {
            self.step(first, shard, &Event::Claim { attempt: number, owner: claimer }, 0)?;
        }
        presumed += self.advances(number, claimer, shard)?;
        match ending {
            Some((ending, said)) => {
                presumed += usize::from(!said);
                self.step(ending.line, shard, &ending.event, ending.attempts)?;
                match ending.became {
                    Some(phase) if phase != shard.phase => deviation(
                        ending.line,
                        format!(
                            "attempt {number} left the shard {}, and by the rules it is {}",
                            phase.word(),
                            shard.phase.word()
                        ),
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
        (needed, last): (bool, bool),
    ) -> Result<Option<(Ending<'a>, bool)>, Deviation> {
        let mut said: Option<Ending<'a>> = None;
        let next = self.of(number.saturating_add(1)).filter(|l| matches!(l.event, TraceEvent::TakenOver { .. }));
        // Taken away is the attempt that the shard has come to. The message that told of it may name an earlier one.
        let away = |l: &&TraceLine| matches!(l.event, TraceEvent::TakenAway { .. });
        let last_one = self.of(1..=number).filter(|l| last && away(l));
        for line in self.of(number).filter(|l| !away(l)).chain(next).chain(last_one) {
            let ending = match take_over(line, number, owner) {
                Some(ending) => ending,
                None => match self.said_end(line, number) {
                    Some(ending) => ending,
                    None => continue,
                },
            };
            // Asked again since the answer was lost, the ledger says the same of a take-over.
            let again = |first: &Ending<'_>| {
                let taken = matches!(line.event, TraceEvent::TakenOver { .. } | TraceEvent::TakenAway { .. });
                taken && first.line.event == line.event
            };
            if said.as_ref().is_some_and(again) {
                continue;
            }
            if let Some(first) = &said {
                let sentence = format!(
                    "attempt {number} ended a second time; {} #{} ended it (S1)",
                    first.line.life, first.line.seq
                );
                return deviation(line, sentence);
            }
            if owner.is_some_and(|owner| owner_of(&ending.event) != owner) {
                return deviation(
                    line,
                    format!("attempt {number} was ended for another worker than the one that claimed it"),
                );
            }
            said = Some(ending);
        }
        if let Some(ending) = said {
            return Ok(Some((ending, true)));
        }
        // Somebody was about to end it, and may have died before the answer, or have heard a refusal of its own second try.
        let presumed = self.of(1..=number).filter(|_| needed).find_map(|line| {
            let this = shard_of(&line.event).is_some_and(|at| at.attempt == number);
            let ending = about_to_end(line, number).filter(|_| this).or_else(|| about_to_take(line, number, owner))?;
            // Nothing follows a good end: one that was asked for was answered with records that are still open.
            let goes_on = !matches!(ending.event, Event::Succeed { .. });
            (goes_on && owner.is_none_or(|owner| owner_of(&ending.event) == owner)).then_some(ending)
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
            let same =
                matches!(l.event, TraceEvent::Reclaiming { .. }) == matches!(line.event, TraceEvent::Reclaimed { .. });
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
            let answered =
                mine[n..].iter().any(|l| matches!(&l.event, TraceEvent::Advanced { to: done, .. } if done == to));
            let gone_on =
                || mine[n + 1..].iter().copied().chain(self.next_advance(number)).any(|l| goes_on(&l.event, to));
            if shard.checkpoint.as_ref() == Some(to) || !(answered || gone_on()) {
                continue;
            }
            if !answered && *from != shard.checkpoint {
                // It could not have been taken: somebody else led there.
                continue;
            }
            presumed += usize::from(!answered);
            let event = Event::Advance { attempt: number, owner, from: from.clone(), to: to.clone() };
            self.step(line, shard, &event, 0)?;
        }
        Ok(presumed)
    }

    /// The first move of a checkpoint after an attempt: it goes on from where that attempt, or nobody since, had got to.
    fn next_advance(&self, number: u32) -> Option<&'a TraceLine> {
        let moves =
            self.of(number.saturating_add(1)..=u32::MAX).filter(|l| matches!(l.event, TraceEvent::Advancing { .. }));
        moves.min_by_key(|l| (shard_of(&l.event).map(|at| at.attempt), l.seq))
    }

    fn step(&self, line: &TraceLine, shard: &mut Shard, event: &Event, attempts: u32) -> Result<(), Deviation> {
        let policy = RetryPolicy { attempts: attempts.max(1), ..RetryPolicy::default() };
        // No clock has a part in it: whether a retry's time had come is the ledger's to say.
        match apply(shard, event, &policy, i64::MAX / 2) {
            Ok((next, _)) => {
                let next = Shard { not_before_ms: 0, ..next };
                check_event(shard, event, &next).or_else(|broken| deviation(line, broken.to_string()))?;
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
            | TraceEvent::TakenOver { .. }
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

/// The end of an attempt by a worker that took the shard over. The message does not say from whom.
fn take_over(line: &TraceLine, attempt: u32, owner: Option<Incarnation>) -> Option<Ending<'_>> {
    let (by, reason, attempts, became) = match line.event {
        TraceEvent::TakenOver { by, at, reason, attempts, .. } if at.attempt == attempt + 1 => {
            (by, reason, attempts, Phase::Running)
        }
        TraceEvent::TakenAway { by, reason, attempts, became, .. } => (by, reason, attempts, became),
        _ => return None,
    };
    Some(Ending { line, event: taken_from(attempt, owner, (by, reason)), attempts, became: Some(became) })
}

fn about_to_take(line: &TraceLine, attempt: u32, owner: Option<Incarnation>) -> Option<Ending<'_>> {
    let TraceEvent::TakingOver { by, reason, attempts, .. } = line.event else { return None };
    (owner != Some(by)).then(|| Ending {
        line,
        event: taken_from(attempt, owner, (by, reason)),
        attempts,
        became: None,
    })
}

fn taken_from(attempt: u32, owner: Option<Incarnation>, (by, reason): (Incarnation, TakeOverReason)) -> Event {
    Event::TakeOver { attempt, owner: owner.unwrap_or(Incarnation(uuid::Uuid::nil())), by, reason }
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
        | Event::TakeOver { owner, .. }
        | Event::HandBack { owner, .. } => *owner,
        Event::Abandon | Event::Cancel | Event::Reopen { .. } => Incarnation(uuid::Uuid::nil()),
    }
}
