//! The trait of a handler, what it returns, and the registry that a worker looks handlers up in.

use crate::cache::CacheLoader;
use crate::context::ShardContext;
use async_trait::async_trait;
use shardcron_domain::shard::FailureClass;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Runs one attempt at one shard.
#[async_trait]
pub trait ShardHandler: Send + Sync + 'static {
    /// Does the work of the slice.
    ///
    /// # Errors
    /// Whether another try may help, and a sentence.
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError>;

    /// Whether all effects of the handler are refused once its attempt is superseded, because they are committed together with
    /// something that names the attempt. Only such a handler may run beside its successor for a moment, as a job with
    /// `takeover = "immediate"` has it; the jobs of others wait for the heartbeat's end whatever they say.
    fn effects_are_fenced(&self) -> bool {
        false
    }

    /// How a key of one of its caches is loaded when a job has it preloaded (`preload`). Without a loader a key comes from the level that
    /// all workers share, or not before the handler asks for it.
    fn cache_loader(&self, cache: &str) -> Option<Arc<dyn CacheLoader>> {
        let _ = cache;
        None
    }
}

/// What an attempt did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardOutput {
    /// Records that it worked on.
    pub rows: Option<u64>,
    /// A small summary for people and for what runs after; the data itself belongs elsewhere.
    pub summary: Option<serde_json::Value>,
    /// The result is in the ledger already: the handler recorded it in the same transaction as its effects. For handlers that
    /// come with the program.
    #[doc(hidden)]
    pub committed: bool,
}

impl ShardOutput {
    /// An output that only counts.
    #[must_use]
    pub fn rows(rows: u64) -> Self {
        ShardOutput { rows: Some(rows), ..ShardOutput::default() }
    }
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ShardError {
    /// Whether another try may help.
    pub class: FailureClass,
    /// A sentence: what happened, to which record, what to do.
    pub message: String,
    /// The attempt was taken away or told to stop: nothing is to be recorded as a failure.
    #[doc(hidden)]
    pub stopped: bool,
}

impl ShardError {
    /// Another try may help.
    pub fn transient(message: impl Into<String>) -> Self {
        ShardError { class: FailureClass::Transient, message: message.into(), stopped: false }
    }

    /// Another try would fail the same way.
    pub fn permanent(message: impl Into<String>) -> Self {
        ShardError { class: FailureClass::Permanent, message: message.into(), stopped: false }
    }

    /// Another try may help, but not before `when`: a `Duration` from now, or an instant (`SystemTime`), as the other side named
    /// it. It counts as a failed try, and the wait is a day at most; where the job's `retry` would wait longer, that is the wait.
    ///
    /// ```
    /// # use shardcron_sdk::ShardError;
    /// # use std::time::Duration;
    /// let busy = ShardError::not_before("the bank answers 503 and wants to be asked in two minutes", Duration::from_secs(120));
    /// ```
    pub fn not_before(message: impl Into<String>, when: impl Into<NotBefore>) -> Self {
        let wait_ms = u64::try_from(when.into().0.as_millis()).unwrap_or(u64::MAX);
        ShardError { class: FailureClass::NotBefore { wait_ms }, message: message.into(), stopped: false }
    }

    /// The attempt ran into its limit; another try may help.
    pub fn timeout(message: impl Into<String>) -> Self {
        ShardError { class: FailureClass::Timeout, message: message.into(), stopped: false }
    }

    /// The handler stopped because the context told it to, or because the attempt is superseded. Its work up to the last
    /// checkpoint stands.
    pub fn stopped(message: impl Into<String>) -> Self {
        ShardError { class: FailureClass::Transient, message: message.into(), stopped: true }
    }
}

/// How long a failed attempt asks to wait. What is past by this host's clock is no wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBefore(Duration);

impl From<Duration> for NotBefore {
    fn from(wait: Duration) -> Self {
        NotBefore(wait)
    }
}

impl From<SystemTime> for NotBefore {
    fn from(at: SystemTime) -> Self {
        NotBefore(at.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

/// The handlers of a worker by name.
#[derive(Clone, Default)]
pub struct Registry {
    handlers: BTreeMap<String, Arc<dyn ShardHandler>>,
}

impl Registry {
    /// Registers a handler under the name that job files use: `handler = { rust = "name" }`.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, handler: impl ShardHandler) -> Self {
        self.handlers.insert(name.into(), Arc::new(handler));
        self
    }

    /// Registers a handler under a name unless the name is taken.
    #[must_use]
    pub fn with_default(mut self, name: impl Into<String>, handler: impl ShardHandler) -> Self {
        self.handlers.entry(name.into()).or_insert_with(|| Arc::new(handler));
        self
    }

    /// The handler of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<dyn ShardHandler>> {
        self.handlers.get(name).cloned()
    }

    /// The names there are.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.handlers.keys().map(String::as_str)
    }
}
