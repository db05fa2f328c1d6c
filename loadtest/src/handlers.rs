//! The handlers that the workers of a load test have besides those of the program.

use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `handler = { rust = "nap" }`: long enough that a worker which is killed is always in the middle of some.
struct Nap;

/// Shards sleep for 2 to 21 ms, by their index: the same shard always as long, so that runs with one seed compare.
const SHORTEST_MS: u64 = 2;
const SPREAD_MS: u64 = 20;

#[async_trait]
impl ShardHandler for Nap {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let nap = Duration::from_millis(SHORTEST_MS + u64::from(context.attempt.index) % SPREAD_MS);
        tokio::select! {
            () = tokio::time::sleep(nap) => Ok(ShardOutput::rows(1)),
            () = context.stop.cancelled() => Err(ShardError::stopped("told to stop")),
        }
    }
}

/// `handler = { rust = "dwell" }`: half a second to two and a half, by its index, so that a worker always has some in hand. Deaf to
/// being told to stop, so that a worker which was frozen ends what it held when it wakes; all but the shortest are on a thread that
/// nothing can end, as code that blocks is, so that they come to their end however quickly the worker drops them. And it writes down what it has
/// ended, beside the ledger, so that late ends can be counted.
struct Dwell;

/// The file that `dwell` writes into; a line for each end: execution, index, attempt, incarnation, milliseconds UTC.
pub const ENDS_FILE: &str = "LOADTEST_ENDS_FILE";
const DWELL_SHORTEST_MS: u64 = 500;
const DWELL_STEP_MS: u64 = 250;
const DWELL_STEPS: u64 = 9;

#[async_trait]
impl ShardHandler for Dwell {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let steps = u64::from(context.attempt.index) % DWELL_STEPS;
        let dwell = Duration::from_millis(DWELL_SHORTEST_MS + steps * DWELL_STEP_MS);
        let noted = if steps == 0 {
            tokio::time::sleep(dwell).await;
            note_end(&context)
        } else {
            #[allow(
                clippy::disallowed_methods,
                reason = "to block its thread, as work that computes does, is what it is for"
            )]
            let blocking = tokio::task::spawn_blocking(move || {
                std::thread::sleep(dwell);
                note_end(&context)
            });
            blocking.await.map_err(|e| ShardError::transient(format!("the thread of the handler: {e}")))?
        };
        noted.map_err(|e| ShardError::transient(format!("the list of ends: {e}")))?;
        Ok(ShardOutput::rows(1))
    }
}

fn note_end(context: &ShardContext) -> std::io::Result<()> {
    let Some(file) = std::env::var_os(ENDS_FILE) else { return Ok(()) };
    let at = context.attempt;
    let line = format!("{} {} {} {} {}\n", at.execution, at.index, at.attempt, context.owner, crate::session::now_ms());
    write_down(&PathBuf::from(file), &line)
}

/// One short write to a file that is only appended to: whole, whoever else writes.
fn write_down(file: &Path, line: &str) -> std::io::Result<()> {
    std::fs::OpenOptions::new().create(true).append(true).open(file)?.write_all(line.as_bytes())
}

/// What the tested workers run.
pub fn registry() -> Registry {
    let registry = Registry::default().with("nap", Nap).with("dwell", Dwell).with("count", crate::count::Count);
    crate::scenarios::ways::with_ways(registry)
}
