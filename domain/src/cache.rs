//! The rules of the cache that handlers have: names and keys, how long values are kept, and which keys a job wants preloaded.

use crate::job::check_name;
use crate::limits::{
    CACHE_KEY_BYTES, CACHE_NAME_BYTES, CACHE_SHARED_MS, CACHE_SHARED_SPREAD_MS, PRELOAD_ENTRIES, PRELOAD_KEYS,
    PRELOAD_QUERY_BYTES,
};
use crate::plan::ShardSlice;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::fmt;

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

/// One entry of a job's `preload`: keys by their names, or a query that finds them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PreloadSpec {
    /// See [`Preload`].
    Keys(String),
    /// See [`PreloadQuery`].
    Query(PreloadQuery),
}

/// A query whose first column is the keys of a cache. It only reads, in the ledger's database or in one of the worker's configuration;
/// `:shard_from`, `:modulo_item` and the other names of a `sql` handler, and the execution's parameters, are bound.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreloadQuery {
    /// The cache.
    pub cache: String,
    /// One `SELECT`.
    pub query: String,
    /// Where it runs, by a name of the worker's own configuration; absent: in the ledger's database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
}

impl From<&str> for PreloadSpec {
    fn from(keys: &str) -> Self {
        PreloadSpec::Keys(keys.to_owned())
    }
}

/// By hand, since serde's own error would be that nothing matched.
impl<'de> Deserialize<'de> for PreloadSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entry;
        impl<'de> Visitor<'de> for Entry {
            type Value = PreloadSpec;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"CACHE:KEYS\" or { cache = \"…\", query = \"SELECT …\" }")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<PreloadSpec, E> {
                Ok(text.into())
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PreloadSpec, A::Error> {
                PreloadQuery::deserialize(MapAccessDeserializer::new(map)).map(PreloadSpec::Query)
            }
        }
        deserializer.deserialize_any(Entry)
    }
}

impl PreloadSpec {
    /// Checks all entries of a job.
    ///
    /// # Errors
    /// A sentence about the first fault.
    pub fn check_all(entries: &[PreloadSpec]) -> Result<(), String> {
        if entries.len() > PRELOAD_ENTRIES {
            return Err(format!("{} entries; {PRELOAD_ENTRIES} are the most", entries.len()));
        }
        entries.iter().try_for_each(|entry| match entry {
            PreloadSpec::Keys(text) => Preload::parse(text).map(drop),
            PreloadSpec::Query(query) => query.check(),
        })
    }
}

impl PreloadQuery {
    fn check(&self) -> Result<(), String> {
        let Self { cache, query, database } = self;
        check_cache(cache).map_err(|why| format!("cache = \"{cache}\": {why}"))?;
        if let Some(name) = database {
            check_name(name, 32).map_err(|why| format!("database = \"{name}\": {why}"))?;
        }
        if query.len() > PRELOAD_QUERY_BYTES {
            return Err(format!("a query of {} bytes; {PRELOAD_QUERY_BYTES} are the most", query.len()));
        }
        let first = query.split_whitespace().next().unwrap_or_default();
        if !["select", "with"].contains(&first.to_ascii_lowercase().as_str()) {
            return Err(format!(
                "the query of cache '{cache}' begins with '{first}'; it is one SELECT whose first column is the keys"
            ));
        }
        Ok(())
    }
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
        assert!(PreloadSpec::check_all(&vec!["a:1".into(); PRELOAD_ENTRIES + 1]).is_err());
        assert!(check_key("").is_err() && check_key(&"x".repeat(CACHE_KEY_BYTES + 1)).is_err());
    }

    #[test]
    fn a_query_is_read_and_checked() {
        let job = |preload: &str| {
            crate::jobfile::parse(&format!("[job.j]\nhandler = {{ rust = \"noop\" }}\npreload = [{preload}]\n"))
        };
        let spec = job("\"user:1\", { cache = \"user\", query = \"SELECT id FROM u\", database = \"crm\" }")
            .unwrap()
            .remove(0);
        let query =
            PreloadQuery { cache: "user".into(), query: "SELECT id FROM u".into(), database: Some("crm".into()) };
        assert_eq!(spec.preload, ["user:1".into(), PreloadSpec::Query(query)]);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<crate::JobSpec>(&json).unwrap(), spec, "as the ledger keeps it");
        for (entry, words) in [
            ("{ cache = \"user\", query = \"DELETE FROM u\" }", "begins with 'DELETE'"),
            ("{ cache = \"user\", query = \"\" }", "one SELECT"),
            ("{ cache = \"us er\", query = \"SELECT 1\" }", "us er"),
            ("{ cache = \"user\", query = \"SELECT 1\", database = \"a b\" }", "a b"),
            ("{ cache = \"user\" }", "query"),
            ("{ cache = \"user\", sql = \"SELECT 1\" }", "sql"),
            ("7", "CACHE:KEYS"),
        ] {
            let sentence = job(entry).unwrap_err().to_string();
            assert!(sentence.contains(words), "{entry}: {sentence}");
        }
    }

    #[test]
    fn the_second_level_keeps_values_for_five_to_six_minutes() {
        for draw in [0, 1, 60_000, 60_001, u64::MAX] {
            assert!((300_000..=360_000).contains(&shared_ms(draw)));
        }
        assert_ne!(shared_ms(1), shared_ms(2));
    }
}
