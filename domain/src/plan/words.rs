//! Plans and slices as people read them.

use super::{ShardPlan, ShardSlice};
use std::fmt;

/// Characters of a list of items or of a payload that are shown.
const SHOWN: usize = 60;

fn short(text: &str) -> String {
    if text.chars().count() <= SHOWN {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain(['…']).collect()
}

impl fmt::Display for ShardSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardSlice::Range { from, to } => write!(f, "{from} to {to}"),
            ShardSlice::Modulo { total, item } => write!(f, "key % {total} = {item}"),
            ShardSlice::List { items } => f.write_str(&short(&items.join(", "))),
            ShardSlice::Part { item, part, parts } => write!(f, "{}, key % {parts} = {part}", short(item)),
            ShardSlice::Slots { from, to } => write!(f, "slots {from} to {to}"),
            ShardSlice::Keys { from, before: Some(before) } => {
                write!(f, "from '{}' to below '{}'", short(from), short(before))
            }
            ShardSlice::Keys { from, before: None } => write!(f, "from '{}' on", short(from)),
            ShardSlice::File { file, from, to, .. } => write!(f, "{} bytes {from} to {to}", file.path),
            ShardSlice::Worker { worker } => write!(f, "worker {}", worker.name),
            ShardSlice::Map { .. } => f.write_str("emits the others"),
            ShardSlice::Task { payload, .. } => f.write_str(&short(&payload.to_string())),
            ShardSlice::Reduce { tasks } => write!(f, "reduces the results of {tasks}"),
        }
    }
}

impl fmt::Display for ShardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardPlan::Range { from, to, count } => write!(f, "{from} to {to} in {count} equal shards"),
            ShardPlan::Modulo { total } => write!(f, "keys modulo {total}"),
            ShardPlan::List { items, count } => write!(f, "{} items in {count} shards", items.len()),
            ShardPlan::Slots { count } => write!(f, "1024 slots in {count} shards"),
            ShardPlan::Cuts { of, starts } => match of.as_ref() {
                ShardPlan::Range { from, to, .. } => {
                    write!(f, "{from} to {to} in {} shards, cut by rows or durations", starts.len())
                }
                _ => write!(f, "1024 slots in {} shards, cut by the last durations", starts.len()),
            },
            ShardPlan::Items { items, runs } => {
                write!(f, "{} items in {} shards, cut by the last durations", items.len(), runs.len())
            }
            ShardPlan::Keys { starts } => write!(f, "texts in {} shards, cut by rows", starts.len()),
            ShardPlan::Files { files, parts, .. } => {
                write!(
                    f,
                    "{} in {} shards",
                    if files.len() == 1 { "a file".into() } else { format!("{} files", files.len()) },
                    parts.len()
                )
            }
            ShardPlan::Broadcast { workers } => write!(f, "one for each of {} workers", workers.len()),
            ShardPlan::Map { reduce: true, max } => {
                write!(f, "the first emits up to {max} others, the last reduces their results")
            }
            ShardPlan::Map { reduce: false, max } => write!(f, "the first emits up to {max} others"),
            ShardPlan::Later => f.write_str("planned when it fires, from what is there then"),
            ShardPlan::Picked { of, shards } => write!(f, "{} picked out of: {of}", shards.len()),
        }
    }
}
