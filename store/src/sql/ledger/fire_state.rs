//! What the firing transaction reads of the batch's jobs, under their locks.

use super::jobs::LIVING;
use super::leader::check_fence;
use crate::rows::{FireAction, FireIntent};
use crate::sql::fault::Outcome;
use crate::sql::pool::Tx;
use crate::sql::value::number_list;
use shardcron_domain::firing::{DecisionKind, JobNow};
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::units::rfc3339;
use shardcron_domain::{Epoch, ExecutionId, JobId};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;

use crate::firing_rows::{WaitingKind, WaitingRef};

/// A decision that a fire key has.
pub(super) struct Decided {
    kind: DecisionKind,
    execution: Option<ExecutionId>,
    /// In a sentence, for the one that replaces it.
    before: String,
}

/// What the transaction knows of one job, its own effects included.
#[derive(Default)]
pub(super) struct JobState {
    pub(super) version: u32,
    paused_by: Option<String>,
    next_fire_ms: Option<i64>,
    pub(super) active: Vec<ExecutionId>,
    decided: HashMap<String, Decided>,
    /// Firings that wait for the job to be free.
    pub(super) queued: usize,
    /// Jobs that follow it.
    pub(super) downstream: Vec<JobId>,
    /// Somebody else holds its row; nothing may be decided.
    pub(super) held: bool,
}

/// All of the batch.
pub(super) struct State {
    pub(super) jobs: HashMap<JobId, JobState>,
    /// Pauses of more than one job, by scope.
    pauses: HashMap<String, String>,
    /// The batch's waiting rows that are still there.
    waiting: HashSet<i64>,
}

impl State {
    /// Whether a row of what waits, if the intent comes from one, is still there.
    pub(super) fn still_waits(&self, intent: &FireIntent) -> bool {
        intent.extra.waiting.is_none_or(|at| self.waiting.contains(&at.id))
    }

    pub(super) fn paused_by(&self, job: &JobState, tier: &str) -> Option<String> {
        let of = |scope: &str, words: &str| self.pauses.get(scope).map(|who| format!("{who} ({words})"));
        job.paused_by
            .clone()
            .or_else(|| of(&format!("tier:{tier}"), &format!("with all of tier {tier}")))
            .or_else(|| of("all", "with all jobs"))
    }
}

impl JobState {
    pub(super) fn now(&self, intent: &FireIntent, paused_by: Option<String>) -> JobNow {
        let found = self.decided.get(&intent.fire_key);
        let kind = intent.extra.waiting.map(|at: WaitingRef| at.kind);
        let decided = found.is_some_and(|decided| match kind {
            // A follower whose upstream failed may look again once the upstream's notes are back: somebody let it run again.
            None => decided.kind != DecisionKind::SkippedUpstream || intent.extra.watches.is_empty(),
            // Its own "waiting" is what it is here to replace.
            Some(WaitingKind::Future | WaitingKind::Queued) => decided.kind != DecisionKind::Waiting,
            Some(WaitingKind::Backfill) => false,
        });
        JobNow {
            paused_by,
            active: self.active.clone(),
            existing: found.and_then(|d| d.execution),
            decided,
            waiting: self.queued,
            turn: matches!(kind, Some(WaitingKind::Queued | WaitingKind::Backfill)),
        }
    }

    /// What the fire key had before, if it had a decision.
    pub(super) fn before(&self, fire_key: &str) -> Option<&str> {
        self.decided.get(fire_key).map(|d| d.before.as_str())
    }

    pub(super) fn note(&mut self, fire_key: &str, kind: DecisionKind, execution: Option<ExecutionId>) {
        let execution = execution.filter(|_| kind == DecisionKind::Fired);
        self.decided.insert(fire_key.to_owned(), Decided { kind, execution, before: kind.word().into() });
    }
}

/// Checks the fence, locks the batch's jobs in the order of their ids and reads what the decisions need, in few statements. Whose row is locked by somebody else is left out: one job that is held must not make all others late (case D-09).
///
/// `trusting`: earlier decisions are not looked for where the job's row says that there can be none.
pub(super) async fn read_state(tx: &mut Tx, epoch: Epoch, intents: &[FireIntent], trusting: bool) -> Outcome<State> {
    let ids: BTreeSet<i64> = intents.iter().map(|i| i.job.0).collect();
    let list = number_list(&ids);
    let lock = tx.dialect().for_update_skipping();
    let mut jobs: HashMap<JobId, JobState> = HashMap::new();
    let sql = format!(
        "SELECT id, version, paused_by, next_fire_ms FROM jobs WHERE id IN ({list}) AND {LIVING} ORDER BY id{lock}"
    );
    // In a message of its own, so that a deposed leader locks no job, which its successor would find busy until that is rolled back.
    check_fence(tx, epoch).await?;
    for row in tx.raw_rows(&sql).await? {
        let (version, paused_by, next_fire_ms) = (row.count(1)?, row.opt_text(2)?, row.opt_int(3)?);
        jobs.insert(JobId(row.int(0)?), JobState { version, paused_by, next_fire_ms, ..JobState::default() });
    }
    if jobs.len() < ids.len() {
        let missing = number_list(ids.iter().filter(|id| !jobs.contains_key(&JobId(**id))));
        let sql = format!("SELECT id, version FROM jobs WHERE id IN ({missing}) AND {LIVING}");
        for row in tx.raw_rows(&sql).await? {
            let state = JobState { version: row.count(1)?, held: true, ..JobState::default() };
            jobs.insert(JobId(row.int(0)?), state);
        }
    }
    // What may run beside others is not asked what runs.
    let alone = |intent: &&FireIntent| {
        intent.extra.waiting.is_some()
            || matches!(&intent.action, FireAction::Fire(new) if new.overlap != OverlapPolicy::Allow)
    };
    let alone: BTreeSet<i64> = intents.iter().filter(alone).map(|i| i.job.0).collect();
    if !alone.is_empty() {
        let list = number_list(&alone);
        let sql = format!("SELECT job_id, id FROM executions WHERE state = 0 AND job_id IN ({list}) ORDER BY id");
        for row in tx.raw_rows(&sql).await? {
            if let Some(state) = jobs.get_mut(&JobId(row.int(0)?)) {
                state.active.push(row.id(1, ExecutionId::from_slice)?);
            }
        }
    }
    lock_what_may_be_replaced(tx, intents, &mut jobs).await?;
    read_decided(tx, intents, trusting, &mut jobs).await?;
    let mut state = State { jobs, pauses: HashMap::new(), waiting: HashSet::new() };
    read_around(tx, intents, &list, &mut state).await?;
    Ok(state)
}

/// An execution that is to be cancelled is read under a lock, so that one that ends at this moment is not said to be cancelled.
async fn lock_what_may_be_replaced(
    tx: &mut Tx,
    intents: &[FireIntent],
    jobs: &mut HashMap<JobId, JobState>,
) -> Outcome<()> {
    let replaces = |intent: &&FireIntent| matches!(&intent.action, FireAction::Fire(new) if new.overlap == OverlapPolicy::CancelRunning);
    let of: BTreeSet<JobId> = intents.iter().filter(replaces).map(|i| i.job).collect();
    for job in of {
        let Some(state) = jobs.get_mut(&job).filter(|state| !state.active.is_empty()) else { continue };
        let lock = tx.dialect().for_update();
        let sql = format!("SELECT id FROM executions WHERE state = 0 AND job_id = {job} ORDER BY id{lock}");
        let rows = tx.raw_rows(&sql).await?;
        state.active = rows.iter().map(|row| row.id(0, ExecutionId::from_slice)).collect::<Outcome<_>>()?;
    }
    Ok(())
}

/// The leader moves a job's next instant with the decisions about all before it, so that none from there on has one, but for a
/// backfill's: that is met by its key.
fn is_undecided(intent: &FireIntent, jobs: &HashMap<JobId, JobState>) -> bool {
    let next = jobs.get(&intent.job).and_then(|job| job.next_fire_ms);
    intent.scheduled && intent.extra.waiting.is_none() && next.is_some_and(|next| intent.nominal_ms >= next)
}

async fn read_decided(
    tx: &mut Tx,
    intents: &[FireIntent],
    trusting: bool,
    jobs: &mut HashMap<JobId, JobState>,
) -> Outcome<()> {
    let mut keys = String::new();
    for intent in intents.iter().filter(|intent| !trusting || !is_undecided(intent, jobs)) {
        let or = if keys.is_empty() { "" } else { " OR " };
        // Writing to a String can't fail.
        let _ = write!(keys, "{or}(job_id = {} AND fire_key = {})", intent.job.0, tx.dialect().text(&intent.fire_key));
    }
    if keys.is_empty() {
        return Ok(());
    }
    let sql = format!("SELECT job_id, fire_key, kind, execution_id, reason, decided_ms FROM decisions WHERE {keys}");
    for row in tx.raw_rows(&sql).await? {
        let Some(state) = jobs.get_mut(&JobId(row.int(0)?)) else { continue };
        let code = row.int(2)?;
        let kind = DecisionKind::from_code(code)
            .ok_or_else(|| crate::sql::fault::Fault::corrupt(format!("a decision's kind is {code}")))?;
        let execution = row.opt_id(3, ExecutionId::from_slice)?.filter(|_| kind == DecisionKind::Fired);
        let since = rfc3339(row.int(5)?);
        let reason = row.opt_text(4)?.unwrap_or_default();
        let before = match kind {
            DecisionKind::Waiting => format!("waited since {since}: {reason}"),
            kind => format!("decided before, at {since}, as {}: {reason}", kind.word()),
        };
        state.decided.insert(row.text(1)?, Decided { kind, execution, before });
    }
    Ok(())
}

/// Pauses, queues, followers and waiting rows, in one round trip.
async fn read_around(tx: &mut Tx, intents: &[FireIntent], list: &str, state: &mut State) -> Outcome<()> {
    let mut sql = format!(
        "SELECT 0, 0, 0, scope, paused_by FROM pauses \
         UNION ALL SELECT 1, job_id, COUNT(*), NULL, NULL FROM waiting WHERE kind = {} AND job_id IN ({list}) GROUP BY job_id \
         UNION ALL SELECT 2, upstream_id, job_id, NULL, NULL FROM job_edges WHERE upstream_id IN ({list})",
        WaitingKind::Queued.code()
    );
    let waiting: BTreeSet<i64> = intents.iter().filter_map(|i| i.extra.waiting.map(|at| at.id)).collect();
    if !waiting.is_empty() {
        // Writing to a String can't fail.
        let _ =
            write!(sql, " UNION ALL SELECT 3, id, 0, NULL, NULL FROM waiting WHERE id IN ({})", number_list(&waiting));
    }
    for row in tx.raw_rows(&sql).await? {
        let (what, a, b) = (row.int(0)?, row.int(1)?, row.int(2)?);
        match what {
            0 => {
                state.pauses.insert(row.text(3)?, row.text(4)?);
            }
            1 => {
                if let Some(job) = state.jobs.get_mut(&JobId(a)) {
                    job.queued = usize::try_from(b).unwrap_or(usize::MAX);
                }
            }
            2 => {
                if let Some(job) = state.jobs.get_mut(&JobId(a)) {
                    job.downstream.push(JobId(b));
                }
            }
            _ => {
                state.waiting.insert(a);
            }
        }
    }
    Ok(())
}
