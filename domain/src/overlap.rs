//! What happens when the previous execution of a job still runs.
//!
//! The policy is decided in [`crate::firing::decide`], inside the firing transaction, on all executions of the job that have not
//! ended, wherever they run; one whose shards wait for a retry has not ended (invariant O1).

use crate::limits::OVERLAP_QUEUE_MAX;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What happens when the previous execution of the job still runs. A shard that waits for its retry counts as running.
///
/// In a job file: `"skip"`, `"allow"`, `"cancel_running"`, `"queue"`, or `{ policy = "queue", limit = 3 }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverlapPolicy {
    /// The new instant is recorded as skipped, with the execution that was in its way.
    #[default]
    Skip,
    /// Both run.
    Allow,
    /// The new one waits until the job is free, behind those that wait already. Beyond the limit it is skipped.
    Queue {
        /// How many may wait; 1 to [`OVERLAP_QUEUE_MAX`].
        limit: u32,
    },
    /// What runs is cancelled in the transaction that fires the new one.
    CancelRunning,
}

impl OverlapPolicy {
    /// The word of the job file.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            OverlapPolicy::Skip => "skip",
            OverlapPolicy::Allow => "allow",
            OverlapPolicy::Queue { .. } => "queue",
            OverlapPolicy::CancelRunning => "cancel_running",
        }
    }

    fn from_word(word: &str, limit: Option<u32>) -> Result<Self, String> {
        match (word, limit) {
            ("skip", None) => Ok(OverlapPolicy::Skip),
            ("allow", None) => Ok(OverlapPolicy::Allow),
            ("cancel_running", None) => Ok(OverlapPolicy::CancelRunning),
            ("queue", limit) => match limit.unwrap_or(1) {
                limit @ 1..=OVERLAP_QUEUE_MAX => Ok(OverlapPolicy::Queue { limit }),
                other => Err(format!("limit = {other}; a queue holds 1 to {OVERLAP_QUEUE_MAX} firings")),
            },
            ("skip" | "allow" | "cancel_running", Some(_)) => {
                Err(format!("'limit' belongs to the policy \"queue\", not to \"{word}\""))
            }
            _ => {
                Err(format!("unknown policy '{word}'; there are \"skip\", \"queue\", \"cancel_running\" and \"allow\""))
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    policy: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
}

impl Serialize for OverlapPolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            // One form for one meaning: the ledger compares texts to see whether a job changed.
            OverlapPolicy::Queue { limit } if *limit != 1 => {
                Table { policy: self.word().into(), limit: Some(*limit) }.serialize(serializer)
            }
            other => serializer.serialize_str(other.word()),
        }
    }
}

impl<'de> Deserialize<'de> for OverlapPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> de::Visitor<'de> for Form {
            type Value = OverlapPolicy;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(
                    "\"skip\", \"queue\", \"cancel_running\", \"allow\" or a table such as { policy = \"queue\", limit = 3 }",
                )
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<OverlapPolicy, E> {
                OverlapPolicy::from_word(word, None).map_err(E::custom)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<OverlapPolicy, A::Error> {
                let table = Table::deserialize(de::value::MapAccessDeserializer::new(map))?;
                OverlapPolicy::from_word(&table.policy, table.limit).map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_any(Form)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<OverlapPolicy, String> {
        #[derive(Deserialize)]
        struct Doc {
            overlap: OverlapPolicy,
        }
        toml::from_str::<Doc>(&format!("overlap = {text}")).map(|d| d.overlap).map_err(|e| e.message().to_owned())
    }

    #[test]
    fn both_forms_are_read_and_one_is_written() {
        for (text, policy, json) in [
            ("\"skip\"", OverlapPolicy::Skip, "\"skip\""),
            ("\"allow\"", OverlapPolicy::Allow, "\"allow\""),
            ("\"cancel_running\"", OverlapPolicy::CancelRunning, "\"cancel_running\""),
            ("{ policy = \"skip\" }", OverlapPolicy::Skip, "\"skip\""),
            ("\"queue\"", OverlapPolicy::Queue { limit: 1 }, "\"queue\""),
            ("{ policy = \"queue\", limit = 1 }", OverlapPolicy::Queue { limit: 1 }, "\"queue\""),
            (
                "{ policy = \"queue\", limit = 3 }",
                OverlapPolicy::Queue { limit: 3 },
                "{\"policy\":\"queue\",\"limit\":3}",
            ),
        ] {
            assert_eq!(read(text), Ok(policy), "{text}");
            assert_eq!(serde_json::to_string(&policy).unwrap(), json);
            assert_eq!(serde_json::from_str::<OverlapPolicy>(json).unwrap(), policy);
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, words) in [
            ("\"skipp\"", "unknown policy 'skipp'"),
            ("{ policy = \"queue\", limit = 0 }", "limit = 0"),
            ("{ policy = \"queue\", limit = 101 }", "1 to 100"),
            ("{ policy = \"skip\", limit = 2 }", "belongs to the policy \"queue\""),
            ("{ policy = \"queue\", size = 2 }", "size"),
            ("7", "skip"),
        ] {
            let sentence = read(text).unwrap_err();
            assert!(sentence.contains(words), "{text}: {sentence}");
        }
    }
}
