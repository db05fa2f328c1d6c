//! Sharding plans: which slice of the data a shard has.
//!
//! A plan is frozen into the execution when it fires. A slice is a function of (plan, index), so rows and messages carry no
//! data and the plan can't change under a checkpoint (case C-06). Invariant S5: the slices cover the data exactly.

use crate::balance::ItemRun;
use crate::job::{RangeSpec, ShardsSpec, SpecError};
use crate::limits::SHARDS_MAX;
use crate::record_ends::FileFormat;
use crate::slots::SLOTS;
use serde::{Deserialize, Serialize};

/// How an execution is cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardPlan {
    /// `from..=to` in `count` runs whose lengths differ by one at most; the longer ones first.
    Range {
        /// First key.
        from: i64,
        /// Last key.
        to: i64,
        /// Number of shards.
        count: u32,
    },
    /// Keys by their remainder.
    Modulo {
        /// Number of shards, and the modulus.
        total: u32,
    },
    /// Named items in `count` runs.
    List {
        /// All items, in their order.
        items: Vec<String>,
        /// Number of shards.
        count: u32,
    },
    /// The virtual slots in `count` runs.
    Slots {
        /// Number of shards.
        count: u32,
    },
    /// A range or slots, cut at other places than equal ones.
    Cuts {
        /// What is cut; a range or slots.
        of: Box<ShardPlan>,
        /// Where each shard begins, as an offset from the first key; the first 0, ascending.
        starts: Vec<u64>,
    },
    /// Items of a list, some of them perhaps in parts.
    Items {
        /// All items, in their order.
        items: Vec<String>,
        /// The shards.
        runs: Vec<ItemRun>,
    },
    /// Texts by their order in the database.
    Keys {
        /// The smallest key of each shard, ascending by the database's own order.
        starts: Vec<String>,
    },
    /// Runs of bytes of files.
    Files {
        /// The files as they were.
        files: Vec<PlannedFile>,
        /// What a record is.
        format: FileFormat,
        /// The shards.
        parts: Vec<FilePart>,
    },
    /// One shard for each of these workers.
    Broadcast {
        /// The workers that were there.
        workers: Vec<Addressee>,
    },
    /// The first shard emits the others. How many those are stands in the execution once it has ended well.
    Map {
        /// Whether the last shard reduces the others' results.
        reduce: bool,
        /// How many may be emitted.
        max: u32,
    },
    /// Not a plan yet: it is made when the job fires, from what is there then (`crate::planning`). Never in the ledger.
    Later,
    /// Some shards of another plan, as a trigger asked for. Their slices are those that they have there.
    Picked {
        /// The whole plan; never itself a picked one.
        of: Box<ShardPlan>,
        /// Positions in it, ascending.
        shards: Vec<u32>,
    },
}

/// The part of the data that one shard has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardSlice {
    /// Keys `from..=to`.
    Range {
        /// First key.
        from: i64,
        /// Last key.
        to: i64,
    },
    /// Keys with `key % total == item`.
    Modulo {
        /// The modulus.
        total: u32,
        /// The remainder.
        item: u32,
    },
    /// These items.
    List {
        /// In the order of the job's list.
        items: Vec<String>,
    },
    /// Those records of one item whose keys have this remainder.
    Part {
        /// The item.
        item: String,
        /// The remainder.
        part: u32,
        /// The modulus.
        parts: u32,
    },
    /// Keys whose slot is one of `from..=to`.
    Slots {
        /// The first slot.
        from: u32,
        /// The last slot.
        to: u32,
    },
    /// Texts from `from` on, in the database's order.
    Keys {
        /// The first.
        from: String,
        /// All are below this; the last shard goes on to the end.
        before: Option<String>,
    },
    /// A run of bytes of a file.
    File {
        /// Which, and how it was when the job fired.
        file: PlannedFile,
        /// What a record is.
        format: FileFormat,
        /// The first byte.
        from: u64,
        /// Behind the last byte.
        to: u64,
    },
    /// The worker that runs the shard is what it is about.
    Worker {
        /// The worker.
        worker: Addressee,
    },
    /// Emit the other shards.
    Map {
        /// How many may be emitted.
        max: u32,
    },
    /// What the first shard emitted.
    Task {
        /// Its number among the emitted, from 0.
        number: u32,
        /// As it was emitted.
        payload: serde_json::Value,
    },
    /// All emitted shards have ended well; their results are there to be read.
    Reduce {
        /// How many there were.
        tasks: u32,
    },
}

/// A file as it was when its job fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// Where it is.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// When it was changed last, milliseconds UTC by its disk.
    pub modified_ms: i64,
    /// Bytes of the header at its beginning, which belongs to no shard; 0 without one.
    #[serde(default)]
    pub header: u64,
}

impl PlannedFile {
    /// Whether it is still what was planned; else a sentence.
    ///
    /// # Errors
    /// Its size or its time is another.
    pub fn check(&self, size: u64, modified_ms: i64) -> Result<(), String> {
        if (self.size, self.modified_ms) == (size, modified_ms) {
            return Ok(());
        }
        Err(format!(
            "{} has changed since the job fired: it had {} bytes and was changed last at {}; now it has {size} bytes and {}. \
             The shards of this execution no longer fit it; fire the job again",
            self.path,
            self.size,
            crate::units::rfc3339(self.modified_ms),
            crate::units::rfc3339(modified_ms)
        ))
    }
}

/// A run of bytes of a planned file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// The file's position in the plan.
    pub file: u32,
    /// The first byte.
    pub from: u64,
    /// Behind the last byte.
    pub to: u64,
}

/// A worker that a shard is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addressee {
    /// Its name.
    pub name: String,
    /// Its process life: a worker that starts again is another one.
    pub incarnation: crate::Incarnation,
}

/// Before a tier's name: executions whose shards wait for their own workers and are in no queue. No tier's name begins with it.
pub const ADDRESSED: char = '@';

pub(crate) fn fault(key: &str, message: impl Into<String>) -> SpecError {
    SpecError { key: key.into(), message: message.into() }
}

mod cover;
mod kinds;
mod words;

pub use cover::check_cover;

impl ShardPlan {
    /// The plan that a specification asks for; [`ShardPlan::Later`] for one that is made when the job fires.
    ///
    /// # Errors
    /// Contradictions, empty data and counts out of bounds, with the key below `shards`.
    pub fn from_spec(spec: &ShardsSpec) -> Result<Self, SpecError> {
        kinds::check(spec)?;
        let plan = match (&spec.range, spec.modulo, &spec.list) {
            (Some(range), _, _) => Self::range(*range, spec.count, spec.size)?,
            (_, Some(total), _) => ShardPlan::Modulo { total },
            (_, _, Some(items)) => kinds::list(items, spec.count, spec.split)?,
            (None, None, None) => match (spec.slots, &spec.map) {
                (Some(count), _) => ShardPlan::Slots { count },
                (_, Some(map)) => ShardPlan::Map { reduce: map.reduce, max: map.max },
                _ if spec.file.is_some() || spec.query.is_some() || spec.broadcast => return Ok(ShardPlan::Later),
                _ => ShardPlan::Modulo { total: spec.count.unwrap_or(1) },
            },
        };
        match plan.count() {
            0 => Err(fault(".count", "0 shards would do nothing; 1 is the least")),
            n if n > SHARDS_MAX => {
                Err(fault(".count", format!("{n} shards; {SHARDS_MAX} is the most. Make each shard larger")))
            }
            _ => Ok(plan),
        }
    }

    fn range(range: RangeSpec, count: Option<u32>, size: Option<u64>) -> Result<Self, SpecError> {
        let RangeSpec { from, to } = range;
        if to < from {
            return Err(fault(".range.to", format!("to = {to} is below from = {from}")));
        }
        let length = to.abs_diff(from).checked_add(1).ok_or_else(|| fault(".range", "the range is too long"))?;
        let count = match (count, size) {
            (Some(_), Some(_)) => return Err(fault(".size", "give count or size, not both")),
            (Some(count), None) => count,
            (None, Some(0)) => return Err(fault(".size", "a shard of 0 records would never end; 1 is the least")),
            (None, Some(size)) => u32::try_from(length.div_ceil(size)).unwrap_or(u32::MAX),
            (None, None) => 1,
        };
        if u64::from(count) > length {
            return Err(fault(".count", format!("{count} shards for {length} keys would leave some empty")));
        }
        Ok(ShardPlan::Range { from, to, count })
    }

    /// How many shards an execution of it begins with.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            ShardPlan::Range { count, .. } | ShardPlan::List { count, .. } | ShardPlan::Slots { count } => *count,
            ShardPlan::Modulo { total } => *total,
            ShardPlan::Cuts { starts, .. } => number(starts.len()),
            ShardPlan::Items { runs, .. } => number(runs.len()),
            ShardPlan::Keys { starts } => number(starts.len()),
            ShardPlan::Files { parts, .. } => number(parts.len()),
            ShardPlan::Broadcast { workers } => number(workers.len()),
            ShardPlan::Map { .. } => 1,
            ShardPlan::Later => 0,
            ShardPlan::Picked { shards, .. } => number(shards.len()),
        }
    }

    /// Whether it is still to be made.
    #[must_use]
    pub fn is_later(&self) -> bool {
        matches!(self, ShardPlan::Later)
    }

    /// Where shard `index` of the execution stands among the shards that the data is cut into, and how many those are. The same
    /// as the index but where a trigger picked shards out.
    #[must_use]
    pub fn position(&self, index: u32) -> (u32, u32) {
        match self {
            ShardPlan::Picked { of, shards } => (shards.get(index as usize).copied().unwrap_or(index), of.count()),
            whole => (index, whole.count()),
        }
    }

    /// The slice of shard `index`; `None` beyond the last shard, and for the shards that another one emits, whose slices are in the
    /// ledger.
    #[must_use]
    pub fn slice(&self, index: u32) -> Option<ShardSlice> {
        if index >= self.count() {
            return None;
        }
        let at = index as usize;
        Some(match self {
            ShardPlan::Range { from, to, count } => {
                let length = to.abs_diff(*from) + 1;
                run_of(*from, cut(length, *count, index))
            }
            ShardPlan::Modulo { total } => ShardSlice::Modulo { total: *total, item: index },
            ShardPlan::List { items, count } => {
                let (start, end) = cut(items.len() as u64, *count, index);
                ShardSlice::List { items: items[start as usize..end as usize].to_vec() }
            }
            ShardPlan::Slots { count } => slots_of(cut(SLOTS.into(), *count, index)),
            ShardPlan::Cuts { of, starts } => {
                let run = (*starts.get(at)?, starts.get(at + 1).copied().or(of.units())?);
                match of.as_ref() {
                    ShardPlan::Range { from, .. } => run_of(*from, run),
                    ShardPlan::Slots { .. } => slots_of(run),
                    _ => return None,
                }
            }
            ShardPlan::Items { items, runs } => match runs.get(at)? {
                ItemRun::Whole { from, to } => {
                    ShardSlice::List { items: items.get(*from as usize..*to as usize)?.to_vec() }
                }
                ItemRun::Part { item, part, parts } => {
                    ShardSlice::Part { item: items.get(*item as usize)?.clone(), part: *part, parts: *parts }
                }
            },
            ShardPlan::Keys { starts } => {
                ShardSlice::Keys { from: starts.get(at)?.clone(), before: starts.get(at + 1).cloned() }
            }
            ShardPlan::Files { files, format, parts } => {
                let part = parts.get(at)?;
                let file = files.get(part.file as usize)?.clone();
                ShardSlice::File { file, format: *format, from: part.from, to: part.to }
            }
            ShardPlan::Broadcast { workers } => ShardSlice::Worker { worker: workers.get(at)?.clone() },
            ShardPlan::Map { max, .. } => ShardSlice::Map { max: *max },
            ShardPlan::Later => return None,
            ShardPlan::Picked { of, shards } => return of.slice(*shards.get(at)?),
        })
    }

    /// How many keys or slots there are to cut, where that is a number.
    #[must_use]
    pub fn units(&self) -> Option<u64> {
        match self {
            ShardPlan::Range { from, to, .. } => to.abs_diff(*from).checked_add(1),
            ShardPlan::Slots { .. } => Some(SLOTS.into()),
            ShardPlan::List { items, .. } => Some(items.len() as u64),
            _ => None,
        }
    }

    /// Where its shards are handed out: the tier's own queue, or, marked, nowhere: each waits in the ledger for its own worker.
    #[must_use]
    pub fn handed_out_by(&self, tier: &str) -> String {
        match self {
            ShardPlan::Broadcast { .. } => format!("{ADDRESSED}{tier}"),
            _ => tier.to_owned(),
        }
    }

    /// The worker that alone may run shard `index`.
    #[must_use]
    pub fn addressee(&self, index: u32) -> Option<&Addressee> {
        match self {
            ShardPlan::Broadcast { workers } => workers.get(index as usize),
            _ => None,
        }
    }
}

fn number(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// The keys of a half-open run of offsets. They are within the range, so the sums are within i64; wrapping adds a u64 offset to an
/// i64 exactly.
fn run_of(first: i64, (start, end): (u64, u64)) -> ShardSlice {
    ShardSlice::Range { from: first.wrapping_add_unsigned(start), to: first.wrapping_add_unsigned(end - 1) }
}

/// The slots of a half-open run. There are fewer than a u32 holds.
fn slots_of((start, end): (u64, u64)) -> ShardSlice {
    let slot = |n: u64| u32::try_from(n).unwrap_or(SLOTS);
    ShardSlice::Slots { from: slot(start), to: slot(end.saturating_sub(1)) }
}

/// The half-open run of part `index` when `length` records are cut into `count` parts that differ by one at most.
fn cut(length: u64, count: u32, index: u32) -> (u64, u64) {
    let (count, index) = (u64::from(count), u64::from(index));
    let (base, longer) = (length / count, length % count);
    let start = index * base + index.min(longer);
    (start, start + base + u64::from(index < longer))
}

#[cfg(test)]
mod tests;
