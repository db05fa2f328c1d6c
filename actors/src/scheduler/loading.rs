//! How the leader knows the jobs: all of them, read in pages as its term begins, and from then on those that were changed.
//!
//! A page is read only while no firing is under way or queued, so that the next instants in it are the last word; between two pages
//! what is due is fired. Changes of a hundred thousand jobs make no firing late by more than a page.

use super::intent::{Ready, Recipe, with_owed};
use super::stand_in::LastFired;
use super::trigger::TriggerActor;
use crate::ports::{Backoff, tell};
use actix::prelude::*;
use shardcron_domain::schedule::ExceptionPool;
use shardcron_domain::wheel::Wheel;
use shardcron_domain::{Epoch, JobId};
use shardcron_store::{JobPage, JobRecord, JobsCursor, StoreError};
use std::collections::HashSet;

/// Jobs of one page: reading and understanding them takes some tens of milliseconds, in which nothing fires.
const PAGE: usize = 1_000;

/// How far the jobs are known.
#[derive(Default)]
pub(super) struct Loading {
    cursor: JobsCursor,
    /// Everything up to this revision is known; `None`: the first reading is not over.
    revision: Option<i64>,
    pub(super) reading: bool,
    /// There may be something to read, as soon as nothing is being written.
    pub(super) wanted: bool,
    backoff: Option<Backoff>,
    exceptions: ExceptionPool,
    /// Jobs of which the ledger says that they are not what is known here.
    stale: HashSet<JobId>,
}

impl Loading {
    /// Has to be read again.
    pub(super) fn stale(&mut self, job: JobId) {
        self.stale.insert(job);
        self.wanted = true;
    }
}

struct Read {
    revision: i64,
    page: JobPage,
    last_fired: LastFired,
}

#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Revision {
    pub(super) epoch: Epoch,
    pub(super) result: Result<i64, StoreError>,
}

#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Loaded {
    epoch: Epoch,
    result: Result<Read, StoreError>,
}

impl TriggerActor {
    /// Asks whether any job has changed.
    pub(super) fn look_for_changes(&self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.epoch() else { return };
        let (ledger, me) = (self.ports.ledger.clone(), ctx.address());
        self.ports.run(async move { ledger.jobs_revision().await }, move |result| tell(me, Revision { epoch, result }));
    }

    /// Reads the next page of changes, now or as soon as nothing is being written.
    pub(super) fn load(&mut self, ctx: &mut Context<Self>) {
        let Some(epoch) = self.epoch() else { return };
        if self.loading.reading {
            return;
        }
        if self.is_writing() || self.delayed.asking() {
            self.loading.wanted = true;
            return;
        }
        (self.loading.reading, self.loading.wanted) = (true, false);
        let after = self.loading.cursor;
        let first = after == JobsCursor::default();
        let (ledger, me) = (self.ports.ledger.clone(), ctx.address());
        let look_back = first.then(|| self.stand_in.look_back(ledger.clone(), self.ports.clock.now_ms()));
        let work = async move {
            // The revision first: a change between the two reads is seen again by the next look.
            let revision = ledger.jobs_revision().await?;
            let page = ledger.jobs_changed(after, PAGE).await?;
            let last_fired = match look_back {
                Some(look_back) => look_back.await?,
                None => LastFired::new(),
            };
            Ok(Read { revision, page, last_fired })
        };
        self.ports.run(work, move |result| tell(me, Loaded { epoch, result }));
    }

    /// Everything from the beginning.
    fn load_all(&mut self, ctx: &mut Context<Self>) {
        self.forget_jobs();
        self.load(ctx);
    }

    pub(super) fn forget_jobs(&mut self) {
        self.jobs.clear();
        self.wheel = Wheel::default();
        self.delayed.clear();
        self.loading = Loading::default();
    }

    fn take_page(&mut self, Read { revision, page, last_fired }: Read, ctx: &mut Context<Self>) {
        let known = self.loading.revision;
        for id in page.gone {
            self.let_go(id);
        }
        let loaded = page.jobs.len();
        for record in page.jobs {
            if let Some(last) = last_fired.get(&record.name) {
                self.stand_in.fired(record.id, *last);
            }
            self.take_in(record);
        }
        self.loading.cursor = page.next;
        if page.more {
            self.loading.wanted = true;
            return;
        }
        self.loading.revision = Some(revision);
        tracing::debug!(loaded, jobs = self.jobs.len(), scheduled = self.wheel.len(), revision, "jobs loaded");
        // A program of an earlier version counts the jobs' revision on and does not say of which job.
        let unmarked = page.next.revision < revision;
        let stale = self.loading.stale.len();
        if known.is_some() && (unmarked || stale > 0) {
            tracing::debug!(unmarked, stale, "reading all jobs again");
            self.load_all(ctx);
        } else if stale > 0 {
            self.loading.wanted = true;
        }
    }

    fn let_go(&mut self, id: JobId) {
        self.loading.stale.remove(&id);
        self.jobs.remove(&id);
        self.wheel.set(id, None);
        self.delayed.let_go(id);
    }

    fn take_in(&mut self, record: JobRecord) {
        self.let_go(record.id);
        // A stand-in leaves other tiers' instants undecided, and those of a job of no known tier: the next scheduler decides them.
        let tier = record.spec.as_ref().ok().map(|spec| spec.tier.as_str());
        if !self.stand_in.is_scheduler() && !tier.is_some_and(|tier| self.stand_in.covers(tier)) {
            return;
        }
        let JobRecord { id, name, version, next_fire_ms, .. } = record;
        let read = record.spec.and_then(|spec| {
            let schedule = with_owed(&spec, &record.owed).map_err(|e| e.to_string())?;
            Ok((Recipe::of(spec)?, schedule))
        });
        // One job that can't be used must not stop the others (case M-06). It stays on the wheel: its instant gets a decision.
        let (recipe, mut schedule) = match read {
            Ok((recipe, schedule)) => (Ok(Box::new(recipe)), schedule),
            Err(fault) => {
                tracing::error!(job = %name, fault = %fault, "this job can't be used and will not fire by itself; apply it again");
                (Err(fault), None)
            }
        };
        if let Some(schedule) = &mut schedule {
            schedule.share(&mut self.loading.exceptions);
        }
        self.jobs.insert(id, Ready { id, name: name.into(), version, recipe, schedule, next_ms: None });
        self.plan(id, next_fire_ms);
    }
}

impl Handler<Revision> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Revision { epoch, result }: Revision, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            return;
        }
        match result {
            Ok(revision) if self.loading.revision != Some(revision) => self.load(ctx),
            Ok(_) => {}
            Err(e) => tracing::debug!(error = %e, "the jobs' revision could not be read"),
        }
    }
}

impl Handler<Loaded> for TriggerActor {
    type Result = ();

    fn handle(&mut self, Loaded { epoch, result }: Loaded, ctx: &mut Self::Context) {
        if self.epoch() != Some(epoch) {
            return;
        }
        self.loading.reading = false;
        match result {
            Ok(read) => {
                self.loading.backoff = None;
                self.take_page(read, ctx);
                self.look_at_delayed(ctx);
                self.tick(ctx);
            }
            Err(e) => {
                if self.loading.backoff.is_none() {
                    tracing::warn!(error = %e, "the jobs could not be loaded; trying until it works");
                }
                let wait = self.loading.backoff.get_or_insert_with(|| self.ports.backoff()).next();
                ctx.run_later(wait, |actor, ctx| actor.load(ctx));
                self.tick(ctx);
            }
        }
    }
}
