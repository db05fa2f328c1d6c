//! The wall calendar of a cron pattern: which local dates and times it names. It knows no zone and no instant.
//!
//! A pattern is kept as bit sets, about a hundred bytes: a leader holds a hundred thousand of them. A month's matching days
//! are one `u32`, so a search looks at months, never at days or minutes one by one, and an impossible date such as
//! 30 February is known after fourteen years, one of each kind.

use chrono::{DateTime, Datelike, NaiveDate};

/// The years that a pattern can name: from the epoch to the last one that a MySQL `DATETIME` holds.
pub(super) const YEARS: std::ops::RangeInclusive<i32> = 1970..=9999;

const DAY_S: i64 = 86_400;

/// A pattern, read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Calendar {
    /// Bit *n*: second *n*.
    pub seconds: u64,
    /// Bit *n*: minute *n*.
    pub minutes: u64,
    /// Bit *n*: hour *n*.
    pub hours: u32,
    /// Bit *n*: month *n*, from 1.
    pub months: u32,
    /// What both day fields say.
    pub days: Days,
    /// All of [`YEARS`] if empty.
    pub years: Years,
}

/// Ranges of years: first, last and step.
pub(super) type Years = Box<[(i32, i32, i32)]>;

/// The two day fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Days {
    /// Bit *n*: day *n* of the month, from 1.
    pub of_month: u32,
    /// Bit *n*: the weekday (Monday to Friday) nearest to day *n*, within its month: `nW`.
    pub nearest: u32,
    /// The last day of the month: `L`.
    pub last: bool,
    /// The last Monday to Friday of the month: `LW`.
    pub last_weekday: bool,
    /// Bit *n*: weekday *n*, Sunday = 0.
    pub of_week: u8,
    /// For the first to the fifth of its kind in the month, bit *n*: weekday *n*, as in `5#2`.
    pub nth: [u8; 5],
    /// Bit *n*: the last weekday *n* of the month, as in `5L`.
    pub last_of_week: u8,
    /// Whether a day must satisfy both fields, or one suffices.
    pub both: bool,
}

impl Days {
    /// The matching days of a month of `length` days whose first is the given weekday (Sunday = 0); bit *n*: day *n*.
    fn of(&self, first: u32, length: u32) -> u32 {
        let within = ((1_u64 << (length + 1)) - 2) as u32;
        let weekday = |day: u32| (first + day - 1) % 7;
        let mut by_month = self.of_month & within;
        if self.last {
            by_month |= 1 << length;
        }
        if self.last_weekday {
            by_month |= 1 << nearest_weekday(length, weekday(length), length);
        }
        let mut left = self.nearest & within;
        while left != 0 {
            let day = left.trailing_zeros();
            by_month |= 1 << nearest_weekday(day, weekday(day), length);
            left &= left - 1;
        }
        let mut by_week = 0_u32;
        for kind in 0..7 {
            let bit = 1_u8 << kind;
            let first_of_kind = 1 + (7 + kind - first) % 7;
            let last_of_kind = first_of_kind + (length - first_of_kind) / 7 * 7;
            if self.of_week & bit != 0 {
                by_week |= 0b1_0000_0010_0000_0100_0000_1000_0001 << first_of_kind;
            }
            for (week, kinds) in (0..).zip(self.nth) {
                if kinds & bit != 0 && first_of_kind + 7 * week <= length {
                    by_week |= 1 << (first_of_kind + 7 * week);
                }
            }
            if self.last_of_week & bit != 0 {
                by_week |= 1 << last_of_kind;
            }
        }
        within & if self.both { by_month & by_week } else { by_month | by_week }
    }
}

/// The Monday to Friday nearest to a day, never leaving its month (the rule of Quartz's `W`).
fn nearest_weekday(day: u32, weekday: u32, length: u32) -> u32 {
    match weekday {
        6 if day == 1 => 3,
        6 => day - 1,
        0 if day == length => day - 2,
        0 => day + 1,
        _ => day,
    }
}

/// The lowest set bit that is `from` or higher.
fn next_bit(set: u64, from: u32) -> Option<u32> {
    let left = if from < 64 { set >> from << from } else { 0 };
    (left != 0).then(|| left.trailing_zeros())
}

impl Calendar {
    /// The first matching local time that is `from` or later; `None` if there is none to the end of [`YEARS`].
    ///
    /// A local time is a count of seconds, as if the wall clock showed UTC.
    pub fn next(&self, from: i64) -> Option<i64> {
        let day = from.div_euclid(DAY_S);
        let date = DateTime::from_timestamp(day * DAY_S, 0)?.date_naive();
        if self.matches(date)
            && let Some(second) = self.next_time((from - day * DAY_S) as u32)
        {
            return Some(day * DAY_S + i64::from(second));
        }
        let date = self.next_date(date.succ_opt()?)?;
        let midnight = date.and_time(chrono::NaiveTime::MIN).and_utc().timestamp();
        Some(midnight + i64::from(self.next_time(0)?))
    }

    /// Whether it names this local time.
    pub fn holds(&self, wall: i64) -> bool {
        let day = wall.div_euclid(DAY_S);
        let second = (wall - day * DAY_S) as u32;
        self.next_time(second) == Some(second)
            && DateTime::from_timestamp(day * DAY_S, 0).is_some_and(|midnight| self.matches(midnight.date_naive()))
    }

    /// The first matching second of a day that is `from` or later.
    fn next_time(&self, from: u32) -> Option<u32> {
        let (hour, minute, second) = (from / 3600, from / 60 % 60, from % 60);
        if next_bit(self.hours.into(), hour) == Some(hour) {
            if next_bit(self.minutes, minute) == Some(minute)
                && let Some(s) = next_bit(self.seconds, second)
            {
                return Some(hour * 3600 + minute * 60 + s);
            }
            if let Some(m) = next_bit(self.minutes, minute + 1) {
                return Some(hour * 3600 + m * 60 + next_bit(self.seconds, 0)?);
            }
        }
        let h = next_bit(self.hours.into(), hour + 1)?;
        Some(h * 3600 + next_bit(self.minutes, 0)? * 60 + next_bit(self.seconds, 0)?)
    }

    fn matches(&self, date: NaiveDate) -> bool {
        self.months >> date.month() & 1 == 1
            && self.next_year(date.year()) == Some(date.year())
            && self.days_of(date.year(), date.month()) >> date.day() & 1 == 1
    }

    /// The first matching date that is `from` or later.
    fn next_date(&self, from: NaiveDate) -> Option<NaiveDate> {
        let year = self.next_year(from.year())?;
        let start = if year > from.year() { (1, 1) } else { (from.month(), from.day()) };
        if let Some(date) = self.next_date_in(year, start) {
            return Some(date);
        }
        // There are but fourteen calendars: a year like one that held no match, from its first day on, holds none.
        let mut barren = 0_u16;
        let mut last = year;
        while barren != (1 << 14) - 1 {
            let year = self.next_year(last + 1)?;
            let first = NaiveDate::from_ymd_opt(year, 1, 1)?;
            let kind = 1 << (first.weekday().num_days_from_sunday() * 2 + u32::from(first.leap_year()));
            if barren & kind == 0 {
                if let Some(date) = self.next_date_in(year, (1, 1)) {
                    return Some(date);
                }
                barren |= kind;
            }
            last = year;
        }
        None
    }

    /// The first matching date of a year, from a month and day on.
    fn next_date_in(&self, year: i32, (mut month, mut day): (u32, u32)) -> Option<NaiveDate> {
        while let Some(m) = next_bit(self.months.into(), month) {
            if m > month {
                (month, day) = (m, 1);
            }
            if let Some(d) = next_bit(self.days_of(year, month).into(), day) {
                return NaiveDate::from_ymd_opt(year, month, d);
            }
            (month, day) = (month + 1, 1);
        }
        None
    }

    fn days_of(&self, year: i32, month: u32) -> u32 {
        NaiveDate::from_ymd_opt(year, month, 1)
            .map_or(0, |first| self.days.of(first.weekday().num_days_from_sunday(), first.num_days_in_month().into()))
    }

    /// The first named year that is `from` or later.
    fn next_year(&self, from: i32) -> Option<i32> {
        let all = [(*YEARS.start(), *YEARS.end(), 1)];
        let named: &[_] = if self.years.is_empty() { &all } else { &self.years };
        named
            .iter()
            .filter_map(|&(first, last, step)| {
                let steps = ((from - first).max(0) + step - 1) / step;
                Some(first + steps * step).filter(|y| *y <= last)
            })
            .min()
    }
}
