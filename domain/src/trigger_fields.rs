//! What a trigger may say beyond the job, its parameters and the request's id.

use crate::backfill::BackfillRequest;
use crate::limits::WHO_BYTES;
use crate::override_plan::ShardsWanted;
use crate::trigger::TriggerError;
use crate::units::parse_instant;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Fields {
    pub(crate) at: Option<String>,
    pub(crate) shards: Option<ShardsWanted>,
    pub(crate) by: Option<String>,
    pub(crate) backfill: Option<BackfillRequest>,
}

/// Their names, for the sentence about an unknown one.
pub(crate) const NAMES: [&str; 4] = ["at", "shards", "by", "backfill"];

/// Takes them out of a message's fields.
pub(crate) fn take(fields: &mut Map<String, Value>) -> Result<Fields, TriggerError> {
    let fault = |m: String| Err(TriggerError(m));
    let at = match fields.remove("at") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => match parse_instant(&text) {
            Ok(_) => Some(text),
            Err(e) => return fault(format!("'at': {e}")),
        },
        Some(other) => {
            return fault(format!("'at' must be an instant in quotes such as \"2026-03-08T02:30:00Z\", not {other}"));
        }
    };
    let by = match fields.remove("by") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) if text.len() > WHO_BYTES || text.chars().any(char::is_control) => {
            return fault(format!("'by' is a name of at most {WHO_BYTES} bytes without control characters"));
        }
        Some(Value::String(text)) => Some(text).filter(|text| !text.trim().is_empty()),
        Some(other) => return fault(format!("'by' must be a name in quotes, not {other}")),
    };
    let shards = object(fields.remove("shards"), "shards", r#"{"count": 4} or {"only": [3, 5]}"#)?;
    let example = r#"{"from": "2026-03-01T00:00:00Z", "to": "2026-03-08T00:00:00Z"}"#;
    let backfill = object(fields.remove("backfill"), "backfill", example)?;
    if at.is_some() && backfill.is_some() {
        return fault("'at' names one instant and 'backfill' many; leave one out".into());
    }
    Ok(Fields { at, shards, by, backfill })
}

fn object<T: DeserializeOwned>(value: Option<Value>, name: &str, example: &str) -> Result<Option<T>, TriggerError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value)
            .map(Some)
            .map_err(|e| TriggerError(format!("'{name}' can't be read ({e}); write it like {example}"))),
    }
}

#[cfg(test)]
mod tests {
    use crate::trigger::parse;

    fn refused(payload: &str) -> String {
        parse(payload.as_bytes(), None).expect_err("must be refused").0
    }

    #[test]
    fn g_08_each_field_is_read_or_refused_in_a_sentence() {
        let full = parse(
            br#"{"job":"demo","at":"2026-03-08T02:30:00-05:00","shards":{"count":4,"only":[1]},"by":"ops"}"#,
            None,
        )
        .unwrap();
        assert_eq!((full.at.as_deref(), full.by.as_deref()), (Some("2026-03-08T02:30:00-05:00"), Some("ops")));
        assert_eq!(full.shards.as_ref().and_then(|s| s.count), Some(4));
        let again = serde_json::to_vec(&full).unwrap();
        assert_eq!(parse(&again, None), Ok(full), "what the command line sends is what a person types");
        let fill = parse(br#"{"job":"demo","backfill":{"from":"a","to":"b","force":true}}"#, None).unwrap();
        assert!(fill.backfill.unwrap().force);
        for (payload, words) in [
            (r#"{"job":"demo","at":"2026-03-08T02:30"}"#, "with its zone"),
            (r#"{"job":"demo","at":7}"#, "in quotes"),
            (r#"{"job":"demo","run_at":"2026-03-08T02:30"}"#, "did you mean 'at'"),
            (r#"{"job":"demo","shard":4}"#, "did you mean 'shards'"),
            (r#"{"job":"demo","shards":4}"#, "write it like"),
            (r#"{"job":"demo","shards":{"onyl":[1]}}"#, "onyl"),
            (r#"{"job":"demo","by":{}}"#, "in quotes"),
            (r#"{"job":"demo","backfill":{"from":"x"}}"#, "write it like"),
            (r#"{"job":"demo","at":"2026-03-08T02:30:00Z","backfill":{"from":"a","to":"b"}}"#, "leave one out"),
        ] {
            let sentence = refused(payload);
            assert!(sentence.contains(words), "{payload}: {sentence}");
        }
    }
}
