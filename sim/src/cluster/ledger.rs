//! The ledger of a process: the real SQL on SQLite, behind a network, and watched.

use super::World;
use super::host::block;
use super::jobs::Kind;
use super::life::{Life, Port};
use super::oracle::Checked;
use crate::guard::Mutation;
use async_trait::async_trait;
use shardcron_domain::invariants::Tally;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::planning::{KeyBounds, LastRun};
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::reopen::Refused;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, ShardRef, execution};
use shardcron_store::ledger::{PollCursor, Verdicts};
use shardcron_store::*;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

pub(crate) struct SimLedger(pub(crate) Life);

pub(super) fn away(detail: String) -> StoreError {
    StoreError::Unavailable { store: "ledger", detail }
}

impl World {
    /// A call of the real ledger; virtual time stands still meanwhile.
    pub(crate) fn real<T>(&self, call: impl Future<Output = T>) -> T {
        self.hold_clock();
        block(&self.real, call)
    }

    pub(super) fn renamed(&self, at: AttemptRef) -> AttemptRef {
        match self.options.mutation {
            Some(Mutation::NoAttemptCheck) => AttemptRef { attempt: self.oracle(|o| o.attempt_now(at)), ..at },
            _ => at,
        }
    }

    /// The epoch that the ledger is told.
    fn told(&self, epoch: Epoch) -> Epoch {
        match self.options.mutation {
            Some(Mutation::NoEpochCheck) => self.oracle(|o| o.epoch()),
            _ => epoch,
        }
    }
}

impl SimLedger {
    pub(super) fn world(&self) -> &Arc<World> {
        &self.0.world
    }

    pub(super) async fn read<T: Debug>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        self.0.request(Port::Ledger, false).await.map_err(|(why, _)| away(why))?;
        let answer = self.world().real(call);
        self.0.note(what, &answer);
        self.0.answer(Port::Ledger).await.map_err(away)?;
        answer
    }

    /// A write. Its effect owns what it needs: it may come when the caller has given up, or is dead.
    pub(super) async fn write<T, E>(&self, what: &'static str, effect: E) -> Result<T>
    where
        E: FnOnce(&World) -> Result<T> + Send + 'static,
        T: Send + Debug,
    {
        match self.0.request(Port::Ledger, true).await {
            Ok(()) => {}
            Err((why, late)) => {
                if let Some(after_ms) = late {
                    let life = self.0.clone();
                    self.world().later(after_ms, move || life.note(what, &effect(&life.world)));
                }
                return Err(away(why));
            }
        }
        let answer = effect(self.world());
        self.0.note(what, &answer);
        self.0.answer(Port::Ledger).await.map_err(away)?;
        answer
    }

    /// A write of a leader beyond those that the oracle knows more about.
    async fn lead<T, E>(&self, what: &'static str, epoch: Epoch, effect: E) -> Result<T>
    where
        E: FnOnce(&World, Epoch) -> Result<T> + Send + 'static,
        T: Send + Debug,
    {
        let write = move |world: &World| {
            let answer = effect(world, world.told(epoch));
            if answer.is_ok() {
                world.check(world.oracle(|o| o.led(epoch)));
            }
            answer
        };
        self.write(what, write).await
    }
}

/// What the ledger said, told to the oracle.
fn told<T>(world: &World, answer: Result<T>, tell: impl FnOnce(&T) -> Checked) -> Result<T> {
    if let Ok(answer) = &answer {
        world.check(tell(answer));
    }
    answer
}

macro_rules! read {
    ($self:ident.$name:ident($($arg:expr),*)) => {{
        let sql = $self.world().sql().clone();
        $self.read(stringify!($name), async move { sql.$name($($arg),*).await }).await
    }};
}

#[async_trait]
impl FiringLedger for SimLedger {
    async fn touch_epoch(&self, epoch: Epoch, now_ms: i64) -> Result<()> {
        read!(self.touch_epoch(epoch, now_ms))
    }
    async fn epochs(&self, upto: Option<Epoch>, limit: usize) -> Result<Vec<EpochRow>> {
        read!(self.epochs(upto, limit))
    }
    async fn latest_decision(&self, job: JobId) -> Result<Option<DecisionRow>> {
        read!(self.latest_decision(job))
    }
    async fn set_scope_paused(&self, scope: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        read!(self.set_scope_paused(scope, paused_by, who, now_ms))
    }
    async fn pauses(&self) -> Result<Vec<PauseRow>> {
        read!(self.pauses())
    }
    async fn waiting_heads(&self, now_ms: i64, limit: usize) -> Result<Vec<WaitingRow>> {
        read!(self.waiting_heads(now_ms, limit))
    }
    async fn waiting_count(&self, job: JobId) -> Result<u32> {
        read!(self.waiting_count(job))
    }
    async fn begin_backfill(&self, epoch: Epoch, new: &NewBackfill, now_ms: i64) -> Result<bool> {
        let new = new.clone();
        let effect = move |world: &World, epoch| world.real(world.sql().begin_backfill(epoch, &new, now_ms));
        self.lead("begin_backfill", epoch, effect).await
    }
    async fn backfill(&self, job: JobId, request_id: &str) -> Result<Option<BackfillRow>> {
        read!(self.backfill(job, request_id))
    }
    async fn ran(&self, job: JobId, fire_keys: &[String]) -> Result<Vec<String>> {
        read!(self.ran(job, fire_keys))
    }
    async fn watches(&self, limit: usize) -> Result<Vec<WatchRow>> {
        read!(self.watches(limit))
    }
    async fn drop_watches(&self, epoch: Epoch, ids: &[i64]) -> Result<()> {
        let ids = ids.to_vec();
        let effect = move |world: &World, epoch| world.real(world.sql().drop_watches(epoch, &ids));
        self.lead("drop_watches", epoch, effect).await
    }
    async fn result_summary(&self, execution: ExecutionId, summary_bytes: usize) -> Result<Option<ResultSummary>> {
        read!(self.result_summary(execution, summary_bytes))
    }
    async fn cancelled(&self, among: &[ExecutionId]) -> Result<Vec<ExecutionId>> {
        read!(self.cancelled(among))
    }
    async fn cancellation(&self, execution: ExecutionId) -> Result<Option<CancellationRow>> {
        read!(self.cancellation(execution))
    }
}

/// Asked for by people, and by no process of a simulation: see `Fates::retry`.
#[async_trait]
impl OpsLedger for SimLedger {
    async fn reopen(&self, wanted: &Reopen, now_ms: i64) -> Result<std::result::Result<Reopened, Refused>> {
        read!(self.reopen(wanted, now_ms))
    }
    async fn reopenings(&self, execution: ExecutionId) -> Result<Vec<ReopeningRow>> {
        read!(self.reopenings(execution))
    }
    async fn attempts_of(&self, shard: ShardRef, limit: usize) -> Result<Vec<AttemptRow>> {
        read!(self.attempts_of(shard, limit))
    }
    async fn dead_letters(&self, query: &DeadQuery, limit: usize) -> Result<Vec<DeadRow>> {
        read!(self.dead_letters(query, limit))
    }
    async fn settle_dead(&self, settled: &DeadSettled, now_ms: i64) -> Result<Vec<i64>> {
        read!(self.settle_dead(settled, now_ms))
    }
}

#[async_trait]
impl ShardingLedger for SimLedger {
    async fn key_bounds(&self, query: &QuerySpec) -> Result<KeyBounds> {
        read!(self.key_bounds(query))
    }
    async fn last_run(&self, job: JobId) -> Result<Option<LastRun>> {
        read!(self.last_run(job))
    }
    async fn emit(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: u32,
        payloads: &[String],
    ) -> Result<std::result::Result<(), Rejection>> {
        read!(self.emit(owner, attempt, from, payloads))
    }
    async fn finish_map(
        &self,
        owner: Incarnation,
        ended: &Ended,
        growth: Growth,
        now_ms: i64,
    ) -> Result<std::result::Result<Recorded, Rejection>> {
        let ended = ended.clone();
        let effect = move |world: &World| {
            let at = ended.attempt;
            let named = Ended { attempt: world.renamed(at), ..ended.clone() };
            let mut growth = growth;
            if world.options.mutation == Some(Mutation::EmitsOfDeadAttempts) {
                let dead = world.oracle(|o| o.emitted_before(at));
                let kept = world.real(world.sql().emit(owner, at, growth.emitted + 1, &dead));
                growth.emitted += if matches!(kept, Ok(Ok(()))) { dead.len() as u32 } else { 0 };
            }
            let answer = world.real(world.sql().finish_map(owner, &named, growth, now_ms));
            told(world, answer, |v| world.oracle(|o| o.grown(owner, &ended, growth, (v, now_ms))))
        };
        self.write("finish_map", effect).await
    }
    async fn emitted(&self, execution: ExecutionId, index: u32) -> Result<Option<String>> {
        read!(self.emitted(execution, index))
    }
    async fn emitted_count(&self, execution: ExecutionId) -> Result<u32> {
        read!(self.emitted_count(execution))
    }
    async fn addressed(&self, who: Incarnation, now_ms: i64, limit: usize) -> Result<Vec<(String, AttemptRef)>> {
        // Asked each second by every worker: where nothing is addressed, it must not cost a draw.
        if !self.world().plan.kinds.contains(&Kind::Broadcast) {
            return self.world().real(self.world().sql().addressed(who, now_ms, limit));
        }
        let world = self.world().clone();
        let read = async move {
            let mut found = world.sql().addressed(who, now_ms, limit).await?;
            if world.options.mutation == Some(Mutation::AddressedToAnybody) {
                for other in world.sql().addressees().await? {
                    found.extend(world.sql().addressed(other, now_ms, limit).await?);
                }
            }
            Ok(found)
        };
        self.read("addressed", read).await
    }
    async fn addressees(&self) -> Result<Vec<Incarnation>> {
        if !self.world().plan.kinds.contains(&Kind::Broadcast) {
            return self.world().real(self.world().sql().addressees());
        }
        read!(self.addressees())
    }
    async fn abandon(&self, epoch: Epoch, who: Incarnation, now_ms: i64) -> Result<Vec<AttemptRef>> {
        let effect = move |world: &World| {
            let answer = world.real(world.sql().abandon(world.told(epoch), who, now_ms));
            told(world, answer, |shards| world.oracle(|o| o.abandoned(epoch, who, shards, now_ms)))
        };
        self.write("abandon", effect).await
    }
    async fn sub_results(&self, execution: ExecutionId, from: u32, limit: usize) -> Result<Vec<SubResult>> {
        read!(self.sub_results(execution, from, limit))
    }
}

#[async_trait]
impl Ledger for SimLedger {
    async fn migrate(&self) -> Result<()> {
        read!(self.migrate())
    }
    async fn server_version(&self) -> Result<String> {
        read!(self.server_version())
    }
    async fn check_server(&self) -> Result<Vec<String>> {
        read!(self.check_server())
    }
    async fn server_now_ms(&self) -> Result<i64> {
        read!(self.server_now_ms())
    }

    async fn begin_epoch(&self, holder: &str, now_ms: i64) -> Result<Epoch> {
        let holder = holder.to_owned();
        let effect = move |world: &World| {
            let answer = world.real(world.sql().begin_epoch(&holder, now_ms));
            told(world, answer, |epoch| world.oracle(|o| o.epoch_begun(*epoch)))
        };
        self.write("begin_epoch", effect).await
    }
    async fn leadership(&self) -> Result<Leadership> {
        read!(self.leadership())
    }

    async fn change_jobs(&self, changes: &JobChanges, who: &str, now_ms: i64) -> Result<Changed> {
        read!(self.change_jobs(changes, who, now_ms))
    }
    async fn job_versions(&self, name: &str, limit: usize) -> Result<Vec<VersionRow>> {
        read!(self.job_versions(name, limit))
    }
    async fn job_version(&self, name: &str, version: u32) -> Result<Option<VersionRow>> {
        read!(self.job_version(name, version))
    }
    async fn jobs_of_source(&self, source: &str) -> Result<Vec<(String, u32)>> {
        read!(self.jobs_of_source(source))
    }
    async fn jobs(&self) -> Result<Vec<JobRecord>> {
        read!(self.jobs())
    }
    async fn job(&self, name: &str) -> Result<Option<JobRecord>> {
        read!(self.job(name))
    }
    async fn set_paused(&self, name: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool> {
        read!(self.set_paused(name, paused_by, who, now_ms))
    }
    async fn jobs_revision(&self) -> Result<i64> {
        read!(self.jobs_revision())
    }
    async fn jobs_changed(&self, after: JobsCursor, limit: usize) -> Result<JobPage> {
        read!(self.jobs_changed(after, limit))
    }

    async fn fire(&self, epoch: Epoch, intents: &[FireIntent], now_ms: i64) -> Result<Vec<FireOutcome>> {
        self.0.acts();
        let intents = intents.to_vec();
        let effect = move |world: &World| {
            let answer = world.real(world.sql().fire(world.told(epoch), &intents, now_ms));
            told(world, answer, |outcomes| world.oracle(|o| o.fired(epoch, &intents, outcomes)))
        };
        self.write("fire", effect).await
    }
    async fn idle_since(&self, jobs: &[JobId]) -> Result<Vec<(JobId, Option<i64>)>> {
        read!(self.idle_since(jobs))
    }
    async fn arm(&self, epoch: Epoch, arming: &[Arming]) -> Result<Vec<Arming>> {
        let arming = arming.to_vec();
        let effect = move |world: &World, epoch| world.real(world.sql().arm(epoch, &arming));
        self.lead("arm", epoch, effect).await
    }
    async fn decision(&self, job: JobId, fire_key: &str) -> Result<Option<DecisionRow>> {
        read!(self.decision(job, fire_key))
    }
    async fn decisions(&self, job: JobId, from_ms: i64, to_ms: i64, limit: usize) -> Result<Vec<DecisionRow>> {
        read!(self.decisions(job, from_ms, to_ms, limit))
    }

    async fn active_executions(&self) -> Result<Vec<ActiveExecution>> {
        read!(self.active_executions())
    }
    async fn materialize(&self, epoch: Epoch, execution: ExecutionId, upto: u32) -> Result<u32> {
        let effect = move |world: &World, epoch| world.real(world.sql().materialize(epoch, execution, upto));
        self.lead("materialize", epoch, effect).await
    }
    async fn mark_dispatched(&self, epoch: Epoch, firsts: &[(ExecutionId, u32)], again: &[AttemptRef]) -> Result<()> {
        let (firsts, again) = (firsts.to_vec(), again.to_vec());
        let effect = move |world: &World, epoch| world.real(world.sql().mark_dispatched(epoch, &firsts, &again));
        self.lead("mark_dispatched", epoch, effect).await
    }
    async fn leave_to_pollers(
        &self,
        epoch: Epoch,
        firsts: &[(ExecutionId, u32)],
        again: &[AttemptRef],
        now_ms: i64,
    ) -> Result<()> {
        let (firsts, again) = (firsts.to_vec(), again.to_vec());
        let effect =
            move |world: &World, epoch| world.real(world.sql().leave_to_pollers(epoch, &firsts, &again, now_ms));
        self.lead("leave_to_pollers", epoch, effect).await
    }
    async fn polling(&self) -> Result<Option<Polling>> {
        read!(self.polling())
    }
    async fn end_polling(&self, epoch: Epoch, seen: &Polling) -> Result<bool> {
        let seen = *seen;
        let effect = move |world: &World, epoch| world.real(world.sql().end_polling(epoch, &seen));
        self.lead("end_polling", epoch, effect).await
    }
    async fn handed_out(&self, after: Option<ShardRef>, now_ms: i64, limit: usize) -> Result<Vec<Redispatch>> {
        read!(self.handed_out(after, now_ms, limit))
    }
    async fn outstanding(&self, tier: &str) -> Result<u32> {
        read!(self.outstanding(tier))
    }
    async fn redispatch_due(&self, now_ms: i64, without: &[String], limit: usize) -> Result<Vec<Redispatch>> {
        read!(self.redispatch_due(now_ms, without, limit))
    }
    async fn stranded(&self, execution: ExecutionId, from: u32, now_ms: i64, limit: usize) -> Result<Vec<AttemptRef>> {
        read!(self.stranded(execution, from, now_ms, limit))
    }

    async fn execution_head(&self, execution: ExecutionId) -> Result<Option<ExecutionHead>> {
        read!(self.execution_head(execution))
    }
    async fn execution_heads(&self, executions: &[ExecutionId]) -> Result<Vec<ExecutionHead>> {
        read!(self.execution_heads(executions))
    }
    async fn claim(&self, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Result<Verdicts<Claimed>> {
        let (attempts, life) = (attempts.to_vec(), self.0.id);
        let effect = move |world: &World| {
            let named: Vec<AttemptRef> = attempts.iter().map(|at| world.renamed(*at)).collect();
            let answer = world.real(world.sql().claim(owner, &named, now_ms));
            told(world, answer, |v| world.oracle(|o| o.claimed((life, owner), &attempts, v, (now_ms, world.now_ms()))))
        };
        self.write("claim", effect).await
    }
    async fn take_over(&self, owner: Incarnation, wanted: &[TakeOver], now_ms: i64) -> Result<Verdicts<TakenOver>> {
        let (wanted, life) = (wanted.to_vec(), self.0.id);
        let effect = move |world: &World| {
            let answer = world.real(world.sql().take_over(owner, &wanted, now_ms));
            told(world, answer, |v| world.oracle(|o| o.taken_over((life, owner), &wanted, v, (now_ms, world.now_ms()))))
        };
        self.write("take_over", effect).await
    }
    async fn record(&self, owner: Incarnation, ends: &[Ended], now_ms: i64) -> Result<Verdicts<Recorded>> {
        let ends = ends.to_vec();
        let effect = move |world: &World| {
            let named: Vec<Ended> =
                ends.iter().map(|end| Ended { attempt: world.renamed(end.attempt), ..end.clone() }).collect();
            let answer = world.real(world.sql().record(owner, &named, now_ms));
            told(world, answer, |v| world.oracle(|o| o.recorded(owner, &ends, v, now_ms)))
        };
        self.write("record", effect).await
    }
    async fn advance(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: Option<Checkpoint>,
        to: Checkpoint,
        rows: u64,
    ) -> Result<std::result::Result<(), Rejection>> {
        let effect = move |world: &World| {
            let (mut who, mut named, mut at) = (owner, world.renamed(attempt), from.clone());
            if world.options.mutation == Some(Mutation::CheckpointWithoutFence)
                && let Some(holder) = world.oracle(|o| o.holder(attempt))
            {
                (who, named) = holder;
                at = world.oracle(|o| o.checkpoint(attempt));
            }
            let answer = world.real(world.sql().advance(who, named, at, to.clone(), rows));
            let moved = (from, to);
            told(world, answer, |v| world.oracle(|o| o.advanced(owner, attempt, moved, v.as_ref().copied())))
        };
        self.write("advance", effect).await
    }
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>> {
        read!(self.run_sql(owner, step, now_ms))
    }
    async fn claimable(
        &self,
        tier: &str,
        cursor: &mut PollCursor,
        now_ms: i64,
        limit: usize,
    ) -> Result<Vec<AttemptRef>> {
        read!(self.claimable(tier, cursor, now_ms, limit))
    }

    async fn running(&self, limit: usize) -> Result<Vec<RunningRow>> {
        read!(self.running(limit))
    }
    async fn reclaim(
        &self,
        epoch: Epoch,
        reclaims: &[(Reclaim, RetryPolicy)],
        now_ms: i64,
    ) -> Result<Verdicts<Recorded>> {
        let reclaims = reclaims.to_vec();
        let effect = move |world: &World| {
            let answer = world.real(world.sql().reclaim(world.told(epoch), &reclaims, now_ms));
            told(world, answer, |v| world.oracle(|o| o.reclaimed(epoch, &reclaims, v, now_ms)))
        };
        self.write("reclaim", effect).await
    }
    async fn cancel(
        &self,
        execution: ExecutionId,
        who: &str,
        why: &str,
        now_ms: i64,
    ) -> Result<Option<execution::Phase>> {
        read!(self.cancel(execution, who, why, now_ms))
    }

    async fn put_trigger(&self, payload: &[u8], now_ms: i64) -> Result<()> {
        read!(self.put_trigger(payload, now_ms))
    }
    async fn triggers(&self, limit: usize) -> Result<Vec<StoredTrigger>> {
        read!(self.triggers(limit))
    }
    async fn settle_triggers(&self, ids: &[i64]) -> Result<()> {
        read!(self.settle_triggers(ids))
    }
    async fn put_dead_message(&self, reason: &str, payload: &[u8], now_ms: i64) -> Result<()> {
        read!(self.put_dead_message(reason, payload, now_ms))
    }
    async fn dead(&self, limit: usize) -> Result<Vec<DeadRow>> {
        read!(self.dead(limit))
    }

    async fn keep_output(&self, writes: &[OutputWrite], now_ms: i64) -> Result<()> {
        read!(self.keep_output(writes, now_ms))
    }
    async fn output(&self, query: &OutputQuery, limit: usize) -> Result<Vec<OutputRow>> {
        read!(self.output(query, limit))
    }

    async fn prune(&self, before: &PruneBefore, cursor: &mut PruneCursor) -> Result<Pruned> {
        read!(self.prune(before, cursor))
    }
    async fn overview(&self) -> Result<Overview> {
        read!(self.overview())
    }
    async fn executions(
        &self,
        job: Option<&str>,
        before: Option<ExecutionId>,
        limit: usize,
    ) -> Result<Vec<ExecutionRow>> {
        read!(self.executions(job, before, limit))
    }
    async fn execution(&self, id: ExecutionId) -> Result<Option<ExecutionRow>> {
        read!(self.execution(id))
    }
    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>> {
        read!(self.shards(id, from, limit))
    }
    async fn attempts(&self, id: ExecutionId, limit: usize) -> Result<Vec<AttemptRow>> {
        read!(self.attempts(id, limit))
    }
    async fn tally(&self, id: ExecutionId) -> Result<(Tally, u64)> {
        read!(self.tally(id))
    }
    async fn rows_done(&self, id: ExecutionId) -> Result<u64> {
        read!(self.rows_done(id))
    }
}
