//! What the dispatcher does to the world: one round of publishing, retries, and the net below the transport. Runs on the I/O
//! runtime; the actor only hears how it went.

use crate::ports::Ports;
use crate::telemetry;
use shardcron_broker::{BrokerError, Depth, Published, Way};
use shardcron_domain::dispatch::Pick;
use shardcron_domain::grouping::runs;
use shardcron_domain::limits::{QUEUE_WINDOW_MAX, REDISPATCH_BATCH};
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage, ShardRun};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId};
use shardcron_store::{Polling, StoreError};
use std::collections::{BTreeMap, HashMap};

/// What a round works with, and how it goes.
pub(super) struct Round {
    pub(super) ports: Ports,
    pub(super) epoch: Epoch,
    pub(super) tier: String,
    /// What is to be handed out, and how many shards of each go into one message.
    pub(super) picks: Vec<(Pick, u32)>,
    pub(super) materialized: HashMap<ExecutionId, u32>,
    pub(super) tiers: Vec<String>,
    /// Executions that have ended meanwhile: nothing of them is to be handed out any more.
    pub(super) gone: Vec<ExecutionId>,
}

pub(super) struct Done {
    pub(super) tier: String,
    pub(super) published: u32,
    /// Where the executions of the round stand: noted in the ledger up to here.
    pub(super) reached: Vec<(ExecutionId, u32)>,
    pub(super) materialized: HashMap<ExecutionId, u32>,
    pub(super) gone: Vec<ExecutionId>,
    pub(super) depth: Option<Depth>,
    pub(super) fault: Option<Fault>,
}

pub(super) enum Fault {
    Deposed,
    Ledger(StoreError),
    Broker(String),
}

impl Round {
    pub(super) async fn run(mut self) -> Done {
        let mut fault = self.write_rows().await.err();
        let mut reached: Vec<(ExecutionId, u32)> = self.picks.iter().map(|(p, _)| (p.execution, p.from)).collect();
        let mut published = 0;
        if fault.is_none() && !self.picks.is_empty() {
            let Answers { reached: confirmed, left, fault: broker_fault } = self.publish().await;
            published = confirmed.iter().zip(&self.picks).map(|(to, (pick, _))| to - pick.from).sum();
            let marks: Vec<(ExecutionId, u32)> =
                self.picks.iter().zip(&confirmed).map(|((p, _), to)| (p.execution, *to)).collect();
            fault = broker_fault.map(Fault::Broker);
            match mark(&self.ports, self.epoch, (&marks, &[]), left).await {
                Ok(()) => reached = marks,
                Err(StoreError::Deposed { .. }) => fault = Some(Fault::Deposed),
                Err(e) => fault = Some(Fault::Ledger(e)),
            }
        }
        let depth = match self.ports.broker.depth(&self.tier).await {
            Ok(depth) => Some(depth),
            Err(e) => {
                // The queue may never have been declared: a tier that came with a job.
                let _ = self.declare().await;
                fault = fault.or(Some(Fault::Broker(e.to_string())));
                None
            }
        };
        Done { tier: self.tier, published, reached, materialized: self.materialized, gone: self.gone, depth, fault }
    }

    async fn declare(&self) -> Result<(), BrokerError> {
        let mut tiers = self.tiers.clone();
        if !tiers.contains(&self.tier) {
            tiers.push(self.tier.clone());
        }
        self.ports.broker.declare(&tiers).await
    }

    /// A shard's row must exist before anybody hears of the shard.
    async fn write_rows(&mut self) -> Result<(), Fault> {
        for (pick, _) in &self.picks {
            let reach = self.materialized.entry(pick.execution).or_insert(0);
            while *reach < pick.to {
                match self.ports.ledger.materialize(self.epoch, pick.execution, pick.to).await {
                    Ok(now) if now > *reach => *reach = now,
                    // No row was written although some are missing: the execution has been cancelled.
                    Ok(_) => {
                        self.gone.push(pick.execution);
                        break;
                    }
                    Err(StoreError::Deposed { .. }) => return Err(Fault::Deposed),
                    Err(e) => return Err(Fault::Ledger(e)),
                }
            }
        }
        let gone = std::mem::take(&mut self.gone);
        self.picks.retain(|(p, _)| !gone.contains(&p.execution));
        self.gone = gone;
        Ok(())
    }

    /// Publishes all picks.
    async fn publish(&self) -> Answers {
        let first = |execution, index| AttemptRef { execution, index, attempt: 1 };
        let of_pick = |(pick, size): &(Pick, u32)| {
            let execution = pick.execution;
            runs(pick.from, pick.to, *size)
                .map(move |(from, count)| ShardRun::new(first(execution, from), count, self.epoch.0))
                .collect::<Vec<_>>()
        };
        let messages: Vec<Vec<ShardRun>> = self.picks.iter().map(of_pick).collect();
        let answers = self.ports.broker.publish_runs(&self.tier, &messages.concat()).await;
        let mut answers = answers.into_iter();
        let (mut reached, mut fault) = (Vec::with_capacity(self.picks.len()), None);
        let (mut unroutable, mut left) = (false, false);
        for ((pick, _), runs) in self.picks.iter().zip(&messages) {
            let mut to = pick.from;
            for run in runs {
                let answer = answers.next();
                left |= answer == Some(Published::Left);
                match answer {
                    Some(Published::Confirmed | Published::Left) if to == run.attempt.index => to += run.count,
                    Some(Published::Confirmed | Published::Left) => {}
                    Some(Published::Unroutable) => unroutable = true,
                    Some(Published::Failed(why)) => fault = fault.or(Some(why)),
                    None => fault = fault.or(Some("the broker did not answer".into())),
                }
            }
            reached.push(to);
        }
        if unroutable {
            // Somebody deleted the queue: make it again, and the next round publishes again (case D-01).
            tracing::warn!(tier = %self.tier, "the queue was gone; declaring it again");
            if let Err(e) = self.declare().await {
                fault = fault.or(Some(e.to_string()));
            }
        }
        Answers { reached, left, fault }
    }
}

/// What became of a round's messages.
struct Answers {
    /// For each pick, how far from its beginning everything is handed out.
    reached: Vec<u32>,
    /// Some of it without a message.
    left: bool,
    /// The first fault.
    fault: Option<String>,
}

/// Notes what is handed out; with it, if there are no messages for it, that workers are to poll.
async fn mark(
    ports: &Ports,
    epoch: Epoch,
    (firsts, again): (&[(ExecutionId, u32)], &[AttemptRef]),
    left: bool,
) -> Result<(), StoreError> {
    if left {
        ports.ledger.leave_to_pollers(epoch, firsts, again, ports.clock.now_ms()).await
    } else {
        ports.ledger.mark_dispatched(epoch, firsts, again).await
    }
}

/// Tiers that one look leaves out at most; jobs may name any number.
const FAILING_TIERS_MAX: usize = 64;

/// Publishes retries and reclaimed shards that are due, and notes it. Returns how many, and whether there may be more.
pub(super) async fn redispatch(ports: &Ports, epoch: Epoch) -> Result<(usize, bool), StoreError> {
    // Tiers that the broker does not take: what waits there must not hide what waits elsewhere behind it.
    let mut failing: Vec<String> = Vec::new();
    let mut total = 0;
    loop {
        let due = ports.ledger.redispatch_due(ports.ledger_now_ms(), &failing, REDISPATCH_BATCH).await?;
        let full = due.len() == REDISPATCH_BATCH;
        let mut by_tier: BTreeMap<String, Vec<AttemptRef>> = BTreeMap::new();
        for row in due {
            by_tier.entry(row.tier).or_default().push(row.attempt);
        }
        let (mut confirmed, mut left, known) = (Vec::new(), false, failing.len());
        for (tier, attempts) in by_tier {
            let before = confirmed.len();
            for (attempt, answer) in attempts.iter().zip(publish_attempts(ports, epoch, &tier, &attempts).await) {
                left |= answer == Published::Left;
                if matches!(answer, Published::Confirmed | Published::Left) {
                    confirmed.push(*attempt);
                }
            }
            if confirmed.len() - before < attempts.len() && failing.len() < FAILING_TIERS_MAX {
                failing.push(tier);
            }
        }
        total += confirmed.len();
        if !confirmed.is_empty() {
            mark(ports, epoch, (&[], &confirmed), left).await?;
        }
        // A full look of which nothing was taken, and behind which other tiers may wait: looked behind it at once.
        if !full || failing.len() == known {
            return Ok((total, full && !confirmed.is_empty()));
        }
    }
}

async fn publish_attempts(ports: &Ports, epoch: Epoch, tier: &str, attempts: &[AttemptRef]) -> Vec<Published> {
    let messages: Vec<ShardMessage> = attempts
        .iter()
        .map(|attempt| ShardMessage { v: ENVELOPE_VERSION, attempt: *attempt, epoch: epoch.0 })
        .collect();
    let answers = ports.broker.publish(tier, &messages).await;
    if answers.contains(&Published::Unroutable)
        && let Err(e) = ports.broker.declare(&[tier.to_owned()]).await
    {
        tracing::debug!(tier, error = %e, "the queue could not be declared");
    }
    answers
}

/// The net below the transport: pending although handed out, and the queue is empty.
///
/// `anyway`: also if the queue is not empty. A busy tier may never run empty, and doubles are harmless.
pub(super) async fn republish(
    ports: &Ports,
    epoch: Epoch,
    tier: &str,
    execution: ExecutionId,
    anyway: bool,
) -> Result<(), String> {
    let depth = ports.broker.depth(tier).await.map_err(|e| e.to_string())?;
    // Without a consumer it would help nobody; RabbitMQ also answers "nothing there" for a queue that is slow to answer.
    if depth.unbounded || depth.consumers == 0 || (depth.ready > 0 && !anyway) {
        return Ok(());
    }
    let (mut from, mut total) = (0, 0);
    loop {
        let stranded = ports
            .ledger
            .stranded(execution, from, ports.ledger_now_ms(), QUEUE_WINDOW_MAX as usize)
            .await
            .map_err(|e| e.to_string())?;
        let Some(last) = stranded.last() else { break };
        from = last.index + 1;
        let answers = publish_attempts(ports, epoch, tier, &stranded).await;
        total += answers.iter().filter(|a| **a == Published::Confirmed).count();
        if stranded.len() < QUEUE_WINDOW_MAX as usize {
            break;
        }
    }
    if total > 0 {
        telemetry::republished(total);
        tracing::info!(execution_id = %execution, shards = total, "handed out again what the transport had lost");
    }
    Ok(())
}

/// Looks whether workers are told to poll, and brings that into accord with the broker: tells them while it is away, and sends
/// the missing messages once it is back. `handed_out`: something is, and has not ended.
pub(super) async fn align(ports: &Ports, epoch: Epoch, handed_out: bool) -> Result<(), StoreError> {
    let polling = ports.ledger.polling().await?;
    match (ports.broker.way(), polling) {
        // Nothing was to be published since the broker went away, but it may have taken messages with it.
        (Way::Ledger, None) if handed_out => ports.ledger.leave_to_pollers(epoch, &[], &[], ports.clock.now_ms()).await,
        (Way::Broker, Some(polling)) => send_what_is_missing(ports, epoch, &polling).await,
        _ => Ok(()),
    }
}

/// Publishes everything that is handed out and pending, and then takes the pollers' note away. Should something be left to them
/// meanwhile (a round that began while the broker was away), the note stays, and the next survey does it again. What a poller
/// takes before its message comes is refused at the second claim. Never more than the window of each tier, and retries.
async fn send_what_is_missing(ports: &Ports, epoch: Epoch, polling: &Polling) -> Result<(), StoreError> {
    let (mut after, mut total) = (None, 0);
    loop {
        let page = ports.ledger.handed_out(after, ports.clock.now_ms(), QUEUE_WINDOW_MAX as usize).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.attempt.shard());
        let mut by_tier: BTreeMap<&str, Vec<AttemptRef>> = BTreeMap::new();
        for row in &page {
            by_tier.entry(&row.tier).or_default().push(row.attempt);
        }
        for (tier, attempts) in by_tier {
            let answers = publish_attempts(ports, epoch, tier, &attempts).await;
            if answers.iter().any(|a| *a != Published::Confirmed) {
                // Away again, or a queue that had to be declared: the pollers go on, and so does the next survey.
                return Ok(());
            }
            total += attempts.len();
        }
        if page.len() < QUEUE_WINDOW_MAX as usize {
            break;
        }
    }
    if ports.ledger.end_polling(epoch, polling).await? {
        let seconds = (ports.clock.now_ms() - polling.since_ms) / 1_000;
        tracing::info!(shards = total, seconds, "there are messages again for everything that is handed out");
    }
    Ok(())
}
