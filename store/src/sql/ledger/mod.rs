//! The ledger's port over SQL, one file for each duty.

mod addressed;
mod cancel;
mod change;
mod claim;
mod dead;
mod delayed;
mod dispatch;
mod edges;
mod effects;
mod emitted;
mod fire;
mod fire_state;
mod follow;
mod jobs;
mod leader;
mod look;
mod once;
mod ops;
mod output;
mod planning;
mod polling;
mod prune;
mod record;
mod reopen;
mod rows;
mod scopes;
mod sharding;
mod step;
mod supervise;
mod takeover;
mod triggers;
mod waiting;

pub(super) use leader::version_fault;
pub(super) use prune::Paces;

/// What the inbox of another database does the same way.
pub(super) mod shared {
    pub(in crate::sql) use super::rows::{checkpoint_from, checkpoint_text};
    pub(in crate::sql) use super::step::{check_step, run_users};
}

use super::SqlLedger;
use super::fault::{Fault, with_retries};
use crate::error::{Result, StoreError};
use crate::firing_port::FiringLedger;
use crate::firing_rows::*;
use crate::job_rows::*;
use crate::ledger::{Ledger, PollCursor, Verdicts};
use crate::output_rows::*;
use crate::rows::*;
use async_trait::async_trait;
use shardcron_domain::invariants::Tally;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, ShardRef, execution};

#[async_trait]
impl Ledger for SqlLedger {
    async fn migrate(&self) -> Result<()> {
        with_retries!(super::migrate::migrate(&self.db))
    }

    async fn server_version(&self) -> Result<String> {
        with_retries!(self.read_version())
    }

    async fn check_server(&self) -> Result<Vec<String>> {
        with_retries!(self.read_faults())
    }

    async fn server_now_ms(&self) -> Result<i64> {
        with_retries!(self.read_now())
    }

    async fn begin_epoch(&self, holder: &str, now_ms: i64) -> Result<Epoch> {
        with_retries!(self.next_epoch(holder, now_ms))
    }

    async fn leadership(&self) -> Result<Leadership> {
        with_retries!(self.read_leadership())
    }

    async fn change_jobs(&self, changes: &JobChanges, who: &str, now_ms: i64) -> Result<Changed> {
        change::check_batch(changes)?;
        with_retries!(self.write_changes(changes, who, now_ms))
    }

    async fn job_versions(&self, name: &str, limit: usize) -> Result<Vec<VersionRow>> {
        with_retries!(self.read_versions(name, None, limit))
    }

    async fn job_version(&self, name: &str, version: u32) -> Result<Option<VersionRow>> {
        Ok(with_retries!(self.read_versions(name, Some(version), 1))?.pop())
    }

    async fn jobs_of_source(&self, source: &str) -> Result<Vec<(String, u32)>> {
        with_retries!(self.read_source(source))
    }

    async fn jobs(&self) -> Result<Vec<JobRecord>> {
        with_retries!(self.read_jobs(None))
    }

    async fn job(&self, name: &str) -> Result<Option<JobRecord>> {
        let mut found: Vec<JobRecord> = with_retries!(self.read_jobs(Some(name)))?;
        Ok(found.pop())
    }

    async fn set_paused(&self, name: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        with_retries!(self.write_paused(name, paused_by, who, now_ms))
    }

    async fn jobs_changed(&self, after: JobsCursor, limit: usize) -> Result<JobPage> {
        with_retries!(self.read_changed_jobs(after, limit))
    }

    async fn jobs_revision(&self) -> Result<i64> {
        with_retries!(self.read_revision())
    }

    async fn fire(&self, epoch: Epoch, intents: &[FireIntent], now_ms: i64) -> Result<Vec<FireOutcome>> {
        fire::check_batch(intents)?;
        if intents.is_empty() {
            return Ok(Vec::new());
        }
        // The first try takes what stands in the jobs' rows for what is decided; should a decision be there after all, its key says so.
        let mut trusting = true;
        with_retries!(self.write_firings(epoch, intents, now_ms, std::mem::take(&mut trusting)))
    }

    async fn idle_since(&self, jobs: &[JobId]) -> Result<Vec<(JobId, Option<i64>)>> {
        with_retries!(self.read_idle(jobs))
    }

    async fn arm(&self, epoch: Epoch, arming: &[Arming]) -> Result<Vec<Arming>> {
        with_retries!(self.write_arming(epoch, arming))
    }

    async fn decision(&self, job: JobId, fire_key: &str) -> Result<Option<DecisionRow>> {
        with_retries!(self.read_decision(job, fire_key))
    }

    async fn decisions(&self, job: JobId, from_ms: i64, to_ms: i64, limit: usize) -> Result<Vec<DecisionRow>> {
        with_retries!(self.read_decisions(job, from_ms, to_ms, limit))
    }

    async fn active_executions(&self) -> Result<Vec<ActiveExecution>> {
        with_retries!(self.read_active())
    }

    async fn materialize(&self, epoch: Epoch, execution: ExecutionId, upto: u32) -> Result<u32> {
        loop {
            let (reached, more): (u32, bool) = with_retries!(self.materialize_some(epoch, execution, upto))?;
            if !more {
                return Ok(reached);
            }
        }
    }

    async fn mark_dispatched(&self, epoch: Epoch, firsts: &[(ExecutionId, u32)], again: &[AttemptRef]) -> Result<()> {
        if firsts.is_empty() && again.is_empty() {
            return Ok(());
        }
        with_retries!(self.write_dispatched(epoch, firsts, again, None))
    }

    async fn leave_to_pollers(
        &self,
        epoch: Epoch,
        firsts: &[(ExecutionId, u32)],
        again: &[AttemptRef],
        now_ms: i64,
    ) -> Result<()> {
        with_retries!(self.write_dispatched(epoch, firsts, again, Some(now_ms)))
    }

    async fn polling(&self) -> Result<Option<Polling>> {
        with_retries!(self.read_polling())
    }

    async fn end_polling(&self, epoch: Epoch, seen: &Polling) -> Result<bool> {
        with_retries!(self.write_polling_ended(epoch, seen))
    }

    async fn handed_out(&self, after: Option<ShardRef>, now_ms: i64, limit: usize) -> Result<Vec<Redispatch>> {
        with_retries!(self.read_all_handed_out(after, now_ms, limit))
    }

    async fn outstanding(&self, tier: &str) -> Result<u32> {
        with_retries!(self.read_outstanding(tier))
    }

    async fn redispatch_due(&self, now_ms: i64, without: &[String], limit: usize) -> Result<Vec<Redispatch>> {
        with_retries!(self.read_redispatch(now_ms, without, limit))
    }

    async fn stranded(&self, execution: ExecutionId, from: u32, now_ms: i64, limit: usize) -> Result<Vec<AttemptRef>> {
        with_retries!(self.read_handed_out(execution, (from, u32::MAX), now_ms, limit))
    }

    async fn execution_head(&self, execution: ExecutionId) -> Result<Option<ExecutionHead>> {
        Ok(self.execution_heads(&[execution]).await?.pop())
    }

    async fn execution_heads(&self, executions: &[ExecutionId]) -> Result<Vec<ExecutionHead>> {
        with_retries!(self.read_heads(executions))
    }

    async fn claim(&self, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Result<Verdicts<Claimed>> {
        if attempts.is_empty() {
            return Ok(Vec::new());
        }
        with_retries!(self.write_claims(owner, attempts, now_ms))
    }

    async fn take_over(&self, owner: Incarnation, wanted: &[TakeOver], now_ms: i64) -> Result<Verdicts<TakenOver>> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        with_retries!(self.write_take_overs(owner, wanted, now_ms))
    }

    async fn record(&self, owner: Incarnation, ends: &[Ended], now_ms: i64) -> Result<Verdicts<Recorded>> {
        if ends.is_empty() {
            return Ok(Vec::new());
        }
        let mut plain = record::all_plain(ends);
        with_retries!(self.write_ends(owner, ends, now_ms, std::mem::take(&mut plain)))
    }

    async fn advance(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: Option<Checkpoint>,
        to: Checkpoint,
        rows: u64,
    ) -> Result<std::result::Result<(), Rejection>> {
        rows::check_checkpoint(&to)?;
        with_retries!(self.write_checkpoint(owner, attempt, (from.as_ref(), &to), rows))
    }

    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>> {
        step::check_step(self.db.dialect(), step)?;
        with_retries!(self.write_step(owner, step, now_ms))
    }

    async fn claimable(
        &self,
        tier: &str,
        cursor: &mut PollCursor,
        now_ms: i64,
        limit: usize,
    ) -> Result<Vec<AttemptRef>> {
        let (found, moved): (Vec<AttemptRef>, PollCursor) =
            with_retries!(self.read_claimable(tier, *cursor, now_ms, limit))?;
        *cursor = moved;
        Ok(found)
    }

    async fn running(&self, limit: usize) -> Result<Vec<RunningRow>> {
        with_retries!(self.read_running(limit))
    }

    async fn reclaim(
        &self,
        epoch: Epoch,
        reclaims: &[(Reclaim, RetryPolicy)],
        now_ms: i64,
    ) -> Result<Verdicts<Recorded>> {
        with_retries!(self.write_reclaims(epoch, reclaims, now_ms))
    }

    async fn cancel(
        &self,
        execution: ExecutionId,
        who: &str,
        why: &str,
        now_ms: i64,
    ) -> Result<Option<execution::Phase>> {
        with_retries!(self.write_cancel(execution, (who, why, now_ms)))
    }

    async fn put_trigger(&self, payload: &[u8], now_ms: i64) -> Result<()> {
        with_retries!(self.write_trigger(payload, now_ms))
    }

    async fn triggers(&self, limit: usize) -> Result<Vec<StoredTrigger>> {
        with_retries!(self.read_triggers(limit))
    }

    async fn settle_triggers(&self, ids: &[i64]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        with_retries!(self.delete_triggers(ids))
    }

    async fn put_dead_message(&self, reason: &str, payload: &[u8], now_ms: i64) -> Result<()> {
        with_retries!(self.write_dead_message(reason, payload, now_ms))
    }

    async fn dead(&self, limit: usize) -> Result<Vec<DeadRow>> {
        with_retries!(self.read_dead(&crate::ops_rows::DeadQuery::default(), limit))
    }

    async fn keep_output(&self, writes: &[OutputWrite], now_ms: i64) -> Result<()> {
        with_retries!(self.write_output(writes, now_ms))
    }

    async fn output(&self, query: &OutputQuery, limit: usize) -> Result<Vec<OutputRow>> {
        with_retries!(self.read_output(query, limit))
    }

    async fn prune(&self, before: &PruneBefore, cursor: &mut PruneCursor) -> Result<Pruned> {
        let (pruned, moved): (Pruned, PruneCursor) = with_retries!(self.prune_some(before, *cursor))?;
        *cursor = moved;
        Ok(pruned)
    }

    async fn overview(&self) -> Result<Overview> {
        with_retries!(self.read_overview())
    }

    async fn executions(
        &self,
        job: Option<&str>,
        before: Option<ExecutionId>,
        limit: usize,
    ) -> Result<Vec<ExecutionRow>> {
        with_retries!(self.read_executions(job, before, limit))
    }

    async fn execution(&self, id: ExecutionId) -> Result<Option<ExecutionRow>> {
        with_retries!(self.read_execution(id))
    }

    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        with_retries!(self.read_shards(id, from, limit))
    }

    async fn attempts(&self, id: ExecutionId, limit: usize) -> Result<Vec<AttemptRow>> {
        with_retries!(self.read_attempts(id, limit))
    }

    async fn tally(&self, id: ExecutionId) -> Result<(Tally, u64)> {
        with_retries!(self.read_tally(id))
    }

    async fn rows_done(&self, id: ExecutionId) -> Result<u64> {
        with_retries!(self.read_rows_done(id))
    }
}

#[async_trait]
impl FiringLedger for SqlLedger {
    async fn touch_epoch(&self, epoch: Epoch, now_ms: i64) -> Result<()> {
        with_retries!(self.write_seen(epoch, now_ms))
    }

    async fn epochs(&self, upto: Option<Epoch>, limit: usize) -> Result<Vec<EpochRow>> {
        with_retries!(self.read_epochs(upto, limit))
    }

    async fn latest_decision(&self, job: JobId) -> Result<Option<DecisionRow>> {
        with_retries!(self.read_latest_decision(job))
    }

    async fn set_scope_paused(&self, scope: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        with_retries!(self.write_scope_paused(scope, paused_by, who, now_ms))
    }

    async fn pauses(&self) -> Result<Vec<PauseRow>> {
        with_retries!(self.read_pauses())
    }

    async fn waiting_heads(&self, now_ms: i64, limit: usize) -> Result<Vec<WaitingRow>> {
        with_retries!(self.read_waiting_heads(now_ms, limit))
    }

    async fn waiting_count(&self, job: JobId) -> Result<u32> {
        with_retries!(self.read_waiting_count(job))
    }

    async fn begin_backfill(&self, epoch: Epoch, new: &NewBackfill, now_ms: i64) -> Result<bool> {
        waiting::check_backfill(new)?;
        with_retries!(self.write_backfill(epoch, new, now_ms))
    }

    async fn backfill(&self, job: JobId, request_id: &str) -> Result<Option<BackfillRow>> {
        with_retries!(self.read_backfill(job, request_id))
    }

    async fn ran(&self, job: JobId, fire_keys: &[String]) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for chunk in fire_keys.chunks(500) {
            let ran: Vec<String> = with_retries!(self.read_ran(job, chunk))?;
            found.extend(ran);
        }
        Ok(found)
    }

    async fn watches(&self, limit: usize) -> Result<Vec<WatchRow>> {
        with_retries!(self.read_watches(limit))
    }

    async fn drop_watches(&self, epoch: Epoch, ids: &[i64]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        with_retries!(self.delete_watches(epoch, ids))
    }

    async fn result_summary(&self, execution: ExecutionId, summary_bytes: usize) -> Result<Option<ResultSummary>> {
        with_retries!(self.read_result_summary(execution, summary_bytes))
    }

    async fn cancelled(&self, among: &[ExecutionId]) -> Result<Vec<ExecutionId>> {
        if among.is_empty() {
            return Ok(Vec::new());
        }
        with_retries!(self.read_cancelled(among))
    }

    async fn cancellation(&self, execution: ExecutionId) -> Result<Option<CancellationRow>> {
        with_retries!(self.read_cancellation(execution))
    }
}

/// A batch that is larger than its bound is the caller's mistake.
fn too_many(what: &str, count: usize, most: usize) -> StoreError {
    Fault::invalid(format!("{count} {what} in one batch; at most {most} are possible")).into_store_error()
}
