//! Owns talking to RabbitMQ's management HTTP API: what a person does in the management UI.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The management API of one RabbitMQ, for one vhost.
#[derive(Debug, Clone)]
pub struct Management {
    agent: ureq::Agent,
    base: String,
    user: String,
    password: String,
    vhost: String,
}

/// A message as the management UI shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The body's bytes.
    pub payload: Vec<u8>,
    /// The exchange that it was published to; empty for the default exchange.
    pub exchange: String,
    /// The routing key that it was published with.
    pub routing_key: String,
    /// True if it was delivered before.
    pub redelivered: bool,
    /// `content_type`, `message_id`, `headers`, … as far as they are set.
    pub properties: Value,
}

impl Message {
    /// The body as text; bytes that are not UTF-8 are replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.payload).into_owned()
    }

    /// The header `name`, or null.
    pub fn header(&self, name: &str) -> &Value {
        &self.properties["headers"][name]
    }
}

impl Management {
    /// From a URL with user and password, such as `http://user:password@127.0.0.1:15672`; the vhost is `/`.
    ///
    /// # Errors
    /// When the URL lacks a part.
    pub fn from_url(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").context("a management URL begins with http://")?;
        let (login, address) = rest.rsplit_once('@').context("a management URL names user:password@")?;
        let (user, password) = login.split_once(':').context("a management URL names user:password@")?;
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(CALL_TIMEOUT))
            .http_status_as_error(false)
            // A proxy from the environment must not see what is meant for the loopback address.
            .proxy(None)
            .build();
        Ok(Self {
            agent: config.into(),
            base: format!("{scheme}://{}", address.trim_end_matches('/')),
            user: decode(user),
            password: decode(password),
            vhost: "/".to_owned(),
        })
    }

    /// The same API, for another vhost.
    #[must_use]
    pub fn with_vhost(&self, vhost: &str) -> Self {
        Self { vhost: vhost.to_owned(), ..self.clone() }
    }

    /// The user that the calls are made as.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// True once the API answers for our user.
    pub fn is_ready(&self) -> bool {
        self.call("GET", "whoami", None).is_ok()
    }

    /// Publishes as the UI does; `properties` is an object such as `{"content_type": "…", "headers": {}}`. False means
    /// that no queue took the message.
    ///
    /// # Errors
    /// When the exchange does not exist or the API can't be reached.
    pub fn publish(&self, exchange: &str, routing_key: &str, payload: &str, properties: &Value) -> Result<bool> {
        self.publish_encoded(exchange, routing_key, payload, "string", properties)
    }

    /// [`Self::publish`] with a body of any bytes.
    ///
    /// # Errors
    /// As for [`Self::publish`].
    pub fn publish_bytes(&self, exchange: &str, routing_key: &str, payload: &[u8], properties: &Value) -> Result<bool> {
        self.publish_encoded(exchange, routing_key, &BASE64.encode(payload), "base64", properties)
    }

    fn publish_encoded(
        &self,
        exchange: &str,
        routing_key: &str,
        payload: &str,
        encoding: &str,
        properties: &Value,
    ) -> Result<bool> {
        // The API knows the default exchange, whose name is empty, under this one.
        let exchange = if exchange.is_empty() { "amq.default" } else { exchange };
        let body = json!({
            "properties": properties,
            "routing_key": routing_key,
            "payload": payload,
            "payload_encoding": encoding,
        });
        let answer = self.call("POST", &self.in_vhost("exchanges", &[exchange, "publish"]), Some(&body))?;
        answer["routed"].as_bool().context("the answer to a publish says whether it was routed")
    }

    /// Declares a queue; `options` such as `{"durable": true, "arguments": {"x-queue-type": "quorum"}}`.
    ///
    /// # Errors
    /// When it exists with other options, or the API can't be reached.
    pub fn declare_queue(&self, queue: &str, options: &Value) -> Result<()> {
        self.call("PUT", &self.in_vhost("queues", &[queue]), Some(options)).map(drop)
    }

    /// Drops all messages of the queue that are ready.
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn purge(&self, queue: &str) -> Result<()> {
        self.call("DELETE", &self.in_vhost("queues", &[queue, "contents"]), None).map(drop)
    }

    /// Deletes the queue with all it holds.
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn delete_queue(&self, queue: &str) -> Result<()> {
        self.call("DELETE", &self.in_vhost("queues", &[queue]), None).map(drop)
    }

    /// The names of the vhost's queues.
    ///
    /// # Errors
    /// When the API can't be reached.
    pub fn queues(&self) -> Result<Vec<String>> {
        let answer = self.call("GET", &self.in_vhost("queues", &[]), None)?;
        let queues = answer.as_array().context("a list of queues")?;
        Ok(queues.iter().filter_map(|queue| queue["name"].as_str().map(str::to_owned)).collect())
    }

    /// All messages of the queue: ready and delivered but not acknowledged. May lag behind by about a second
    /// (RabbitMQ collects its counters at intervals), so wait for the number that you expect.
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn queue_depth(&self, queue: &str) -> Result<u64> {
        let answer = self.queue(queue)?;
        // Absent until the first counters of a new queue have come in.
        Ok(answer["messages"].as_u64().unwrap_or(0))
    }

    /// Everything that the API says about the queue.
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn queue(&self, queue: &str) -> Result<Value> {
        self.call("GET", &self.in_vhost("queues", &[queue]), None)
    }

    /// Up to `count` messages from the queue's head, which stay in it (marked as redelivered).
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn get_messages(&self, queue: &str, count: usize) -> Result<Vec<Message>> {
        self.get(queue, count, "ack_requeue_true")
    }

    /// Up to `count` messages from the queue's head, removed from it.
    ///
    /// # Errors
    /// When the queue does not exist or the API can't be reached.
    pub fn take_messages(&self, queue: &str, count: usize) -> Result<Vec<Message>> {
        self.get(queue, count, "ack_requeue_false")
    }

    fn get(&self, queue: &str, count: usize, ack_mode: &str) -> Result<Vec<Message>> {
        let body = json!({ "count": count, "ackmode": ack_mode, "encoding": "auto" });
        let answer = self.call("POST", &self.in_vhost("queues", &[queue, "get"]), Some(&body))?;
        answer.as_array().context("a list of messages")?.iter().map(read_message).collect()
    }

    /// The names of the open AMQP connections, of all vhosts. A new connection shows up after about a second.
    ///
    /// # Errors
    /// When the API can't be reached.
    pub fn connections(&self) -> Result<Vec<String>> {
        let answer = self.call("GET", "connections", None)?;
        let connections = answer.as_array().context("a list of connections")?;
        Ok(connections.iter().filter_map(|connection| connection["name"].as_str().map(str::to_owned)).collect())
    }

    /// Closes every AMQP connection that the API knows of, as an operator does; gives their number.
    ///
    /// # Errors
    /// When the API can't be reached.
    pub fn close_all_connections(&self) -> Result<usize> {
        let names = self.connections()?;
        let mut closed = 0;
        for name in &names {
            match self.request("DELETE", &format!("connections/{}", encode(name)), None)? {
                (200..=299, _) => closed += 1,
                // It went by itself meanwhile.
                (404, _) => {}
                (status, text) => bail!("closing connection {name}: {status} {text}"),
            }
        }
        Ok(closed)
    }

    /// Makes a vhost in which our user may do everything.
    ///
    /// # Errors
    /// When the API can't be reached.
    pub fn create_vhost(&self, name: &str) -> Result<()> {
        self.call("PUT", &format!("vhosts/{}", encode(name)), Some(&json!({})))?;
        let all = json!({ "configure": ".*", "write": ".*", "read": ".*" });
        let path = format!("permissions/{}/{}", encode(name), encode(&self.user));
        self.call("PUT", &path, Some(&all)).map(drop)
    }

    /// Deletes a vhost with all it holds.
    ///
    /// # Errors
    /// When it does not exist or the API can't be reached.
    pub fn delete_vhost(&self, name: &str) -> Result<()> {
        self.call("DELETE", &format!("vhosts/{}", encode(name)), None).map(drop)
    }

    /// Any call: `path` is what follows `/api/`. Gives the answer's JSON, or null for an empty one.
    ///
    /// # Errors
    /// When the API can't be reached, or answers with a status other than 2xx.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, text) = self.request(method, path, body)?;
        if !(200..300).contains(&status) {
            bail!("{method} {path}: {status} {text}");
        }
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).with_context(|| format!("{method} {path}: no JSON: {text}"))
    }

    fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
        let login = BASE64.encode(format!("{}:{}", self.user, self.password));
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}/api/{path}", self.base))
            .header("authorization", format!("Basic {login}"))
            .header("content-type", "application/json");
        let answer = match body {
            Some(body) => self.agent.run(request.body(body.to_string())?),
            None => self.agent.run(request.body(())?),
        };
        let mut answer = answer.map_err(|error| anyhow!("{method} {path}: {error}"))?;
        let text = answer.body_mut().read_to_string()?;
        Ok((answer.status().as_u16(), text))
    }

    fn in_vhost(&self, kind: &str, rest: &[&str]) -> String {
        let mut path = format!("{kind}/{}", encode(&self.vhost));
        for part in rest {
            path.push('/');
            path.push_str(&encode(part));
        }
        path
    }
}

fn read_message(message: &Value) -> Result<Message> {
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
    let payload = match message["payload_encoding"].as_str() {
        Some("base64") => BASE64.decode(text("payload"))?,
        _ => text("payload").into_bytes(),
    };
    Ok(Message {
        payload,
        exchange: text("exchange"),
        routing_key: text("routing_key"),
        redelivered: message["redelivered"].as_bool().unwrap_or(false),
        properties: message["properties"].clone(),
    })
}

/// Percent-encodes all but the characters that are safe in any part of a URL.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The reverse of [`encode`]; what is not a valid escape stays as it is.
pub(crate) fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escape = (first == b'%').then(|| tail.get(..2)).flatten();
        let value = escape.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(value.unwrap_or(first));
        rest = if value.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_url() {
        for name in ["/", "a b", "50% é", "shardcron.shards.core", ""] {
            assert_eq!(decode(&encode(name)), name);
        }
        assert_eq!(encode("/"), "%2F");
        assert_eq!(decode("100%"), "100%");
    }

    #[test]
    fn a_url_without_a_login_is_refused() {
        assert!(Management::from_url("http://127.0.0.1:15672").is_err());
    }
}
