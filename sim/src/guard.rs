//! What a ledger checks before it writes, as its adapters do, and what the invariants say of what it wrote.
//!
//! The guards themselves are the domain's; a [`Mutation`] takes one of them away here, so that production code has no switch.

use shardcron_domain::Epoch;
use shardcron_domain::invariants::{self, Violation};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::{Effect, Event, Rejection, Shard, apply};

/// A guard that is taken away, to prove that it is needed and that its absence is noticed. The first three are in both worlds,
/// the others need time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// The ledger does not look at the attempt that a worker's write names.
    NoAttemptCheck,
    /// The ledger does not look at the epoch that a leader's write names.
    NoEpochCheck,
    /// Workers ack when they are delivered to.
    AckBeforeCommit,
    /// A leader whose timer fires outside its trust window does not set it again.
    ForgetTimer,
    /// The dispatcher hands out again only while the queue is empty, and waits twice as long after each look, whatever it saw.
    OnlyIfEmpty,
    /// What attempts emitted that ended badly is kept with what the good one did.
    EmitsOfDeadAttempts,
    /// A worker is handed the shards of broadcasts that are for others.
    AddressedToAnybody,
    /// A record is noted as done when it is begun with.
    DoneBeforeItsTransaction,
    /// Checkpoints are moved, and steps are committed, whoever has the shard by now.
    CheckpointWithoutFence,
}

/// What the ledger made of a worker's or a supervisor's write.
pub type Step = Result<(Shard, Option<Effect>), Rejection>;

/// Whether a leader's transaction may go on.
///
/// # Errors
/// It may, and breaks L1.
pub fn admit(mutation: Option<Mutation>, writer: Epoch, current: Epoch) -> Result<bool, Violation> {
    let admitted = writer == current || mutation == Some(Mutation::NoEpochCheck);
    if admitted {
        invariants::check_epoch(writer, current)?;
    }
    Ok(admitted)
}

/// One event on one shard.
///
/// # Errors
/// It was accepted, and breaks S2, S3 or S4.
pub fn step(
    mutation: Option<Mutation>,
    shard: &Shard,
    event: &Event,
    (policy, now_ms): (&RetryPolicy, i64),
) -> Result<Step, Violation> {
    let blind = (mutation == Some(Mutation::NoAttemptCheck)).then(|| renamed(event, shard.attempt));
    let (next, effect) = match apply(shard, blind.as_ref().unwrap_or(event), policy, now_ms) {
        Ok(done) => done,
        Err(rejection) => return Ok(Err(rejection)),
    };
    if let Some(named) = attempt_of(event) {
        invariants::check_accepted(named, shard)?;
    }
    invariants::check_event(shard, event, &next)?;
    Ok(Ok((next, effect)))
}

fn attempt_of(event: &Event) -> Option<u32> {
    match event {
        Event::Claim { attempt, .. }
        | Event::Advance { attempt, .. }
        | Event::Succeed { attempt, .. }
        | Event::Fail { attempt, .. }
        | Event::Reclaim { attempt, .. }
        | Event::TakeOver { attempt, .. }
        | Event::HandBack { attempt, .. } => Some(*attempt),
        Event::Reopen { attempt } => Some(*attempt),
        Event::Abandon | Event::Cancel => None,
    }
}

fn renamed(event: &Event, to: u32) -> Event {
    let mut event = event.clone();
    match &mut event {
        Event::Claim { attempt, .. }
        | Event::Advance { attempt, .. }
        | Event::Succeed { attempt, .. }
        | Event::Fail { attempt, .. }
        | Event::Reclaim { attempt, .. }
        | Event::TakeOver { attempt, .. }
        | Event::HandBack { attempt, .. }
        | Event::Reopen { attempt } => *attempt = to,
        Event::Abandon | Event::Cancel => {}
    }
    event
}
