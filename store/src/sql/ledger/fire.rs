//! Firings: the decision inside the transaction, and what it writes.

use super::leader::check_fence;
use super::too_many;
use crate::error::{Result, StoreError};
use crate::rows::{DecisionRow, FireAction, FireIntent, FireOutcome, NewExecution};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, hex, number_list};
use shardcron_domain::firing::{DecisionKind, JobNow, Verdict, decide};
use shardcron_domain::limits::{ERROR_BYTES, FIRE_KEY_BYTES, FIRINGS_PER_WRITE, SHARD_ROWS_PER_WRITE};
use shardcron_domain::{Epoch, ExecutionId, JobId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

/// Bounds that would otherwise fail the whole batch at the server, or cut a key silently.
pub(crate) fn check_batch(intents: &[FireIntent]) -> Result<()> {
    if intents.len() > FIRINGS_PER_WRITE {
        return Err(too_many("firings", intents.len(), FIRINGS_PER_WRITE));
    }
    match intents.iter().find(|i| i.fire_key.len() > FIRE_KEY_BYTES || i.fire_key.contains('\0')) {
        Some(bad) => Err(StoreError::Invalid(format!(
            "the fire key of job {} has {} bytes or a NUL character; at most {FIRE_KEY_BYTES} bytes are possible",
            bad.job,
            bad.fire_key.len()
        ))),
        None => Ok(()),
    }
}

/// What the transaction knows of one job, its own effects included.
#[derive(Default)]
struct JobState {
    version: u32,
    paused_by: Option<String>,
    active: Vec<ExecutionId>,
    /// Decided fire keys, with the execution where one was made.
    decided: HashMap<String, Option<ExecutionId>>,
    /// Somebody else holds its row; nothing may be decided.
    held: bool,
}

impl JobState {
    fn now(&self, fire_key: &str) -> JobNow {
        let decided = self.decided.get(fire_key);
        JobNow {
            paused_by: self.paused_by.clone(),
            active: self.active.clone(),
            existing: decided.copied().flatten(),
            decided: decided.is_some(),
        }
    }
}

/// What is to be written, collected over the batch so that the number of statements does not grow with it.
struct Writes {
    executions: Bulk,
    shards: Bulk,
    decisions: Bulk,
    next: BTreeMap<JobId, Option<i64>>,
}

impl SqlLedger {
    pub(super) async fn write_firings(
        &self,
        epoch: Epoch,
        intents: &[FireIntent],
        now_ms: i64,
    ) -> Outcome<Vec<FireOutcome>> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let mut jobs = read_state(&mut tx, intents).await?;
        let mut writes = Writes {
            executions: Bulk::new(
                "INSERT INTO executions (id, job_id, version, fire_key, state, tier, nominal_ms, fired_ms, epoch, timeout_ms, \
                 plan, params, shards_total, materialized, stall_ms) VALUES ",
                "",
            ),
            shards: Bulk::new("INSERT INTO shards (execution_id, shard_index) VALUES ", ""),
            decisions: Bulk::new(
                "INSERT INTO decisions (job_id, fire_key, nominal_ms, kind, reason, decided_ms, epoch, execution_id) VALUES ",
                "",
            ),
            next: BTreeMap::new(),
        };
        let mut outcomes = Vec::with_capacity(intents.len());
        for intent in intents {
            outcomes.push(settle(&tx, &mut jobs, &mut writes, (epoch, intent, now_ms))?);
        }
        // A unique key that exists although the look did not find it: a leader of an epoch that this one has just deposed, or a
        // row that retention left. Looked at again, it is a duplicate.
        let moved = |fault| match fault {
            Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
            other => other,
        };
        let mut statements = writes.executions.into_statements();
        statements.extend(writes.shards.into_statements());
        statements.extend(writes.decisions.into_statements());
        statements.extend(move_next(&writes.next));
        tx.raw_batch(&statements).await.map_err(moved)?;
        tx.commit().await?;
        Ok(outcomes)
    }

    pub(super) async fn read_decision(&self, job: JobId, fire_key: &str) -> Outcome<Option<DecisionRow>> {
        let sql = format!("SELECT {DECISION} FROM decisions WHERE job_id = ? AND fire_key = ?");
        let rows = self.db.rows(&sql, &[job.0.into(), fire_key.into()]).await?;
        rows.first().map(decision_row).transpose()
    }

    pub(super) async fn read_decisions(
        &self,
        job: JobId,
        from_ms: i64,
        to_ms: i64,
        limit: usize,
    ) -> Outcome<Vec<DecisionRow>> {
        let sql = format!(
            "SELECT {DECISION} FROM decisions WHERE job_id = ? AND nominal_ms BETWEEN ? AND ? \
             ORDER BY nominal_ms, fire_key LIMIT ?"
        );
        let rows = self.db.rows(&sql, &[job.0.into(), from_ms.into(), to_ms.into(), limit.into()]).await?;
        rows.iter().map(decision_row).collect()
    }
}

const DECISION: &str = "fire_key, nominal_ms, kind, reason, decided_ms, epoch, execution_id";

fn decision_row(row: &Row) -> Outcome<DecisionRow> {
    let code = row.int(2)?;
    Ok(DecisionRow {
        fire_key: row.text(0)?,
        nominal_ms: row.int(1)?,
        kind: DecisionKind::from_code(code).ok_or_else(|| Fault::corrupt(format!("a decision's kind is {code}")))?,
        reason: row.opt_text(3)?,
        decided_ms: row.int(4)?,
        epoch: Epoch(row.int(5)?),
        execution: row.opt_id(6, ExecutionId::from_slice)?,
    })
}

/// Locks the batch's jobs in the order of their ids and reads what the decisions need, in three statements. Whose row is locked by
/// somebody else is left out: one job that is held must not make all others late (case D-09).
async fn read_state(tx: &mut Tx, intents: &[FireIntent]) -> Outcome<HashMap<JobId, JobState>> {
    let ids: BTreeSet<i64> = intents.iter().map(|i| i.job.0).collect();
    let list = number_list(&ids);
    let lock = tx.dialect().for_update_skipping();
    let mut jobs: HashMap<JobId, JobState> = HashMap::new();
    let sql = format!(
        "SELECT id, version, paused_by FROM jobs WHERE id IN ({list}) \
         AND NOT EXISTS (SELECT 1 FROM deleted_jobs d WHERE d.job_id = jobs.id) ORDER BY id{lock}"
    );
    for row in tx.raw_rows(&sql).await? {
        let state = JobState { version: row.count(1)?, paused_by: row.opt_text(2)?, ..JobState::default() };
        jobs.insert(JobId(row.int(0)?), state);
    }
    if jobs.len() < ids.len() {
        let missing = number_list(ids.iter().filter(|id| !jobs.contains_key(&JobId(**id))));
        for row in tx.raw_rows(&format!("SELECT id, version FROM jobs WHERE id IN ({missing})")).await? {
            let state = JobState { version: row.count(1)?, held: true, ..JobState::default() };
            jobs.insert(JobId(row.int(0)?), state);
        }
    }
    let sql = format!("SELECT job_id, id FROM executions WHERE state = 0 AND job_id IN ({list}) ORDER BY id");
    for row in tx.raw_rows(&sql).await? {
        if let Some(state) = jobs.get_mut(&JobId(row.int(0)?)) {
            state.active.push(row.id(1, ExecutionId::from_slice)?);
        }
    }
    let mut keys = String::new();
    for intent in intents {
        let or = if keys.is_empty() { "" } else { " OR " };
        // Writing to a String can't fail.
        let _ = write!(keys, "{or}(job_id = {} AND fire_key = {})", intent.job.0, tx.dialect().text(&intent.fire_key));
    }
    let sql = format!("SELECT job_id, fire_key, kind, execution_id FROM decisions WHERE {keys}");
    for row in tx.raw_rows(&sql).await? {
        let fired = row.int(2)? == DecisionKind::Fired.code();
        let execution = row.opt_id(3, ExecutionId::from_slice)?.filter(|_| fired);
        if let Some(state) = jobs.get_mut(&JobId(row.int(0)?)) {
            state.decided.insert(row.text(1)?, execution);
        }
    }
    Ok(jobs)
}

/// One intent: decided on the state so far, which then holds its effects, so that the batch's next intent of the job sees them.
fn settle(
    tx: &Tx,
    jobs: &mut HashMap<JobId, JobState>,
    writes: &mut Writes,
    (epoch, intent, now_ms): (Epoch, &FireIntent, i64),
) -> Outcome<FireOutcome> {
    let Some(state) = jobs.get_mut(&intent.job).filter(|state| state.version == intent.version) else {
        return Ok(FireOutcome::Stale);
    };
    if state.held {
        return Ok(FireOutcome::Busy);
    }
    if let Some(next) = intent.next_fire_ms {
        writes.next.insert(intent.job, next);
    }
    let now = state.now(&intent.fire_key);
    let (kind, reason, execution) = match &intent.action {
        FireAction::Fire(new) => match decide(new.overlap, &now, intent.scheduled) {
            // The answer to an earlier call with this very execution was lost.
            Verdict::Duplicate(Some(existing)) if existing == new.id => return Ok(FireOutcome::Fired(existing)),
            Verdict::Duplicate(existing) => return Ok(FireOutcome::Duplicate(existing)),
            Verdict::Skip(kind, reason, blocking) => (kind, Some(reason), blocking),
            Verdict::Fire => {
                write_execution(tx, writes, new, (epoch, intent, now_ms))?;
                state.active.push(new.id);
                (DecisionKind::Fired, None, Some(new.id))
            }
        },
        FireAction::Record { .. } if now.existing.is_some() || now.decided => {
            return Ok(FireOutcome::Duplicate(now.existing));
        }
        FireAction::Record { kind, reason } => (*kind, Some(kept(reason, ERROR_BYTES)), None),
    };
    let fired = kind == DecisionKind::Fired;
    state.decided.insert(intent.fire_key.clone(), execution.filter(|_| fired));
    writes.decisions.push_row(
        tx.dialect(),
        &[
            intent.job.0.into(),
            intent.fire_key.as_str().into(),
            intent.nominal_ms.into(),
            kind.code().into(),
            reason.as_deref().into(),
            now_ms.into(),
            epoch.0.into(),
            execution.as_ref().map(|e| e.as_bytes()).into(),
        ],
    );
    Ok(match (execution, fired) {
        (Some(id), true) => FireOutcome::Fired(id),
        (blocking, _) => FireOutcome::Skipped { kind, reason: reason.unwrap_or_default(), blocking },
    })
}

fn write_execution(
    tx: &Tx,
    writes: &mut Writes,
    new: &NewExecution,
    (epoch, intent, now_ms): (Epoch, &FireIntent, i64),
) -> Outcome<()> {
    let json = |e: serde_json::Error| Fault::invalid(format!("the execution can't be written as JSON: {e}"));
    let total = new.plan.count();
    let first = total.min(SHARD_ROWS_PER_WRITE);
    writes.executions.push_row(
        tx.dialect(),
        &[
            new.id.as_bytes().into(),
            intent.job.0.into(),
            intent.version.into(),
            intent.fire_key.as_str().into(),
            0_i64.into(),
            new.tier.as_str().into(),
            intent.nominal_ms.into(),
            now_ms.into(),
            epoch.0.into(),
            new.timeout_ms.into(),
            serde_json::to_string(&new.plan).map_err(json)?.into(),
            serde_json::to_string(&new.params).map_err(json)?.into(),
            total.into(),
            first.into(),
            new.stall_ms.into(),
        ],
    );
    push_shards(&mut writes.shards, new.id, 0..first);
    Ok(())
}

/// Adds rows of new shards; all but the key are the columns' defaults.
pub(super) fn push_shards(bulk: &mut Bulk, execution: ExecutionId, indexes: std::ops::Range<u32>) {
    let id = hex(execution.as_bytes());
    for index in indexes {
        bulk.push(|text| {
            text.push_str(&id);
            // Writing to a String can't fail.
            let _ = write!(text, ",{index}");
        });
    }
}

/// Moves the jobs' next instants, all in one statement.
fn move_next(next: &BTreeMap<JobId, Option<i64>>) -> Option<String> {
    if next.is_empty() {
        return None;
    }
    let mut cases = String::new();
    for (job, instant) in next {
        let instant = instant.map_or_else(|| "NULL".to_owned(), |ms| ms.to_string());
        // Writing to a String can't fail.
        let _ = write!(cases, " WHEN {job} THEN {instant}");
    }
    let list = number_list(next.keys());
    Some(format!("UPDATE jobs SET next_fire_ms = CASE id{cases} END WHERE id IN ({list})"))
}
