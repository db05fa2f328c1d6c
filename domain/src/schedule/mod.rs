//! Schedules: the instants at which a job is due, strictly after a given one.
//!
//! Owns the three kinds of schedule, the grammar of cron patterns and what a change of the clock does to them. Must not read
//! a clock, nor the host's zone or its zone files.
//!
//! # Cron
//!
//! A pattern has 5 fields (minute, hour, day of month, month, weekday), 6 (a second before them) or 7 (a year after them,
//! 1970 to 9999), or is one of `@yearly`, `@annually`, `@monthly`, `@weekly`, `@daily`, `@midnight` and `@hourly`. Weekdays
//! are those of POSIX: 0 and 7 are Sunday. A day must satisfy one of its two day fields; both, if one begins with `*` or `?`
//! or the weekdays with `+` (cronie `entry.c`; `+` is croner's).
//!
//! # When the clock changes
//!
//! | | in a gap of up to 3 h | in a repeated hour |
//! | --- | --- | --- |
//! | *fixed-time*: no `*` at the start of seconds, minutes and hours (lists and ranges, too) | once, at the first instant after the gap, however many of its times fall into it | in the first pass only |
//! | *wildcard*: any other | nothing; elapsed time goes on | in both passes |
//!
//! This is cronie's rule (`cron(8)`, "daylight saving time and other time changes"), except that cronie would start a command
//! once for each minute missed; here several in one gap are one firing, since they would have one fire key. Gaps of more than
//! 3 h correct the calendar, and nothing is made up for. `dst = { gap = "after" | "skip", fold = "first" | "second" | "both" }`
//! changes either for one job, of either kind.
//!
//! # Why not croner's walk
//!
//! croner is the second witness in the tests, pattern by pattern, in UTC; it is not what runs. Its `Cron` takes 5 KiB each
//! (half a gigabyte at 100,000 jobs), ends at the year 5000, takes 28 ms to see that a date is impossible, ORs `*/2` with a
//! weekday, treats lists of hours as wildcards in a repeated hour, and reads `1,,2` and `MON * * * *`.
//!
//! # Around the pattern
//!
//! `from` and `until` (both included) bound any schedule but `at`. `except` names instants that are skipped (`except.rs`): they stay
//! instants of the schedule, come out of [`Schedule::next_after`], and get a decision of their own. `jitter` moves the time of
//! firing, never the instant ([`Schedule::due_at`]). `delay` has one instant at a time: it exists once the execution before it has
//! ended ([`Schedule::next_after_end`]).
//!
//! # Where the shared cases leave a choice
//!
//! `tests/cases/cron.json` lists, for some cases, other outcomes that would do if documented. None of them is taken: all its
//! cases come out as first written. So `0/10` is refused with a hint, `*/2` in a day field counts as `*` (AND), ranges of hours
//! are fixed-time, macros are read in any case, the year 9999 is read, and an impossible date is never due rather than refused.

mod calendar;
mod coming;
mod cron;
mod except;
mod field;
mod grammar;
mod timeline;
mod zone;

pub use coming::{Coming, coming};
pub use cron::CronSchedule;
pub use except::{ExceptionPool, calendar_lines};
pub use timeline::Schedule;

use crate::units::Span;
use chrono_tz::Tz;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use timeline::{Kind, Rules};

/// When a job fires by itself: exactly one of `cron`, `every`, `delay` and `at`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSpec {
    /// A cron pattern of 5, 6 (seconds first) or 7 (year last) fields, or a macro such as `@daily`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// A fixed rate: the job is due at the anchor and every whole number of spans from it, before and after (case S-15).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<Span>,
    /// Where a fixed rate is counted from, written as `at` is; the epoch if absent, so that every process agrees without
    /// being told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchor: Option<String>,
    /// A fixed delay: the job is due this long after the end of its last execution, however that was fired; at once if it never
    /// ran. Its one instant exists only when that end is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Span>,
    /// One instant: in RFC 3339 with its offset, or a local time such as `2026-12-25T08:00:00` beside `timezone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The IANA zone of the pattern (UTC if absent), and of local times in `at` and `anchor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    /// What a change of the clock does to a cron schedule, where it shall differ from the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dst: Option<DstSpec>,
    /// Nothing is due before this instant, written as `at` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Nothing is due after this instant, written as `at` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
    /// Instants that are skipped: `"2026-12-25"`, `"2026-12-24..2026-12-31"`, `"cron: * * * * 6,0"`, `"calendar: holidays.txt"`.
    /// Days are those of `timezone` (UTC if absent).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<String>,
    /// The lines of the calendars that `except` names, frozen when the job is applied.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub calendars: BTreeMap<String, Vec<String>>,
    /// Each instant fires up to this much later: always as much for the same job and instant, never past the next instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<Span>,
}

/// What a change of the clock does to a cron schedule. What is absent follows the rule of the module's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DstSpec {
    /// When the clock is put forward over the job's time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap: Option<Gap>,
    /// When the clock is put back and shows the job's time twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<Fold>,
}

/// The choices for a time that the clock is put forward over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// Once, at the first instant after the gap.
    After,
    /// Not at all.
    Skip,
}

/// The choices for a time that comes twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fold {
    /// The first time only.
    First,
    /// The second time only.
    Second,
    /// Both times.
    Both,
}

/// Why a schedule can't be used or computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ScheduleError(pub String);

impl ScheduleSpec {
    /// Takes in the calendars that `except` names and that are not there yet. `calendar` gives the text of one by its name.
    ///
    /// # Errors
    /// Which calendar, its line, and what is wrong.
    pub fn freeze_calendars(&mut self, calendar: &dyn Fn(&str) -> Result<String, String>) -> Result<(), String> {
        for entry in &self.except {
            let Some(name) = entry.trim().strip_prefix("calendar:").map(str::trim) else { continue };
            if !self.calendars.contains_key(name) {
                let lines =
                    calendar_lines(&calendar(name)?).map_err(|(line, m)| format!("{name}, line {line}: {m}"))?;
                self.calendars.insert(name.to_owned(), lines);
            }
        }
        Ok(())
    }

    /// Reads the specification, for a job without a name: its jitter is that of the empty name.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn compile(&self) -> Result<Schedule, ScheduleError> {
        self.compile_for("")
    }

    /// Reads the specification of a job.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn compile_for(&self, job: &str) -> Result<Schedule, ScheduleError> {
        let tz = self.timezone.as_deref().map(zone::parse).transpose().map_err(ScheduleError)?;
        let kind = self.kind(tz)?;
        if matches!(kind, Kind::At(_)) && (self.from.is_some() || self.until.is_some() || !self.except.is_empty()) {
            return fault("at names one instant; from, until and except go with cron, every and delay only");
        }
        let instant = |key: &str, text: &Option<String>| match text {
            Some(text) => zone::parse_instant(text, tz).map(Some).map_err(|m| ScheduleError(format!("{key}: {m}"))),
            None => Ok(None),
        };
        let (from, until) = (instant("from", &self.from)?, instant("until", &self.until)?);
        if let (Some(from), Some(until)) = (from, until)
            && until < from
        {
            return fault("until is before from, so that nothing would ever be due");
        }
        let except = except::Exceptions::read(&self.except, &self.calendars).map_err(ScheduleError)?;
        let jitter_ms = self.jitter.map_or(0, Span::as_ms);
        Ok(Schedule::new(kind, Rules::new((from, until), except, tz.unwrap_or(Tz::UTC), (jitter_ms, job))))
    }

    fn kind(&self, tz: Option<Tz>) -> Result<Kind, ScheduleError> {
        if self.anchor.is_some() && self.every.is_none() {
            return fault("anchor is where a fixed rate is counted from; it goes with every only");
        }
        if self.dst.is_some() && self.cron.is_none() {
            return fault("dst says what a change of the clock does to a cron pattern; it goes with cron only");
        }
        match (&self.cron, self.every, self.delay, &self.at) {
            (Some(pattern), None, None, None) => {
                let dst = self.dst.unwrap_or_default();
                Ok(Kind::Cron(Box::new(CronSchedule::new(pattern, tz.unwrap_or(Tz::UTC), dst)?)))
            }
            (None, Some(Span(0)), None, None) => {
                fault("every = \"0s\" would fire without end; the span must be longer")
            }
            (None, Some(every), None, None) => {
                let anchor_ms = match &self.anchor {
                    Some(text) => zone::parse_instant(text, tz).map_err(ScheduleError)?,
                    None => 0,
                };
                Ok(Kind::Every { every_ms: every.as_ms(), anchor_ms })
            }
            (None, None, Some(Span(0)), None) => {
                fault("delay = \"0s\" would run the job without a pause; the span must be longer")
            }
            (None, None, Some(delay), None) => Ok(Kind::Delay(delay.as_ms())),
            (None, None, None, Some(text)) => Ok(Kind::At(zone::parse_instant(text, tz).map_err(ScheduleError)?)),
            _ => fault("a schedule has exactly one of cron, every, delay and at"),
        }
    }
}

/// An instant as the clocks in a zone show it, for people: weekday, date, time and the zone's abbreviation. UTC if the name is none.
#[must_use]
pub fn local_time(zone: Option<&str>, instant_ms: i64) -> String {
    let tz = zone.and_then(|name| zone::parse(name).ok()).unwrap_or(Tz::UTC);
    match chrono::DateTime::from_timestamp_millis(instant_ms) {
        Some(instant) => instant.with_timezone(&tz).format("%a %Y-%m-%d %H:%M:%S %Z").to_string(),
        None => format!("{instant_ms} ms"),
    }
}

fn fault<T>(message: &str) -> Result<T, ScheduleError> {
    Err(ScheduleError(message.into()))
}
