//! Reads cron patterns, and says in a sentence what is wrong with one.
//!
//! The text follows cronie's `crontab(5)` where that has a rule (Sunday is 0 and 7, names in any case, `*` decides between
//! OR and AND), and croner for what cronie lacks (seconds, years, `L`, `W`, `#`, `+`). What means different things in
//! different products (`0/10`, `22-2`, `L-3`) is refused with the way to write it here, never guessed.

use super::calendar::{Calendar, Days, YEARS, Years};
use super::field::{DAY, Field, HOUR, MINUTE, MONTH, SECOND, WEEKDAY, YEAR};

/// A pattern, read.
pub(super) struct Pattern {
    pub calendar: Calendar,
    /// Whether its seconds, minutes or hours begin with `*`: such a job follows elapsed time, not the clock's face.
    pub wildcard: bool,
}

/// Macros of `crontab(5)` and what they stand for. `@reboot` is missing on purpose: a cluster has no boot.
const MACROS: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// The longest pattern that is read. The longest sensible one, every value listed, is a third of this.
const PATTERN_BYTES: usize = 1_000;

/// Reads a pattern.
pub(super) fn parse(pattern: &str) -> Result<Pattern, String> {
    let text = pattern.trim();
    if text.len() > PATTERN_BYTES {
        return Err(format!("it has {} characters; {PATTERN_BYTES} are possible", text.len()));
    }
    if text.contains(['\n', '\r']) {
        return Err(
            "it has two lines; a schedule has one pattern (make a second job, or use lists as in 0 12,13 * * *)".into(),
        );
    }
    if text.starts_with('@') {
        return parse_fields(&expand(text)?);
    }
    if let Some(zone) = text.strip_prefix("CRON_TZ=").or_else(|| text.strip_prefix("TZ=")) {
        let zone = zone.split_whitespace().next().unwrap_or("Europe/Berlin");
        return Err(format!("the zone has its own key here: timezone = \"{zone}\""));
    }
    parse_fields(text)
}

fn expand(text: &str) -> Result<String, String> {
    let word = text.to_lowercase();
    if let Some((_, meaning)) = MACROS.iter().find(|(name, _)| *name == word) {
        return Ok((*meaning).to_string());
    }
    if word.starts_with("@reboot") {
        return Err("@reboot has no meaning in a cluster, which never boots as a whole; trigger the job by hand".into());
    }
    if let Some(span) = word.strip_prefix("@every") {
        let span = if span.trim().is_empty() { "5m" } else { span.trim() };
        return Err(format!("a fixed rate has its own key here: every = \"{span}\""));
    }
    let near = MACROS.iter().map(|(name, _)| *name).max_by_key(|name| (strsim::jaro_winkler(&word, name) * 1e6) as u64);
    match near.filter(|name| strsim::damerau_levenshtein(&word, name) <= 2) {
        Some(name) => Err(format!("there is no macro {word}; did you mean {name}?")),
        None => Err(format!("there is no macro {word}; there are {}", MACROS.map(|(name, _)| name).join(", "))),
    }
}

fn parse_fields(text: &str) -> Result<Pattern, String> {
    let parts: Vec<&str> = text.split_whitespace().collect();
    let [second, minute, hour, day, month, weekday, year] = match parts[..] {
        [mi, h, d, mo, w] => ["0", mi, h, d, mo, w, "*"],
        [s, mi, h, d, mo, w] => [s, mi, h, d, mo, w, "*"],
        [s, mi, h, d, mo, w, y] => [s, mi, h, d, mo, w, y],
        [] => return Err("it is empty; write for example \"30 2 * * *\" for every day at 02:30".into()),
        _ => {
            return Err(format!(
                "it has {} field{}; there are 5 (minute hour day month weekday), 6 (a second before them) or 7 (a year after them)",
                parts.len(),
                if parts.len() == 1 { "" } else { "s" }
            ));
        }
    };
    let (and, weekday) = match weekday.strip_prefix('+') {
        Some(rest) => (true, rest),
        None => (false, weekday),
    };
    let starred = |field: &str| field.starts_with(['*', '?']);
    let mut days = Days { both: and || starred(day) || starred(weekday), ..Days::default() };
    read_days_of_month(day, &mut days)?;
    read_days_of_week(weekday, &mut days)?;
    let calendar = Calendar {
        seconds: bits(SECOND, second)?,
        minutes: bits(MINUTE, minute)?,
        hours: bits(HOUR, hour)? as u32,
        months: bits(MONTH, month)? as u32,
        days,
        years: read_years(year)?,
    };
    Ok(Pattern { calendar, wildcard: [second, minute, hour].iter().any(|f| f.starts_with('*')) })
}

fn bits(field: Field, text: &str) -> Result<u64, String> {
    let mut set = 0;
    for item in field.items(text)? {
        set |= range_bits(field, item)?;
    }
    Ok(set)
}

fn range_bits(field: Field, item: &str) -> Result<u64, String> {
    let (first, last, step) = field.range(item)?;
    Ok((first..=last).step_by(step as usize).fold(0, |set, n| set | 1 << n))
}

fn read_days_of_month(text: &str, days: &mut Days) -> Result<(), String> {
    for item in DAY.items(if text == "?" { "*" } else { text })? {
        let upper = item.to_ascii_uppercase();
        match upper.as_str() {
            "L" => days.last = true,
            "LW" => days.last_weekday = true,
            "W" => return Err(DAY.says("'W' needs a day before it, such as 15W, the weekday nearest to the 15th")),
            _ if upper.starts_with("L-") => {
                return Err(DAY.says(&format!("'{item}' (days before the last) is not known here; there are L and LW")));
            }
            _ => match upper.strip_suffix('W') {
                Some(day) => days.nearest |= 1 << DAY.number(day)?,
                None => days.of_month |= range_bits(DAY, item)? as u32,
            },
        }
    }
    Ok(())
}

fn read_days_of_week(text: &str, days: &mut Days) -> Result<(), String> {
    for item in WEEKDAY.items(if text == "?" { "*" } else { text })? {
        let upper = item.to_ascii_uppercase();
        let last = upper.strip_suffix("#L").or_else(|| upper.strip_suffix('L'));
        if let Some(weekday) = last {
            if weekday.is_empty() {
                return Err(WEEKDAY.says("'L' needs a weekday before it, such as 5L, the last Friday of the month"));
            }
            days.last_of_week |= 1 << (one_weekday(item, weekday)? % 7);
        } else if let Some((weekday, nth)) = upper.split_once('#') {
            let week = match nth {
                "1" | "2" | "3" | "4" | "5" => nth.as_bytes()[0] - b'1',
                _ => {
                    return Err(WEEKDAY.says(&format!(
                        "'{item}' does not say which one in the month; write 1 to 5 or L after '#', such as 5#2, the second Friday"
                    )));
                }
            };
            days.nth[usize::from(week)] |= 1 << (one_weekday(item, weekday)? % 7);
        } else {
            let set = range_bits(WEEKDAY, item)?;
            // 7 is Sunday, as 0 is.
            days.of_week |= (set & 0x7f | set >> 7 & 1) as u8;
        }
    }
    Ok(())
}

fn one_weekday(item: &str, weekday: &str) -> Result<i32, String> {
    if weekday.is_empty() || weekday.contains(['-', '/', '*']) {
        return Err(WEEKDAY.says(&format!("'{item}' needs one weekday; make it a list for more, such as 1#2,3#2")));
    }
    WEEKDAY.number(weekday)
}

fn read_years(text: &str) -> Result<Years, String> {
    if text == "*" {
        return Ok(Box::default());
    }
    let years: Result<Vec<_>, String> = YEAR.items(text)?.into_iter().map(|item| YEAR.range(item)).collect();
    debug_assert_eq!((YEAR.min, YEAR.max), (*YEARS.start(), *YEARS.end()));
    Ok(years?.into())
}
