//! Cuts at equal predicted cost: where the last execution's shards were, and how long they took, says what the next one's cost.
//!
//! Pure arithmetic on whole numbers, so that the same durations always give the same cuts. Costs are milliseconds; a shard that took
//! none counts as one, so that nothing is free.

/// A run of units (keys, slots) and what it is predicted to cost as a whole, evenly spread over its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Units; at least one.
    pub length: u64,
    /// Milliseconds; at least one.
    pub cost: u64,
}

/// A part of the last execution, in the place that its keys have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The first key.
    pub from: i64,
    /// The last key.
    pub to: i64,
    /// How long it took, milliseconds.
    pub cost: u64,
}

/// The predicted cost of the keys `from..=to`: that of the last execution where it had them, its mean per key where it had not.
/// `seen` is in ascending order and does not overlap.
#[must_use]
pub fn predict(seen: &[Seen], from: i64, to: i64) -> Vec<Segment> {
    let length = |a: i64, b: i64| u128::from(b.abs_diff(a)) + 1;
    let keys: u128 = seen.iter().map(|s| length(s.from, s.to)).sum();
    let cost: u128 = seen.iter().map(|s| u128::from(s.cost.max(1))).sum();
    let scaled = |whole: u128, part: u128, of: u128| {
        u64::try_from(whole.saturating_mul(part).div_ceil(of.max(1)).max(1)).unwrap_or(u64::MAX)
    };
    let mut segments = Vec::new();
    let mut push = |a: i64, b: i64, cost: u64| {
        // A range of all 2^64 keys has one key more than its length can say; nobody has that many records.
        let length = u64::try_from(length(a, b)).unwrap_or(u64::MAX);
        segments.push(Segment { length, cost });
    };
    let mut next = Some(from);
    for s in seen.iter().filter(|s| s.to >= from && s.from <= to) {
        let (a, b) = (s.from.max(from), s.to.min(to));
        let Some(reached) = next.filter(|reached| *reached <= a) else { continue };
        if reached < a {
            push(reached, a - 1, scaled(cost, length(reached, a - 1), keys));
        }
        push(a, b, scaled(u128::from(s.cost.max(1)), length(a, b), length(s.from, s.to)));
        next = b.checked_add(1);
    }
    if let Some(reached) = next.filter(|reached| *reached <= to) {
        push(reached, to, scaled(cost.max(1), length(reached, to), keys));
    }
    segments
}

/// Where each of `count` shards begins, as an offset in units, so that each is predicted to cost the same. As many as `count`, the
/// first 0, ascending, and each shard has a unit; fewer than `count` only if there are fewer units.
#[must_use]
pub fn cut_evenly(segments: &[Segment], count: u32) -> Vec<u64> {
    let units = segments.iter().fold(0_u64, |sum, s| sum.saturating_add(s.length));
    let total: u128 = segments.iter().map(|s| u128::from(s.cost)).sum();
    let count = u64::from(count).min(units);
    let mut starts = Vec::new();
    let (mut at, mut before, mut unit) = (0, 0_u128, 0_u64);
    for shard in 0..count {
        let target = total * u128::from(shard) / u128::from(count);
        while let Some(segment) = segments.get(at).filter(|s| before + u128::from(s.cost) <= target) {
            before += u128::from(segment.cost);
            unit += segment.length;
            at += 1;
        }
        let within = segments.get(at).map_or(0, |s| {
            let units = (target - before) * u128::from(s.length) / u128::from(s.cost.max(1));
            u64::try_from(units).unwrap_or(s.length)
        });
        let least = starts.last().map_or(0, |last| last + 1);
        // Every later shard needs a unit of its own.
        starts.push((unit + within).max(least).min(units - (count - shard)));
    }
    starts
}

/// A shard of a list: some whole items, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemRun {
    /// Items `from..to` by their positions.
    Whole {
        /// The first.
        from: u32,
        /// Behind the last.
        to: u32,
    },
    /// Those records of one item that are `part` by their key modulo `parts`.
    Part {
        /// The item's position.
        item: u32,
        /// From 0.
        part: u32,
        /// At least 2.
        parts: u32,
    },
}

/// Cuts a list into at most `count` shards whose longest is predicted as short as such cuts allow: neighbours together, and, where
/// `split`, an item that is longer than that in parts. `costs` are those of the items, in their order.
#[must_use]
pub fn cut_items(costs: &[u64], count: u32, split: bool) -> Vec<ItemRun> {
    let costs: Vec<u64> = costs.iter().map(|c| (*c).max(1)).collect();
    let longest = costs.iter().copied().max().unwrap_or(1);
    let total: u64 = costs.iter().fold(0, |sum, c| sum.saturating_add(*c));
    let count = (count as usize).max(if split { 1 } else { usize::from(!costs.is_empty()) });
    // The shortest bound that needs no more shards than there are: with a longer bound never more are needed.
    let (mut low, mut high) = (if split { 1 } else { longest }, total.max(1));
    while low < high {
        let middle = low + (high - low) / 2;
        if runs(&costs, middle, split, count).is_some() {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    runs(&costs, low, split, count).unwrap_or_default()
}

/// The shards of a bound; `None` if more than `most` are needed.
fn runs(costs: &[u64], bound: u64, split: bool, most: usize) -> Option<Vec<ItemRun>> {
    let mut runs = Vec::new();
    let (mut from, mut held) = (0_usize, 0_u64);
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let close = |runs: &mut Vec<ItemRun>, from: usize, to: usize| {
        if from < to {
            runs.push(ItemRun::Whole { from: number(from), to: number(to) });
        }
    };
    for (item, cost) in costs.iter().enumerate() {
        let parts = cost.div_ceil(bound);
        if split && parts > 1 {
            close(&mut runs, from, item);
            if parts > most as u64 {
                return None;
            }
            let parts = u32::try_from(parts).ok()?;
            runs.extend((0..parts).map(|part| ItemRun::Part { item: number(item), part, parts }));
            (from, held) = (item + 1, 0);
        } else if held.saturating_add(*cost) > bound {
            close(&mut runs, from, item);
            (from, held) = (item, *cost);
        } else {
            held += cost;
        }
        if runs.len() > most {
            return None;
        }
    }
    close(&mut runs, from, costs.len());
    (runs.len() <= most).then_some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the shards between these starts cost, by the segments' own densities.
    fn costs(segments: &[Segment], starts: &[u64]) -> Vec<f64> {
        let units: u64 = segments.iter().map(|s| s.length).sum();
        let upto = |unit: u64| {
            let (mut at, mut cost) = (0, 0.0);
            for s in segments {
                let taken = unit.saturating_sub(at).min(s.length);
                cost += taken as f64 * s.cost as f64 / s.length as f64;
                at += s.length;
            }
            cost
        };
        let ends = starts.iter().skip(1).copied().chain([units]);
        starts.iter().zip(ends).map(|(a, b)| upto(b) - upto(*a)).collect()
    }

    #[test]
    fn a_lopsided_range_is_cut_where_the_time_went() {
        // Ten shards of 100 keys; the last took as long as the nine others together.
        let mut segments = vec![Segment { length: 100, cost: 10 }; 9];
        segments.push(Segment { length: 100, cost: 90 });
        let starts = cut_evenly(&segments, 4);
        assert_eq!(starts, vec![0, 450, 900, 950]);
    }

    #[test]
    fn keys_that_were_not_there_cost_the_mean() {
        let seen = [Seen { from: 10, to: 19, cost: 100 }, Seen { from: 30, to: 39, cost: 300 }];
        let predicted = predict(&seen, 0, 44);
        let expected = [(10, 200), (10, 100), (10, 200), (10, 300), (5, 100)];
        assert_eq!(predicted, expected.map(|(length, cost)| Segment { length, cost }).to_vec());
        assert_eq!(predict(&seen, 32, 33), vec![Segment { length: 2, cost: 60 }]);
        assert_eq!(predict(&[], 1, 3), vec![Segment { length: 3, cost: 3 }]);
    }

    #[test]
    fn two_items_that_hold_nearly_all_are_split() {
        // The shares of the flights' carriers: one item exceeds the mean of sixteen shards seven times over.
        let costs = [1, 430, 1, 20, 10, 1, 480, 1, 10, 46];
        let runs = cut_items(&costs, 16, true);
        let longest = runs.iter().map(|run| predicted(&costs, run)).fold(0.0, f64::max);
        assert!(runs.len() <= 16 && longest / (1_000.0 / runs.len() as f64) < 1.2, "{longest} {runs:?}");
        let whole = cut_items(&costs, 16, false);
        assert!(whole.iter().all(|run| matches!(run, ItemRun::Whole { .. })));
    }

    fn predicted(costs: &[u64], run: &ItemRun) -> f64 {
        match run {
            ItemRun::Whole { from, to } => costs[*from as usize..*to as usize].iter().sum::<u64>() as f64,
            ItemRun::Part { item, parts, .. } => costs[*item as usize] as f64 / f64::from(*parts),
        }
    }

    proptest! {
        #[test]
        fn s5_equal_costs_cover_exactly_and_the_longest_is_bounded(
            pairs in prop::collection::vec((1u64..50_000, 1u64..100_000), 1..40), count in 1u32..300,
        ) {
            let segments: Vec<Segment> = pairs.iter().map(|(length, cost)| Segment { length: *length, cost: *cost }).collect();
            let units: u64 = segments.iter().map(|s| s.length).sum();
            let starts = cut_evenly(&segments, count);
            prop_assert_eq!(starts.len() as u64, u64::from(count).min(units));
            prop_assert_eq!(starts[0], 0);
            prop_assert!(starts.windows(2).all(|pair| pair[0] < pair[1]) && *starts.last().unwrap() < units);
            let costs = costs(&segments, &starts);
            let mean = costs.iter().sum::<f64>() / costs.len() as f64;
            let densest = segments.iter().map(|s| s.cost as f64 / s.length as f64).fold(0.0, f64::max);
            let longest = costs.iter().copied().fold(0.0, f64::max);
            // Nothing is finer than a unit, so one at each end may be on the wrong side; one for the rounding of the target.
            prop_assert!(longest <= mean + 2.0 * densest + 1.0, "{} against {} and {}", longest, mean, densest);
        }

        #[test]
        fn s5_a_prediction_covers_the_keys_exactly(
            widths in prop::collection::vec((1i64..500, 0i64..20, 0u64..5_000), 0..20), from in -100i64..5_000, length in 1i64..9_000,
        ) {
            let mut at = 0;
            let mut seen = Vec::new();
            for (width, gap, cost) in widths {
                at += gap;
                seen.push(Seen { from: at, to: at + width - 1, cost });
                at += width;
            }
            let predicted = predict(&seen, from, from + length - 1);
            prop_assert_eq!(predicted.iter().map(|s| s.length).sum::<u64>(), length as u64);
            prop_assert!(predicted.iter().all(|s| s.length > 0 && s.cost > 0));
        }

        #[test]
        fn s5_items_and_their_parts_are_covered_exactly(
            costs in prop::collection::vec(0u64..100_000, 1..60), count in 1u32..80, split in any::<bool>(),
        ) {
            let runs = cut_items(&costs, count, split);
            prop_assert!(runs.len() <= count as usize);
            let mut next = (0, 0);
            for run in &runs {
                match *run {
                    ItemRun::Whole { from, to } => {
                        prop_assert_eq!((from, 0), next);
                        prop_assert!(to > from);
                        next = (to, 0);
                    }
                    ItemRun::Part { item, part, parts } => {
                        prop_assert_eq!((item, part), next);
                        prop_assert!(split && parts > 1);
                        next = if part + 1 == parts { (item + 1, 0) } else { (item, part + 1) };
                    }
                }
            }
            prop_assert_eq!(next, (costs.len() as u32, 0));
            // No cut of this kind can be better than the mean, nor than the longest item where none is split; this one is at most
            // twice that, as neighbours are put together as long as they fit.
            let costs: Vec<u64> = costs.iter().map(|c| (*c).max(1)).collect();
            let longest = runs.iter().map(|run| predicted(&costs, run)).fold(0.0, f64::max);
            let mean = costs.iter().sum::<u64>() as f64 / f64::from(count);
            let least = if split { mean } else { mean.max(*costs.iter().max().unwrap() as f64) };
            let few = f64::from(count) < 2.0 * costs.len() as f64 && split;
            prop_assert!(few || longest <= 2.0 * least + 1.0, "{} against {}", longest, least);
        }
    }
}
