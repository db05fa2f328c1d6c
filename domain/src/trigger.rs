//! Trigger messages as people type them into the management UI: read kindly, checked strictly, refused in a sentence.

use crate::limits;
use crate::messages::TriggerRequest;
use crate::trigger_fields;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// A refused message: what is wrong and what to type instead. Goes into the header `x-shardcron-error`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TriggerError(pub String);

const EXAMPLE: &str = r#"{"job": "reconcile", "params": {"date": "2013-01-31"}, "request_id": "any-text"}"#;

/// Reads a message. `routed_to` is the job's name from the routing key, if the message came by the trigger exchange.
///
/// # Errors
/// A sentence for the person who typed it.
pub fn parse(payload: &[u8], routed_to: Option<&str>) -> Result<TriggerRequest, TriggerError> {
    let fault = |m: String| Err(TriggerError(m));
    if payload.len() > limits::TRIGGER_BYTES {
        return fault(format!(
            "the message has {} bytes; at most {} are read. Put the data where the job can read it, and its place into params",
            payload.len(),
            limits::TRIGGER_BYTES
        ));
    }
    let Ok(text) = std::str::from_utf8(payload) else {
        return fault(format!(
            "the message is not UTF-8 text (compressed, or UTF-16?); send it as plain text: {EXAMPLE}"
        ));
    };
    if text.starts_with('\u{feff}') {
        return fault("the message begins with a byte order mark; send it as UTF-8 without one".into());
    }
    if text.contains('\0') {
        return fault(format!("the message contains NUL characters (UTF-16?); send it as UTF-8 text: {EXAMPLE}"));
    }
    let text = text.trim();
    if text.is_empty() {
        return match routed_to {
            Some(job) => named(job),
            None => fault(format!("the message is empty and names no job; type {EXAMPLE}, or the job's name alone")),
        };
    }
    if looks_like_a_name(text) {
        return agree(named(text)?, routed_to);
    }
    match serde_json::from_str::<Strict>(text).map(|s| s.0) {
        Ok(Value::Object(fields)) => from_fields(fields, routed_to),
        Ok(Value::String(name)) => agree(named(&name)?, routed_to),
        Ok(_) => fault(format!("the message must be a JSON object or a job's name; type {EXAMPLE}")),
        Err(e) => fault(format!("the message is not JSON that can be read ({e}); type {EXAMPLE}")),
    }
}

fn looks_like_a_name(text: &str) -> bool {
    !matches!(text, "null" | "true" | "false")
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !text.bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b'-')
}

fn named(job: &str) -> Result<TriggerRequest, TriggerError> {
    crate::job::check_name(job, limits::JOB_NAME_BYTES).map_err(TriggerError)?;
    Ok(TriggerRequest { job: job.into(), ..TriggerRequest::default() })
}

fn agree(request: TriggerRequest, routed_to: Option<&str>) -> Result<TriggerRequest, TriggerError> {
    match routed_to {
        Some(routed) if routed != request.job => Err(TriggerError(format!(
            "the routing key names job '{routed}' and the message names job '{}'; make them the same, or leave one out",
            request.job
        ))),
        _ => Ok(request),
    }
}

fn from_fields(mut fields: Map<String, Value>, routed_to: Option<&str>) -> Result<TriggerRequest, TriggerError> {
    let fault = |m: String| Err(TriggerError(m));
    let job = match (fields.remove("job"), routed_to) {
        (Some(Value::String(name)), _) => name,
        (Some(other), _) => return fault(format!("'job' must be a name in quotes, not {other}")),
        (None, Some(routed)) => routed.into(),
        (None, None) => return fault(format!("the message names no job; type {EXAMPLE}")),
    };
    let params = match fields.remove("params") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(params)) => params,
        Some(other) => {
            return fault(format!("'params' must be an object such as {{\"date\": \"2013-01-31\"}}, not {other}"));
        }
    };
    let request_id = match fields.remove("request_id") {
        None | Some(Value::Null) => None,
        Some(Value::String(id)) => Some(check_request_id(id)?),
        Some(other) => return fault(format!("'request_id' must be text in quotes, not {other}")),
    };
    let trigger_fields::Fields { at, shards, by, backfill } = trigger_fields::take(&mut fields)?;
    if let Some(unknown) = fields.keys().next() {
        let meant = match unknown.as_str() {
            // Other schedulers' words, which are no misspellings.
            "args" | "arguments" | "parameters" | "payload" => Some("params"),
            "id" | "task_id" | "execution_id" => Some("request_id"),
            "run_at" | "nominal" | "instant" | "when" | "scheduled_time" => Some("at"),
            "shard" | "sharding" => Some("shards"),
            "who" | "user" | "author" => Some("by"),
            _ => suggest(unknown, ["job", "params", "request_id"].into_iter().chain(trigger_fields::NAMES)),
        };
        let hint = meant.map_or(String::new(), |m| format!(" (did you mean '{m}'?)"));
        return fault(format!(
            "unknown field '{unknown}'{hint}; known are job, params, request_id, {}",
            trigger_fields::NAMES.join(", ")
        ));
    }
    let size = serde_json::to_vec(&params).map_or(usize::MAX, |v| v.len());
    if size > limits::PARAMS_BYTES {
        return fault(format!(
            "params are {size} bytes as JSON; at most {} travel with an execution",
            limits::PARAMS_BYTES
        ));
    }
    let request = TriggerRequest { params, request_id, at, shards, by, backfill, ..named(&job)? };
    agree(request, routed_to)
}

/// Checks an id that makes a trigger idempotent. Blanks at its ends are refused, because databases differ on whether they count
/// (case I-02).
///
/// # Errors
/// A sentence.
pub fn check_request_id(id: String) -> Result<String, TriggerError> {
    if id.is_empty() || id.len() > limits::REQUEST_ID_BYTES {
        return Err(TriggerError(format!(
            "a request_id has 1 to {} bytes; this one has {}",
            limits::REQUEST_ID_BYTES,
            id.len()
        )));
    }
    if id.trim() != id || id.chars().any(char::is_control) {
        return Err(TriggerError("a request_id can't begin or end with a blank or contain control characters".into()));
    }
    Ok(id)
}

/// The request id of a message that has none of its own but an identity given by its transport: that identity where it can be one,
/// else its hash, so that whatever a sender puts into `message_id` still names the same request each time.
#[must_use]
pub fn transport_request_id(id: &str) -> String {
    check_request_id(id.to_owned())
        .unwrap_or_else(|_| format!("message-{:032x}", xxhash_rust::xxh3::xxh3_128(id.as_bytes())))
}

/// The candidate that a misspelt word most probably means.
pub fn suggest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.into_iter().map(|c| (strsim::damerau_levenshtein(word, c), c));
    let (distance, best) = scored.min_by_key(|(d, _)| *d)?;
    (distance <= (word.chars().count() / 3).max(1)).then_some(best)
}

/// The sentence for a name that no job has.
#[must_use]
pub fn unknown_job<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> TriggerError {
    TriggerError(match suggest(name, known) {
        Some(near) => format!("unknown job '{name}'; did you mean '{near}'?"),
        None => format!("unknown job '{name}'; 'shardcron jobs list' shows the jobs there are"),
    })
}

/// JSON without what would lose something in silence: a key twice, a number that can't be kept exactly, nesting without end.
struct Strict(Value);

impl<'de> de::Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        StrictSeed { depth: 0 }.deserialize_value(deserializer).map(Strict)
    }
}

#[derive(Clone, Copy)]
struct StrictSeed {
    depth: usize,
}

impl StrictSeed {
    fn deserialize_value<'de, D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn deeper<E: de::Error>(self) -> Result<Self, E> {
        if self.depth >= limits::JSON_DEPTH {
            return Err(E::custom(format!("nested deeper than {} levels", limits::JSON_DEPTH)));
        }
        Ok(StrictSeed { depth: self.depth + 1 })
    }
}

impl<'de> de::DeserializeSeed<'de> for StrictSeed {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.deserialize_value(deserializer)
    }
}

impl<'de> Visitor<'de> for StrictSeed {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
        if v.fract() == 0.0 && v.abs() >= 9_007_199_254_740_992.0 {
            return Err(E::custom("a whole number too large to be kept exactly; send it as text in quotes"));
        }
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number out of range"))
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(seed)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(seed)?;
            if fields.contains_key(&key) {
                return Err(de::Error::custom(format!("the key '{key}' stands there twice")));
            }
            fields.insert(key, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(payload: impl AsRef<[u8]>) -> String {
        parse(payload.as_ref(), None).expect_err("must be refused").0
    }

    #[test]
    fn g_01_what_a_person_may_type() {
        let plain = TriggerRequest { job: "demo".into(), ..TriggerRequest::default() };
        assert_eq!(parse(br#"{"job":"demo"}"#, None), Ok(plain.clone()));
        assert_eq!(parse(b"demo", None), Ok(plain.clone()));
        assert_eq!(parse(b" demo\n", None), Ok(plain.clone()));
        assert_eq!(parse(b"\"demo\"", None), Ok(plain.clone()));
        assert_eq!(parse(b"", Some("demo")), Ok(plain.clone()));
        assert_eq!(parse(b"{}", Some("demo")), Ok(plain.clone()));
        assert_eq!(parse(br#"{"params":null,"request_id":null}"#, Some("demo")), Ok(plain));
        let full = parse(br#"{"job":"demo","params":{"date":"2013-01-31"},"request_id":"r1"}"#, None).unwrap();
        assert_eq!((full.params["date"].as_str(), full.request_id.as_deref()), (Some("2013-01-31"), Some("r1")));
    }

    #[test]
    fn g_02_every_malformed_message_is_refused_in_a_sentence() {
        let utf16: Vec<u8> = r#"{"job":"demo"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let deep = format!(
            "{}1{}",
            r#"{"job":"demo","params":{"a":"#.to_string() + &"[".repeat(10_000),
            "]".repeat(10_000) + "}}"
        );
        let cases: Vec<Vec<u8>> = vec![
            b"".to_vec(),
            b"{".to_vec(),
            b"[]".to_vec(),
            b"null".to_vec(),
            b"12".to_vec(),
            utf16,
            "\u{feff}{\"job\":\"demo\"}".into(),
            vec![0x1f, 0x8b, 8, 0, 0, 0],
            br#"{"job":1}"#.to_vec(),
            br#"{"job":"demo","params":[1]}"#.to_vec(),
            vec![b' '; 10 << 20],
            deep.into(),
            br#"{"job":"a","job":"demo"}"#.to_vec(),
            br#"{"job":"demo","params":{"a":1,"a":2}}"#.to_vec(),
            br#"{"job":"Not A Name"}"#.to_vec(),
        ];
        for case in cases {
            let sentence = refused(&case);
            assert!(sentence.len() > 20 && sentence.len() < 600, "{sentence}");
        }
    }

    #[test]
    fn g_07_numbers_are_kept_or_refused_never_bent() {
        let ok = parse(
            br#"{"job":"demo","params":{"id":9007199254740993,"big":18446744073709551615,"t":"2026-13-01"}}"#,
            None,
        )
        .unwrap();
        assert_eq!(serde_json::to_string(&ok.params["id"]).unwrap(), "9007199254740993");
        assert_eq!(serde_json::to_string(&ok.params["big"]).unwrap(), "18446744073709551615");
        assert_eq!(ok.params["t"], "2026-13-01");
        assert!(refused(r#"{"job":"demo","params":{"x":1e400}}"#).contains("out of range"));
        assert!(refused(r#"{"job":"demo","params":{"x":18446744073709551617}}"#).contains("quotes"));
    }

    /// What runs, and with which environment, is the job's alone; a parameter is data, whatever it is called.
    #[test]
    fn z_03_a_message_sets_neither_a_command_nor_an_environment() {
        for field in ["handler", "exec", "command", "env", "url", "headers", "sql", "user", "dir"] {
            let refused = refused(format!(r#"{{"job":"demo","{field}":["sh","-c","id"]}}"#));
            assert!(refused.contains(&format!("'{field}'")), "{refused}");
        }
    }

    #[test]
    fn g_08_a_misspelt_field_is_named() {
        assert!(refused(r#"{"job":"demo","parms":{}}"#).contains("did you mean 'params'"));
        assert!(refused(r#"{"job":"demo","priorty":1}"#).contains("unknown field 'priorty'"));
        assert!(refused(r#"{"job":"demo","args":{}}"#).contains("did you mean 'params'"));
    }

    #[test]
    fn i_02_blanks_at_the_ends_of_a_request_id_are_refused() {
        for id in ["r1 ", " r1", "", "a\u{0}b", "a\nb"] {
            assert!(check_request_id(id.into()).is_err(), "{id:?}");
        }
    }

    #[test]
    fn g_06_any_message_id_makes_a_request_id_that_is_the_same_each_time() {
        assert_eq!(transport_request_id("order-7"), "order-7");
        let long = "x".repeat(255);
        let made = transport_request_id(&long);
        assert_eq!((check_request_id(made.clone()), transport_request_id(&long)), (Ok(made.clone()), made));
        assert_ne!(transport_request_id(&"y".repeat(255)), transport_request_id(&long));
    }

    #[test]
    fn a_misspelt_job_is_suggested() {
        assert_eq!(
            unknown_job("recncile", ["load", "reconcile"]).0,
            "unknown job 'recncile'; did you mean 'reconcile'?"
        );
        assert!(unknown_job("xyz", ["load", "reconcile"]).0.contains("jobs list"));
    }
}
