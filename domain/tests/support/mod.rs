//! Random patterns for the tests of schedules. Every failure prints the seed; `SHARDCRON_SEED` runs it again.

#![allow(dead_code, clippy::unwrap_used)]

use std::fmt;

/// SplitMix64.
pub struct Random {
    seed: u64,
    state: u64,
}

impl fmt::Display for Random {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SHARDCRON_SEED={}", self.seed)
    }
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Random { seed, state: seed }
    }

    pub fn from_env() -> Self {
        Self::new(std::env::var("SHARDCRON_SEED").map_or(2_026, |s| s.parse().unwrap()))
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Both ends included.
    pub fn between(&mut self, from: i64, to: i64) -> i64 {
        from + self.below((to - from + 1) as u64) as i64
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

/// A field of values from `min` to `max`; `star`: how often in ten it is `*` alone.
pub fn field(random: &mut Random, (min, max): (i64, i64), star: u64) -> String {
    if random.below(10) < star {
        return "*".into();
    }
    let range = |random: &mut Random| {
        let from = random.between(min, max);
        (from, random.between(from, max))
    };
    let item = |random: &mut Random| match random.below(6) {
        0 => {
            let (from, to) = range(random);
            format!("{from}-{to}")
        }
        1 => {
            let (from, to) = range(random);
            format!("{from}-{to}/{}", random.between(1, max / 3 + 1))
        }
        _ => random.between(min, max).to_string(),
    };
    match random.below(4) {
        0 => format!("*/{}", random.between(2, max / 2)),
        1 => format!("{},{}", item(random), item(random)),
        _ => item(random),
    }
}

/// The three date fields: day of the month, month, weekday.
pub fn date_fields(random: &mut Random) -> String {
    let day = match random.below(12) {
        0 => "L".into(),
        1 => "LW".into(),
        2 => format!("{}W", random.between(1, 31)),
        3 => format!("{},L", random.between(1, 31)),
        _ => field(random, (1, 31), 6),
    };
    let weekday = match random.below(12) {
        0 => format!("{}#{}", random.between(0, 7), random.between(1, 5)),
        1 => format!("{}L", random.between(0, 7)),
        2 => (*random.pick(&["MON-FRI", "sat", "FRI-SUN", "SUN", "1#2,3#1", "5-7"])).into(),
        _ => field(random, (0, 7), 6),
    };
    let and = if day != "*" && weekday != "*" && random.below(4) == 0 { "+" } else { "" };
    format!("{day} {} {and}{weekday}", field(random, (1, 12), 7))
}

/// A whole pattern of five or six fields.
pub fn pattern(random: &mut Random) -> String {
    let seconds = if random.below(3) == 0 { field(random, (0, 59), 2) + " " } else { String::new() };
    let (minutes, hours) = (field(random, (0, 59), 2), field(random, (0, 23), 3));
    format!("{seconds}{minutes} {hours} {}", date_fields(random))
}
