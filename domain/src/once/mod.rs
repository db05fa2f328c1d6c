//! Records that are worked on once, whatever becomes of the attempts at their shard.
//!
//! A handler names the keys of the records that it is about to work on. Each has a row from then on:
//!
//! | state | said by | the next attempt |
//! | --- | --- | --- |
//! | `started` | the attempt that is about to work on it | does it again: whether it was done is not known |
//! | `done` | the attempt that has done it | leaves it out |
//! | `retry` | the attempt at which it failed | does it again |
//! | `skipped` | the attempt that gave it up for good, within the limit | leaves it out |
//!
//! A row that says `started` or `retry` is never a reason to leave its record out. Rows of records that lie at or below a committed
//! checkpoint say nothing that the checkpoint does not, and are deleted with it, but for those that still say something: `retry`,
//! and `skipped` for the report, until the shard has ended well.

mod batch;

pub use batch::{Batch, OverLimit, Settlement};

use crate::limits::{RECORD_KEY_BYTES, RECORDS_PER_BATCH};

/// What is known of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordState {
    /// An attempt is at it, or died at it.
    Started,
    /// It is done.
    Done,
    /// It failed, and is to be done again.
    Retry,
    /// It was given up.
    Skipped,
}

impl RecordState {
    /// The number in its column.
    #[must_use]
    pub fn code(self) -> i64 {
        match self {
            RecordState::Started => 0,
            RecordState::Done => 1,
            RecordState::Retry => 2,
            RecordState::Skipped => 3,
        }
    }

    /// From the number in its column.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        [RecordState::Started, RecordState::Done, RecordState::Retry, RecordState::Skipped]
            .into_iter()
            .find(|state| state.code() == code)
    }

    /// The word for people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            RecordState::Started => "started",
            RecordState::Done => "done",
            RecordState::Retry => "retry",
            RecordState::Skipped => "skipped",
        }
    }

    /// Whether the record is still to be worked on.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, RecordState::Started | RecordState::Retry)
    }
}

/// A record's row, as an earlier call left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// What it says.
    pub state: RecordState,
    /// How often the record failed.
    pub tries: u32,
}

/// A row to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordWrite {
    /// The record's key.
    pub key: Vec<u8>,
    /// What it is to say.
    pub state: RecordState,
    /// How often the record failed.
    pub tries: u32,
    /// Why it failed.
    pub message: Option<String>,
}

/// A record for a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordRow {
    /// The shard.
    pub shard: u32,
    /// The record's key.
    pub key: Vec<u8>,
    /// What is known of it.
    pub state: RecordState,
    /// The attempt that said so.
    pub attempt: u32,
    /// How often it failed.
    pub tries: u32,
    /// Why it failed.
    pub message: Option<String>,
}

/// A key as people read it: as text where it is text, else its bytes in hexadecimal digits.
#[must_use]
pub fn key_text(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => key.iter().fold(String::from("0x"), |mut text, byte| {
            text.push_str(&format!("{byte:02x}"));
            text
        }),
    }
}

/// What can't be a batch.
///
/// # Errors
/// A sentence: a key is too long (it is never cut: two long keys would become one, case I-03), or empty, or there are too many.
pub fn check_keys(keys: &[Vec<u8>]) -> Result<(), String> {
    if keys.len() > RECORDS_PER_BATCH {
        return Err(format!("{} records in one batch; at most {RECORDS_PER_BATCH} are possible", keys.len()));
    }
    for (position, key) in keys.iter().enumerate() {
        if key.is_empty() {
            return Err(format!("the key of record {position} of the batch is empty"));
        }
        if key.len() > RECORD_KEY_BYTES {
            let mut beginning = key_text(&key[..key.len().min(40)]);
            beginning.truncate(beginning.floor_char_boundary(80));
            return Err(format!(
                "the key of record {position} of the batch has {} bytes; at most {RECORD_KEY_BYTES} are kept, and a key is never \
                 cut. Use a hash of it instead ('{beginning}…')",
                key.len()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
