//! What the jobs of a cluster are, beyond ranges that are simply worked through: other shards, other tiers, and effects.

use crate::world::Dice;
use crate::world::plan::Job as Plain;
use shardcron_domain::job::{JobSpec, RangeSpec};
use shardcron_domain::plan::ShardSlice;
use shardcron_domain::schedule::Schedule;
use shardcron_domain::sharding::{Balance, MapSpec, ShardsSpec};

/// A kind of job. A seed has each of them or not, and half of the seeds have none: simple lives stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The first shard emits the others; perhaps one more reduces.
    Map,
    /// One shard for each live worker.
    Broadcast,
    /// Cut by the last run's durations.
    Balance,
    /// Named items.
    List,
    /// Remainders.
    Modulo,
    /// A second tier.
    Bulk,
    /// Effects in the ledger's database, in transactions with the checkpoint.
    Transactions,
    /// Effects elsewhere, each record once.
    Once,
}

pub(crate) const KINDS: [Kind; 8] =
    [Kind::Map, Kind::Broadcast, Kind::Balance, Kind::List, Kind::Modulo, Kind::Bulk, Kind::Transactions, Kind::Once];

/// What a handler does with its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Counts them, and moves checkpoints.
    Count,
    /// Writes a row for each, in transactions with the checkpoint.
    Transactions,
    /// Tells somebody outside of each, under records of its own.
    Once,
}

/// One job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) spec: JobSpec,
    pub(crate) schedule: Schedule,
    pub(crate) first_ms: i64,
    /// How long a handler takes, at most.
    pub(crate) work_ms: i64,
    pub(crate) work: Work,
}

/// Shards that a map emits at most, here.
const EMITTED: i64 = 6;

impl Job {
    pub(crate) fn draw(dice: &mut Dice, number: i64, kinds: &[Kind]) -> Option<Self> {
        let Plain { mut spec, schedule, first_ms, work_ms } = Plain::draw(dice, number)?;
        let mut work = Work::Count;
        let has = |kind| kinds.contains(&kind);
        let of_shards: Vec<Kind> = kinds.iter().copied().filter(|k| *k <= Kind::Modulo).collect();
        if !of_shards.is_empty() && dice.percent(70) {
            let count = dice.of(1, 6) as u32;
            let none = ShardsSpec::default();
            spec.shards = match of_shards[dice.index(of_shards.len())] {
                Kind::Map => ShardsSpec { map: Some(MapSpec { reduce: dice.percent(60), max: 20 }), ..none },
                Kind::Broadcast => ShardsSpec { broadcast: true, ..none },
                Kind::Balance => ShardsSpec { balance: Some(Balance::Last), ..spec.shards },
                Kind::List => {
                    let items = (0..dice.of(i64::from(count), 12)).map(|n| format!("item-{n}")).collect();
                    ShardsSpec { list: Some(items), count: Some(count), ..none }
                }
                _ => ShardsSpec { modulo: Some(count), ..none },
            };
        }
        if has(Kind::Bulk) && dice.percent(50) {
            spec.tier = "bulk".into();
        }
        match (has(Kind::Transactions), has(Kind::Once), dice.percent(50)) {
            (true, true, true) | (true, false, _) => work = Work::Transactions,
            (true, true, false) | (false, true, _) => work = Work::Once,
            (false, false, _) => {}
        }
        if let (Some(range), true) = (&mut spec.shards.range, work != Work::Count) {
            let count = i64::from(spec.shards.count.unwrap_or(1));
            *range = RangeSpec { from: 1, to: range.to.min(count * 6) };
        }
        Some(Job { spec, schedule, first_ms, work_ms, work })
    }

    pub(crate) fn shards_per_second(&self) -> f64 {
        let second = self.schedule.next_after(self.first_ms).ok().flatten().unwrap_or(i64::MAX);
        let period_s = second.saturating_sub(self.first_ms) as f64 / 1_000.0;
        let shards = &self.spec.shards;
        let count = match (&shards.map, shards.broadcast) {
            (Some(_), _) => EMITTED as u32 + 2,
            (_, true) => 3,
            _ => shards.modulo.or(shards.count).unwrap_or(1),
        };
        f64::from(count) / period_s
    }
}

/// How many shards an attempt at a map's first shard emits: each attempt another number, so that those of a dead one would be seen.
pub(crate) fn emitted(dice: &mut Dice) -> i64 {
    dice.of(0, EMITTED)
}

/// The records of a slice, in their order.
pub(crate) fn records(slice: &ShardSlice) -> Vec<i64> {
    match slice {
        ShardSlice::Range { from, to } => (*from..=*to).collect(),
        ShardSlice::Modulo { total, item } => {
            (0..24).filter(|n| n % i64::from((*total).max(1)) == i64::from(*item)).collect()
        }
        ShardSlice::List { items } => (0_i64..).zip(items).map(|(n, _)| n).collect(),
        ShardSlice::Map { .. } | ShardSlice::Reduce { .. } => Vec::new(),
        _ => (0..5).collect(),
    }
}
