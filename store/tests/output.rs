//! Output of attempts, against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::limits::OUTPUT_CHUNK_BYTES;
use shardcron_domain::output::{Buffer, Chunk, Stream, Write};
use shardcron_store::*;

conformance!(b_09_any_bytes_come_back_in_their_order, b_02_the_middle_goes_and_a_repeated_write_changes_nothing);

fn query(execution: shardcron_domain::ExecutionId) -> OutputQuery {
    OutputQuery { execution, shard: None, attempt: None, after: 0 }
}

async fn b_09_any_bytes_come_back_in_their_order(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 2).await;
    let any: Vec<u8> = (0..=255).collect();
    let write = |index, n, stream, bytes: &[u8]| {
        let mut buffer = Buffer::default();
        buffer.push(stream, bytes);
        OutputWrite { attempt: attempt(id, index, n), write: buffer.take() }
    };
    let first = [write(1, 1, Stream::Stdout, &any), write(0, 1, Stream::Stderr, "emoji 😀'\";--".as_bytes())];
    ledger.keep_output(&first, T0).await.unwrap();
    ledger.keep_output(&[write(0, 2, Stream::Log, b"again")], T0 + 5).await.unwrap();
    let all = ledger.output(&query(id), 10).await.unwrap();
    let seen: Vec<_> = all.iter().map(|r| (r.shard, r.attempt, r.chunk.stream, r.at_ms)).collect();
    assert_eq!(seen, [(1, 1, Stream::Stdout, T0), (0, 1, Stream::Stderr, T0), (0, 2, Stream::Log, T0 + 5)]);
    assert_eq!((&all[0].chunk.bytes, &all[1].chunk.bytes[..]), (&any, "emoji 😀'\";--".as_bytes()));
    let of = |shard, attempt, after| OutputQuery { shard, attempt, after, ..query(id) };
    let found = |query: OutputQuery| async move { ledger.output(&query, 10).await.unwrap().len() };
    assert_eq!(found(of(Some(0), None, 0)).await, 2);
    assert_eq!(found(of(Some(0), Some(2), 0)).await, 1);
    assert_eq!(found(of(None, None, all[1].id)).await, 1);
    assert_eq!(ledger.output(&query(id), 1).await.unwrap(), all[..1]);
    let other = shardcron_domain::ExecutionId(uuid::Uuid::now_v7());
    assert_eq!(ledger.output(&query(other), 10).await.unwrap(), []);
}

async fn b_02_the_middle_goes_and_a_repeated_write_changes_nothing(world: World) {
    let ledger = &world.ledger;
    let (_, _, id) = fired(ledger, 1).await;
    let at = attempt(id, 0, 1);
    let chunk = |seq: u32| Chunk {
        seq,
        stream: Stream::Stdout,
        position: u64::from(seq) * OUTPUT_CHUNK_BYTES as u64,
        bytes: vec![0xFF; OUTPUT_CHUNK_BYTES],
    };
    // More than a megabyte in one write: no statement is larger than a packet of 1 MiB.
    let many = OutputWrite { attempt: at, write: Write { add: (0..90).map(chunk).collect(), delete: None } };
    ledger.keep_output(std::slice::from_ref(&many), T0).await.unwrap();
    ledger.keep_output(&[many], T0 + 9).await.unwrap();
    let moved = OutputWrite { attempt: at, write: Write { add: vec![chunk(90)], delete: Some((10, 40)) } };
    for _ in 0..2 {
        ledger.keep_output(std::slice::from_ref(&moved), T0 + 10).await.unwrap();
        let kept: Vec<u32> = ledger.output(&query(id), 200).await.unwrap().iter().map(|r| r.chunk.seq).collect();
        assert_eq!(kept, (0..10).chain(40..91).collect::<Vec<u32>>());
    }
}
