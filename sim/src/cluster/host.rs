//! The part of a simulation that lives in real time: SQLite has threads of its own.
//!
//! A simulated process that calls the ledger stops the whole simulation until the answer is there. So virtual time stands still
//! during a real call, and the order of the calls is the simulation's.

use shardcron_store::sql::{Clock, SqlLedger, SqlOptions};
use shardcron_store::{Ledger as _, StoreError};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};

/// Shared by all seeds of a run: a runtime in real time, and a migrated ledger to copy.
pub struct Host {
    runtime: Runtime,
    dir: TempDir,
    template: PathBuf,
    made: AtomicU64,
}

impl Host {
    /// Makes the ledger that each seed gets a copy of. In memory where the system has a place for that: the copies are synced to
    /// "disk" at each commit as in production.
    ///
    /// # Errors
    /// There is no place for files, or SQLite does not work.
    pub fn new() -> io::Result<Self> {
        let memory = PathBuf::from("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory)? } else { tempfile::tempdir()? };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let template = dir.path().join("template.db");
        let made: Result<(), StoreError> = runtime.block_on(async {
            let ledger = SqlLedger::connect(&format!("sqlite://{}", template.display()), SqlOptions::default()).await?;
            ledger.migrate().await?;
            // What handlers do in their transactions. No key keeps them from doing it twice.
            let effects = "CREATE TABLE sim_effects (execution_id TEXT NOT NULL, shard_index INT NOT NULL, record BIGINT NOT NULL)";
            ledger.execute_script(effects).await?;
            ledger.execute_script("PRAGMA wal_checkpoint(TRUNCATE)").await
        });
        made.map_err(io::Error::other)?;
        Ok(Host { runtime, dir, template, made: AtomicU64::new(0) })
    }

    pub(super) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// A new, empty ledger, whose own clock is the caller's.
    pub(super) fn ledger(&self, clock: Clock) -> io::Result<(SqlLedger, PathBuf)> {
        let file = self.dir.path().join(format!("{}.db", self.made.fetch_add(1, Ordering::Relaxed)));
        std::fs::copy(&self.template, &file)?;
        let url = format!("sqlite://{}", file.display());
        let ledger = block(self.handle(), SqlLedger::connect(&url, SqlOptions::default())).map_err(io::Error::other)?;
        Ok((ledger.with_clock(clock), file))
    }

    pub(super) fn forget(&self, file: &Path) {
        for end in ["", "-wal", "-shm"] {
            let mut name = file.as_os_str().to_owned();
            name.push(end);
            // Not there, or in a folder that is deleted at the end anyway.
            let _ = std::fs::remove_file(name);
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a call in real time, and lets nothing else happen on this thread.
pub(super) fn block<T>(real: &Handle, call: impl Future<Output = T>) -> T {
    let _in_real_time = real.enter();
    // The budget of the simulated task that asks has nothing to do with it, and would never be filled up here.
    let mut call = pin!(tokio::task::unconstrained(call));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match call.as_mut().poll(&mut context) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => std::thread::park(),
        }
    }
}
