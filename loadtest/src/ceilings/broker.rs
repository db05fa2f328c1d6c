//! RabbitMQ alone: publish with confirms, consume, ack, all at once on a quorum queue.

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, PublisherConfirm};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const MESSAGE_BYTES: usize = 256;
/// Messages in flight without their confirms.
const WINDOW: usize = 1_024;
/// Messages handed to the client at once; waking its thread for each would cost more than the message.
const CHUNK: usize = 128;
const PREFETCH: u16 = 512;
/// Deliveries that one `multiple` ack settles.
const ACK_EVERY: u32 = 128;
const PERSISTENT: u8 = 2;
const PATIENCE: Duration = Duration::from_secs(120);

/// Messages per second through one queue, from the first publish to the last ack.
///
/// # Errors
/// RabbitMQ does not answer, or loses a message.
pub async fn measure(url: &str, queue: &str, messages: u32) -> Result<f64> {
    let publishing = Connection::connect(url, ConnectionProperties::default()).await.context("RabbitMQ")?;
    let consuming = Connection::connect(url, ConnectionProperties::default()).await.context("RabbitMQ")?;
    let sender = publishing.create_channel().await?;
    sender.confirm_select(ConfirmSelectOptions::default()).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    sender.queue_declare(queue.into(), durable, arguments).await.context("the queue for the broker's ceiling")?;
    let receiver = consuming.create_channel().await?;
    receiver.basic_qos(PREFETCH, BasicQosOptions::default()).await?;

    let began = Instant::now();
    let both = async { tokio::try_join!(publish(&sender, queue, messages), consume(&receiver, queue, messages)) };
    let moved = tokio::time::timeout(PATIENCE, both).await.context("RabbitMQ did not move the messages in time")?;
    let seconds = began.elapsed().as_secs_f64();
    moved.context("moving messages through RabbitMQ")?;
    sender.queue_delete(queue.into(), QueueDeleteOptions::default()).await.context("deleting the ceiling's queue")?;
    // Everything has been answered; how the goodbye goes says nothing about the server.
    let _ = publishing.close(200, "done".into()).await;
    let _ = consuming.close(200, "done".into()).await;
    Ok(f64::from(messages) / seconds)
}

async fn publish(channel: &Channel, queue: &str, messages: u32) -> Result<()> {
    let payload = [b'x'; MESSAGE_BYTES];
    let mut in_flight: VecDeque<PublisherConfirm> = VecDeque::with_capacity(WINDOW);
    let mut left = messages as usize;
    while left > 0 {
        let chunk = left.min(CHUNK);
        while in_flight.len() + chunk > WINDOW {
            settle(&mut in_flight).await?;
        }
        let sends = (0..chunk).map(|_| {
            let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
            channel.basic_publish("".into(), queue.into(), BasicPublishOptions::default(), &payload, properties)
        });
        for sent in join_all(sends).await {
            in_flight.push_back(sent?);
        }
        left -= chunk;
    }
    while !in_flight.is_empty() {
        settle(&mut in_flight).await?;
    }
    Ok(())
}

async fn settle(in_flight: &mut VecDeque<PublisherConfirm>) -> Result<()> {
    match in_flight.pop_front() {
        Some(confirm) => match confirm.await? {
            Confirmation::Ack(_) => Ok(()),
            other => bail!("RabbitMQ did not confirm a message: {other:?}"),
        },
        None => Ok(()),
    }
}

async fn consume(channel: &Channel, queue: &str, messages: u32) -> Result<()> {
    let options = BasicConsumeOptions::default();
    let mut deliveries = channel.basic_consume(queue.into(), "ceiling".into(), options, FieldTable::default()).await?;
    for received in 1..=messages {
        let delivery = deliveries.next().await.context("RabbitMQ ended the consumer")??;
        if received % ACK_EVERY == 0 || received == messages {
            channel.basic_ack(delivery.delivery_tag, BasicAckOptions { multiple: true }).await?;
        }
    }
    // Its answer comes behind the last ack.
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    channel.queue_declare(queue.into(), passive, FieldTable::default()).await?;
    Ok(())
}
