//! The ledger over SQL: one implementation, two dialects.
//!
//! Owns: the tables, the pools, and every statement. What the two servers do differently stands in `dialect`. Statements on the
//! hot path are built as text with nothing in it but numbers and hexadecimal literals, and are sent without preparing: they
//! differ with every batch, and preparing each would double the round trips. All others bind their values.

mod bulk;
mod dialect;
mod fault;
mod inbox;
mod lease;
mod ledger;
mod migrate;
mod pool;
mod presence;
mod reach;
mod reading;
mod value;

pub use inbox::Inbox;
pub use lease::LedgerLease;
pub use presence::LedgerPresence;

use crate::error::{Result, StoreError};
use crate::rows::SqlArg;
use fault::Fault;
use pool::Db;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;
use value::Value;

/// How the ledger's pool behaves.
#[derive(Clone, Copy, Debug)]
pub struct SqlOptions {
    /// Connections to MySQL or MariaDB at most. SQLite has one writer and four readers, whatever this says.
    pub max_connections: u32,
    /// How long a call waits for a free connection.
    pub acquire_timeout: Duration,
    /// How long MySQL or MariaDB has for one statement. A server that vanished without a word would else be waited for until the
    /// kernel gives up, a quarter of an hour. Longer than `innodb_lock_wait_timeout`, which is 10 s here. A user's own statements
    /// and migrations have no limit, and SQLite has none: it can't vanish.
    pub call_timeout: Duration,
    /// How long SQLite waits for another process that writes.
    pub busy_timeout: Duration,
}

impl Default for SqlOptions {
    fn default() -> Self {
        SqlOptions {
            max_connections: 8,
            acquire_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(30),
            busy_timeout: Duration::from_secs(10),
        }
    }
}

/// The ledger in MySQL, MariaDB or SQLite. Clones share the pool.
#[derive(Clone, Debug)]
pub struct SqlLedger {
    db: Db,
    clock: ServerClock,
    paces: ledger::Paces,
}

/// Gives the time in milliseconds UTC.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// Whose clock the lease and the heartbeats go by.
#[derive(Clone, Default)]
enum ServerClock {
    #[default]
    Database,
    Callers(Clock),
}

impl std::fmt::Debug for ServerClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ServerClock::Database => "Database",
            ServerClock::Callers(_) => "Callers",
        })
    }
}

impl SqlLedger {
    /// Connects to `mysql://user:password@host:port/database` or opens `sqlite://path`. Does not migrate.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a URL that can't be read; [`StoreError::Unavailable`] if the server does not answer. Neither
    /// quotes the URL.
    pub async fn connect(url: &str, options: SqlOptions) -> Result<Self> {
        let db = if let Some(path) = url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:")) {
            match path.split_once('?').map_or(path, |(path, _)| path) {
                "" | ":memory:" => Err(Fault::invalid("SQLite's ledger needs a file: sqlite://path/to/ledger.db")),
                path => Db::sqlite(path, &options).await,
            }
        } else if url.starts_with("mysql://") || url.starts_with("mariadb://") {
            Db::mysql(url, &options).await
        } else {
            Err(Fault::invalid("the ledger's URL must begin with mysql:// or sqlite://"))
        };
        Ok(SqlLedger {
            db: db.map_err(Fault::into_store_error)?,
            clock: ServerClock::Database,
            paces: ledger::Paces::default(),
        })
    }

    /// The same with a clock of the caller in the place of the database's, for simulations.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        SqlLedger { clock: ServerClock::Callers(clock), ..self }
    }

    /// Whether real time passes: not in a simulation.
    fn goes_by_the_database(&self) -> bool {
        matches!(self.clock, ServerClock::Database)
    }

    /// The time at the server in milliseconds UTC, as an expression.
    fn now_ms(&self) -> Cow<'static, str> {
        match &self.clock {
            ServerClock::Database => self.db.dialect().now_ms().into(),
            ServerClock::Callers(now_ms) => now_ms().to_string().into(),
        }
    }

    /// `mysql` or `sqlite`.
    #[must_use]
    pub fn dialect_name(&self) -> &'static str {
        self.db.dialect().name()
    }

    /// Why the database server is away, while it is, as the statements that run find it; `None` for SQLite, which can't be away.
    #[must_use]
    pub fn fault(&self) -> Option<tokio::sync::watch::Receiver<Option<String>>> {
        match &self.db {
            Db::MySql { reach, .. } => Some(reach.fault()),
            Db::Sqlite { .. } => None,
        }
    }

    /// Runs a script of statements separated by `;`, as it stands. For set-up by examples; never for text from outside.
    ///
    /// # Errors
    /// [`StoreError::Statement`] with the server's words.
    pub async fn execute_script(&self, text: &str) -> Result<()> {
        self.db.script(text).await.map(drop).map_err(statement_error)
    }

    /// Inserts rows in few large statements. `table` and `columns` are pasted: they must not come from outside.
    ///
    /// # Errors
    /// [`StoreError::Statement`] with the server's words; rows of earlier statements are rolled back.
    pub async fn insert_rows(&self, table: &str, columns: &[&str], rows: Vec<Vec<SqlArg>>) -> Result<u64> {
        let dialect = self.db.dialect();
        let head = format!("INSERT INTO {table} ({}) VALUES ", columns.join(", "));
        let mut bulk = bulk::Bulk::new(head, "");
        for row in rows {
            bulk.push(|text| {
                for (position, value) in row.into_iter().enumerate() {
                    if position > 0 {
                        text.push(',');
                    }
                    bulk::push_value(text, dialect, &Value::from(value));
                }
            });
        }
        let insert = async {
            let mut tx = self.db.begin().await?;
            let inserted = bulk.send(&mut tx).await?;
            tx.commit().await?;
            Ok(inserted)
        };
        insert.await.map_err(statement_error)
    }

    /// Rows of a query, with `?` for each argument. Bytes come as text; what is no UTF-8 in them is replaced.
    ///
    /// # Errors
    /// [`StoreError::Statement`] with the server's words.
    pub async fn query(&self, sql: &str, args: &[SqlArg]) -> Result<Vec<Vec<SqlArg>>> {
        let args: Vec<Value> = args.iter().cloned().map(Value::from).collect();
        let rows = self.db.rows(sql, &args).await.map_err(statement_error)?;
        Ok(rows.into_iter().map(|row| row.0.into_iter().map(SqlArg::from).collect()).collect())
    }
}

/// A fault of a statement that is not ours.
pub(crate) fn statement_error(fault: Fault) -> StoreError {
    match fault {
        Fault::Server { kind: fault::Kind::Contention, detail } => StoreError::Statement { detail, transient: true },
        Fault::Server { kind: fault::Kind::Lost, detail } => StoreError::Unavailable { store: "ledger", detail },
        Fault::Server { detail, .. } => StoreError::Statement { detail, transient: false },
        other => other.into_store_error(),
    }
}
