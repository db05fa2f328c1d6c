//! The server's address: read strictly, shown without its password.

use crate::port::{BrokerError, Result};
use lapin::uri::{AMQPScheme, AMQPUri};
use shardcron_domain::address;

/// Seconds. Two missed ones and a connection is dead; the server's own default of 60 would leave a cut cable unnoticed for minutes.
/// Below half of the lost-after time (15 s): what a frozen worker holds comes back before its running shards are handed out again,
/// and does not go to it.
const HEARTBEAT: u16 = 5;

/// Where the server is.
#[derive(Clone)]
pub(super) struct Address {
    uri: AMQPUri,
    user: Option<String>,
    masked: String,
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self> {
        // The parser's own error could repeat the address, and so the password. It takes an address with a slash too few, too, and goes
        // to localhost with all of it as the name of a vhost.
        let whole = ["amqp://", "amqps://"].iter().any(|scheme| url.starts_with(scheme));
        let uri = whole.then(|| url.parse::<AMQPUri>().ok()).flatten();
        let Some(mut uri) = uri else {
            return Err(BrokerError::Refused(
                "the address of RabbitMQ can't be read; it looks like amqp://user:password@host:5672/%2f, with special characters \
                 of the password percent-encoded"
                    .into(),
            ));
        };
        if uri.scheme == AMQPScheme::AMQPS {
            return Err(BrokerError::Refused(
                "this build speaks AMQP without TLS only; use amqp:// within a private network or through a TLS tunnel"
                    .into(),
            ));
        }
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        let (user, masked) = (address::user(url).map(str::to_owned), address::masked(url));
        Ok(Self { uri, user, masked })
    }

    pub(super) fn uri(&self) -> AMQPUri {
        self.uri.clone()
    }

    pub(super) fn host_and_port(&self) -> (&str, u16) {
        (&self.uri.authority.host, self.uri.authority.port)
    }

    pub(super) fn vhost(&self) -> &str {
        &self.uri.vhost
    }

    /// As people may see it.
    pub(super) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    pub(super) fn masked(&self) -> &str {
        &self.masked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        let address = Address::parse("amqp://me:s3cret@rabbit.example:5673/team").unwrap();
        assert_eq!((address.masked(), address.user()), ("amqp://me:…@rabbit.example:5673/team", Some("me")));
        let alone = Address::parse("amqp://s3cret@h/x").unwrap();
        assert_eq!((alone.masked(), alone.user()), ("amqp://…@h/x", None));
        for bad in [
            "http://me:s3cret@x",
            "amqp:/me:s3cret@x",
            "amqp:me:s3cret@x",
            "amqp://me:s3cret@x:notaport",
            "s3cret",
            "amqps://me:s3cret@x",
        ] {
            let refusal = Address::parse(bad).err().unwrap().to_string();
            assert!(!refusal.contains("s3cret"), "{refusal}");
        }
    }

    #[test]
    fn the_heartbeat_is_short_unless_set() {
        assert_eq!(Address::parse("amqp://h").unwrap().uri().query.heartbeat, Some(5));
        assert_eq!(Address::parse("amqp://h/%2f?heartbeat=3").unwrap().uri().query.heartbeat, Some(3));
    }
}
