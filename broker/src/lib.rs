//! Transport of shards and triggers. The ledger is the truth; what is here may be lost, doubled and reordered.
//!
//! Owns: the port [`Broker`], its adapters (RabbitMQ; the ledger, polled; the one with the other behind it), the topology and the wire codec, and every line that
//! knows lapin.
//!
//! Must not: decide what to hand out, whether a delivery is still wanted, or when to ack. It carries out.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that can't go on should stop where it is"))]

pub mod codec;
pub mod fallback;
pub mod ledger;
pub mod metric_definitions;
pub mod port;
pub mod rabbitmq;
pub mod topology;

mod backoff;
mod groups;
mod health;

pub use fallback::{Fallback, FallbackOptions};
pub use ledger::LedgerBroker;
pub use port::*;
pub use rabbitmq::{RabbitMq, RabbitOptions};
