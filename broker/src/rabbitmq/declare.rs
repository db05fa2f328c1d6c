//! Carries the topology out, and turns the server's refusal into a sentence that says what to do.

use super::conn::Conn;
use super::error::{raw_bounded, sort};
use crate::port::{BrokerError, Result};
use crate::topology::{Argument, Queue, Topology};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};

/// Declares everything on a channel of its own, because a refusal closes the channel.
pub(super) async fn declare(connection: &Conn, topology: &Topology) -> Result<()> {
    let channel = connection.channel().await?;
    let declared = on_channel(&channel, topology).await;
    if channel.status().connected() {
        // Its answer is of no interest, but an open channel per declare would be.
        let _ = raw_bounded(channel.close(200, "done".into())).await;
    }
    declared
}

async fn on_channel(channel: &Channel, topology: &Topology) -> Result<()> {
    for exchange in &topology.exchanges {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let name = exchange.name.as_str().into();
        let declared = channel.exchange_declare(name, ExchangeKind::Topic, options, FieldTable::default());
        raw_bounded(declared).await?.map_err(|e| explain(&e))?;
    }
    for queue in &topology.queues {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let declared = channel.queue_declare(queue.name.as_str().into(), options, arguments(queue));
        raw_bounded(declared).await?.map_err(|e| explain(&e))?;
    }
    for binding in &topology.bindings {
        let bound = channel.queue_bind(
            binding.queue.as_str().into(),
            binding.exchange.as_str().into(),
            binding.routing_key.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        raw_bounded(bound).await?.map_err(|e| explain(&e))?;
    }
    Ok(())
}

fn arguments(queue: &Queue) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in &queue.arguments {
        let value = match value {
            Argument::Text(text) => AMQPValue::LongString(text.as_str().into()),
            Argument::Number(number) => AMQPValue::LongLongInt(*number),
        };
        table.insert((*name).into(), value);
    }
    table
}

fn explain(error: &lapin::Error) -> BrokerError {
    match sort(error) {
        BrokerError::Refused(text) => BrokerError::Refused(inequivalent(&text).unwrap_or(text)),
        unavailable @ BrokerError::Unavailable(_) => unavailable,
    }
}

/// Reads "… inequivalent arg 'durable' for queue 'q' in vhost '/': received 'true' but current is 'false'" (and its longer forms
/// for arguments). `None` when the server words it in another way; its own words are shown then.
fn inequivalent(text: &str) -> Option<String> {
    let rest = text.split_once("inequivalent arg '")?.1;
    let (argument, rest) = rest.split_once("' for ")?;
    let (kind, rest) = rest.split_once(" '")?;
    let (name, rest) = rest.split_once("' in vhost '")?;
    let (vhost, rest) = rest.split_once("': received ")?;
    let (want, have) = rest.split_once(" but current is ")?;
    let (want, have) = (value(want), value(have));
    let remedy = if kind == "queue" {
        "Delete the queue when it is empty or its messages are not needed (the ledger publishes shards again)"
    } else {
        "Delete the exchange"
    };
    Some(format!(
        "{kind} '{name}' in vhost '{vhost}' exists with {argument} = {have}, and shardcron needs {want}. {remedy}; it is then \
         declared anew. Or set another prefix for all names. Or, if a policy or an earlier version set it on purpose, undo that"
    ))
}

/// "the value 'classic' of type 'longstr'" → "'classic'"; "none" stays.
fn value(text: &str) -> &str {
    let text = text.trim_start_matches("the value ");
    text.split_once(" of type ").map_or(text, |(value, _)| value).trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_05_a_refusal_names_queue_argument_have_and_want() {
        let sentence = inequivalent(
            "PRECONDITION_FAILED - inequivalent arg 'x-max-priority' for queue 'shardcron.shards.core' in vhost '/': received \
             none but current is the value '10' of type 'signedint'",
        )
        .unwrap();
        for part in ["queue 'shardcron.shards.core'", "x-max-priority = '10'", "needs none", "Delete the queue"] {
            assert!(sentence.contains(part), "{part}: {sentence}");
        }
        let sentence = inequivalent(
            "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost 'v': received 'true' but current is 'false'",
        )
        .unwrap();
        assert!(sentence.contains("durable = 'false', and shardcron needs 'true'"), "{sentence}");
        assert_eq!(inequivalent("PRECONDITION_FAILED - something else"), None);
    }
}
