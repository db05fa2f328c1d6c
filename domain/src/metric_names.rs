//! The names of every metric and label of the program, in one place, so that what emits them, what describes them and what
//! draws them can't drift apart. Names only: nothing here records anything.
//!
//! Labels are tiers, outcomes, reasons, kinds and invariant ids: sets that are bounded. An execution, a shard, a worker or an
//! attempt is never a label; it is a field of a log line.

/// Gauge by tier: shards that have not started.
pub const SHARDS_WAITING: &str = "shardcron_shards_waiting";
/// Gauge by tier: shards that run.
pub const SHARDS_RUNNING: &str = "shardcron_shards_running";
/// Counter by outcome and tier: ends of attempts that the ledger took.
pub const RESULTS_RECORDED: &str = "shardcron_results_recorded_total";
/// Counter by tier: attempts after the first that were handed out.
pub const RETRIES: &str = "shardcron_retries_total";
/// Counter by reason and place (`claim` or `record`): writes that the ledger refused as stale, late or double.
pub const REFUSED: &str = "shardcron_refused_total";
/// Histogram: seconds from a nominal instant to its decision in the ledger.
pub const FIRING_LATENESS: &str = "shardcron_firing_lateness_seconds";
/// Counter by kind: decisions written, fired or not.
pub const DECISIONS: &str = "shardcron_decisions_total";
/// Histogram by lane: entries of a group commit.
pub const GROUP_COMMIT_ENTRIES: &str = "shardcron_group_commit_entries";
/// Histogram by lane: seconds that a group commit took.
pub const GROUP_COMMIT_SECONDS: &str = "shardcron_group_commit_seconds";
/// Histogram by tier and outcome: seconds that an attempt ran.
pub const ATTEMPT_SECONDS: &str = "shardcron_attempt_seconds";
/// Gauge by tier: messages that may stand in the tier's queue now.
pub const PUBLISH_WINDOW: &str = "shardcron_publish_window";
/// Gauge: 1 while this process leads.
pub const LEADER: &str = "shardcron_leader";
/// Gauge: the latest epoch that this process knows.
pub const EPOCH: &str = "shardcron_epoch";
/// Gauge by tier: attempts that this worker runs now.
pub const WORKER_RUNNING: &str = "shardcron_worker_running";
/// Counter by reason: shards taken from their owners.
pub const TAKEOVERS: &str = "shardcron_takeovers_total";
/// Counter by invariant: broken invariants seen in a release build. Anything but 0 is a bug.
pub const INVARIANT_VIOLATIONS: &str = "shardcron_invariant_violations_total";
/// Counter: steps of sql handlers whose answer was lost and whose outcome was read back from the ledger.
pub const SQL_ANSWERS_LOST: &str = "shardcron_sql_answers_lost_total";

/// Counter by cache and outcome: questions to the caches of handlers (`memory`, `together`, `shared`, `loaded`, `filtered`, …).
pub const CACHE: &str = "shardcron_cache_total";
/// Counter: shards that the transport had lost and that were handed out again.
pub const REPUBLISHED: &str = "shardcron_republished_total";
/// Gauge: 1 while this worker holds results because the ledger is away.
pub const LEDGER_AWAY: &str = "shardcron_ledger_away";
/// Gauge by mode: 1 while this process works in a degraded way (see `modes::Mode`).
pub const DEGRADED: &str = "shardcron_degraded";
/// Counter by mode: how often a degraded mode was entered.
pub const DEGRADED_ENTERED: &str = "shardcron_degraded_entered_total";
/// Counter by job and name: what programs count.
pub const PROGRAM_COUNTER: &str = "shardcron_program_counter_total";
/// Gauge by job and name: what programs measure.
pub const PROGRAM_GAUGE: &str = "shardcron_program_gauge";
/// Counter by outcome (`taken` or `refused`): callbacks of services.
pub const HTTP_CALLBACKS: &str = "shardcron_http_callbacks_total";
/// Counter by outcome (a status class, `error` or `refused`): requests of http handlers.
pub const HTTP_REQUESTS: &str = "shardcron_http_handler_requests_total";

/// Label: the isolation class.
pub const LABEL_TIER: &str = "tier";
/// Label: how an attempt ended.
pub const LABEL_OUTCOME: &str = "outcome";
/// Label: why (of `shard::Rejection::label` or `shard::ReclaimReason`).
pub const LABEL_REASON: &str = "reason";
/// Label: `claim` or `record`.
pub const LABEL_AT: &str = "at";
/// Label: of a decision.
pub const LABEL_KIND: &str = "kind";
/// Label: which group commit.
pub const LABEL_LANE: &str = "lane";
/// Label: of `modes::Mode`.
pub const LABEL_MODE: &str = "mode";
/// Label: a cache, by the name that the handler's program gives it; at most `limits::CACHES_MAX` of them.
pub const LABEL_CACHE: &str = "cache";
/// Label: which invariant.
pub const LABEL_ID: &str = "id";
/// Label: a job, for what its programs measure.
pub const LABEL_JOB: &str = "job";
/// Label: the name that a program gives; see `limits::PROGRAM_METRICS`.
pub const LABEL_NAME: &str = "name";
