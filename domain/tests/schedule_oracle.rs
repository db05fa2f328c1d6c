//! Schedules against a slow and simple oracle near changes of the clock, and the contract "strictly after" in 60 zones (S-05).
//!
//! The oracle shares nothing with the implementation but `chrono-tz`: it walks UTC minute by minute, reads the wall clock,
//! matches the fields with its own reader, and applies the rules of `schedule/mod.rs` by looking at what the wall clock has
//! shown and will show. `SHARDCRON_ORACLE_CASES` sets how many random triples of pattern, zone and instant are tried.

#![allow(clippy::unwrap_used)]

use chrono::{DateTime, Datelike, NaiveDate, Offset, TimeZone};
use chrono_tz::{TZ_VARIANTS, Tz};
use shardcron_domain::schedule::{DstSpec, Fold, Gap, Schedule, ScheduleSpec};
use shardcron_domain::units::rfc3339;

mod support;
use support::Random;

const HOUR: i64 = 60;
const HORIZON: i64 = 3 * 24 * HOUR;
/// How far the oracle looks around for a wall clock time that comes twice. Since 1973 no clock was put back by more than 3 h.
const AROUND: i64 = 4 * HOUR;
const FIRES: usize = 6;

fn offset(tz: Tz, instant: i64) -> i64 {
    let utc = DateTime::from_timestamp(instant, 0).unwrap().naive_utc();
    tz.offset_from_utc_datetime(&utc).fix().local_minus_utc().into()
}

/// The oracle's own reading of a pattern.
struct Fields {
    seconds: Vec<i64>,
    text: Vec<String>,
    starred: bool,
}

impl Fields {
    fn read(pattern: &str) -> Self {
        let mut text: Vec<String> = pattern.split(' ').map(str::to_uppercase).collect();
        if text.len() == 5 {
            text.insert(0, "0".into());
        }
        let seconds = (0..60).filter(|s| Self::holds(&text[0], *s, 0, 59)).collect();
        let starred = text[..3].iter().any(|f| f.starts_with('*'));
        Fields { seconds, text, starred }
    }

    fn holds(field: &str, value: i64, min: i64, max: i64) -> bool {
        field.split(',').any(|item| {
            let (span, step) = item.split_once('/').map_or((item, 1), |(s, n)| (s, n.parse().unwrap()));
            let (from, to) = match span.split_once('-') {
                Some((a, b)) => (a.parse().unwrap(), b.parse().unwrap()),
                None if span == "*" => (min, max),
                None => match span.parse() {
                    Ok(n) => (n, n),
                    Err(_) => return false,
                },
            };
            value >= from && value <= to && (value - from) % step == 0
        })
    }

    fn time(&self, minute: i64) -> bool {
        Self::holds(&self.text[1], minute % 60, 0, 59) && Self::holds(&self.text[2], minute / 60 % 24, 0, 23)
    }

    fn date(&self, date: NaiveDate) -> bool {
        if !Self::holds(&self.text[4], date.month().into(), 1, 12) {
            return false;
        }
        let (day, week) = (&self.text[3], &self.text[5]);
        let (by_month, by_week) = (Self::by_month(day, date), Self::by_week(week.trim_start_matches('+'), date));
        if day.starts_with('*') || week.starts_with(['*', '+']) { by_month && by_week } else { by_month || by_week }
    }

    fn by_month(field: &str, date: NaiveDate) -> bool {
        let is_last = |d: NaiveDate| d.succ_opt().unwrap().month() != d.month();
        let works = |d: NaiveDate| d.weekday().number_from_monday() <= 5;
        let same = |d: NaiveDate| (d.year(), d.month()) == (date.year(), date.month());
        field.split(',').any(|item| match item {
            "L" => is_last(date),
            "LW" => works(date) && (1..=7).map(|n| date + chrono::Days::new(n)).all(|d| !same(d) || !works(d)),
            _ => match item.strip_suffix('W') {
                None => Self::holds(item, date.day().into(), 1, 31),
                Some(n) => {
                    let Some(wanted) = NaiveDate::from_ymd_opt(date.year(), date.month(), n.parse().unwrap()) else {
                        return false;
                    };
                    let around = [0_i64, -1, 1, -2, 2].map(|n| wanted + chrono::Duration::days(n));
                    around.into_iter().find(|d| same(*d) && works(*d)) == Some(date)
                }
            },
        })
    }

    fn by_week(field: &str, date: NaiveDate) -> bool {
        let mut text = field.to_string();
        for (name, n) in [
            ("-SUN", "-7"),
            ("SUN", "0"),
            ("MON", "1"),
            ("TUE", "2"),
            ("WED", "3"),
            ("THU", "4"),
            ("FRI", "5"),
            ("SAT", "6"),
        ] {
            text = text.replace(name, n);
        }
        let today = i64::from(date.weekday().num_days_from_sunday());
        let is = |n: &str| n.parse::<i64>().unwrap() % 7 == today;
        text.split(',').any(|item| {
            if let Some((n, nth)) = item.split_once('#') {
                is(n) && i64::from(date.day() - 1) / 7 + 1 == nth.parse::<i64>().unwrap()
            } else if let Some(n) = item.strip_suffix('L') {
                is(n) && (date + chrono::Days::new(7)).month() != date.month()
            } else {
                Self::holds(item, today, 0, 7) || today == 0 && Self::holds(item, 7, 0, 7)
            }
        })
    }
}

/// The first fires after an instant, to the horizon; `None` where the zone's offsets are not whole minutes.
fn oracle(pattern: &str, tz: Tz, dst: DstSpec, after_ms: i64) -> Option<Vec<i64>> {
    let fields = Fields::read(pattern);
    let gap = dst.gap.unwrap_or(if fields.starred { Gap::Skip } else { Gap::After });
    let fold = dst.fold.unwrap_or(if fields.starred { Fold::Both } else { Fold::First });
    let first = after_ms.div_euclid(60_000) - AROUND;
    let mut wall = Vec::new();
    for minute in first..first + 2 * AROUND + HORIZON {
        let off = offset(tz, minute * 60);
        if off % 60 != 0 {
            return None;
        }
        wall.push(minute + off / 60);
    }
    let (mut day, mut day_matches) = (i64::MIN, false);
    let mut matches = |minute: i64| {
        if minute.div_euclid(1_440) != day {
            day = minute.div_euclid(1_440);
            day_matches = fields.date(DateTime::from_timestamp(day * 86_400, 0).unwrap().date_naive());
        }
        day_matches && fields.time(minute)
    };
    let around = AROUND as usize;
    let mut found = Vec::new();
    for i in around..wall.len() - around {
        let (now, before) = (wall[i], wall[i - 1]);
        let mut seconds: Vec<i64> = Vec::new();
        let shown = || wall[i - around..i].iter().any(|w| *w >= now);
        let shows_again = || wall[i + 1..=i + around].iter().any(|w| *w <= now);
        if matches(now)
            && match fold {
                Fold::First => !shown(),
                Fold::Second => !shows_again(),
                Fold::Both => true,
            }
        {
            seconds.clone_from(&fields.seconds);
        }
        let missed = now - before - 1;
        if gap == Gap::After
            && missed > 0
            && missed <= 180
            && (before + 1..now).any(&mut matches)
            && !seconds.contains(&0)
        {
            seconds.insert(0, 0);
        }
        let minute = first + i as i64;
        found.extend(seconds.iter().map(|s| (minute * 60 + s) * 1_000).filter(|ms| *ms > after_ms));
        if found.len() >= FIRES {
            break;
        }
    }
    found.truncate(FIRES);
    Some(found)
}

fn chain(schedule: &Schedule, after_ms: i64) -> Vec<i64> {
    let end_ms = (after_ms.div_euclid(60_000) + HORIZON) * 60_000;
    let (mut instant, mut found) = (after_ms, Vec::new());
    while found.len() < FIRES {
        match schedule.next_after(instant).unwrap() {
            Some(next) if next < end_ms => {
                assert!(next > instant);
                found.push(next);
                instant = next;
            }
            _ => break,
        }
    }
    found
}

/// The changes of a zone's clock between two instants in seconds, each the first second of the new offset.
fn changes(tz: Tz, from: i64, to: i64) -> Vec<i64> {
    const STEP: i64 = 6 * 3_600;
    let mut found = Vec::new();
    for start in (from..to).step_by(STEP as usize) {
        let (mut old, mut new) = (start, start + STEP);
        if offset(tz, old) == offset(tz, new) {
            continue;
        }
        let before = offset(tz, old);
        while new - old > 1 {
            let middle = (old + new) / 2;
            if offset(tz, middle) == before { old = middle } else { new = middle }
        }
        found.push(new);
    }
    found
}

fn new_year(year: i32) -> i64 {
    DateTime::parse_from_rfc3339(&format!("{year}-01-01T00:00:00Z")).unwrap().timestamp()
}

/// A zone and an instant, most often within a day and a half of a change of its clock.
fn place(random: &mut Random) -> (Tz, i64) {
    for _ in 0..30 {
        let tz = *random.pick(&TZ_VARIANTS);
        let year = random.between(1973, 2040) as i32;
        let found = changes(tz, new_year(year), new_year(year + 1));
        if !found.is_empty() {
            return (tz, *random.pick(&found));
        }
    }
    (Tz::UTC, random.between(new_year(1973), new_year(2040)))
}

/// A pattern that is likely to fire near a change: its hours are those around it.
fn pattern_near(random: &mut Random, tz: Tz, change: i64) -> String {
    let wall = |instant: i64| DateTime::from_timestamp(instant + offset(tz, instant), 0).unwrap();
    let hour_near = |random: &mut Random| {
        let before = random.below(2) == 0;
        let at = change + random.between(-5, 5) * 1_800;
        let shift = offset(tz, if before { change - 1 } else { change });
        (at + shift).div_euclid(3_600).rem_euclid(24)
    };
    let hours = match random.below(8) {
        0 => "*".into(),
        1 => support::field(random, (0, 23), 3),
        2 => format!("{},{}", hour_near(random), hour_near(random)),
        3 => {
            let (a, b) = (hour_near(random), hour_near(random));
            format!("{}-{}", a.min(b), a.max(b))
        }
        _ => hour_near(random).to_string(),
    };
    let seconds = match random.below(4) {
        0 => support::field(random, (0, 59), 2) + " ",
        _ => String::new(),
    };
    let dates = match random.below(6) {
        0 => support::date_fields(random),
        1 => format!("{} {} *", wall(change).day(), wall(change).month()),
        2 => format!("* * {}", wall(change - 1).weekday().num_days_from_sunday()),
        _ => "* * *".into(),
    };
    format!("{seconds}{} {hours} {dates}", support::field(random, (0, 59), 1))
}

#[test]
fn the_oracle_agrees_near_changes_of_the_clock() {
    let wanted: u64 = std::env::var("SHARDCRON_ORACLE_CASES").map_or(3_000, |n| n.parse().unwrap());
    let mut random = Random::from_env();
    let (mut tried, mut fires, mut differ) = (0, 0, 0);
    while tried < wanted {
        let (tz, change) = place(&mut random);
        // Several patterns and instants for each place, since finding one costs most.
        for _ in 0..4 {
            let pattern = pattern_near(&mut random, tz, change);
            let dst = match random.below(3) {
                0 => DstSpec {
                    gap: *random.pick(&[None, Some(Gap::After), Some(Gap::Skip)]),
                    fold: *random.pick(&[None, Some(Fold::First), Some(Fold::Second), Some(Fold::Both)]),
                },
                _ => DstSpec::default(),
            };
            let after_ms = match random.below(4) {
                0 => change * 1_000 + random.between(-2, 2) * 500,
                1 => (change + random.between(-7_200, 7_200)) * 1_000 + random.between(0, 999),
                _ => (change + random.between(-130_000, 130_000)) * 1_000,
            };
            let Some(expected) = oracle(&pattern, tz, dst, after_ms) else { continue };
            let spec = ScheduleSpec {
                cron: Some(pattern.clone()),
                timezone: Some(tz.name().into()),
                dst: Some(dst),
                ..ScheduleSpec::default()
            };
            let found = chain(&spec.compile().unwrap(), after_ms);
            tried += 1;
            fires += expected.len();
            if found != expected {
                differ += 1;
                let text = |list: &[i64]| list.iter().map(|t| rfc3339(*t)).collect::<Vec<_>>().join(" ");
                println!("'{pattern}' {tz} {dst:?} after {}", rfc3339(after_ms));
                println!("    oracle {}\n    found  {}", text(&expected), text(&found));
            }
        }
    }
    println!("{tried} triples, {fires} fires, {differ} differences; {random}");
    assert_eq!(differ, 0, "{random}");
}

#[test]
fn s_05_next_is_strictly_after_in_sixty_zones() {
    const PATTERNS: [&str; 12] = [
        "* * * * *",
        "*/15 * * * *",
        "*/10 * * * * *",
        "30 1 * * *",
        "30 2 * * *",
        "0 0 * * *",
        "0 1,2,3 * * *",
        "15,45 0-3 * * *",
        "*/20 2 * * *",
        "0 */2 * * *",
        "59 59 23 * * *",
        "0 3 L * *",
    ];
    let (from, to) = (new_year(2025), new_year(2028));
    let mut zones: Vec<(Tz, Vec<i64>)> =
        TZ_VARIANTS.iter().map(|tz| (*tz, changes(*tz, from, to))).filter(|(_, found)| !found.is_empty()).collect();
    // Spread over the alphabet, so that every continent is in it.
    let keep = zones.len() as f64 / 60.0;
    zones = (0..60).map(|i| zones[(f64::from(i) * keep) as usize].clone()).collect();
    // Each change sees a third of the patterns, each zone sees all; with more oracle cases asked for, every change sees all.
    let thirds = if std::env::var("SHARDCRON_ORACLE_CASES").is_ok() { 1 } else { 3 };
    let mut asked = 0_u64;
    for (tz, found) in &zones {
        for (p, pattern) in PATTERNS.into_iter().enumerate() {
            let spec = ScheduleSpec {
                cron: Some(pattern.into()),
                timezone: Some(tz.name().into()),
                ..ScheduleSpec::default()
            };
            let schedule = spec.compile().unwrap();
            for change in found.iter().skip(p % thirds).step_by(thirds) {
                let (mut last, mut after_last) = (i64::MIN, i64::MIN);
                for start in ((change - 172_800)..=(change + 172_800)).step_by(7 * 60) {
                    let start_ms = start * 1_000;
                    // Asked again only where the answer can differ: until its own answer has passed, an instant's next is the same.
                    let next = schedule.next_after(start_ms).unwrap().unwrap();
                    asked += 1;
                    assert!(next > start_ms && next >= last, "{pattern} {tz} after {}", rfc3339(start_ms));
                    if next != last {
                        after_last = schedule.next_after(next).unwrap().unwrap();
                        asked += 1;
                        last = next;
                    }
                    assert!(after_last > next, "{pattern} {tz} after {}", rfc3339(next));
                }
            }
        }
    }
    println!("{} zones, {asked} instants asked for", zones.len());
}
