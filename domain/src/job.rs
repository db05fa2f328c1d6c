//! The specification of a job: what a job file says, checked.
//!
//! The same structures are read from TOML and kept in the ledger as JSON; a job's version is the count of its different JSONs.

use crate::address::without_passwords;
use crate::http_call::HttpSpec;
use crate::limits;
pub use crate::overlap::OverlapPolicy;
use crate::plan::ShardPlan;
use crate::program::{ProgramOptions, ProgramSpec};
use crate::schedule::{Schedule, ScheduleError, ScheduleSpec};
pub use crate::sharding::{RangeSpec, ShardsSpec};
use crate::units::Span;
use serde::{Deserialize, Serialize};

/// A named job. Read with [`crate::jobfile::parse`], which also checks it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Unique; lower-case letters, digits, `-`, `_` and `.`. In a job file it is the table's key.
    #[serde(default)]
    pub name: String,
    /// When to fire by itself. Without one the job is fired by hand only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleSpec>,
    /// Jobs whose ends fire this one. Their executions and what they came to are its parameter `upstream`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<crate::after::AfterSpec>,
    /// How a firing is cut. Without it, one shard.
    #[serde(default)]
    pub shards: ShardsSpec,
    /// What runs in a shard.
    pub handler: HandlerSpec,
    /// The isolation class: its own queue, consumers and concurrency.
    #[serde(default = "default_tier")]
    pub tier: String,
    /// How long one attempt may take. `"none"` only if asked for in these letters.
    #[serde(default)]
    pub timeout: Timeout,
    /// What happens after a failed attempt.
    #[serde(default)]
    pub retry: RetryPolicy,
    /// How long an attempt may go without any progress (a checkpoint, records, output, `ShardContext::progress`). Not watched
    /// without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_timeout: Option<Span>,
    /// When another worker may go on with a shard whose worker lost its connection.
    #[serde(default, skip_serializing_if = "Takeover::is_default")]
    pub takeover: Takeover,
    /// Keys of the handler's caches that are brought into memory before an attempt begins, such as `"user:{from}..{to}"`, or a query
    /// that finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preload: Vec<crate::cache::PreloadSpec>,
    /// What happens when the previous execution still runs.
    #[serde(default)]
    pub overlap: OverlapPolicy,
    /// What happens to an instant that passed unseen.
    #[serde(default)]
    pub misfire: MisfirePolicy,
    /// Parameters that each execution gets, unless its trigger names others.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub params: serde_json::Map<String, serde_json::Value>,
}

fn default_tier() -> String {
    "core".into()
}

/// What runs in a shard: exactly one of `sql`, `exec`, `http` and `rust`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawHandler", into = "RawHandler")]
pub enum HandlerSpec {
    /// Statements on the ledger's own server, in one transaction with the shard's checkpoint and result; or in another database,
    /// in one transaction with a row that says how far the shard has got.
    Sql {
        /// One or more statements, separated by `;`. `:shard_from`, `:shard_to` and the other parameters are bound, not pasted.
        sql: String,
        /// Cut the shard's range into transactions of this many keys, each with a checkpoint.
        chunk: Option<u32>,
        /// Where they run, by a name of the worker's own configuration; absent: in the ledger's database.
        database: Option<String>,
    },
    /// A program and its arguments; no shell.
    Exec {
        /// `argv`: the program first.
        argv: Vec<String>,
        /// Its environment, its folder, its limits.
        options: Box<ProgramOptions>,
    },
    /// A call of a service.
    Http(Box<HttpSpec>),
    /// A handler that the worker program registered under this name.
    Rust {
        /// The registered name.
        name: String,
    },
}

impl HandlerSpec {
    /// A program with its arguments and nothing more.
    #[must_use]
    pub fn exec(argv: impl IntoIterator<Item = impl Into<String>>) -> Self {
        HandlerSpec::Exec { argv: argv.into_iter().map(Into::into).collect(), options: Box::default() }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHandler {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sql: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chunk: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    database: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exec: Option<ProgramSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    http: Option<Box<HttpSpec>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rust: Option<String>,
}

impl TryFrom<RawHandler> for HandlerSpec {
    type Error = String;
    fn try_from(raw: RawHandler) -> Result<Self, String> {
        let chunk_without_sql = raw.chunk.is_some() && raw.sql.is_none();
        if let Some(name) = &raw.database {
            if raw.sql.is_none() {
                return Err("'database' belongs to an sql handler".into());
            }
            check_name(name, 32).map_err(|e| format!("database: {e}"))?;
        }
        match (raw.sql, raw.exec, raw.http, raw.rust) {
            _ if chunk_without_sql => Err("'chunk' belongs to an sql handler".into()),
            (Some(sql), None, None, None) if sql.trim().is_empty() => Err("the sql of a handler can't be empty".into()),
            (Some(_), None, None, None) if raw.chunk == Some(0) => {
                Err("chunk = 0 would never end; leave it out for one transaction".into())
            }
            (Some(sql), None, None, None) => Ok(HandlerSpec::Sql { sql, chunk: raw.chunk, database: raw.database }),
            (None, Some(ProgramSpec { argv, options }), None, None) => {
                Ok(HandlerSpec::Exec { argv, options: Box::new(options) })
            }
            (None, None, Some(call), None) => Ok(HandlerSpec::Http(call)),
            (None, None, None, Some(name)) => Ok(HandlerSpec::Rust { name }),
            (None, None, None, None) => Err("a handler needs one of sql = \"…\", exec = [\"program\", …], \
                                             http = { url = \"https://…\" } or rust = \"name\""
                .into()),
            _ => Err("a handler has exactly one of sql, exec, http and rust; split the work into jobs for more".into()),
        }
    }
}

impl From<HandlerSpec> for RawHandler {
    fn from(spec: HandlerSpec) -> Self {
        match spec {
            HandlerSpec::Sql { sql, chunk, database } => {
                RawHandler { sql: Some(sql), chunk, database, ..RawHandler::default() }
            }
            HandlerSpec::Exec { argv, options } => {
                RawHandler { exec: Some(ProgramSpec { argv, options: *options }), ..RawHandler::default() }
            }
            HandlerSpec::Http(call) => RawHandler { http: Some(call), ..RawHandler::default() },
            HandlerSpec::Rust { name } => RawHandler { rust: Some(name), ..RawHandler::default() },
        }
    }
}

/// How long one attempt may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// It is cut off after this.
    After(Span),
    /// It may run for ever; only its worker's heartbeat vouches for it.
    Never,
}

impl Default for Timeout {
    fn default() -> Self {
        Timeout::After(Span::mins(30))
    }
}

impl Timeout {
    /// The span, if there is a limit.
    #[must_use]
    pub fn span(self) -> Option<Span> {
        match self {
            Timeout::After(span) => Some(span),
            Timeout::Never => None,
        }
    }
}

impl Serialize for Timeout {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Timeout::After(span) => span.serialize(serializer),
            Timeout::Never => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for Timeout {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        struct Text;
        impl serde::de::Visitor<'_> for Text {
            type Value = Timeout;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a duration in quotes such as \"30m\", or \"none\" for no limit")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Timeout, E> {
                if text == "none" {
                    return Ok(Timeout::Never);
                }
                match Span::parse(text).map_err(E::custom)? {
                    Span(0) => {
                        Err(E::custom("a timeout of 0 would end every attempt at once; write \"none\" for no limit"))
                    }
                    span => Ok(Timeout::After(span)),
                }
            }
        }
        deserializer.deserialize_any(Text)
    }
}

/// When another worker may go on with a shard whose worker lost its connection to the broker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Takeover {
    /// Once its worker's heartbeat has ended: nothing runs twice at the same time.
    #[default]
    Lease,
    /// As soon as the broker delivers the shard again. A worker that lost nothing but its connection then runs beside its
    /// successor until the ledger refuses it, so only for handlers whose effects the ledger's fence covers.
    Immediate,
}

impl Takeover {
    fn is_default(&self) -> bool {
        *self == Takeover::Lease
    }
}

/// What happens after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryPolicy {
    /// Tries at a shard in all, the first included.
    pub attempts: u32,
    /// The wait after the first failure.
    pub first: Span,
    /// By how much the wait grows with each further one.
    pub factor: f64,
    /// The longest wait.
    pub max: Span,
    /// The share of the wait that is drawn at random, more or less; 0 to 1.
    pub jitter: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy { attempts: 3, first: Span::secs(10), factor: 2.0, max: Span::mins(10), jitter: 0.2 }
    }
}

/// What happens to an instant that passed while nobody led.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MisfirePolicy {
    /// What to do with what was missed.
    pub policy: Misfire,
    /// An instant that is late by no more than this fires as if nothing had been.
    pub grace: Span,
    /// How many missed instants `fire_all` runs at most; the latest ones.
    pub limit: u32,
}

impl Default for MisfirePolicy {
    fn default() -> Self {
        MisfirePolicy { policy: Misfire::FireOnce, grace: Span::mins(1), limit: 100 }
    }
}

/// The choices for missed instants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misfire {
    /// The latest one fires; the others are recorded as coalesced into it.
    FireOnce,
    /// None fires; each is recorded as missed.
    Skip,
    /// Each fires, oldest first, up to the limit.
    FireAll,
}

/// A fault in a specification: which key, what is wrong, what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {message}")]
pub struct SpecError {
    /// The dotted key within the job, such as `retry.max`.
    pub key: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

fn fault(key: &str, message: impl Into<String>) -> SpecError {
    SpecError { key: key.into(), message: message.into() }
}

/// Checks a name that becomes a routing key, a metric label and a part of queue names.
///
/// # Errors
/// A sentence that says which character or length is wrong.
pub fn check_name(name: &str, limit: usize) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    if name.is_empty() {
        return Err("a name can't be empty".into());
    }
    if name.len() > limit {
        return Err(format!("a name has at most {limit} characters; this one has {}", name.len()));
    }
    if let Some(c) = name.chars().find(|c| !allowed(*c)) {
        // An address where a name belongs may hold a password, and this goes into logs.
        let shown = without_passwords(&format!("'{name}'"));
        return Err(format!("{shown} contains {c:?}; names are of lower-case letters, digits, '-', '_' and '.'"));
    }
    if !name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()) {
        return Err(format!("'{name}' must begin with a letter or a digit"));
    }
    Ok(())
}

impl JobSpec {
    /// A job of one shard with every default.
    #[must_use]
    pub fn minimal(name: impl Into<String>, handler: HandlerSpec) -> Self {
        JobSpec {
            name: name.into(),
            after: None,
            schedule: None,
            shards: ShardsSpec::default(),
            handler,
            tier: default_tier(),
            timeout: Timeout::default(),
            stall_timeout: None,
            takeover: Takeover::default(),
            retry: RetryPolicy::default(),
            preload: Vec::new(),
            overlap: OverlapPolicy::default(),
            misfire: MisfirePolicy::default(),
            params: serde_json::Map::new(),
        }
    }

    /// The same with a schedule.
    #[must_use]
    pub fn with_schedule(mut self, schedule: ScheduleSpec) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// The same with another overlap policy.
    #[must_use]
    pub fn with_overlap(mut self, overlap: OverlapPolicy) -> Self {
        self.overlap = overlap;
        self
    }

    /// Checks everything that the types don't.
    ///
    /// # Errors
    /// The first fault found, with the key that it stands at.
    pub fn validate(&self) -> Result<(), SpecError> {
        self.faults().into_iter().next().map_or(Ok(()), Err)
    }

    /// All faults that the types let through.
    #[must_use]
    pub fn faults(&self) -> Vec<SpecError> {
        let mut faults = Vec::new();
        faults.extend(check_name(&self.name, limits::JOB_NAME_BYTES).err().map(|m| fault("name", m)));
        faults.extend(check_name(&self.tier, 32).err().map(|m| fault("tier", m)));
        faults.extend(crate::cache::PreloadSpec::check_all(&self.preload).err().map(|m| fault("preload", m)));
        let plan = ShardPlan::from_spec(&self.shards);
        faults.extend(plan.err().map(|e| fault(&format!("shards{}", e.key), e.message)));
        faults.extend(crate::planning::faults(self));
        faults.extend(self.compiled_schedule().err().map(|e| fault("schedule", e.to_string())));
        faults.extend(self.after.as_ref().and_then(|a| a.validate(&self.name).err()).map(|m| fault("after", m)));
        let retry = &self.retry;
        if retry.attempts == 0 || retry.attempts > limits::ATTEMPTS_MAX {
            faults.push(fault(
                "retry.attempts",
                format!("{} tries; 1 (no retry) to {} are possible", retry.attempts, limits::ATTEMPTS_MAX),
            ));
        }
        faults.extend(self.liveness_faults());
        if !retry.factor.is_finite() || retry.factor < 1.0 {
            faults.push(fault(
                "retry.factor",
                format!("{} would make the waits shrink; use 1.0 for even waits or more", retry.factor),
            ));
        }
        if retry.max < retry.first {
            faults
                .push(fault("retry.max", format!("max = \"{}\" is less than first = \"{}\"", retry.max, retry.first)));
        }
        if !(0.0..=1.0).contains(&retry.jitter) {
            faults.push(fault("retry.jitter", format!("{} is not a share from 0 to 1", retry.jitter)));
        }
        if self.misfire.limit == 0 || self.misfire.limit as usize > limits::MISSED_INSTANTS {
            faults.push(fault(
                "misfire.limit",
                format!("{} is not from 1 to {}", self.misfire.limit, limits::MISSED_INSTANTS),
            ));
        }
        let params = serde_json::to_vec(&self.params).map_or(usize::MAX, |v| v.len());
        if params > limits::PARAMS_BYTES {
            faults.push(fault(
                "params",
                format!("{params} bytes as JSON; at most {} travel with an execution", limits::PARAMS_BYTES),
            ));
        }
        let of_handler = match &self.handler {
            HandlerSpec::Exec { options, .. } => ("exec", options.faults()),
            HandlerSpec::Http(call) => ("http", call.faults()),
            HandlerSpec::Sql { .. } | HandlerSpec::Rust { .. } => ("", Vec::new()),
        };
        let key = |key: &str| format!("handler.{}.{key}", of_handler.0);
        faults.extend(of_handler.1.iter().map(|(at, message)| fault(&key(at), message)));
        if let HandlerSpec::Sql { chunk: Some(_), .. } = self.handler
            && self.shards.range.is_none()
            && self.shards.query.is_none()
        {
            faults.push(fault(
                "handler.chunk",
                "chunks are cut from a range; give the job shards = { range = { from, to }, count } or a query over a whole number",
            ));
        }
        faults
    }

    fn liveness_faults(&self) -> Vec<SpecError> {
        let mut faults = Vec::new();
        let unfenced = matches!(self.handler, HandlerSpec::Exec { .. } | HandlerSpec::Http(_));
        if self.takeover == Takeover::Immediate && unfenced {
            faults.push(fault(
                "takeover",
                "\"immediate\" may run a shard at two workers for a moment, and nothing fences what a program or a service does; leave it \
                 out (\"lease\"), or use an sql handler, whose effects count once",
            ));
        }
        let Some(stall) = self.stall_timeout else { return faults };
        if stall.0 < limits::STALL_TIMEOUT_MIN_MS {
            let least = Span(limits::STALL_TIMEOUT_MIN_MS);
            let message = format!("\"{stall}\" is too short to tell slow from stuck; use \"{least}\" or more");
            faults.push(fault("stall_timeout", message));
        } else if let Some(timeout) = self.timeout.span().filter(|timeout| stall >= *timeout) {
            let message =
                format!("\"{stall}\" is never reached: the attempt is cut off at its timeout of \"{timeout}\"");
            faults.push(fault("stall_timeout", message));
        }
        faults
    }

    /// Its schedule, ready to be asked; `None` if the job is fired by hand only.
    ///
    /// # Errors
    /// What is wrong with the schedule.
    pub fn compiled_schedule(&self) -> Result<Option<Schedule>, ScheduleError> {
        self.schedule.as_ref().map(|schedule| schedule.compile_for(&self.name)).transpose()
    }

    /// When its next instant is to fire: later than the instant, if its schedule has a jitter.
    #[must_use]
    pub fn due_at(&self, next_fire_ms: i64) -> i64 {
        if self.schedule.as_ref().is_none_or(|schedule| schedule.jitter.is_none()) {
            return next_fire_ms;
        }
        let schedule = self.compiled_schedule().ok().flatten();
        schedule.and_then(|schedule| schedule.due_at(next_fire_ms).ok()).unwrap_or(next_fire_ms)
    }

    /// The text that is kept in the ledger and compared to see whether a job changed. Keys are in a fixed order.
    #[must_use]
    pub fn canonical_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
