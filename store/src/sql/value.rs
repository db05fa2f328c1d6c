//! Values that go into statements and come out of rows, the same for both servers.

use super::fault::{Fault, Outcome};
use crate::rows::SqlArg;
use shardcron_domain::effects::SqlValue;
use sqlx::mysql::MySqlRow;
use sqlx::sqlite::SqliteRow;
use sqlx::{Column as _, Row as _, TypeInfo as _, ValueRef as _};
use std::fmt::Write as _;

/// A value of either server.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
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

impl From<i64> for Value {
    fn from(n: i64) -> Self {
        Value::Int(n)
    }
}

impl From<u32> for Value {
    fn from(n: u32) -> Self {
        Value::Int(i64::from(n))
    }
}

impl From<usize> for Value {
    fn from(n: usize) -> Self {
        Value::Int(i64::try_from(n).unwrap_or(i64::MAX))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(text)
    }
}

impl From<&[u8; 16]> for Value {
    fn from(id: &[u8; 16]) -> Self {
        Value::Bytes(id.to_vec())
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Value::Bytes(bytes.to_vec())
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Value::Null, Into::into)
    }
}

impl From<SqlValue> for Value {
    fn from(value: SqlValue) -> Self {
        match value {
            SqlValue::Int(n) => Value::Int(n),
            SqlValue::Float(n) => Value::Float(n),
            SqlValue::Text(text) => Value::Text(text),
            SqlValue::Bytes(bytes) => Value::Bytes(bytes),
            SqlValue::Null => Value::Null,
        }
    }
}

impl From<Value> for SqlValue {
    fn from(value: Value) -> Self {
        match value {
            Value::Int(n) => SqlValue::Int(n),
            Value::Float(n) => SqlValue::Float(n),
            Value::Text(text) => SqlValue::Text(text),
            Value::Bytes(bytes) => SqlValue::Bytes(bytes),
            Value::Null => SqlValue::Null,
        }
    }
}

impl From<SqlArg> for Value {
    fn from(arg: SqlArg) -> Self {
        match arg {
            SqlArg::Int(n) => Value::Int(n),
            SqlArg::Float(n) => Value::Float(n),
            SqlArg::Text(text) => Value::Text(text),
            SqlArg::Null => Value::Null,
        }
    }
}

impl From<Value> for SqlArg {
    fn from(value: Value) -> Self {
        match value {
            Value::Int(n) => SqlArg::Int(n),
            Value::Float(n) => SqlArg::Float(n),
            Value::Text(text) => SqlArg::Text(text),
            Value::Bytes(bytes) => SqlArg::Text(String::from_utf8_lossy(&bytes).into_owned()),
            Value::Null => SqlArg::Null,
        }
    }
}

/// A row's values, by position.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row(pub(crate) Vec<Value>);

impl Row {
    fn wrong<T>(&self, column: usize, wanted: &str) -> Outcome<T> {
        Err(Fault::corrupt(format!("column {column} of a row is not {wanted}")))
    }

    pub(crate) fn int(&self, column: usize) -> Outcome<i64> {
        match self.opt_int(column)? {
            Some(n) => Ok(n),
            None => self.wrong(column, "a number"),
        }
    }

    pub(crate) fn opt_int(&self, column: usize) -> Outcome<Option<i64>> {
        match self.0.get(column) {
            Some(Value::Int(n)) => Ok(Some(*n)),
            // MySQL's sums are decimals.
            Some(Value::Text(text)) => text.parse().map(Some).or_else(|_| self.wrong(column, "a number")),
            Some(Value::Null) => Ok(None),
            _ => self.wrong(column, "a number"),
        }
    }

    pub(crate) fn count(&self, column: usize) -> Outcome<u32> {
        u32::try_from(self.int(column)?).or_else(|_| self.wrong(column, "a small whole number"))
    }

    pub(crate) fn text(&self, column: usize) -> Outcome<String> {
        match self.opt_text(column)? {
            Some(text) => Ok(text),
            None => self.wrong(column, "a text"),
        }
    }

    pub(crate) fn opt_text(&self, column: usize) -> Outcome<Option<String>> {
        match self.0.get(column) {
            Some(Value::Text(text)) => Ok(Some(text.clone())),
            Some(Value::Bytes(bytes)) => Ok(Some(String::from_utf8_lossy(bytes).into_owned())),
            Some(Value::Null) => Ok(None),
            _ => self.wrong(column, "a text"),
        }
    }

    pub(crate) fn bytes(&self, column: usize) -> Outcome<&[u8]> {
        match self.0.get(column) {
            Some(Value::Bytes(bytes)) => Ok(bytes),
            Some(Value::Text(text)) => Ok(text.as_bytes()),
            _ => self.wrong(column, "bytes"),
        }
    }

    pub(crate) fn is_null(&self, column: usize) -> bool {
        matches!(self.0.get(column), Some(Value::Null) | None)
    }

    /// An id of sixteen bytes, by the id type's `from_slice`.
    pub(crate) fn id<T>(&self, column: usize, from_slice: impl Fn(&[u8]) -> Option<T>) -> Outcome<T> {
        match from_slice(self.bytes(column)?) {
            Some(id) => Ok(id),
            None => self.wrong(column, "an id of 16 bytes"),
        }
    }

    pub(crate) fn opt_id<T>(&self, column: usize, from_slice: impl Fn(&[u8]) -> Option<T>) -> Outcome<Option<T>> {
        if self.is_null(column) { Ok(None) } else { self.id(column, from_slice).map(Some) }
    }
}

pub(crate) fn from_mysql(row: &MySqlRow) -> Result<Row, sqlx::Error> {
    let mut values = Vec::with_capacity(row.len());
    for column in 0..row.len() {
        let raw = row.try_get_raw(column)?;
        if raw.is_null() {
            values.push(Value::Null);
            continue;
        }
        let kind = raw.type_info().name().to_owned();
        values.push(match kind.as_str() {
            "BIGINT UNSIGNED" => {
                Value::Int(i64::try_from(row.try_get_unchecked::<u64, _>(column)?).unwrap_or(i64::MAX))
            }
            k if k.contains("INT") || k == "BOOLEAN" || k == "YEAR" => Value::Int(row.try_get_unchecked(column)?),
            "DOUBLE" => Value::Float(row.try_get_unchecked(column)?),
            "FLOAT" => Value::Float(f64::from(row.try_get_unchecked::<f32, _>(column)?)),
            k if k.contains("BLOB") || k.contains("BINARY") => Value::Bytes(row.try_get_unchecked(column)?),
            k if k.contains("CHAR") || k.contains("TEXT") || matches!(k, "DECIMAL" | "JSON" | "ENUM" | "SET") => {
                Value::Text(row.try_get_unchecked(column)?)
            }
            other => return Err(unreadable(row.column(column).name(), other)),
        });
    }
    Ok(Row(values))
}

pub(crate) fn from_sqlite(row: &SqliteRow) -> Result<Row, sqlx::Error> {
    let mut values = Vec::with_capacity(row.len());
    for column in 0..row.len() {
        let raw = row.try_get_raw(column)?;
        if raw.is_null() {
            values.push(Value::Null);
            continue;
        }
        let kind = raw.type_info().name().to_owned();
        values.push(match kind.as_str() {
            "INTEGER" | "BOOLEAN" => Value::Int(row.try_get_unchecked(column)?),
            "REAL" | "NUMERIC" => Value::Float(row.try_get_unchecked(column)?),
            "BLOB" => Value::Bytes(row.try_get_unchecked(column)?),
            _ => Value::Text(row.try_get_unchecked(column)?),
        });
    }
    Ok(Row(values))
}

fn unreadable(column: &str, kind: &str) -> sqlx::Error {
    sqlx::Error::ColumnDecode {
        index: column.to_owned(),
        source: format!("values of type {kind} are not read; convert with CAST({column} AS CHAR)").into(),
    }
}

/// A literal of bytes that both servers read alike, and that can't end a statement.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + 3);
    push_hex(&mut text, bytes);
    text
}

/// Appends [`hex`].
pub(crate) fn push_hex(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.push_str("x'");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push('\'');
}

/// Numbers separated by commas, for an `IN`.
pub(crate) fn number_list<N: std::fmt::Display>(numbers: impl IntoIterator<Item = N>) -> String {
    let mut text = String::new();
    for number in numbers {
        if !text.is_empty() {
            text.push(',');
        }
        // Writing to a String can't fail.
        let _ = write!(text, "{number}");
    }
    text
}

/// Ids separated by commas, for an `IN`.
pub(crate) fn id_list<'a>(ids: impl IntoIterator<Item = &'a [u8; 16]>) -> String {
    number_list(ids.into_iter().map(|id| hex(id)))
}
