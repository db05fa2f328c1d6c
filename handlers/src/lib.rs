//! The handlers that come with the program.
//!
//! Owns: running a job's `sql` in the ledger's own transactions, running a program (`exec`), calling a service (`http`), looking up a registered Rust
//! handler, and the check that this worker's own configuration allows it.
//!
//! Must not: decide about retries (it says transient, permanent or timeout; the ledger decides), hold a shell or a template
//! engine anywhere near a parameter (case Z-03), or write to the ledger other than through the port.
//!
//! | handler | effects | a crash between effect and record |
//! | --- | --- | --- |
//! | `sql` | once: effects, checkpoint and result are one transaction | can't be |
//! | `sql` in another database | once: effects and the inbox's row are one transaction there | the inbox says that the step is done |
//! | `rust`, in `transaction` | once: effects and checkpoint are one transaction | can't be |
//! | `exec`, `http`, `rust` otherwise | at least once | the next attempt runs again, from the last checkpoint |

mod call;
pub mod effects;
mod exec;
mod input;
mod map;
mod noop;
mod preload;
mod sql;

pub use call::{CALLBACK_PATH, CallbackReply, Callbacks, HttpRules};
pub use exec::{Cgroups, ExecHandler, ExecLimits, ProgramRules};
pub use noop::Noop;
pub use sql::{ShardLedger, SqlHandler, SqlLimits, SqlTemplate};

use shardcron_domain::cache::PreloadQuery;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::program::ProgramOptions;
use shardcron_domain::trigger::suggest;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler};
use shardcron_store::Ledger;
use shardcron_store::sql::{Inbox, SqlLedger, SqlOptions};
use std::collections::BTreeMap;
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
    /// Where and how programs run.
    pub programs: ProgramRules,
    /// Which services may be called.
    pub calls: HttpRules,
    /// Waits around programs.
    pub exec: ExecLimits,
    /// Waits around the ledger.
    pub sql: SqlLimits,
    /// Other databases in which `sql` handlers and the queries of preloads may run, by the names that job files use.
    pub databases: BTreeMap<String, Arc<Inbox>>,
    /// The ledger's database, for the queries of preloads that name no other one.
    pub reader: Option<SqlLedger>,
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
            programs: ProgramRules::default(),
            calls: HttpRules::default(),
            exec: ExecLimits::default(),
            sql: SqlLimits::default(),
            databases: BTreeMap::new(),
            reader: None,
        }
    }

    /// Programs that may run.
    #[must_use]
    pub fn allow_exec(mut self, programs: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.allow_exec = programs.into_iter().map(Into::into).collect();
        self
    }

    /// Other databases, by name, with their URLs. A connection is made when the first job needs it.
    #[must_use]
    pub fn databases(mut self, urls: impl IntoIterator<Item = (String, String)>) -> Self {
        let inbox =
            |(name, url): (String, String)| (name.clone(), Arc::new(Inbox::new(name, url, SqlOptions::default())));
        self.databases = urls.into_iter().map(inbox).collect();
        self
    }

    /// The ledger's database, for the queries of preloads.
    #[must_use]
    pub fn reader(mut self, ledger: SqlLedger) -> Self {
        self.reader = Some(ledger);
        self
    }

    /// Where programs start.
    #[must_use]
    pub fn work_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.programs.work_dir = Some(dir.into());
        self
    }
}

/// The handlers of a worker. Cheap to clone.
#[derive(Clone)]
pub struct Handlers {
    options: Arc<HandlerOptions>,
    programs: Arc<ProgramRules>,
    caller: Arc<call::Caller>,
    queries: Arc<preload::Queries>,
}

impl Handlers {
    /// Takes the worker's configuration, and adds the handlers that every worker has (`noop`).
    #[must_use]
    pub fn new(mut options: HandlerOptions) -> Self {
        options.registry = options.registry.with_default(noop::NAME, Noop);
        if !options.allow_exec.is_empty() {
            ExecHandler::sweep(&options.programs);
        }
        let caller = call::Caller::new(options.calls.clone(), options.ledger.clone());
        Handlers {
            programs: Arc::new(options.programs.clone()),
            caller: Arc::new(caller),
            queries: Arc::default(),
            options: Arc::new(options),
        }
    }

    /// The handler for a job's specification, if this worker may run it.
    ///
    /// # Errors
    /// Permanent, with what to change: the program is not allowed here, there is no such Rust handler, or the SQL can't be read.
    pub fn resolve(&self, spec: &HandlerSpec) -> Result<Arc<dyn ShardHandler>, ShardError> {
        match spec {
            HandlerSpec::Sql { sql, chunk, database } => {
                let template = SqlTemplate::parse(sql).map_err(ShardError::permanent)?;
                let ledger = self.database(database.as_deref())?;
                Ok(Arc::new(SqlHandler::new(ledger, template, *chunk, self.options.sql)))
            }
            HandlerSpec::Exec { argv, options } => self.exec(argv, options),
            HandlerSpec::Http(call) => Ok(Arc::new(self.caller.resolve(call)?)),
            HandlerSpec::Rust { name } => {
                self.options.registry.get(name).ok_or_else(|| ShardError::permanent(self.unknown_rust_handler(name)))
            }
        }
    }

    /// The keys that a query of a job's preload finds for this attempt: none if it fails, which is said in the log. It runs once for all
    /// attempts of an execution that bind the same values.
    pub async fn preload_keys(&self, query: &PreloadQuery, context: &ShardContext) -> Arc<[String]> {
        self.queries.keys(&self.options, query, context).await
    }

    /// Names of the Rust handlers, for the worker's start-up log.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.options.registry.names()
    }

    /// Where a job's statements run.
    fn database(&self, name: Option<&str>) -> Result<Arc<dyn ShardLedger>, ShardError> {
        let ledger = self.options.ledger.clone();
        let Some(name) = name else { return Ok(ledger) };
        match self.options.databases.get(name) {
            Some(inbox) => Ok(Arc::new(sql::Elsewhere { inbox: inbox.clone(), ledger })),
            None => Err(ShardError::permanent(unknown_database(name, self.options.databases.keys()))),
        }
    }

    fn exec(&self, argv: &[String], options: &ProgramOptions) -> Result<Arc<dyn ShardHandler>, ShardError> {
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
        Ok(Arc::new(ExecHandler::new(argv.to_vec(), options.clone(), self.programs.clone(), self.options.exec)))
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

fn unknown_database<'a>(name: &str, known: impl Iterator<Item = &'a String> + Clone) -> String {
    let names: Vec<&str> = known.map(String::as_str).collect();
    let has = if names.is_empty() { "it has none".to_owned() } else { format!("it has: {}", names.join(", ")) };
    let hint = match suggest(name, names.iter().copied()) {
        Some(near) => format!(" (did you mean '{near}'?)"),
        None => String::new(),
    };
    format!(
        "this worker's configuration has no database '{name}'{hint}; {has}. Add it under [databases] in the worker's own \
         shardcron.toml: {name} = \"mysql://…\" (a job can't do that)"
    )
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
