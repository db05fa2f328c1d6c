//! What a job says about a call over HTTP, and which addresses are the same place.

use crate::limits::{HEADERS_MAX, URL_BYTES};
use crate::units::Span;
use http::header::{HeaderName, HeaderValue};
use http::uri::{Scheme, Uri};
use serde::de::{Error as _, MapAccess, Visitor, value};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// A call of a service for each shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSpec {
    /// Where to: `https://…` or `http://…`.
    pub url: String,
    /// `POST` unless said otherwise.
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// More headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, HeaderSource>,
    /// How long one request may take, its answer included.
    #[serde(default = "default_timeout", skip_serializing_if = "is_default_timeout")]
    pub timeout: Span,
    /// How a service that answers 202 is asked whether it is done.
    #[serde(default, skip_serializing_if = "PollSpec::is_default")]
    pub poll: PollSpec,
    /// Whether the service is told an address at which it may bring its answer, instead of or beside being asked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub callback: bool,
}

fn default_timeout() -> Span {
    Span::secs(30)
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_default_timeout(timeout: &Span) -> bool {
    *timeout == default_timeout()
}

/// The methods that carry a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Method {
    /// The usual one.
    #[default]
    Post,
    /// For services that are addressed so.
    Put,
    /// The same.
    Patch,
}

impl Method {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    fn is_default(&self) -> bool {
        *self == Method::Post
    }

    /// As it goes over the wire.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
        }
    }
}

/// How a service that works on is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PollSpec {
    /// The first wait; each further one is half as long again. A `Retry-After` of the service goes before it.
    pub first: Span,
    /// The longest wait.
    pub max: Span,
}

impl Default for PollSpec {
    fn default() -> Self {
        PollSpec { first: Span::secs(1), max: Span::secs(30) }
    }
}

impl PollSpec {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    fn is_default(&self) -> bool {
        *self == PollSpec::default()
    }
}

/// Where a header's value comes from: a text of the job, or a secret that the worker has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderSource {
    /// As it stands.
    Text(String),
    /// The worker's own; the worker must allow it.
    Secret {
        /// From where.
        from: SecretSource,
        /// What goes before it, as in `"Bearer "`.
        prefix: String,
    },
}

/// Where a worker has a secret.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SecretSource {
    /// In a variable of its environment.
    Env(String),
    /// In a file; the space around it is cut off.
    File(String),
}

impl fmt::Display for SecretSource {
    /// As the worker's configuration names it: `env:NAME` or `file:/path`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretSource::Env(name) => write!(f, "env:{name}"),
            SecretSource::File(path) => write!(f, "file:{path}"),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSecret {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    env: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    prefix: String,
}

impl Serialize for HeaderSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HeaderSource::Text(text) => serializer.serialize_str(text),
            HeaderSource::Secret { from, prefix } => {
                let (env, file) = match from.clone() {
                    SecretSource::Env(name) => (Some(name), None),
                    SecretSource::File(path) => (None, Some(path)),
                };
                RawSecret { env, file, prefix: prefix.clone() }.serialize(serializer)
            }
        }
    }
}

impl<'de> Deserialize<'de> for HeaderSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = HeaderSource;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a text, or where the worker has a secret: { env = \"NAME\" } or { file = \"/run/secrets/name\" }",
                )
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<HeaderSource, E> {
                Ok(HeaderSource::Text(text.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<HeaderSource, A::Error> {
                let raw = RawSecret::deserialize(value::MapAccessDeserializer::new(map))?;
                let from = match (raw.env, raw.file) {
                    (Some(name), None) => SecretSource::Env(name),
                    (None, Some(path)) => SecretSource::File(path),
                    _ => return Err(A::Error::custom("a secret has one of env = \"NAME\" and file = \"/path\"")),
                };
                Ok(HeaderSource::Secret { from, prefix: raw.prefix })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Where a request goes: scheme, host and port. Two addresses with the same origin are the same place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.host)?;
        if self.port == default_port(&self.scheme) { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

fn default_port(scheme: &str) -> u16 {
    if scheme == "https" { 443 } else { 80 }
}

impl Origin {
    /// The origin of an address.
    ///
    /// # Errors
    /// What is wrong with the address.
    pub fn of(url: &str) -> Result<Self, String> {
        if url.len() > URL_BYTES {
            return Err(format!("an address of {} bytes; {URL_BYTES} are possible", url.len()));
        }
        let uri: Uri = url.parse().map_err(|e| format!("'{}' is no address: {e}", url.escape_default()))?;
        let scheme = uri.scheme().filter(|s| **s == Scheme::HTTP || **s == Scheme::HTTPS);
        let (Some(scheme), Some(authority)) = (scheme, uri.authority()) else {
            return Err(format!(
                "'{}' is no address; write for example \"https://api.example.com/settle\"",
                url.escape_default()
            ));
        };
        if authority.as_str().contains('@') {
            // Not quoted: it may hold a password.
            return Err(
                "an address can't hold a name and a password; use a header with { env = … } or { file = … }".into()
            );
        }
        let host = authority.host().to_ascii_lowercase();
        if host.is_empty() || host == "[]" {
            return Err(format!("'{}' names no host", url.escape_default()));
        }
        let port = authority.port_u16().unwrap_or_else(|| default_port(scheme.as_str()));
        Ok(Origin { scheme: scheme.as_str().to_owned(), host, port })
    }

    /// Whether an entry of a worker's `allow_http` means it: `*`, an origin, or an origin whose host begins with `*.`, for every
    /// host below it.
    #[must_use]
    pub fn is_allowed_by(&self, entry: &str) -> bool {
        if entry == "*" {
            return true;
        }
        let Ok(allowed) = Origin::of(entry) else { return false };
        let host = match allowed.host.strip_prefix("*.") {
            Some(below) => self.host.strip_suffix(below).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
            None => self.host == allowed.host,
        };
        host && (&self.scheme, self.port) == (&allowed.scheme, allowed.port)
    }
}

/// Headers that the handler itself writes, or that say how the connection works.
const OWN_HEADERS: [&str; 11] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "idempotency-key",
    "proxy-connection",
];
/// Headers whose values are secrets.
const SECRET_HEADERS: [&str; 6] =
    ["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-auth-token"];

impl HttpSpec {
    /// Everything that the types let through: the key below `handler.http`, and a sentence.
    #[must_use]
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        if let Err(message) = Origin::of(&self.url) {
            faults.push(("url".into(), message));
        }
        if self.headers.len() > HEADERS_MAX {
            faults.push(("headers".into(), format!("{} headers; {HEADERS_MAX} are possible", self.headers.len())));
        }
        for (name, source) in &self.headers {
            if let Err(message) = check_header(name, source) {
                faults.push((format!("headers.{name}"), message));
            }
        }
        if self.timeout < Span(100) {
            faults.push((
                "timeout".into(),
                format!("\"{}\" is too short for a request; \"100ms\" is the least", self.timeout),
            ));
        }
        if self.poll.first < Span(50) || self.poll.max < self.poll.first {
            let message = "the first wait is \"50ms\" at least, and max not less than first";
            faults.push(("poll".into(), message.into()));
        }
        faults
    }
}

fn check_header(name: &str, source: &HeaderSource) -> Result<(), String> {
    let shown = name.escape_default();
    let lower = HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("'{shown}' is no name of a header"))?;
    let lower = lower.as_str();
    if OWN_HEADERS.contains(&lower) || lower.starts_with("shardcron-") {
        return Err(format!("the handler itself writes '{shown}'; leave it out"));
    }
    match source {
        HeaderSource::Text(_) if SECRET_HEADERS.contains(&lower) => Err(format!(
            "the value of '{shown}' is a secret, and a job is in the ledger for everybody to read. Write {{ env = \"NAME\" }} or \
             {{ file = \"/run/secrets/name\" }}, and allow it at the worker (allow_secrets)"
        )),
        HeaderSource::Text(text) => HeaderValue::from_str(text)
            .map(|_| ())
            .map_err(|_| format!("the value of '{shown}' has characters that no header may have")),
        HeaderSource::Secret { from, prefix } => {
            HeaderValue::from_str(prefix)
                .map_err(|_| format!("the prefix of '{shown}' has characters that no header may have"))?;
            match from {
                SecretSource::Env(name) if name.is_empty() || name.contains(['=', '\0']) => {
                    Err("env names a variable".into())
                }
                SecretSource::File(path) if !path.starts_with('/') || path.contains('\0') => {
                    Err("file is a full path, as in { file = \"/run/secrets/name\" }".into())
                }
                _ => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<HttpSpec, String> {
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_call_is_read_and_kept() {
        let spec = read(
            r#"{"url":"https://a.example/x","method":"PUT","timeout":"5s","poll":{"first":"2s","max":"9s"},"callback":true,
                "headers":{"X-Kind":"night","Authorization":{"env":"TOKEN","prefix":"Bearer "},"X-K":{"file":"/run/k"}}}"#,
        )
        .unwrap();
        assert_eq!(spec.faults(), []);
        assert!(spec.callback);
        let again = serde_json::to_string(&spec).unwrap();
        assert_eq!(read(&again).unwrap(), spec);
        let short = read(r#"{"url":"http://h"}"#).unwrap();
        assert_eq!(serde_json::to_string(&short).unwrap(), r#"{"url":"http://h"}"#, "what is not said is not kept");
        for (text, words) in [
            (r#"{"url":"x","methd":1}"#, "methd"),
            (r#"{"url":"x","method":"GET"}"#, "GET"),
            (r#"{"url":"x","headers":{"A":{"env":"a","file":"/b"}}}"#, "one of"),
            (r#"{"url":"x","headers":{"A":{}}}"#, "one of"),
            (r#"{"url":"x","headers":{"A":7}}"#, "a text, or where"),
        ] {
            assert!(read(text).unwrap_err().contains(words), "{text}: {:?}", read(text));
        }
    }

    #[test]
    fn faults_say_which_key() {
        let spec = read(
            r#"{"url":"ftp://h","timeout":"1ms","poll":{"first":"1s","max":"1ms"},
                "headers":{"Host":"x","a b":"x","Authorization":"Bearer s3cret","X":"a\nb","Y":{"file":"rel"},"Idempotency-Key":"1"}}"#,
        );
        let faults = spec.unwrap().faults();
        let keys: Vec<&str> = faults.iter().map(|(key, _)| key.as_str()).collect();
        let headers = [
            "headers.Authorization",
            "headers.Host",
            "headers.Idempotency-Key",
            "headers.X",
            "headers.Y",
            "headers.a b",
        ];
        assert_eq!(keys, [&["url"][..], &headers[..], &["timeout", "poll"][..]].concat());
        assert!(!faults.iter().any(|(_, message)| message.contains("s3cret")), "{faults:?}");
        assert!(faults[1].1.contains("env = "), "{faults:?}");
    }

    #[test]
    fn z_05_an_address_holds_no_password_and_none_is_quoted() {
        let fault = Origin::of("https://me:s3cret@h/").unwrap_err();
        assert!(!fault.contains("s3cret") && fault.contains("header"), "{fault}");
    }

    #[test]
    fn origins_are_places() {
        let same = |a: &str, b: &str| Origin::of(a).unwrap() == Origin::of(b).unwrap();
        assert!(same("https://A.example:443/x", "https://a.example/y?z"));
        assert!(!same("https://a.example", "http://a.example") && !same("http://a.example:81", "http://a.example"));
        assert_eq!(Origin::of("http://[::1]:8080/x").unwrap().to_string(), "http://[::1]:8080");
        for bad in ["", "/x", "a.example", "https://", "file:///etc/passwd", "https:///x", "gopher://x", "http://a b/"]
        {
            assert!(Origin::of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_allow_list_means_whole_hosts() {
        let allowed = |url: &str, entry: &str| Origin::of(url).unwrap().is_allowed_by(entry);
        assert!(allowed("https://api.example.com/x", "https://api.example.com"));
        assert!(allowed("https://api.example.com/x", "https://*.example.com"));
        assert!(allowed("http://127.0.0.1:8080/x", "http://127.0.0.1:8080"));
        assert!(allowed("http://anything", "*"));
        for (url, entry) in [
            ("https://api.example.com.evil.com/", "https://api.example.com"),
            ("https://evilexample.com/", "https://*.example.com"),
            ("https://example.com/", "https://*.example.com"),
            ("http://api.example.com/", "https://api.example.com"),
            ("https://api.example.com:444/", "https://api.example.com"),
            ("https://api.example.com/", "api.example.com"),
            ("https://api.example.com/", ""),
        ] {
            assert!(!allowed(url, entry), "{url} by {entry}");
        }
    }
}
