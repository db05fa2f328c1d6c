//! The port of the ledger.

use crate::error::Result;
use crate::job_rows::*;
use crate::output_rows::*;
use crate::rows::*;
use async_trait::async_trait;
use shardcron_domain::execution;
use shardcron_domain::invariants::Tally;
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, JobSpec, ShardRef};

/// One answer for each entry of a batch, in the batch's order.
pub type Verdicts<T> = Vec<std::result::Result<T, Rejection>>;

/// The durable truth. Every method is one transaction at most, may be called again after an error, and then does not do twice
/// what the first call did.
///
/// All methods may return [`crate::StoreError::Unavailable`]; those with an `epoch` may return [`crate::StoreError::Deposed`],
/// and then have written nothing.
#[async_trait]
#[allow(missing_docs, reason = "each method is documented where its group begins")]
pub trait Ledger:
    crate::firing_port::FiringLedger
    + crate::ops_port::OpsLedger
    + crate::sharding_port::ShardingLedger
    + crate::effects_port::EffectsLedger
{
    // ---- set-up -------------------------------------------------------------------------------------------------------

    /// Brings the tables to this program's version. Any number of processes may call it at once; one migrates, the others wait.
    async fn migrate(&self) -> Result<()>;
    /// The server in one line for people: product and version.
    async fn server_version(&self) -> Result<String>;
    /// What must hold at the server and does not: each a sentence with its remedy.
    async fn check_server(&self) -> Result<Vec<String>>;
    /// Milliseconds UTC by the database's clock.
    async fn server_now_ms(&self) -> Result<i64>;

    // ---- leadership ---------------------------------------------------------------------------------------------------

    /// Begins a new epoch and deposes every earlier one.
    async fn begin_epoch(&self, holder: &str, now_ms: i64) -> Result<Epoch>;
    /// Who leads.
    async fn leadership(&self) -> Result<Leadership>;

    // ---- jobs ---------------------------------------------------------------------------------------------------------

    /// Creates or updates jobs, in one transaction: [`Ledger::change_jobs`] without looking at what was there. With each comes the
    /// next instant that its schedule would have from now.
    async fn apply_jobs(&self, jobs: &[(JobSpec, Option<i64>)], who: &str, now_ms: i64) -> Result<Vec<Applied>> {
        let apply = jobs
            .iter()
            .map(|(spec, next)| JobChange { spec: spec.clone(), next_fire_ms: *next, expected: None })
            .collect();
        Ok(self.change_jobs(&JobChanges { apply, ..JobChanges::default() }, who, now_ms).await?.applied)
    }
    /// Creates, updates and deletes jobs, in one transaction. The given next instant is taken for a new job, and for a changed one
    /// by the rule of [`next_after_change`](shardcron_domain::firing::next_after_change), which leaves instants that are due to the
    /// schedule that they are of. Bumps the jobs' revision if anything changed. `who` goes into the audit table.
    ///
    /// [`Conflict`](crate::StoreError::Conflict): a job is not what was expected; nothing was changed.
    async fn change_jobs(&self, changes: &JobChanges, who: &str, now_ms: i64) -> Result<Changed>;
    /// The latest versions of a job, newest first; a deleted job's, too. Empty: there never was such a job.
    async fn job_versions(&self, name: &str, limit: usize) -> Result<Vec<VersionRow>>;
    /// One version of a job.
    async fn job_version(&self, name: &str, version: u32) -> Result<Option<VersionRow>>;
    /// The jobs that a source applied last, with their versions, by name.
    async fn jobs_of_source(&self, source: &str) -> Result<Vec<(String, u32)>>;
    /// All jobs, by name.
    async fn jobs(&self) -> Result<Vec<JobRecord>>;
    /// One job.
    async fn job(&self, name: &str) -> Result<Option<JobRecord>>;
    /// Pauses (`Some(who)`) or resumes a job; column-wise, so that a scheduler pass can't undo it (case S-18). False: no such job.
    async fn set_paused(&self, name: &str, paused_by: Option<&str>, who: &str, now_ms: i64) -> Result<bool>;
    /// A number that grows with every change of any job; the leader polls it.
    async fn jobs_revision(&self) -> Result<i64>;
    /// At most `limit` of the jobs that were changed after what `after` has seen, in the order of their changes. A job that is changed
    /// between two pages comes again. Pauses count as changes, next instants do not.
    async fn jobs_changed(&self, after: JobsCursor, limit: usize) -> Result<JobPage>;

    // ---- firing (leader) ----------------------------------------------------------------------------------------------

    /// Decides and writes a batch of firings in one transaction under the fence: executions, their first
    /// `limits::SHARD_ROWS_PER_WRITE` shards, decisions, next instants. At most `limits::FIRINGS_PER_WRITE` intents.
    async fn fire(&self, epoch: Epoch, intents: &[FireIntent], now_ms: i64) -> Result<Vec<FireOutcome>>;
    /// Of the given jobs, those that have no next instant and nothing that runs; with each, when its last execution ended or its
    /// last instant was decided against, whichever is later. `None`: it never fired.
    async fn idle_since(&self, jobs: &[JobId]) -> Result<Vec<(JobId, Option<i64>)>>;
    /// Sets the next instant of jobs that have none and still have the version; returns those that it was set for.
    async fn arm(&self, epoch: Epoch, arming: &[Arming]) -> Result<Vec<Arming>>;
    /// The decision under a fire key.
    async fn decision(&self, job: JobId, fire_key: &str) -> Result<Option<DecisionRow>>;
    /// Decisions of a job with nominal instants in `from..=to`, in their order.
    async fn decisions(&self, job: JobId, from_ms: i64, to_ms: i64, limit: usize) -> Result<Vec<DecisionRow>>;

    // ---- dispatch (leader) --------------------------------------------------------------------------------------------

    /// Every execution that has not ended, by id.
    async fn active_executions(&self) -> Result<Vec<ActiveExecution>>;
    /// Writes shard rows up to (not including) `upto`; returns how far they reach now.
    async fn materialize(&self, epoch: Epoch, execution: ExecutionId, upto: u32) -> Result<u32>;
    /// Notes what the broker has confirmed: first attempts below the given shard of each execution, and redispatched attempts.
    async fn mark_dispatched(&self, epoch: Epoch, firsts: &[(ExecutionId, u32)], again: &[AttemptRef]) -> Result<()>;
    /// Notes what is handed out without a message, because the broker is away, and in the same transaction that workers are to poll
    /// (see [`Ledger::polling`]). With nothing to note it only tells the workers so.
    async fn leave_to_pollers(
        &self,
        epoch: Epoch,
        firsts: &[(ExecutionId, u32)],
        again: &[AttemptRef],
        now_ms: i64,
    ) -> Result<()>;
    /// Whether shards have been handed out for which there may be no message.
    async fn polling(&self) -> Result<Option<Polling>>;
    /// Says that there is a message now for everything that was handed out until `seen` was read. False, and nothing is changed, if
    /// something has been left to the pollers since.
    async fn end_polling(&self, epoch: Epoch, seen: &Polling) -> Result<bool>;
    /// Pending shards of all tiers that are due and have been handed out, in the order of execution and shard, behind `after`.
    async fn handed_out(&self, after: Option<ShardRef>, now_ms: i64, limit: usize) -> Result<Vec<Redispatch>>;
    /// How many shards of a tier are handed out and not begun, retries that wait left out: the queue of those who poll. Read in
    /// passing, so it may be wrong by what changes meanwhile.
    async fn outstanding(&self, tier: &str) -> Result<u32>;
    /// Retries and reclaimed shards whose time has come, the longest due first, but for those of the tiers in `without`.
    async fn redispatch_due(&self, now_ms: i64, without: &[String], limit: usize) -> Result<Vec<Redispatch>>;
    /// Shards from `from` on that are due, have been handed out, and are nevertheless pending: lost by the transport if its queue
    /// is empty.
    async fn stranded(&self, execution: ExecutionId, from: u32, now_ms: i64, limit: usize) -> Result<Vec<AttemptRef>>;

    // ---- workers ------------------------------------------------------------------------------------------------------

    /// What the shards of an execution share; `None` if there is no such execution.
    async fn execution_head(&self, execution: ExecutionId) -> Result<Option<ExecutionHead>>;
    /// The same of many at once; those that do not exist are left out. An error if one of them can't be read.
    async fn execution_heads(&self, executions: &[ExecutionId]) -> Result<Vec<ExecutionHead>>;
    /// Claims a batch. An attempt that is already running at this owner (the answer to an earlier call was lost) is claimed.
    async fn claim(&self, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Result<Verdicts<Claimed>>;
    /// Takes shards over from their owners, as `shard::Event::TakeOver` says: each runs at once at `owner` under its next attempt. A
    /// shard that an earlier call has brought to this owner (its answer was lost) is taken over.
    async fn take_over(&self, owner: Incarnation, wanted: &[TakeOver], now_ms: i64) -> Result<Verdicts<TakenOver>>;
    /// Records a batch of ends, with results, history, redispatches, dead letters and the executions' counters, in one
    /// transaction. An end that is already recorded by the same attempt is refused as `Terminal` or `StaleAttempt`.
    async fn record(&self, owner: Incarnation, ends: &[Ended], now_ms: i64) -> Result<Verdicts<Recorded>>;
    /// Moves a checkpoint by compare-and-set under the attempt's fence; adds `rows` to the shard's count. A checkpoint that already
    /// stands at `to` (the answer to an earlier call was lost) is a success that adds nothing.
    async fn advance(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: Option<Checkpoint>,
        to: Checkpoint,
        rows: u64,
    ) -> Result<std::result::Result<(), Rejection>>;
    /// Runs a user's statements under the attempt's fence; see [`SqlStep`].
    async fn run_sql(
        &self,
        owner: Incarnation,
        step: &SqlStep,
        now_ms: i64,
    ) -> Result<std::result::Result<SqlDone, Rejection>>;
    /// Pending shards of a tier that have been handed out and are due, beginning after `cursor` and wrapping round at the end; the
    /// cursor is moved. For brokers that poll.
    async fn claimable(
        &self,
        tier: &str,
        cursor: &mut PollCursor,
        now_ms: i64,
        limit: usize,
    ) -> Result<Vec<AttemptRef>>;

    // ---- supervision (leader) -----------------------------------------------------------------------------------------

    /// Running shards with their owners.
    async fn running(&self, limit: usize) -> Result<Vec<RunningRow>>;
    /// Takes running shards from their owners, as `shard::Event::Reclaim` says.
    async fn reclaim(
        &self,
        epoch: Epoch,
        reclaims: &[(Reclaim, RetryPolicy)],
        now_ms: i64,
    ) -> Result<Verdicts<Recorded>>;
    /// Cancels an execution and all its shards that have not ended; `why` is kept with it. Returns where it stands then: a phase other
    /// than `Cancelled` says that it had ended before. `None`: no such execution.
    async fn cancel(
        &self,
        execution: ExecutionId,
        who: &str,
        why: &str,
        now_ms: i64,
    ) -> Result<Option<execution::Phase>>;

    // ---- triggers and dead letters ------------------------------------------------------------------------------------

    /// Leaves a trigger for the leader (without RabbitMQ).
    async fn put_trigger(&self, payload: &[u8], now_ms: i64) -> Result<()>;
    /// The oldest waiting triggers; they stay until they are settled.
    async fn triggers(&self, limit: usize) -> Result<Vec<StoredTrigger>>;
    /// Takes settled triggers away.
    async fn settle_triggers(&self, ids: &[i64]) -> Result<()>;
    /// Keeps a message that can't be processed, with the reason.
    async fn put_dead_message(&self, reason: &str, payload: &[u8], now_ms: i64) -> Result<()>;
    /// The latest dead letters.
    async fn dead(&self, limit: usize) -> Result<Vec<DeadRow>>;

    // ---- output -------------------------------------------------------------------------------------------------------

    /// Keeps output of attempts, in one transaction. May be repeated after an error; no chunk comes twice. Not fenced: it is of an
    /// attempt, whatever has become of the attempt, and says nothing about the shard.
    async fn keep_output(&self, writes: &[OutputWrite], now_ms: i64) -> Result<()>;
    /// Output of an execution in the order in which it was kept.
    async fn output(&self, query: &OutputQuery, limit: usize) -> Result<Vec<OutputRow>>;

    // ---- retention ----------------------------------------------------------------------------------------------------

    /// Deletes some of what ended before the given instants and moves the cursor; a few statements of at most `limits::PRUNE_ROWS`
    /// rows each. Any number of processes may do it at once.
    async fn prune(&self, before: &PruneBefore, cursor: &mut PruneCursor) -> Result<Pruned>;

    // ---- looking ------------------------------------------------------------------------------------------------------

    /// Counts over everything that has not ended.
    async fn overview(&self) -> Result<Overview>;
    /// The latest executions, of one job or all, below `before`, newest first.
    async fn executions(
        &self,
        job: Option<&str>,
        before: Option<ExecutionId>,
        limit: usize,
    ) -> Result<Vec<ExecutionRow>>;
    /// One execution.
    async fn execution(&self, id: ExecutionId) -> Result<Option<ExecutionRow>>;
    /// Shards of an execution from `from` on.
    async fn shards(&self, id: ExecutionId, from: u32, limit: usize) -> Result<Vec<ShardRow>>;
    /// Ended attempts of an execution: those that ended badly first (by shard and attempt), then results up to the limit.
    async fn attempts(&self, id: ExecutionId, limit: usize) -> Result<Vec<AttemptRow>>;
    /// What the oracle counts (see `invariants::Tally`), and the sum of all attempts that were started.
    async fn tally(&self, id: ExecutionId) -> Result<(Tally, u64)>;
    /// Records done by all shards so far.
    async fn rows_done(&self, id: ExecutionId) -> Result<u64>;
}

/// Where a poller goes on: round and round over the active executions of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollCursor {
    /// The execution that was looked at last.
    pub execution: Option<ExecutionId>,
    /// The shard to go on from.
    pub index: u32,
}
