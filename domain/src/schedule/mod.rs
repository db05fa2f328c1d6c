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
//! # Where the shared cases leave a choice
//!
//! `tests/cases/cron.json` lists, for some cases, other outcomes that would do if documented. None of them is taken: all its
//! cases come out as first written. So `0/10` is refused with a hint, `*/2` in a day field counts as `*` (AND), ranges of hours
//! are fixed-time, macros are read in any case, the year 9999 is read, and an impossible date is never due rather than refused.

mod calendar;
mod cron;
mod field;
mod grammar;
mod zone;

pub use cron::CronSchedule;

use crate::units::Span;
use chrono_tz::Tz;
use serde::{Deserialize, Serialize};

/// When a job fires by itself: exactly one of `cron`, `every` and `at`.
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
    /// One instant: in RFC 3339 with its offset, or a local time such as `2026-12-25T08:00:00` beside `timezone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The IANA zone of the pattern (UTC if absent), and of local times in `at` and `anchor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    /// What a change of the clock does to a cron schedule, where it shall differ from the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dst: Option<DstSpec>,
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

/// A schedule that is ready to be asked.
#[derive(Clone, Debug)]
pub enum Schedule {
    /// By calendar.
    Cron(Box<CronSchedule>),
    /// Every so many milliseconds from the anchor.
    Every {
        /// The period.
        every_ms: i64,
        /// An instant that is due.
        anchor_ms: i64,
    },
    /// Once.
    At(i64),
}

impl ScheduleSpec {
    /// Reads the specification.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn compile(&self) -> Result<Schedule, ScheduleError> {
        let fault = |m: &str| Err(ScheduleError(m.into()));
        if self.anchor.is_some() && self.every.is_none() {
            return fault("anchor is where a fixed rate is counted from; it goes with every only");
        }
        if self.dst.is_some() && self.cron.is_none() {
            return fault("dst says what a change of the clock does to a cron pattern; it goes with cron only");
        }
        let tz = self.timezone.as_deref().map(zone::parse).transpose().map_err(ScheduleError)?;
        match (&self.cron, self.every, &self.at) {
            (Some(pattern), None, None) => {
                let dst = self.dst.unwrap_or_default();
                Ok(Schedule::Cron(Box::new(CronSchedule::new(pattern, tz.unwrap_or(Tz::UTC), dst)?)))
            }
            (None, Some(Span(0)), None) => fault("every = \"0s\" would fire without end; the span must be longer"),
            (None, Some(every), None) => {
                let anchor_ms = match &self.anchor {
                    Some(text) => zone::parse_instant(text, tz).map_err(ScheduleError)?,
                    None => 0,
                };
                Ok(Schedule::Every { every_ms: every.as_ms(), anchor_ms })
            }
            (None, None, Some(text)) => Ok(Schedule::At(zone::parse_instant(text, tz).map_err(ScheduleError)?)),
            _ => fault("a schedule has exactly one of cron, every and at"),
        }
    }
}

impl Schedule {
    /// The first instant strictly after `after_ms`; `None` if there is none ever.
    ///
    /// # Errors
    /// The calendar could not be computed; never "there is none".
    pub fn next_after(&self, after_ms: i64) -> Result<Option<i64>, ScheduleError> {
        let next = match self {
            Schedule::Every { every_ms, anchor_ms } => {
                let since = i128::from(after_ms) - i128::from(*anchor_ms);
                let every = i128::from(*every_ms);
                i64::try_from(i128::from(*anchor_ms) + (since.div_euclid(every) + 1) * every).ok()
            }
            Schedule::At(at_ms) => Some(*at_ms).filter(|at| *at > after_ms),
            Schedule::Cron(cron) => cron.next_after(after_ms)?,
        };
        match next {
            // A caller would spin on this for ever (case S-05), so it is an error even where it can't happen.
            Some(instant) if instant <= after_ms => {
                Err(ScheduleError(format!("the instant after {after_ms} ms was computed as {instant} ms")))
            }
            other => Ok(other),
        }
    }
}
