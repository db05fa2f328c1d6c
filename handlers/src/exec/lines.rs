//! The lines by which a program speaks to its worker, among its ordinary output.
//!
//! Such a line begins, without a space before it, with `{"shardcron":` and is JSON up to its end. Everything else is ordinary output
//! and passes at once, also where no line ends. What begins like a message and is none stays in the output, with a warning: nothing
//! that a program printed is lost by a slip.

use serde::Deserialize;
use shardcron_domain::limits::{CHECKPOINT_BYTES, PROGRAM_LINE_BYTES};
use shardcron_domain::shard::Checkpoint;
use shardcron_domain::units::Span;

const BEGINNING: &[u8] = b"{\"shardcron\":";

/// What a program says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "shardcron", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Message {
    /// It moves.
    Progress {},
    /// Everything up to this is done.
    Checkpoint {
        /// The position: a number that grows, or a text.
        at: Checkpoint,
        /// Records since the checkpoint before.
        #[serde(default)]
        rows: u64,
    },
    /// A shard of a map, to be run once this one has ended well.
    Emit {
        /// What its handler gets as its slice.
        payload: serde_json::Value,
    },
    /// What it did, for when it ends well. The last one counts.
    Result {
        /// Records in all.
        #[serde(default)]
        rows: Option<u64>,
        /// A small summary.
        #[serde(default)]
        summary: Option<serde_json::Value>,
    },
    /// A number to be watched.
    Metric {
        /// Its name.
        name: String,
        /// Its value, or for a counter by how much it grows.
        value: f64,
        /// How it is counted.
        #[serde(default)]
        kind: MetricKind,
    },
    /// It fails, whatever its exit code. The last one counts.
    Fail {
        /// Whether another try may help.
        #[serde(default)]
        class: FailClass,
        /// Why.
        message: String,
        /// Not before this long from its end.
        #[serde(default)]
        wait: Option<Span>,
    },
}

/// How a number is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MetricKind {
    /// The latest value counts.
    #[default]
    Gauge,
    /// Values are added.
    Counter,
}

/// Whether another try may help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FailClass {
    /// It may.
    #[default]
    Transient,
    /// It would fail the same way.
    Permanent,
}

/// Reads a line; `Err` says what is wrong with one that begins like a message.
pub(crate) fn parse(line: &[u8]) -> Result<Message, String> {
    let message: Message = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    match &message {
        Message::Checkpoint { at: Checkpoint::Text(text), .. } if text.len() > CHECKPOINT_BYTES => {
            Err(format!("a checkpoint of {} bytes; {CHECKPOINT_BYTES} are possible", text.len()))
        }
        Message::Fail { class: FailClass::Permanent, wait: Some(_), .. } => {
            Err("a permanent failure is not tried again, so it has no wait".into())
        }
        Message::Metric { value, .. } if !value.is_finite() => Err("a metric's value is a number".into()),
        Message::Metric { value, kind: MetricKind::Counter, .. } if *value < 0.0 => Err("a counter only grows".into()),
        _ => Ok(message),
    }
}

/// A part of the output, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// As it is.
    Ordinary(Vec<u8>),
    /// A whole line that begins like a message, without its end.
    Line(Vec<u8>),
    /// What follows, ordinary, begins like a message that is too long to be one.
    TooLong,
}

/// Where in a line the output stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Splitter {
    /// The line so far, as long as it may be a message.
    held: Vec<u8>,
    /// The present line is ordinary.
    ordinary: bool,
}

impl Splitter {
    /// Takes in what was read; gives out what is certain.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Part> {
        let mut parts = Parts::default();
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.ordinary {
                parts.ordinary(line);
            } else {
                self.held.extend_from_slice(line);
                let compared = self.held.len().min(BEGINNING.len());
                if self.held[..compared] != BEGINNING[..compared] || self.held.len() > PROGRAM_LINE_BYTES {
                    self.ordinary = true;
                    if self.held.len() > PROGRAM_LINE_BYTES && self.held.starts_with(BEGINNING) {
                        parts.0.push(Part::TooLong);
                    }
                    parts.ordinary(&std::mem::take(&mut self.held));
                } else if let Some(whole) = self.held.strip_suffix(b"\n") {
                    let whole = whole.strip_suffix(b"\r").unwrap_or(whole).to_vec();
                    self.held.clear();
                    parts.0.push(Part::Line(whole));
                }
            }
            if line.ends_with(b"\n") {
                self.ordinary = false;
            }
        }
        parts.0
    }

    /// At the end of the output: a last line needs no end.
    pub(crate) fn finish(&mut self) -> Option<Part> {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() {
            None
        } else if held.starts_with(BEGINNING) {
            Some(Part::Line(held))
        } else {
            Some(Part::Ordinary(held))
        }
    }
}

#[derive(Default)]
struct Parts(Vec<Part>);

impl Parts {
    fn ordinary(&mut self, bytes: &[u8]) {
        match self.0.last_mut() {
            Some(Part::Ordinary(last)) => last.extend_from_slice(bytes),
            _ => self.0.push(Part::Ordinary(bytes.to_vec())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(text: &[u8]) -> Vec<Part> {
        let mut splitter = Splitter::default();
        let mut parts = splitter.push(text);
        parts.extend(splitter.finish());
        parts
    }

    #[test]
    fn messages_stand_beside_ordinary_output() {
        let parts = split(
            b"hello\n{\"shardcron\": \"progress\"}\r\n{\"other\":1}\n {\"shardcron\":\"progress\"}\n{\"shardcron\":x",
        );
        let expected = [
            Part::Ordinary(b"hello\n".to_vec()),
            Part::Line(b"{\"shardcron\": \"progress\"}".to_vec()),
            Part::Ordinary(b"{\"other\":1}\n {\"shardcron\":\"progress\"}\n".to_vec()),
            Part::Line(b"{\"shardcron\":x".to_vec()),
        ];
        assert_eq!(parts, expected);
        let mut splitter = Splitter::default();
        assert_eq!(splitter.push(b"no end of line"), [Part::Ordinary(b"no end of line".to_vec())], "passes at once");
        let long = [BEGINNING, &vec![b'x'; PROGRAM_LINE_BYTES][..], b"\n"].concat();
        assert_eq!(split(&long), [Part::TooLong, Part::Ordinary(long.clone())], "what is too long is no message");
    }

    #[test]
    fn each_message_has_one_form() {
        let ok = |text: &str| parse(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(ok(r#"{"shardcron":"progress"}"#), Message::Progress {});
        assert_eq!(
            ok(r#"{"shardcron":"checkpoint","at":123,"rows":10}"#),
            Message::Checkpoint { at: Checkpoint::Number(123), rows: 10 }
        );
        assert_eq!(
            ok(r#"{"shardcron":"checkpoint","at":"page 7"}"#),
            Message::Checkpoint { at: Checkpoint::Text("page 7".into()), rows: 0 }
        );
        assert!(matches!(
            ok(r#"{"shardcron":"result","rows":3,"summary":{"a":1}}"#),
            Message::Result { rows: Some(3), .. }
        ));
        assert!(matches!(
            ok(r#"{"shardcron":"fail","class":"transient","message":"busy","wait":"2m"}"#),
            Message::Fail { wait: Some(Span(120_000)), .. }
        ));
        let payload = |text: &str| match ok(text) {
            Message::Emit { payload } => payload,
            other => panic!("{other:?}"),
        };
        assert_eq!(payload(r#"{"shardcron":"emit","payload":{"day":3}}"#), serde_json::json!({ "day": 3 }));
        assert_eq!(payload(r#"{"shardcron":"emit","payload":null}"#), serde_json::Value::Null);
        for bad in [
            r#"{"shardcron":"progres"}"#,
            r#"{"shardcron":"checkpoint"}"#,
            r#"{"shardcron":"checkpoint","at":1.5}"#,
            r#"{"shardcron":"checkpoint","at":1,"row":2}"#,
            r#"{"shardcron":"checkpoint","at":1,"rows":-2}"#,
            r#"{"shardcron":"metric","name":"a","value":-1,"kind":"counter"}"#,
            r#"{"shardcron":"fail","class":"permanent","message":"x","wait":"1s"}"#,
            r#"{"shardcron":"fail"}"#,
            r#"{"shardcron":"emit"}"#,
            r#"{"shardcron":"emit","payload":1,"shard":2}"#,
            r#"{"shardcron":"progress"} and more"#,
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        let long = format!(r#"{{"shardcron":"checkpoint","at":"{}"}}"#, "x".repeat(CHECKPOINT_BYTES + 1));
        assert!(parse(long.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn however_it_is_cut_nothing_is_lost(
            lines in proptest::collection::vec(
                prop_oneof![
                    Just("{\"shardcron\":\"progress\"}\n".to_owned()),
                    Just("{\"shardcron\":".to_owned()),
                    Just("{\"shard\n".to_owned()),
                    "[a-z{\"\n]{0,20}",
                ],
                0..12,
            ),
            cuts in proptest::collection::vec(1usize..9, 1..60),
        ) {
            let all: Vec<u8> = lines.concat().into_bytes();
            let (mut splitter, mut parts, mut at) = (Splitter::default(), Vec::new(), 0);
            for cut in cuts.iter().cycle() {
                if at == all.len() { break; }
                let next = (at + cut).min(all.len());
                parts.extend(splitter.push(&all[at..next]));
                at = next;
            }
            parts.extend(splitter.finish());
            let rejoin = |parts: &[Part]| -> (Vec<u8>, Vec<Vec<u8>>) {
                let (mut ordinary, mut found) = (Vec::new(), Vec::new());
                for part in parts {
                    match part {
                        Part::Ordinary(bytes) => ordinary.extend_from_slice(bytes),
                        Part::Line(line) => found.push(line.clone()),
                        Part::TooLong => {}
                    }
                }
                (ordinary, found)
            };
            prop_assert_eq!(rejoin(&parts), rejoin(&split(&all)), "cuts make no difference");
            let text = String::from_utf8(all).unwrap();
            let messages = text.split('\n').filter(|line| line.starts_with("{\"shardcron\":")).count();
            prop_assert_eq!(rejoin(&parts).1.len(), messages);
        }
    }
}
