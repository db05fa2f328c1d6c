//! A batch of records: which of them are to be worked on, and what is written of them afterwards.

use super::{Known, RecordState, RecordWrite, check_keys, key_text};
use std::collections::HashSet;

/// What the handler says of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mark {
    /// Nothing: it was done, or given up, before; or the batch has it twice.
    LeftOut,
    /// It is done. What is not said otherwise of a record that was to be worked on.
    Done,
    /// It failed.
    Retry(String),
    /// It is given up.
    Skip(String),
}

/// More records would be given up than may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// How many may be.
    pub limit: u32,
    /// The first that was one too many, as people read it.
    pub key: String,
    /// Why it was given up.
    pub message: String,
}

impl std::fmt::Display for OverLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.limit {
            0 => write!(f, "record '{}' failed: {}", self.key, self.message),
            limit => write!(
                f,
                "record '{}' failed: {}; the {limit} records that may be skipped have been skipped",
                self.key, self.message
            ),
        }
    }
}

/// What is to be written of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// Rows to be written, over what is there.
    pub writes: Vec<RecordWrite>,
    /// Rows to be deleted: their records are done, and lie at or below the checkpoint that is committed with this.
    pub erased: Vec<Vec<u8>>,
    /// The checkpoint must not move, and the attempt has failed.
    pub over: Option<OverLimit>,
}

/// Records that an attempt works on together.
#[derive(Clone, Debug)]
pub struct Batch {
    keys: Vec<Vec<u8>>,
    known: Vec<Option<Known>>,
    marks: Vec<Mark>,
    noted: bool,
    skip_limit: u32,
}

impl Batch {
    /// A batch of keys, with what the table says of each. A key that comes twice is worked on where it comes first.
    ///
    /// # Errors
    /// What [`check_keys`] says.
    pub fn new(keys: Vec<Vec<u8>>, known: Vec<Option<Known>>) -> Result<Self, String> {
        check_keys(&keys)?;
        let mut seen = HashSet::with_capacity(keys.len());
        let marks = keys
            .iter()
            .enumerate()
            .map(|(n, key)| {
                let settled = known.get(n).copied().flatten().is_some_and(|k| !k.state.is_open());
                if settled || !seen.insert(key.as_slice()) { Mark::LeftOut } else { Mark::Done }
            })
            .collect();
        Ok(Batch { keys, known, marks, noted: false, skip_limit: 0 })
    }

    /// All of its open records have rows that say `started`: what is not said in the transaction that does the records themselves.
    #[must_use]
    pub fn noted(mut self) -> Self {
        self.noted = true;
        self
    }

    /// How many records of the shard may be given up, over all its attempts. Without this: none.
    #[must_use]
    pub fn skip_limit(mut self, limit: u32) -> Self {
        self.skip_limit = limit;
        self
    }

    /// The positions, in the list of keys, of the records that are to be worked on.
    #[must_use]
    pub fn open(&self) -> Vec<usize> {
        (0..self.keys.len()).filter(|n| self.marks[*n] != Mark::LeftOut).collect()
    }

    /// The key at a position.
    #[must_use]
    pub fn key(&self, position: usize) -> &[u8] {
        self.keys.get(position).map_or(&[], Vec::as_slice)
    }

    /// Whether an earlier attempt had begun with the record or failed at it; then it may be done already, where its effects are not
    /// in the ledger's own database.
    #[must_use]
    pub fn is_again(&self, position: usize) -> bool {
        self.known.get(position).copied().flatten().is_some_and(|known| known.state.is_open())
    }

    /// How many records there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// How many records it did, as far as is said.
    #[must_use]
    pub fn done(&self) -> usize {
        self.marks.iter().filter(|mark| **mark == Mark::Done).count()
    }

    /// Says that a record failed and is to be tried again, by the next attempt; the others of the batch stand.
    pub fn retry(&mut self, position: usize, why: impl Into<String>) {
        self.mark(position, Mark::Retry(why.into()));
    }

    /// Says that a record failed for good and is to be left out from now on.
    pub fn skip(&mut self, position: usize, why: impl Into<String>) {
        self.mark(position, Mark::Skip(why.into()));
    }

    fn mark(&mut self, position: usize, mark: Mark) {
        if let Some(at) = self.marks.get_mut(position).filter(|m| **m != Mark::LeftOut) {
            *at = mark;
        }
    }

    /// Whether a record of it is to be given up; then [`Self::settle`] has to know how many have been.
    #[must_use]
    pub fn skips(&self) -> bool {
        self.marks.iter().any(|mark| matches!(mark, Mark::Skip(_)))
    }

    /// What is to be written: `covered` if a checkpoint is committed with it at or below which all of it lies.
    #[must_use]
    pub fn settle(&self, covered: bool, skipped_before: u32) -> Settlement {
        let mut settlement = Settlement::default();
        let mut skipped = skipped_before;
        for (position, mark) in self.marks.iter().enumerate() {
            let key = &self.keys[position];
            let known = self.known[position];
            let tries = known.map_or(0, |k| k.tries);
            let mut write = |state, tries, message| {
                settlement.writes.push(RecordWrite { key: key.clone(), state, tries, message });
            };
            match mark {
                Mark::LeftOut | Mark::Done => {}
                Mark::Retry(why) => write(RecordState::Retry, tries.saturating_add(1), Some(why.clone())),
                Mark::Skip(why) if skipped < self.skip_limit => {
                    skipped += 1;
                    write(RecordState::Skipped, tries.saturating_add(1), Some(why.clone()));
                }
                Mark::Skip(why) => {
                    write(RecordState::Retry, tries.saturating_add(1), Some(why.clone()));
                    let over = OverLimit { limit: self.skip_limit, key: key_text(key), message: why.clone() };
                    settlement.over.get_or_insert(over);
                }
            }
        }
        let covered = covered && settlement.over.is_none();
        let done = self.marks.iter().zip(&self.keys).zip(&self.known).filter(|((mark, _), _)| **mark == Mark::Done);
        for ((_, key), known) in done {
            if covered {
                if self.noted || known.is_some() {
                    settlement.erased.push(key.clone());
                }
            } else {
                let tries = known.map_or(0, |k| k.tries);
                let write = RecordWrite { key: key.clone(), state: RecordState::Done, tries, message: None };
                settlement.writes.push(write);
            }
        }
        settlement
    }
}
