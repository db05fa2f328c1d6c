//! Every bound of the system, with its reason. A number that limits something stands here and nowhere else.

/// Shards of one execution. A million no-op shards take some minutes; more belongs into larger shards.
pub const SHARDS_MAX: u32 = 1_000_000;
/// JSON of a job's list of items. It stands in the job, in each of its versions and in each of its executions, and every claim of
/// a worker that meets the execution for the first time reads it.
pub const SHARDS_LIST_BYTES: usize = 256 * 1024;
/// Shard rows that are written in the firing transaction itself; the rest follows in chunks of this size, so that a job of a
/// million shards doesn't hold the leader's row for seconds while other jobs are due (docs/decisions/0004).
pub const SHARD_ROWS_PER_WRITE: u32 = 1_000;
/// Entries of one group commit. Measured: batches of 512 are no better than 128, so this is where a backlog is cut.
pub const GROUP_COMMIT_ENTRIES: usize = 512;
/// How long the first entry of a group commit waits for company.
pub const GROUP_COMMIT_WAIT_MS: u64 = 2;
/// Firings in one transaction. Bounds how long the leader's row stays locked.
pub const FIRINGS_PER_WRITE: usize = 250;
/// Missed instants of one job that are looked at in one pass after a downtime; beyond it they are counted, not listed.
pub const MISSED_INSTANTS: usize = 1_000;
/// Length of a job's name in bytes. It is a routing key, a metric label and part of an index.
pub const JOB_NAME_BYTES: usize = 100;
/// Length of a fire key in bytes; an index over (job, key) has to stay within InnoDB's oldest limit of 767 bytes.
pub const FIRE_KEY_BYTES: usize = 180;
/// Length of a request id in bytes; the fire key is this with a prefix.
pub const REQUEST_ID_BYTES: usize = 128;
/// A trigger message from a person. The management UI's form is not made for more.
pub const TRIGGER_BYTES: usize = 64 * 1024;
/// Parameters of one execution as JSON: they travel to every worker and stand in the ledger.
pub const PARAMS_BYTES: usize = 16 * 1024;
/// How deep a trigger's JSON may nest; serde_json itself stops at 128.
pub const JSON_DEPTH: usize = 64;
/// Raw text of a rejected message that is kept for the person who looks for it.
pub const REJECTED_TEXT_BYTES: usize = 4 * 1024;
/// A handler's result summary. Larger belongs where the handler's data goes.
pub const RESULT_BYTES: usize = 64 * 1024;
/// An error text in the ledger.
pub const ERROR_BYTES: usize = 4 * 1024;
/// Output of one attempt of an `exec` handler that is kept; what is beyond is counted and marked.
pub const OUTPUT_BYTES: usize = 64 * 1024;
/// One checkpoint's position.
pub const CHECKPOINT_BYTES: usize = 1024;
/// Tries at a shard that a job may ask for.
pub const ATTEMPTS_MAX: u32 = 1_000;
/// Messages that one publisher has in flight to the broker without their confirms.
pub const PUBLISH_WINDOW: usize = 1_024;
/// Ready messages in one tier's queue at most, however fast it drains.
pub const QUEUE_WINDOW_MAX: u32 = 4_096;
/// Ready messages in one tier's queue at least, so that a consumer never waits for the dispatcher's next look.
pub const QUEUE_WINDOW_MIN: u32 = 16;
/// Messages that one consumer may hold unacked.
pub const PREFETCH_MAX: u16 = 1_024;
/// Shards of one execution that are published before another execution of the tier has its turn.
pub const DISPATCH_QUANTUM: u32 = 64;
/// Retries and reclaimed shards that one look at the ledger takes up.
pub const REDISPATCH_BATCH: usize = 500;
/// A worker's attempts at the same time per tier.
pub const CONCURRENCY_MAX: usize = 1_024;
/// Dead letters that an overview counts: every sweep of the supervisor asks, and the table only grows. This many means "or more".
pub const DEAD_LETTERS_COUNTED: usize = 1_000;
/// A beat that is too old must stay so for this long by the observer's own clock (or a third of the lost-after time, if that is
/// shorter) before its worker is lost: short, since it is added to the time in which every real loss is seen.
pub const LOSS_CONFIRM_MS: i64 = 900;
/// Tiers by configuration. Each has a queue, a consumer and a metric label.
pub const TIERS_MAX: usize = 16;
/// The shortest `stall_timeout`: below it, a pause of the ledger or of the machine would be taken for a hung handler.
pub const STALL_TIMEOUT_MIN_MS: u64 = 1_000;
/// Rows that one statement of retention deletes at most: a lock on them lasts for some tens of milliseconds then.
pub const PRUNE_ROWS: u64 = 5_000;
/// How often a part that is away and can be done without is asked again. Bounds how late its return is noticed.
pub const CIRCUIT_PROBE_MS: u64 = 1_000;
/// A part that fails again within this time of its return has not really returned.
pub const CIRCUIT_STABLE_MS: i64 = 10_000;
/// How often the time between two probes doubles for such a part: up to 16 s.
pub const CIRCUIT_STRIKES_MAX: u32 = 4;
/// Firings of one job that may wait for it to become free. More would be a backlog that nobody works off.
pub const OVERLAP_QUEUE_MAX: u32 = 100;
/// Triggers of one job that may wait for a future instant.
pub const FUTURE_TRIGGERS: usize = 1_000;
/// Past instants of one backfill at most; a longer range is cut into several, each with its own progress.
pub const BACKFILL_INSTANTS: usize = 10_000;
/// Past instants of one backfill unless it asks for more.
pub const BACKFILL_INSTANTS_DEFAULT: usize = 1_000;
/// Executions of a job whose overlap policy is `allow` beyond which its backfill waits.
pub const BACKFILL_AT_ONCE: u32 = 8;
/// Upstream jobs of one job.
pub const UPSTREAMS_MAX: usize = 32;
/// Ends of one upstream that are kept while a fan-in waits for its other upstreams; older ones are dropped.
pub const UPSTREAM_ENDS_KEPT: usize = 200;
/// Bytes of an upstream's result summary that its downstream gets.
pub const UPSTREAM_SUMMARY_BYTES: usize = 1_024;
/// Shards that one trigger may pick out of a plan.
pub const SHARDS_PICKED: usize = 10_000;
/// What a trigger's or a backfill's sender says of himself.
pub const WHO_BYTES: usize = 255;
/// Entries of a schedule's `except`. More days belong into a calendar.
pub const EXCEPTIONS_MAX: usize = 100;
/// Days and ranges in the calendars of one schedule: a century of a country's holidays.
pub const CALENDAR_ENTRIES: usize = 2_000;
/// Text of the calendars of one schedule. It stands in the job and in each of its versions.
pub const CALENDAR_BYTES: usize = 64 * 1024;
/// Instants of a schedule that one look walks over in search of one that is not excepted.
pub const INSTANTS_WALKED: usize = 100_000;
/// Firings that `jobs next` shows of one job.
pub const COMING_MAX: usize = 10_000;
/// Jobs with a fixed delay whose end one look at the ledger asks for.
pub const DELAYED_BATCH: usize = 500;
/// Faults of a job file that are listed: more than a screen of them is one mistake many times.
pub const FAULTS_OF_FILE: usize = 50;
/// Keys of one job that are taken out for their faults, to look for further ones.
pub const FAULTS_OF_JOB: usize = 20;
