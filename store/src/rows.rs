//! What goes into the ledger and what comes out, as plain data.

use crate::firing_rows::FireExtra;
use serde::Serialize;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::{JobSpec, OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::shard::{Checkpoint, FailureClass, TakeOverReason};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId, execution, shard};

/// A JSON object, as parameters are.
pub type Params = serde_json::Map<String, serde_json::Value>;

/// A job as the ledger holds it.
#[derive(Clone, Debug)]
pub struct JobRecord {
    /// Its number.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// The current version, from 1.
    pub version: u32,
    /// The specification; the text of the fault if it can't be read. One unreadable job must not stop the others (case M-06).
    pub spec: std::result::Result<JobSpec, String>,
    /// Who paused it.
    pub paused_by: Option<String>,
    /// Its next instant.
    pub next_fire_ms: Option<i64>,
    /// Earlier schedules that still decide, each about instants up to and including the one with it, in their order.
    pub owed: Vec<(ScheduleSpec, i64)>,
}

/// What `apply_jobs` did with one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ApplyOutcome {
    /// It is new.
    Created,
    /// It has a new version.
    Updated,
    /// Nothing changed; its next instant stands (case A-01).
    Unchanged,
}

/// One applied job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Applied {
    /// Its name.
    pub name: String,
    /// Its current version.
    pub version: u32,
    /// What was done.
    pub outcome: ApplyOutcome,
}

/// One firing, or a recorded decision not to fire.
#[derive(Clone, Debug)]
pub struct FireIntent {
    /// The job.
    pub job: JobId,
    /// The version of the job that the caller looked at; if it has changed, the outcome is `Stale`.
    pub version: u32,
    /// The identity of the firing within the job.
    pub fire_key: String,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// By the schedule, or by somebody's trigger.
    pub scheduled: bool,
    /// What to do.
    pub action: FireAction,
    /// The job's next instant from now on; `None` leaves it as it is.
    pub next_fire_ms: Option<Option<i64>>,
    /// Where it comes from and what was asked for, if it is more than an instant of the schedule.
    pub extra: FireExtra,
}

/// What to do about an intent.
#[derive(Clone, Debug)]
pub enum FireAction {
    /// Make the execution, if `shardcron_domain::firing::decide` lets it.
    Fire(NewExecution),
    /// Keep it for a future instant.
    Hold {
        /// When it fires.
        until_ms: i64,
        /// In a sentence.
        reason: String,
    },
    /// Record that it does not fire.
    Record {
        /// Why not.
        kind: DecisionKind,
        /// In a sentence.
        reason: String,
    },
}

/// The next instant of a job with a fixed delay, known since its last execution has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arming {
    /// The job.
    pub job: JobId,
    /// The version whose delay it is.
    pub version: u32,
    /// The instant.
    pub next_fire_ms: i64,
}

/// An execution to be made.
#[derive(Clone, Debug)]
pub struct NewExecution {
    /// Its id, made by the leader.
    pub id: ExecutionId,
    /// The frozen plan.
    pub plan: ShardPlan,
    /// The parameters, the job's and the trigger's merged.
    pub params: Params,
    /// Its tier.
    pub tier: String,
    /// The limit of each attempt.
    pub timeout_ms: Option<i64>,
    /// How long an attempt may go without progress.
    pub stall_ms: Option<i64>,
    /// The job's policy at the version.
    pub overlap: OverlapPolicy,
}

/// What became of an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FireOutcome {
    /// The execution and its decision are in the ledger.
    Fired(ExecutionId),
    /// A decision without an execution is in the ledger.
    Skipped {
        /// Why.
        kind: DecisionKind,
        /// In a sentence.
        reason: String,
        /// The execution in the way, if one was.
        blocking: Option<ExecutionId>,
    },
    /// It is kept until its instant comes or the job is free.
    Waiting {
        /// In a sentence.
        reason: String,
        /// The execution that it waits for, if it is one.
        blocking: Option<ExecutionId>,
    },
    /// It waits already and the job is not free yet; nothing was written.
    NotYet,
    /// It had been decided before; nothing was written but the next instant.
    Duplicate(Option<ExecutionId>),
    /// The job has another version now, or is gone; nothing was written. Load it and look again.
    Stale,
    /// Somebody holds the job's row; nothing was written. Try again soon: the others of the batch did not wait for it (case D-09).
    Busy,
}

/// An execution that still has shards to hand out, or that still runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveExecution {
    /// The execution.
    pub id: ExecutionId,
    /// Its tier.
    pub tier: String,
    /// Shards of its plan.
    pub shards_total: u32,
    /// Shards whose rows exist: `0..materialized`.
    pub materialized: u32,
    /// Shards that have been handed to the broker: `0..dispatched`.
    pub dispatched: u32,
    /// Shards that have ended.
    pub ended: u32,
}

/// A retry or a reclaimed shard to hand out again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redispatch {
    /// The attempt.
    pub attempt: AttemptRef,
    /// The tier of its execution.
    pub tier: String,
}

/// Shards are handed out without messages; whoever can is to poll the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    /// Since when, milliseconds UTC.
    pub since_ms: i64,
    /// Grows with everything that is left to the pollers.
    pub marks: i64,
}

/// What every shard of an execution shares; a worker reads it once.
#[derive(Clone, Debug)]
pub struct ExecutionHead {
    /// The execution.
    pub id: ExecutionId,
    /// Its job.
    pub job: JobId,
    /// The job's specification at the version that it was fired under.
    pub spec: JobSpec,
    /// That version.
    pub version: u32,
    /// The frozen plan.
    pub plan: ShardPlan,
    /// Its parameters.
    pub params: Params,
    /// The firing's identity.
    pub fire_key: String,
    /// The instant that it is for.
    pub nominal_ms: i64,
}

/// A successful claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// Where to start.
    pub checkpoint: Option<Checkpoint>,
}

/// A shard that its worker's message brought to another worker again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TakeOver {
    /// The attempt that the message names. It stands for the attempt that runs too, if each one between was taken over.
    pub message: AttemptRef,
    /// Only from this owner, if it is known.
    pub from: Option<Incarnation>,
    /// Why.
    pub reason: TakeOverReason,
    /// The job's policy: a take-over costs a try.
    pub retry: RetryPolicy,
}

/// What became of a shard that was taken over.
#[derive(Clone, Debug, PartialEq)]
pub enum TakenOver {
    /// It runs at the new owner, under a new attempt.
    Running {
        /// That attempt.
        attempt: AttemptRef,
        /// Where to start.
        checkpoint: Option<Checkpoint>,
    },
    /// That was the last try: a dead letter.
    Ended(Recorded),
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// The attempt.
    pub attempt: AttemptRef,
    /// How it ended.
    pub outcome: AttemptOutcome,
    /// When it began, by the worker's clock.
    pub started_ms: i64,
    /// When it ended, by the worker's clock.
    pub ended_ms: i64,
    /// The job's policy, for what follows a failure.
    pub retry: RetryPolicy,
    /// For the jitter of the wait.
    pub seed: u64,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// Well.
    Success {
        /// Records that it worked on, if the handler counts them.
        rows: Option<u64>,
        /// The handler's summary as JSON, bounded by `limits::RESULT_BYTES`.
        summary: Option<String>,
    },
    /// Badly.
    Failure {
        /// Whether trying again may help.
        class: FailureClass,
        /// A sentence, bounded by `limits::ERROR_BYTES`.
        message: String,
    },
    /// Given back unfinished at shutdown; costs no try.
    HandBack,
}

/// What the ledger made of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Where the shard is now.
    pub phase: shard::Phase,
    /// When its next attempt may start.
    pub redispatch_at_ms: Option<i64>,
    /// Set if the execution ended with this write.
    pub execution_ended: Option<execution::Phase>,
}

/// A value bound to a placeholder of a user's statement.
#[derive(Clone, Debug, PartialEq)]
pub enum SqlArg {
    /// A whole number.
    Int(i64),
    /// A fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// NULL.
    Null,
}

/// One statement with `?` placeholders, which MySQL and SQLite share.
#[derive(Clone, Debug, PartialEq)]
pub struct BoundSql {
    /// The text.
    pub text: String,
    /// As many as there are placeholders.
    pub args: Vec<SqlArg>,
}

/// A user's statements with the shard's own writes, in one transaction: the attempt is checked under a row lock first, then the
/// statements run, then the checkpoint moves, then, in the last step, the result is recorded.
#[derive(Clone, Debug)]
pub struct SqlStep {
    /// The attempt.
    pub attempt: AttemptRef,
    /// The user's statements.
    pub statements: Vec<BoundSql>,
    /// The checkpoint's move.
    pub advance: Option<(Option<Checkpoint>, Checkpoint)>,
    /// The end, in the last step. Its `rows` are replaced by the ledger's own sum over all steps of all attempts.
    pub finish: Option<Ended>,
    /// Rows that the step's statements changed in another database; counted with those that change here.
    pub rows_elsewhere: u64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SqlDone {
    /// Rows that the step's statements changed.
    pub rows: u64,
    /// Set if the step finished the shard.
    pub recorded: Option<Recorded>,
}

/// Who leads, by the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// The latest epoch; 0 before the first.
    pub epoch: Epoch,
    /// The name of the scheduler that began it.
    pub holder: String,
    /// When it began, by that scheduler's clock.
    pub since_ms: i64,
}

/// A shard that runs, with its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningRow {
    /// The attempt.
    pub attempt: AttemptRef,
    /// Who claimed it.
    pub owner: Incarnation,
    /// When, by the owner's clock.
    pub claimed_ms: i64,
    /// The attempt's limit.
    pub timeout_ms: Option<i64>,
    /// How long it may go without progress.
    pub stall_ms: Option<i64>,
    /// Records done so far, where the ledger knows.
    pub rows_done: u64,
    /// Where it is.
    pub checkpoint: Option<Checkpoint>,
}

/// An execution as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct ExecutionRow {
    /// The execution.
    pub id: ExecutionId,
    /// Its job.
    pub job: String,
    /// The job's version.
    pub version: u32,
    /// The firing's identity.
    pub fire_key: String,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// When it was fired.
    pub fired_ms: i64,
    /// When it ended.
    pub ended_ms: Option<i64>,
    /// By which leader.
    pub epoch: Epoch,
    /// Where it is.
    pub phase: execution::Phase,
    /// Its tier.
    pub tier: String,
    /// Shards of its plan.
    pub shards_total: u32,
    /// Ended well.
    pub succeeded: u32,
    /// Ended badly.
    pub failed: u32,
    /// Cancelled.
    pub cancelled: u32,
    /// Running now; filled for a single execution only.
    pub running: Option<u32>,
}

/// A shard as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct ShardRow {
    /// Its position.
    pub index: u32,
    /// Where it is.
    pub phase: shard::Phase,
    /// The current attempt.
    pub attempt: u32,
    /// Tries that ended badly.
    pub failures: u32,
    /// Who runs it.
    pub owner: Option<Incarnation>,
    /// Where it is in its data.
    pub checkpoint: Option<Checkpoint>,
    /// Records done, where known.
    pub rows_done: u64,
}

/// An attempt that ended, as people see it: bad ends from the history, the good one from the result.
#[derive(Clone, Debug, Serialize)]
pub struct AttemptRow {
    /// The shard.
    pub index: u32,
    /// The attempt.
    pub attempt: u32,
    /// `success`, `failed`, `worker_lost`, `taken_over`, `hung`, `stalled`, `timeout` or `handed_back`.
    pub outcome: String,
    /// Who ran it.
    pub owner: Incarnation,
    /// When it began.
    pub started_ms: i64,
    /// When it ended.
    pub ended_ms: i64,
    /// The error or the summary.
    pub message: Option<String>,
}

/// A stored decision.
#[derive(Clone, Debug, Serialize)]
pub struct DecisionRow {
    /// The firing's identity.
    pub fire_key: String,
    /// The instant.
    pub nominal_ms: i64,
    /// What was decided.
    pub kind: DecisionKind,
    /// Why.
    pub reason: Option<String>,
    /// When.
    pub decided_ms: i64,
    /// By which leader.
    pub epoch: Epoch,
    /// The execution made, or the one in the way.
    pub execution: Option<ExecutionId>,
}

/// What can't be processed, as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct DeadRow {
    /// Its number.
    pub id: i64,
    /// `shard` or `message`.
    pub kind: String,
    /// When.
    pub at_ms: i64,
    /// Why, in a sentence.
    pub reason: String,
    /// The shard, if it is one.
    pub shard: Option<(ExecutionId, u32)>,
    /// The message's text, cut to `limits::REJECTED_TEXT_BYTES`.
    pub text: Option<String>,
    /// The shard's job, while its execution is kept.
    pub job: Option<String>,
}

/// A trigger that waits in the ledger for the leader (without RabbitMQ).
#[derive(Clone, Debug)]
pub struct StoredTrigger {
    /// Its number; settled by it.
    pub id: i64,
    /// The message as it was sent.
    pub payload: Vec<u8>,
}

/// Counts over everything that has not ended, for metrics and the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overview {
    /// By tier.
    pub tiers: Vec<TierOverview>,
    /// Dead letters that wait for a person; 1,000 ([`DEAD_LETTERS_COUNTED`](shardcron_domain::limits::DEAD_LETTERS_COUNTED)) means
    /// 1,000 or more.
    pub dead: u64,
}

/// Counts of one tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TierOverview {
    /// The tier.
    pub tier: String,
    /// Executions that have not ended.
    pub executions: u64,
    /// Shards that have not started.
    pub waiting: u64,
    /// Shards that run.
    pub running: u64,
    /// When the oldest execution that still has waiting shards was fired.
    pub oldest_waiting_ms: Option<i64>,
}

/// What retention deletes: everything that ended before these instants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneBefore {
    /// Executions that ended well.
    pub success_ms: i64,
    /// Executions that failed or were cancelled, and dead letters.
    pub failed_ms: i64,
    /// Decisions.
    pub decisions_ms: i64,
}

/// Where a pass of retention goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PruneCursor {
    /// At the executions after this one.
    Executions {
        /// The last one that was looked at.
        after: Option<ExecutionId>,
    },
    /// At the decisions of the jobs after this one.
    Decisions {
        /// The last job that has none left.
        job: i64,
    },
    /// At the dead letters.
    DeadLetters,
    /// At the requests to fill in past instants.
    Backfills,
    /// The pass is over.
    Done,
}

impl Default for PruneCursor {
    fn default() -> Self {
        PruneCursor::Executions { after: None }
    }
}

/// What retention deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Rows of all tables.
    pub rows: u64,
    /// Executions.
    pub executions: u64,
    /// Decisions.
    pub decisions: u64,
    /// Dead letters.
    pub dead_letters: u64,
    /// Requests to fill in past instants.
    pub backfills: u64,
    /// The most rows that one statement deleted.
    pub most_rows: u64,
    /// How long the slowest of the statements that deleted rows took, in milliseconds. As long it may have kept locks that others wait for.
    pub longest_ms: u64,
}

impl std::ops::AddAssign for Pruned {
    fn add_assign(&mut self, more: Self) {
        self.rows += more.rows;
        self.executions += more.executions;
        self.decisions += more.decisions;
        self.dead_letters += more.dead_letters;
        self.backfills += more.backfills;
        self.most_rows = self.most_rows.max(more.most_rows);
        self.longest_ms = self.longest_ms.max(more.longest_ms);
    }
}
