//! What a program finds in its environment: a short allow-list of the worker's own, the job's variables, and what it is to work on;
//! and the file that holds the same as JSON, whatever its size.
//!
//! A job can't set a variable that decides which code runs (case Z-03: `LD_PRELOAD`), and what the worker itself was started with,
//! such as the password of its database, does not reach a program (case Z-05) unless the worker's configuration passes it on.

use crate::input;
use crate::map::Results;
use shardcron_domain::limits::REDUCE_FILE_BYTES;
use shardcron_domain::program::{ProgramOptions, check_variable};
use shardcron_domain::shard::Checkpoint;
use shardcron_domain::units::rfc3339;
use shardcron_sdk::{ShardContext, ShardError, ShardSlice};
use std::io::Write as _;
use tempfile::NamedTempFile;

/// What passes from the worker to its programs.
const INHERITED: [&str; 4] = ["PATH", "HOME", "LANG", "TZ"];

/// Linux refuses a single variable beyond 128 KiB.
const VALUE_BYTES: usize = 120 * 1024;

/// What begins the names of the files; a worker's own id follows, so that those of a worker that was killed can be told.
pub(super) const FILE_BEGINNING: &str = "shardcron-input-";

/// The variable by which the processes of an attempt can be found.
pub(super) const MARK: &str = "SHARDCRON_ATTEMPT_ID";

/// The value of [`MARK`].
pub(super) fn mark_of(context: &ShardContext) -> String {
    format!("{}/{}", context.idempotency_key(), context.attempt.attempt)
}

/// What a shell script wants of the slice; all of it is in `SHARDCRON_SLICE`, as JSON.
fn of_slice(slice: &ShardSlice) -> Vec<(&'static str, String)> {
    match slice {
        ShardSlice::Range { from, to } => vec![("SHARD_FROM", from.to_string()), ("SHARD_TO", to.to_string())],
        ShardSlice::Slots { from, to } => vec![("SLOT_FROM", from.to_string()), ("SLOT_TO", to.to_string())],
        ShardSlice::Part { item, part, parts } => {
            vec![("ITEM", item.clone()), ("ITEM_PART", part.to_string()), ("ITEM_PARTS", parts.to_string())]
        }
        ShardSlice::File { file, from, to, .. } => vec![
            ("FILE", file.path.clone()),
            ("FILE_FROM", from.to_string()),
            ("FILE_TO", to.to_string()),
            ("FILE_HEADER", file.header.to_string()),
        ],
        ShardSlice::Keys { from, before } => {
            let before = before.clone().map(|before| ("KEY_BEFORE", before));
            std::iter::once(("KEY_FROM", from.clone())).chain(before).collect()
        }
        ShardSlice::Worker { worker } => vec![("WORKER", worker.name.clone())],
        ShardSlice::Map { max } => vec![("STAGE", "map".into()), ("EMIT_MAX", max.to_string())],
        ShardSlice::Task { number, payload } => {
            let payload = payload.as_str().map_or_else(|| payload.to_string(), str::to_owned);
            vec![("STAGE", "task".into()), ("TASK_NUMBER", number.to_string()), ("TASK", payload)]
        }
        ShardSlice::Reduce { tasks } => vec![("STAGE", "reduce".into()), ("TASKS", tasks.to_string())],
        ShardSlice::Modulo { .. } | ShardSlice::List { .. } => Vec::new(),
    }
}

/// The variables of an attempt.
pub(super) fn of(
    context: &ShardContext,
    options: &ProgramOptions,
    passed: &[String],
) -> Result<Vec<(String, String)>, ShardError> {
    let attempt = context.attempt;
    let names = INHERITED.iter().copied().chain(passed.iter().map(String::as_str));
    let mut all: Vec<(String, String)> =
        names.filter_map(|name| std::env::var(name).ok().map(|value| (name.into(), value))).collect();
    for (name, value) in &options.env {
        // Checked when the job was applied; by another version of the program, perhaps.
        check_variable(name, value).map_err(ShardError::permanent)?;
        all.push((name.clone(), value.clone()));
    }
    let mut put = |name: &str, value: String| all.push((format!("SHARDCRON_{name}"), value));
    put("JOB", context.job.clone());
    put("EXECUTION", attempt.execution.to_string());
    put("SHARD_INDEX", context.shard_index.to_string());
    put("SHARDS_TOTAL", context.shards_total.to_string());
    put("ATTEMPT", attempt.attempt.to_string());
    put("IDEMPOTENCY_KEY", context.idempotency_key());
    put("NOMINAL", rfc3339(context.nominal_ms));
    for (name, value) in of_slice(&context.slice) {
        put(name, value);
    }
    match &context.checkpoint {
        Some(Checkpoint::Number(number)) => put("CHECKPOINT", number.to_string()),
        Some(Checkpoint::Text(text)) => put("CHECKPOINT", text.clone()),
        None => {}
    }
    // What is too large for a variable is in the file only.
    let large = [
        ("SLICE", serde_json::to_string(&context.slice).unwrap_or_default()),
        ("PARAMS", serde_json::to_string(&context.params).unwrap_or_default()),
    ];
    for (name, value) in large.into_iter().filter(|(_, value)| value.len() <= VALUE_BYTES) {
        put(name, value);
    }
    all.push((MARK.into(), mark_of(context)));
    Ok(all)
}

/// Writes the file, for its owner alone. Dropped, it is deleted. For a shard that reduces, `results` is its last field: what the
/// sub-tasks came to, one a line, written page by page.
pub(super) async fn write_input(context: &ShardContext) -> Result<NamedTempFile, ShardError> {
    let unwritten = |error: std::io::Error| {
        let folder = std::env::temp_dir();
        ShardError::transient(format!("the program's input could not be written into {}: {error}", folder.display()))
    };
    let mut file = tempfile::Builder::new()
        .prefix(&format!("{FILE_BEGINNING}{}-", std::process::id()))
        .suffix(".json")
        .tempfile()
        .map_err(unwritten)?;
    let text = input::of(context).to_string();
    let mut results = match context.slice {
        ShardSlice::Reduce { .. } => Results::of(context, REDUCE_FILE_BYTES),
        _ => {
            file.write_all(text.as_bytes()).map_err(unwritten)?;
            return Ok(file);
        }
    };
    file.write_all(text.strip_suffix('}').unwrap_or(&text).as_bytes()).map_err(unwritten)?;
    file.write_all(b",\"results\":[").map_err(unwritten)?;
    while let Some(page) = results.page().await? {
        // A page may be some megabytes.
        let write = move || file.write_all(page.as_bytes()).map(|()| file);
        let written = tokio::task::spawn_blocking(write).await;
        file = written.unwrap_or_else(|e| Err(std::io::Error::other(e))).map_err(unwritten)?;
    }
    file.write_all(b"]}").map_err(unwritten)?;
    Ok(file)
}

/// Deletes the files of workers that were killed.
pub(super) fn sweep() {
    let Ok(files) = std::fs::read_dir(std::env::temp_dir()) else { return };
    for file in files.flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        let id =
            name.strip_prefix(FILE_BEGINNING).and_then(|rest| rest.split('-').next()).and_then(|id| id.parse().ok());
        let gone =
            |id: i32| nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), None) == Err(nix::errno::Errno::ESRCH);
        if id.is_some_and(gone) {
            let _ = std::fs::remove_file(file.path());
        }
    }
}
