//! What the leader makes of an instant: the intent that goes to the ledger, and what is said of its outcome.

use super::dispatcher::{DispatcherActor, NewExecution as Announce};
use crate::telemetry;
use actix::prelude::*;
use shardcron_domain::firing::{self, DecisionKind, Intent};
use shardcron_domain::job::{JobSpec, MisfirePolicy, OverlapPolicy};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::planning;
use shardcron_domain::schedule::{Schedule, ScheduleError, ScheduleSpec};
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{ActiveExecution, FireAction, FireIntent, FireOutcome, NewExecution, Params};

/// A job that can fire. Small, since a leader holds a hundred thousand of them.
pub(super) struct Ready {
    pub(super) id: JobId,
    pub(super) name: Box<str>,
    pub(super) version: u32,
    /// Why it can't be used, if it can't.
    pub(super) recipe: Result<Box<Recipe>, String>,
    pub(super) schedule: Option<Schedule>,
    /// The next instant. The wheel holds when it is to fire, which a jitter makes later.
    pub(super) next_ms: Option<i64>,
}

/// What a firing of a job is made of: of its specification, what the leader needs when it is due.
pub(super) struct Recipe {
    plan: ShardPlan,
    /// Its shards are planned by a look at files, tables or workers.
    looks: bool,
    params: Params,
    tier: Box<str>,
    timeout_ms: Option<i64>,
    stall_ms: Option<i64>,
    overlap: OverlapPolicy,
    pub(super) misfire: MisfirePolicy,
}

impl Recipe {
    pub(super) fn of(spec: JobSpec) -> Result<Self, String> {
        let plan = ShardPlan::from_spec(&spec.shards).map_err(|e| e.to_string())?;
        Ok(Recipe {
            looks: planning::looks(&spec.shards, &plan),
            plan,
            params: spec.params,
            tier: spec.tier.into(),
            timeout_ms: spec.timeout.span().map(|s| s.as_ms()),
            stall_ms: spec.stall_timeout.map(|s| s.as_ms()),
            overlap: spec.overlap,
            misfire: spec.misfire,
        })
    }

    /// What the job's schedule does at an instant at which it fires.
    fn firing(&self, id: ExecutionId, nominal_ms: i64) -> FireAction {
        if self.looks { being_planned(nominal_ms) } else { FireAction::Fire(self.execution(id, Params::new())) }
    }

    /// The execution that a firing makes. `over` replaces the job's own parameters key by key.
    fn execution(&self, id: ExecutionId, over: Params) -> NewExecution {
        let mut params = self.params.clone();
        params.extend(over);
        NewExecution {
            id,
            plan: self.plan.clone(),
            params,
            tier: self.tier.to_string(),
            timeout_ms: self.timeout_ms,
            stall_ms: self.stall_ms,
            overlap: self.overlap,
        }
    }
}

/// Notes an outcome in the log and the metrics. The lateness is counted from when it was to fire.
pub(super) fn account(job: &str, intent: &FireIntent, outcome: &FireOutcome, lateness_ms: i64) {
    match outcome {
        FireOutcome::Fired(execution) => {
            telemetry::decision("fired");
            if intent.scheduled {
                telemetry::firing_lateness(lateness_ms);
            }
            tracing::info!(job, execution_id = %execution, fire_key = %intent.fire_key, lateness_ms, "fired");
        }
        FireOutcome::Skipped { kind, reason, .. } => {
            telemetry::decision(kind.word());
            tracing::info!(job, fire_key = %intent.fire_key, decision = kind.word(), reason = %reason, "not fired");
        }
        FireOutcome::Duplicate(_) => {
            telemetry::decision("duplicate");
            tracing::debug!(job, fire_key = %intent.fire_key, "decided before");
        }
        FireOutcome::Waiting { reason, .. } => {
            telemetry::decision("waiting");
            tracing::info!(job, fire_key = %intent.fire_key, reason = %reason, "waits");
        }
        FireOutcome::Stale | FireOutcome::Busy | FireOutcome::NotYet => {}
    }
}

/// Tells the dispatcher about a new execution. Lossy on purpose: the ledger has it, and the dispatcher looks there every second.
pub(super) fn announce(dispatcher: &Addr<DispatcherActor>, new: &NewExecution) {
    let shards_total = new.plan.count();
    let materialized = shards_total.min(shardcron_domain::limits::SHARD_ROWS_PER_WRITE);
    let active = ActiveExecution {
        id: new.id,
        tier: new.plan.handed_out_by(&new.tier),
        shards_total,
        materialized,
        dispatched: 0,
        ended: 0,
    };
    if dispatcher.try_send(Announce(active)).is_err() {
        tracing::debug!(execution_id = %new.id, "the dispatcher is busy; it finds the execution in the ledger");
    }
}

/// What a firing does whose shards are planned by a look at files, tables or workers: it waits in the ledger while that goes on, so
/// that a slow disk delays no other job and a crash loses nothing (`super::plans`).
pub(super) fn once_planned(spec: &JobSpec, action: FireAction, until_ms: i64) -> FireAction {
    match action {
        FireAction::Fire(new) if planning::looks(&spec.shards, &new.plan) => being_planned(until_ms),
        other => other,
    }
}

fn being_planned(until_ms: i64) -> FireAction {
    FireAction::Hold { until_ms, reason: "its shards are being planned".into() }
}

pub(super) fn scheduled_intent(ready: &Ready, intent: Intent, id: uuid::Uuid) -> FireIntent {
    let nominal_ms = intent.nominal_ms();
    let action = match intent {
        Intent::Record { kind, reason, .. } => FireAction::Record { kind, reason },
        Intent::Fire { .. } => match &ready.recipe {
            Ok(recipe) => recipe.firing(ExecutionId(id), nominal_ms),
            Err(reason) => FireAction::Record { kind: DecisionKind::InvalidSchedule, reason: reason.clone() },
        },
    };
    FireIntent {
        job: ready.id,
        version: ready.version,
        fire_key: firing::schedule_key(nominal_ms),
        nominal_ms,
        scheduled: true,
        action,
        next_fire_ms: None,
        extra: Default::default(),
    }
}

/// The job's schedule, after the earlier ones that still owe decisions.
pub(super) fn with_owed(spec: &JobSpec, owed: &[(ScheduleSpec, i64)]) -> Result<Option<Schedule>, ScheduleError> {
    let own = spec.compiled_schedule()?;
    if owed.is_empty() {
        return Ok(own);
    }
    let compile = |(schedule, upto): &(ScheduleSpec, i64)| Ok((schedule.compile_for(&spec.name)?, *upto));
    let owed = owed.iter().map(compile).collect::<Result<_, ScheduleError>>()?;
    Ok(Some(own.unwrap_or_else(Schedule::never).after(owed)))
}

/// The execution that a firing of this job makes. `over` replaces the job's own parameters key by key.
pub(super) fn new_execution(id: ExecutionId, spec: &JobSpec, over: Params) -> Result<NewExecution, String> {
    Ok(Recipe::of(spec.clone())?.execution(id, over))
}
