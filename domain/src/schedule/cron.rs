//! Cron in a zone: the calendar's local times, mapped to instants by our rule for clock changes (see the module above).

use super::calendar::{Calendar, YEARS};
use super::except::wall_time;
use super::zone::{self, Change, Local};
use super::{DstSpec, Fold, Gap, ScheduleError};
use chrono::{NaiveDate, NaiveTime};
use chrono_tz::Tz;

/// A longer jump is a correction of the calendar, such as Samoa's lost 30 December 2011, and nothing is made up for it.
/// cronie draws the line here, too (`cron.c`).
const GAP_MAX_S: i64 = 3 * 3600;

/// No clock is further than this from UTC.
const OFFSET_MAX_S: i64 = 26 * 3600;

/// A cron pattern in a zone, ready to be asked.
#[derive(Clone, Debug)]
pub struct CronSchedule {
    calendar: Calendar,
    tz: Tz,
    gap: Gap,
    fold: Fold,
    /// It names times, and does not follow elapsed time.
    fixed: bool,
    /// No instant before this is asked of the calendar.
    first: i64,
    /// Nor any from this on.
    end: i64,
}

impl CronSchedule {
    pub(super) fn new(pattern: &str, tz: Tz, dst: DstSpec) -> Result<Self, ScheduleError> {
        let read = super::grammar::parse(pattern)
            .map_err(|e| ScheduleError(format!("'{}' is not a cron pattern: {e}", pattern.escape_debug())))?;
        let (gap, fold) = if read.wildcard { (Gap::Skip, Fold::Both) } else { (Gap::After, Fold::First) };
        let new_year = |year| {
            let date = NaiveDate::from_ymd_opt(year, 1, 1).unwrap_or_default();
            date.and_time(NaiveTime::MIN).and_utc().timestamp()
        };
        Ok(CronSchedule {
            calendar: read.calendar,
            tz,
            gap: dst.gap.unwrap_or(gap),
            fold: dst.fold.unwrap_or(fold),
            fixed: !read.wildcard,
            first: new_year(*YEARS.start()) - OFFSET_MAX_S,
            end: new_year(*YEARS.end() + 1) + OFFSET_MAX_S,
        })
    }

    /// The zone that its fields are read in.
    #[must_use]
    pub fn timezone(&self) -> Tz {
        self.tz
    }

    /// What a change of the clock does on the day of one of its instants (in seconds).
    pub(super) fn clock_change(&self, instant: i64) -> Option<String> {
        let change = zone::change_on_day(self.tz, instant)?;
        let (old, new) = (change.at + change.before, change.at + change.after);
        let turned = format!("{} to {}", wall_time(old), wall_time(new));
        let wall = instant + zone::offset_at(self.tz, instant);
        if new > old {
            let missing = self.calendar.next(old).filter(|w| *w < new && instant == change.at && self.moves(change));
            return Some(match missing {
                Some(missing) => format!(
                    "clocks go forward from {turned}: {} does not exist, fires {}",
                    wall_time(missing),
                    wall_time(wall)
                ),
                None => format!("clocks go forward from {turned}"),
            });
        }
        let which = match (self.fold, instant < change.at) {
            _ if !(new..old).contains(&wall) => "",
            (Fold::First, _) => ": this time comes twice, fires the first time",
            (Fold::Second, _) => ": this time comes twice, fires the second time",
            (Fold::Both, true) => ": the first time",
            (Fold::Both, false) => ": the second time",
        };
        Some(format!("clocks go back from {turned}{which}"))
    }

    /// The changes of the clock between two instants (in seconds) that are next to each other, over a time of the pattern that nothing
    /// makes up for: each with the instant of the change. A pattern that follows elapsed time loses nothing.
    pub(super) fn lost_between(&self, after: i64, before: i64) -> Result<Vec<(i64, String)>, ScheduleError> {
        let mut lost = Vec::new();
        if !self.fixed {
            return Ok(lost);
        }
        let end = before + zone::offset_at(self.tz, before);
        let mut wall = after + zone::offset_at(self.tz, after) + 1;
        while let Some(next) = self.calendar.next(wall).filter(|next| *next < end) {
            wall = match zone::resolve(self.tz, next)? {
                Local::Never(change) => {
                    let (old, new) = (change.at + change.before, change.at + change.after);
                    if !self.moves(change) {
                        let (old, new, missing) = (wall_time(old), wall_time(new), wall_time(next));
                        let text =
                            format!("clocks go forward from {old} to {new}: {missing} does not exist, does not fire");
                        lost.push((change.at, text));
                    }
                    new
                }
                Local::Once(_) | Local::Twice(..) => next + 1,
            };
        }
        Ok(lost)
    }

    /// The first instant strictly after `after_ms`.
    pub(super) fn next_after(&self, after_ms: i64) -> Result<Option<i64>, ScheduleError> {
        // All its instants are whole seconds, so the millisecond part only matters in that it has passed.
        let from = after_ms.div_euclid(1_000).saturating_add(1).max(self.first);
        if from >= self.end {
            return Ok(None);
        }
        Ok(self.at_or_after(from)?.and_then(|instant| instant.checked_mul(1_000)))
    }

    /// The first instant that is `from` or later, in seconds.
    fn at_or_after(&self, from: i64) -> Result<Option<i64>, ScheduleError> {
        let wall = from + zone::offset_at(self.tz, from);
        let start = match zone::resolve(self.tz, wall)? {
            // In the first pass of a repeated hour, the wall clock will run back before it goes on.
            Local::Twice(first, second) if first == from => {
                let change = zone::change_between(self.tz, first, second);
                match self.fold {
                    Fold::First => wall,
                    Fold::Second => change.at + change.after,
                    Fold::Both => {
                        let in_first_pass = self.calendar.next(wall).map(|w| w - change.before);
                        match in_first_pass.filter(|instant| *instant < change.at) {
                            Some(instant) => return Ok(Some(instant)),
                            None => return self.first_on_wall(change.at + change.after, change.at),
                        }
                    }
                }
            }
            _ => self.wall_with_gap(from, wall),
        };
        self.first_on_wall(start, from)
    }

    /// At the first instant after a gap, what fell into the gap is still to come.
    fn wall_with_gap(&self, from: i64, wall: i64) -> i64 {
        let before = zone::offset_at(self.tz, from - 1);
        let change = Change { at: from, before, after: wall - from };
        if self.moves(change) { from + before } else { wall }
    }

    /// Whether local times in this gap are moved to its end.
    fn moves(&self, change: Change) -> bool {
        self.gap == Gap::After && (1..=GAP_MAX_S).contains(&(change.after - change.before))
    }

    /// The first instant that is `from` or later, of local times that are `wall` or later.
    fn first_on_wall(&self, mut wall: i64, from: i64) -> Result<Option<i64>, ScheduleError> {
        while let Some(next) = self.calendar.next(wall) {
            wall = next;
            let instants = match zone::resolve(self.tz, wall)? {
                Local::Once(instant) => [Some(instant), None],
                Local::Twice(first, second) => match self.fold {
                    Fold::First => [Some(first), None],
                    Fold::Second => [Some(second), None],
                    Fold::Both => [Some(first), Some(second)],
                },
                Local::Never(change) if self.moves(change) => [Some(change.at), None],
                Local::Never(change) => {
                    wall = change.at + change.after;
                    continue;
                }
            };
            if let Some(instant) = instants.into_iter().flatten().find(|i| *i >= from) {
                return Ok(Some(instant));
            }
            wall += 1;
        }
        Ok(None)
    }
}
