//! Retention at the leader: a slow pass now and then, in small steps with rests between them, so that it is never in the way of a
//! firing. A task and no actor: nothing waits for it, and it keeps nothing that must survive.

use crate::leadership::{Leading, Term};
use crate::ports::Ports;
use shardcron_store::{PruneBefore, PruneCursor, Pruned};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long what has ended is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionOptions {
    /// Executions that ended well.
    pub success: Duration,
    /// Executions that failed or were cancelled, and dead letters.
    pub failed: Duration,
    /// Decisions.
    pub decisions: Duration,
    /// How often the leader deletes what is older. The first pass comes a tenth of it after a term begins.
    pub every: Duration,
}

impl Default for RetentionOptions {
    fn default() -> Self {
        let days = |n: u64| Duration::from_secs(n * 86_400);
        RetentionOptions { success: days(30), failed: days(90), decisions: days(90), every: Duration::from_secs(3_600) }
    }
}

impl RetentionOptions {
    /// The instants before which everything goes.
    #[must_use]
    pub fn before(&self, now_ms: i64) -> PruneBefore {
        let ago = |kept: Duration| now_ms.saturating_sub(i64::try_from(kept.as_millis()).unwrap_or(i64::MAX));
        PruneBefore { success_ms: ago(self.success), failed_ms: ago(self.failed), decisions_ms: ago(self.decisions) }
    }
}

/// A rest is this many times as long as the step before it, so that retention takes no more than a fifth of one connection's time.
const REST_FACTOR: u32 = 4;
const REST_LEAST: Duration = Duration::from_millis(20);
const REST_MOST: Duration = Duration::from_secs(5);

/// Runs until the scheduler ends.
pub(super) async fn run(ports: Ports, options: RetentionOptions, mut leading: watch::Receiver<Leading>) {
    let mut wait = options.every / 10;
    loop {
        let Some(term) = leading.borrow_and_update().0.clone() else {
            wait = options.every / 10;
            if leading.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            biased;
            () = tokio::time::sleep(wait) => {}
            changed = leading.changed() => if changed.is_err() { return } else { continue },
        }
        wait = options.every;
        pass(&ports, &options, &term).await;
    }
}

async fn pass(ports: &Ports, options: &RetentionOptions, term: &Term) {
    let before = options.before(ports.clock.now_ms());
    let (mut cursor, mut all) = (PruneCursor::default(), Pruned::default());
    while cursor != PruneCursor::Done && term.trusted(ports.clock.mono_ms()) {
        let began = Instant::now();
        match ports.ledger.prune(&before, &mut cursor).await {
            Ok(pruned) => all += pruned,
            Err(e) => {
                tracing::debug!(error = %e, "retention stopped; the next pass goes on");
                break;
            }
        }
        tokio::time::sleep((began.elapsed() * REST_FACTOR).clamp(REST_LEAST, REST_MOST)).await;
    }
    if all.rows > 0 {
        tracing::info!(
            rows = all.rows,
            executions = all.executions,
            decisions = all.decisions,
            dead_letters = all.dead_letters,
            longest_ms = all.longest_ms,
            "retention deleted what is old enough"
        );
    }
}
