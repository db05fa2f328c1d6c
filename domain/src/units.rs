//! Durations as people write them, and instants as the ledger stores them.
//!
//! An instant is an `i64`: milliseconds since 1970-01-01T00:00:00Z, in a variable whose name ends in `_ms`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A span of time in whole milliseconds. In files it is text with units: `"250ms"`, `"30s"`, `"1h30m"`, `"7d"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub u64);

const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// The longest span that is accepted: a hundred years. Longer is a slip of the finger, and would overflow sums.
pub const SPAN_MAX: Span = Span(100 * 366 * 86_400_000);

impl Span {
    /// From whole seconds.
    #[must_use]
    pub const fn secs(n: u64) -> Self {
        Span(n * 1_000)
    }

    /// From whole minutes.
    #[must_use]
    pub const fn mins(n: u64) -> Self {
        Span(n * 60_000)
    }

    /// In milliseconds, as the ledger's instants are.
    #[must_use]
    pub const fn as_ms(self) -> i64 {
        self.0 as i64
    }

    /// As the standard library's type, for timers.
    #[must_use]
    pub const fn as_std(self) -> std::time::Duration {
        std::time::Duration::from_millis(self.0)
    }

    /// Reads `"1h30m"`.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let wrong = |why: &str| {
            format!("'{text}' is not a duration ({why}); write for example \"250ms\", \"30s\", \"1h30m\" or \"7d\"")
        };
        if trimmed.is_empty() {
            return Err(wrong("it is empty"));
        }
        let mut total: u64 = 0;
        let mut rest = trimmed;
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            if digits == 0 {
                return Err(wrong("a number is missing"));
            }
            let number: u64 = rest[..digits].parse().map_err(|_| wrong("the number is too large"))?;
            rest = rest[digits..].trim_start();
            let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
            let unit = &rest[..letters];
            if unit.is_empty() {
                return Err(wrong("the unit is missing"));
            }
            let (_, factor) =
                UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(|| wrong("units are d, h, m, s and ms"))?;
            total = number
                .checked_mul(*factor)
                .and_then(|ms| total.checked_add(ms))
                .ok_or_else(|| wrong("it is too long"))?;
            rest = rest[letters..].trim_start();
        }
        if Span(total) > SPAN_MAX {
            return Err(wrong("it is longer than a hundred years"));
        }
        Ok(Span(total))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0s");
        }
        let mut left = self.0;
        for (unit, factor) in UNITS {
            if left >= factor {
                write!(f, "{}{unit}", left / factor)?;
                left %= factor;
            }
        }
        Ok(())
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl serde::de::Visitor<'_> for Text {
            type Value = Span;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration in quotes with its unit, such as \"30s\" or \"1h30m\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Span, E> {
                Span::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Text)
    }
}

/// An instant in RFC 3339 with `Z`, milliseconds only where there are some; for messages, keys and logs.
#[must_use]
pub fn rfc3339(instant_ms: i64) -> String {
    use chrono::{DateTime, SecondsFormat};
    match DateTime::from_timestamp_millis(instant_ms) {
        Some(t) => t.to_rfc3339_opts(SecondsFormat::AutoSi, true),
        None => format!("{instant_ms} ms"),
    }
}

/// Reads an instant in RFC 3339. A zone is required: a time without one has meant two things to two people before.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn parse_instant(text: &str) -> Result<i64, String> {
    chrono::DateTime::parse_from_rfc3339(text.trim()).map(|t| t.timestamp_millis()).map_err(|_| {
        format!("'{text}' is not an instant; write it with its zone, such as 2026-03-08T02:30:00Z or 2026-03-08T02:30:00-05:00")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_and_print() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("1h30m", 5_400_000), ("7d", 604_800_000), ("1m 5s", 65_000)]
        {
            assert_eq!(Span::parse(text), Ok(Span(ms)), "{text}");
        }
        assert_eq!(Span(5_400_000).to_string(), "1h30m");
        assert_eq!(Span(61_001).to_string(), "1m1s1ms");
        for bad in ["", "30", "-1s", "1y", "1e18s", "99999999999999999999s", "40000d", "s"] {
            assert!(Span::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn instants_need_a_zone() {
        assert_eq!(parse_instant("2026-03-08T02:30:00-05:00"), Ok(1_772_955_000_000));
        assert!(parse_instant("2026-03-08T02:30").is_err());
        assert_eq!(rfc3339(1_772_955_000_000), "2026-03-08T07:30:00Z");
        assert_eq!(rfc3339(1_772_955_000_123), "2026-03-08T07:30:00.123Z");
    }
}
