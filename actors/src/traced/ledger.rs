//! What the ledger is asked, and what it answers.

use crate::trace::Trace;
use async_trait::async_trait;
use shardcron_domain::invariants::Tally;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::trace::{End, FIRED, TraceEvent};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, ShardRef, execution};
use shardcron_store::ledger::{PollCursor, Verdicts};
use shardcron_store::*;
use std::sync::Arc;

pub(super) struct Traced {
    pub(super) inner: Arc<dyn Ledger>,
    pub(super) trace: Trace,
}

fn end_of(ended: &Ended) -> End {
    match &ended.outcome {
        AttemptOutcome::Success { .. } => End::Success,
        AttemptOutcome::Failure { class, .. } => End::Failure(*class),
        AttemptOutcome::HandBack => End::HandBack,
    }
}

pub(super) fn recording(owner: Incarnation, ended: &Ended) -> TraceEvent {
    TraceEvent::Recording { owner, at: ended.attempt, end: end_of(ended), attempts: ended.retry.attempts }
}

pub(super) fn recorded(
    owner: Incarnation,
    ended: &Ended,
    verdict: std::result::Result<&Recorded, &Rejection>,
) -> TraceEvent {
    let at = ended.attempt;
    match verdict {
        Ok(recorded) => TraceEvent::Recorded { owner, at, end: end_of(ended), became: recorded.phase },
        Err(refusal) => TraceEvent::RecordRefused { at, reason: refusal.label().into() },
    }
}

#[async_trait]
impl Ledger for Traced {
    async fn migrate(&self) -> Result<()> {
        self.inner.migrate().await
    }
    async fn server_version(&self) -> Result<String> {
        self.inner.server_version().await
    }
    async fn check_server(&self) -> Result<Vec<String>> {
        self.inner.check_server().await
    }
    async fn server_now_ms(&self) -> Result<i64> {
        self.inner.server_now_ms().await
    }
    async fn begin_epoch(&self, holder: &str, now_ms: i64) -> Result<Epoch> {
        let epoch = self.inner.begin_epoch(holder, now_ms).await?;
        self.trace.say(|| TraceEvent::EpochBegun { epoch });
        Ok(epoch)
    }
    async fn leadership(&self) -> Result<Leadership> {
        self.inner.leadership().await
    }
    async fn change_jobs(&self, changes: &JobChanges, who: &str, now_ms: i64) -> Result<Changed> {
        self.inner.change_jobs(changes, who, now_ms).await
    }
    async fn job_versions(&self, name: &str, limit: usize) -> Result<Vec<VersionRow>> {
        self.inner.job_versions(name, limit).await
    }
    async fn job_version(&self, name: &str, version: u32) -> Result<Option<VersionRow>> {
        self.inner.job_version(name, version).await
    }
    async fn jobs_of_source(&self, source: &str) -> Result<Vec<(String, u32)>> {
        self.inner.jobs_of_source(source).await
    }
    async fn jobs(&self) -> Result<Vec<JobRecord>> {
        self.inner.jobs().await
    }
    async fn job(&self, name: &str) -> Result<Option<JobRecord>> {
        self.inner.job(name).await
    }
    async fn set_paused(&self, name: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        self.inner.set_paused(name, paused_by, who, now_ms).await
    }
    async fn jobs_revision(&self) -> Result<i64> {
        self.inner.jobs_revision().await
    }
    async fn jobs_changed(&self, after: JobsCursor, limit: usize) -> Result<JobPage> {
        self.inner.jobs_changed(after, limit).await
    }
    async fn fire(&self, epoch: Epoch, intents: &[FireIntent], now_ms: i64) -> Result<Vec<FireOutcome>> {
        self.trace.say_all(intents, |intent| {
            let (execution, shards) = match &intent.action {
                FireAction::Fire(new) => (Some(new.id), new.plan.count()),
                FireAction::Hold { .. } | FireAction::Record { .. } => (None, 0),
            };
            TraceEvent::Firing { epoch, job: intent.job.0, fire_key: intent.fire_key.clone(), execution, shards }
        });
        let outcomes = self.inner.fire(epoch, intents, now_ms).await?;
        self.trace.say_all(intents.iter().zip(&outcomes), |(intent, outcome)| {
            let (outcome, execution) = match outcome {
                FireOutcome::Fired(id) => (FIRED, Some(*id)),
                FireOutcome::Skipped { kind, blocking, .. } => (kind.word(), *blocking),
                FireOutcome::Duplicate(of) => ("duplicate", *of),
                FireOutcome::Waiting { blocking, .. } => ("waiting", *blocking),
                FireOutcome::NotYet => ("not_yet", None),
                FireOutcome::Stale => ("stale", None),
                FireOutcome::Busy => ("busy", None),
            };
            let (job, fire_key) = (intent.job.0, intent.fire_key.clone());
            TraceEvent::Decided { epoch, job, fire_key, outcome: outcome.into(), execution }
        });
        Ok(outcomes)
    }
    async fn idle_since(&self, jobs: &[JobId]) -> Result<Vec<(JobId, Option<i64>)>> {
        self.inner.idle_since(jobs).await
    }
    async fn arm(&self, epoch: Epoch, arming: &[Arming]) -> Result<Vec<Arming>> {
        self.inner.arm(epoch, arming).await
    }
    async fn decision(&self, job: JobId, fire_key: &str) -> Result<Option<DecisionRow>> {
        self.inner.decision(job, fire_key).await
    }
    async fn decisions(&self, job: JobId, from_ms: i64, to_ms: i64, limit: usize) -> Result<Vec<DecisionRow>> {
        self.inner.decisions(job, from_ms, to_ms, limit).await
    }
    async fn active_executions(&self) -> Result<Vec<ActiveExecution>> {
        self.inner.active_executions().await
    }
    async fn materialize(&self, epoch: Epoch, execution: ExecutionId, upto: u32) -> Result<u32> {
        self.inner.materialize(epoch, execution, upto).await
    }
    async fn mark_dispatched(&self, epoch: Epoch, firsts: &[(ExecutionId, u32)], again: &[AttemptRef]) -> Result<()> {
        self.inner.mark_dispatched(epoch, firsts, again).await
    }
    async fn leave_to_pollers(
        &self,
        epoch: Epoch,
        firsts: &[(ExecutionId, u32)],
        again: &[AttemptRef],
        now_ms: i64,
    ) -> Result<()> {
        self.inner.leave_to_pollers(epoch, firsts, again, now_ms).await
    }
    async fn polling(&self) -> Result<Option<Polling>> {
        self.inner.polling().await
    }
    async fn end_polling(&self, epoch: Epoch, seen: &Polling) -> Result<bool> {
        self.inner.end_polling(epoch, seen).await
    }
    async fn handed_out(&self, after: Option<ShardRef>, now_ms: i64, limit: usize) -> Result<Vec<Redispatch>> {
        self.inner.handed_out(after, now_ms, limit).await
    }
    async fn outstanding(&self, tier: &str) -> Result<u32> {
        self.inner.outstanding(tier).await
    }
    async fn redispatch_due(&self, now_ms: i64, without: &[String], limit: usize) -> Result<Vec<Redispatch>> {
        self.inner.redispatch_due(now_ms, without, limit).await
    }
    async fn stranded(&self, execution: ExecutionId, from: u32, now_ms: i64, limit: usize) -> Result<Vec<AttemptRef>> {
        self.inner.stranded(execution, from, now_ms, limit).await
    }
    async fn execution_head(&self, execution: ExecutionId) -> Result<Option<ExecutionHead>> {
        self.inner.execution_head(execution).await
    }
    async fn execution_heads(&self, executions: &[ExecutionId]) -> Result<Vec<ExecutionHead>> {
        self.inner.execution_heads(executions).await
    }
    async fn claim(&self, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Result<Verdicts<Claimed>> {
        self.trace.say_all(attempts, |at| TraceEvent::Claiming { owner, at: *at });
        let verdicts = self.inner.claim(owner, attempts, now_ms).await?;
        self.trace.say_all(attempts.iter().zip(&verdicts), |(at, verdict)| match verdict {
            Ok(_) => TraceEvent::Claimed { owner, at: *at },
            Err(refusal) => TraceEvent::ClaimRefused { at: *at, reason: refusal.label().into() },
        });
        Ok(verdicts)
    }
    async fn take_over(&self, owner: Incarnation, wanted: &[TakeOver], now_ms: i64) -> Result<Verdicts<TakenOver>> {
        let by = owner;
        self.trace.say_all(wanted, |wish| {
            let (at, reason, attempts) = (wish.message, wish.reason, wish.retry.attempts);
            TraceEvent::TakingOver { by, at, reason, attempts }
        });
        let verdicts = self.inner.take_over(owner, wanted, now_ms).await?;
        let taken = wanted.iter().zip(&verdicts).filter_map(|(wish, verdict)| Some((wish, verdict.as_ref().ok()?)));
        self.trace.say_all(taken, |(wish, taken)| {
            let (at, reason, attempts) = (wish.message, wish.reason, wish.retry.attempts);
            match taken {
                TakenOver::Running { attempt, .. } => {
                    TraceEvent::TakenOver { by, at: *attempt, message: at.attempt, reason, attempts }
                }
                TakenOver::Ended(end) => TraceEvent::TakenAway { by, at, reason, attempts, became: end.phase },
            }
        });
        Ok(verdicts)
    }
    async fn record(&self, owner: Incarnation, ends: &[Ended], now_ms: i64) -> Result<Verdicts<Recorded>> {
        self.trace.say_all(ends, |end| recording(owner, end));
        let verdicts = self.inner.record(owner, ends, now_ms).await?;
        let answers = ends.iter().zip(&verdicts);
        self.trace.say_all(answers, |(end, verdict)| recorded(owner, end, verdict.as_ref()));
        Ok(verdicts)
    }
    async fn advance(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: Option<Checkpoint>,
        to: Checkpoint,
        rows: u64,
    ) -> Result<std::result::Result<(), Rejection>> {
        self.trace.say(|| TraceEvent::Advancing { owner, at: attempt, from: from.clone(), to: to.clone() });
        let verdict = self.inner.advance(owner, attempt, from, to.clone(), rows).await?;
        if verdict.is_ok() {
            self.trace.say(|| TraceEvent::Advanced { owner, at: attempt, to });
        }
        Ok(verdict)
    }
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>> {
        let at = step.attempt;
        if let Some((from, to)) = &step.advance {
            self.trace.say(|| TraceEvent::Advancing { owner, at, from: from.clone(), to: to.clone() });
        }
        if let Some(end) = &step.finish {
            self.trace.say(|| recording(owner, end));
        }
        let verdict = self.inner.run_sql(owner, step, now_ms).await?;
        if let (Ok(_), Some((_, to))) = (&verdict, &step.advance) {
            self.trace.say(|| TraceEvent::Advanced { owner, at, to: to.clone() });
        }
        match (&verdict, &step.finish) {
            (Ok(SqlDone { recorded: Some(done), .. }), Some(end)) => self.trace.say(|| recorded(owner, end, Ok(done))),
            (Err(refusal), Some(end)) => self.trace.say(|| recorded(owner, end, Err(refusal))),
            _ => {}
        }
        Ok(verdict)
    }
    async fn claimable(
        &self,
        tier: &str,
        cursor: &mut PollCursor,
        now_ms: i64,
        limit: usize,
    ) -> Result<Vec<AttemptRef>> {
        self.inner.claimable(tier, cursor, now_ms, limit).await
    }
    async fn running(&self, limit: usize) -> Result<Vec<RunningRow>> {
        self.inner.running(limit).await
    }
    async fn reclaim(
        &self,
        epoch: Epoch,
        reclaims: &[(Reclaim, RetryPolicy)],
        now_ms: i64,
    ) -> Result<Verdicts<Recorded>> {
        self.trace.say_all(reclaims, |(reclaim, policy)| {
            let Reclaim { attempt: at, owner, reason } = *reclaim;
            TraceEvent::Reclaiming { epoch, at, owner, reason, attempts: policy.attempts }
        });
        let verdicts = self.inner.reclaim(epoch, reclaims, now_ms).await?;
        self.trace.say_all(reclaims.iter().zip(&verdicts), |((reclaim, _), verdict)| TraceEvent::Reclaimed {
            epoch,
            at: reclaim.attempt,
            became: verdict.as_ref().ok().map(|r| r.phase),
        });
        Ok(verdicts)
    }
    async fn cancel(
        &self,
        execution: ExecutionId,
        who: &str,
        why: &str,
        now_ms: i64,
    ) -> Result<Option<execution::Phase>> {
        self.inner.cancel(execution, who, why, now_ms).await
    }
    async fn put_trigger(&self, payload: &[u8], now_ms: i64) -> Result<()> {
        self.inner.put_trigger(payload, now_ms).await
    }
    async fn triggers(&self, limit: usize) -> Result<Vec<StoredTrigger>> {
        self.inner.triggers(limit).await
    }
    async fn settle_triggers(&self, ids: &[i64]) -> Result<()> {
        self.inner.settle_triggers(ids).await
    }
    async fn put_dead_message(&self, reason: &str, payload: &[u8], now_ms: i64) -> Result<()> {
        self.inner.put_dead_message(reason, payload, now_ms).await
    }
    async fn dead(&self, limit: usize) -> Result<Vec<DeadRow>> {
        self.inner.dead(limit).await
    }
    async fn keep_output(&self, writes: &[OutputWrite], now_ms: i64) -> Result<()> {
        self.inner.keep_output(writes, now_ms).await
    }
    async fn output(&self, query: &OutputQuery, limit: usize) -> Result<Vec<OutputRow>> {
        self.inner.output(query, limit).await
    }
    async fn prune(&self, before: &PruneBefore, cursor: &mut PruneCursor) -> Result<Pruned> {
        self.inner.prune(before, cursor).await
    }
    async fn overview(&self) -> Result<Overview> {
        self.inner.overview().await
    }
    async fn executions(
        &self,
        job: Option<&str>,
        before: Option<ExecutionId>,
        limit: usize,
    ) -> Result<Vec<ExecutionRow>> {
        self.inner.executions(job, before, limit).await
    }
    async fn execution(&self, id: ExecutionId) -> Result<Option<ExecutionRow>> {
        self.inner.execution(id).await
    }
    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        self.inner.shards(id, from, limit).await
    }
    async fn attempts(&self, id: ExecutionId, limit: usize) -> Result<Vec<AttemptRow>> {
        self.inner.attempts(id, limit).await
    }
    async fn tally(&self, id: ExecutionId) -> Result<(Tally, u64)> {
        self.inner.tally(id).await
    }
    async fn rows_done(&self, id: ExecutionId) -> Result<u64> {
        self.inner.rows_done(id).await
    }
}
