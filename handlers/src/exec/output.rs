//! What a program writes: read as long as it runs, kept within bounds, made into text that every database and JSON can hold.

use super::lines::{self, Message, Part, Splitter};
use super::reports::Reports;
use shardcron_domain::limits::{OUTPUT_BYTES, PROGRAM_LINE_BYTES};
use shardcron_domain::output::Stream;
use shardcron_sdk::Effects;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Child;
use tokio::task::JoinSet;

/// The first bytes show how a program began, the last ones how it ended; what is cut is the middle.
const HEAD_BYTES: usize = OUTPUT_BYTES / 4;
const TAIL_BYTES: usize = OUTPUT_BYTES - HEAD_BYTES;

/// A stream of output as far as it is kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

/// Output as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) text: String,
    pub(crate) cut: bool,
}

impl Kept {
    fn push(&mut self, mut bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let to_head = bytes.len().min(HEAD_BYTES - self.head.len());
        self.head.extend_from_slice(&bytes[..to_head]);
        bytes = &bytes[to_head..];
        let bytes = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let over = (self.tail.len() + bytes.len()).saturating_sub(TAIL_BYTES);
        self.tail.drain(..over);
        self.tail.extend(bytes);
    }

    /// Bytes that the program wrote, kept or not.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// At most about `limit` bytes of it (and the mark of the cut), as text.
    pub(crate) fn text(&self, limit: usize) -> Text {
        let kept = self.head.len() + self.tail.len();
        let mut bytes = self.head.clone();
        bytes.extend(&self.tail);
        let dropped = self.total - kept as u64;
        if dropped == 0 {
            let whole = clean(&bytes);
            if whole.len() <= limit {
                return Text { text: whole, cut: false };
            }
        }
        // Cutting bytes first and cleaning then could exceed the limit threefold (U+FFFD has three bytes), so text is cut too.
        let head_limit = limit / 4;
        let head = clean(without_split_end(&bytes[..self.head.len().min(head_limit)]));
        let head = &head[..head.floor_char_boundary(head_limit)];
        let tail_limit = limit - head_limit;
        let tail_from = (bytes.len() - bytes.len().min(tail_limit)).max(self.head.len().min(head_limit));
        let tail = clean(without_split_start(&bytes[tail_from..]));
        let tail = &tail[tail.ceil_char_boundary(tail.len().saturating_sub(tail_limit))..];
        let gap = self.total - (self.head.len().min(head_limit) + bytes.len() - tail_from) as u64;
        Text { text: format!("{head}\n… {gap} bytes cut …\n{tail}"), cut: true }
    }

    /// The last lines, within `limit` bytes.
    fn last_lines(&self, limit: usize) -> String {
        let bytes: Vec<u8> = if self.tail.is_empty() { self.head.clone() } else { self.tail.iter().copied().collect() };
        let text = clean(without_split_start(&bytes[bytes.len().saturating_sub(limit)..]));
        let text = text.trim_end();
        text[text.ceil_char_boundary(text.len().saturating_sub(limit))..].to_owned()
    }
}

/// Valid UTF-8 without NUL: MySQL's utf8mb4 and JSON take it, and PostgreSQL-like tools behind them, too.
fn clean(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\0', "\u{FFFD}")
}

/// Without the beginning of a character whose end was cut off.
fn without_split_end(bytes: &[u8]) -> &[u8] {
    let last = bytes.len().saturating_sub(3);
    let lead = (last..bytes.len()).rev().find(|at| bytes[*at] >= 0xC0);
    match lead {
        Some(at) if std::str::from_utf8(&bytes[at..]).is_err_and(|e| e.error_len().is_none()) => &bytes[..at],
        _ => bytes,
    }
}

/// Without the end of a character whose beginning was cut off.
fn without_split_start(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|byte| (0x80..0xC0).contains(*byte)).count();
    &bytes[rest..]
}

/// Both streams after the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Captured {
    pub(crate) stdout: Kept,
    pub(crate) stderr: Kept,
    /// Some process still had the pipes open when they were given up.
    pub(crate) left_open: bool,
    /// Processes that left the group and ran on.
    pub(crate) leftovers: Option<String>,
    /// They have been ended.
    pub(crate) leftovers_gone: bool,
}

impl Captured {
    /// How a failed program ended, in its own words, to be put behind a sentence.
    pub(crate) fn last_words(&self, limit: usize) -> String {
        let mut said = String::new();
        for (name, kept) in [("stderr", &self.stderr), ("stdout", &self.stdout)] {
            let lines = kept.last_lines(limit);
            if !lines.is_empty() {
                said.push_str(&format!("; last on {name}: {lines}"));
            }
        }
        match (&self.leftovers, self.leftovers_gone) {
            (Some(names), true) => said.push_str(&format!("; processes that left the group were killed: {names}")),
            (Some(names), false) => said.push_str(&format!("; processes that left the group still run: {names}")),
            (None, _) if self.left_open => said.push_str("; a process that left the group still runs"),
            (None, _) => {}
        }
        said
    }
}

/// Two readers that run beside the program. Dropped, they end.
pub(crate) struct Pipes {
    readers: JoinSet<()>,
    stdout: Arc<Mutex<Kept>>,
    stderr: Arc<Mutex<Kept>>,
}

impl Pipes {
    /// Begins to read, so that the program never waits for a full pipe. What the program writes is its progress, and goes where
    /// people can follow it; the lines by which it speaks to the worker go to `reports` instead.
    pub(crate) fn read(child: &mut Child, effects: &Arc<dyn Effects>, reports: &Arc<Reports>) -> Self {
        let mut pipes = Pipes { readers: JoinSet::new(), stdout: Arc::default(), stderr: Arc::default() };
        if let Some(stream) = child.stdout.take() {
            let sink = Sink { kept: pipes.stdout.clone(), effects: effects.clone(), stream: Stream::Stdout };
            pipes.readers.spawn(listen(stream, sink, reports.clone()));
        }
        if let Some(stream) = child.stderr.take() {
            let sink = Sink { kept: pipes.stderr.clone(), effects: effects.clone(), stream: Stream::Stderr };
            pipes.readers.spawn(copy(stream, sink));
        }
        pipes
    }

    /// Reads to the end, but no longer than this after the last that was emitted. `emitting`: whether a reader waits for the ledger.
    pub(crate) async fn finish(mut self, drain: Duration, emitting: impl Fn() -> bool) -> Captured {
        let left_open = loop {
            match tokio::time::timeout(drain, self.readers.join_next()).await {
                Ok(None) => break false,
                Ok(Some(_)) => {}
                Err(_) if emitting() => {}
                Err(_) => break true,
            }
        };
        self.readers.abort_all();
        let take = |kept: &Arc<Mutex<Kept>>| kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Captured { stdout: take(&self.stdout), stderr: take(&self.stderr), left_open, ..Captured::default() }
    }
}

/// Where a stream goes.
struct Sink {
    kept: Arc<Mutex<Kept>>,
    effects: Arc<dyn Effects>,
    stream: Stream,
}

impl Sink {
    fn take(&self, bytes: &[u8]) {
        self.effects.output(self.stream, bytes);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
    }
}

async fn copy(mut stream: impl AsyncRead + Unpin, sink: Sink) {
    let mut buffer = vec![0; 16 * 1024];
    while let Some(length) = read_some(&mut stream, &mut buffer).await {
        sink.effects.progress();
        sink.take(&buffer[..length]);
    }
}

/// The same for the stream on which the program speaks to the worker.
async fn listen(mut stream: impl AsyncRead + Unpin, sink: Sink, reports: Arc<Reports>) {
    let mut buffer = vec![0; 16 * 1024];
    let mut splitter = Splitter::default();
    while let Some(length) = read_some(&mut stream, &mut buffer).await {
        sink.effects.progress();
        for part in splitter.push(&buffer[..length]) {
            hear(part, &sink, &reports).await;
        }
    }
    if let Some(part) = splitter.finish() {
        hear(part, &sink, &reports).await;
    }
}

/// A shard that is emitted is kept before anything further is read: a program that emits faster than the ledger takes it waits at its
/// full pipe, and nothing piles up here.
async fn hear(part: Part, sink: &Sink, reports: &Reports) {
    let line = match part {
        Part::Ordinary(bytes) => return sink.take(&bytes),
        Part::TooLong => return reports.warn(&format!("it is longer than {PROGRAM_LINE_BYTES} bytes")),
        Part::Line(line) => line,
    };
    let heard = match lines::parse(&line) {
        Ok(Message::Emit { payload }) => {
            reports.emit(payload).await;
            Ok(())
        }
        Ok(message) => reports.take(message),
        Err(why) => Err(why),
    };
    if let Err(why) = heard {
        reports.warn(&why);
        sink.take(&[&line[..], b"\n"].concat());
    }
}

/// `None` at the end.
async fn read_some(stream: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> Option<usize> {
    match stream.read(buffer).await {
        Ok(0) | Err(_) => None,
        Ok(length) => Some(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(parts: &[&[u8]]) -> Kept {
        let mut kept = Kept::default();
        for part in parts {
            kept.push(part);
        }
        kept
    }

    #[test]
    fn b_09_any_bytes_become_text() {
        let text = kept(&[b"a\x00b\xFF\xFE\xC3\x28", "🛫".as_bytes(), b"\x1b[31mred"]).text(1000);
        assert_eq!(text, Text { text: "a\u{FFFD}b\u{FFFD}\u{FFFD}\u{FFFD}(🛫\u{1b}[31mred".into(), cut: false });
    }

    #[test]
    fn b_02_the_middle_of_a_long_output_is_cut_and_said_so() {
        let long = "ü".repeat(200_000);
        let kept = kept(&[b"first\n", long.as_bytes(), b"\nlast"]);
        let text = kept.text(4_000);
        assert!(text.cut && text.text.starts_with("first\n") && text.text.ends_with("\nlast"));
        assert!(text.text.contains("bytes cut") && !text.text.contains('\u{FFFD}'));
        assert!(text.text.len() < 4_100);
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_bounded_and_counted(
            parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40_000), 0..6),
            limit in 0usize..80_000,
        ) {
            let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let (kept, all) = (kept(&slices), parts.concat());
            prop_assert_eq!(kept.total(), all.len() as u64);
            prop_assert!(kept.head.len() + kept.tail.len() <= OUTPUT_BYTES);
            let text = kept.text(limit);
            prop_assert!(text.text.len() <= limit + 64);
            prop_assert!(!text.text.contains('\0'));
            if !text.cut {
                prop_assert_eq!(text.text, clean(&all));
            }
            prop_assert!(kept.last_lines(limit).len() <= limit);
        }
    }
}
