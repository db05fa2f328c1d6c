//! What the RabbitMQ adapter does in a second on this machine: publish with confirms, then consume with grouped acks.
//!
//! `cargo run --release -p shardcron-broker --example throughput -- amqp://user:password@127.0.0.1:5672/%2f [messages]`
//! It declares queues under the prefix `throughput` and leaves them empty.

use shardcron_broker::{Arrival, Broker, Published, RabbitMq, RabbitOptions};
use shardcron_domain::messages::{ENVELOPE_VERSION, ShardMessage};
use shardcron_domain::{AttemptRef, ExecutionId};
use std::time::Instant;

const TIER: &str = "core";
const BATCH: usize = 4_096;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().ok_or_else(|| anyhow::anyhow!("the first argument is the AMQP URL"))?;
    let total: u32 = arguments.next().map_or(Ok(100_000), |n| n.parse())?;
    let options = RabbitOptions { prefix: "throughput".into(), ..RabbitOptions::default() };
    let broker = RabbitMq::connect(&url, options)?;
    let mut state = broker.state();
    state.wait_for(|s| *s == shardcron_broker::BrokerState::Up).await?;
    broker.declare(&[TIER.into()]).await?;
    println!("{}", broker.server_version().await?);

    let execution = ExecutionId(uuid::Uuid::now_v7());
    let shard =
        |index| ShardMessage { v: ENVELOPE_VERSION, attempt: AttemptRef { execution, index, attempt: 1 }, epoch: 1 };
    let messages: Vec<_> = (0..total).map(shard).collect();
    let started = Instant::now();
    for batch in messages.chunks(BATCH) {
        let failed = broker.publish(TIER, batch).await.into_iter().find(|p| *p != Published::Confirmed);
        anyhow::ensure!(failed.is_none(), "{failed:?}");
    }
    report("published and confirmed", total, started);

    for prefetch in [256, 1_024] {
        if prefetch == 1_024 {
            for batch in messages.chunks(BATCH) {
                broker.publish(TIER, batch).await;
            }
        }
        let started = Instant::now();
        let mut consumer = broker.consume(TIER, prefetch).await?;
        let mut seen = 0;
        while seen < total {
            if let Some(Arrival::Shards(shards)) = consumer.deliveries.next().await {
                seen += u32::try_from(shards.len())?;
                let tags: Vec<_> = shards.iter().map(|s| s.tag).collect();
                consumer.acker.ack(&tags).await;
            }
        }
        report(&format!("consumed and acked, prefetch {prefetch}"), total, started);
        consumer.acker.stop().await;
    }
    broker.close().await;
    Ok(())
}

fn report(what: &str, number: u32, started: Instant) {
    let rate = f64::from(number) / started.elapsed().as_secs_f64();
    println!("{what}: {rate:.0}/s");
}
