//! What fires because of something else than the clock's next instant: firings that waited, parts of a backfill, and jobs that follow
//! other jobs. All of it is derived from the ledger in each round, so that nothing is lost with a leader.

use super::Deposed;
use super::dispatcher::DispatcherActor;
use super::intent::{account, announce, new_execution, once_planned};
use super::plans::{Plans, Progress};
use crate::leadership::Term;
use crate::ports::Ports;
use actix::Addr;
use shardcron_domain::after::{self, Follow, Watched};
use shardcron_domain::fallback::Scope;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::{JobSpec, OverlapPolicy};
use shardcron_domain::limits::{BACKFILL_AT_ONCE, FIRINGS_PER_WRITE, UPSTREAM_SUMMARY_BYTES};
use shardcron_domain::units::rfc3339;
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{
    FireAction, FireExtra, FireIntent, FireOutcome, FiringRequest, JobRecord, NewExecution, Params, Result, StoreError,
    WaitingKind, WaitingRow, WatchRow,
};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often it looks: what follows an end fires within a second of it, however the looks fall.
const EVERY: Duration = Duration::from_millis(200);
/// How often it is noted that this leader leads.
const SEEN_EVERY_MS: i64 = 1_000;
/// Rows of one look.
const WAITING_ROWS: usize = 1_000;
const WATCH_ROWS: usize = 20_000;

/// One term's rounds.
pub(super) struct Turns {
    pub(super) ports: Ports,
    pub(super) dispatcher: Addr<DispatcherActor>,
    pub(super) deposed: Deposed,
    pub(super) term: Term,
    /// What a stand-in looks after; `None` for a scheduler. What it leaves waits for one.
    pub(super) scope: Option<Scope>,
    pub(super) lost_after: Duration,
    pub(super) stop: CancellationToken,
}

/// The execution that is asked for: the job's, but for what the request says.
pub(super) fn asked_execution(
    id: ExecutionId,
    spec: &JobSpec,
    request: &FiringRequest,
) -> std::result::Result<NewExecution, String> {
    let new = new_execution(id, spec, request.params.clone())?;
    match &request.shards {
        Some(wanted) => Ok(NewExecution { plan: wanted.plan(&spec.shards)?, ..new }),
        None => Ok(new),
    }
}

impl Turns {
    /// Looks until it is told to stop. A round that is under way is finished.
    pub(super) async fn run(self) {
        let (mut noted_ms, mut failing) = (i64::MIN, false);
        let mut plans = Plans::new(self.ports.clone(), self.lost_after);
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
            if !self.may_write() {
                continue;
            }
            match self.round(&mut noted_ms, &mut plans).await {
                Ok(()) => failing = false,
                Err(StoreError::Deposed { .. }) => {
                    self.deposed.report(self.term.epoch);
                    return;
                }
                Err(e) if std::mem::replace(&mut failing, true) => {
                    tracing::debug!(error = %e, "what waits can't be looked at yet")
                }
                Err(e) => {
                    tracing::warn!(error = %e, "what waits and what follows can't be looked at; trying until it works")
                }
            }
        }
    }

    fn covers(&self, spec: &JobSpec) -> bool {
        self.scope.as_ref().is_none_or(|scope| scope.covers(&spec.tier))
    }

    /// Whether it may still write (L2): asked before each write, since the looks before it, or the write before it, may have taken
    /// longer than the lease lasts. What is left undone is found again by whoever leads then.
    fn may_write(&self) -> bool {
        self.term.trusted(self.ports.clock.mono_ms())
    }

    async fn round(&self, noted_ms: &mut i64, plans: &mut Plans) -> Result<()> {
        let now_ms = self.ports.clock.now_ms();
        if now_ms.saturating_sub(*noted_ms) >= SEEN_EVERY_MS {
            self.ports.ledger.touch_epoch(self.term.epoch, now_ms).await?;
            *noted_ms = now_ms;
        }
        self.waiting(now_ms, plans).await?;
        self.following().await
    }

    async fn waiting(&self, now_ms: i64, plans: &mut Plans) -> Result<()> {
        let rows = self.ports.ledger.waiting_heads(now_ms, WAITING_ROWS).await?;
        plans.retain(&rows);
        let mut jobs = Jobs::new(&self.ports);
        let mut intents = Vec::new();
        for row in &rows {
            // What can't be its turn costs no transaction.
            let held = row.at.kind != WaitingKind::Future && row.active > 0;
            if held && row.active >= BACKFILL_AT_ONCE {
                continue;
            }
            let Some((record, spec)) = jobs.get(row.job, &row.job_name).await? else { continue };
            if !self.covers(spec) {
                continue;
            }
            if held && spec.overlap != OverlapPolicy::Allow {
                continue;
            }
            let intent = self.turn_of(row, record, spec);
            match plans.look(row, (record, spec), intent.action) {
                Progress::Ready(action) => intents.push((record.name.clone(), FireIntent { action, ..intent })),
                Progress::UnderWay => {}
            }
        }
        self.fire(intents).await
    }

    fn turn_of(&self, row: &WaitingRow, record: &JobRecord, spec: &JobSpec) -> FireIntent {
        let action = match asked_execution(ExecutionId(self.ports.entropy.id()), spec, &row.request) {
            Ok(new) => FireAction::Fire(new),
            // The job has changed since, and what was asked for does not fit it any more.
            Err(reason) => FireAction::Record { kind: DecisionKind::InvalidSchedule, reason },
        };
        FireIntent {
            job: row.job,
            version: record.version,
            fire_key: row.fire_key.clone(),
            nominal_ms: row.nominal_ms,
            scheduled: row.scheduled,
            action,
            next_fire_ms: None,
            extra: FireExtra { waiting: Some(row.at), watches: Vec::new(), request: row.request.clone() },
        }
    }

    async fn following(&self) -> Result<()> {
        let rows = self.ports.ledger.watches(WATCH_ROWS).await?;
        let mut of_job: BTreeMap<JobId, (String, Vec<Watched>)> = BTreeMap::new();
        for WatchRow { id, job, job_name, upstream, execution, nominal_ms, phase } in rows {
            let watched = Watched { id, upstream, execution, nominal_ms, phase };
            of_job.entry(job).or_insert_with(|| (job_name, Vec::new())).1.push(watched);
        }
        let mut jobs = Jobs::new(&self.ports);
        let (mut intents, mut dropped) = (Vec::new(), Vec::new());
        for (job, (name, watched)) in of_job {
            let Some((record, spec)) = jobs.get(job, &name).await?.filter(|(_, spec)| self.covers(spec)) else {
                continue;
            };
            let Some(after) = &spec.after else {
                dropped.extend(watched.iter().map(|w| w.id));
                continue;
            };
            let (follows, useless) = after::look(after, &watched);
            dropped.extend(useless);
            for follow in follows {
                intents.push((name.clone(), self.follow(follow, record, spec).await?));
            }
        }
        if !dropped.is_empty() && self.may_write() {
            self.ports.ledger.drop_watches(self.term.epoch, &dropped).await?;
        }
        self.fire(intents).await
    }

    async fn follow(&self, follow: Follow, record: &JobRecord, spec: &JobSpec) -> Result<FireIntent> {
        let mut upstream = Vec::with_capacity(follow.of.len());
        for end in &follow.of {
            let came_to = self.ports.ledger.result_summary(end.execution, UPSTREAM_SUMMARY_BYTES).await?;
            upstream.push(serde_json::json!({
                "job": end.upstream,
                "execution": end.execution,
                "instant": rfc3339(end.nominal_ms),
                "state": end.phase.word(),
                "shards": came_to.as_ref().map(|c| c.shards),
                "failed": came_to.as_ref().map(|c| c.failed),
                "rows": came_to.as_ref().and_then(|c| c.rows),
                "summary": came_to.and_then(|c| c.summary).and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok()),
            }));
        }
        let mut params = Params::new();
        params.insert("upstream".into(), upstream.into());
        let words: Vec<String> = follow
            .of
            .iter()
            .map(|end| format!("execution {} of '{}' ({})", end.execution, end.upstream, end.phase.word()))
            .collect();
        let request = FiringRequest { params, shards: None, note: Some(format!("follows {}", words.join(" and "))) };
        let id = ExecutionId(self.ports.entropy.id());
        let action = match (follow.refused, asked_execution(id, spec, &request)) {
            (Some(reason), _) => FireAction::Record { kind: DecisionKind::SkippedUpstream, reason },
            (None, Ok(new)) => once_planned(spec, FireAction::Fire(new), follow.nominal_ms),
            (None, Err(reason)) => FireAction::Record { kind: DecisionKind::InvalidSchedule, reason },
        };
        Ok(FireIntent {
            job: record.id,
            version: record.version,
            fire_key: follow.fire_key,
            nominal_ms: follow.nominal_ms,
            scheduled: true,
            action,
            next_fire_ms: None,
            extra: FireExtra { waiting: None, watches: follow.takes_up, request },
        })
    }

    async fn fire(&self, intents: Vec<(String, FireIntent)>) -> Result<()> {
        for batch in intents.chunks(FIRINGS_PER_WRITE) {
            if !self.may_write() {
                return Ok(());
            }
            let plain: Vec<FireIntent> = batch.iter().map(|(_, intent)| intent.clone()).collect();
            let now_ms = self.ports.clock.now_ms();
            let outcomes = self.ports.ledger.fire(self.term.epoch, &plain, now_ms).await?;
            for ((job, intent), outcome) in batch.iter().zip(outcomes) {
                account(job, intent, &outcome, now_ms - intent.nominal_ms);
                if let (FireOutcome::Fired(_), FireAction::Fire(new)) = (&outcome, &intent.action) {
                    announce(&self.dispatcher, new);
                }
            }
        }
        Ok(())
    }
}

/// Jobs as the ledger has them, each read once in a round.
struct Jobs<'a> {
    ports: &'a Ports,
    read: BTreeMap<JobId, Option<(JobRecord, JobSpec)>>,
}

impl<'a> Jobs<'a> {
    fn new(ports: &'a Ports) -> Self {
        Jobs { ports, read: BTreeMap::new() }
    }

    /// `None`: it is gone, or can't be read, which its own loading says.
    async fn get(&mut self, id: JobId, name: &str) -> Result<Option<(&JobRecord, &JobSpec)>> {
        if !self.read.contains_key(&id) {
            let record = self.ports.ledger.job(name).await?;
            let known = record
                .and_then(|record| Some((record.spec.clone().ok()?, record)))
                .map(|(spec, record)| (record, spec));
            self.read.insert(id, known);
        }
        Ok(self.read.get(&id).and_then(Option::as_ref).map(|(record, spec)| (record, spec)))
    }
}
