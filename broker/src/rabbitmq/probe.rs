//! Asks the server what it is. It says so at the beginning of the handshake, which lapin does not pass on.

use super::url::Address;
use crate::port::{BrokerError, Result};
use lapin::types::parsing::parse_field_table;
use lapin::types::{AMQPValue, FieldTable};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PROTOCOL_HEADER: &[u8] = b"AMQP\x00\x00\x09\x01";
/// Frame type, channel and size.
const FRAME_HEADER: usize = 7;
/// Class, method and the protocol's version, before the properties of `connection.start`.
const START_HEADER: usize = 6;
/// RabbitMQ's is below one kilobyte.
const START_BYTES_MAX: usize = 64 * 1024;

/// Product and version.
pub(super) async fn server_version(address: &Address) -> Result<String> {
    match tokio::time::timeout(super::RPC_TIMEOUT, first_frame(address)).await {
        Ok(Ok(frame)) => describe(&frame).ok_or_else(|| {
            BrokerError::Unavailable(format!("what answers at {} does not speak AMQP 0-9-1", address.masked()))
        }),
        Ok(Err(error)) => Err(BrokerError::Unavailable(format!("{error} at {}", address.masked()))),
        Err(_) => Err(BrokerError::Unavailable(format!("no answer from {}", address.masked()))),
    }
}

async fn first_frame(address: &Address) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address.host_and_port()).await?;
    stream.write_all(PROTOCOL_HEADER).await?;
    let mut header = [0; FRAME_HEADER];
    stream.read_exact(&mut header).await?;
    let size = u32::from_be_bytes([header[3], header[4], header[5], header[6]]) as usize;
    if header[0] != 1 || size > START_BYTES_MAX {
        return Ok(Vec::new());
    }
    let mut frame = vec![0; size];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

fn describe(frame: &[u8]) -> Option<String> {
    let properties = frame.get(START_HEADER..)?;
    let (_, table) = parse_field_table(properties).ok()?;
    Some(format!("{} {}", text(&table, "product")?, text(&table, "version")?))
}

fn text(table: &FieldTable, key: &str) -> Option<String> {
    match table.inner().get(key)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        _ => None,
    }
}
