//! Fixed delays: finds out when the last execution of a job has ended, which makes the job's next instant.
//!
//! The leader asks the ledger once a second about the jobs that wait. The workers' record of an end need not know the schedule,
//! and after a restart the ledger says the same (case S-16).

use super::trigger::TriggerActor;
use crate::ports::tell;
use actix::prelude::*;
use shardcron_domain::limits::DELAYED_BATCH;
use shardcron_domain::schedule::Schedule;
use shardcron_domain::{Epoch, JobId};
use shardcron_store::{Arming, StoreError};
use std::collections::BTreeSet;
use std::time::Duration;

/// How often the ledger is asked: a job may be this much later than its delay says.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The jobs that wait for an end.
#[derive(Debug, Default)]
pub(super) struct Delayed {
    waiting: BTreeSet<JobId>,
    /// Where the next look goes on.
    cursor: Option<JobId>,
    asking: bool,
}

impl Delayed {
    pub(super) fn wait(&mut self, job: JobId) {
        self.waiting.insert(job);
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }

    pub(super) fn let_go(&mut self, job: JobId) {
        self.waiting.remove(&job);
    }

    /// Whether the ledger is being asked, and may be writing next instants.
    pub(super) fn asking(&self) -> bool {
        self.asking
    }

    /// The next few, round and round.
    fn next_few(&mut self) -> Vec<JobId> {
        let after = self.cursor.take();
        let rest = self.waiting.iter().filter(|job| after.is_none_or(|after| **job > after));
        let few: Vec<JobId> = rest.take(DELAYED_BATCH).copied().collect();
        if few.len() == DELAYED_BATCH {
            self.cursor = few.last().copied();
        }
        few
    }
}

#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Armed {
    epoch: Epoch,
    /// The instant of each job at a version; `None` if its schedule has come to its end.
    result: Result<Vec<(JobId, u32, Option<i64>)>, StoreError>,
}

impl TriggerActor {
    pub(super) fn look_at_delayed(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.epoch() else { return };
        // Not beside a reading of the jobs: what that has read of a next instant must not be older than what is written here.
        if self.delayed.asking || self.loading.reading {
            return;
        }
        let few = self.delayed.next_few();
        let waiting: Vec<(JobId, u32, Schedule)> = few
            .into_iter()
            .filter_map(|id| self.jobs.get(&id).map(|ready| (id, ready)))
            .filter_map(|(id, ready)| Some((id, ready.version, ready.schedule.clone()?)))
            .collect();
        if waiting.is_empty() {
            return;
        }
        self.delayed.asking = true;
        let (ledger, clock, me) = (self.ports.ledger.clone(), self.ports.clock.clone(), ctx.address());
        let work = async move {
            let ids: Vec<JobId> = waiting.iter().map(|(id, ..)| *id).collect();
            let idle = ledger.idle_since(&ids).await?;
            let now_ms = clock.now_ms();
            let (mut arm, mut over) = (Vec::new(), Vec::new());
            for (job, version, schedule) in &waiting {
                let Some((_, since_ms)) = idle.iter().find(|(id, _)| id == job) else { continue };
                match schedule.next_after_end(*since_ms, now_ms) {
                    Some(next_fire_ms) => arm.push(Arming { job: *job, version: *version, next_fire_ms }),
                    None => over.push((*job, *version, None)),
                }
            }
            let armed = if arm.is_empty() { Vec::new() } else { ledger.arm(epoch, &arm).await? };
            over.extend(armed.into_iter().map(|one| (one.job, one.version, Some(one.next_fire_ms))));
            Ok(over)
        };
        self.ports.run(work, move |result| tell(me, Armed { epoch, result }));
    }
}

impl Handler<Armed> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Armed { epoch, result }: Armed, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            return;
        }
        self.delayed.asking = false;
        match result {
            Ok(armed) => {
                let any = armed.iter().any(|(.., next)| next.is_some());
                for (job, version, next) in armed {
                    // The jobs may have been loaded anew meanwhile; then what the ledger said of another version is old.
                    let same = self.jobs.get(&job).is_some_and(|ready| ready.version == version);
                    if same && self.delayed.waiting.remove(&job) && next.is_some() {
                        self.plan(job, next);
                    }
                }
                if any || self.loading.wanted {
                    self.tick(ctx);
                }
            }
            Err(StoreError::Deposed { .. }) => self.deposed.report(epoch),
            Err(e) => tracing::debug!(error = %e, "whether delayed jobs have ended could not be read"),
        }
    }
}
