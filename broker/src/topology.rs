//! What exists in RabbitMQ: one table of exchanges, queues, bindings and arguments. Pure; `rabbitmq/declare.rs` carries it out.
//!
//! Why these arguments:
//! - **Quorum queues.** On one node as fast as classic ones or faster; they survive the loss of a node; after a kill they deliver a
//!   handful of acked messages again instead of all; and a message that a person publishes with `delivery_mode` 1 from the
//!   management UI is as durable as any.
//! - **`x-delivery-limit` is explicit.** RabbitMQ 4 has 20 by default and drops what exceeds it: a worker that crashes in a loop
//!   would burn the count of every innocent message that it had prefetched (cases ). How often a shard is tried is the
//!   ledger's decision, and each attempt is a message of its own, so a message that came back a thousand times can't be handed to
//!   anybody. -1 (no limit) would say it better, but 3.10 refuses it.
//! - **Dead-lettered, never dropped**: over the default exchange into the dead letter queue. The shard itself is not lost either
//!   way: the ledger still holds it as pending, and the dispatcher publishes it again.
//! - **The dead letter queue is bounded**, the oldest go first: a program that sends rubbish in a loop must not fill the disk.

use crate::port::BrokerError;

/// The prefix of all names where nothing else is configured.
pub const DEFAULT_PREFIX: &str = "shardcron";

/// How often one message may come back; see the module's text.
pub const DELIVERY_LIMIT: i64 = 1_000;

/// Messages that the dead letter queue keeps.
pub const DEAD_LETTERS_MAX: i64 = 100_000;

/// Bytes of a prefix; the queue's name has to stay below AMQP's 255 with a tier's name behind it.
const PREFIX_BYTES: usize = 100;

/// An argument of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Text.
    Text(String),
    /// A number.
    Number(i64),
}

impl std::fmt::Display for Argument {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Argument::Text(text) => write!(f, "'{text}'"),
            Argument::Number(number) => number.fmt(f),
        }
    }
}

/// A queue; all are durable, none is exclusive or deletes itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its name.
    pub name: String,
    /// Its arguments.
    pub arguments: Vec<(&'static str, Argument)>,
}

/// An exchange; all are durable topics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Its name.
    pub name: String,
}

/// A binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// From here.
    pub exchange: String,
    /// To here.
    pub queue: String,
    /// For these keys.
    pub routing_key: &'static str,
}

/// What has to exist for a purpose, in the order in which it is declared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The exchanges.
    pub exchanges: Vec<Exchange>,
    /// The queues; what others dead-letter to comes first.
    pub queues: Vec<Queue>,
    /// The bindings.
    pub bindings: Vec<Binding>,
}

/// The names under one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    prefix: String,
}

impl Names {
    /// Checks the prefix.
    ///
    /// # Errors
    /// Refused, with what a prefix may look like.
    pub fn new(prefix: &str) -> Result<Self, BrokerError> {
        let chars = prefix.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        // Names that begin with "amq." belong to the server.
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES || !chars || prefix == "amq" || prefix.starts_with("amq.") {
            return Err(BrokerError::Refused(format!(
                "'{prefix}' can't be the prefix of queue names: it has 1 to {PREFIX_BYTES} letters, digits, '-', '_' or '.', and \
                 does not begin with 'amq.'"
            )));
        }
        Ok(Self { prefix: prefix.into() })
    }

    /// The exchange for triggers; the routing key is the job's name.
    #[must_use]
    pub fn trigger_exchange(&self) -> String {
        format!("{}.trigger", self.prefix)
    }

    /// The queue of triggers.
    #[must_use]
    pub fn triggers(&self) -> String {
        format!("{}.triggers", self.prefix)
    }

    /// A tier's queue of shards.
    #[must_use]
    pub fn shards(&self, tier: &str) -> String {
        format!("{}.shards.{tier}", self.prefix)
    }

    /// The queue of dead letters.
    #[must_use]
    pub fn dead(&self) -> String {
        format!("{}.dead", self.prefix)
    }

    /// Everything.
    #[must_use]
    pub fn topology(&self, tiers: &[String]) -> Topology {
        let mut all = self.triggers_topology();
        all.queues.extend(tiers.iter().map(|tier| self.work_queue(self.shards(tier))));
        all
    }

    /// What a consumer of one tier needs.
    #[must_use]
    pub fn tier_topology(&self, tier: &str) -> Topology {
        let queues = vec![self.dead_queue(), self.work_queue(self.shards(tier))];
        Topology { queues, ..Topology::default() }
    }

    /// What triggers need.
    #[must_use]
    pub fn triggers_topology(&self) -> Topology {
        Topology {
            exchanges: vec![Exchange { name: self.trigger_exchange() }],
            queues: vec![self.dead_queue(), self.work_queue(self.triggers())],
            // Every key: the key is the job's name, and an unknown name has to be answered, not lost.
            bindings: vec![Binding { exchange: self.trigger_exchange(), queue: self.triggers(), routing_key: "#" }],
        }
    }

    /// What dead letters need.
    #[must_use]
    pub fn dead_topology(&self) -> Topology {
        Topology { queues: vec![self.dead_queue()], ..Topology::default() }
    }

    fn work_queue(&self, name: String) -> Queue {
        Queue {
            name,
            arguments: vec![
                ("x-queue-type", Argument::Text("quorum".into())),
                ("x-delivery-limit", Argument::Number(DELIVERY_LIMIT)),
                ("x-dead-letter-exchange", Argument::Text(String::new())),
                ("x-dead-letter-routing-key", Argument::Text(self.dead())),
            ],
        }
    }

    fn dead_queue(&self) -> Queue {
        Queue {
            name: self.dead(),
            arguments: vec![
                ("x-queue-type", Argument::Text("quorum".into())),
                ("x-max-length", Argument::Number(DEAD_LETTERS_MAX)),
                // Who looks at dead letters in the management UI returns them each time; that must not count as failures.
                ("x-delivery-limit", Argument::Number(i64::from(i32::MAX))),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_prefix() {
        let names = Names::new("acme").unwrap();
        let all = names.topology(&["core".into(), "bulk".into()]);
        let queues: Vec<_> = all.queues.iter().map(|q| q.name.as_str()).collect();
        assert_eq!(queues, ["acme.dead", "acme.triggers", "acme.shards.core", "acme.shards.bulk"]);
        assert_eq!(all.bindings[0].exchange, "acme.trigger");
    }

    #[test]
    fn r_03_nothing_is_dropped_by_a_default() {
        let names = Names::new(DEFAULT_PREFIX).unwrap();
        for queue in names.topology(&["core".into()]).queues {
            assert!(queue.arguments.iter().any(|(name, _)| *name == "x-delivery-limit"), "{}", queue.name);
            let dead_letters = queue.arguments.iter().any(|(name, _)| *name == "x-dead-letter-routing-key");
            assert_eq!(dead_letters, queue.name != names.dead());
        }
    }

    #[test]
    fn a_prefix_is_checked() {
        for bad in ["", "amq", "amq.x", "a b", "a#", &"x".repeat(101)] {
            assert!(Names::new(bad).is_err(), "{bad}");
        }
    }
}
