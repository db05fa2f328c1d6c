//! One attempt, from its claim to its end: find the execution's head, find the handler, run it under its timeout, and say how it
//! ended. Runs as a task of the I/O runtime; no actor waits for it.

use super::caching::Wanted;
use super::effects::WorkerEffects;
use super::emits::Emits;
use super::progress::Ticks;
use super::{Resolve, Shared};
use crate::heads::Heads;
use crate::ports::Ports;
use shardcron_domain::job::{HandlerSpec, RetryPolicy};
use shardcron_domain::limits::{ERROR_BYTES, RESULT_BYTES};
use shardcron_domain::plan::ShardSlice;
use shardcron_domain::shard::{Checkpoint, FailureClass};
use shardcron_domain::units::Span;
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_handlers::effects::{LedgerEffects, RecordedEnd, end_with_records, records_still_open};
use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput};
use shardcron_store::{AttemptOutcome, Ended, ExecutionHead, StoreError};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a handler has between being told to stop and being dropped. Longer than `exec` needs to end a process group.
const STOP_GRACE: Duration = Duration::from_secs(10);

pub(super) struct Attempt {
    pub(super) ports: Ports,
    pub(super) heads: Heads,
    pub(super) resolve: Resolve,
    pub(super) owner: Incarnation,
    pub(super) attempt: AttemptRef,
    pub(super) checkpoint: Option<Checkpoint>,
    /// Cancelled at the drain limit, and when the worker fences itself.
    pub(super) stop: CancellationToken,
    /// Cancelled, before `stop`, when the worker fences itself.
    pub(super) fence: CancellationToken,
    /// How long a handler has to stop then: less than what is left until somebody may take its shard.
    pub(super) fenced_grace: Duration,
    /// Where the heartbeat finds how it moves.
    pub(super) shared: Arc<Shared>,
}

/// A handler that did not end when it was dropped: it blocks its thread, and nothing can end it but itself.
pub(super) type Leftover = JoinHandle<Result<ShardOutput, ShardError>>;

/// Why an attempt was told to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Its worker stops.
    Stop,
    /// It is past its timeout.
    Timeout(Duration),
    /// It made no progress for this long.
    Stalled(Duration),
}

impl Cut {
    /// What is recorded; `None`: nothing, the shard is handed back.
    fn error(self, dropped: bool) -> Option<ShardError> {
        let (class, what) = match self {
            Cut::Stop => return None,
            Cut::Timeout(limit) => (FailureClass::Timeout, format!("timed out after {}", span(limit))),
            Cut::Stalled(limit) => (FailureClass::Stalled, format!("stalled: no progress for {}", span(limit))),
        };
        let still = if dropped {
            "; the handler did not stop when told to and was dropped. If it blocks its thread it is still running (not \
             cancellable), and its slot stays taken until it ends"
        } else {
            ""
        };
        Some(ShardError { class, message: format!("{what}{still}"), stopped: false })
    }
}

fn span(duration: Duration) -> Span {
    Span(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// How it ended.
pub(super) enum End {
    /// To be recorded.
    Record(Ended),
    /// The handler has recorded it, in the same transaction as its effects.
    Committed,
}

impl End {
    /// What remains of it when the worker has been fenced: the shard is handed back, whatever the handler says it did.
    pub(super) fn discarded(self) -> Self {
        match self {
            End::Record(ended) => End::Record(Ended { outcome: AttemptOutcome::HandBack, ..ended }),
            other => other,
        }
    }

    /// The label of the metric.
    pub(super) fn word(&self) -> &'static str {
        match self {
            End::Committed => "success",
            End::Record(ended) => match &ended.outcome {
                AttemptOutcome::Success { .. } => "success",
                AttemptOutcome::HandBack => "handed_back",
                AttemptOutcome::Failure { class: FailureClass::Timeout, .. } => "timeout",
                AttemptOutcome::Failure { class: FailureClass::Stalled, .. } => "stalled",
                AttemptOutcome::Failure { .. } => "failed",
            },
        }
    }
}

/// Records that are still to be done are done by another attempt.
fn open_outcome(message: String) -> AttemptOutcome {
    AttemptOutcome::Failure { class: FailureClass::Transient, message: cut(message, ERROR_BYTES) }
}

impl Attempt {
    /// Runs it. Never panics, whatever the handler does.
    pub(super) async fn run(self) -> (End, Duration, Option<Leftover>) {
        let started_ms = self.ports.clock.now_ms();
        let began = Instant::now();
        let mut emits = None;
        let ((result, leftover, effects), retry) = match self.head().await {
            Ok(head) => {
                let emits = emits.insert(Emits::of(&self.ports, self.owner, self.attempt, &head));
                (self.run_handler((&head, emits), started_ms).await, head.spec.retry)
            }
            Err(e) => ((Err(e), None, None), RetryPolicy::default()),
        };
        let outcome = match result {
            Ok(ShardOutput { committed: true, .. }) => return (End::Committed, began.elapsed(), leftover),
            Ok(output) => success(output),
            Err(e) => failure(e),
        };
        let ended_ms = self.ports.clock.now_ms();
        let mut ended =
            Ended { attempt: self.attempt, outcome, started_ms, ended_ms, retry, seed: self.ports.entropy.draw() };
        if let (AttemptOutcome::Success { .. }, Some(emits)) = (&ended.outcome, emits) {
            let may_have_records = effects.as_ref().is_some_and(|effects| effects.may_have_records());
            if emits.is_first()
                && may_have_records
                && let Some(failure) = self.open_records().await
            {
                return (End::Record(Ended { outcome: failure, ..ended }), began.elapsed(), leftover);
            }
            match emits.finish(&ended, &self.stop).await {
                None => {}
                Some(Ok(())) => return (End::Committed, began.elapsed(), leftover),
                Some(Err(e)) => ended.outcome = failure(e),
            }
        }
        let end = match effects {
            Some(effects) if effects.may_have_records() => self.end_records(ended).await,
            _ => End::Record(ended),
        };
        (end, began.elapsed(), leftover)
    }

    /// How the first shard of a map fails that leaves records to be done. What it emitted under this attempt goes with the next one.
    async fn open_records(&self) -> Option<AttemptOutcome> {
        let call = || records_still_open(&*self.ports.ledger, self.attempt);
        let open = super::recorder::until_answered(&self.ports, "records of the first shards of maps", call).await;
        open.map(open_outcome)
    }

    /// The end of a shard whose handler may have left rows of records: they end with it, in one transaction.
    async fn end_records(&self, ended: Ended) -> End {
        if !matches!(ended.outcome, AttemptOutcome::Success { .. }) {
            return End::Record(ended);
        }
        let call = || end_with_records(&*self.ports.ledger, self.owner, &ended, || self.ports.ledger_now_ms());
        let outcome = match super::recorder::until_answered(&self.ports, "ends of shards with records", call).await {
            RecordedEnd::NoRecords => return End::Record(ended),
            RecordedEnd::Recorded => return End::Committed,
            RecordedEnd::Open(message) => open_outcome(message),
            RecordedEnd::Refused(_) => AttemptOutcome::HandBack,
        };
        End::Record(Ended { outcome, ..ended })
    }

    /// Waits for the ledger as long as the worker is not told to stop: the shard is claimed, and failing it would cost a try.
    async fn head(&self) -> Result<Arc<ExecutionHead>, ShardError> {
        let mut backoff = self.ports.backoff();
        loop {
            match self.heads.get(self.attempt.execution).await {
                Ok(head) => return Ok(head),
                Err(e @ StoreError::Invalid(_)) => return Err(ShardError::permanent(e.to_string())),
                // Perhaps written by a newer version; another worker may read it.
                Err(e @ StoreError::Corrupt(_)) => return Err(ShardError::transient(e.to_string())),
                Err(e) => tracing::debug!(error = %e, "the execution could not be read yet"),
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(backoff.next()) => {}
                () = self.stop.cancelled() => return Err(ShardError::stopped("told to stop before it began")),
            }
        }
    }

    /// The slice: out of the plan, or what the first shard emitted. A file that has changed since the plan was made is refused
    /// before any handler sees it.
    async fn slice(&self, head: &ExecutionHead, emits: &Emits) -> Result<ShardSlice, ShardError> {
        if head.plan.addressee(self.attempt.index).is_some_and(|worker| worker.incarnation != self.owner) {
            return Err(ShardError::stopped("this shard is for another worker"));
        }
        if let Some(slice) = head.plan.slice(self.attempt.index) {
            if !matches!(slice, ShardSlice::File { .. }) {
                return Ok(slice);
            }
            let look = tokio::task::spawn_blocking(move || shardcron_sdk::file::check(&slice).map(|()| slice));
            return look.await.unwrap_or_else(|e| Err(ShardError::transient(format!("the look at the file: {e}"))));
        }
        let mut backoff = self.ports.backoff();
        loop {
            match emits.slice(&head.plan).await {
                Ok(slice) => return Ok(slice),
                Err(e) if !e.is_transient() => return Err(ShardError::permanent(e.to_string())),
                Err(e) => tracing::debug!(error = %e, "an emitted shard could not be read yet"),
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(ShardError::stopped("told to stop before it began")),
                () = tokio::time::sleep(backoff.next()) => {}
            }
        }
    }

    async fn run_handler(
        &self,
        (head, emits): (&ExecutionHead, &Arc<Emits>),
        started_ms: i64,
    ) -> (Result<ShardOutput, ShardError>, Option<Leftover>, Option<Arc<LedgerEffects>>) {
        let handler = match (self.resolve)(&head.spec.handler) {
            Ok(handler) => handler,
            Err(e) => return (Err(e), None, None),
        };
        let slice = match self.slice(head, emits).await {
            Ok(slice) => slice,
            Err(e) => return (Err(e), None, None),
        };
        let timeout = head.spec.timeout.span().map(Span::as_std);
        let stall = head.spec.stall_timeout.map(Span::as_std);
        let ticks = Ticks::default();
        let outlet = self.shared.outputs.outlet(self.attempt);
        let stop = self.stop.child_token();
        let moves = ticks.clone();
        let effects = Arc::new(LedgerEffects::new(
            self.ports.ledger.clone(),
            (self.owner, self.attempt),
            Box::new(move || moves.tick()),
        ));
        let mut context = ShardContext {
            attempt: self.attempt,
            owner: self.owner,
            job: head.spec.name.clone(),
            shard_index: head.plan.position(self.attempt.index).0,
            shards_total: head.plan.position(self.attempt.index).1,
            slice,
            params: head.params.clone(),
            nominal_ms: head.nominal_ms,
            checkpoint: self.checkpoint.clone(),
            started_ms,
            retry: head.spec.retry,
            deadline: None,
            stop: stop.clone(),
            effects: Arc::new(WorkerEffects {
                steps: effects.clone(),
                outlet: outlet.clone(),
                caches: self.shared.caches.clone(),
                emits: emits.clone(),
            }),
        };
        self.warm(head, &context, &handler).await;
        // From here on: what was preloaded took none of the handler's time.
        context.deadline = timeout.map(|t| (Instant::now() + t).into_std());
        let _watch = stall.map(|_| self.shared.progress.watch(self.attempt, &ticks));
        let span = tracing::info_span!(
            "attempt", job = %head.spec.name, execution_id = %self.attempt.execution, shard = self.attempt.index, attempt = self.attempt.attempt
        );
        // A task of its own: a panic of user code ends it, and nothing else.
        let work = tracing::Instrument::instrument(async move { handler.run(context).await }, span);
        // Code of users may block the thread that it runs on; nothing else lives there.
        let task = match head.spec.handler {
            HandlerSpec::Rust { .. } => self.ports.handlers.spawn(work),
            HandlerSpec::Sql { .. } | HandlerSpec::Exec { .. } | HandlerSpec::Http(_) => self.ports.io.spawn(work),
        };
        let (result, leftover) = self.watch(task, (timeout, stall), &ticks, &stop).await;
        // So that who follows has everything when the end is recorded; a fenced worker has no time for it.
        if !self.fence.is_cancelled() {
            self.shared.outputs.finish(&self.ports, &outlet).await;
        }
        let records = matches!(head.spec.handler, HandlerSpec::Rust { .. }).then_some(effects);
        (result, leftover, records)
    }

    /// Only for handlers that have caches. Both are to help, and fail nothing.
    async fn warm(&self, head: &ExecutionHead, context: &ShardContext, handler: &Arc<dyn ShardHandler>) {
        if !matches!(head.spec.handler, HandlerSpec::Rust { .. }) {
            return;
        }
        let (caches, taken_over) = (self.shared.caches.clone(), self.shared.taken_over.clone());
        if self.attempt.attempt > 1 {
            let others = super::caching::take_over_keys(self.ports.clone(), caches, taken_over, self.attempt);
            self.ports.io.spawn(others);
        }
        if !head.spec.preload.is_empty() {
            let wanted = Wanted {
                caches: self.shared.caches.clone(),
                entries: head.spec.preload.clone(),
                context: context.clone(),
                handler: handler.clone(),
                queries: self.shared.preload_keys.clone(),
            };
            super::caching::preload(&self.ports, wanted).await;
        }
    }

    async fn watch(
        &self,
        mut task: Leftover,
        (timeout, stall): (Option<Duration>, Option<Duration>),
        ticks: &Ticks,
        stop: &CancellationToken,
    ) -> (Result<ShardOutput, ShardError>, Option<Leftover>) {
        let limit = async {
            match timeout {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        let cut = tokio::select! {
            biased;
            joined = &mut task => return (flatten(joined), None),
            () = limit => Cut::Timeout(timeout.unwrap_or_default()),
            () = ticks.stalled(stall) => Cut::Stalled(stall.unwrap_or_default()),
            () = self.stop.cancelled() => Cut::Stop,
        };
        stop.cancel();
        let grace = async {
            tokio::select! {
                biased;
                () = tokio::time::sleep(STOP_GRACE) => {}
                () = async { self.fence.cancelled().await; tokio::time::sleep(self.fenced_grace).await } => {}
            }
        };
        let late = tokio::select! {
            biased;
            joined = &mut task => flatten(joined),
            () = grace => {
                // Dropping a future ends it at its next await; blocking code goes on and is refused when it reports.
                task.abort();
                let error = cut.error(true).unwrap_or_else(|| ShardError::stopped("did not stop in time and was dropped"));
                return (Err(error), Some(task));
            }
        };
        let result = match late {
            Err(e) if e.stopped => Err(cut.error(false).unwrap_or(e)),
            other => other,
        };
        (result, None)
    }
}

fn flatten(joined: Result<Result<ShardOutput, ShardError>, tokio::task::JoinError>) -> Result<ShardOutput, ShardError> {
    match joined {
        Ok(result) => result,
        Err(e) if e.is_panic() => {
            let panic = e.into_panic();
            let words = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned());
            Err(ShardError::transient(format!(
                "the handler panicked: {}",
                words.unwrap_or_else(|| "without a message".into())
            )))
        }
        Err(_) => Err(ShardError::stopped("the handler was dropped")),
    }
}

/// Told to stop, or believing to be superseded: handed back. The ledger refuses a hand-back of what is not this attempt's any more;
/// what still is must not stay with a worker that has dropped it.
fn failure(e: ShardError) -> AttemptOutcome {
    if e.stopped {
        return AttemptOutcome::HandBack;
    }
    AttemptOutcome::Failure { class: e.class, message: cut(e.message, ERROR_BYTES) }
}

fn success(output: ShardOutput) -> AttemptOutcome {
    let summary = output.summary.map(|s| s.to_string()).map(|text| {
        if text.len() <= RESULT_BYTES {
            return text;
        }
        // Cut JSON is no JSON: keep a valid one that says so (case B-02).
        serde_json::json!({ "truncated": true, "bytes": text.len(), "beginning": cut(text, RESULT_BYTES / 4) })
            .to_string()
    });
    AttemptOutcome::Success { rows: output.rows, summary }
}

fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let bytes = text.len();
        text.truncate(text.floor_char_boundary(most.saturating_sub(40)));
        text.push_str(&format!(" … [truncated, {bytes} bytes]"));
    }
    text
}
