//! What differs between two versions of a job, key by key.

use serde::Serialize;
use serde_json::Value;
use shardcron_domain::JobSpec;
use std::collections::BTreeMap;
use std::fmt;

/// Of a longer value people see this much.
const SHOWN: usize = 160;

/// One key whose value differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    pub key: String,
    pub old: Option<Value>,
    pub new: Option<Value>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| match value {
            None => "-".to_owned(),
            Some(value) => {
                let text = value.to_string();
                match text.char_indices().nth(SHOWN) {
                    Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
                    None => text,
                }
            }
        };
        write!(f, "{}: {} → {}", self.key, shown(&self.old), shown(&self.new))
    }
}

/// The keys whose values differ; all of the new ones if the old specification can't be read.
pub fn changes(old: Option<&JobSpec>, new: &JobSpec) -> Vec<Change> {
    let (old, new) = (old.map(leaves).unwrap_or_default(), leaves(new));
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter()
        .filter(|key| old.get(*key) != new.get(*key))
        .map(|key| Change { key: key.clone(), old: old.get(key).cloned(), new: new.get(key).cloned() })
        .collect()
}

fn leaves(spec: &JobSpec) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    if let Ok(Value::Object(keys)) = serde_json::to_value(spec) {
        for (key, value) in keys.into_iter().filter(|(key, _)| key != "name") {
            collect(key, value, &mut found);
        }
    }
    found
}

fn collect(key: String, value: Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(inner) if !inner.is_empty() => {
            for (name, value) in inner {
                collect(format!("{key}.{name}"), value, found);
            }
        }
        // A key that is not there and one that says nothing are the same.
        Value::Null => {}
        Value::Object(_) => {}
        value => {
            found.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(text: &str) -> JobSpec {
        shardcron_domain::jobfile::parse(&format!("[job.a]\nhandler = {{ rust = \"noop\" }}\n{text}"))
            .unwrap()
            .remove(0)
    }

    #[test]
    fn each_key_that_differs_is_named_with_both_values() {
        let old = job("schedule = { every = \"5m\" }\nparams = { a = 1, b = { c = \"x\" } }\n");
        let new = job("schedule = { cron = \"@daily\" }\nparams = { a = 2, b = { c = \"x\" } }\ntier = \"bulk\"\n");
        let lines: Vec<String> = changes(Some(&old), &new).iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "params.a: 1 → 2",
                "schedule.cron: - → \"@daily\"",
                "schedule.every: \"5m\" → -",
                "tier: \"core\" → \"bulk\""
            ]
        );
        assert_eq!(changes(Some(&new), &new), []);
        let long = Change { key: "k".into(), old: None, new: Some(Value::String("é".repeat(500))) };
        assert!(long.to_string().ends_with("… (1002 bytes)"), "{long}");
    }
}
