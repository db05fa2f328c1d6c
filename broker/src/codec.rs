//! The wire format. Inside: MessagePack with named fields, so that fields can be added. From people: JSON, read by
//! `shardcron_domain::trigger`.

use serde::Deserialize;
use shardcron_domain::limits;
use shardcron_domain::messages::{ENVELOPE_VERSION, RUN_VERSION, ShardMessage, ShardRun, TriggerReply, TriggerRequest};

/// `content_type` of messages between processes.
pub const MSGPACK: &str = "application/msgpack";
/// `content_type` of messages from and to people.
pub const JSON: &str = "application/json";
/// `type` of a shard.
pub const TYPE_SHARD: &str = "shard";
/// `type` of a trigger.
pub const TYPE_TRIGGER: &str = "trigger";
/// `type` of the answer to a trigger.
pub const TYPE_REPLY: &str = "trigger-reply";
/// `app_id` of everything.
pub const APP_ID: &str = "shardcron";
/// The header that says why a message is dead, in a sentence.
pub const HEADER_ERROR: &str = "x-shardcron-error";
/// The header with the size of a payload that was cut.
pub const HEADER_BYTES: &str = "x-shardcron-bytes";

/// A shard message is some hundred bytes; what is far larger was not sent by any version of this program.
const SHARD_MESSAGE_BYTES: usize = 64 * 1024;

/// The known envelope is two levels deep; a later one won't be ten times deeper.
const DEPTH: usize = 24;

/// Why a message can't be read, in a sentence for the person who looks at the dead letters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(pub String);

/// Only the version, whatever else there is.
#[derive(Deserialize)]
struct Envelope {
    v: u64,
}

/// Encodes a shard.
///
/// # Errors
/// Never for a message of this version; the encoder's own signature has an error.
pub fn encode_shard(message: &ShardMessage) -> Result<Vec<u8>, Unreadable> {
    rmp_serde::to_vec_named(message).map_err(|e| Unreadable(format!("the message can't be encoded: {e}")))
}

/// Encodes shards that travel in one message; a single one as [`encode_shard`] does, so that every worker can read it.
///
/// # Errors
/// As there.
pub fn encode_run(run: &ShardRun) -> Result<Vec<u8>, Unreadable> {
    match (run.count, run.shards().next()) {
        (1, Some(single)) => encode_shard(&single),
        _ => rmp_serde::to_vec_named(run).map_err(|e| Unreadable(format!("the message can't be encoded: {e}"))),
    }
}

/// Decodes a message with a shard or several.
///
/// # Errors
/// A sentence; the message belongs to the dead letters.
pub fn decode_shards(payload: &[u8]) -> Result<ShardRun, Unreadable> {
    let fault = |text: String| Err(Unreadable(text));
    if payload.len() > SHARD_MESSAGE_BYTES {
        return fault(format!(
            "the message has {} bytes, a shard's at most {SHARD_MESSAGE_BYTES}: it was not sent by shardcron",
            payload.len()
        ));
    }
    if looks_like_text(payload) {
        return fault(
            "this looks like text: the queues of shards take messages of the dispatcher only. To run a job, publish to the queue \
             of triggers, or use 'shardcron trigger'"
                .into(),
        );
    }
    // The version first: a later version may have fields that this program would misread.
    match from_msgpack::<Envelope>(payload) {
        Ok(Envelope { v }) if v > u64::from(RUN_VERSION) => fault(format!(
            "the message has version {v} and this worker reads up to {RUN_VERSION}: update the workers before the schedulers"
        )),
        Ok(Envelope { v: 0 }) => fault("the message has version 0, which never was".into()),
        Ok(Envelope { v }) if v == u64::from(RUN_VERSION) => match from_msgpack::<ShardRun>(payload) {
            Ok(run) => checked(run),
            Err(e) => fault(format!("the message is not a run of shards of version {RUN_VERSION}: {e}")),
        },
        Ok(_) => match from_msgpack::<ShardMessage>(payload) {
            Ok(ShardMessage { attempt, epoch, .. }) => checked(ShardRun::new(attempt, 1, epoch)),
            Err(e) => fault(format!("the message is not a shard of version {ENVELOPE_VERSION}: {e}")),
        },
        Err(e) => fault(format!("the message is not MessagePack that shardcron sends: {e}")),
    }
}

/// What no version of this program sends is not acted upon.
fn checked(run: ShardRun) -> Result<ShardRun, Unreadable> {
    if run.attempt.attempt == 0 {
        return Err(Unreadable("the message names attempt 0; they count from 1".into()));
    }
    if run.count == 0 || run.count > limits::GROUP_MAX || run.attempt.index.checked_add(run.count).is_none() {
        let ShardRun { attempt, count, .. } = run;
        return Err(Unreadable(format!(
            "the message names {count} shards from {} on; 1 to {} are possible",
            attempt.index,
            limits::GROUP_MAX
        )));
    }
    Ok(run)
}

/// Encodes a trigger, as the command line sends it: the same JSON that a person would type.
///
/// # Errors
/// Never in practice.
pub fn encode_trigger(request: &TriggerRequest) -> Result<Vec<u8>, Unreadable> {
    serde_json::to_vec(request).map_err(|e| Unreadable(format!("the trigger can't be encoded: {e}")))
}

/// Encodes the answer to a trigger.
#[must_use]
pub fn encode_reply(reply: &TriggerReply) -> Vec<u8> {
    serde_json::to_vec(reply).unwrap_or_default()
}

/// What of a payload is kept as a dead letter: all of it, or the beginning of a huge one.
#[must_use]
pub fn dead_payload(payload: &[u8]) -> &[u8] {
    &payload[..payload.len().min(limits::REJECTED_TEXT_BYTES)]
}

fn from_msgpack<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, String> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
    reader.set_max_depth(DEPTH);
    T::deserialize(&mut reader).map_err(|e| e.to_string())
}

/// A shard message is a map and so begins with a byte above 0x7f.
fn looks_like_text(payload: &[u8]) -> bool {
    let first = payload.iter().find(|b| !b.is_ascii_whitespace());
    first.is_none_or(|b| matches!(b, 0x20..=0x7e)) && std::str::from_utf8(payload).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shardcron_domain::{AttemptRef, ExecutionId};
    use uuid::Uuid;

    fn message() -> ShardMessage {
        let execution = ExecutionId(Uuid::from_u128(0x0193_9d5e_7c1a_7def_8000_1234_5678_90ab));
        ShardMessage { v: ENVELOPE_VERSION, attempt: AttemptRef { execution, index: 31, attempt: 2 }, epoch: 7 }
    }

    /// The only shard of a message.
    fn decode_shard(payload: &[u8]) -> Result<ShardMessage, Unreadable> {
        decode_shards(payload).map(|run| {
            let shards: Vec<ShardMessage> = run.shards().collect();
            assert_eq!(shards.len(), 1);
            shards.into_iter().next().unwrap()
        })
    }

    #[test]
    fn several_shards_travel_in_one_message() {
        let run = ShardRun::new(AttemptRef { attempt: 1, ..message().attempt }, 64, 7);
        let bytes = encode_run(&run).unwrap();
        let read = decode_shards(&bytes).unwrap();
        assert_eq!(read, run);
        let indexes: Vec<u32> = read.shards().map(|m| m.attempt.index).collect();
        assert_eq!(indexes, (31..95).collect::<Vec<u32>>());
        assert!(read.shards().all(|m| m.v == ENVELOPE_VERSION && m.epoch == 7 && m.attempt.attempt == 1));
        // What an earlier worker reads of it is its version, and says so in words.
        assert_eq!(from_msgpack::<Envelope>(&bytes).unwrap().v, u64::from(RUN_VERSION));
        let single = ShardRun::new(message().attempt, 1, 7);
        assert_eq!(encode_run(&single).unwrap(), encode_shard(&message()).unwrap(), "every version reads a single one");
    }

    #[test]
    fn runs_that_nobody_sends_are_refused() {
        let run = |index, count| ShardRun {
            v: RUN_VERSION,
            attempt: AttemptRef { index, ..message().attempt },
            count,
            epoch: 1,
        };
        for (index, count) in [(0, 0), (0, 65), (0, u32::MAX), (u32::MAX - 3, 5)] {
            let refusal = decode_shards(&rmp_serde::to_vec_named(&run(index, count)).unwrap()).unwrap_err();
            assert!(refusal.0.contains("1 to 64 are possible"), "{refusal}");
        }
    }

    #[test]
    fn the_bytes_on_the_wire_stay_as_they_are() {
        let bytes = encode_shard(&message()).unwrap();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "83a17601a7617474656d707483a9657865637574696f6ec41001939d5e7c1a7def80001234567890aba5696e6465781fa7617474656d707402a5\
             65706f636807"
                .replace(char::is_whitespace, "")
        );
        assert_eq!(decode_shard(&bytes), Ok(message()));
    }

    #[test]
    fn fields_that_come_later_are_passed_over() {
        #[derive(serde::Serialize)]
        struct Later {
            v: u8,
            traced_by: &'static str,
            attempt: AttemptRef,
            epoch: i64,
        }
        let later = Later { v: 1, traced_by: "x", attempt: message().attempt, epoch: 7 };
        assert_eq!(decode_shard(&rmp_serde::to_vec_named(&later).unwrap()), Ok(message()));
    }

    #[test]
    fn a_later_version_is_refused_in_a_sentence() {
        let mut newer = message();
        newer.v = 9;
        let refusal = decode_shard(&encode_shard(&newer).unwrap()).unwrap_err();
        assert!(refusal.0.contains("version 9") && refusal.0.contains("update the workers"), "{refusal}");
    }

    #[test]
    fn g_02_every_unreadable_message_has_its_sentence() {
        let deep = [vec![0x91; 10_000], vec![0xc0]].concat();
        let huge = vec![0xc0; 10 << 20];
        let mut zero = message();
        zero.attempt.attempt = 0;
        let cases: Vec<Vec<u8>> = vec![
            vec![],
            b"{\"job\":\"demo\"}".to_vec(),
            b" demo".to_vec(),
            vec![0x1f, 0x8b, 8, 0],
            vec![0x80],
            vec![0xdf, 0xff, 0xff, 0xff, 0xff],
            deep,
            huge,
            encode_shard(&zero).unwrap(),
        ];
        for case in cases {
            let sentence = decode_shard(&case).unwrap_err().0;
            assert!(sentence.len() > 20 && sentence.len() < 400, "{sentence}");
        }
    }

    #[test]
    fn a_trigger_from_the_command_line_is_what_a_person_types() {
        let request = TriggerRequest {
            job: "demo".into(),
            params: serde_json::from_str(r#"{"date":"2013-01-31"}"#).unwrap(),
            request_id: Some("r1".into()),
            ..TriggerRequest::default()
        };
        let bytes = encode_trigger(&request).unwrap();
        assert_eq!(shardcron_domain::trigger::parse(&bytes, None), Ok(request));
    }

    proptest! {
        #[test]
        fn any_shard_comes_back(execution: u128, index: u32, attempt in 1u32.., epoch: i64) {
            let execution = ExecutionId(Uuid::from_u128(execution));
            let message = ShardMessage { v: ENVELOPE_VERSION, attempt: AttemptRef { execution, index, attempt }, epoch };
            prop_assert_eq!(decode_shard(&encode_shard(&message).unwrap()), Ok(message));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode_shards(&bytes);
        }

        #[test]
        fn a_damaged_shard_is_read_or_refused(at in 0usize..60, byte: u8, cut in 0usize..70) {
            let mut bytes = encode_shard(&message()).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(cut);
            let _ = decode_shards(&bytes);
        }
    }
}
