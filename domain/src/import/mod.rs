//! Job files out of what other schedulers keep: crontabs, and dumps of XXL-JOB's table.
//!
//! Texts in, a text out; what could not be carried over stands in it as a comment beside the original. What comes out is read and
//! checked like any other job file.

mod crontab;
mod dump;
mod quartz;
mod xxl_job;

pub use crontab::crontab;
pub use xxl_job::xxl_job;

use crate::job::check_name;
use crate::jobfile;
use crate::limits::JOB_NAME_BYTES;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// A job file that was made of something else.
#[derive(Clone, Debug, Default)]
pub struct Imported {
    /// The job file.
    pub text: String,
    /// Jobs in it.
    pub jobs: usize,
    /// What could not be carried over at all: each in a sentence with where it stood.
    pub left_out: Vec<String>,
}

/// Names that are not given out yet.
#[derive(Debug, Default)]
struct Names(BTreeSet<String>);

impl Names {
    /// A job's name made of some text, with the number behind it where the name is taken.
    fn take(&mut self, text: &str, fallback: &str) -> String {
        let mut name = String::new();
        for c in text.chars() {
            let c = c.to_ascii_lowercase();
            if c.is_ascii_lowercase() || c.is_ascii_digit() || (matches!(c, '.' | '_') && !name.is_empty()) {
                name.push(c);
            } else if !name.is_empty() && !name.ends_with('-') {
                name.push('-');
            }
        }
        // Room for a number behind it.
        name.truncate(JOB_NAME_BYTES - 12);
        let name = name.trim_end_matches(['-', '.', '_']);
        let name = if check_name(name, JOB_NAME_BYTES).is_ok() { name } else { fallback };
        let mut free = name.to_owned();
        let mut number = 1;
        while !self.0.insert(free.clone()) {
            number += 1;
            free = format!("{name}-{number}");
        }
        free
    }
}

/// A text as TOML writes it.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A comment; a line of its own for each line of the text.
fn comment(out: &mut String, text: &str) {
    for line in text.lines() {
        let line: String = line.chars().map(|c| if c.is_control() && c != '\t' { ' ' } else { c }).collect();
        // Writing to a String can't fail.
        let _ = writeln!(out, "# {}", line.trim_end());
    }
}

fn key(out: &mut String, name: &str, value: &str) {
    // Writing to a String can't fail.
    let _ = writeln!(out, "{name} = {value}");
}

/// Why a job of these keys would be refused; `None` if it would not.
fn refusal(keys: &str) -> Option<String> {
    let handler = if keys.contains("handler") { "" } else { "handler = { rust = \"x\" }\n" };
    let fault = jobfile::parse(&format!("[job.x]\n{keys}\n{handler}")).err()?;
    Some(fault.message.trim_start_matches("job 'x': ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_unique() {
        let mut names = Names::default();
        let taken: Vec<String> = ["Daily Report", "daily-report", "数据同步", "数据", "..x--", &"y".repeat(300)]
            .into_iter()
            .map(|text| names.take(text, "job"))
            .collect();
        assert_eq!(taken[..5], ["daily-report", "daily-report-2", "job", "job-2", "x"]);
        assert!(taken.iter().all(|name| check_name(name, JOB_NAME_BYTES).is_ok()), "{taken:?}");
    }

    #[test]
    fn any_text_is_a_comment_and_a_string() {
        let mut out = String::new();
        comment(&mut out, "a\u{7}b\r\nc\u{0}");
        key(&mut out, "x", &quoted("\"'\\\n\t\u{1}'''é"));
        let table: toml::Table = toml::from_str(&out).unwrap();
        assert_eq!(table["x"].as_str(), Some("\"'\\\n\t\u{1}'''é"));
    }
}
