//! Where the actors say what they do, for who checks a whole run afterwards.

use shardcron_domain::trace::{TraceEvent, TraceLine};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Takes events, in the order in which a process says them.
pub trait TraceSink: Send + Sync + 'static {
    /// One event.
    fn note(&self, event: TraceEvent);
}

/// Says events to a sink, or to nobody: then they are not even made. Cheap to clone.
#[derive(Clone, Default)]
pub struct Trace(Option<Arc<dyn TraceSink>>);

impl Trace {
    /// To nobody.
    #[must_use]
    pub fn off() -> Self {
        Trace(None)
    }

    /// To a sink.
    #[must_use]
    pub fn to(sink: Arc<dyn TraceSink>) -> Self {
        Trace(Some(sink))
    }

    pub(crate) fn say(&self, event: impl FnOnce() -> TraceEvent) {
        if let Some(sink) = &self.0 {
            sink.note(event());
        }
    }

    pub(crate) fn say_all<T>(&self, of: impl IntoIterator<Item = T>, event: impl Fn(T) -> TraceEvent) {
        if let Some(sink) = &self.0 {
            of.into_iter().for_each(|one| sink.note(event(one)));
        }
    }
}

/// Writes events as JSON, one line each, at the end of a file. A line is written before the step that it is about goes on, so
/// that a process that is killed has said all that it did or was about to do.
pub struct TraceFile {
    life: String,
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    seq: u64,
    /// A write has failed: the trace ends there.
    ended: bool,
}

impl TraceFile {
    /// Opens the file, or makes it. `life` names the process and must be another one for each start.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn open(path: &Path, life: String) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(TraceFile { life, inner: Mutex::new(Inner { file, seq: 0, ended: false }) })
    }
}

impl TraceSink for TraceFile {
    fn note(&self, event: TraceEvent) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.ended {
            return;
        }
        let line = TraceLine { life: self.life.clone(), seq: inner.seq + 1, event };
        let written = serde_json::to_string(&line).map_err(std::io::Error::other).and_then(|mut text| {
            text.push('\n');
            inner.file.write_all(text.as_bytes())
        });
        match written {
            Ok(()) => inner.seq += 1,
            Err(e) => {
                inner.ended = true;
                tracing::error!(error = %e, "the trace file could not be written; the trace ends here");
            }
        }
    }
}
