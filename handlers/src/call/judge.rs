//! What an answer means. Pure: an answer goes in, a verdict comes out.

use super::client::Answer;
use serde_json::{Value, json};
use shardcron_domain::http_call::Origin;
use shardcron_domain::limits::EMITS_ANSWER_BYTES;
use shardcron_sdk::{ShardError, ShardOutput};
use std::time::Duration;

/// Text of an answer in a message.
const MESSAGE_BYTES: usize = 1_000;

/// The answer to a map's first shard is not what it has to be.
const NO_LIST: &str = "the service was asked for the shards of a map, and its answer is no JSON object with a list 'emit', as in \
                       {\"emit\": [{\"day\": 1}, {\"day\": 2}]}";

/// What to do next.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// The service has done it, and said the shards of a map if it was asked for them.
    Done(ShardOutput, Vec<Value>),
    /// It works on it, and wants to be asked there.
    Working {
        /// Where; `None`: where it was asked last.
        at: Option<String>,
        /// How long it wants to be left alone.
        wait: Option<Duration>,
    },
    /// It says no.
    Failed(ShardError),
}

/// The meaning of an answer to a request at `url`; `now_ms` is this host's clock, for a `Retry-After` that names an instant. `maps`:
/// the shard is the first one of a map, and the answer has to say the others.
pub(super) fn judge(answer: &Answer, url: &str, now_ms: i64, maps: bool) -> Verdict {
    let status = answer.status.as_u16();
    let wait = retry_after(answer, now_ms);
    let said = words(answer);
    let failed = |error: ShardError| Verdict::Failed(error);
    match status {
        202 => match location(answer, url) {
            Ok(at) => Verdict::Working { at, wait },
            Err(why) => failed(ShardError::permanent(why)),
        },
        200..=299 if maps => emitted(answer),
        200..=299 => Verdict::Done(output(answer), Vec::new()),
        // "See other": where the result is, after work.
        303 => match location(answer, url) {
            Ok(Some(at)) => Verdict::Working { at: Some(at), wait: Some(Duration::ZERO) },
            Ok(None) => failed(ShardError::permanent("the service answered 303 without a Location")),
            Err(why) => failed(ShardError::permanent(why)),
        },
        300..=399 => {
            let to = answer.header("location").map(|to| format!(" to {to}")).unwrap_or_default();
            failed(ShardError::permanent(format!(
                "the service answered {status}{to}; redirects are not followed, so name the final address in the job's url"
            )))
        }
        // Busy, or a request with the same key is under way.
        408 | 409 | 425 | 429 | 500 | 502..=599 if status != 505 => failed(match wait {
            Some(wait) => ShardError::not_before(format!("the service answered {status}{said}"), wait),
            None => ShardError::transient(format!("the service answered {status}{said}")),
        }),
        401 | 403 => failed(ShardError::permanent(format!(
            "the service answered {status}: it does not accept who asks{said}; look at the job's headers and the secret behind them"
        ))),
        _ => failed(ShardError::permanent(format!("the service answered {status}{said}"))),
    }
}

/// Where the service wants to be asked: within its own origin.
fn location(answer: &Answer, url: &str) -> Result<Option<String>, String> {
    let Some(to) = answer.header("location") else { return Ok(None) };
    let own = Origin::of(url)?;
    let full = match to {
        _ if to.starts_with("//") => return Err(elsewhere(to, &own)),
        _ if to.starts_with('/') => format!("{own}{to}"),
        _ => to.to_owned(),
    };
    match Origin::of(&full) {
        Ok(origin) if origin == own => Ok(Some(full)),
        Ok(_) => Err(elsewhere(to, &own)),
        Err(_) => Err(format!("the service names a Location that is neither a full address nor begins with '/': {to}")),
    }
}

fn elsewhere(to: &str, own: &Origin) -> String {
    format!("the service wants to be asked at {to}, which is another place than {own}; nothing is sent elsewhere")
}

/// `Retry-After`: seconds, or an instant, which is taken against the answer's own `Date` if it has one.
fn retry_after(answer: &Answer, now_ms: i64) -> Option<Duration> {
    let text = answer.header("retry-after")?;
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let instant = |text: &str| chrono::DateTime::parse_from_rfc2822(text).ok().map(|at| at.timestamp_millis());
    let at = instant(text)?;
    let now = answer.header("date").and_then(instant).unwrap_or(now_ms);
    Some(Duration::from_millis(u64::try_from(at.saturating_sub(now)).unwrap_or(0)))
}

/// `{"emit": [payload, …]}`, with `rows` and `summary` beside it if there are any. An answer without it is no map of nothing: the
/// service has probably not understood what it was asked.
fn emitted(answer: &Answer) -> Verdict {
    let failed = |why: String| Verdict::Failed(ShardError::permanent(why));
    if answer.cut {
        return failed(format!(
            "the service's answer to the first shard of a map has more than {EMITS_ANSWER_BYTES} bytes; let it emit fewer shards, or say \
             where the data is and not the data"
        ));
    }
    let said: Option<Value> = serde_json::from_slice(&answer.body).ok();
    let Some(Value::Object(mut said)) = said else {
        return failed(format!("{NO_LIST}{}", words(answer)));
    };
    let Some(Value::Array(payloads)) = said.remove("emit") else {
        return failed(format!("{NO_LIST}{}", words(answer)));
    };
    let rows = said.get("rows").and_then(Value::as_u64);
    let summary = said.remove("summary").filter(|s| !s.is_null());
    Verdict::Done(ShardOutput { rows, summary, committed: false }, payloads)
}

/// `{"rows": 5, "summary": {…}}` is a result as such; other JSON is the summary; other text is kept with the status.
fn output(answer: &Answer) -> ShardOutput {
    let read: Option<Value> = if answer.cut { None } else { serde_json::from_slice(&answer.body).ok() };
    match read {
        Some(Value::Object(mut said))
            if said.get("rows").is_some_and(Value::is_u64) || said.contains_key("summary") =>
        {
            let rows = said.get("rows").and_then(Value::as_u64);
            ShardOutput { rows, summary: said.remove("summary").filter(|s| !s.is_null()), committed: false }
        }
        Some(json) => ShardOutput { rows: None, summary: Some(json), committed: false },
        None => {
            let text = String::from_utf8_lossy(&answer.body).replace('\0', "\u{FFFD}");
            let summary = json!({ "status": answer.status.as_u16(), "text": text, "truncated": answer.cut });
            ShardOutput { rows: None, summary: Some(summary), committed: false }
        }
    }
}

fn words(answer: &Answer) -> String {
    let text = String::from_utf8_lossy(&answer.body).replace('\0', "\u{FFFD}");
    let text = text.trim();
    match text.is_empty() {
        true => String::new(),
        false => format!(": {}", &text[..text.floor_char_boundary(MESSAGE_BYTES)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
    use shardcron_domain::shard::FailureClass;

    const URL: &str = "https://api.example.com/settle";

    fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap());
        }
        Answer { status: StatusCode::from_u16(status).unwrap(), headers: map, body: body.into(), cut: false }
    }

    fn class(status: u16, headers: &[(&str, &str)]) -> FailureClass {
        match judge(&answer(status, headers, "why"), URL, 0, false) {
            Verdict::Failed(error) => {
                assert!(error.message.contains(&status.to_string()), "{error}");
                error.class
            }
            other => panic!("{status}: {other:?}"),
        }
    }

    #[test]
    fn statuses_have_classes() {
        for status in [400, 401, 403, 404, 410, 413, 422, 501, 505, 301, 302, 307, 308] {
            assert_eq!(class(status, &[]), FailureClass::Permanent, "{status}");
        }
        for status in [408, 409, 425, 429, 500, 502, 503, 504, 599] {
            assert_eq!(class(status, &[]), FailureClass::Transient, "{status}");
        }
        let later = |wait_ms| FailureClass::NotBefore { wait_ms };
        assert_eq!(class(503, &[("retry-after", "120")]), later(120_000));
        let dates = [("date", "Sun, 06 Nov 1994 08:49:37 GMT"), ("retry-after", "Sun, 06 Nov 1994 08:50:37 GMT")];
        assert_eq!(class(429, &dates), later(60_000), "by the service's own clock");
        assert_eq!(class(429, &dates[1..]), later(784_111_837_000), "by this one's");
        assert_eq!(class(503, &[("retry-after", "soon")]), FailureClass::Transient);
        assert_eq!(class(404, &[("retry-after", "9")]), FailureClass::Permanent);
    }

    #[test]
    fn nothing_leads_elsewhere() {
        let to = |status, location: &str| judge(&answer(status, &[("location", location)], ""), URL, 0, false);
        for (location, at) in [
            ("/jobs/7?x=1", "https://api.example.com/jobs/7?x=1"),
            ("https://API.example.com:443/jobs/7", "https://API.example.com:443/jobs/7"),
        ] {
            assert_eq!(to(202, location), Verdict::Working { at: Some(at.into()), wait: None });
            assert!(matches!(to(303, location), Verdict::Working { at: Some(_), .. }));
        }
        for location in [
            "https://evil.example/x",
            "http://api.example.com/x",
            "//evil.example/x",
            "jobs/7",
            "https://me@api.example.com/",
        ] {
            for status in [202, 303, 302] {
                assert!(
                    matches!(to(status, location), Verdict::Failed(e) if e.class == FailureClass::Permanent),
                    "{location}"
                );
            }
        }
        assert_eq!(judge(&answer(202, &[], ""), URL, 0, false), Verdict::Working { at: None, wait: None });
    }

    #[test]
    fn a_body_is_a_result_or_a_summary() {
        let done = |body: &str| match judge(&answer(200, &[], body), URL, 0, false) {
            Verdict::Done(output, emitted) if emitted.is_empty() => output,
            other => panic!("{other:?}"),
        };
        let summary = |value: Value| ShardOutput { summary: Some(value), ..ShardOutput::default() };
        assert_eq!(done(r#"{"rows":5}"#), ShardOutput::rows(5));
        assert_eq!(
            done(r#"{"rows":5,"summary":{"a":1}}"#),
            ShardOutput { rows: Some(5), ..summary(json!({ "a": 1 })) }
        );
        assert_eq!(done(r#"{"ok":true}"#), summary(json!({ "ok": true })));
        assert_eq!(done("fine"), summary(json!({ "status": 200, "text": "fine", "truncated": false })));
    }

    #[test]
    fn a_map_needs_its_list() {
        let judged = |body: &str| judge(&answer(200, &[], body), URL, 0, true);
        assert_eq!(
            judged(r#"{"emit":[1,"a"],"rows":2}"#),
            Verdict::Done(ShardOutput::rows(2), vec![json!(1), json!("a")])
        );
        assert_eq!(judged(r#"{"emit":[]}"#), Verdict::Done(ShardOutput::default(), Vec::new()));
        for body in ["", "[1]", r#"{"emit":1}"#, r#"{"rows":5}"#, "fine"] {
            assert!(
                matches!(judged(body), Verdict::Failed(e) if e.class == FailureClass::Permanent && e.message.contains("'emit'")),
                "{body}"
            );
        }
        let cut = Answer { cut: true, ..answer(200, &[], r#"{"emit":[]}"#) };
        assert!(matches!(judge(&cut, URL, 0, true), Verdict::Failed(e) if e.message.contains("more than")));
    }
}
