//! What a handler's effects in the ledger's own database are made of.

use crate::once::RecordWrite;
use crate::shard::Checkpoint;

/// A value in a statement or a row.
#[derive(Clone, Debug, PartialEq)]
pub enum SqlValue {
    /// A whole number.
    Int(i64),
    /// A fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// NULL.
    Null,
}

impl SqlValue {
    /// The number, if it is one. Sums come as text from MySQL.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            SqlValue::Int(n) => Some(*n),
            SqlValue::Text(text) => text.parse().ok(),
            SqlValue::Float(_) | SqlValue::Bytes(_) | SqlValue::Null => None,
        }
    }

    /// The text, if it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            SqlValue::Text(text) => Some(text),
            _ => None,
        }
    }
}

macro_rules! from_numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for SqlValue {
            fn from(n: $number) -> Self {
                SqlValue::Int(i64::from(n))
            }
        }
    )*};
}
from_numbers!(i8, i16, i32, i64, u8, u16, u32, bool);

impl From<u64> for SqlValue {
    /// A number beyond what a BIGINT holds is bound as text, which the servers read as the number.
    fn from(n: u64) -> Self {
        i64::try_from(n).map_or_else(|_| SqlValue::Text(n.to_string()), SqlValue::Int)
    }
}

impl From<usize> for SqlValue {
    fn from(n: usize) -> Self {
        SqlValue::from(n as u64)
    }
}

impl From<f64> for SqlValue {
    fn from(n: f64) -> Self {
        SqlValue::Float(n)
    }
}

impl From<&str> for SqlValue {
    fn from(text: &str) -> Self {
        SqlValue::Text(text.to_owned())
    }
}

impl From<String> for SqlValue {
    fn from(text: String) -> Self {
        SqlValue::Text(text)
    }
}

impl From<&String> for SqlValue {
    fn from(text: &String) -> Self {
        SqlValue::Text(text.clone())
    }
}

impl From<Vec<u8>> for SqlValue {
    fn from(bytes: Vec<u8>) -> Self {
        SqlValue::Bytes(bytes)
    }
}

impl From<&[u8]> for SqlValue {
    fn from(bytes: &[u8]) -> Self {
        SqlValue::Bytes(bytes.to_vec())
    }
}

impl<T: Into<SqlValue>> From<Option<T>> for SqlValue {
    fn from(value: Option<T>) -> Self {
        value.map_or(SqlValue::Null, Into::into)
    }
}

/// What is committed with a handler's transaction, besides its own statements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepEnd {
    /// The checkpoint's move, from where to where.
    pub advance: Option<(Option<Checkpoint>, Checkpoint)>,
    /// Records of the slice that this step did, for the count that people see.
    pub rows: u64,
    /// Rows of records to be written.
    pub writes: Vec<RecordWrite>,
    /// Rows of records to be deleted: those of the batch that the checkpoint covers. Others may lie beyond it, left over by an earlier
    /// attempt; what is done of them goes with the shard's good end.
    pub erased: Vec<Vec<u8>>,
}

impl StepEnd {
    /// Whether it leaves something by which a later look can tell that it was committed.
    #[must_use]
    pub fn leaves_a_trace(&self) -> bool {
        self.advance.is_some() || !self.writes.is_empty()
    }
}
