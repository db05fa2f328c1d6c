//! Invariant S5 over a plan: its slices cover the data exactly. Asked before a plan that was made out of what somebody saw is frozen.

use super::{FilePart, PlannedFile, ShardPlan, ShardSlice};
use crate::invariants::{InvariantId, Violation};
use crate::slots::SLOTS;

fn broken(seen: impl Into<String>) -> Result<(), Violation> {
    Err(Violation { id: InvariantId::S5, seen: seen.into() })
}

/// S5 over the slices of a plan. Keys that are texts are compared for being different only, since their order is the database's.
///
/// # Errors
/// The first gap or overlap.
pub fn check_cover(plan: &ShardPlan) -> Result<(), Violation> {
    match plan {
        ShardPlan::Cuts { of, .. } | ShardPlan::Picked { of, .. } if of.is_later() => {
            broken("it is cut out of no plan")
        }
        ShardPlan::Cuts { of, .. } => runs(plan, ends(of)),
        ShardPlan::Range { .. } | ShardPlan::Slots { .. } => runs(plan, ends(plan)),
        ShardPlan::Items { items, .. } => whole_items(plan, items),
        ShardPlan::Keys { starts } => match starts.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => broken(format!("two shards begin at '{}'", pair[0])),
            None => Ok(()),
        },
        ShardPlan::Files { files, parts, .. } => whole_files(files, parts),
        ShardPlan::Later => broken("there is no plan"),
        // Their slices are what they are by their definition.
        ShardPlan::Modulo { .. }
        | ShardPlan::List { .. }
        | ShardPlan::Broadcast { .. }
        | ShardPlan::Map { .. }
        | ShardPlan::Picked { .. } => Ok(()),
    }
}

fn ends(plan: &ShardPlan) -> (i128, i128) {
    match plan {
        ShardPlan::Range { from, to, .. } => (i128::from(*from), i128::from(*to)),
        _ => (0, i128::from(SLOTS) - 1),
    }
}

fn runs(plan: &ShardPlan, (first, last): (i128, i128)) -> Result<(), Violation> {
    let mut next = first;
    for index in 0..plan.count() {
        let (from, to) = match plan.slice(index) {
            Some(ShardSlice::Range { from, to }) => (i128::from(from), i128::from(to)),
            Some(ShardSlice::Slots { from, to }) => (i128::from(from), i128::from(to)),
            _ => return broken(format!("shard {index} has no run of keys")),
        };
        if from != next || to < from {
            return broken(format!("shard {index} has {from} to {to}, and {next} is the next key"));
        }
        next = to + 1;
    }
    if next == last + 1 { Ok(()) } else { broken(format!("the shards end before {next}, and the data at {last}")) }
}

/// Bytes before the first record of a file without a header: none, or a byte order mark.
const MARK: u64 = 3;

fn whole_files(files: &[PlannedFile], parts: &[FilePart]) -> Result<(), Violation> {
    let mut reached: Vec<Option<u64>> = vec![None; files.len()];
    for FilePart { file: at, from, to } in parts {
        let Some((file, reached)) = files.get(*at as usize).zip(reached.get_mut(*at as usize)) else {
            return broken("a part of no file");
        };
        let follows = match *reached {
            Some(next) => *from == next,
            None => *from == file.header || (file.header == 0 && *from == MARK),
        };
        if !follows || to <= from {
            return broken(format!("bytes {from} to {to} of {} do not follow", file.path));
        }
        *reached = Some(*to);
    }
    let ends_early = |(file, reached): &(&PlannedFile, &Option<u64>)| match reached {
        Some(end) => *end != file.size,
        None => file.size > file.header.max(MARK),
    };
    match files.iter().zip(&reached).find(ends_early) {
        Some((file, _)) => broken(format!("the end of {} is in no shard", file.path)),
        None => Ok(()),
    }
}

fn whole_items(plan: &ShardPlan, items: &[String]) -> Result<(), Violation> {
    let mut left = items.iter();
    let mut open: Option<(String, u32, u32)> = None;
    for index in 0..plan.count() {
        match plan.slice(index) {
            Some(ShardSlice::List { items }) if open.is_none() => {
                if let Some(other) = items.iter().find(|item| left.next() != Some(*item)) {
                    return broken(format!("'{other}' is not the next item"));
                }
            }
            Some(ShardSlice::Part { item, part, parts }) => {
                let expected = match open.take() {
                    Some(expected) => expected,
                    None => (left.next().cloned().unwrap_or_default(), 0, parts),
                };
                if expected != (item.clone(), part, parts) {
                    return broken(format!("part {part} of {parts} of '{item}' does not follow"));
                }
                open = (part + 1 < parts).then_some((item, part + 1, parts));
            }
            _ => return broken(format!("shard {index} has no items")),
        }
    }
    match (left.next(), open) {
        (None, None) => Ok(()),
        _ => broken("items or parts of them are in no shard"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::ItemRun;
    use crate::record_ends::FileFormat;

    #[test]
    fn s5_gaps_and_overlaps_are_seen() {
        let range = || Box::new(ShardPlan::Range { from: -5, to: 94, count: 1 });
        assert!(check_cover(&range()).is_ok());
        assert!(check_cover(&ShardPlan::Cuts { of: range(), starts: vec![0, 10, 99] }).is_ok());
        for starts in [vec![], vec![1, 10], vec![0, 10, 10], vec![0, 100]] {
            assert!(check_cover(&ShardPlan::Cuts { of: range(), starts: starts.clone() }).is_err(), "{starts:?}");
        }
        let items = || vec!["a".to_owned(), "b".into(), "c".into()];
        let (a, part) = (ItemRun::Whole { from: 0, to: 1 }, |part| ItemRun::Part { item: 1, part, parts: 2 });
        let c = ItemRun::Whole { from: 2, to: 3 };
        assert!(check_cover(&ShardPlan::Items { items: items(), runs: vec![a, part(0), part(1), c] }).is_ok());
        for runs in [vec![a, part(0), c], vec![a, part(1), part(0), c], vec![a, c], vec![a, part(0), part(1)]] {
            assert!(check_cover(&ShardPlan::Items { items: items(), runs: runs.clone() }).is_err(), "{runs:?}");
        }
        let file = PlannedFile { path: "f".into(), size: 30, modified_ms: 0, header: 5 };
        let files = |runs: &[(u64, u64)]| ShardPlan::Files {
            files: vec![file.clone()],
            format: FileFormat::Lines,
            parts: runs.iter().map(|(from, to)| FilePart { file: 0, from: *from, to: *to }).collect(),
        };
        assert!(check_cover(&files(&[(5, 9), (9, 30)])).is_ok());
        for runs in [&[(5, 9), (10, 30)][..], &[(5, 9), (8, 30)], &[(5, 9)], &[(4, 30)]] {
            assert!(check_cover(&files(runs)).is_err(), "{runs:?}");
        }
        assert!(check_cover(&ShardPlan::Keys { starts: vec!["a".into(), "a".into()] }).is_err());
    }
}
