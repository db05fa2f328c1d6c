//! `connection.blocked`: what the server says when it is short of memory or disk. Said here by a proxy that puts the frames in, so
//! that no other test's server has to be brought into trouble.

use crate::support::*;
use shardcron_broker::{Broker, BrokerState, Published};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The end of every frame.
const FRAME_END: u8 = 0xce;

/// `connection.blocked` and `connection.unblocked` as frames of channel 0.
fn frame(blocked: bool) -> Vec<u8> {
    let (method, rest): (u8, &[u8]) = if blocked { (60, b"\x0alow memory") } else { (61, b"") };
    let payload = [&[0, 10, 0, method], rest].concat();
    let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&[1, 0, 0], size.as_slice(), &payload, &[FRAME_END]].concat()
}

/// Relays whole frames from the server, and puts in what `blocked` says whenever it changes.
async fn back(
    mut server: impl AsyncReadExt + Unpin,
    mut client: impl AsyncWriteExt + Unpin,
    mut blocked: watch::Receiver<bool>,
) {
    let mut buffer = Vec::new();
    loop {
        tokio::select! {
            read = server.read_buf(&mut buffer) => if !matches!(read, Ok(1..)) { return },
            Ok(()) = blocked.changed() => {
                let now = *blocked.borrow_and_update();
                if client.write_all(&frame(now)).await.is_err() { return }
            }
        }
        while let Some(size) = buffer.get(3..7) {
            let end = 7 + u32::from_be_bytes(size.try_into().unwrap()) as usize + 1;
            if buffer.len() < end {
                break;
            }
            let rest = buffer.split_off(end);
            if client.write_all(&buffer).await.is_err() {
                return;
            }
            buffer = rest;
        }
    }
}

async fn proxy(target: String, blocked: watch::Receiver<bool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&target).await.unwrap();
            let (mut from_client, to_client) = client.into_split();
            let (from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            tokio::spawn(back(from_server, to_client, blocked.clone()));
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_connection_pauses_publishing_and_nothing_else() {
    let direct = fresh_vhost().await;
    let address = direct.split('@').nth(1).unwrap().split('/').next().unwrap().to_owned();
    let (block, blocked) = watch::channel(false);
    let port = proxy(address.clone(), blocked).await;
    let url = direct.replace(&address, &format!("127.0.0.1:{port}"));
    let rabbit = rabbit_at(&direct, &url).await.declared().await;
    let mut consumer = rabbit.broker.consume(TIER, 10).await.unwrap();
    let messages = shards(3);
    assert_eq!(rabbit.broker.publish(TIER, &messages).await, all_confirmed(3));

    block.send_replace(true);
    let mut state = rabbit.broker.state();
    let is_blocked = |s: &BrokerState| matches!(s, BrokerState::Blocked(reason) if reason == "low memory");
    within("the state", state.wait_for(is_blocked)).await.unwrap();
    let started = Instant::now();
    let outcome = rabbit.broker.publish(TIER, &shards(1)).await;
    assert!(matches!(&outcome[..], [Published::Failed(why)] if why.contains("low memory")), "{outcome:?}");
    assert!(rabbit.broker.put_dead(b"x", "y").await.is_err());
    assert!(started.elapsed() < Duration::from_secs(1), "it is said at once");
    let open = collect(&mut consumer, 3).await;
    assert_eq!(attempts(&open), wanted(&messages), "deliveries go on");

    block.send_replace(false);
    rabbit.up().await;
    assert_eq!(rabbit.broker.publish(TIER, &shards(1)).await, all_confirmed(1));
    collect(&mut consumer, 1).await;
}
