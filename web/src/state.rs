//! What the server asks for, and an implementation over the program's ports.

use async_trait::async_trait;
use serde::Serialize;
use shardcron_domain::modes::Mode;
use shardcron_domain::units::rfc3339;
use shardcron_store::{ActiveExecution, JobRecord, Ledger, Overview, Presence, SeenWorker, StoreError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long one dependency is waited for while health is looked at. Shorter than what a supervisor waits.
const PROBE: Duration = Duration::from_secs(2);
/// Executions that are listed as pending; the others are counted.
const LISTED: usize = 200;

/// Where the answers come from. The wiring gives a [`PortsState`]; tests give what they like.
#[async_trait]
pub trait WebState: Send + Sync + 'static {
    /// How this process and what it depends on are.
    async fn health(&self) -> Health;
    /// Everybody whom the presence store remembers.
    async fn workers(&self) -> Result<Vec<SeenWorker>, StoreError>;
    /// All jobs.
    async fn jobs(&self) -> Result<Vec<JobRecord>, StoreError>;
    /// What has not ended.
    async fn pending(&self) -> Result<Pending, StoreError>;
}

/// Something that the process depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Dependency {
    /// `ledger`, `broker`, `lease`, `presence` and the like.
    pub name: String,
    /// It answers.
    pub ok: bool,
    /// Without it this process is down; otherwise it goes on in a degraded way.
    pub required: bool,
    /// Product and version, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The last error in a sentence, or what a degraded process does instead. Without passwords.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Dependency {
    /// It answers.
    #[must_use]
    pub fn up(name: impl Into<String>, version: Option<String>) -> Self {
        Dependency { name: name.into(), ok: true, required: true, version, detail: None }
    }

    /// It does not.
    #[must_use]
    pub fn down(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Dependency { name: name.into(), ok: false, required: true, version: None, detail: Some(detail.into()) }
    }

    /// The process can do without it.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.required = false;
        self
    }
}

/// A degraded way in which the process works now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Degraded {
    /// Its name.
    pub mode: Mode,
    /// Since when.
    pub since: String,
    /// The fault that led to it. Without passwords.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What goes on in it.
    pub what_goes_on: &'static str,
}

impl Degraded {
    /// In this mode since then, because of this.
    #[must_use]
    pub fn new(mode: Mode, since_ms: i64, reason: String) -> Self {
        Degraded { mode, since: rfc3339(since_ms), reason: Some(reason), what_goes_on: mode.what_goes_on() }
    }
}

/// Who leads, by the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Leader {
    /// The name of the scheduler that began the epoch.
    pub holder: String,
    /// The fencing number.
    pub epoch: i64,
    /// When it began.
    pub since_ms: i64,
    /// Whether the lease is held; absent where this process does not watch the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alive: Option<bool>,
}

/// The word for a process's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Everything answers, somebody leads.
    Ok,
    /// It works, but not as it should.
    Degraded,
    /// Something that it needs is away.
    Down,
}

/// How a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// `scheduler`, `worker`.
    pub roles: Vec<String>,
    /// This process leads.
    pub leading: bool,
    /// The latest leader.
    pub leader: Option<Leader>,
    /// What it depends on.
    pub dependencies: Vec<Dependency>,
    /// The degraded ways in which it works.
    pub degraded: Vec<Degraded>,
    /// Other faults, each in a sentence.
    pub problems: Vec<String>,
}

impl Health {
    /// Whether anybody leads, as far as this process knows.
    #[must_use]
    pub fn has_leader(&self) -> bool {
        self.leading || self.leader.as_ref().is_some_and(|leader| leader.alive != Some(false))
    }

    /// All in one word.
    #[must_use]
    pub fn status(&self) -> Status {
        if self.dependencies.iter().any(|d| d.required && !d.ok) {
            return Status::Down;
        }
        let whole = self.dependencies.iter().all(|d| d.ok)
            && self.degraded.is_empty()
            && self.problems.is_empty()
            && self.has_leader();
        if whole { Status::Ok } else { Status::Degraded }
    }
}

/// An execution that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingExecution {
    /// What the ledger counts of it.
    pub execution: ActiveExecution,
    /// Its job; unknown if it is not among the latest executions.
    pub job: Option<String>,
    /// When it was fired.
    pub fired_ms: Option<i64>,
}

/// What has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Counts by tier.
    pub overview: Overview,
    /// The oldest executions first, a bounded number.
    pub executions: Vec<PendingExecution>,
    /// How many there are in all.
    pub executions_total: usize,
}

/// What only the process itself knows of its health. Its actors put it into a `watch` channel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessHealth {
    /// `scheduler`, `worker`.
    pub roles: Vec<String>,
    /// This process leads.
    pub leading: bool,
    /// Whether anybody holds the lease; `None` where this process does not watch it.
    pub lease_held: Option<bool>,
    /// What the process itself watches, such as the broker's connection.
    pub dependencies: Vec<Dependency>,
    /// The degraded ways in which it works.
    pub degraded: Vec<Degraded>,
    /// Other faults, each in a sentence.
    pub problems: Vec<String>,
}

/// Answers from the ports, and from what the process says of itself.
pub struct PortsState {
    ledger: Arc<dyn Ledger>,
    presence: Arc<dyn Presence>,
    presence_required: bool,
    own: watch::Receiver<ProcessHealth>,
}

impl PortsState {
    /// Over these ports. The presence store counts as needed unless [`PortsState::presence_optional`].
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, presence: Arc<dyn Presence>, own: watch::Receiver<ProcessHealth>) -> Self {
        PortsState { ledger, presence, presence_required: true, own }
    }

    /// The process falls back to the ledger when the presence store is away.
    #[must_use]
    pub fn presence_optional(mut self) -> Self {
        self.presence_required = false;
        self
    }

    async fn ledger_health(&self) -> (Dependency, Option<Leader>) {
        let both = async {
            let version = self.ledger.server_version().await?;
            Ok::<_, StoreError>((version, self.ledger.leadership().await?))
        };
        match tokio::time::timeout(PROBE, both).await {
            Ok(Ok((version, leadership))) => {
                let leader = (leadership.epoch.0 > 0).then(|| Leader {
                    holder: leadership.holder,
                    epoch: leadership.epoch.0,
                    since_ms: leadership.since_ms,
                    alive: self.own.borrow().lease_held,
                });
                (Dependency::up("ledger", Some(version)), leader)
            }
            Ok(Err(error)) => (Dependency::down("ledger", error.to_string()), None),
            Err(_) => (Dependency::down("ledger", no_answer()), None),
        }
    }

    async fn presence_health(&self) -> Dependency {
        let found = match tokio::time::timeout(PROBE, self.presence.workers()).await {
            Ok(Ok(_)) => Dependency::up("presence", None),
            Ok(Err(error)) => Dependency::down("presence", error.to_string()),
            Err(_) => Dependency::down("presence", no_answer()),
        };
        if self.presence_required { found } else { found.optional() }
    }
}

fn no_answer() -> String {
    format!("no answer within {} s", PROBE.as_secs())
}

#[async_trait]
impl WebState for PortsState {
    async fn health(&self) -> Health {
        let ((ledger, leader), presence) = tokio::join!(self.ledger_health(), self.presence_health());
        let own = self.own.borrow().clone();
        let mut dependencies = vec![ledger, presence];
        dependencies.extend(own.dependencies);
        Health {
            roles: own.roles,
            leading: own.leading,
            leader,
            dependencies,
            degraded: own.degraded,
            problems: own.problems,
        }
    }

    async fn workers(&self) -> Result<Vec<SeenWorker>, StoreError> {
        self.presence.workers().await
    }

    async fn jobs(&self) -> Result<Vec<JobRecord>, StoreError> {
        self.ledger.jobs().await
    }

    async fn pending(&self) -> Result<Pending, StoreError> {
        let overview = self.ledger.overview().await?;
        let mut active = self.ledger.active_executions().await?;
        let executions_total = active.len();
        // Ids sort by the time of firing, so these are the oldest.
        active.sort_by_key(|execution| execution.id);
        active.truncate(LISTED);
        let latest = self.ledger.executions(None, None, LISTED).await?;
        let known: BTreeMap<_, _> = latest.into_iter().map(|row| (row.id, (row.job, row.fired_ms))).collect();
        let mut executions = Vec::with_capacity(active.len());
        for execution in active {
            let (job, fired_ms) = match known.get(&execution.id) {
                Some((job, fired_ms)) => (Some(job.clone()), Some(*fired_ms)),
                // Older than the latest ones: one look each, and no more than are listed.
                None => match self.ledger.execution(execution.id).await? {
                    Some(row) => (Some(row.job), Some(row.fired_ms)),
                    None => (None, None),
                },
            };
            executions.push(PendingExecution { execution, job, fired_ms });
        }
        Ok(Pending { overview, executions, executions_total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leader(alive: Option<bool>) -> Option<Leader> {
        Some(Leader { holder: "one".into(), epoch: 3, since_ms: 0, alive })
    }

    #[test]
    fn a_05_health_in_one_word() {
        let up = Dependency::up("ledger", None);
        let whole = Health { leader: leader(Some(true)), dependencies: vec![up], ..Health::default() };
        assert_eq!(whole.status(), Status::Ok);
        let down = |dependency: Dependency| Health { dependencies: vec![dependency], ..whole.clone() }.status();
        assert_eq!(down(Dependency::down("broker", "refused")), Status::Down);
        assert_eq!(down(Dependency::down("redis", "refused").optional()), Status::Degraded);
        assert_eq!(Health { leader: leader(Some(false)), ..whole.clone() }.status(), Status::Degraded);
        let mode = Degraded::new(Mode::RedisAway, 0, "refused".into());
        assert_eq!(Health { degraded: vec![mode], ..whole.clone() }.status(), Status::Degraded);
        assert_eq!(Health { leader: None, ..whole.clone() }.status(), Status::Degraded);
        assert_eq!(Health { leader: leader(None), ..whole.clone() }.status(), Status::Ok, "not watched is not absent");
    }
}
