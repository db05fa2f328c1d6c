//! `shardcron jobs validate`

use super::files::{self, Found};
use crate::commands::now_ms;
use crate::output::{Out, counted, line};
use anyhow::Result;
use serde_json::{Value, json};
use shardcron_domain::hints::hints;
use std::path::Path;
use std::process::ExitCode;

pub fn run(file: &Path, out: Out) -> Result<ExitCode> {
    let loaded = files::load(file)?;
    let names: Vec<&str> = loaded.jobs.iter().map(|found| found.placed.spec.name.as_str()).collect();
    let hints = hints_of(&loaded.jobs);
    out.answer(&json!({ "valid": names, "hints": hints }), || {
        line(&format!("{}: {} valid ({})", file.display(), counted(names.len() as u64, "job"), names.join(", ")));
        print(&hints);
    });
    Ok(ExitCode::SUCCESS)
}

/// The hints about these jobs, in the order of files and lines.
pub fn hints_of(jobs: &[Found]) -> Vec<Value> {
    let now = now_ms();
    let mut all = Vec::new();
    for Found { placed, file } in jobs {
        for hint in hints(&placed.spec, now, &|key| placed.keys.contains_key(key)) {
            all.push((file, placed.line_of(hint.key), &placed.spec.name, hint));
        }
    }
    all.sort_by_key(|(file, at, ..)| (*file, *at));
    let value = |(file, at, job, hint): (&std::path::PathBuf, usize, &String, shardcron_domain::hints::Hint)| json!({ "file": file.display().to_string(), "line": at, "job": job, "key": hint.key, "hint": hint.message });
    all.into_iter().map(value).collect()
}

/// Prints hints for people.
pub fn print(hints: &[Value]) {
    let text = |hint: &Value, key: &str| hint[key].as_str().unwrap_or_default().to_owned();
    for hint in hints {
        let (file, job, key) = (text(hint, "file"), text(hint, "job"), text(hint, "key"));
        line(&format!("hint: {file}, line {}: job '{job}': {key}: {}", hint["line"], text(hint, "hint")));
    }
}
