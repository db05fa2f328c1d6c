//! What is kept of an attempt's output: its beginning, and its end, which moves on while the attempt runs. What is cut is the middle.
//!
//! Pure bookkeeping: bytes come in, and what to write and what to delete at the ledger goes out. Both are bounded whatever a program
//! prints, in memory, at the ledger and in the rate of writing, which the caller sets by how often it asks.

use crate::limits::{OUTPUT_CHUNK_BYTES, OUTPUT_HEAD_BYTES, OUTPUT_PENDING_BYTES, OUTPUT_TAIL_BYTES};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Where a piece of output comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// A program's standard output.
    Stdout,
    /// A program's standard error.
    Stderr,
    /// What a handler says of itself (`ShardContext::log`), and the worker about it.
    Log,
}

impl Stream {
    /// The number in the ledger.
    #[must_use]
    pub fn code(self) -> i64 {
        match self {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
            Stream::Log => 3,
        }
    }

    /// From the number in the ledger.
    #[must_use]
    pub fn from_code(code: i64) -> Option<Self> {
        [Stream::Stdout, Stream::Stderr, Stream::Log].into_iter().find(|stream| stream.code() == code)
    }

    /// The word that people see.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
            Stream::Log => "log",
        }
    }
}

/// A piece of output as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Grows by one with each chunk of the attempt.
    pub seq: u32,
    /// Where it comes from.
    pub stream: Stream,
    /// Bytes of all streams of the attempt before it. Where it is not the end of the chunk before, something was cut.
    pub position: u64,
    /// What was written; any bytes.
    pub bytes: Vec<u8>,
}

/// What to do at the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// To be added.
    pub add: Vec<Chunk>,
    /// To be deleted: chunks with numbers from..below.
    pub delete: Option<(u32, u32)>,
}

#[derive(Clone, Debug)]
struct Piece {
    stream: Stream,
    position: u64,
    bytes: Vec<u8>,
}

/// The output of one attempt between the attempt and the ledger.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    /// Bytes that came in.
    written: u64,
    /// What has not been taken yet; the beginning of the output is always among it, and what follows as far as there is room.
    pending: VecDeque<Piece>,
    /// Bytes of `pending` that are not of the beginning.
    pending_tail: usize,
    next_seq: u32,
    /// The first number that is not of the beginning.
    tail_from: u32,
    /// Sizes of the chunks from `tail_first` on, which the ledger holds.
    tail: VecDeque<usize>,
    tail_first: u32,
    tail_bytes: usize,
}

impl Buffer {
    /// Whether there is anything to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Takes in what was written to a stream.
    pub fn push(&mut self, stream: Stream, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let head_left = (OUTPUT_HEAD_BYTES as u64).saturating_sub(self.written);
            let of_head = head_left > 0;
            let most = if of_head { usize::try_from(head_left).unwrap_or(usize::MAX) } else { OUTPUT_CHUNK_BYTES };
            let (now, rest) = bytes.split_at(bytes.len().min(most));
            bytes = rest;
            self.append(stream, now, of_head);
        }
    }

    fn append(&mut self, stream: Stream, mut bytes: &[u8], of_head: bool) {
        if !of_head {
            self.pending_tail += bytes.len();
        }
        while !bytes.is_empty() {
            let at_seam = self.written == OUTPUT_HEAD_BYTES as u64;
            let room = match self.pending.back() {
                Some(last) if last.stream == stream && !at_seam => OUTPUT_CHUNK_BYTES.saturating_sub(last.bytes.len()),
                _ => 0,
            };
            let (now, rest) = bytes.split_at(bytes.len().min(if room == 0 { OUTPUT_CHUNK_BYTES } else { room }));
            match self.pending.back_mut() {
                Some(last) if room > 0 => last.bytes.extend_from_slice(now),
                _ => self.pending.push_back(Piece { stream, position: self.written, bytes: now.to_vec() }),
            }
            self.written += now.len() as u64;
            bytes = rest;
        }
        self.drop_old_pending();
    }

    fn drop_old_pending(&mut self) {
        let head = OUTPUT_HEAD_BYTES as u64;
        while self.pending_tail > OUTPUT_PENDING_BYTES {
            let Some(at) = self.pending.iter().position(|piece| piece.position >= head) else { return };
            if let Some(gone) = self.pending.remove(at) {
                self.pending_tail -= gone.bytes.len();
            }
        }
    }

    /// What has come in since the last time, numbered, and what may go for it.
    pub fn take(&mut self) -> Write {
        let mut write = Write::default();
        for piece in self.pending.drain(..) {
            let seq = self.next_seq;
            self.next_seq = self.next_seq.saturating_add(1);
            if piece.position < OUTPUT_HEAD_BYTES as u64 {
                self.tail_from = self.next_seq;
                self.tail_first = self.next_seq;
            } else {
                self.tail.push_back(piece.bytes.len());
                self.tail_bytes += piece.bytes.len();
            }
            write.add.push(Chunk { seq, stream: piece.stream, position: piece.position, bytes: piece.bytes });
        }
        self.pending_tail = 0;
        let first = self.tail_first;
        while self.tail_bytes > OUTPUT_TAIL_BYTES && self.tail.len() > 1 {
            self.tail_bytes -= self.tail.pop_front().unwrap_or(0);
            self.tail_first = self.tail_first.saturating_add(1);
        }
        if self.tail_first > first {
            write.delete = Some((first, self.tail_first));
            write.add.retain(|chunk| chunk.seq < first || chunk.seq >= self.tail_first);
        }
        write
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// What the ledger would hold.
    #[derive(Default)]
    struct Kept(BTreeMap<u32, Chunk>);

    impl Kept {
        fn apply(&mut self, write: Write) {
            if let Some((from, below)) = write.delete {
                self.0.retain(|seq, _| *seq < from || *seq >= below);
            }
            for chunk in write.add {
                assert!(chunk.bytes.len() <= OUTPUT_CHUNK_BYTES && !chunk.bytes.is_empty());
                assert!(self.0.insert(chunk.seq, chunk).is_none(), "no number twice");
            }
        }

        fn bytes(&self) -> usize {
            self.0.values().map(|chunk| chunk.bytes.len()).sum()
        }
    }

    #[test]
    fn little_output_is_kept_whole() {
        let (mut buffer, mut kept) = (Buffer::default(), Kept::default());
        buffer.push(Stream::Stdout, b"one ");
        buffer.push(Stream::Stdout, b"two");
        buffer.push(Stream::Stderr, b"three");
        kept.apply(buffer.take());
        assert!(buffer.is_empty() && buffer.take() == Write::default());
        buffer.push(Stream::Log, b"four");
        kept.apply(buffer.take());
        let all: Vec<(u32, Stream, u64, &[u8])> =
            kept.0.values().map(|c| (c.seq, c.stream, c.position, &c.bytes[..])).collect();
        let expected: [(u32, Stream, u64, &[u8]); 3] =
            [(0, Stream::Stdout, 0, b"one two"), (1, Stream::Stderr, 7, b"three"), (2, Stream::Log, 12, b"four")];
        assert_eq!(all, expected);
    }

    proptest! {
        // Each case moves some megabytes.
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn b_09_beginning_and_end_are_kept_and_everything_is_bounded(
            parts in proptest::collection::vec((0usize..200_000, 0u8..3, any::<bool>()), 1..25),
        ) {
            let (mut buffer, mut kept, mut all) = (Buffer::default(), Kept::default(), Vec::new());
            for (length, stream, take) in parts {
                let bytes: Vec<u8> = (0..length).map(|n| ((all.len() + n) % 251) as u8).collect();
                let stream = [Stream::Stdout, Stream::Stderr, Stream::Log][usize::from(stream)];
                buffer.push(stream, &bytes);
                all.extend_from_slice(&bytes);
                let pending: usize = buffer.pending.iter().map(|p| p.bytes.len()).sum();
                prop_assert!(pending <= OUTPUT_HEAD_BYTES + OUTPUT_PENDING_BYTES);
                if take {
                    kept.apply(buffer.take());
                    prop_assert!(kept.bytes() <= OUTPUT_HEAD_BYTES + OUTPUT_TAIL_BYTES);
                }
            }
            kept.apply(buffer.take());
            let mut at = 0;
            for chunk in kept.0.values() {
                let from = usize::try_from(chunk.position).unwrap();
                prop_assert!(from >= at, "in order, and nothing twice");
                prop_assert_eq!(&chunk.bytes[..], &all[from..from + chunk.bytes.len()]);
                if at < all.len().min(OUTPUT_HEAD_BYTES) {
                    prop_assert_eq!(from, at, "the beginning has no gap");
                }
                at = from + chunk.bytes.len();
            }
            prop_assert_eq!(at, all.len(), "the end is there");
            if all.len() <= OUTPUT_HEAD_BYTES {
                prop_assert_eq!(kept.bytes(), all.len());
            }
        }
    }
}
