//! Sharding plans: which slice of the data a shard has.
//!
//! A plan is frozen into the execution when it fires. A slice is a function of (plan, index), so rows and messages carry no
//! data and the plan can't change under a checkpoint (case C-06). Invariant S5: the slices cover the data exactly.

use crate::job::{RangeSpec, ShardsSpec, SpecError};
use crate::limits::{SHARDS_LIST_BYTES, SHARDS_MAX};
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
}

fn fault(key: &str, message: impl Into<String>) -> SpecError {
    SpecError { key: key.into(), message: message.into() }
}

impl ShardPlan {
    /// The plan that a specification asks for.
    ///
    /// # Errors
    /// Contradictions, empty data and counts out of bounds, with the key below `shards`.
    pub fn from_spec(spec: &ShardsSpec) -> Result<Self, SpecError> {
        let kinds = [spec.range.is_some(), spec.modulo.is_some(), spec.list.is_some()];
        if kinds.iter().filter(|k| **k).count() > 1 {
            return Err(fault("", "only one of range, modulo and list is possible"));
        }
        if spec.size.is_some() && spec.range.is_none() {
            return Err(fault(".size", "'size' belongs to a range; use count"));
        }
        let plan = match (&spec.range, spec.modulo, &spec.list) {
            (Some(range), _, _) => Self::range(*range, spec.count, spec.size)?,
            (_, Some(total), _) => {
                if spec.count.is_some_and(|count| count != total) {
                    return Err(fault(".count", "modulo already says how many shards there are"));
                }
                ShardPlan::Modulo { total }
            }
            (_, _, Some(items)) => {
                if items.is_empty() {
                    return Err(fault(".list", "the list is empty; nothing would run"));
                }
                let bytes = serde_json::to_vec(items).map_or(usize::MAX, |text| text.len());
                if bytes > SHARDS_LIST_BYTES {
                    return Err(fault(
                        ".list",
                        format!(
                            "the list has {bytes} bytes as JSON; {SHARDS_LIST_BYTES} are the most. Put the items into a table and cut \
                             its keys with range or modulo"
                        ),
                    ));
                }
                let most = u32::try_from(items.len()).unwrap_or(u32::MAX);
                let count = spec.count.unwrap_or(most);
                if count > most {
                    return Err(fault(".count", format!("{count} shards for {most} items would leave some empty")));
                }
                ShardPlan::List { items: items.clone(), count }
            }
            (None, None, None) => ShardPlan::Modulo { total: spec.count.unwrap_or(1) },
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

    /// How many shards.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            ShardPlan::Range { count, .. } | ShardPlan::List { count, .. } => *count,
            ShardPlan::Modulo { total } => *total,
            ShardPlan::Picked { shards, .. } => u32::try_from(shards.len()).unwrap_or(u32::MAX),
        }
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

    /// The slice of shard `index`; `None` beyond the last shard.
    #[must_use]
    pub fn slice(&self, index: u32) -> Option<ShardSlice> {
        if index >= self.count() {
            return None;
        }
        Some(match self {
            ShardPlan::Range { from, to, count } => {
                let length = to.abs_diff(*from) + 1;
                let (start, end) = cut(length, *count, index);
                // start and end are within the range, so the sums are within i64; wrapping adds a u64 offset to an i64 exactly.
                ShardSlice::Range { from: from.wrapping_add_unsigned(start), to: from.wrapping_add_unsigned(end - 1) }
            }
            ShardPlan::Modulo { total } => ShardSlice::Modulo { total: *total, item: index },
            ShardPlan::List { items, count } => {
                let (start, end) = cut(items.len() as u64, *count, index);
                ShardSlice::List { items: items[start as usize..end as usize].to_vec() }
            }
            ShardPlan::Picked { of, shards } => return of.slice(*shards.get(index as usize)?),
        })
    }
}

/// The half-open run of part `index` when `length` records are cut into `count` parts that differ by one at most.
fn cut(length: u64, count: u32, index: u32) -> (u64, u64) {
    let (count, index) = (u64::from(count), u64::from(index));
    let (base, longer) = (length / count, length % count);
    let start = index * base + index.min(longer);
    (start, start + base + u64::from(index < longer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_worked_example_of_ten_shards() {
        let plan = ShardPlan::Range { from: 1, to: 100_000, count: 10 };
        assert_eq!(plan.slice(0), Some(ShardSlice::Range { from: 1, to: 10_000 }));
        assert_eq!(plan.slice(9), Some(ShardSlice::Range { from: 90_001, to: 100_000 }));
        assert_eq!(plan.slice(10), None);
    }

    #[test]
    fn wrong_specifications_say_what_would_be_right() {
        let spec = |s: ShardsSpec| ShardPlan::from_spec(&s).map_err(|e| e.to_string());
        let range = Some(RangeSpec { from: 1, to: 10 });
        assert!(spec(ShardsSpec { range, count: Some(11), ..Default::default() }).is_err());
        assert!(spec(ShardsSpec { range, count: Some(0), ..Default::default() }).is_err());
        assert!(spec(ShardsSpec { range, size: Some(0), ..Default::default() }).is_err());
        assert!(spec(ShardsSpec { range, modulo: Some(2), ..Default::default() }).is_err());
        assert!(spec(ShardsSpec { modulo: Some(SHARDS_MAX + 1), ..Default::default() }).is_err());
        assert_eq!(spec(ShardsSpec::default()), Ok(ShardPlan::Modulo { total: 1 }));
        assert_eq!(
            spec(ShardsSpec { range, size: Some(3), ..Default::default() }),
            Ok(ShardPlan::Range { from: 1, to: 10, count: 4 })
        );
    }

    #[test]
    fn a_list_is_bounded_by_its_json() {
        let of = |bytes: usize| {
            // The brackets and quotes of two items and the comma between them are seven bytes.
            let list = Some(vec!["x".repeat(bytes - 8), "y".into()]);
            ShardPlan::from_spec(&ShardsSpec { list, ..Default::default() })
        };
        assert_eq!(of(SHARDS_LIST_BYTES).map(|plan| plan.count()), Ok(2));
        let error = of(SHARDS_LIST_BYTES + 1).unwrap_err();
        assert_eq!(error.key, ".list");
        assert!(error.message.contains("262145 bytes") && error.message.contains("range or modulo"), "{error}");
    }

    proptest! {
        #[test]
        fn s5_a_range_is_covered_exactly(from in i64::MIN..i64::MAX, length in 1u64..2_000_000, count in 1u32..3_000) {
            prop_assume!(u64::from(count) <= length && from.checked_add_unsigned(length - 1).is_some());
            let to = from.wrapping_add_unsigned(length - 1);
            let plan = ShardPlan::Range { from, to, count };
            let mut next = Some(from);
            for index in 0..count {
                let Some(ShardSlice::Range { from: a, to: b }) = plan.slice(index) else { panic!("no slice {index}") };
                prop_assert_eq!(Some(a), next, "gap or overlap before shard {}", index);
                prop_assert!(b >= a);
                next = b.checked_add(1);
            }
            prop_assert_eq!(next, to.checked_add(1));
        }

        #[test]
        fn s5_a_list_is_covered_exactly(length in 1usize..300, count in 1u32..300) {
            prop_assume!(count as usize <= length);
            let items: Vec<String> = (0..length).map(|i| i.to_string()).collect();
            let plan = ShardPlan::List { items: items.clone(), count };
            let mut seen = Vec::new();
            for index in 0..count {
                let Some(ShardSlice::List { items }) = plan.slice(index) else { panic!("no slice {index}") };
                prop_assert!(!items.is_empty());
                seen.extend(items);
            }
            prop_assert_eq!(seen, items);
        }
    }
}
