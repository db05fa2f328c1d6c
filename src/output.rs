//! What commands print: tables that align for people, JSON for programs.

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// Where a command's answer goes.
#[derive(Clone, Copy, Debug)]
pub struct Out {
    /// `--json` was given.
    pub json: bool,
}

impl Out {
    /// The whole answer, either way.
    pub fn answer<T: Serialize>(self, value: &T, people: impl FnOnce()) {
        if self.json {
            match serde_json::to_string(value) {
                Ok(text) => line(&text),
                Err(e) => eprintln!("the answer could not be written as JSON: {e}"),
            }
        } else {
            people();
        }
    }
}

/// Writes a line to standard output; a reader that has gone (`| head`) is no error.
pub fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a table without frames.
pub fn table(headers: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headers.iter().map(|h| h.to_string()));
    for row in rows {
        table.add_row(row);
    }
    line(&table.trim_fmt());
}

/// Whether progress may be drawn.
pub fn draws() -> bool {
    std::io::stderr().is_terminal()
}

/// An instant for people; `-` if there is none.
pub fn instant(ms: Option<i64>) -> String {
    ms.map_or_else(|| "-".into(), shardcron_domain::units::rfc3339)
}

/// A span for people, to the tenth of a second.
pub fn seconds(ms: i64) -> String {
    format!("{:.1} s", ms as f64 / 1_000.0)
}

/// How many of something: "1 shard", "2,000 shards".
pub fn counted(n: u64, word: &str) -> String {
    format!("{} {word}{}", number(n), if n == 1 { "" } else { "s" })
}

/// A number with thousands apart.
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_have_separators() {
        assert_eq!(super::number(7), "7");
        assert_eq!(super::number(336_776), "336,776");
        assert_eq!(super::number(1_000_000), "1,000,000");
    }
}
