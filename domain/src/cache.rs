//! The rules of the cache that handlers have: names and keys, how long values are kept, and which keys a job wants preloaded.

use crate::job::check_name;
use crate::limits::{
    CACHE_KEY_BYTES, CACHE_NAME_BYTES, CACHE_SHARED_MS, CACHE_SHARED_SPREAD_MS, PRELOAD_ENTRIES, PRELOAD_KEYS,
};
use crate::plan::ShardSlice;
use serde_json::{Map, Value};

/// Checks a cache's name: it is a metric's label and a part of keys.
///
/// # Errors
/// A sentence.
pub fn check_cache(name: &str) -> Result<(), String> {
    check_name(name, CACHE_NAME_BYTES)
}

/// Checks a key.
///
/// # Errors
/// A sentence.
pub fn check_key(key: &str) -> Result<(), String> {
    match key.len() {
        0 => Err("a cache key must not be empty".into()),
        bytes if bytes > CACHE_KEY_BYTES => {
            Err(format!("a cache key of {bytes} bytes; {CACHE_KEY_BYTES} are the most. Use a hash of it"))
        }
        _ => Ok(()),
    }
}

/// How long the second level keeps a value: five minutes and up to one more, so that what was written together does not end together
/// and all workers ask the source at once.
#[must_use]
pub fn shared_ms(draw: u64) -> u64 {
    CACHE_SHARED_MS + draw % (CACHE_SHARED_SPREAD_MS + 1)
}

/// Keys of a cache that a job wants to have at hand before an attempt begins: in a job file `"user:{from}..{to}"`, the cache's name, a
/// colon, and a key or a range of whole numbers. `{from}`, `{to}`, `{item}` and the names of parameters stand for the attempt's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    cache: String,
    keys: String,
}

impl Preload {
    /// Reads one entry.
    ///
    /// # Errors
    /// A sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let example = "write for example \"user:{from}..{to}\": a cache, a colon, and a key or a range";
        let Some((cache, keys)) = text.split_once(':') else {
            return Err(format!("'{text}' names no cache; {example}"));
        };
        check_cache(cache).map_err(|why| format!("'{text}': {why}; {example}"))?;
        if keys.is_empty() {
            return Err(format!("'{text}' names no key; {example}"));
        }
        if keys.matches('{').count() != keys.matches('}').count() {
            return Err(format!("'{text}' has a brace without its other one; {example}"));
        }
        Ok(Preload { cache: cache.to_owned(), keys: keys.to_owned() })
    }

    /// Checks all entries of a job.
    ///
    /// # Errors
    /// A sentence about the first fault.
    pub fn check_all(entries: &[String]) -> Result<(), String> {
        if entries.len() > PRELOAD_ENTRIES {
            return Err(format!("{} entries; {PRELOAD_ENTRIES} are the most", entries.len()));
        }
        entries.iter().try_for_each(|entry| Preload::parse(entry).map(drop))
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &str {
        &self.cache
    }

    /// The keys for an attempt, [`PRELOAD_KEYS`] at most: preloading is there to help, and the rest is loaded when it is asked for. An
    /// entry that names what the attempt does not have gives none.
    #[must_use]
    pub fn keys(&self, slice: &ShardSlice, params: &Map<String, Value>) -> Vec<String> {
        if let (true, ShardSlice::List { items }) = (self.keys.contains("{item}"), slice) {
            let of = |item: &String| self.filled(slice, params, Some(item));
            return items.iter().take(PRELOAD_KEYS).filter_map(of).collect();
        }
        let Some(text) = self.filled(slice, params, None) else { return Vec::new() };
        let range = text.split_once("..").and_then(|(from, to)| {
            let from: i64 = from.trim().parse().ok()?;
            let to: i64 = to.trim().parse().ok()?;
            Some(from..=to)
        });
        match range {
            Some(range) => range.take(PRELOAD_KEYS).map(|key| key.to_string()).collect(),
            None => vec![text],
        }
    }

    fn filled(&self, slice: &ShardSlice, params: &Map<String, Value>, item: Option<&str>) -> Option<String> {
        let mut filled = String::with_capacity(self.keys.len());
        let mut rest = self.keys.as_str();
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}')?;
            filled.push_str(before);
            filled.push_str(&value_of(name, slice, params, item)?);
            rest = after;
        }
        filled.push_str(rest);
        Some(filled)
    }
}

fn value_of(name: &str, slice: &ShardSlice, params: &Map<String, Value>, item: Option<&str>) -> Option<String> {
    match (name, slice) {
        ("from", ShardSlice::Range { from, .. }) => return Some(from.to_string()),
        ("to", ShardSlice::Range { to, .. }) => return Some(to.to_string()),
        ("item", ShardSlice::Modulo { item, .. }) => return Some(item.to_string()),
        ("item", _) if item.is_some() => return item.map(str::to_owned),
        _ => {}
    }
    match params.get(name)? {
        Value::String(text) => Some(text.clone()),
        number @ Value::Number(_) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(entry: &str, slice: &ShardSlice) -> Vec<String> {
        let mut params = Map::new();
        params.insert("date".into(), "2026-03-01".into());
        Preload::parse(entry).unwrap().keys(slice, &params)
    }

    #[test]
    fn keys_come_from_the_slice_and_the_parameters() {
        let range = ShardSlice::Range { from: 3, to: 5 };
        assert_eq!(keys("user:{from}..{to}", &range), ["3", "4", "5"]);
        assert_eq!(keys("rate:{date}", &range), ["2026-03-01"]);
        assert_eq!(keys("rate:eur/{date}", &range), ["eur/2026-03-01"]);
        assert_eq!(keys("user:{nobody}", &range), Vec::<String>::new());
        let list = ShardSlice::List { items: vec!["UA".into(), "AA".into()] };
        assert_eq!(keys("carrier:{item}", &list), ["UA", "AA"]);
        assert_eq!(keys("user:{from}..{to}", &list), Vec::<String>::new());
        assert_eq!(keys("m:{item}", &ShardSlice::Modulo { total: 4, item: 2 }), ["2"]);
    }

    #[test]
    fn a_range_is_bounded() {
        let all = ShardSlice::Range { from: i64::MIN, to: i64::MAX };
        assert_eq!(keys("user:{from}..{to}", &all).len(), PRELOAD_KEYS);
        assert_eq!(keys("user:9..1", &all), Vec::<String>::new());
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (entry, words) in
            [("user", "names no cache"), ("us er:1", "us er"), ("user:", "names no key"), ("user:{from", "brace")]
        {
            let sentence = Preload::parse(entry).unwrap_err();
            assert!(sentence.contains(words), "{entry}: {sentence}");
        }
        assert!(Preload::check_all(&vec!["a:1".to_owned(); PRELOAD_ENTRIES + 1]).is_err());
        assert!(check_key("").is_err() && check_key(&"x".repeat(CACHE_KEY_BYTES + 1)).is_err());
    }

    #[test]
    fn the_second_level_keeps_values_for_five_to_six_minutes() {
        for draw in [0, 1, 60_000, 60_001, u64::MAX] {
            assert!((300_000..=360_000).contains(&shared_ms(draw)));
        }
        assert_ne!(shared_ms(1), shared_ms(2));
    }
}
