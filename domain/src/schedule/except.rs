//! Exceptions of a schedule: days, ranges of days, patterns, and calendars of holidays.
//!
//! An exception is about local days and times in the job's zone. A pattern of five fields is about minutes: whichever second an
//! instant has, it is excepted with its minute; with six fields the seconds count, too.

use super::calendar::Calendar;
use super::{grammar, zone};
use crate::limits::{CALENDAR_BYTES, CALENDAR_ENTRIES, EXCEPTIONS_MAX};
use chrono::{DateTime, Datelike, NaiveDate};
use chrono_tz::Tz;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

const DAY_S: i64 = 86_400;

/// Exceptions, read.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Exceptions {
    /// In order and disjoint.
    days: Box<[Range]>,
    patterns: Box<[Pattern]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Range {
    first: i32,
    last: i32,
    /// What people are told.
    words: Box<str>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Pattern {
    calendar: Calendar,
    by_minute: bool,
    words: Box<str>,
}

/// Exceptions that several schedules share.
#[derive(Debug, Default)]
pub struct ExceptionPool(HashSet<Arc<Exceptions>>);

impl ExceptionPool {
    pub(super) fn keep(&mut self, except: Arc<Exceptions>) -> Arc<Exceptions> {
        if let Some(known) = self.0.get(&except) {
            return known.clone();
        }
        self.0.insert(except.clone());
        except
    }
}

impl Exceptions {
    /// Reads what `except` says; `None` if it says nothing.
    pub(super) fn read(except: &[String], calendars: &BTreeMap<String, Vec<String>>) -> Result<Option<Self>, String> {
        let calendar = |entry: &str| entry.trim().strip_prefix("calendar:").map(|name| name.trim().to_owned());
        if let Some(name) = calendars.keys().find(|n| !except.iter().any(|e| calendar(e).as_ref() == Some(*n))) {
            return Err(format!("calendars: no exception names '{name}'; add \"calendar: {name}\" to except"));
        }
        check_sizes(except, calendars)?;
        let (mut days, mut patterns) = (Vec::new(), Vec::new());
        for entry in except {
            let wrong = |why: String| format!("except: '{}': {why}", entry.escape_debug());
            if let Some(pattern) = entry.trim().strip_prefix("cron:") {
                patterns.push(read_pattern(pattern.trim(), entry).map_err(wrong)?);
            } else if let Some(name) = calendar(entry) {
                let lines = calendars.get(&name).ok_or_else(|| {
                    wrong(format!(
                        "there is no calendar '{name}'; it is a file next to the job file, or a list in calendars"
                    ))
                })?;
                for line in lines {
                    let range = read_day(line).map_err(|why| wrong(format!("'{line}': {why}")))?;
                    days.push(Range { words: format!("{} ({line})", entry.trim()).into(), ..range });
                }
            } else {
                days.push(read_day(entry).map_err(wrong)?);
            }
        }
        let any = !days.is_empty() || !patterns.is_empty();
        Ok(any.then(|| Exceptions { days: disjoint(days), patterns: patterns.into() }))
    }

    /// What excepts an instant (in seconds), in the words of the job file.
    pub(super) fn find(&self, instant: i64, tz: Tz) -> Option<String> {
        let wall = instant + zone::offset_at(tz, instant);
        let words = self.day(wall).map(|d| &d.words).or_else(|| self.pattern(wall).map(|p| &p.words));
        words.map(|words| words.to_string())
    }

    pub(super) fn holds(&self, instant: i64, tz: Tz) -> bool {
        let wall = instant + zone::offset_at(tz, instant);
        self.day(wall).is_some() || self.pattern(wall).is_some()
    }

    fn day(&self, wall: i64) -> Option<&Range> {
        let day = i32::try_from(wall.div_euclid(DAY_S)).ok()?;
        let at = self.days.partition_point(|range| range.last < day);
        self.days.get(at).filter(|range| range.first <= day)
    }

    fn pattern(&self, wall: i64) -> Option<&Pattern> {
        self.patterns.iter().find(|p| p.calendar.holds(if p.by_minute { wall - wall.rem_euclid(60) } else { wall }))
    }
}

fn check_sizes(except: &[String], calendars: &BTreeMap<String, Vec<String>>) -> Result<(), String> {
    if except.len() > EXCEPTIONS_MAX {
        return Err(format!(
            "except: {} entries; {EXCEPTIONS_MAX} are possible, more days belong into a calendar",
            except.len()
        ));
    }
    let entries: usize = calendars.values().map(Vec::len).sum();
    if entries > CALENDAR_ENTRIES {
        return Err(format!("calendars: {entries} days and ranges; {CALENDAR_ENTRIES} are possible"));
    }
    let bytes: usize = calendars.iter().map(|(n, lines)| n.len() + lines.iter().map(String::len).sum::<usize>()).sum();
    if bytes > CALENDAR_BYTES {
        return Err(format!("calendars: {bytes} bytes; {CALENDAR_BYTES} are possible"));
    }
    Ok(())
}

fn read_pattern(pattern: &str, entry: &str) -> Result<Pattern, String> {
    let read = grammar::parse(pattern)?;
    let by_minute = pattern.starts_with('@') || pattern.split_whitespace().count() == 5;
    Ok(Pattern { calendar: read.calendar, by_minute, words: entry.trim().into() })
}

/// `2026-12-25` or `2026-12-24..2026-12-31`, with words for people behind it.
fn read_day(text: &str) -> Result<Range, String> {
    let text = text.trim();
    let days = text.split_whitespace().next().unwrap_or_default();
    let (first, last) = days.split_once("..").unwrap_or((days, days));
    let (first, last) = (read_date(first)?, read_date(last)?);
    if last < first {
        return Err("the range ends before it begins".into());
    }
    Ok(Range { first, last, words: text.into() })
}

fn read_date(text: &str) -> Result<i32, String> {
    let date = NaiveDate::parse_from_str(text, "%Y-%m-%d").ok().filter(|date| {
        // chrono takes signs and fewer digits, too.
        text.len() == 10 && (0..=9999).contains(&date.year())
    });
    let midnight = date.map(|date| date.and_time(chrono::NaiveTime::MIN).and_utc().timestamp());
    midnight.and_then(|s| i32::try_from(s.div_euclid(DAY_S)).ok()).ok_or_else(|| {
        format!(
            "'{text}' is not a day; write a day such as 2026-12-25, a range such as 2026-12-24..2026-12-31, \
             \"cron: * * * * 6,0\" or \"calendar: holidays.txt\""
        )
    })
}

/// Sorted, and each day in one range only: the one that begins first.
fn disjoint(mut days: Vec<Range>) -> Box<[Range]> {
    days.sort_by_key(|range| (range.first, range.last));
    let mut kept: Vec<Range> = Vec::with_capacity(days.len());
    for mut range in days {
        if let Some(before) = kept.last() {
            range.first = range.first.max(before.last + 1);
        }
        if range.first <= range.last {
            kept.push(range);
        }
    }
    kept.into()
}

/// The entries of a calendar file: a day or a range on each line, words for people behind it, comments from `#` on.
///
/// # Errors
/// The line, counted from 1, and what is wrong with it.
pub fn calendar_lines(text: &str) -> Result<Vec<String>, (usize, String)> {
    let mut lines = Vec::new();
    for (at, line) in (1..).zip(text.lines()) {
        let entry = line.split('#').next().unwrap_or_default().trim();
        if !entry.is_empty() {
            read_day(entry).map_err(|why| (at, why))?;
            if lines.len() == CALENDAR_ENTRIES {
                return Err((at, format!("more than {CALENDAR_ENTRIES} days and ranges")));
            }
            lines.push(entry.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }
    Ok(lines)
}

/// A local time, for people.
pub(super) fn wall_time(wall: i64) -> String {
    let time = DateTime::from_timestamp(wall, 0).unwrap_or_default();
    time.format(if wall % 60 == 0 { "%H:%M" } else { "%H:%M:%S" }).to_string()
}
