//! Firings: the decision inside the transaction, and what it writes.

use super::cancel::{CANCELLED_BY, cancel_statements};
use super::fire_state::{State, read_state};
use super::too_many;
use crate::error::{Result, StoreError};
use crate::firing_rows::WaitingKind;
use crate::rows::{DecisionRow, FireAction, FireIntent, FireOutcome, NewExecution};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::dialect::Dialect;
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, hex, number_list};
use shardcron_domain::firing::{DecisionKind, Verdict, decide};
use shardcron_domain::limits::{ERROR_BYTES, FIRE_KEY_BYTES, FIRINGS_PER_WRITE, SHARD_ROWS_PER_WRITE};
use shardcron_domain::{Epoch, ExecutionId, JobId};
use std::collections::BTreeMap;
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

/// What is to be written, collected over the batch so that the number of statements does not grow with it.
struct Writes {
    executions: Bulk,
    shards: Bulk,
    decisions: Bulk,
    /// Decisions in the place of earlier ones.
    replaced: Bulk,
    watches: Bulk,
    addressed: Bulk,
    waiting: Bulk,
    /// Rows of what waits: those that now wait for their job to be free, and those that have had their turn.
    queued_now: Vec<i64>,
    waited: Vec<i64>,
    /// Ends of upstreams.
    taken_up: Vec<i64>,
    cancels: Vec<String>,
    next: BTreeMap<JobId, Option<i64>>,
}

impl Writes {
    fn new(dialect: Dialect) -> Self {
        let decisions = "INSERT INTO decisions (job_id, fire_key, nominal_ms, kind, reason, decided_ms, epoch, execution_id) VALUES ";
        let tail = dialect
            .upsert("job_id, fire_key", &["nominal_ms", "kind", "reason", "decided_ms", "epoch", "execution_id"]);
        Writes {
            executions: Bulk::new(
                "INSERT INTO executions (id, job_id, version, fire_key, state, tier, nominal_ms, fired_ms, epoch, timeout_ms, \
                 plan, params, shards_total, materialized, stall_ms) VALUES ",
                "",
            ),
            shards: Bulk::new("INSERT INTO shards (execution_id, shard_index) VALUES ", ""),
            decisions: Bulk::new(decisions, ""),
            replaced: Bulk::new(decisions, tail),
            addressed: Bulk::new("INSERT INTO addressed (incarnation, execution_id, shard_index) VALUES ", ""),
            watches: Bulk::new("INSERT INTO watches (job_id, upstream_id, execution_id) VALUES ", ""),
            waiting: Bulk::new(
                "INSERT INTO waiting (job_id, fire_key, nominal_ms, kind, scheduled, not_before_ms, request, put_ms) VALUES ",
                "",
            ),
            queued_now: Vec::new(),
            waited: Vec::new(),
            taken_up: Vec::new(),
            cancels: Vec::new(),
            next: BTreeMap::new(),
        }
    }

    fn into_statements(self) -> Vec<String> {
        let bulks =
            [self.executions, self.shards, self.addressed, self.watches, self.decisions, self.replaced, self.waiting];
        let mut statements: Vec<String> = bulks.into_iter().flat_map(Bulk::into_statements).collect();
        if !self.queued_now.is_empty() {
            let list = number_list(&self.queued_now);
            statements.push(format!("UPDATE waiting SET kind = {} WHERE id IN ({list})", WaitingKind::Queued.code()));
        }
        for (table, ids) in [("waiting", self.waited), ("watches", self.taken_up)] {
            if !ids.is_empty() {
                statements.push(format!("DELETE FROM {table} WHERE id IN ({})", number_list(&ids)));
            }
        }
        // After the inserts: a batch may replace what it has made itself.
        statements.extend(self.cancels);
        statements.extend(move_next(&self.next));
        statements
    }
}

impl SqlLedger {
    pub(super) async fn write_firings(
        &self,
        epoch: Epoch,
        intents: &[FireIntent],
        now_ms: i64,
        trusting: bool,
    ) -> Outcome<Vec<FireOutcome>> {
        let mut tx = self.db.begin().await?;
        let mut state = read_state(&mut tx, epoch, intents, trusting).await?;
        let mut writes = Writes::new(tx.dialect());
        let mut outcomes = Vec::with_capacity(intents.len());
        for intent in intents {
            outcomes.push(settle(&tx, &mut state, &mut writes, (epoch, intent, now_ms))?);
        }
        // A unique key that exists although nothing was found or looked for: a backfill was faster, a leader of an epoch that this one
        // has just deposed, or a row that retention left. Looked at again, it is a duplicate.
        let moved = |fault| match fault {
            Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
            other => other,
        };
        let statements = writes.into_statements();
        tx.raw_batch(&statements).await.map_err(moved)?;
        tx.commit().await?;
        Ok(outcomes)
    }

    pub(super) async fn read_decision(&self, job: JobId, fire_key: &str) -> Outcome<Option<DecisionRow>> {
        let sql = format!("SELECT {DECISION} FROM decisions WHERE job_id = ? AND fire_key = ?");
        let rows = self.db.rows(&sql, &[job.0.into(), fire_key.into()]).await?;
        rows.first().map(decision_row).transpose()
    }

    pub(super) async fn read_latest_decision(&self, job: JobId) -> Outcome<Option<DecisionRow>> {
        // Of the latest instants the one that was decided last; a backfill's past instants are asked for by name.
        let sql = format!(
            "SELECT {DECISION} FROM decisions WHERE job_id = ? ORDER BY nominal_ms DESC, decided_ms DESC LIMIT 1"
        );
        let rows = self.db.rows(&sql, &[job.0.into()]).await?;
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

/// One intent: decided on the state so far, which then holds its effects, so that the batch's next intent of the job sees them.
fn settle(
    tx: &Tx,
    state: &mut State,
    writes: &mut Writes,
    (epoch, intent, now_ms): (Epoch, &FireIntent, i64),
) -> Outcome<FireOutcome> {
    let Some(job) = state.jobs.get(&intent.job).filter(|job| job.version == intent.version) else {
        return Ok(FireOutcome::Stale);
    };
    if job.held {
        return Ok(FireOutcome::Busy);
    }
    if let Some(next) = intent.next_fire_ms {
        writes.next.insert(intent.job, next);
    }
    let paused_by = match &intent.action {
        FireAction::Fire(new) => state.paused_by(job, &new.tier),
        FireAction::Hold { .. } | FireAction::Record { .. } => None,
    };
    let now = job.now(intent, paused_by);
    let still_waits = state.still_waits(intent);
    let Some(job) = state.jobs.get_mut(&intent.job) else { return Ok(FireOutcome::Stale) };
    let duplicate = |existing: Option<ExecutionId>, writes: &mut Writes| {
        take_up(writes, intent);
        FireOutcome::Duplicate(existing)
    };
    let note = intent.extra.request.note.as_deref();
    let (kind, reason, execution) = match &intent.action {
        _ if !still_waits && now.existing.is_none() => return Ok(duplicate(None, writes)),
        FireAction::Fire(new) => match decide(new.overlap, &now, intent.scheduled) {
            // The answer to an earlier call with this very execution was lost.
            Verdict::Duplicate(Some(existing)) if existing == new.id => return Ok(FireOutcome::Fired(existing)),
            Verdict::Duplicate(existing) => return Ok(duplicate(existing, writes)),
            Verdict::NotYet => return Ok(FireOutcome::NotYet),
            Verdict::Skip(kind, reason, blocking) => (kind, Some(reason), blocking),
            Verdict::Wait(reason, blocking) => {
                hold(tx, writes, (intent, WaitingKind::Queued, now_ms, now_ms))?;
                job.queued += 1;
                (DecisionKind::Waiting, Some(reason), blocking)
            }
            verdict => {
                let mut words: Vec<String> = note.map(str::to_owned).into_iter().collect();
                if let Verdict::Replace(running) = verdict {
                    for old in running {
                        let why = format!(
                            "replaced by execution {} for {}, as the overlap policy says",
                            new.id, intent.fire_key
                        );
                        writes.cancels.extend(cancel_statements(tx.dialect(), old, (CANCELLED_BY, &why, now_ms)));
                        words.push(format!(
                            "execution {old} still ran and was cancelled (overlap policy cancel_running)"
                        ));
                    }
                    job.active.clear();
                }
                words.extend(job.before(&intent.fire_key).map(str::to_owned));
                write_execution(tx, writes, new, (epoch, intent, now_ms))?;
                for downstream in &job.downstream {
                    let row = [downstream.0.into(), intent.job.0.into(), new.id.as_bytes().into()];
                    writes.watches.push_row(tx.dialect(), &row);
                }
                job.active.push(new.id);
                let words = Some(words.join("; ")).filter(|text| !text.is_empty());
                (DecisionKind::Fired, words, Some(new.id))
            }
        },
        _ if now.existing.is_some() || now.decided => return Ok(duplicate(now.existing, writes)),
        FireAction::Hold { until_ms, reason } => {
            hold(tx, writes, (intent, WaitingKind::Future, *until_ms, now_ms))?;
            (DecisionKind::Waiting, Some(reason.clone()), None)
        }
        FireAction::Record { kind, reason } => (*kind, Some(reason.clone()), None),
    };
    let reason = reason.map(|text| kept(&text, ERROR_BYTES));
    let replaces = job.before(&intent.fire_key).is_some();
    job.note(&intent.fire_key, kind, execution);
    if kind != DecisionKind::Waiting {
        take_up(writes, intent);
    } else {
        writes.taken_up.extend(&intent.extra.watches);
    }
    let bulk = if replaces { &mut writes.replaced } else { &mut writes.decisions };
    bulk.push_row(
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
    Ok(match (kind, execution) {
        (DecisionKind::Fired, Some(id)) => FireOutcome::Fired(id),
        (DecisionKind::Waiting, blocking) => FireOutcome::Waiting { reason: reason.unwrap_or_default(), blocking },
        (kind, blocking) => FireOutcome::Skipped { kind, reason: reason.unwrap_or_default(), blocking },
    })
}

/// The rows that an intent comes from are gone with its decision.
fn take_up(writes: &mut Writes, intent: &FireIntent) {
    writes.waited.extend(intent.extra.waiting.map(|at| at.id));
    writes.taken_up.extend(&intent.extra.watches);
}

/// Keeps a firing for later: a new row, or a row that was kept for its instant and now waits for the job to be free.
fn hold(
    tx: &Tx,
    writes: &mut Writes,
    (intent, kind, not_before_ms, now_ms): (&FireIntent, WaitingKind, i64, i64),
) -> Outcome<()> {
    if let Some(at) = intent.extra.waiting {
        writes.queued_now.push(at.id);
        return Ok(());
    }
    let request = serde_json::to_string(&intent.extra.request)
        .map_err(|e| Fault::invalid(format!("what was asked for can't be written as JSON: {e}")))?;
    writes.waiting.push_row(
        tx.dialect(),
        &[
            intent.job.0.into(),
            intent.fire_key.as_str().into(),
            intent.nominal_ms.into(),
            kind.code().into(),
            i64::from(intent.scheduled).into(),
            not_before_ms.into(),
            request.into(),
            now_ms.into(),
        ],
    );
    Ok(())
}

fn write_execution(
    tx: &Tx,
    writes: &mut Writes,
    new: &NewExecution,
    (epoch, intent, now_ms): (Epoch, &FireIntent, i64),
) -> Outcome<()> {
    let json = |e: serde_json::Error| Fault::invalid(format!("the execution can't be written as JSON: {e}"));
    let total = new.plan.count();
    if new.plan.is_later() {
        return Err(Fault::invalid("an execution without a plan; it is made before the firing"));
    }
    // Nothing hands out the shards of a broadcast, so nothing would write its further rows.
    let all = new.plan.addressee(0).is_some();
    let first = if all { total } else { total.min(SHARD_ROWS_PER_WRITE) };
    writes.executions.push_row(
        tx.dialect(),
        &[
            new.id.as_bytes().into(),
            intent.job.0.into(),
            intent.version.into(),
            intent.fire_key.as_str().into(),
            0_i64.into(),
            new.plan.handed_out_by(&new.tier).into(),
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
    for index in 0..total {
        let Some(worker) = new.plan.addressee(index) else { break };
        let row = [worker.incarnation.as_bytes().into(), new.id.as_bytes().into(), index.into()];
        writes.addressed.push_row(tx.dialect(), &row);
    }
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

/// Instants of one batch that are moved to by statements of their own. What is due together, as at midnight, is mostly due together
/// again.
const OWN_STATEMENTS: usize = 8;

/// Moves the jobs' next instants: those of the commonest instants each in one statement, and all the others in one, in which the
/// server goes through its cases for each row.
fn move_next(next: &BTreeMap<JobId, Option<i64>>) -> Vec<String> {
    let sql = |instant: Option<i64>| instant.map_or_else(|| "NULL".to_owned(), |ms| ms.to_string());
    let mut of_instant: BTreeMap<Option<i64>, Vec<JobId>> = BTreeMap::new();
    for (job, instant) in next {
        of_instant.entry(*instant).or_default().push(*job);
    }
    let mut groups: Vec<(Option<i64>, Vec<JobId>)> = of_instant.into_iter().collect();
    groups.sort_by_key(|(_, jobs)| std::cmp::Reverse(jobs.len()));
    let others = groups.split_off(groups.len().min(OWN_STATEMENTS));
    let mut statements: Vec<String> = groups
        .into_iter()
        .map(|(instant, jobs)| {
            format!("UPDATE jobs SET next_fire_ms = {} WHERE id IN ({})", sql(instant), number_list(jobs))
        })
        .collect();
    if !others.is_empty() {
        let (mut cases, mut jobs) = (String::new(), Vec::new());
        for (instant, of_it) in others {
            for job in of_it {
                // Writing to a String can't fail.
                let _ = write!(cases, " WHEN {job} THEN {}", sql(instant));
                jobs.push(job);
            }
        }
        let list = number_list(jobs);
        statements.push(format!("UPDATE jobs SET next_fire_ms = CASE id{cases} END WHERE id IN ({list})"));
    }
    statements
}
