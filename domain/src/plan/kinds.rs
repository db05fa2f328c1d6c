//! What a specification may say of each kind of shards, and what contradicts itself.

use super::{ShardPlan, fault};
use crate::job::{ShardsSpec, SpecError};
use crate::limits::{CUTS_MAX, EMITTED_MAX, GROUP_MAX, SHARDS_LIST_BYTES};
use crate::sharding::{FileFormat, FileSpec, QuerySpec};
use crate::slots::SLOTS;

type Checked = Result<(), SpecError>;

/// Everything that is wrong whatever the data is.
pub(super) fn check(spec: &ShardsSpec) -> Checked {
    let kinds = [
        ("range", spec.range.is_some()),
        ("modulo", spec.modulo.is_some()),
        ("list", spec.list.is_some()),
        ("slots", spec.slots.is_some()),
        ("broadcast", spec.broadcast),
        ("file", spec.file.is_some()),
        ("query", spec.query.is_some()),
        ("map", spec.map.is_some()),
    ];
    let named: Vec<&str> = kinds.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    if named.len() > 1 {
        return Err(fault(
            "",
            format!(
                "{} are there; only one of range, modulo, list, slots, broadcast, file, query and map is possible",
                named.join(" and ")
            ),
        ));
    }
    if spec.size.is_some() && spec.range.is_none() {
        let hint =
            if spec.file.is_some() { "shards = { file = { path = \"…\", size = 1000000 } }" } else { "use count" };
        return Err(fault(".size", format!("'size' belongs to a range or into a file; {hint}")));
    }
    count_beside(spec, named.first().copied())?;
    if let Some(file) = &spec.file {
        file_spec(file)?;
    }
    if let Some(query) = &spec.query {
        query_spec(query)?;
    }
    if let Some(map) = spec.map
        && (map.max == 0 || map.max > EMITTED_MAX)
    {
        return Err(fault(".map.max", format!("{} emitted shards; 1 to {EMITTED_MAX} are possible", map.max)));
    }
    group(spec)?;
    balance(spec)
}

fn group(spec: &ShardsSpec) -> Checked {
    match spec.group {
        Some(0) => Err(fault(".group", "0 shards in a message would hand out nothing; 1 sends each shard alone")),
        Some(n) if n > GROUP_MAX => Err(fault(".group", format!("{n} shards in a message; {GROUP_MAX} are the most"))),
        Some(_) if spec.broadcast => {
            Err(fault(".group", "shards of a broadcast go to one worker each; take 'group' out"))
        }
        _ => Ok(()),
    }
}

/// Kinds that say themselves how many shards there are.
fn count_beside(spec: &ShardsSpec, kind: Option<&str>) -> Checked {
    let Some(count) = spec.count else { return slots(spec.slots) };
    match kind {
        Some("modulo") if spec.modulo != Some(count) => {
            Err(fault(".count", "modulo already says how many shards there are"))
        }
        Some("slots") if spec.slots != Some(count) => {
            Err(fault(".count", "slots already says how many shards there are"))
        }
        Some("broadcast") => Err(fault(".count", "a broadcast has one shard for each live worker; leave count out")),
        Some("map") => Err(fault(".count", "the first shard says how many there are; 'max' in map bounds them")),
        Some("file") => {
            Err(fault(".count", "put count into the file: shards = { file = { path = \"…\", count = 8 } }"))
        }
        Some("query") => Err(fault(
            ".count",
            "put count into the query: shards = { query = { table = \"…\", key = \"…\", count = 8 } }",
        )),
        _ => slots(spec.slots),
    }
}

fn slots(count: Option<u32>) -> Checked {
    match count {
        Some(0) => Err(fault(".slots", "0 shards would do nothing; 1 is the least")),
        Some(n) if n > SLOTS => {
            Err(fault(".slots", format!("{n} shards; there are {SLOTS} slots, and each shard needs one")))
        }
        _ => Ok(()),
    }
}

fn file_spec(file: &FileSpec) -> Checked {
    match (&file.path, &file.glob) {
        (Some(_), Some(_)) => return Err(fault(".file", "give path (one file) or glob (a pattern), not both")),
        (None, None) => {
            return Err(fault(".file", "which file? Give path = \"/data/in.csv\" or glob = \"/data/in/*.csv\""));
        }
        (Some(name), None) | (None, Some(name)) if name.is_empty() || name.contains('\0') => {
            return Err(fault(".file", "the file's name is empty or holds a NUL character"));
        }
        (Some(name), None) | (None, Some(name)) if !name.starts_with('/') => {
            let message =
                format!("'{name}' does not begin with '/'; the scheduler and the workers may run in different folders");
            return Err(fault(".file", message));
        }
        _ => {}
    }
    if let Some(delimiter) = file.delimiter {
        if file.format != FileFormat::Csv {
            return Err(fault(
                ".file.delimiter",
                "only rows of CSV have fields; give format = \"csv\", or leave it out",
            ));
        }
        if !delimiter.is_ascii() || matches!(delimiter, '"' | '\r' | '\n' | '\0') {
            let message =
                format!("'{}' can't stand between fields; usual are ',' ';' '|' and '\\t'", delimiter.escape_default());
            return Err(fault(".file.delimiter", message));
        }
    }
    match (file.count, file.size) {
        (Some(_), Some(_)) => Err(fault(".file.size", "give count or size, not both")),
        (Some(0), _) => Err(fault(".file.count", "0 shards would do nothing; 1 is the least")),
        (Some(n), _) if n > CUTS_MAX => {
            Err(fault(".file.count", format!("{n} shards of files; {CUTS_MAX} are the most")))
        }
        (_, Some(0)) => Err(fault(".file.size", "a shard of 0 bytes would never end; 1 is the least")),
        _ => Ok(()),
    }
}

/// A name that can stand in a statement as it is.
fn is_name(text: &str) -> bool {
    let first = text.chars().next();
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    text.len() <= 64 && text.chars().all(plain) && first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
}

fn query_spec(query: &QuerySpec) -> Checked {
    let parts: Vec<&str> = query.table.split('.').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_name(part)) {
        let message = format!(
            "'{}' is no table: letters, digits and '_', perhaps with a schema and a point before it",
            query.table
        );
        return Err(fault(".query.table", message));
    }
    if !is_name(&query.key) {
        return Err(fault(".query.key", format!("'{}' is no column: letters, digits and '_'", query.key)));
    }
    match &query.filter {
        Some(filter) if filter.trim().is_empty() => {
            return Err(fault(".query.where", "it is empty; leave it out for all rows"));
        }
        Some(filter) if filter.contains([';', '\0', ':', '?']) => {
            return Err(fault(
                ".query.where",
                "it is one condition without ';', and without parameters: which rows there are is the same for all shards",
            ));
        }
        _ => {}
    }
    match query.count {
        0 => Err(fault(".query.count", "0 shards would do nothing; 1 is the least")),
        n if n > CUTS_MAX => Err(fault(".query.count", format!("{n} shards of a query; {CUTS_MAX} are the most"))),
        _ => Ok(()),
    }
}

fn balance(spec: &ShardsSpec) -> Checked {
    if spec.balance.is_some()
        && spec.range.is_none()
        && spec.list.is_none()
        && spec.slots.is_none()
        && spec.query.is_none()
    {
        return Err(fault(
            ".balance",
            "\"last\" moves the cuts of a range, a list, slots or a query; here there are none to move",
        ));
    }
    if spec.split && (spec.list.is_none() || spec.balance.is_none()) {
        return Err(fault(".split", "'split' lets balance = \"last\" cut an item of a list in parts; it needs both"));
    }
    Ok(())
}

/// Named items.
pub(super) fn list(items: &[String], count: Option<u32>, split: bool) -> Result<ShardPlan, SpecError> {
    if items.is_empty() {
        return Err(fault(".list", "the list is empty; nothing would run"));
    }
    let bytes = serde_json::to_vec(items).map_or(usize::MAX, |text| text.len());
    if bytes > SHARDS_LIST_BYTES {
        return Err(fault(
            ".list",
            format!(
                "the list has {bytes} bytes as JSON; {SHARDS_LIST_BYTES} are the most. Put the items into a table and cut its keys \
                 with range or modulo"
            ),
        ));
    }
    let most = u32::try_from(items.len()).unwrap_or(u32::MAX);
    // Where items may be cut in parts there may be more shards than items, once their durations are known.
    let count = count.map_or(most, |count| if split { count.min(most) } else { count });
    if count > most {
        return Err(fault(".count", format!("{count} shards for {most} items would leave some empty")));
    }
    Ok(ShardPlan::List { items: items.to_vec(), count })
}
