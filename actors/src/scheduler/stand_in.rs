//! What a stand-in leaves out of a scheduler's work, and how often it lets a job fire.

use shardcron_domain::JobId;
use shardcron_domain::fallback::Scope;
use shardcron_domain::firing::Intent;
use shardcron_store::{Ledger, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// Executions that one look back reads at once, and looks at most: what is beyond has fired long enough ago, or the frequency is
/// lower than it need be by one firing.
const PAGE: usize = 500;
const PAGES_MAX: usize = 40;

/// The last scheduled firing of each job, by its name.
pub(super) type LastFired = HashMap<String, i64>;

/// The scope of a term; without one, everything passes.
#[derive(Debug, Default)]
pub(super) struct StandIn {
    scope: Option<Scope>,
    last_fired: HashMap<JobId, i64>,
}

impl StandIn {
    pub(super) fn new(scope: Option<Scope>) -> Self {
        StandIn { scope, last_fired: HashMap::new() }
    }

    /// A scheduler, and no stand-in.
    pub(super) fn is_scheduler(&self) -> bool {
        self.scope.is_none()
    }

    pub(super) fn scope(&self) -> Option<&Scope> {
        self.scope.as_ref()
    }

    pub(super) fn covers(&self, tier: &str) -> bool {
        self.scope.as_ref().is_none_or(|scope| scope.covers(tier))
    }

    pub(super) fn thin_out(&self, job: JobId, intents: Vec<Intent>) -> Vec<Intent> {
        match &self.scope {
            Some(scope) => scope.thin_out(intents, self.last_fired.get(&job).copied()),
            None => intents,
        }
    }

    /// A job has fired by its schedule; kept only where somebody asks for it.
    pub(super) fn fired(&mut self, job: JobId, nominal_ms: i64) {
        if self.scope.as_ref().is_some_and(|scope| scope.at_most_every.is_some()) {
            let last = self.last_fired.entry(job).or_insert(nominal_ms);
            *last = (*last).max(nominal_ms);
        }
    }

    /// Looks back over the time that matters; the work is for the I/O runtime.
    pub(super) fn look_back(
        &self,
        ledger: Arc<dyn Ledger>,
        now_ms: i64,
    ) -> impl Future<Output = Result<LastFired>> + Send + 'static {
        let every = self.scope.as_ref().and_then(|scope| scope.at_most_every);
        async move {
            let mut last = LastFired::new();
            let Some(every) = every else { return Ok(last) };
            let since_ms = now_ms.saturating_sub(every.as_ms());
            let mut before = None;
            for _ in 0..PAGES_MAX {
                let page = ledger.executions(None, before, PAGE).await?;
                before = page.last().map(|row| row.id);
                let over = page.len() < PAGE || page.last().is_some_and(|row| row.fired_ms < since_ms);
                for row in page.into_iter().filter(|row| !row.fire_key.starts_with("request:")) {
                    let known = last.entry(row.job).or_insert(row.nominal_ms);
                    *known = (*known).max(row.nominal_ms);
                }
                if over {
                    break;
                }
            }
            Ok(last)
        }
    }
}
