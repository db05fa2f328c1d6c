//! One field of a cron pattern: its limits, its names, and the list, range and step grammar that all fields share.

use super::calendar::YEARS;

/// What a field can hold.
#[derive(Clone, Copy)]
pub(super) struct Field {
    /// As people call it, in messages.
    name: &'static str,
    pub min: i32,
    pub max: i32,
    /// Names for the values from `min` on.
    names: &'static [&'static str],
    /// What else the field may hold, for the message on an unknown character.
    also: &'static str,
}

pub(super) const SECOND: Field = Field { name: "seconds", min: 0, max: 59, names: &[], also: "" };
pub(super) const MINUTE: Field = Field { name: "minutes", min: 0, max: 59, names: &[], also: "" };
pub(super) const HOUR: Field = Field { name: "hours", min: 0, max: 23, names: &[], also: "" };
pub(super) const DAY: Field = Field { name: "days of the month", min: 1, max: 31, names: &[], also: ", L, LW or 15W" };
pub(super) const MONTH: Field =
    Field { name: "months", min: 1, max: 12, names: &MONTHS, also: " or names such as JAN" };
pub(super) const WEEKDAY: Field =
    Field { name: "weekdays", min: 0, max: 7, names: &WEEKDAYS, also: ", names such as MON, 5#2 or 5L" };
pub(super) const YEAR: Field = Field { name: "years", min: *YEARS.start(), max: *YEARS.end(), names: &[], also: "" };

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];

impl Field {
    /// A message that names the field.
    pub fn says(&self, message: &str) -> String {
        format!("{}: {message}", self.name)
    }

    /// The items of a list.
    pub fn items<'a>(&self, text: &'a str) -> Result<Vec<&'a str>, String> {
        let items: Vec<&str> = text.split(',').collect();
        if items.iter().any(|i| i.is_empty()) {
            return Err(self.says(&format!("'{text}' has a comma without a value beside it")));
        }
        // "*,5" is most often a slip for "*/5", which is quite another thing.
        if items.len() > 1 && items.iter().any(|i| matches!(*i, "*" | "?" | "+")) {
            return Err(
                self.says(&format!("'{text}' is a list with a value that already means all; leave the others out"))
            );
        }
        Ok(items)
    }

    /// First, last and step of `*`, `n`, `a-b`, `*/n` or `a-b/n`.
    pub fn range(&self, item: &str) -> Result<(i32, i32, i32), String> {
        let (span, step) = match item.split_once('/') {
            None => (item, None),
            Some((span, step)) => (span, Some(self.step(item, step)?)),
        };
        if span == "*" {
            return Ok((self.min, self.max, step.unwrap_or(1)));
        }
        let Some((from, to)) = span.split_once('-') else {
            let Some(step) = step else { return self.number(item).map(|n| (n, n, 1)) };
            let start = if span.is_empty() { self.min } else { self.number(span)? };
            return Err(self.says(&format!(
                "'{item}' means different things in different products; write {start}-{}/{step} or */{step}",
                if self.max == 7 { 6 } else { self.max }
            )));
        };
        let (first, mut last) = (self.number(from)?, self.number(to)?);
        // Only at a range's end does the name stand for 7: FRI-SUN.
        if self.max == 7 && last == 0 && first > 0 && to.starts_with(|c: char| c.is_ascii_alphabetic()) {
            last = 7;
        }
        if first > last {
            return Err(
                self.says(&format!("'{item}' runs backwards; write {}", self.unwrapped((from, first), (to, last))))
            );
        }
        Ok((first, last, step.unwrap_or(1)))
    }

    /// How to write a range that runs over the end of its field.
    fn unwrapped(&self, (from, first): (&str, i32), (to, last): (&str, i32)) -> String {
        let joined = |a: &str, a_value: i32, b: &str, b_value: i32| {
            if a_value == b_value { a.to_string() } else { format!("{a}-{b}") }
        };
        let (start, end) = match self.names {
            names if from.starts_with(|c: char| c.is_ascii_alphabetic()) => (
                names.first().copied().unwrap_or_default().to_string(),
                names.last().copied().unwrap_or_default().to_string(),
            ),
            _ => (self.min.to_string(), if self.max == 7 { "6".into() } else { self.max.to_string() }),
        };
        let end_value = if self.max == 7 { 6 } else { self.max };
        if self.max == 7 && first == 7 {
            return joined("0", 0, to, last);
        }
        format!("{},{}", joined(from, first, &end, end_value), joined(&start, self.min, to, last))
    }

    fn step(&self, item: &str, step: &str) -> Result<i32, String> {
        match digits(step) {
            Some(0) => Err(self.says(&format!("'{item}' has a step of 0; the least is 1"))),
            Some(n) if n > self.max => Err(self.says(&format!(
                "'{item}' has a step of {n}, but the field ends at {}; for a fixed rate write every = \"90m\" instead of cron",
                self.max
            ))),
            Some(n) => Ok(n),
            None => Err(self.says(&format!("'{item}' has no number after its '/'; write for example */5"))),
        }
    }

    /// One value, as a number or a name.
    pub fn number(&self, text: &str) -> Result<i32, String> {
        if let Some(n) = digits(text) {
            return if n < self.min || n > self.max {
                Err(self.says(&format!("{text} is not from {} to {}{}", self.min, self.max, self.hint(n))))
            } else {
                Ok(n)
            };
        }
        let upper = text.to_uppercase();
        if let Some((value, _)) = (self.min..).zip(self.names).find(|(_, name)| **name == upper) {
            return Ok(value);
        }
        let near = self.names.iter().find(|n| upper.starts_with(**n) || strsim::damerau_levenshtein(&upper, n) == 1);
        Err(self.says(&match (near, text) {
            (Some(name), _) => format!("'{text}' is not known; did you mean {name}?"),
            (None, "?") => "'?' stands for any day, in the two day fields only; write '*'".into(),
            (None, "H" | "h") => "'H' is Jenkins's; write a number, different for each job to spread them".into(),
            (None, "") => "a number is missing".into(),
            _ => format!(
                "'{text}' is not known; there are numbers from {} to {}{}, with ',', '-', '/' and '*'",
                self.min, self.max, self.also
            ),
        }))
    }

    fn hint(&self, n: i32) -> &'static str {
        match (self.max, n) {
            (23, 24) => "; midnight is 0",
            (7, _) => "; 0 and 7 are Sunday, 1 is Monday",
            _ => "",
        }
    }
}

/// A number of ASCII digits only: `parse` would take a '+', and other scripts' digits look alike.
fn digits(text: &str) -> Option<i32> {
    (!text.is_empty() && text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}
