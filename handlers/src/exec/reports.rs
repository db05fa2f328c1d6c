//! What a program said by its lines, and what becomes of it: checkpoints go to the ledger in their order, under the attempt's fence.
//!
//! Promises: a checkpoint is never taken out of order, and never one that goes back. Those that come faster than the ledger commits
//! them are merged into the latest, with their records added up, so a program is not held up by the ledger. The last one before the
//! program's end is committed before the end is recorded, if the ledger answers in time. A refused checkpoint means that the attempt
//! is no longer this worker's, and ends the program.

use super::lines::{FailClass, Message, MetricKind};
use crate::map;
use shardcron_domain::limits::{PROGRAM_METRICS, PROGRAM_WARNINGS};
use shardcron_domain::metric_names::{LABEL_JOB, LABEL_NAME, PROGRAM_COUNTER, PROGRAM_GAUGE};
use shardcron_domain::output::Stream;
use shardcron_domain::shard::Checkpoint;
use shardcron_domain::units::Span;
use shardcron_sdk::{CheckpointError, ShardContext, ShardError, ShardSlice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::ChildStdin;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Waits for a ledger that is away: the first, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Why a program says that it fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) class: FailClass,
    pub(crate) message: String,
    pub(crate) wait: Option<Span>,
}

#[derive(Default)]
struct Said {
    /// To be committed.
    pending: Option<(Checkpoint, u64)>,
    /// The latest that was taken in.
    latest: Option<Checkpoint>,
    /// The latest that the ledger has.
    committed: Option<Checkpoint>,
    /// The program has ended: what is pending is the last.
    closed: bool,
    superseded: Option<String>,
    rows: Option<u64>,
    summary: Option<serde_json::Value>,
    failure: Option<Failure>,
    /// What ended the program: a shard that could not be emitted, or a line that may have been one.
    refused: Option<ShardError>,
    warnings: usize,
}

/// What one attempt's program said.
pub(crate) struct Reports {
    context: ShardContext,
    said: Mutex<Said>,
    moved: Notify,
    /// An emitted shard waits for the ledger.
    emitting: AtomicBool,
    /// Cancelled when the attempt turns out to be somebody else's.
    ended: CancellationToken,
}

impl Reports {
    /// `ended` is cancelled once a checkpoint is refused.
    pub(crate) fn new(context: ShardContext, ended: CancellationToken) -> Self {
        let said =
            Said { latest: context.checkpoint.clone(), committed: context.checkpoint.clone(), ..Said::default() };
        Reports { context, said: Mutex::new(said), moved: Notify::new(), emitting: AtomicBool::new(false), ended }
    }

    fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a message.
    ///
    /// # Errors
    /// It makes no sense where it stands: why.
    pub(crate) fn take(&self, message: Message) -> Result<(), String> {
        match message {
            Message::Progress {} => {}
            // Handed to [`Reports::emit`], since it may have to wait.
            Message::Emit { .. } => return Err("a shard is emitted elsewhere".into()),
            Message::Checkpoint { .. } if self.maps() => {
                return Err("a map's first shard has no checkpoint: each attempt emits all shards anew".into());
            }
            Message::Checkpoint { at, rows } => {
                let mut said = self.lock();
                if let Some(latest) = &said.latest
                    && !follows(latest, &at)
                {
                    return Err(format!("the checkpoint {} does not go on from {}", shown(&at), shown(latest)));
                }
                let before = said.pending.take().map_or(0, |(_, rows)| rows);
                said.pending = Some((at.clone(), before.saturating_add(rows)));
                said.latest = Some(at);
                drop(said);
                self.moved.notify_one();
            }
            Message::Result { rows, summary } => {
                let mut said = self.lock();
                (said.rows, said.summary) = (rows, summary);
            }
            Message::Metric { name, value, kind } => count(&self.context.job, &name, value, kind)?,
            Message::Fail { class, message, wait } => self.lock().failure = Some(Failure { class, message, wait }),
        }
        Ok(())
    }

    /// Whether the program is to emit shards.
    fn maps(&self) -> bool {
        matches!(self.context.slice, ShardSlice::Map { .. })
    }

    /// Hands an emitted shard to the ledger, however long that takes. One that can't be emitted ends the program: going on without it
    /// would leave its work undone.
    pub(crate) async fn emit(&self, payload: serde_json::Value) {
        self.emitting.store(true, Ordering::Release);
        let kept = map::emit(&self.context, payload).await;
        self.emitting.store(false, Ordering::Release);
        if let Err(error) = kept {
            self.refuse(error);
        }
    }

    /// Whether an emitted shard waits for the ledger.
    pub(crate) fn is_emitting(&self) -> bool {
        self.emitting.load(Ordering::Acquire)
    }

    /// Ends the program. The first reason counts.
    fn refuse(&self, error: ShardError) {
        self.lock().refused.get_or_insert(error);
        self.ended.cancel();
    }

    /// Why the worker ended the program.
    pub(crate) fn refused(&self) -> Option<ShardError> {
        self.lock().refused.clone()
    }

    /// Says beside the program's output, and in the worker's log, what is wrong with a line; not more often than a person would read.
    pub(crate) fn warn(&self, why: &str) {
        if self.maps() {
            self.refuse(ShardError::permanent(format!(
                "a line of the program begins like a message and is none: {why}. It may have been a shard, so the first shard of a map \
                 fails by it"
            )));
        }
        let count = {
            let mut said = self.lock();
            said.warnings += 1;
            said.warnings
        };
        if count > PROGRAM_WARNINGS {
            return;
        }
        let last = if count == PROGRAM_WARNINGS { "; further such lines are not remarked on" } else { "" };
        let context = &self.context;
        tracing::warn!(job = context.job, execution_id = %context.attempt.execution, shard_no = context.attempt.index,
            attempt = context.attempt.attempt, reason = why, "a line of a program begins like a message and is none{last}");
        let text = format!("the line after this begins like a message and is none: {why}{last}\n");
        context.effects.output(Stream::Log, text.as_bytes());
    }

    /// Commits checkpoints as they come, until one is refused, or everything is committed after [`Reports::close`]. One at a time, and
    /// not to be dropped before its end: of a commit whose answer is not awaited nobody knows where the ledger stands.
    pub(crate) async fn keep(self: Arc<Self>, mut acknowledge: Option<ChildStdin>) {
        loop {
            match self.commit().await {
                Ok(Some(at)) => acknowledge = told(acknowledge, &at).await,
                Ok(None) if self.lock().closed => return,
                Ok(None) => self.moved.notified().await,
                Err(()) => return,
            }
        }
    }

    /// The program says no more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.moved.notify_one();
    }

    /// Commits what is pending. `None`: nothing is. An unanswered commit is repeated as it was, whatever came in meanwhile: it may
    /// have been taken.
    async fn commit(&self) -> Result<Option<Checkpoint>, ()> {
        let (from, (to, rows)) = {
            let mut said = self.lock();
            let Some(pending) = said.pending.take() else { return Ok(None) };
            (said.committed.clone(), pending)
        };
        let mut wait = WAITS.0;
        loop {
            match self.context.effects.checkpoint(from.clone(), to.clone(), rows).await {
                Ok(()) => {
                    self.lock().committed = Some(to.clone());
                    return Ok(Some(to));
                }
                Err(CheckpointError::Superseded(why)) => {
                    self.lock().superseded = Some(why.to_string());
                    self.ended.cancel();
                    return Err(());
                }
                Err(CheckpointError::Unavailable(why)) => {
                    tracing::debug!(error = %why, "a program's checkpoint waits for the ledger");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(WAITS.1);
                }
            }
        }
    }

    /// The refusal of a checkpoint.
    pub(crate) fn superseded(&self) -> Option<String> {
        self.lock().superseded.clone()
    }

    /// Records and summary of the result.
    pub(crate) fn result(&self) -> (Option<u64>, Option<serde_json::Value>) {
        let mut said = self.lock();
        (said.rows, said.summary.take())
    }

    /// Why it says that it fails.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }
}

/// Tells the program what is committed. One that does not read is told no more; its pipe must not hold up the checkpoints.
async fn told(stdin: Option<ChildStdin>, at: &Checkpoint) -> Option<ChildStdin> {
    let mut stdin = stdin?;
    let mut line = serde_json::json!({ "shardcron": "committed", "at": at }).to_string();
    line.push('\n');
    match tokio::time::timeout(Duration::from_secs(5), stdin.write_all(line.as_bytes())).await {
        Ok(Ok(())) => Some(stdin),
        _ => None,
    }
}

fn follows(latest: &Checkpoint, at: &Checkpoint) -> bool {
    match (latest, at) {
        (Checkpoint::Number(a), Checkpoint::Number(b)) => b > a,
        (a, b) => a != b,
    }
}

fn shown(checkpoint: &Checkpoint) -> String {
    serde_json::to_string(checkpoint).unwrap_or_default()
}

/// Names of programs' metrics by job: what is counted is bounded, whatever programs say.
static NAMES: LazyLock<Mutex<BTreeMap<String, BTreeSet<String>>>> = LazyLock::new(Mutex::default);

fn count(job: &str, name: &str, value: f64, kind: MetricKind) -> Result<(), String> {
    let letters = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    if name.is_empty() || name.len() > 40 || !name.bytes().all(letters) || name.as_bytes()[0].is_ascii_digit() {
        return Err("a metric's name has 1 to 40 lower-case letters, digits and '_'".into());
    }
    {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = names.values().map(BTreeSet::len).sum();
        let of_job = names.entry(job.to_owned()).or_default();
        if !of_job.contains(name) {
            if of_job.len() >= PROGRAM_METRICS.0 || all >= PROGRAM_METRICS.1 {
                let (most, all) = PROGRAM_METRICS;
                return Err(format!(
                    "there are {most} metrics of this job already, or {all} of all jobs; no further name is counted"
                ));
            }
            of_job.insert(name.to_owned());
        }
    }
    let labels = [(LABEL_JOB, job.to_owned()), (LABEL_NAME, name.to_owned())];
    match kind {
        MetricKind::Gauge => metrics::gauge!(PROGRAM_GAUGE, &labels).set(value),
        // Whole ones: a counter of the exporter has no fractions.
        MetricKind::Counter => metrics::counter!(PROGRAM_COUNTER, &labels).increment(value as u64),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_sdk::testing::TestContext;

    const RANGE: ShardSlice = ShardSlice::Range { from: 1, to: 9 };

    fn checkpoint(at: i64, rows: u64) -> Message {
        Message::Checkpoint { at: Checkpoint::Number(at), rows }
    }

    #[tokio::test]
    async fn checkpoints_are_merged_in_their_order() {
        let test = TestContext::new(RANGE).resumed(2, Checkpoint::Number(3));
        let reports = Arc::new(Reports::new(test.context(), CancellationToken::new()));
        assert!(reports.take(checkpoint(3, 1)).unwrap_err().contains("go on from 3"));
        for at in [4, 6, 9] {
            reports.take(checkpoint(at, 2)).unwrap();
        }
        assert!(reports.take(checkpoint(8, 1)).is_err(), "never back");
        reports.close();
        reports.keep(None).await;
        assert_eq!(test.checkpoints(), [(Checkpoint::Number(9), 6)], "one commit, all records");
    }

    #[tokio::test]
    async fn a_refused_checkpoint_ends_the_program() {
        let test = TestContext::new(RANGE);
        let mut elsewhere = test.context();
        elsewhere.advance(Checkpoint::Number(2), 1).await.unwrap();
        let ended = CancellationToken::new();
        let reports = Arc::new(Reports::new(test.context(), ended.clone()));
        reports.take(checkpoint(5, 1)).unwrap();
        tokio::time::timeout(Duration::from_secs(5), reports.clone().keep(None)).await.unwrap();
        assert!(ended.is_cancelled() && reports.superseded().is_some());
        assert_eq!(test.checkpoints(), [(Checkpoint::Number(2), 1)], "nothing of it was taken");
    }

    #[test]
    fn metrics_are_bounded_in_names() {
        for name in ["", "Rows", "a b", "1a", "ä", &"x".repeat(41)] {
            assert!(count("bounded", name, 1.0, MetricKind::Gauge).is_err(), "{name}");
        }
        for n in 0..PROGRAM_METRICS.0 {
            count("bounded", &format!("m{n}"), 1.0, MetricKind::Counter).unwrap();
        }
        assert!(count("bounded", "one_more", 1.0, MetricKind::Gauge).is_err());
        assert_eq!(count("bounded", "m0", 2.0, MetricKind::Gauge), Ok(()), "a known name goes on");
    }
}
