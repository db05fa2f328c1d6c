//! What came of one way, what must hold of it, and how a person reads it.

use super::jobs::{Promise, Way};
use super::kills::{Kill, Killed};
use super::target::{Found, Keys, UNMATCHED};
use serde::Serialize;

/// What came of one way.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// Its name.
    pub way: Way,
    /// How often an effect may be there.
    pub promise: Promise,
    /// Workers that were killed.
    pub kills: u32,
    /// Of those, the ones that had a shard of this execution in hand.
    pub kills_hit: u32,
    /// Attempts that were taken over from the dead.
    pub taken_over: u64,
    /// Shards of the execution.
    pub shards: u64,
    /// Flights found, each counted once.
    pub rows: u64,
    /// Flights that were not found, and findings that are none.
    pub wrong: u64,
    /// Findings that were made again.
    pub duplicates: u64,
    /// Whether the sums by carrier are the published ones.
    pub by_carrier: bool,
    /// The most keys that a program or a service saw for one shard.
    /// Absent (null) where no key is shown to anybody.
    pub keys_per_shard_max: Option<u64>,
    /// The most attempts that it saw of one shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts_per_shard_max: Option<u64>,
    /// Programs that ran, or requests that were open, when the execution had ended: the count waited for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_at_end: Option<u64>,
    /// Rows of records that were to be worked on once, at the end.
    pub dedup_rows_left: u64,
    /// Shards without a recorded end.
    pub lost: u64,
    /// Shards with more than one.
    pub recorded_twice: u64,
    /// From the trigger to the end.
    pub seconds: f64,
    /// Each kill: as it was drawn from the seed, and what it met.
    pub plan: Vec<Killed>,
    /// What is not as it must be, in words.
    pub faults: Vec<String>,
    /// Whether there is no such thing.
    pub ok: bool,
}

impl Answer {
    /// Nothing known yet.
    pub fn new(way: Way) -> Self {
        Answer {
            way,
            promise: way.promise(),
            kills: 0,
            kills_hit: 0,
            taken_over: 0,
            shards: 0,
            rows: 0,
            wrong: 0,
            duplicates: 0,
            by_carrier: false,
            keys_per_shard_max: None,
            attempts_per_shard_max: None,
            open_at_end: None,
            dedup_rows_left: 0,
            lost: 0,
            recorded_twice: 0,
            seconds: 0.0,
            plan: Vec::new(),
            faults: Vec::new(),
            ok: false,
        }
    }

    /// Takes what the kills met.
    pub fn killed(&mut self, kills: Vec<Killed>) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        self.kills = count(kills.len());
        self.kills_hit = count(kills.iter().filter(|kill| kill.held > 0).count());
        self.plan = kills;
    }

    /// Takes what was counted in the target.
    pub fn found(&mut self, found: Found) {
        (self.rows, self.wrong, self.duplicates) = (found.rows, found.wrong, found.duplicates);
        self.by_carrier = found.by_carrier;
    }

    /// Notes what must hold of every way, and of those that promise "once", and does not. `ended`: whether it came to its own end; what
    /// was cancelled has found what it has found.
    pub fn judge(&mut self, planned: &[Kill], ended: bool) {
        let (kills, hit) = (self.kills, self.kills_hit);
        let always = [
            (self.lost == 0, format!("{} shards have no recorded end", self.lost)),
            (self.recorded_twice == 0, format!("{} shards were recorded twice", self.recorded_twice)),
            (
                self.promise == Promise::AtLeastOnce || self.duplicates == 0,
                format!("{} findings were made again, where once is promised", self.duplicates),
            ),
        ];
        let at_its_end = [
            (self.rows == UNMATCHED && self.wrong == 0, format!("{} flights found, {} wrong", self.rows, self.wrong)),
            (self.by_carrier, "the sums by carrier are not the published ones".into()),
            (
                kills as usize == planned.len(),
                format!("{kills} of {} kills came: the work ended before", planned.len()),
            ),
            (hit * 2 >= kills, format!("{hit} of {kills} killed workers had work in hand: too few to show anything")),
            (self.taken_over > 0, "nothing was taken over from the dead".into()),
            (self.dedup_rows_left == 0, format!("{} rows of records were left", self.dedup_rows_left)),
        ];
        let must = always.into_iter().chain(at_its_end.into_iter().filter(|_| ended));
        self.faults.extend(must.filter(|(holds, _)| !holds).map(|(_, fault)| fault));
    }

    /// Takes under which keys a program or a service was asked. Notes if a shard had several, or two the same; and of an execution with
    /// so many shards that came to its end, if one was not asked for, or none more than once: then nothing was shown.
    pub fn keys(&mut self, keys: Keys, shards: Option<u64>) {
        (self.keys_per_shard_max, self.attempts_per_shard_max) = (Some(keys.most), Some(keys.attempts));
        let own = keys.most <= 1 && keys.keys == keys.shards;
        if !own || shards.is_some_and(|shards| keys.shards != shards || keys.attempts < 2) {
            self.faults.push(format!("shards, and keys that they were asked for by: {keys:?}"));
        }
    }
}

/// For a person.
pub fn print(answers: &[Answer], seed: u64) {
    println!("reconcile-flights in {} ways, seed {seed}; the published answer: {UNMATCHED} flights", answers.len());
    println!(
        "{:<17}{:<15}{:>5}  {:>8}  {:>10}  {:>7}  {:>5}  {:>10}  {:>14}  {:>7}",
        "way", "promise", "kills", "hit work", "taken over", "rows", "wrong", "duplicates", "keys per shard", "seconds"
    );
    for answer in answers {
        let keys = answer.keys_per_shard_max.map_or_else(|| "-".to_owned(), |keys| keys.to_string());
        println!(
            "{:<17}{:<15}{:>5}  {:>8}  {:>10}  {:>7}  {:>5}  {:>10}  {keys:>14}  {:>7.1}  {}",
            answer.way.name(),
            answer.promise.words(),
            answer.kills,
            answer.kills_hit,
            answer.taken_over,
            answer.rows,
            answer.wrong,
            answer.duplicates,
            answer.seconds,
            if answer.ok { "ok" } else { "NOT OK" }
        );
    }
    for answer in answers.iter().filter(|answer| !answer.ok) {
        for fault in &answer.faults {
            println!("{}: {fault}", answer.way.name());
        }
        println!("{}: {answer:?}", answer.way.name());
    }
}
