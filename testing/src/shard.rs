//! A shard in a ledger of its own, and the attempts at it.

use crate::Result;
use crate::crash::{Crash, Fuse, Fused};
use crate::seen::Seen;
use shardcron_domain::job::{OverlapPolicy, RetryPolicy};
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::recovery::Reclaim;
use shardcron_domain::shard::{Phase, ReclaimReason};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, jobfile};
use shardcron_handlers::effects::{LedgerEffects, RecordedEnd, end_with_records, records_still_open};
use shardcron_sdk::{Checkpoint, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, Stream, SubResult};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::{
    AttemptOutcome, Ended, FireAction, FireIntent, Ledger, NewExecution, OutputQuery, ShardRow, ShardingLedger, SqlArg,
};
use std::sync::Arc;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Some instant; nothing here goes by the clock.
const NOW: i64 = 1_772_323_200_000;
/// Later than any wait before another attempt.
const LATER: i64 = NOW + 30 * 86_400_000;
/// Attempts of one shard in [`crash_everywhere`]: a handler that ends no attempt well would go on for ever.
const ATTEMPTS: u32 = 20;

/// Rows of output that one question reads.
const OUTPUT_PAGE: usize = 100;

/// What became of an attempt.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It ended well, and the shard with it.
    Done(ShardOutput),
    /// It ended badly, by the handler's word, or because records of it are still to be done. The next attempt may run.
    Failed(ShardError),
    /// Its worker was killed. The next attempt may run.
    Crashed,
}

/// One shard, in an embedded ledger of its own.
pub struct TestShard {
    ledger: SqlLedger,
    epoch: Epoch,
    execution: ExecutionId,
    attempt: u32,
    slice: ShardSlice,
    results: Vec<SubResult>,
    params: serde_json::Map<String, serde_json::Value>,
    stop: CancellationToken,
    seen: Vec<Arc<Seen>>,
    _folder: TempDir,
}

impl TestShard {
    /// A ledger in a temporary folder, with one shard that has this slice.
    ///
    /// # Errors
    /// The folder or the ledger can't be made.
    pub async fn new(slice: ShardSlice) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = format!("sqlite://{}", folder.path().join("ledger.db").display());
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await?;
        ledger.migrate().await?;
        let job = jobfile::parse("[job.test]\nhandler = { rust = \"test\" }\n")?.remove(0);
        ledger.apply_jobs(&[(job, None)], "test", NOW).await?;
        let id = ledger.job("test").await?.ok_or("the test's job is gone")?.id;
        let epoch = ledger.begin_epoch("test", NOW).await?;
        let execution = ExecutionId(Uuid::now_v7());
        let new = NewExecution {
            id: execution,
            plan: match slice {
                ShardSlice::Map { max } => ShardPlan::Map { reduce: false, max },
                _ => ShardPlan::Modulo { total: 1 },
            },
            params: serde_json::Map::new(),
            tier: "core".into(),
            timeout_ms: None,
            stall_ms: None,
            overlap: OverlapPolicy::Allow,
        };
        let intent = FireIntent {
            job: id,
            version: 1,
            fire_key: execution.to_string(),
            nominal_ms: NOW,
            scheduled: false,
            action: FireAction::Fire(new),
            next_fire_ms: None,
            extra: Default::default(),
        };
        ledger.fire(epoch, &[intent], NOW).await?;
        ledger.mark_dispatched(epoch, &[(execution, 1)], &[]).await?;
        let params = serde_json::Map::new();
        let stop = CancellationToken::new();
        let (results, seen) = (Vec::new(), Vec::new());
        Ok(TestShard { ledger, epoch, execution, attempt: 1, slice, results, params, stop, seen, _folder: folder })
    }

    /// The shard that reduces these results of a map's other shards.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub async fn reducing(results: Vec<SubResult>) -> Result<Self> {
        let tasks = u32::try_from(results.len())?;
        Ok(TestShard { results, ..TestShard::new(ShardSlice::Reduce { tasks }).await? })
    }

    /// With a parameter.
    #[must_use]
    pub fn param(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.params.insert(name.into(), value.into());
        self
    }

    /// Runs statements, separated by `;`, in the ledger's database: for the tables that the handler works on.
    ///
    /// # Errors
    /// The database's words.
    pub async fn script(&self, sql: &str) -> Result<()> {
        Ok(self.ledger.execute_script(sql).await?)
    }

    /// Rows of a query.
    ///
    /// # Errors
    /// The database's words.
    pub async fn query(&self, sql: &str) -> Result<Vec<Vec<SqlArg>>> {
        Ok(self.ledger.query(sql, &[]).await?)
    }

    /// One number.
    ///
    /// # Errors
    /// The database's words, or it is no number.
    pub async fn number(&self, sql: &str) -> Result<i64> {
        match self.query(sql).await?.first().and_then(|row| row.first()) {
            Some(SqlArg::Int(n)) => Ok(*n),
            other => Err(format!("{sql}: {other:?} is no number").into()),
        }
    }

    /// How the shard stands in the ledger.
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn row(&self) -> Result<ShardRow> {
        self.ledger.shards(self.execution, 0, 1).await?.pop().ok_or_else(|| "the shard is gone".into())
    }

    /// Where the next attempt goes on.
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn checkpoint(&self) -> Result<Option<Checkpoint>> {
        Ok(self.row().await?.checkpoint)
    }

    /// How many rows of records there are. After a good end: none.
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn record_rows(&self) -> Result<i64> {
        self.number("SELECT COUNT(*) FROM once_records").await
    }

    /// How many attempts there were.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempt - 1
    }

    /// The lines that all attempts wrote with [`ShardContext::log`], each with its attempt, as `shardcron logs` shows them. Of an attempt that
    /// crashed, those that it wrote before; of a worker that is killed, the last of them may be lost.
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn log(&self) -> Result<Vec<(u32, String)>> {
        let mut lines = Vec::new();
        for attempt in 1..self.attempt {
            let text = self.written(Stream::Log, attempt).await?;
            lines.extend(text.lines().map(|line| (attempt, line.to_owned())));
        }
        Ok(lines)
    }

    /// What all attempts wrote to a stream; text that is not UTF-8 with U+FFFD in its place. As the ledger keeps it: of a long output the
    /// beginning and the end.
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn output(&self, stream: Stream) -> Result<String> {
        let mut all = String::new();
        for attempt in 1..self.attempt {
            all += &self.written(stream, attempt).await?;
        }
        Ok(all)
    }

    async fn written(&self, stream: Stream, attempt: u32) -> Result<String> {
        let mut query = OutputQuery { execution: self.execution, shard: Some(0), attempt: Some(attempt), after: 0 };
        let mut bytes = Vec::new();
        loop {
            let page = self.ledger.output(&query, OUTPUT_PAGE).await?;
            let Some(last) = page.last() else { return Ok(String::from_utf8_lossy(&bytes).into_owned()) };
            query.after = last.id;
            page.iter().filter(|row| row.chunk.stream == stream).for_each(|row| bytes.extend(&row.chunk.bytes));
        }
    }

    /// How often an attempt said that it moves: its checkpoints, its lines, its calls of [`ShardContext::progress`]. 0 for an attempt that
    /// never was.
    #[must_use]
    pub fn progress(&self, attempt: u32) -> u64 {
        self.seen_of(attempt).map_or(0, |seen| seen.marks())
    }

    /// What an attempt emitted, whether it counts or not. See [`Self::emitted`].
    #[must_use]
    pub fn emitted_by(&self, attempt: u32) -> Vec<serde_json::Value> {
        self.seen_of(attempt).map_or_else(Vec::new, |seen| seen.emits())
    }

    fn seen_of(&self, attempt: u32) -> Option<&Arc<Seen>> {
        self.seen.get(usize::try_from(attempt).ok()?.checked_sub(1)?)
    }

    /// The shards that the execution has got by the good end of this one, in their order: what the attempt that ended well emitted, and
    /// nothing of those that crashed. Needs [`ShardSlice::Map`].
    ///
    /// # Errors
    /// The ledger can't be read.
    pub async fn emitted(&self) -> Result<Vec<serde_json::Value>> {
        let mut all = Vec::new();
        if self.row().await?.phase == Phase::Success {
            for index in 1..=self.ledger.emitted_count(self.execution).await? {
                let text = self.ledger.emitted(self.execution, index).await?.ok_or("an emitted shard is gone")?;
                all.push(serde_json::from_str(&text)?);
            }
        }
        Ok(all)
    }

    /// Tells the attempt that runs, and those that follow, to stop.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Runs an attempt as a worker does, and ends it.
    ///
    /// # Errors
    /// The ledger does not take it: the shard has ended already.
    pub async fn attempt(&mut self, handler: &dyn ShardHandler) -> Result<Outcome> {
        self.run(handler, None).await
    }

    /// Runs an attempt whose worker is killed at a commit, or ends before if it has fewer.
    ///
    /// # Errors
    /// As [`Self::attempt`].
    pub async fn attempt_with_crash(&mut self, handler: &dyn ShardHandler, crash: Crash) -> Result<Outcome> {
        self.run(handler, Some(crash)).await
    }

    async fn run(&mut self, handler: &dyn ShardHandler, crash: Option<Crash>) -> Result<Outcome> {
        let attempt = AttemptRef { execution: self.execution, index: 0, attempt: self.attempt };
        let owner = Incarnation(Uuid::now_v7());
        let claim = self.ledger.claim(owner, &[attempt], LATER).await?.pop().ok_or("no answer to a claim")??;
        let port: Arc<dyn Ledger> = Arc::new(self.ledger.clone());
        let effects = Arc::new(LedgerEffects::new(port, (owner, attempt), Box::new(|| {})));
        let fuse = Fuse::new(crash);
        let what = (self.slice.clone(), self.results.clone());
        let seen = Arc::new(Seen::new(&self.ledger, (owner, attempt), what, effects.clone()));
        self.seen.push(seen.clone());
        let context = ShardContext {
            attempt,
            owner,
            job: "test".into(),
            shard_index: 0,
            shards_total: 1,
            slice: self.slice.clone(),
            params: self.params.clone(),
            nominal_ms: NOW,
            checkpoint: claim.checkpoint,
            started_ms: NOW,
            retry: RetryPolicy::default(),
            deadline: None,
            stop: self.stop.child_token(),
            effects: Arc::new(Fused { inner: seen.clone(), fuse: fuse.clone() }),
        };
        let end = tokio::select! {
            biased;
            end = handler.run(context) => Some(end),
            () = fuse.blown() => None,
        };
        self.attempt += 1;
        seen.keep_output(NOW).await?;
        match end {
            Some(end) => self.end((owner, attempt), end, effects.may_have_records(), &seen).await,
            None => {
                let reclaim = Reclaim { attempt, owner, reason: ReclaimReason::WorkerLost };
                // However often it dies: the number of tries is not what is tested.
                let policy = RetryPolicy { attempts: u32::MAX, ..RetryPolicy::default() };
                self.ledger.reclaim(self.epoch, &[(reclaim, policy)], NOW).await?.pop().ok_or("no answer")??;
                Ok(Outcome::Crashed)
            }
        }
    }

    async fn end(
        &self,
        (owner, attempt): (Incarnation, AttemptRef),
        end: std::result::Result<ShardOutput, ShardError>,
        records: bool,
        seen: &Seen,
    ) -> Result<Outcome> {
        let retry = RetryPolicy { attempts: u32::MAX, ..RetryPolicy::default() };
        let ended = |outcome| Ended { attempt, outcome, started_ms: NOW, ended_ms: NOW, retry, seed: 0 };
        let failed = |error: &ShardError| match error.stopped {
            true => AttemptOutcome::HandBack,
            // A permanent failure would end the shard; here, the author may mend the handler and go on.
            false => AttemptOutcome::Failure {
                class: shardcron_domain::shard::FailureClass::Transient,
                message: error.message.clone(),
            },
        };
        let (outcome, answer) = match end {
            // The handler has recorded it itself.
            Ok(output) if output.committed => return Ok(Outcome::Done(output)),
            Ok(output) => {
                let summary = output.summary.as_ref().map(ToString::to_string);
                let success = ended(AttemptOutcome::Success { rows: output.rows, summary });
                if records
                    && matches!(self.slice, ShardSlice::Map { .. })
                    && let Some(why) = records_still_open(&self.ledger, attempt).await?
                {
                    let error = ShardError::transient(why);
                    self.ledger.record(owner, &[ended(failed(&error))], NOW).await?;
                    return Ok(Outcome::Failed(error));
                }
                if seen.finish_map(&success, NOW).await?.is_some() {
                    return Ok(Outcome::Done(output));
                }
                if records {
                    match end_with_records(&self.ledger, owner, &success, || NOW).await? {
                        RecordedEnd::Recorded => return Ok(Outcome::Done(output)),
                        RecordedEnd::NoRecords => {}
                        RecordedEnd::Refused(rejection) => return Err(rejection.into()),
                        RecordedEnd::Open(why) => {
                            let error = ShardError::transient(why);
                            self.ledger.record(owner, &[ended(failed(&error))], NOW).await?;
                            return Ok(Outcome::Failed(error));
                        }
                    }
                }
                (success, Outcome::Done(output))
            }
            Err(error) => (ended(failed(&error)), Outcome::Failed(error)),
        };
        self.ledger.record(owner, &[outcome], NOW).await?.pop().ok_or("no answer")??;
        Ok(answer)
    }
}

/// Runs a handler to its good end once for each of its commits and each side of it, with a crash exactly there and the attempts that
/// it needs afterwards; then `check` looks at what came of it. How many crashes there were.
///
/// # Errors
/// What `make` or `check` says, or a handler that does not end well within 20 attempts; with the crash that it was about.
pub async fn crash_everywhere(
    make: impl AsyncFn() -> Result<TestShard>,
    handler: &dyn ShardHandler,
    check: impl AsyncFn(&TestShard) -> Result<()>,
) -> Result<usize> {
    let mut crashes = 0;
    for commit in 1.. {
        for crash in [Crash::before(commit), Crash::after(commit)] {
            let mut shard = make().await?;
            let first = shard.attempt_with_crash(handler, crash).await?;
            let crashed = matches!(first, Outcome::Crashed);
            to_the_end(&mut shard, handler, first).await.map_err(|e| format!("{crash:?}: {e}"))?;
            let row = shard.row().await?;
            if row.phase != Phase::Success {
                return Err(format!("{crash:?}: the shard is {}", row.phase.word()).into());
            }
            let left = shard.record_rows().await?;
            if left > 0 {
                return Err(format!("{crash:?}: {left} rows of records are left").into());
            }
            check(&shard).await.map_err(|e| format!("{crash:?}: {e}"))?;
            if !crashed {
                return Ok(crashes);
            }
            crashes += 1;
        }
    }
    Ok(crashes)
}

async fn to_the_end(shard: &mut TestShard, handler: &dyn ShardHandler, first: Outcome) -> Result<()> {
    let mut last = first;
    for _ in 0..ATTEMPTS {
        match last {
            Outcome::Done(_) => return Ok(()),
            Outcome::Failed(_) | Outcome::Crashed => last = shard.attempt(handler).await?,
        }
    }
    Err(format!("it has not ended well within {ATTEMPTS} attempts: {last:?}").into())
}
