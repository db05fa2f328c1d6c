//! What a job file says about its shards: `shards = { … }`.

pub use crate::record_ends::FileFormat;
use serde::{Deserialize, Serialize};

/// How a firing is cut into shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardsSpec {
    /// Whole numbers from..=to, cut into `count` shards or shards of `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<RangeSpec>,
    /// Each shard takes the records whose key modulo this is its index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modulo: Option<u32>,
    /// Named items, one shard each unless `count` groups them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list: Option<Vec<String>>,
    /// The 1,024 virtual slots of `crate::slots` in this many shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// One shard for each live worker of the tier, run by that worker.
    #[serde(default, skip_serializing_if = "is_false")]
    pub broadcast: bool,
    /// A file or several, cut at the ends of records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileSpec>,
    /// A table of the ledger's database, cut at quantiles of a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query: Option<QuerySpec>,
    /// The first shard says what the others are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<MapSpec>,
    /// How many shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// How many records in each shard (range only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Where the cuts are: at equal numbers of records, or where the last execution's durations say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<Balance>,
    /// Whether `balance` may cut an item of a list in parts, by the records' keys modulo the number of parts.
    #[serde(default, skip_serializing_if = "is_false")]
    pub split: bool,
    /// How many shards may travel in one message at most. Absent: as many as their durations allow (`crate::grouping`); 1: each alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

fn is_false(value: &bool) -> bool {
    !*value
}

/// The two ends of a range, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RangeSpec {
    /// The first key.
    pub from: i64,
    /// The last key.
    pub to: i64,
}

/// By what the cuts are balanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// The durations of the last execution that ended well.
    Last,
}

/// Files on a disk that the scheduler and the workers share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSpec {
    /// One file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// All files that a pattern such as `/data/in/*.csv` matches, in the order of their names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    /// How many shards over all files; each file with any content has at least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// How many bytes in each shard, about: a shard ends with the record that reaches them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// What a record is.
    #[serde(default)]
    pub format: FileFormat,
    /// What stands between the fields of `csv`: one ASCII character. Without it a comma, and a first record that has none, but has
    /// another usual delimiter, is refused: quotes would be read wrongly, and so would the ends of records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
    /// Whether the first record of each file is a header, which belongs to no shard.
    #[serde(default, skip_serializing_if = "is_false")]
    pub header: bool,
}

/// A table whose rows are cut by a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// The table, or `schema.table`.
    pub table: String,
    /// The column: whole numbers or text, best with an index.
    pub key: String,
    /// Which rows; all without it.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// How many shards; fewer if there are not as many different keys.
    pub count: u32,
}

/// Shards that the first shard emits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapSpec {
    /// Whether one more shard runs when all the others have ended well.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reduce: bool,
    /// How many shards may be emitted at most.
    #[serde(default = "map_max")]
    pub max: u32,
}

fn map_max() -> u32 {
    crate::limits::EMITTED_DEFAULT
}
