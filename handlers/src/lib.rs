//! The handlers that come with the program.
//!
//! Owns: running a job's `sql` in the ledger's own transactions, running a program (`exec`), looking up a registered Rust
//! handler, and the check that this worker's own configuration allows it.
//!
//! Must not: decide about retries (it says transient, permanent or timeout; the ledger decides), hold a shell or a template
//! engine anywhere near a parameter (case Z-03), or write to the ledger other than through the port.
//!
//! | handler | effects | a crash between effect and record |
//! | --- | --- | --- |
//! | `sql` | once: effects, checkpoint and result are one transaction | can't be |
//! | `exec`, `rust` | at least once | the next attempt runs again, from the last checkpoint |

mod exec;
mod noop;
mod sql;

pub use exec::{ExecHandler, ExecLimits};
pub use noop::Noop;
pub use sql::{ShardLedger, SqlHandler, SqlLimits, SqlTemplate};

use shardcron_domain::job::HandlerSpec;
use shardcron_domain::trigger::suggest;
use shardcron_sdk::{Registry, ShardError, ShardHandler};
use shardcron_store::Ledger;
use std::path::PathBuf;
use std::sync::Arc;

/// The word in `allow_exec` that allows every program.
pub const ALLOW_ANY: &str = "*";

/// What a worker's own configuration says about handlers. A job file can't change any of it.
#[derive(Clone)]
pub struct HandlerOptions {
    /// Where `sql` handlers run.
    pub ledger: Arc<dyn ShardLedger>,
    /// The Rust handlers of this program.
    pub registry: Registry,
    /// Programs that `exec` handlers may run: what stands first in the job's `exec`, letter by letter, or [`ALLOW_ANY`]. Empty:
    /// none.
    pub allow_exec: Vec<String>,
    /// Where programs start; the worker's own directory if absent.
    pub work_dir: Option<PathBuf>,
    /// Waits around programs.
    pub exec: ExecLimits,
    /// Waits around the ledger.
    pub sql: SqlLimits,
}

impl HandlerOptions {
    /// Nothing allowed but `sql` and what the registry has.
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, registry: Registry) -> Self {
        Self::over(Arc::new(sql::Whole(ledger)), registry)
    }

    /// The same over what stands for the ledger in a test.
    #[must_use]
    pub fn over(ledger: Arc<dyn ShardLedger>, registry: Registry) -> Self {
        HandlerOptions {
            ledger,
            registry,
            allow_exec: Vec::new(),
            work_dir: None,
            exec: ExecLimits::default(),
            sql: SqlLimits::default(),
        }
    }

    /// Programs that may run.
    #[must_use]
    pub fn allow_exec(mut self, programs: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.allow_exec = programs.into_iter().map(Into::into).collect();
        self
    }

    /// Where programs start.
    #[must_use]
    pub fn work_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.work_dir = Some(dir.into());
        self
    }
}

/// The handlers of a worker. Cheap to clone.
#[derive(Clone)]
pub struct Handlers {
    options: Arc<HandlerOptions>,
}

impl Handlers {
    /// Takes the worker's configuration, and adds the handlers that every worker has (`noop`).
    #[must_use]
    pub fn new(mut options: HandlerOptions) -> Self {
        options.registry = options.registry.with_default(noop::NAME, Noop);
        Handlers { options: Arc::new(options) }
    }

    /// The handler for a job's specification, if this worker may run it.
    ///
    /// # Errors
    /// Permanent, with what to change: the program is not allowed here, there is no such Rust handler, or the SQL can't be read.
    pub fn resolve(&self, spec: &HandlerSpec) -> Result<Arc<dyn ShardHandler>, ShardError> {
        match spec {
            HandlerSpec::Sql { sql, chunk } => {
                let template = SqlTemplate::parse(sql).map_err(ShardError::permanent)?;
                Ok(Arc::new(SqlHandler::new(self.options.ledger.clone(), template, *chunk, self.options.sql)))
            }
            HandlerSpec::Exec { argv } => self.exec(argv),
            HandlerSpec::Rust { name } => {
                self.options.registry.get(name).ok_or_else(|| ShardError::permanent(self.unknown_rust_handler(name)))
            }
        }
    }

    /// Names of the Rust handlers, for the worker's start-up log.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.options.registry.names()
    }

    fn exec(&self, argv: &[String]) -> Result<Arc<dyn ShardHandler>, ShardError> {
        let program = argv.first().map_or("", String::as_str);
        if program.is_empty() {
            return Err(ShardError::permanent("exec needs a program: exec = [\"python3\", \"job.py\"]"));
        }
        if argv.iter().any(|argument| argument.contains('\0')) {
            return Err(ShardError::permanent("an exec argument can't contain a NUL character"));
        }
        let allowed = &self.options.allow_exec;
        if !allowed.iter().any(|a| a == program || a == ALLOW_ANY) {
            return Err(ShardError::permanent(not_allowed(program, allowed)));
        }
        Ok(Arc::new(ExecHandler::new(argv.to_vec(), self.options.work_dir.clone(), self.options.exec)))
    }

    fn unknown_rust_handler(&self, name: &str) -> String {
        let known: Vec<&str> = self.names().collect();
        let hint = match suggest(name, known.iter().copied()) {
            Some(near) => format!(" (did you mean '{near}'?)"),
            None => String::new(),
        };
        format!(
            "this worker has no Rust handler '{name}'{hint}. It has: {}. Register it where the worker is built \
             (Registry::with), and run the job on that worker",
            known.join(", ")
        )
    }
}

fn not_allowed(program: &str, allowed: &[String]) -> String {
    let has =
        if allowed.is_empty() { "it allows none".to_owned() } else { format!("it allows: {}", allowed.join(", ")) };
    let hint = match suggest(program, allowed.iter().map(String::as_str)) {
        Some(near) => format!(" (did you mean '{near}'?)"),
        None => String::new(),
    };
    format!(
        "this worker does not allow the program '{program}'; {has}{hint}. To allow it, add \"{}\" to allow_exec in the \
         worker's own configuration (a job can't do that)",
        program.escape_default()
    )
}

/// Milliseconds UTC by the worker's clock; for records that people read.
fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
