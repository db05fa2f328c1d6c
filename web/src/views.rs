//! The shapes of the answers. Field names are stable: scripts read them.

use crate::state::{Degraded, Dependency, Health, Leader, Pending, Status};
use serde::Serialize;
use shardcron_domain::Incarnation;
use shardcron_domain::units::rfc3339;
use shardcron_store::{JobRecord, SeenWorker};
use std::collections::BTreeMap;
use std::time::Duration;

/// An instant by which a firing has long been decided if anybody leads: the default lease time and a good margin.
const OVERDUE_MS: i64 = 15_000;

#[derive(Serialize)]
pub(crate) struct HealthView {
    status: Status,
    version: &'static str,
    roles: Vec<String>,
    leading: bool,
    leader: Option<Leader>,
    dependencies: Vec<Dependency>,
    degraded: Vec<Degraded>,
    problems: Vec<String>,
}

impl HealthView {
    /// `in_full`: with what the errors say and which versions run; not for those who have not shown the token.
    pub(crate) fn new(health: Health, in_full: bool) -> Self {
        let status = health.status();
        let mut problems = health.problems.clone();
        if !health.has_leader() {
            problems
                .push("no leader: nobody holds the trigger lease, so nothing fires; is a scheduler running?".into());
        }
        let mut view = HealthView {
            status,
            version: env!("CARGO_PKG_VERSION"),
            roles: health.roles,
            leading: health.leading,
            leader: health.leader,
            dependencies: health.dependencies,
            degraded: health.degraded,
            problems,
        };
        if !in_full {
            view.problems.clear();
            view.leader = None;
            for dependency in &mut view.dependencies {
                dependency.version = None;
                dependency.detail = None;
            }
            for degraded in &mut view.degraded {
                degraded.reason = None;
            }
        }
        view
    }

    /// For a health that did not come in time.
    pub(crate) fn silent(problem: String) -> Self {
        HealthView {
            status: Status::Down,
            version: env!("CARGO_PKG_VERSION"),
            roles: Vec::new(),
            leading: false,
            leader: None,
            dependencies: Vec::new(),
            degraded: Vec::new(),
            problems: vec![problem],
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        self.status == Status::Down
    }
}

#[derive(Serialize)]
pub(crate) struct WorkersView {
    alive: usize,
    draining: usize,
    lost: usize,
    workers: Vec<WorkerView>,
}

#[derive(Serialize)]
struct WorkerView {
    incarnation: Incarnation,
    name: String,
    host: String,
    pid: u32,
    version: String,
    state: &'static str,
    age_ms: i64,
    started: String,
    running: u32,
    tiers: BTreeMap<String, u32>,
}

impl WorkersView {
    pub(crate) fn new(seen: Vec<SeenWorker>, lost_after: Duration) -> Self {
        let lost_after_ms = i64::try_from(lost_after.as_millis()).unwrap_or(i64::MAX);
        let mut workers: Vec<WorkerView> =
            seen.into_iter().map(|worker| WorkerView::new(worker, lost_after_ms)).collect();
        workers.sort_by(|a, b| (&a.name, a.incarnation).cmp(&(&b.name, b.incarnation)));
        let count = |state: &str| workers.iter().filter(|worker| worker.state == state).count();
        WorkersView { alive: count("alive"), draining: count("draining"), lost: count("lost"), workers }
    }
}

impl WorkerView {
    fn new(seen: SeenWorker, lost_after_ms: i64) -> Self {
        let beat = seen.beat;
        let state = match (seen.age_ms > lost_after_ms, beat.draining) {
            (true, _) => "lost",
            (false, true) => "draining",
            (false, false) => "alive",
        };
        WorkerView {
            incarnation: beat.incarnation,
            name: beat.name,
            host: beat.host,
            pid: beat.pid,
            version: beat.version,
            state,
            age_ms: seen.age_ms,
            started: rfc3339(beat.started_ms),
            running: beat.running,
            tiers: beat.tiers.into_iter().collect(),
        }
    }
}

#[derive(Serialize)]
pub(crate) struct PendingView {
    tiers: Vec<TierView>,
    dead_letters: u64,
    executions_total: usize,
    executions: Vec<ExecutionView>,
}

#[derive(Serialize)]
struct TierView {
    tier: String,
    executions: u64,
    waiting: u64,
    running: u64,
    oldest_wait_ms: Option<i64>,
}

#[derive(Serialize)]
struct ExecutionView {
    execution: String,
    job: Option<String>,
    tier: String,
    fired: Option<String>,
    shards_total: u32,
    shards_ended: u32,
    shards_handed_out: u32,
}

impl PendingView {
    pub(crate) fn new(pending: Pending, now_ms: i64) -> Self {
        let tier = |t: shardcron_store::TierOverview| TierView {
            tier: t.tier,
            executions: t.executions,
            waiting: t.waiting,
            running: t.running,
            // Two hosts' clocks may differ by more than the wait; a negative wait helps nobody.
            oldest_wait_ms: t.oldest_waiting_ms.map(|since| now_ms.saturating_sub(since).max(0)),
        };
        let execution = |p: crate::state::PendingExecution| ExecutionView {
            execution: p.execution.id.to_string(),
            job: p.job,
            tier: p.execution.tier,
            fired: p.fired_ms.map(rfc3339),
            shards_total: p.execution.shards_total,
            shards_ended: p.execution.ended,
            shards_handed_out: p.execution.dispatched,
        };
        PendingView {
            tiers: pending.overview.tiers.into_iter().map(tier).collect(),
            dead_letters: pending.overview.dead,
            executions_total: pending.executions_total,
            executions: pending.executions.into_iter().map(execution).collect(),
        }
    }
}

#[derive(Serialize)]
pub(crate) struct JobsView {
    jobs: Vec<JobView>,
}

#[derive(Serialize)]
struct JobView {
    name: String,
    version: u32,
    tier: Option<String>,
    paused_by: Option<String>,
    next_fire: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overdue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl JobsView {
    pub(crate) fn new(jobs: Vec<JobRecord>, health: Option<&Health>, now_ms: i64) -> Self {
        JobsView { jobs: jobs.into_iter().map(|job| JobView::new(job, health, now_ms)).collect() }
    }
}

impl JobView {
    /// Neither parameters nor the handler's text: they may hold what is not for everybody (case Z-05).
    fn new(job: JobRecord, health: Option<&Health>, now_ms: i64) -> Self {
        let due_ms = job.next_fire_ms.map(|next| job.spec.as_ref().map_or(next, |spec| spec.due_at(next)));
        let late_ms = due_ms.map_or(0, |due| now_ms.saturating_sub(due));
        let overdue = (late_ms > OVERDUE_MS && job.paused_by.is_none()).then(|| {
            let why = match health {
                Some(health) if !health.has_leader() => "no leader",
                Some(_) => "the leader is behind, or has just taken over",
                None => "whether anybody leads could not be found out",
            };
            format!("overdue by {} s: {why}", late_ms / 1_000)
        });
        let (tier, error) = match job.spec {
            Ok(spec) => (Some(spec.tier), None),
            Err(error) => (None, Some(error)),
        };
        JobView {
            name: job.name,
            version: job.version,
            tier,
            paused_by: job.paused_by,
            next_fire: job.next_fire_ms.map(rfc3339),
            overdue,
            error,
        }
    }
}
