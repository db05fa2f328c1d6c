//! Plans that are made when a job fires, out of what is there then: files, a table's keys, live workers, or the durations of the last
//! execution. The looking is done elsewhere; here is what becomes of what was seen. A plan once made is frozen into its execution
//! like any other (docs/decisions/0023).

use crate::balance::{Seen, cut_evenly, cut_items, predict};
use crate::firing::DecisionKind;
use crate::job::{HandlerSpec, JobSpec, SpecError};
use crate::limits::{CUTS_MAX, PLAN_BYTES};
use crate::plan::{Addressee, FilePart, PlannedFile, ShardPlan, ShardSlice, check_cover};
use crate::sharding::{FileFormat, ShardsSpec};
use std::collections::BTreeMap;

/// Why there is no plan. It is recorded as the firing's decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlan {
    /// What is recorded.
    pub kind: DecisionKind,
    /// In a sentence.
    pub reason: String,
}

impl NoPlan {
    /// It can't be made: something is missing or is not what the job says.
    pub fn invalid(reason: impl Into<String>) -> Self {
        NoPlan { kind: DecisionKind::InvalidPlan, reason: reason.into() }
    }

    /// There is nothing to cut.
    pub fn empty(reason: impl Into<String>) -> Self {
        NoPlan { kind: DecisionKind::SkippedEmpty, reason: reason.into() }
    }
}

/// Whether a plan is made (or made better) by looking at what is there when the job fires.
#[must_use]
pub fn looks(spec: &ShardsSpec, plan: &ShardPlan) -> bool {
    // Picked shards are those of the plan that their sender knows: the equal one.
    plan.is_later() || (spec.balance.is_some() && !matches!(plan, ShardPlan::Picked { .. }))
}

/// What does not fit between the shards and the rest of a job.
#[must_use]
pub fn faults(job: &JobSpec) -> Vec<SpecError> {
    let fault = |key: &str, message: &str| SpecError { key: key.into(), message: message.into() };
    let mut faults = Vec::new();
    if job.shards.map.is_some() && matches!(job.handler, HandlerSpec::Sql { .. }) {
        faults.push(fault(
            "shards.map",
            "the first shard emits the others, which an sql handler can't; use exec, http or rust, or shards = { query = … }",
        ));
    }
    if job.shards.file.is_some() && matches!(job.handler, HandlerSpec::Sql { .. }) {
        faults.push(fault("shards.file", "an sql handler reads tables and not files; use rust or exec"));
    }
    if job.shards.broadcast && job.tier.len() > 31 {
        faults.push(fault(
            "tier",
            "the tier of a job with shards = { broadcast = true } has a name of at most 31 characters",
        ));
    }
    faults
}

/// Where a table's keys are to be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyBounds {
    /// There are no rows.
    Empty,
    /// Whole numbers: the smallest, the largest, and the first of each shard but the first, ascending.
    Numbers {
        /// The smallest.
        first: i64,
        /// The largest.
        last: i64,
        /// Where further shards begin.
        starts: Vec<i64>,
    },
    /// Texts: the first key of each shard, ascending as the database orders them.
    Texts {
        /// Where shards begin.
        starts: Vec<String>,
    },
}

/// The plan of a query.
///
/// # Errors
/// No rows.
pub fn of_keys(table: &str, bounds: KeyBounds) -> Result<ShardPlan, NoPlan> {
    match bounds {
        KeyBounds::Empty => Err(NoPlan::empty(format!("the query on {table} has no rows; there is nothing to do"))),
        KeyBounds::Texts { starts } => Ok(ShardPlan::Keys { starts }),
        KeyBounds::Numbers { first, last, starts } => {
            let offsets: Vec<u64> = std::iter::once(0).chain(starts.iter().map(|s| s.abs_diff(first))).collect();
            let count = u32::try_from(offsets.len()).unwrap_or(u32::MAX);
            let of = Box::new(ShardPlan::Range { from: first, to: last, count });
            Ok(ShardPlan::Cuts { of, starts: offsets })
        }
    }
}

/// The plan of files, each with the runs of bytes that it was cut into.
///
/// # Errors
/// They are all empty, or there are too many parts.
pub fn of_files(format: FileFormat, cut: Vec<(PlannedFile, Vec<(u64, u64)>)>) -> Result<ShardPlan, NoPlan> {
    let (mut files, mut parts) = (Vec::new(), Vec::new());
    let names = cut.len();
    for (file, runs) in cut {
        let at = u32::try_from(files.len()).unwrap_or(u32::MAX);
        let runs = runs.into_iter().filter(|(from, to)| from < to);
        parts.extend(runs.map(|(from, to)| FilePart { file: at, from, to }));
        files.push(file);
    }
    if parts.is_empty() {
        let which = if names == 1 { "the file holds".to_owned() } else { format!("the {names} files hold") };
        return Err(NoPlan::empty(format!("{which} no record; there is nothing to do")));
    }
    if parts.len() > CUTS_MAX as usize {
        let many = parts.len();
        return Err(NoPlan::invalid(format!("{many} shards of files; {CUTS_MAX} are the most. Make each larger")));
    }
    Ok(ShardPlan::Files { files, format, parts })
}

/// The plan of a broadcast.
///
/// # Errors
/// Nobody is there.
pub fn of_workers(tier: &str, mut workers: Vec<Addressee>) -> Result<ShardPlan, NoPlan> {
    workers.sort_by(|a, b| (&a.name, a.incarnation).cmp(&(&b.name, b.incarnation)));
    match workers.len() {
        0 => Err(NoPlan::invalid(format!("no worker of the tier '{tier}' is alive to send it to"))),
        n if n > CUTS_MAX as usize => Err(NoPlan::invalid(format!("{n} workers; {CUTS_MAX} are the most"))),
        _ => Ok(ShardPlan::Broadcast { workers }),
    }
}

/// Whether a plan that was made covers the data (S5) and is small enough to be kept.
///
/// # Errors
/// It is not.
pub fn bounded(plan: ShardPlan) -> Result<ShardPlan, NoPlan> {
    let bytes = serde_json::to_vec(&plan).map_or(usize::MAX, |text| text.len());
    if bytes > PLAN_BYTES {
        return Err(NoPlan::invalid(format!(
            "the plan has {bytes} bytes; {PLAN_BYTES} are the most. Use fewer shards"
        )));
    }
    check_cover(&plan)
        .map_err(|e| NoPlan::invalid(format!("the plan is wrong, which is a fault of this program: {e}")))?;
    Ok(plan)
}

/// An execution that ended well: its plan, and what each of its shards took in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRun {
    /// Its plan.
    pub plan: ShardPlan,
    /// By the shards' indexes.
    pub took_ms: BTreeMap<u32, u64>,
}

/// `plan` with its cuts where the last run says that the costs are equal, in `count` shards. The plan as it is, if that run was
/// cut by something else, or if there are too many shards to name each cut.
#[must_use]
pub fn balanced(plan: ShardPlan, spec: &ShardsSpec, last: &LastRun) -> ShardPlan {
    let of = match &plan {
        ShardPlan::Cuts { of, .. } => of.as_ref().clone(),
        other => other.clone(),
    };
    let count = match &spec.list {
        Some(items) => spec.count.unwrap_or(u32::try_from(items.len()).unwrap_or(u32::MAX)),
        None => spec.query.as_ref().map_or(plan.count(), |query| query.count),
    };
    if count > CUTS_MAX || last.plan.count() > CUTS_MAX || last.took_ms.is_empty() {
        return plan;
    }
    match &of {
        ShardPlan::Range { from, to, .. } => {
            let seen = seen(last, |slice| match slice {
                ShardSlice::Range { from, to } => Some((from, to)),
                _ => None,
            });
            cut_anew(plan, of.clone(), (&seen, *from, *to, count))
        }
        ShardPlan::Slots { .. } => {
            let seen = seen(last, |slice| match slice {
                ShardSlice::Slots { from, to } => Some((from.into(), to.into())),
                _ => None,
            });
            let last_slot = i64::from(crate::slots::SLOTS) - 1;
            cut_anew(plan, of.clone(), (&seen, 0, last_slot, count))
        }
        ShardPlan::List { items, .. } => match item_costs(last, items) {
            Some(costs) => ShardPlan::Items { items: items.clone(), runs: cut_items(&costs, count, spec.split) },
            None => plan,
        },
        _ => plan,
    }
}

fn seen(last: &LastRun, ends: impl Fn(ShardSlice) -> Option<(i64, i64)>) -> Vec<Seen> {
    let of = |(index, cost): (&u32, &u64)| {
        let (from, to) = ends(last.plan.slice(*index)?)?;
        Some(Seen { from, to, cost: *cost })
    };
    last.took_ms.iter().filter_map(of).collect()
}

fn cut_anew(plan: ShardPlan, of: ShardPlan, (seen, from, to, count): (&[Seen], i64, i64, u32)) -> ShardPlan {
    if seen.is_empty() {
        return plan;
    }
    let starts = cut_evenly(&predict(seen, from, to), count);
    ShardPlan::Cuts { of: Box::new(of), starts }
}

/// What each item took: its parts together, its share of a shard that had several; the mean where it was not there.
fn item_costs(last: &LastRun, items: &[String]) -> Option<Vec<u64>> {
    let mut costs: BTreeMap<String, u64> = BTreeMap::new();
    for (index, cost) in &last.took_ms {
        match last.plan.slice(*index)? {
            ShardSlice::List { items } => {
                let each = cost.div_ceil(items.len().max(1) as u64).max(1);
                items.into_iter().for_each(|item| *costs.entry(item).or_default() += each);
            }
            ShardSlice::Part { item, .. } => *costs.entry(item).or_default() += (*cost).max(1),
            _ => return None,
        }
    }
    let mean = costs.values().sum::<u64>().div_ceil(costs.len().max(1) as u64).max(1);
    Some(items.iter().map(|item| costs.get(item).copied().unwrap_or(mean)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::RangeSpec;
    use crate::sharding::{Balance, QuerySpec};
    use proptest::prelude::*;

    fn run(plan: ShardPlan, took: &[u64]) -> LastRun {
        LastRun { plan, took_ms: (0..).zip(took.iter().copied()).collect() }
    }

    #[test]
    fn a_query_over_numbers_is_a_range_with_cuts_of_its_own() {
        let plan = of_keys("t", KeyBounds::Numbers { first: -5, last: 99, starts: vec![7, 90] }).unwrap();
        let slices: Vec<_> = (0..plan.count()).filter_map(|i| plan.slice(i)).collect();
        let range = |from, to| ShardSlice::Range { from, to };
        assert_eq!(slices, vec![range(-5, 6), range(7, 89), range(90, 99)]);
        assert_eq!(of_keys("t", KeyBounds::Empty).unwrap_err().kind, DecisionKind::SkippedEmpty);
        let texts = of_keys("t", KeyBounds::Texts { starts: vec!["a".into(), "m".into()] }).unwrap();
        assert_eq!(texts.slice(0), Some(ShardSlice::Keys { from: "a".into(), before: Some("m".into()) }));
        assert_eq!(texts.slice(1), Some(ShardSlice::Keys { from: "m".into(), before: None }));
    }

    #[test]
    fn the_next_run_of_a_lopsided_range_is_even() {
        let spec = ShardsSpec {
            range: Some(RangeSpec { from: 1, to: 1_000 }),
            count: Some(4),
            balance: Some(Balance::Last),
            ..ShardsSpec::default()
        };
        let plan = ShardPlan::from_spec(&spec).unwrap();
        assert!(looks(&spec, &plan));
        let next = balanced(plan.clone(), &spec, &run(plan.clone(), &[100, 100, 100, 900]));
        assert_eq!(next.count(), 4);
        assert_eq!(next.slice(0), Some(ShardSlice::Range { from: 1, to: 750 }));
        assert_eq!(next.slice(1), Some(ShardSlice::Range { from: 751, to: 833 }));
        let of_a_list = run(ShardPlan::List { items: vec!["a".into()], count: 1 }, &[5]);
        assert_eq!(balanced(plan.clone(), &spec, &of_a_list), plan);
        let query = QuerySpec { table: "t".into(), key: "id".into(), filter: None, count: 8 };
        let spec = ShardsSpec { query: Some(query), balance: Some(Balance::Last), ..ShardsSpec::default() };
        assert_eq!(balanced(next.clone(), &spec, &run(next, &[1, 1, 1, 1])).count(), 8);
    }

    #[test]
    fn files_without_a_record_are_no_shards() {
        let file = |path: &str| PlannedFile { path: path.into(), size: 10, modified_ms: 1, header: 4 };
        let plan =
            of_files(FileFormat::Csv, vec![(file("a"), vec![(4, 4)]), (file("b"), vec![(4, 7), (7, 10)])]).unwrap();
        assert_eq!(plan.count(), 2);
        let Some(ShardSlice::File { file: b, from: 7, to: 10, .. }) = plan.slice(1) else { panic!("{plan:?}") };
        assert_eq!(b.path, "b");
        assert!(b.check(10, 1).is_ok() && b.check(10, 2).unwrap_err().contains("has changed"));
        assert!(of_files(FileFormat::Lines, vec![(file("a"), vec![(4, 4)])]).unwrap_err().reason.contains("no record"));
    }

    proptest! {
        #[test]
        fn s5_a_list_that_is_cut_anew_is_covered_exactly(
            took in prop::collection::vec(0u64..10_000, 1..20), count in 1u32..60, split in any::<bool>(),
        ) {
            let items: Vec<String> = (0..took.len()).map(|n| n.to_string()).collect();
            let count = if split { count } else { count.min(items.len() as u32) };
            let spec = ShardsSpec {
                list: Some(items.clone()), count: Some(count), split, balance: Some(Balance::Last), ..ShardsSpec::default()
            };
            let plan = ShardPlan::from_spec(&spec).unwrap();
            let mut of = run(ShardPlan::List { items: items.clone(), count: items.len() as u32 }, &took);
            // Twice, so that parts of items are seen, too.
            for _ in 0..2 {
                let next = balanced(plan.clone(), &spec, &of);
                prop_assert!(next.count() <= count);
                let mut whole = Vec::new();
                let mut open: Option<(String, u32, u32)> = None;
                for index in 0..next.count() {
                    match next.slice(index) {
                        Some(ShardSlice::List { items }) => {
                            prop_assert_eq!(&open, &None);
                            whole.extend(items);
                        }
                        Some(ShardSlice::Part { item, part, parts }) => {
                            let expected = open.take().unwrap_or((item.clone(), 0, parts));
                            prop_assert_eq!(&expected, &(item.clone(), part, parts));
                            if part + 1 == parts { whole.push(item) } else { open = Some((item, part + 1, parts)) }
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                prop_assert_eq!(&whole, &items);
                let costs: Vec<u64> = (0..u64::from(next.count())).collect();
                of = run(next, &costs);
            }
        }
    }
}
