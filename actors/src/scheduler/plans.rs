//! Makes the plans of firings that wait for them: beside the leader's other work, a few at a time, each within its limit. What comes
//! of it goes through the firing transaction like any other firing, so a leader that is gone meanwhile has done nothing.

use super::plan_files;
use crate::ports::Ports;
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::JobSpec;
use shardcron_domain::limits::{PLANNING_AT_ONCE, PLANNING_MS};
use shardcron_domain::plan::{Addressee, ShardPlan};
use shardcron_domain::planning::{self, NoPlan};
use shardcron_domain::sharding::{Balance, ShardsSpec};
use shardcron_domain::{Incarnation, JobId};
use shardcron_store::{FireAction, JobRecord, NewExecution, StoreError, WaitingRow};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;

/// The plans of one term.
pub(super) struct Plans {
    ports: Ports,
    lost_after: Duration,
    /// By the row of the firing that waits for it.
    making: BTreeMap<i64, Making>,
}

struct Making {
    /// A plan of another version of the job is no use.
    version: u32,
    task: JoinHandle<Result<ShardPlan, NoPlan>>,
    /// Tells a look at files, which can't be dropped, that nobody waits for it any more.
    _given_up: GivenUp,
}

/// Raises its flag when it is dropped.
struct GivenUp(Arc<AtomicBool>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How far the plan of a firing is.
pub(super) enum Progress {
    /// It can be fired, or it is known why not.
    Ready(FireAction),
    /// Look again in the next round.
    UnderWay,
}

impl Plans {
    pub(super) fn new(ports: Ports, lost_after: Duration) -> Self {
        Plans { ports, lost_after, making: BTreeMap::new() }
    }

    /// Gives up what nobody waits for any more.
    pub(super) fn retain(&mut self, rows: &[WaitingRow]) {
        self.making.retain(|id, _| rows.iter().any(|row| row.at.id == *id));
    }

    /// The action of a firing whose turn it is: as it is where its plan is known, else with the plan once that is made.
    pub(super) fn look(&mut self, row: &WaitingRow, of: (&JobRecord, &JobSpec), action: FireAction) -> Progress {
        let (record, spec) = of;
        let new = match action {
            FireAction::Fire(new) if planning::looks(&spec.shards, &new.plan) => new,
            other => return Progress::Ready(other),
        };
        let id = row.at.id;
        if self.making.get(&id).is_some_and(|making| making.version != record.version) {
            self.making.remove(&id);
        }
        let Some(making) = self.making.get_mut(&id) else {
            if self.making.len() < PLANNING_AT_ONCE {
                self.begin(row, (record, spec), &new);
            }
            return Progress::UnderWay;
        };
        if !making.task.is_finished() {
            return Progress::UnderWay;
        }
        let made = futures_util::FutureExt::now_or_never(&mut making.task);
        self.making.remove(&id);
        let made = match made {
            Some(Ok(made)) => made,
            Some(Err(e)) => Err(NoPlan::invalid(format!("the planning ended by itself: {e}"))),
            None => return Progress::UnderWay,
        };
        Progress::Ready(match made {
            Ok(plan) => FireAction::Fire(NewExecution { plan, ..new }),
            Err(NoPlan { kind, reason }) => {
                if kind == DecisionKind::InvalidPlan {
                    tracing::error!(job = %record.name, fire_key = %row.fire_key, error = %reason, "the shards can't be planned; this firing does not run");
                }
                FireAction::Record { kind, reason }
            }
        })
    }

    fn begin(&mut self, row: &WaitingRow, (record, spec): (&JobRecord, &JobSpec), new: &NewExecution) {
        let shards =
            row.request.shards.as_ref().map_or_else(|| Ok(spec.shards.clone()), |wanted| wanted.over(&spec.shards));
        let given_up = Arc::new(AtomicBool::new(false));
        let wanted = Wanted {
            ports: self.ports.clone(),
            lost_after: self.lost_after,
            job: record.id,
            tier: spec.tier.clone(),
            plan: new.plan.clone(),
            given_up: given_up.clone(),
        };
        let work = async move {
            let shards = shards.map_err(NoPlan::invalid)?;
            let limit = Duration::from_millis(PLANNING_MS);
            match tokio::time::timeout(limit, wanted.make(&shards)).await {
                Ok(made) => made.and_then(planning::bounded),
                Err(_) => Err(NoPlan::invalid(format!(
                    "planning its shards took longer than {} s and was given up; cut the input into smaller files, or give the \
                     key an index",
                    limit.as_secs()
                ))),
            }
        };
        let making = Making { version: record.version, task: tokio::spawn(work), _given_up: GivenUp(given_up) };
        self.making.insert(row.at.id, making);
    }
}

/// One plan to be made.
struct Wanted {
    ports: Ports,
    lost_after: Duration,
    job: JobId,
    tier: String,
    /// As far as it is known without a look.
    plan: ShardPlan,
    given_up: Arc<AtomicBool>,
}

impl Wanted {
    async fn make(self, shards: &ShardsSpec) -> Result<ShardPlan, NoPlan> {
        let plan = match (&shards.file, &shards.query) {
            (Some(file), _) => {
                let (file, given_up) = (file.clone(), self.given_up.clone());
                let look = tokio::task::spawn_blocking(move || plan_files::plan(&file, &given_up));
                look.await.map_err(|e| NoPlan::invalid(format!("the look at the files ended by itself: {e}")))??
            }
            (_, Some(query)) => {
                let bounds = self.ask(|| self.ports.ledger.key_bounds(query)).await?;
                planning::of_keys(&query.table, bounds)?
            }
            _ if shards.broadcast => planning::of_workers(&self.tier, self.workers().await?)?,
            _ => self.plan.clone(),
        };
        if shards.balance != Some(Balance::Last) {
            return Ok(plan);
        }
        if let ShardPlan::Keys { .. } = plan {
            return Err(NoPlan::invalid(
                "balance = \"last\" needs keys that are whole numbers: between two texts nobody can say where the middle is. Take \
                 balance out, or cut by another key",
            ));
        }
        Ok(match self.ask(|| self.ports.ledger.last_run(self.job)).await? {
            Some(last) => planning::balanced(plan, shards, &last),
            None => plan,
        })
    }

    /// Asks until there is an answer; the limit of the whole bounds it.
    async fn ask<T, F>(&self, call: impl Fn() -> F) -> Result<T, NoPlan>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let mut backoff = self.ports.backoff();
        loop {
            match call().await {
                Ok(answer) => return Ok(answer),
                Err(e) if e.is_transient() => tracing::debug!(error = %e, "a plan could not be made yet"),
                Err(e) => return Err(NoPlan::invalid(e.to_string())),
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// Who of the tier is alive and takes something new.
    async fn workers(&self) -> Result<Vec<Addressee>, NoPlan> {
        let seen = self.ask(|| self.ports.presence.workers()).await?;
        let serves = |tiers: &[(String, u32)]| tiers.iter().any(|(tier, _)| *tier == self.tier);
        let lost_after_ms = i64::try_from(self.lost_after.as_millis()).unwrap_or(i64::MAX);
        let alive = seen.into_iter().filter(|w| w.age_ms <= lost_after_ms && !w.beat.draining && serves(&w.beat.tiers));
        let addressee = |incarnation: Incarnation, name: String| Addressee { name, incarnation };
        Ok(alive.map(|w| addressee(w.beat.incarnation, w.beat.name)).collect())
    }
}
