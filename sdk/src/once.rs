//! Records that are worked on once, where their effects are not in the ledger's own database, or a shard has no order to checkpoint.
//!
//! ```
//! # use shardcron_sdk::{Checkpoint, EffectError, ShardContext};
//! # async fn send(context: &mut ShardContext, orders: &[(String, i64)]) -> Result<(), EffectError> {
//! let mut batch = context.once(orders.iter().map(|(id, _)| id.as_str())).await?;
//! for n in batch.open() {
//!     // An earlier attempt died at it, or failed: whether it was sent is for the other side to say, by the key.
//!     let again = batch.is_again(n);
//! #   let sent: Result<(), &str> = if again { Err("no answer") } else { Ok(()) };
//!     if let Err(why) = sent {
//!         batch.retry(n, why);
//!     }
//! }
//! context.settle(batch, Checkpoint::Number(orders.last().map_or(0, |(_, n)| *n))).await
//! # }
//! ```
//!
//! Batches of a shard are worked on one after the other: a checkpoint says that everything up to it has been settled. A record that
//! is said to be tried again does not hold the checkpoint up: it keeps its row, the attempt ends as a failed one, and the next
//! attempt finds it with [`ShardContext::left_over`].

use crate::context::ShardContext;
use crate::transaction::EffectError;
use shardcron_domain::effects::StepEnd;
use shardcron_domain::limits::RECORDS_PER_BATCH;
use shardcron_domain::once::{Batch, Known};
use shardcron_domain::retry::apart;
use shardcron_domain::shard::Checkpoint;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::Duration;

/// Tries of a transaction that is ours alone, where it met others in a deadlock or a lock.
const TRIES_CONTENDED: u32 = 12;
/// The same where the ledger did not answer, which takes some seconds to find out.
const TRIES_AWAY: u32 = 5;
/// See [`apart`].
const APART: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(256));

/// The tries of a transaction that is ours alone: nothing in it is the handler's, so a deadlock is nothing that the handler has to hear of.
#[derive(Default)]
struct Tries {
    contended: u32,
    away: u32,
}

impl Tries {
    /// Waits before the next try, or gives the error back: there is none.
    async fn again(&mut self, error: EffectError) -> Result<(), EffectError> {
        let (tries, most) = match &error {
            EffectError::Statement { transient: true, .. } => (&mut self.contended, TRIES_CONTENDED),
            EffectError::Unavailable(_) => (&mut self.away, TRIES_AWAY),
            _ => return Err(error),
        };
        *tries += 1;
        if *tries >= most {
            return Err(error);
        }
        let draw = RandomState::new().build_hasher().finish();
        tokio::time::sleep(apart(*tries, APART.0, APART.1, draw)).await;
        Ok(())
    }
}

impl ShardContext {
    /// Says that the records of these keys are about to be worked on, and which of them still are to be: all but those that an
    /// earlier attempt has done or given up. Keys are bytes and compare as such; at most 1,000 of them each, never cut.
    ///
    /// # Errors
    /// A key is too long, superseded, or the ledger is away.
    pub async fn once<K: Into<Vec<u8>>>(&mut self, keys: impl IntoIterator<Item = K>) -> Result<Batch, EffectError> {
        let keys: Vec<Vec<u8>> = keys.into_iter().map(Into::into).collect();
        shardcron_domain::once::check_keys(&keys).map_err(EffectError::Invalid)?;
        let mut tries = Tries::default();
        let known = loop {
            match self.note(&keys).await {
                Ok(known) => break known,
                Err(error) => tries.again(error).await?,
            }
        };
        let batch = Batch::new(keys, known).map_err(EffectError::Invalid)?;
        Ok(batch.noted())
    }

    async fn note(&self, keys: &[Vec<u8>]) -> Result<Vec<Option<Known>>, EffectError> {
        let mut tx = self.effects.begin().await?;
        let known = tx.known(keys, true).await?;
        tx.commit(StepEnd::default()).await?;
        Ok(known)
    }

    /// Records what became of a batch, and moves the checkpoint: all up to `to` is settled. Rows of records that are done go with it.
    ///
    /// # Errors
    /// Superseded, or the ledger is away. [`EffectError::SkipLimit`]: it is recorded, but the checkpoint was not moved.
    pub async fn settle(&mut self, batch: Batch, to: Checkpoint) -> Result<(), EffectError> {
        self.settle_to(batch, Some(to)).await
    }

    /// The same without a checkpoint, where records have no order: the rows stay until the shard has ended well.
    ///
    /// # Errors
    /// As [`Self::settle`].
    pub async fn settle_records(&mut self, batch: Batch) -> Result<(), EffectError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.settle_to(batch, None).await
    }

    async fn settle_to(&mut self, batch: Batch, to: Option<Checkpoint>) -> Result<(), EffectError> {
        let rows = batch.done() as u64;
        let mut tries = Tries::default();
        loop {
            let settled = async {
                let mut tx = self.transaction().await?;
                tx.settle(batch.clone());
                match to.clone() {
                    Some(to) => tx.commit(to, rows).await,
                    None => tx.commit_records(rows).await,
                }
            };
            match settled.await {
                Ok(()) => return Ok(()),
                Err(error) => tries.again(error).await?,
            }
        }
    }

    /// Records that an earlier attempt began with or failed at, wherever the checkpoint is: a batch to begin an attempt with. `None`:
    /// there are none. At most 5,000; call it until there are none.
    ///
    /// # Errors
    /// The ledger is away.
    pub async fn left_over(&mut self) -> Result<Option<Batch>, EffectError> {
        if self.attempt.attempt == 1 {
            return Ok(None);
        }
        let rows = self.effects.open_records(RECORDS_PER_BATCH).await?;
        if rows.is_empty() {
            return Ok(None);
        }
        let known = rows.iter().map(|row| Some(Known { state: row.state, tries: row.tries })).collect();
        let batch = Batch::new(rows.into_iter().map(|row| row.key).collect(), known).map_err(EffectError::Invalid)?;
        Ok(Some(batch.noted()))
    }
}
