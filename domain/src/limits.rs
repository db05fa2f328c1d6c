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
/// How far ahead a failed handler may put its next attempt. A service that names a later instant is asked once a day.
pub const NOT_BEFORE_MAX_MS: u64 = 24 * 3_600_000;
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
/// Shards of one execution that travel in one message at most: a redelivery brings all of them again, and a worker settles them by one
/// word of 64 bits.
pub const GROUP_MAX: u32 = 64;
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
/// Rows that a statement of retention may delete however long the one before it took, and that the first one at a table deletes, of which
/// nobody knows yet. A statement also waits for locks and looks for its rows: with fewer of them there would only be more statements.
pub const PRUNE_ROWS_LEAST: u64 = 200;
/// How long a statement of retention should take: a fourth of the 200 ms that nobody may be kept waiting (case B-06), since the next one may
/// meet slower rows.
pub const PRUNE_STATEMENT_MS: u64 = 50;
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
/// Failed shards that one transaction sends back, and shards that a person may name at once. More goes in several.
pub const REOPEN_BATCH: usize = 5_000;
/// Dead letters that one transaction settles.
pub const DEAD_BATCH: usize = 500;
/// Length of a cache's name: a metric's label.
pub const CACHE_NAME_BYTES: usize = 40;
/// Named caches of one process: each is a label of metrics.
pub const CACHES_MAX: usize = 32;
/// Length of a cache key.
pub const CACHE_KEY_BYTES: usize = 512;
/// A cached value as JSON; a larger one is loaded each time.
pub const CACHE_VALUE_BYTES: usize = 256 * 1024;
/// What one cache holds in memory; the least used go first.
pub const CACHE_BYTES: u64 = 32 * 1024 * 1024;
/// How long a value is in memory.
pub const CACHE_FRESH_MS: u64 = 60_000;
/// How long it is known that a key does not exist.
pub const CACHE_ABSENT_MS: u64 = 30_000;
/// How long the shared level keeps a value, and by how much more at random.
pub const CACHE_SHARED_MS: u64 = 300_000;
/// See [`CACHE_SHARED_MS`].
pub const CACHE_SHARED_SPREAD_MS: u64 = 60_000;
/// Keys that one question to the shared level asks for.
pub const CACHE_BATCH: usize = 500;
/// Keys of a cache's filter: 12 MB of bits.
pub const CACHE_FILTER_KEYS: usize = 10_000_000;
/// Entries of a job's `preload`.
pub const PRELOAD_ENTRIES: usize = 10;
/// Keys that one entry of `preload` stands for at most.
pub const PRELOAD_KEYS: usize = 10_000;
/// Length of a query of `preload`.
pub const PRELOAD_QUERY_BYTES: usize = 8 * 1024;
/// How long a query of `preload` may take. An attempt waits for less; what comes later helps the shards after it.
pub const PRELOAD_QUERY_MS: u64 = 5_000;
/// Answers to queries of `preload` that a worker remembers, each for one execution: with their keys some megabytes.
pub const PRELOAD_ANSWERS: usize = 64;
/// Keys of a worker that are counted, to find the hot ones among them.
pub const HOT_KEYS_COUNTED: usize = 512;
/// Hot keys that travel in a heartbeat.
pub const HOT_KEYS_KEPT: usize = 64;
/// Length of a hot key: longer ones would swell the heartbeat.
pub const HOT_KEY_BYTES: usize = 128;
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
/// Variables that a job may set for a program.
pub const PROGRAM_ENV_ENTRIES: usize = 64;
/// Names and values of those variables. They stand in the job and in each of its versions.
pub const PROGRAM_ENV_BYTES: usize = 16 * 1024;
/// The answer of a service that is read: a result's summary with room for escapes.
pub const HTTP_ANSWER_BYTES: usize = 128 * 1024;
/// Headers that a job may name for a call over HTTP.
pub const HEADERS_MAX: usize = 32;
/// An address of a service; common servers take no longer ones.
pub const URL_BYTES: usize = 2_000;
/// One piece of an attempt's output at the ledger; as a literal it has twice the size, far below any `max_allowed_packet`.
pub const OUTPUT_CHUNK_BYTES: usize = 16 * 1024;
/// The beginning of an attempt's output that is kept.
pub const OUTPUT_HEAD_BYTES: usize = 256 * 1024;
/// The end of an attempt's output that is kept. With the beginning: a mebibyte of each attempt.
pub const OUTPUT_TAIL_BYTES: usize = 768 * 1024;
/// Output behind the beginning that waits in memory for the next write. What is more is cut, so this is also what an attempt that
/// prints without end may write to the ledger each time.
pub const OUTPUT_PENDING_BYTES: usize = 64 * 1024;
/// A line by which a program speaks to its worker: a result's summary with room for escapes.
pub const PROGRAM_LINE_BYTES: usize = 128 * 1024;
/// The share of the processors that a program may be given, in hundredths of one: as many as a large machine has.
pub const CPU_PERCENT_MAX: u32 = 100_000;
/// Addresses of ended attempts at which a worker still tells a service that it is late, or that its answer was taken.
pub const CALLBACKS_REMEMBERED: usize = 4_096;
/// Names of metrics that the programs of one job, and of all jobs, may have at one worker: each is a series at Prometheus.
pub const PROGRAM_METRICS: (usize, usize) = (20, 500);
/// Faulty lines of one program that are remarked on.
pub const PROGRAM_WARNINGS: usize = 10;
/// Bytes of a record's key (`once`): it is the end of a primary key, and InnoDB's index entries hold 3,072.
pub const RECORD_KEY_BYTES: usize = 1_000;
/// Records of one batch of `once`: bounds the statements that it becomes.
pub const RECORDS_PER_BATCH: usize = 5_000;
/// Why a record failed, in bytes.
pub const RECORD_MESSAGE_BYTES: usize = 500;
/// Records that a report names; the rest is counted.
pub const RECORDS_REPORTED: usize = 20;
/// How long a handler's transaction may wait for its next statement: its locks keep the supervisor, and in SQLite everybody, waiting.
/// The same as the server's own limit for an idle transaction (`store/src/sql/pool.rs`).
pub const TRANSACTION_IDLE_MS: u64 = 3_000;
/// Shards that the first shard of a `map` emits unless its job says otherwise.
pub const EMITTED_DEFAULT: u32 = 10_000;
/// Shards that the first shard of a `map` may emit at most. Each has a payload in the ledger, so fewer than other shards.
pub const EMITTED_MAX: u32 = 100_000;
/// Payload of one emitted shard as JSON. Data belongs elsewhere; this says which.
pub const EMITTED_BYTES: usize = 16 * 1024;
/// The answer of a service to the first shard of a map: all that it emits, at once. A program or a Rust handler is not bound by it.
pub const EMITS_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Results of sub-tasks in the input file of a program that reduces.
pub const REDUCE_FILE_BYTES: usize = 256 * 1024 * 1024;
/// Results of sub-tasks in the body of a request to a service that reduces.
pub const REDUCE_BODY_BYTES: usize = 8 * 1024 * 1024;
/// Emitted shards that are written at once.
pub const EMITTED_PER_WRITE: usize = 500;
/// Results that a reducing shard reads at once.
pub const SUB_RESULTS_PAGE: usize = 1_000;
/// Shards of a plan that names each of its cuts: the plan stands in the execution, and every worker of it reads it.
pub const CUTS_MAX: u32 = 10_000;
/// Files of one plan.
pub const FILES_MAX: usize = 10_000;
/// JSON of a plan that is made at its firing.
pub const PLAN_BYTES: usize = 4 * 1024 * 1024;
/// How long a plan that needs a look at files or tables may take; then the firing is given up, with the reason.
pub const PLANNING_MS: u64 = 120_000;
/// Plans that the leader makes at the same time. They read disks and tables that others want, too.
pub const PLANNING_AT_ONCE: usize = 4;
