//! Job files: TOML with one table for each job. Errors name the line and the key.

use crate::job::JobSpec;
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;

/// A fault in a job file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct JobFileError {
    /// Counted from 1.
    pub line: usize,
    /// Which job and key, what is wrong, and what would be right.
    pub message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    job: BTreeMap<String, Spanned<JobSpec>>,
}

/// Reads and checks a job file.
///
/// # Errors
/// The first fault.
pub fn parse(text: &str) -> Result<Vec<JobSpec>, JobFileError> {
    let file: File = toml::from_str(text).map_err(|e| {
        let at = e.span().map_or(0, |s| s.start);
        JobFileError { line: line_of(text, at), message: place(text, at, e.message()) }
    })?;
    let mut jobs = Vec::with_capacity(file.job.len());
    for (name, spanned) in file.job {
        let span = spanned.span();
        let inner = spanned.into_inner();
        if !inner.name.is_empty() {
            let line = find_key(text, span.start, "name").unwrap_or_else(|| line_of(text, span.start));
            return Err(JobFileError {
                line,
                message: format!("job '{name}': name: a job's name is its table's, [job.{name}]; leave the key out"),
            });
        }
        let job = JobSpec { name: name.clone(), ..inner };
        job.validate().map_err(|e| {
            let line = find_key(text, span.start, &e.key).unwrap_or_else(|| line_of(text, span.start));
            JobFileError { line, message: format!("job '{name}': {e}") }
        })?;
        jobs.push(job);
    }
    if jobs.is_empty() {
        return Err(JobFileError {
            line: 1,
            message: "there is no job in it; a job begins with [job.its-name]".into(),
        });
    }
    let follows = jobs.iter().filter_map(|job| Some((job.name.clone(), job.after.as_ref()?.jobs.clone()))).collect();
    if let Some(circle) = crate::after::cycle(&follows) {
        let first = circle.split(' ').next().unwrap_or_default();
        let header = text.find(&format!("[job.{first}]")).unwrap_or(0);
        let line = find_key(text, header, "after").unwrap_or_else(|| line_of(text, header));
        return Err(JobFileError {
            line,
            message: format!(
                "job '{first}': after: the jobs follow each other in a circle ({circle}); take one of the arrows out"
            ),
        });
    }
    Ok(jobs)
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1
}

/// The parser names the key only where it is unknown; the job can be told from the last table header before the fault.
fn place(text: &str, at: usize, message: &str) -> String {
    let before = &text[..text.floor_char_boundary(at.min(text.len()))];
    let this_line = text[before.rfind('\n').map_or(0, |i| i + 1)..].lines().next().unwrap_or("");
    let header = before.lines().chain([this_line]).filter_map(|l| l.trim().strip_prefix("[job.")).next_back();
    let message = message.trim().replace('\n', "; ");
    match header.and_then(|h| h.split([']', '.']).next()) {
        Some(job) => format!("job '{job}': {message}"),
        None => message,
    }
}

/// The line on which the last part of a dotted key is set, after the job's header.
fn find_key(text: &str, from: usize, key: &str) -> Option<usize> {
    let last = key.rsplit('.').next()?;
    let first = key.split('.').next()?;
    let start = line_of(text, from);
    let own = text
        .lines()
        .enumerate()
        .skip(start - 1)
        .take_while(|(i, l)| *i + 1 == start || !l.trim_start().starts_with("[job."));
    let mut of_first = None;
    for (i, line) in own {
        let starts = |word: &str| line.trim_start().starts_with(word);
        if starts(last) && !last.is_empty() {
            return Some(i + 1);
        }
        if starts(first) && of_first.is_none() {
            of_first = Some(i + 1);
        }
    }
    of_first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{HandlerSpec, Misfire, OverlapPolicy, Timeout};
    use crate::units::Span;

    const GOOD: &str = r#"
[job.reconcile-flights]
schedule = { cron = "0 30 2 * * *", timezone = "America/New_York" }
shards   = { range = { from = 1, to = 336776 }, count = 32 }
handler  = { sql = "INSERT INTO unmatched SELECT 1", chunk = 1000 }
tier     = "core"
timeout  = "30m"
retry    = { attempts = 3, first = "10s", factor = 2.0, max = "10m", jitter = 0.2 }
overlap  = "skip"
misfire  = { policy = "fire_once", grace = "1h" }

[job.hello]
handler = { exec = ["echo", "hello"] }
timeout = "none"
"#;

    #[test]
    fn a_good_file_is_read() {
        let jobs = parse(GOOD).unwrap();
        assert_eq!(jobs.len(), 2);
        let hello = &jobs[0];
        assert_eq!((hello.name.as_str(), hello.timeout), ("hello", Timeout::Never));
        assert_eq!(hello.handler, HandlerSpec::Exec { argv: vec!["echo".into(), "hello".into()] });
        let flights = &jobs[1];
        assert_eq!(flights.misfire.grace, Span::mins(60));
        assert_eq!((flights.misfire.policy, flights.overlap), (Misfire::FireOnce, OverlapPolicy::Skip));
        let again: JobSpec = serde_json::from_str(&flights.canonical_json()).unwrap();
        assert_eq!(&again, flights, "what the ledger keeps is what was read");
    }

    fn fault(from: &str, to: &str) -> JobFileError {
        assert!(GOOD.contains(from), "{from}");
        parse(&GOOD.replace(from, to)).expect_err(to)
    }

    #[test]
    fn faults_name_line_job_key_and_remedy() {
        for (from, to, line, words) in [
            ("tier ", "teir ", 6, "teir"),
            ("\"30m\"", "30", 7, "duration in quotes"),
            ("\"30m\"", "\"0s\"", 7, "none"),
            ("\"30m\"", "\"-1s\"", 7, "duration"),
            ("attempts = 3", "attempts = 0", 8, "retry.attempts"),
            ("max = \"10m\"", "max = \"1s\"", 8, "less than first"),
            ("count = 32", "count = 0", 4, "shards.count"),
            ("336776 }, count = 32", "9336776 }, count = 1000001", 4, "1000000 is the most"),
            ("America/New_York", "Mars/Phobos", 3, "Mars/Phobos"),
            ("0 30 2 * * *", "0 61 2 * * *", 3, "schedule"),
            ("\"skip\"", "\"skipp\"", 9, "skip"),
            ("\"core\"", "\"Core\"", 6, "lower-case"),
            ("exec = [\"echo\", \"hello\"]", "exec = []", 13, "program"),
            ("tier     = \"core\"", "name     = \"other\"", 6, "leave the key out"),
        ] {
            let e = fault(from, to);
            assert_eq!(e.line, line, "{to}: {e}");
            assert!(e.to_string().contains(words), "{to}: {e}");
            assert!(e.to_string().contains("job '"), "{to}: {e}");
        }
    }

    #[test]
    fn a_circle_of_jobs_is_refused_with_its_line() {
        let text = "[job.a]\nhandler = { rust = \"x\" }\nafter = [\"b\"]\n[job.b]\nhandler = { rust = \"x\" }\nafter = [\"a\"]\n";
        let fault = parse(text).unwrap_err();
        assert_eq!(fault.line, 3);
        assert!(fault.message.contains("a → b → a"), "{fault}");
    }

    #[test]
    fn an_empty_file_says_how_to_begin() {
        assert!(parse("").unwrap_err().message.contains("[job.its-name]"));
    }
}
