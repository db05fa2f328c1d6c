//! Inserts of many rows in few statements, and texts cut to what the ledger keeps.

use super::dialect::Dialect;
use super::fault::Outcome;
use super::pool::Tx;
use super::value::{Value, push_hex};
use std::fmt::Write as _;

/// Rows of one statement at most. Measured: more is no faster.
const ROWS: usize = 1_000;
/// Bytes after which a statement is closed: far below the smallest `max_allowed_packet` in use (case B-02).
const BYTES: usize = 256 * 1024;

/// An insert that grows into as many statements as it needs.
pub(crate) struct Bulk {
    head: String,
    tail: String,
    closed: Vec<String>,
    open: String,
    rows: usize,
}

impl Bulk {
    /// `head` ends with `VALUES `; `tail` follows the last row of each statement.
    pub(crate) fn new(head: impl Into<String>, tail: impl Into<String>) -> Self {
        Bulk { head: head.into(), tail: tail.into(), closed: Vec::new(), open: String::new(), rows: 0 }
    }

    /// Adds a row; `write` appends its values, separated by commas, as literals.
    pub(crate) fn push(&mut self, write: impl FnOnce(&mut String)) {
        if self.rows == 0 {
            self.open.push_str(&self.head);
        } else {
            self.open.push(',');
        }
        self.open.push('(');
        write(&mut self.open);
        self.open.push(')');
        self.rows += 1;
        if self.rows >= ROWS || self.open.len() >= BYTES {
            self.close();
        }
    }

    /// Adds a row of values.
    pub(crate) fn push_row(&mut self, dialect: Dialect, values: &[Value]) {
        self.push(|text| {
            for (position, value) in values.iter().enumerate() {
                if position > 0 {
                    text.push(',');
                }
                push_value(text, dialect, value);
            }
        });
    }

    fn close(&mut self) {
        if self.rows > 0 {
            self.open.push_str(&self.tail);
            self.closed.push(std::mem::take(&mut self.open));
            self.rows = 0;
        }
    }

    /// The statements, each to be sent as it is.
    pub(crate) fn into_statements(mut self) -> Vec<String> {
        self.close();
        self.closed
    }

    /// Sends everything; the count of rows that the server says it changed.
    pub(crate) async fn send(self, tx: &mut Tx) -> Outcome<u64> {
        let (changed, _) = tx.raw_batch(&self.into_statements()).await?;
        Ok(changed.iter().sum())
    }
}

/// Appends a value as a literal that can't end a statement.
pub(crate) fn push_value(text: &mut String, dialect: Dialect, value: &Value) {
    match value {
        // Writing to a String can't fail.
        Value::Int(n) => {
            let _ = write!(text, "{n}");
        }
        Value::Float(n) if n.is_finite() => {
            let _ = write!(text, "{n:e}");
        }
        Value::Float(_) | Value::Null => text.push_str("NULL"),
        Value::Text(value) => text.push_str(&dialect.text(value)),
        Value::Bytes(bytes) => push_hex(text, bytes),
    }
}

/// A text as the ledger keeps it: NUL, which the two servers compare differently, becomes U+FFFD, and what is beyond `limit` bytes
/// is cut at a character's end and marked (cases B-02, B-09).
pub(crate) fn kept(text: &str, limit: usize) -> String {
    const MARK: &str = " … (cut)";
    let clean = text.replace('\0', "\u{FFFD}");
    if clean.len() <= limit {
        return clean;
    }
    let mut cut = limit.saturating_sub(MARK.len());
    while !clean.is_char_boundary(cut) {
        cut -= 1;
    }
    format!("{}{MARK}", &clean[..cut])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_09_texts_are_cut_at_a_characters_end_and_keep_no_nul() {
        assert_eq!(kept("a\0b", 100), "a\u{FFFD}b");
        let long = kept(&"🦀".repeat(100), 50);
        assert!(long.len() <= 50 && long.ends_with("(cut)") && long.starts_with('🦀'), "{long}");
        assert_eq!(kept("short", 5), "short");
    }

    #[test]
    fn literals_can_not_end_a_statement() {
        let mut text = String::new();
        push_value(&mut text, Dialect::Sqlite, &Value::Text("'; DROP TABLE jobs; --".into()));
        assert!(!text.contains("DROP") && text.matches('\'').count() == 2, "{text}");
    }
}
