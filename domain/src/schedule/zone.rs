//! Time zones: from local time to instants and back.
//!
//! Rules are those that `chrono-tz` was built with, not the host's: every process of a cluster must agree, whatever its
//! image has under `/usr/share/zoneinfo` and whatever `TZ` says (case S-12). They reach to the year 2099; after that each
//! zone keeps its last offset.

use super::ScheduleError;
use chrono::{DateTime, MappedLocalTime, NaiveDateTime, Offset, TimeZone};
use chrono_tz::{GapInfo, Tz};

/// What a local time means. Instants and local times are counts of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    /// It comes once.
    Once(i64),
    /// The clock was put back: it comes in the first pass and again in the second.
    Twice(i64, i64),
    /// The clock was put forward over it.
    Never(Change),
}

/// A change of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    /// The first instant of the new offset.
    pub at: i64,
    /// Seconds east of UTC before.
    pub before: i64,
    /// Seconds east of UTC from then on.
    pub after: i64,
}

/// Reads the name of a zone.
pub(super) fn parse(name: &str) -> Result<Tz, String> {
    name.parse().map_err(|_| match nearest(name) {
        _ if name.contains(['+', '-']) && name.ends_with(|c: char| c.is_ascii_digit()) => format!(
            "'{name}' is an offset, and offsets know no summer time; write the place, such as Europe/Berlin, or UTC"
        ),
        Some(near) => format!("'{name}' is not an IANA time zone; did you mean {near}?"),
        None => format!("'{name}' is not an IANA time zone; write one such as Europe/Berlin, America/New_York or UTC"),
    })
}

fn nearest(name: &str) -> Option<&'static str> {
    let wanted = name.trim().to_lowercase().replace(' ', "_");
    let likeness = |zone: &str| {
        let zone = zone.to_lowercase();
        let place = zone.rsplit('/').next().unwrap_or_default();
        strsim::normalized_damerau_levenshtein(&wanted, &zone)
            .max(strsim::normalized_damerau_levenshtein(&wanted, place) - 0.01)
    };
    let near = chrono_tz::TZ_VARIANTS.iter().map(|tz| (likeness(tz.name()), tz.name()));
    near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(like, _)| *like > 0.75).map(|(_, zone)| zone)
}

/// Seconds east of UTC at an instant.
pub(super) fn offset_at(tz: Tz, instant: i64) -> i64 {
    let utc = DateTime::from_timestamp(instant, 0).unwrap_or_default();
    tz.offset_from_utc_datetime(&utc.naive_utc()).fix().local_minus_utc().into()
}

/// What a local time means in a zone.
///
/// # Errors
/// The zone's rules contradict themselves, or the time is beyond chrono's calendar: never the same as "no such time".
pub(super) fn resolve(tz: Tz, local: i64) -> Result<Local, ScheduleError> {
    let fault = || ScheduleError(format!("the local time {} can't be placed in {tz}", wall_text(local)));
    let wall = DateTime::from_timestamp(local, 0).ok_or_else(fault)?.naive_utc();
    let instant = |offset: chrono_tz::TzOffset| local - i64::from(offset.fix().local_minus_utc());
    Ok(match tz.offset_from_local_datetime(&wall) {
        MappedLocalTime::Single(offset) => Local::Once(instant(offset)),
        MappedLocalTime::Ambiguous(one, other) => {
            Local::Twice(instant(one).min(instant(other)), instant(one).max(instant(other)))
        }
        MappedLocalTime::None => {
            let (begin, offset) = GapInfo::new(&wall, &tz).and_then(|gap| gap.begin).ok_or_else(fault)?;
            let before = i64::from(offset.fix().local_minus_utc());
            let at = begin.and_utc().timestamp() - before;
            Local::Never(Change { at, before, after: offset_at(tz, at) })
        }
    })
}

/// The change of the clock between the two passes of a local time.
pub(super) fn change_between(tz: Tz, first: i64, second: i64) -> Change {
    let (before, after) = (offset_at(tz, first), offset_at(tz, second));
    let (mut old, mut new) = (first, second);
    while new - old > 1 {
        let middle = old + (new - old) / 2;
        if offset_at(tz, middle) == before {
            old = middle;
        } else {
            new = middle;
        }
    }
    Change { at: new, before, after }
}

/// The change of the clock on the local day of an instant.
pub(super) fn change_on_day(tz: Tz, instant: i64) -> Option<Change> {
    const DAY_S: i64 = 86_400;
    let wall = instant + offset_at(tz, instant);
    let day = wall.div_euclid(DAY_S);
    // A day has up to 25 hours, and its first hour may be missing.
    let (start, end) = (instant - wall.rem_euclid(DAY_S) - 1, instant - wall.rem_euclid(DAY_S) + DAY_S + 3_600);
    let middle = [start, instant, end];
    let pair = middle.windows(2).find(|pair| offset_at(tz, pair[0]) != offset_at(tz, pair[1]))?;
    let change = change_between(tz, pair[0], pair[1]);
    let on = |offset: i64| (change.at + offset).div_euclid(DAY_S) == day;
    (on(change.before) || on(change.after)).then_some(change)
}

/// Reads an instant: RFC 3339 with an offset, or a local time in a zone.
///
/// An ambiguous local time is its first pass (RFC 5545, 3.3.5). One that does not exist is refused: RFC 5545 would move it,
/// but who writes a single date can be asked what they meant (cases S-13, S-14).
pub(super) fn parse_instant(text: &str, tz: Option<Tz>) -> Result<i64, String> {
    if let Ok(instant) = DateTime::parse_from_rfc3339(text.trim()) {
        return Ok(instant.timestamp_millis());
    }
    const FORMS: [&str; 4] = ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M"];
    let Some(wall) = FORMS.iter().find_map(|form| NaiveDateTime::parse_from_str(text.trim(), form).ok()) else {
        return Err(format!(
            "'{text}' is not an instant; write it with its offset, such as 2026-12-25T08:00:00Z, or without one beside timezone = \"…\""
        ));
    };
    let Some(tz) = tz else {
        return Err(format!(
            "'{text}' has no zone; end it with Z for UTC or an offset such as -05:00, or add timezone = \"America/New_York\""
        ));
    };
    let (local, fraction_ms) = (wall.and_utc().timestamp(), i64::from(wall.and_utc().timestamp_subsec_millis()));
    match resolve(tz, local).map_err(|e| e.to_string())? {
        Local::Once(instant) | Local::Twice(instant, _) => Ok(instant * 1_000 + fraction_ms),
        Local::Never(change) => Err(format!(
            "'{text}' does not exist in {tz}: the clock is put forward from {} to {} there",
            wall_text(change.at + change.before),
            wall_text(change.at + change.after)
        )),
    }
}

fn wall_text(local: i64) -> String {
    match DateTime::from_timestamp(local, 0) {
        Some(wall) => wall.format("%Y-%m-%d %H:%M:%S").to_string(),
        None => format!("{local} s"),
    }
}
