//! Patterns of Quartz, which XXL-JOB reads, in our words.
//!
//! Quartz: second, minute, hour, day, month, weekday and perhaps a year; weekdays 1 to 7 from Sunday; `?` in one of the day fields;
//! `a/n` from a on; ranges that wrap. Ours are weekdays 0 to 6 from Sunday, and neither of the last two.

/// A field's first and last value, and names of its values.
struct Field {
    first: u32,
    last: u32,
    names: &'static [&'static str],
}

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const DAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
const FIELDS: [Field; 7] = [
    Field { first: 0, last: 59, names: &[] },
    Field { first: 0, last: 59, names: &[] },
    Field { first: 0, last: 23, names: &[] },
    Field { first: 1, last: 31, names: &[] },
    Field { first: 1, last: 12, names: &MONTHS },
    Field { first: 1, last: 7, names: &DAYS },
    Field { first: 1970, last: 2099, names: &[] },
];
const WEEKDAY: usize = 5;

/// Our pattern for one of Quartz.
pub(super) fn convert(pattern: &str) -> Result<String, String> {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    if !(6..=7).contains(&fields.len()) {
        return Err(format!("'{pattern}' has {} fields; Quartz has 6 or 7", fields.len()));
    }
    let restricted = |field: &str| !field.starts_with(['*', '?']);
    if restricted(fields[3]) && restricted(fields[5]) {
        return Err(format!("'{pattern}' restricts both day fields, which Quartz has no meaning for"));
    }
    let converted = fields.iter().enumerate().map(|(at, text)| convert_field(at, text));
    Ok(converted.collect::<Result<Vec<_>, _>>()?.join(" "))
}

fn convert_field(at: usize, text: &str) -> Result<String, String> {
    let items = text.split(',').map(|item| convert_item(at, item));
    Ok(items.collect::<Result<Vec<_>, _>>()?.join(","))
}

fn convert_item(at: usize, item: &str) -> Result<String, String> {
    let field = &FIELDS[at];
    let upper = item.to_ascii_uppercase();
    let day_field = at == 3 || at == WEEKDAY;
    if upper == "*" || (upper == "?" && day_field) {
        return Ok(upper);
    }
    if at == 3 && (upper.starts_with('L') || upper.ends_with('W')) {
        // L, LW and 15W are the same here; L-3 is refused by our reader with its reason.
        return Ok(upper);
    }
    if at == WEEKDAY {
        if upper == "L" {
            return Ok("6".into());
        }
        if let Some(day) = upper.strip_suffix('L') {
            return Ok(format!("{}L", ours(at, number(field, day)?)));
        }
        if let Some((day, nth)) = upper.split_once('#') {
            return Ok(format!("{}#{nth}", ours(at, number(field, day)?)));
        }
    }
    let (range, step) = match upper.split_once('/') {
        Some((range, step)) => (range, Some(step.parse::<u32>().map_err(|_| format!("'{item}' has no step"))?)),
        None => (upper.as_str(), None),
    };
    let (from, to) = match range.split_once('-') {
        _ if range.is_empty() || range == "*" => (field.first, field.last),
        Some((from, to)) => (number(field, from)?, number(field, to)?),
        None if step.is_some() => (number(field, range)?, field.last),
        None => {
            let one = number(field, range)?;
            return Ok(ours(at, one).to_string());
        }
    };
    Ok(span(at, (from, to), step))
}

/// A range with its step; one that wraps is listed, since its steps go on over the end.
fn span(at: usize, (from, to): (u32, u32), step: Option<u32>) -> String {
    let field = &FIELDS[at];
    let step = step.unwrap_or(1).max(1);
    let stepped = |text: String| if step > 1 { format!("{text}/{step}") } else { text };
    if (from, to) == (field.first, field.last) {
        return stepped("*".into());
    }
    if from <= to {
        return stepped(format!("{}-{}", ours(at, from), ours(at, to)));
    }
    let around = field.last - field.first + 1;
    let values = (from..=to + around).step_by(step as usize);
    let mut listed: Vec<u32> = values.map(|n| ours(at, (n - field.first) % around + field.first)).collect();
    listed.sort_unstable();
    listed.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Weekdays count from 0 here.
fn ours(at: usize, number: u32) -> u32 {
    if at == WEEKDAY { number - 1 } else { number }
}

fn number(field: &Field, text: &str) -> Result<u32, String> {
    let by_name = (field.first..).zip(field.names).find(|(_, name)| **name == text).map(|(number, _)| number);
    by_name
        .or_else(|| text.parse().ok())
        .filter(|n| (field.first..=field.last).contains(n))
        .ok_or_else(|| format!("'{text}' is not from {} to {}", field.first, field.last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ScheduleSpec;

    #[test]
    fn patterns_mean_the_same_in_our_words() {
        for (quartz, wanted) in [
            ("0 0 12 * * ?", "0 0 12 * * ?"),
            ("0 15 10 ? * MON-FRI", "0 15 10 ? * 1-5"),
            ("0 15 10 ? * 2-6", "0 15 10 ? * 1-5"),
            ("0 15 10 ? * 1,7", "0 15 10 ? * 0,6"),
            ("0 0/5 14 * * ?", "0 */5 14 * * ?"),
            ("0 3/5 14 * * ?", "0 3-59/5 14 * * ?"),
            ("0/10 * * * * ?", "*/10 * * * * ?"),
            ("0 0 8-18/2 * * ?", "0 0 8-18/2 * * ?"),
            ("0 0 22-2 * * ?", "0 0 0,1,2,22,23 * * ?"),
            ("0 0 22-4/3 * * ?", "0 0 1,4,22 * * ?"),
            ("0 0 9 ? * FRI-MON", "0 0 9 ? * 0,1,5,6"),
            ("0 15 10 L * ?", "0 15 10 L * ?"),
            ("0 15 10 LW * ?", "0 15 10 LW * ?"),
            ("0 15 10 15W * ?", "0 15 10 15W * ?"),
            ("0 15 10 ? * 6L", "0 15 10 ? * 5L"),
            ("0 15 10 ? * L", "0 15 10 ? * 6"),
            ("0 15 10 ? * 6#3", "0 15 10 ? * 5#3"),
            ("0 15 10 ? * FRI#3", "0 15 10 ? * 5#3"),
            ("0 0 0 1/2 JAN/3 ?", "0 0 0 */2 */3 ?"),
            ("0 0 0 1 1 ? 2027-2030", "0 0 0 1 1 ? 2027-2030"),
            ("0 0 0 1 1 ? 2027/2", "0 0 0 1 1 ? 2027-2099/2"),
        ] {
            let ours = convert(quartz).unwrap_or_else(|e| panic!("{quartz}: {e}"));
            assert_eq!(ours, wanted, "{quartz}");
            let spec = ScheduleSpec { cron: Some(ours), ..ScheduleSpec::default() };
            spec.compile().unwrap_or_else(|e| panic!("{quartz}: {e}"));
        }
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        for (pattern, words) in [
            ("0 0 12 * *", "5 fields"),
            ("0 0 12 1 * 2", "both day fields"),
            ("0 61 12 * * ?", "'61' is not from 0 to 59"),
            ("0 0 12 ? * 8", "'8' is not from 1 to 7"),
            ("0 0 12 ? * 0", "'0' is not from 1 to 7"),
            ("0 x/5 12 * * ?", "'X'"),
            ("0 0/x 12 * * ?", "step"),
            ("", "0 fields"),
        ] {
            let why = convert(pattern).expect_err(pattern);
            assert!(why.contains(words), "{pattern}: {why}");
        }
    }
}
