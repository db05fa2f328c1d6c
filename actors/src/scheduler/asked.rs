//! What a person or a program asks for, as a firing or as a backfill.

use super::intent::once_planned;
use super::turns::asked_execution;
use crate::ports::Ports;
use shardcron_domain::backfill::{self, BackfillRequest};
use shardcron_domain::limits::FUTURE_TRIGGERS;
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::units::{parse_instant, rfc3339};
use shardcron_domain::{ExecutionId, firing};
use shardcron_store::{FireAction, FireExtra, FireIntent, FiringRequest, JobRecord, NewBackfill, StoreError};

/// Why it can't be done.
pub(super) enum Refused {
    /// A sentence for who asked.
    For(String),
    /// Perhaps later.
    Now(StoreError),
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        if error.is_transient() { Refused::Now(error) } else { Refused::For(error.to_string()) }
    }
}

impl From<String> for Refused {
    fn from(sentence: String) -> Self {
        Refused::For(sentence)
    }
}

fn spec(record: &JobRecord) -> Result<&shardcron_domain::JobSpec, String> {
    record.spec.as_ref().map_err(|e| format!("job '{}' can't be read: {e}; apply it again", record.name))
}

/// The sentence that is kept with the decision.
fn note(request: &TriggerRequest) -> Option<String> {
    request.by.as_ref().map(|who| format!("asked for by {who}"))
}

/// One firing: now, for a past instant, or kept for a future one.
pub(super) async fn firing(
    ports: &Ports,
    record: &JobRecord,
    (request, id, own_id): (&TriggerRequest, &str, uuid::Uuid),
) -> Result<FireIntent, Refused> {
    let now_ms = ports.clock.now_ms();
    let nominal_ms = request.at.as_deref().map_or(Ok(now_ms), parse_instant)?;
    let asked = FiringRequest { params: request.params.clone(), shards: request.shards.clone(), note: note(request) };
    let job = spec(record)?;
    let new = asked_execution(ExecutionId(own_id), job, &asked)?;
    let action = if nominal_ms > now_ms {
        let waiting = ports.ledger.waiting_count(record.id).await?;
        if waiting as usize >= FUTURE_TRIGGERS {
            return Err(Refused::For(format!(
                "job '{}' has {waiting} firings that wait; {FUTURE_TRIGGERS} are the most",
                record.name
            )));
        }
        FireAction::Hold { until_ms: nominal_ms, reason: format!("it waits for its instant, {}", rfc3339(nominal_ms)) }
    } else {
        once_planned(job, FireAction::Fire(new), now_ms)
    };
    Ok(FireIntent {
        job: record.id,
        version: record.version,
        fire_key: firing::request_key(id),
        nominal_ms,
        scheduled: false,
        action,
        next_fire_ms: None,
        extra: FireExtra { waiting: None, watches: Vec::new(), request: asked },
    })
}

/// A backfill, ready to be begun.
pub(super) async fn backfill(
    ports: &Ports,
    record: &JobRecord,
    (request, fill, id): (&TriggerRequest, &BackfillRequest, &str),
) -> Result<NewBackfill, Refused> {
    let spec = spec(record)?;
    let Some(schedule) = spec.compiled_schedule().map_err(|e| e.to_string())? else {
        return Err(Refused::For(format!(
            "job '{}' has no schedule, so there are no instants to fill in; trigger it with \"at\" instead",
            record.name
        )));
    };
    // What can't be fired is refused now, and not at each turn.
    let asked = FiringRequest {
        params: request.params.clone(),
        shards: request.shards.clone(),
        note: Some(format!("backfill {id}{}", request.by.as_ref().map_or(String::new(), |who| format!(" by {who}")))),
    };
    asked_execution(ExecutionId(ports.entropy.id()), spec, &asked)?;
    let range = fill.range(ports.clock.now_ms())?;
    let instants = backfill::instants(&schedule, range)?;
    let keys: Vec<String> = instants.iter().map(|ms| firing::schedule_key(*ms)).collect();
    let ran = ports.ledger.ran(record.id, &keys).await?.into_iter().collect();
    let plan = backfill::plan(&instants, &ran, fill.force, id);
    Ok(NewBackfill {
        job: record.id,
        request_id: id.to_owned(),
        from_ms: range.from_ms,
        to_ms: range.to_ms,
        forced: fill.force,
        who: request.by.clone().unwrap_or_else(|| "unknown".into()),
        already: u32::try_from(plan.already.len()).unwrap_or(u32::MAX),
        instants: plan.run,
        request: asked,
    })
}
