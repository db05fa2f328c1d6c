//! Schedules: the instants at which a job is due, strictly after a given one.

use crate::units::Span;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// When a job fires by itself: exactly one of `cron`, `every` and `at`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSpec {
    /// A cron pattern of 5, 6 (seconds first) or 7 (year last) fields, or a macro such as `@daily`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// A fixed rate, counted from `anchor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<Span>,
    /// Where a fixed rate is counted from, in RFC 3339; the epoch if absent, so that every process agrees without being told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchor: Option<String>,
    /// One instant, in RFC 3339 with its zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The IANA zone of the pattern; UTC if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
}

/// Why a schedule can't be used or computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ScheduleError(pub String);

/// A schedule that is ready to be asked.
#[derive(Clone, Debug)]
pub enum Schedule {
    /// By calendar.
    Cron(Box<croner::Cron>, chrono_tz::Tz),
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
        let fault = |m: String| Err(ScheduleError(m));
        match (&self.cron, self.every, &self.at) {
            (Some(pattern), None, None) => {
                let zone = self.timezone.as_deref().unwrap_or("UTC");
                let tz: chrono_tz::Tz = zone
                    .parse()
                    .map_err(|_| ScheduleError(format!("'{zone}' is not an IANA time zone such as Europe/Berlin")))?;
                let cron = croner::parser::CronParser::builder()
                    .seconds(croner::parser::Seconds::Optional)
                    .year(croner::parser::Year::Optional)
                    .build()
                    .parse(pattern)
                    .map_err(|e| ScheduleError(format!("'{pattern}' is not a cron pattern: {e}")))?;
                Ok(Schedule::Cron(Box::new(cron), tz))
            }
            (None, Some(Span(0)), None) => fault("every = \"0s\" would fire without end".into()),
            (None, Some(every), None) => {
                let anchor_ms = match &self.anchor {
                    Some(text) => crate::units::parse_instant(text).map_err(ScheduleError)?,
                    None => 0,
                };
                Ok(Schedule::Every { every_ms: every.as_ms(), anchor_ms })
            }
            (None, None, Some(text)) => Ok(Schedule::At(crate::units::parse_instant(text).map_err(ScheduleError)?)),
            _ => fault("a schedule has exactly one of cron, every and at".into()),
        }
    }
}

impl Schedule {
    /// The first instant strictly after `after_ms`; `None` if there is none ever.
    ///
    /// # Errors
    /// The calendar could not be computed; never "there is none".
    pub fn next_after(&self, after_ms: i64) -> Result<Option<i64>, ScheduleError> {
        match self {
            Schedule::Every { every_ms, anchor_ms } => {
                let periods = (after_ms - anchor_ms).div_euclid(*every_ms) + 1;
                Ok(periods.checked_mul(*every_ms).and_then(|d| anchor_ms.checked_add(d)))
            }
            Schedule::At(at_ms) => Ok((*at_ms > after_ms).then_some(*at_ms)),
            Schedule::Cron(cron, tz) => {
                let after = DateTime::<Utc>::from_timestamp_millis(after_ms)
                    .ok_or_else(|| ScheduleError(format!("{after_ms} ms is no instant")))?
                    .with_timezone(tz);
                match cron.find_next_occurrence(&after, false) {
                    Ok(next) => Ok(Some(next.with_timezone(&Utc).timestamp_millis())),
                    Err(croner::errors::CronError::TimeSearchLimitExceeded) => Ok(None),
                    Err(e) => Err(ScheduleError(e.to_string())),
                }
            }
        }
    }
}
