//! What the leader makes of an instant: the intent that goes to the ledger, and what is said of its outcome.

use super::dispatcher::{DispatcherActor, NewExecution as Announce};
use crate::telemetry;
use actix::prelude::*;
use shardcron_domain::firing::{self, DecisionKind, Intent};
use shardcron_domain::job::JobSpec;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::schedule::{Schedule, ScheduleError, ScheduleSpec};
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{ActiveExecution, FireAction, FireIntent, FireOutcome, NewExecution, Params};

/// A job that can fire.
pub(super) struct Ready {
    pub(super) id: JobId,
    pub(super) name: String,
    pub(super) version: u32,
    /// Without its schedule's text, which may hold a calendar; why it can't be used, if it can't.
    pub(super) spec: Result<JobSpec, String>,
    pub(super) schedule: Option<Schedule>,
    /// The next instant. The wheel holds when it is to fire, which a jitter makes later.
    pub(super) next_ms: Option<i64>,
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
    let active =
        ActiveExecution { id: new.id, tier: new.tier.clone(), shards_total, materialized, dispatched: 0, ended: 0 };
    if dispatcher.try_send(Announce(active)).is_err() {
        tracing::debug!(execution_id = %new.id, "the dispatcher is busy; it finds the execution in the ledger");
    }
}

pub(super) fn scheduled_intent(ready: &Ready, intent: Intent, id: uuid::Uuid) -> FireIntent {
    let nominal_ms = intent.nominal_ms();
    let action = match intent {
        Intent::Record { kind, reason, .. } => FireAction::Record { kind, reason },
        Intent::Fire { .. } => match ready
            .spec
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|spec| new_execution(ExecutionId(id), spec, Params::new()))
        {
            Ok(new) => FireAction::Fire(new),
            Err(reason) => FireAction::Record { kind: DecisionKind::InvalidSchedule, reason },
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
    let mut params = spec.params.clone();
    params.extend(over);
    Ok(NewExecution {
        id,
        plan: ShardPlan::from_spec(&spec.shards).map_err(|e| e.to_string())?,
        params,
        tier: spec.tier.clone(),
        timeout_ms: spec.timeout.span().map(|s| s.as_ms()),
        stall_ms: spec.stall_timeout.map(|s| s.as_ms()),
        overlap: spec.overlap,
    })
}
