//! Configuration: `shardcron.toml`, then `SHARDCRON_*` variables, then flags; the later wins.

use crate::allowed::Leftovers;
use crate::cache_config::CacheConfig;
use crate::databases::Databases;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use shardcron_domain::fallback::STAND_IN_PREFIX;
use shardcron_domain::jobfile::without_values;
use shardcron_domain::limits::{CONCURRENCY_MAX, TIERS_MAX};
use shardcron_domain::program::ProgramLimits;
use shardcron_domain::units::Span;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything that a process can be told. Since 0.1.0 unless said otherwise.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The durable truth.
    pub ledger: LedgerConfig,
    /// The transport.
    pub broker: BrokerConfig,
    /// Lease, presence and idempotency keys.
    pub redis: RedisConfig,
    /// Health, metrics and the API.
    pub http: HttpConfig,
    /// The scheduler role.
    pub scheduler: SchedulerConfig,
    /// The worker role.
    pub worker: WorkerConfig,
    /// How long what has ended is kept.
    pub retention: RetentionConfig,
    /// Other databases in which this worker's `sql` handlers and preloads may run: names, as job files use them, and URLs, or where each
    /// URL is kept (`env:NAME`, `file:/path`).
    pub databases: Databases,
    /// What workers do while no scheduler leads.
    pub fallback: FallbackConfig,
    /// The caches that handlers have.
    pub cache: CacheConfig,
    /// What the process writes to standard error.
    pub log: LogConfig,
}

/// The durable truth.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LedgerConfig {
    /// `mysql://user:password@host:3306/database` or `sqlite://path`. Default: `sqlite://shardcron.db`.
    pub url: String,
    /// Whether a scheduler or worker brings the tables up to date when it starts. Default: true.
    pub migrate: bool,
    /// How long MySQL or MariaDB has to answer one statement; after that it counts as away. Default: 30s.
    pub call_timeout: Span,
}

impl Default for LedgerConfig {
    fn default() -> Self {
        LedgerConfig { url: "sqlite://shardcron.db".into(), migrate: true, call_timeout: Span::secs(30) }
    }
}

/// The transport.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BrokerConfig {
    /// `amqp://user:password@host:5672/vhost`. Absent: workers poll the ledger.
    pub url: Option<String>,
    /// What the names of queues and exchanges begin with. Default: `shardcron`.
    pub prefix: String,
    /// How often the ledger is polled when there is no RabbitMQ, or it is away. Default: 100ms.
    pub poll: Span,
    /// Whether work goes on through the ledger while RabbitMQ is away. Default: true.
    pub fallback: bool,
    /// How long RabbitMQ has to be away for that. Default: 2s.
    pub fallback_after: Span,
}

impl Default for BrokerConfig {
    fn default() -> Self {
        BrokerConfig {
            url: None,
            prefix: "shardcron".into(),
            poll: Span(100),
            fallback: true,
            fallback_after: Span::secs(2),
        }
    }
}

/// Lease, presence and idempotency keys.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedisConfig {
    /// `redis://:password@host:6379/0`. Absent: rows in the ledger.
    pub url: Option<String>,
    /// What the names of keys begin with. Default: `shardcron`.
    pub prefix: String,
    /// How long an attempt's idempotency key is remembered. It has to outlive a broker's restart. Default: 2m.
    pub idempotency_ttl: Span,
}

impl Default for RedisConfig {
    fn default() -> Self {
        RedisConfig { url: None, prefix: "shardcron".into(), idempotency_ttl: Span::mins(2) }
    }
}

/// Health, metrics and the API.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Where to listen. Default: 127.0.0.1:8081; if that is taken and was not asked for, any free port. `off`: not at all.
    pub listen: Option<String>,
    /// Asked for by every request but `/healthz`; needed for an address that is not loopback.
    pub token: Option<String>,
}

impl std::fmt::Debug for HttpConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpConfig")
            .field("listen", &self.listen)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .finish()
    }
}

/// The scheduler role.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// Its name, for people. Default: the host's name.
    pub name: Option<String>,
    /// How long the trigger lease lasts without renewal. Default: 5s.
    pub lease_ttl: Span,
    /// How often the supervisor looks for lost workers. Default: 1s.
    pub sweep_every: Span,
    /// After how long of standstill what is handed out and pending is handed out again. Default: 5s.
    pub republish_after: Span,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            name: None,
            lease_ttl: Span::secs(5),
            sweep_every: Span::secs(1),
            republish_after: Span::secs(5),
        }
    }
}

/// The worker role.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerConfig {
    /// Its name, for people. Default: the host's name and the process id.
    pub name: Option<String>,
    /// Tiers with the number of attempts at the same time. Default: core 8, bulk 4.
    pub tiers: BTreeMap<String, usize>,
    /// A worker that has not beaten for this long is lost; schedulers and workers must agree. Default: 15s.
    pub lost_after: Span,
    /// How long running shards may go on after SIGTERM before they are handed back. Default: 30s.
    pub drain: Span,
    /// A delivery whose shard runs longer than this is acked; below RabbitMQ's `consumer_timeout`. Default: 10m.
    pub ack_horizon: Span,
    /// Programs that `exec` handlers may run here, as the job writes them; `*` for any. Default: none.
    pub allow_exec: Vec<String>,
    /// Where programs start. Default: where the worker was started.
    pub work_dir: Option<PathBuf>,
    /// Variables of the worker that programs find, beside PATH, HOME, LANG and TZ. Default: none.
    pub pass_env: Vec<String>,
    /// Users that programs may run as, if the worker is root. Default: none.
    pub allow_users: Vec<String>,
    /// The most that a program may use: memory, cpu_time, open_files. Default: no limit of ours.
    pub limits: ProgramLimits,
    /// What happens to processes that left their program's group: `report` or `kill`. Default: report.
    pub leftovers: Leftovers,
    /// Where `http` handlers may call: origins such as `https://api.example.com`; `*` for any. Default: none.
    pub allow_http: Vec<String>,
    /// Secrets that `http` handlers may send: `env:NAME` and `file:/path`. Default: none.
    pub allow_secrets: Vec<String>,
    /// Under which address services reach this worker to call back, as in `https://jobs.example.com/worker-3`. Default: `http://` and
    /// where it listens.
    pub callback_url: Option<String>,
    /// A file of certificates (PEM) that `http` handlers trust beside the machine's own, for services of a private authority.
    pub http_ca: Option<PathBuf>,
    /// A cgroup (v2) in which each program gets one of its own: a folder, `auto` to look for one, or `off`. Default: `auto`.
    pub cgroup: String,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        WorkerConfig {
            name: None,
            tiers: BTreeMap::from([("core".to_owned(), 8), ("bulk".to_owned(), 4)]),
            lost_after: Span::secs(15),
            drain: Span::secs(30),
            ack_horizon: Span::mins(10),
            allow_exec: Vec::new(),
            work_dir: None,
            pass_env: Vec::new(),
            allow_users: Vec::new(),
            limits: ProgramLimits::default(),
            leftovers: Leftovers::default(),
            allow_http: Vec::new(),
            allow_secrets: Vec::new(),
            callback_url: None,
            http_ca: None,
            cgroup: "auto".into(),
        }
    }
}

/// How long what has ended is kept.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionConfig {
    /// Executions that ended well. Default: 30d.
    pub success: Span,
    /// Executions that failed or were cancelled, and dead letters. Default: 90d.
    pub failed: Span,
    /// Decisions, and with them the memory of request ids. Default: 90d.
    pub decisions: Span,
    /// How often the leader deletes what is older. Default: 1h.
    pub every: Span,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        let days = |n: u64| Span::secs(n * 86_400);
        RetentionConfig { success: days(30), failed: days(90), decisions: days(90), every: Span::mins(60) }
    }
}

impl RetentionConfig {
    /// For the leader.
    #[must_use]
    pub fn options(&self) -> shardcron_actors::RetentionOptions {
        shardcron_actors::RetentionOptions {
            success: self.success.as_std(),
            failed: self.failed.as_std(),
            decisions: self.decisions.as_std(),
            every: self.every.as_std(),
        }
    }
}

/// What workers do while no scheduler leads: one of them fires what must not wait.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FallbackConfig {
    /// Whether this worker stands in. Default: true.
    pub enabled: bool,
    /// After how long without a holder of the lease. Default: three times `scheduler.lease_ttl`.
    pub after: Option<Span>,
    /// The tiers whose jobs fire meanwhile; all others wait for a scheduler. Default: core.
    pub tiers: Vec<String>,
    /// The least time between two firings of a job meanwhile. Absent: as its schedule says.
    pub at_most_every: Option<Span>,
}

impl Default for FallbackConfig {
    fn default() -> Self {
        FallbackConfig { enabled: true, after: None, tiers: vec!["core".into()], at_most_every: None }
    }
}

impl FallbackConfig {
    fn check(&self, after: Span, lease_ttl: Span) -> Result<()> {
        if self.tiers.is_empty() || self.tiers.len() > TIERS_MAX {
            bail!(
                "fallback.tiers: 1 to {TIERS_MAX} tiers are possible; to stand in for nothing, set fallback.enabled = false"
            );
        }
        for tier in &self.tiers {
            shardcron_domain::job::check_name(tier, 32).map_err(|e| anyhow::anyhow!("fallback.tiers: {e}"))?;
        }
        if after < lease_ttl {
            bail!(
                "fallback.after = \"{after}\" is shorter than scheduler.lease_ttl = \"{lease_ttl}\": a change of leaders would look \
                 like no scheduler at all"
            );
        }
        if let Some(every) = self.at_most_every.filter(|every| *every < Span::secs(1)) {
            bail!("fallback.at_most_every = \"{every}\" is too short; 1s is the least");
        }
        Ok(())
    }
}

/// What the process writes to standard error.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// `text` or `json`. Default: text.
    pub format: String,
    /// Which lines, as in `info,shardcron_actors=debug`. Default: info, without lapin: its faults are said as states of the broker.
    pub filter: String,
    /// A file that every step of the protocol is written to, one line each, for tests that check a whole run. Default: none.
    pub trace_file: Option<PathBuf>,
}

impl Default for LogConfig {
    fn default() -> Self {
        LogConfig { format: "text".into(), filter: "info,lapin=off".into(), trace_file: None }
    }
}

/// The variables, with the key that each sets. Lists are separated by commas; tiers are written `core=8,bulk=4`.
const VARIABLES: [(&str, &str); 48] = [
    ("SHARDCRON_LEDGER_URL", "ledger.url"),
    ("SHARDCRON_LEDGER_MIGRATE", "ledger.migrate"),
    ("SHARDCRON_LEDGER_CALL_TIMEOUT", "ledger.call_timeout"),
    ("SHARDCRON_BROKER_URL", "broker.url"),
    ("SHARDCRON_BROKER_PREFIX", "broker.prefix"),
    ("SHARDCRON_BROKER_POLL", "broker.poll"),
    ("SHARDCRON_BROKER_FALLBACK", "broker.fallback"),
    ("SHARDCRON_BROKER_FALLBACK_AFTER", "broker.fallback_after"),
    ("SHARDCRON_REDIS_URL", "redis.url"),
    ("SHARDCRON_REDIS_PREFIX", "redis.prefix"),
    ("SHARDCRON_REDIS_IDEMPOTENCY_TTL", "redis.idempotency_ttl"),
    ("SHARDCRON_HTTP_LISTEN", "http.listen"),
    ("SHARDCRON_HTTP_TOKEN", "http.token"),
    ("SHARDCRON_SCHEDULER_NAME", "scheduler.name"),
    ("SHARDCRON_SCHEDULER_LEASE_TTL", "scheduler.lease_ttl"),
    ("SHARDCRON_SCHEDULER_SWEEP_EVERY", "scheduler.sweep_every"),
    ("SHARDCRON_SCHEDULER_REPUBLISH_AFTER", "scheduler.republish_after"),
    ("SHARDCRON_WORKER_NAME", "worker.name"),
    ("SHARDCRON_WORKER_TIERS", "worker.tiers"),
    ("SHARDCRON_WORKER_LOST_AFTER", "worker.lost_after"),
    ("SHARDCRON_WORKER_DRAIN", "worker.drain"),
    ("SHARDCRON_WORKER_ACK_HORIZON", "worker.ack_horizon"),
    ("SHARDCRON_WORKER_ALLOW_EXEC", "worker.allow_exec"),
    ("SHARDCRON_WORKER_WORK_DIR", "worker.work_dir"),
    ("SHARDCRON_WORKER_PASS_ENV", "worker.pass_env"),
    ("SHARDCRON_WORKER_ALLOW_USERS", "worker.allow_users"),
    ("SHARDCRON_WORKER_LEFTOVERS", "worker.leftovers"),
    ("SHARDCRON_WORKER_ALLOW_HTTP", "worker.allow_http"),
    ("SHARDCRON_WORKER_ALLOW_SECRETS", "worker.allow_secrets"),
    ("SHARDCRON_WORKER_CALLBACK_URL", "worker.callback_url"),
    ("SHARDCRON_WORKER_HTTP_CA", "worker.http_ca"),
    ("SHARDCRON_WORKER_CGROUP", "worker.cgroup"),
    ("SHARDCRON_RETENTION_SUCCESS", "retention.success"),
    ("SHARDCRON_RETENTION_FAILED", "retention.failed"),
    ("SHARDCRON_RETENTION_DECISIONS", "retention.decisions"),
    ("SHARDCRON_RETENTION_EVERY", "retention.every"),
    ("SHARDCRON_FALLBACK_ENABLED", "fallback.enabled"),
    ("SHARDCRON_FALLBACK_AFTER", "fallback.after"),
    ("SHARDCRON_FALLBACK_TIERS", "fallback.tiers"),
    ("SHARDCRON_FALLBACK_AT_MOST_EVERY", "fallback.at_most_every"),
    ("SHARDCRON_CACHE_FRESH", "cache.fresh"),
    ("SHARDCRON_CACHE_SHARED", "cache.shared"),
    ("SHARDCRON_CACHE_ABSENT", "cache.absent"),
    ("SHARDCRON_CACHE_BYTES", "cache.bytes"),
    ("SHARDCRON_LOG_FORMAT", "log.format"),
    ("SHARDCRON_LOG_FILTER", "log.filter"),
    ("SHARDCRON_LOG", "log.filter"),
    ("SHARDCRON_LOG_TRACE_FILE", "log.trace_file"),
];

impl Config {
    /// Reads the file (the given one, or `shardcron.toml` here if there is one), then the variables.
    ///
    /// # Errors
    /// A file that was asked for is missing, or a key or value is wrong: says where.
    pub fn load(file: Option<&Path>, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut table = match file {
            Some(path) => read(path)?,
            None if Path::new("shardcron.toml").exists() => read(Path::new("shardcron.toml"))?,
            None => toml::Table::new(),
        };
        for (name, key) in VARIABLES {
            if let Some(text) = variable(name).filter(|t| !t.is_empty()) {
                let value = value_of(key, &text).with_context(|| format!("the variable {name}"))?;
                set(&mut table, key, value);
            }
        }
        let config = Config::deserialize(table)
            .map_err(|e| anyhow::anyhow!(without_values(e.message())))
            .context("the configuration")?;
        config.check()?;
        Ok(config)
    }

    /// After how long without a leader a worker stands in.
    #[must_use]
    pub fn fallback_after(&self) -> Span {
        self.fallback.after.unwrap_or(Span(self.scheduler.lease_ttl.0.saturating_mul(3)))
    }

    fn check(&self) -> Result<()> {
        if self.worker.tiers.is_empty() || self.worker.tiers.len() > TIERS_MAX {
            bail!("worker.tiers: a worker serves 1 to {TIERS_MAX} tiers");
        }
        for (tier, concurrency) in &self.worker.tiers {
            shardcron_domain::job::check_name(tier, 32).map_err(|e| anyhow::anyhow!("worker.tiers: {e}"))?;
            if *concurrency == 0 || *concurrency > CONCURRENCY_MAX {
                bail!(
                    "worker.tiers.{tier}: {concurrency} attempts at the same time; 1 to {CONCURRENCY_MAX} are possible"
                );
            }
        }
        self.databases.check()?;
        if self.ledger.call_timeout < Span::secs(1) {
            bail!(
                "ledger.call_timeout = \"{}\" is too short for a busy server; 1s is the least",
                self.ledger.call_timeout
            );
        }
        if self.worker.lost_after < Span(300) {
            bail!(
                "worker.lost_after = \"{}\" is too short to tell a lost worker from a busy one; 300ms is the least",
                self.worker.lost_after
            );
        }
        if self.scheduler.lease_ttl < Span(300) {
            bail!(
                "scheduler.lease_ttl = \"{}\" is too short to be renewed in time; 300ms is the least",
                self.scheduler.lease_ttl
            );
        }
        if self.retention.every < Span::secs(1) {
            bail!("retention.every = \"{}\" is too short; 1s is the least", self.retention.every);
        }
        let name = self.scheduler.name.as_deref().unwrap_or_default();
        if name.to_ascii_lowercase().starts_with(STAND_IN_PREFIX) {
            bail!(
                "scheduler.name = \"{name}\" begins like that of a worker that stands in for a scheduler; choose another"
            );
        }
        crate::allowed::check(&self.worker)?;
        self.fallback.check(self.fallback_after(), self.scheduler.lease_ttl)?;
        if !matches!(self.log.format.as_str(), "text" | "json") {
            bail!("log.format = \"{}\"; text and json are possible", self.log.format);
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<toml::Table> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} can't be read", path.display()))?;
    // The parser's own message quotes the line, and the line may hold a password (case Z-05): its number is enough.
    let place = |e: toml::de::Error| {
        let line = e
            .span()
            .map_or(0, |s| text.as_bytes()[..s.start.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1);
        anyhow::anyhow!("{}, line {line}: {}", path.display(), without_values(e.message()).replace('\n', "; "))
    };
    // Checked as a whole first, because the table alone would lose the line numbers of what is wrong.
    toml::from_str::<Config>(&text).map_err(place)?;
    toml::from_str(&text).map_err(place)
}

fn value_of(key: &str, text: &str) -> Result<toml::Value> {
    Ok(match key {
        "ledger.migrate" | "fallback.enabled" => {
            toml::Value::Boolean(text.parse().with_context(|| format!("'{text}' is not true or false"))?)
        }
        "worker.allow_exec"
        | "fallback.tiers"
        | "worker.pass_env"
        | "worker.allow_users"
        | "worker.allow_http"
        | "worker.allow_secrets" => {
            toml::Value::Array(text.split(',').map(|t| toml::Value::String(t.trim().to_owned())).collect())
        }
        "worker.tiers" => {
            let mut tiers = toml::Table::new();
            for part in text.split(',') {
                let (name, n) = part.split_once('=').with_context(|| format!("'{part}' is not written like core=8"))?;
                let n: i64 = n.trim().parse().with_context(|| format!("'{n}' is not a number"))?;
                tiers.insert(name.trim().to_owned(), toml::Value::Integer(n));
            }
            toml::Value::Table(tiers)
        }
        _ => toml::Value::String(text.to_owned()),
    })
}

fn set(table: &mut toml::Table, key: &str, value: toml::Value) {
    if let Some((section, name)) = key.split_once('.') {
        let entry = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        if let toml::Value::Table(section) = entry {
            section.insert(name.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_win_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shardcron.toml");
        std::fs::write(&path, "[worker]\nlost_after = \"9s\"\ntiers = { core = 2 }\n[redis]\nurl = \"redis://x\"\n")
            .unwrap();
        let vars = |name: &str| match name {
            "SHARDCRON_WORKER_TIERS" => Some("core=3, bulk=1".to_owned()),
            "SHARDCRON_WORKER_ALLOW_EXEC" => Some("python3,sh".to_owned()),
            "SHARDCRON_LEDGER_MIGRATE" => Some("false".to_owned()),
            "SHARDCRON_FALLBACK_TIERS" => Some("core,urgent".to_owned()),
            "SHARDCRON_FALLBACK_AT_MOST_EVERY" => Some("10m".to_owned()),
            _ => None,
        };
        let config = Config::load(Some(&path), vars).unwrap();
        assert_eq!(config.worker.tiers, BTreeMap::from([("core".to_owned(), 3), ("bulk".to_owned(), 1)]));
        assert_eq!(config.worker.lost_after, Span::secs(9));
        assert_eq!(config.worker.allow_exec, ["python3", "sh"]);
        assert!(!config.ledger.migrate);
        assert_eq!(config.fallback.tiers, ["core", "urgent"]);
        assert_eq!(config.fallback.at_most_every, Some(Span::mins(10)));
        assert_eq!((config.fallback.enabled, config.fallback_after()), (true, Span::secs(15)));
        assert_eq!(config.redis.url.as_deref(), Some("redis://x"));
    }

    #[test]
    fn wrong_keys_and_values_say_where() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shardcron.toml");
        for (text, words) in [
            ("[worker]\nlost_aftr = \"9s\"\n", "line 2: unknown field `lost_aftr`"),
            ("[worker]\nlost_after = 9\n", "duration in quotes"),
            ("[worker]\nlost_after = \"1ms\"\n", "300ms is the least"),
            ("[ledger]\ncall_timeout = \"10ms\"\n", "ledger.call_timeout"),
            ("[worker.tiers]\ncore = 0\n", "worker.tiers.core"),
            ("[log]\nformat = \"xml\"\n", "text and json"),
            ("[worker]\nallow_http = [\"api.example.com\"]\n", "worker.allow_http"),
            ("[worker]\nallow_secrets = [\"TOKEN\"]\n", "env:NAME"),
            ("[worker]\nleftovers = \"ignore\"\n", "line 2: unknown variant `ignore`, expected `report` or `kill`"),
            ("[fallback]\nafter = \"4s\"\n", "fallback.after"),
            ("[fallback]\ntiers = []\n", "fallback.enabled = false"),
            ("[fallback]\nat_most_every = \"1ms\"\n", "1s is the least"),
            ("[scheduler]\nname = \"Fallback:x\"\n", "scheduler.name"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", Config::load(Some(&path), |_| None).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(Config::load(Some(Path::new("missing.toml")), |_| None).is_err());
    }

    #[test]
    fn z_05_a_fault_in_the_file_does_not_print_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shardcron.toml");
        for text in [
            "[ledger]\nurll = \"mysql://root:s3cret@h/db\"\n",
            "[http]\ntoken = s3cret\n",
            "[http]\ntoken = [\"s3cret\"]\n",
            "\nledger = \"mysql://root:s3cret@h/db\"\n",
            "[databases]\ncrm = { url = \"s3cret\" }\n",
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", Config::load(Some(&path), |_| None).unwrap_err());
            assert!(error.contains("line 2") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn z_05_a_token_is_not_shown() {
        let shown = format!("{:?}", HttpConfig { listen: None, token: Some("t0ken".into()) });
        assert!(!shown.contains("t0ken"));
    }
}
