//! What a running attempt may do to the ledger: the worker's side of the context.
//!
//! A commit whose answer is lost is found out about here, so that a handler is told that its step happened or that it did not. The
//! reading back is sound for the reason that the `sql` handler's is: nobody but this attempt writes under its number.

use async_trait::async_trait;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::limits::{RECORDS_PER_BATCH, RECORDS_REPORTED};
use shardcron_domain::once::{Known, RecordRow, key_text};
use shardcron_domain::shard::{Checkpoint, Rejection};
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_sdk::{CheckpointError, EffectError, Effects, EffectsTransaction};
use shardcron_store::{Ledger, RecordsEnd, Result, StepTx, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first wait for a ledger that is away; it doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// Tries to hear what became of a commit: some minutes. Whoever has the attempt's limit or its worker's end to obey is dropped earlier.
const TRIES: u32 = 120;

/// Hears that the attempt moves.
pub type Tick = Box<dyn Fn() + Send + Sync>;

/// Effects of one attempt at the ledger.
pub struct LedgerEffects {
    ledger: Arc<dyn Ledger>,
    owner: Incarnation,
    attempt: AttemptRef,
    tick: Tick,
    /// Whether the attempt has asked for records, so that there may be rows of them.
    records: Arc<AtomicBool>,
}

impl LedgerEffects {
    /// Effects of an attempt that runs at an owner; `tick` hears of each step.
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, (owner, attempt): (Incarnation, AttemptRef), tick: Tick) -> Self {
        LedgerEffects { ledger, owner, attempt, tick, records: Arc::default() }
    }

    /// Whether there may be rows of records: then the good end of the shard goes through [`shardcron_store::EffectsLedger::end_records`].
    #[must_use]
    pub fn may_have_records(&self) -> bool {
        // An earlier attempt may have left rows.
        self.attempt.attempt > 1 || self.records.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Effects for LedgerEffects {
    async fn checkpoint(
        &self,
        from: Option<Checkpoint>,
        to: Checkpoint,
        rows: u64,
    ) -> std::result::Result<(), CheckpointError> {
        if !self.records.load(Ordering::Relaxed) {
            return match self.ledger.advance(self.owner, self.attempt, from, to, rows).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(rejection)) => Err(CheckpointError::Superseded(rejection)),
                Err(e) => Err(CheckpointError::Unavailable(e.to_string())),
            };
        }
        // Under the same lock as the attempt's records.
        let moved = async {
            let tx = self.begin().await?;
            tx.commit(StepEnd { advance: Some((from, to)), rows, ..StepEnd::default() }).await
        };
        moved.await.map_err(|e| match e {
            EffectError::Superseded(rejection) => CheckpointError::Superseded(rejection),
            other => CheckpointError::Unavailable(other.to_string()),
        })
    }

    fn progress(&self) {
        (self.tick)();
    }

    async fn begin(&self) -> std::result::Result<Box<dyn EffectsTransaction>, EffectError> {
        match self.ledger.begin_step(self.owner, self.attempt).await {
            Ok(Ok(tx)) => Ok(Box::new(LedgerTransaction {
                tx,
                ledger: self.ledger.clone(),
                of: (self.owner, self.attempt),
                records: self.records.clone(),
            })),
            Ok(Err(rejection)) => Err(EffectError::Superseded(rejection)),
            Err(error) => Err(effect_error(error)),
        }
    }

    async fn open_records(&self, limit: usize) -> std::result::Result<Vec<RecordRow>, EffectError> {
        self.ledger.open_records(self.attempt, limit).await.map_err(effect_error)
    }
}

struct LedgerTransaction {
    tx: Box<dyn StepTx>,
    ledger: Arc<dyn Ledger>,
    of: (Incarnation, AttemptRef),
    records: Arc<AtomicBool>,
}

#[async_trait]
impl EffectsTransaction for LedgerTransaction {
    async fn execute(&mut self, sql: &str, args: &[SqlValue]) -> std::result::Result<u64, EffectError> {
        self.tx.execute(sql, args).await.map_err(effect_error)
    }

    async fn query(&mut self, sql: &str, args: &[SqlValue]) -> std::result::Result<Vec<Vec<SqlValue>>, EffectError> {
        self.tx.query(sql, args).await.map_err(effect_error)
    }

    async fn mark(&mut self) -> std::result::Result<(), EffectError> {
        self.tx.mark().await.map_err(effect_error)
    }

    async fn undo(&mut self) -> std::result::Result<(), EffectError> {
        self.tx.undo().await.map_err(effect_error)
    }

    async fn known(&mut self, keys: &[Vec<u8>], note: bool) -> std::result::Result<Vec<Option<Known>>, EffectError> {
        self.records.store(true, Ordering::Relaxed);
        self.tx.known(keys, note).await.map_err(effect_error)
    }

    async fn skipped(&mut self) -> std::result::Result<u32, EffectError> {
        self.tx.skipped().await.map_err(effect_error)
    }

    /// A checkpoint deletes the rows of the batch that is committed with it, and no others: what an earlier attempt had begun with may
    /// lie beyond it, and is left out by its row alone. Rows that stay end with the shard.
    async fn commit(self: Box<Self>, end: StepEnd) -> std::result::Result<(), EffectError> {
        let LedgerTransaction { tx, ledger, of: (owner, attempt), .. } = *self;
        match tx.commit(&end).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(rejection)) => Err(EffectError::Superseded(rejection)),
            // It may be done already, and only its answer be lost.
            Err(StoreError::Unavailable { detail, .. }) if end.leaves_a_trace() => {
                read_back(&*ledger, (owner, attempt), &end, detail).await
            }
            Err(error) => Err(effect_error(error)),
        }
    }
}

async fn read_back(
    ledger: &dyn Ledger,
    (owner, attempt): (Incarnation, AttemptRef),
    end: &StepEnd,
    detail: String,
) -> std::result::Result<(), EffectError> {
    match patiently(|| ledger.step_stands(owner, attempt, end)).await {
        Ok(Ok(true)) => {
            tracing::info!(execution_id = %attempt.execution, shard_no = attempt.index, attempt = attempt.attempt,
                "a step had been committed when its answer was lost");
            Ok(())
        }
        Ok(Ok(false)) => Err(EffectError::Unavailable(detail)),
        Ok(Err(rejection)) => Err(EffectError::Superseded(rejection)),
        Err(error) => Err(effect_error(error)),
    }
}

/// Asks until the ledger answers.
async fn patiently<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> Result<T> {
    let mut wait = FIRST_WAIT;
    let mut tries = 1;
    loop {
        match call().await {
            Err(error) if error.is_transient() && tries < TRIES => {
                tracing::debug!(%error, "what became of a step is asked again");
            }
            answer => return answer,
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(MAX_WAIT);
        tries += 1;
    }
}

fn effect_error(error: StoreError) -> EffectError {
    match error {
        StoreError::Statement { detail, transient } => EffectError::Statement { detail, transient },
        StoreError::Unavailable { .. } => EffectError::Unavailable(error.to_string()),
        other => EffectError::Invalid(other.to_string()),
    }
}

/// What the good end of a shard with records came to.
#[derive(Debug)]
pub enum RecordedEnd {
    /// There were none: it is to be recorded like any other.
    NoRecords,
    /// It is recorded.
    Recorded,
    /// Records are still to be done: the attempt has failed, with this sentence.
    Open(String),
    /// The shard is somebody else's.
    Refused(Rejection),
}

/// Records the good end of an attempt whose effects [may have records](LedgerEffects::may_have_records).
///
/// # Errors
/// The ledger does not answer.
pub async fn end_with_records(
    ledger: &dyn Ledger,
    owner: Incarnation,
    ended: &shardcron_store::Ended,
    now_ms: impl Fn() -> i64,
) -> Result<RecordedEnd> {
    let answer = patiently(|| ledger.end_records(owner, ended, now_ms())).await?;
    Ok(match answer {
        Ok(RecordsEnd::NoRecords) => RecordedEnd::NoRecords,
        Ok(RecordsEnd::Recorded(_) | RecordsEnd::Before) => RecordedEnd::Recorded,
        Ok(RecordsEnd::Open(count, some)) => RecordedEnd::Open(still_open(count, &some)),
        Err(rejection) => RecordedEnd::Refused(rejection),
    })
}

/// Why a shard can't end well whose attempt [may have records](LedgerEffects::may_have_records): some are still to be done. For the
/// first shard of a map, whose good end is recorded together with what it emitted; nobody else writes under its attempt meanwhile.
///
/// # Errors
/// The ledger does not answer.
pub async fn records_still_open(ledger: &dyn Ledger, attempt: AttemptRef) -> Result<Option<String>> {
    let any = AttemptRef { attempt: u32::MAX, ..attempt };
    let open = patiently(|| ledger.open_records(any, RECORDS_PER_BATCH)).await?;
    Ok((!open.is_empty()).then(|| still_open(open.len() as u64, &open)))
}

fn still_open(count: u64, some: &[RecordRow]) -> String {
    let mut sentence = match count {
        1 => "1 record is still to be done: ".to_owned(),
        more => format!("{more} records are still to be done: "),
    };
    let one = |row: &RecordRow| match &row.message {
        Some(why) => format!("'{}' (tried {} times: {why})", key_text(&row.key), row.tries),
        None => format!("'{}' (begun by attempt {})", key_text(&row.key), row.attempt),
    };
    sentence.push_str(&some.iter().take(RECORDS_REPORTED).map(one).collect::<Vec<_>>().join(", "));
    let named = some.len().min(RECORDS_REPORTED) as u64;
    if count > named {
        sentence.push_str(&format!(" and {} more", count - named));
    }
    sentence
}
