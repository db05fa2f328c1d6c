//! Connections and transactions of either server, under one face.

use super::SqlOptions;
use super::dialect::Dialect;
use super::fault::{Fault, Kind, Outcome};
use super::reach::Reach;
use super::value::{Row, Value, from_mysql, from_sqlite};
use crate::error::StoreError;
use futures_util::TryStreamExt as _;
use sqlx::Either;
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, MySql, MySqlConnection, MySqlPool, Row as _, Sqlite,
    SqlitePool, Transaction,
};
use std::path::Path;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::error::Elapsed;

/// The pools. SQLite has one writer, since it can't have two; its readers don't wait for the writer (WAL).
#[derive(Clone, Debug)]
pub(crate) enum Db {
    MySql { pool: MySqlPool, limit: Duration, reach: Arc<Reach> },
    Sqlite { writer: SqlitePool, readers: SqlitePool },
}

/// A transaction. Dropped without a commit, it is rolled back.
pub(crate) enum Tx {
    MySql(Loan),
    Sqlite(Transaction<'static, Sqlite>),
}

/// A pooled connection to a server that may vanish without a word, and the time that each of its statements has.
///
/// sqlx pings a connection before it takes it back, with no limit: one whose answer never comes would take its place in the pool
/// with it. So one that is given up in the middle of a statement, by the limit or by whoever waited for it, is closed instead.
/// The transaction is our own, too, since sqlx's can't be asked to do that.
pub(crate) struct Loan {
    connection: Option<PoolConnection<MySql>>,
    limit: Option<Duration>,
    reach: Arc<Reach>,
    answering: bool,
    in_transaction: bool,
}

impl Loan {
    async fn of(pool: &MySqlPool, limit: Option<Duration>, reach: &Arc<Reach>) -> Outcome<Self> {
        let connection = pool.acquire().await.map_err(|e| {
            let fault = Dialect::MySql.classify(&e);
            if matches!(fault, Fault::Server { kind: Kind::Lost, .. }) {
                reach.silent(&fault.clone().into_store_error().to_string());
            }
            fault
        })?;
        let reach = reach.clone();
        Ok(Loan { connection: Some(connection), limit, reach, answering: false, in_transaction: false })
    }

    /// Refuses a statement that is larger than the server takes. Sent, it would end the connection instead of being answered, look like a
    /// server that is away, and be sent again (case B-02).
    fn fits(&self, text: &str, args: &[Value]) -> Outcome<()> {
        let of = |value: &Value| match value {
            Value::Text(text) => text.len(),
            Value::Bytes(bytes) => bytes.len(),
            Value::Int(_) | Value::Float(_) | Value::Null => 0,
        };
        let bytes = text.len() + args.iter().map(|value| of(value) + ARG_BYTES).sum::<usize>() + PACKET_HEAD;
        let most = self.reach.packet();
        if bytes as u64 <= most { Ok(()) } else { Err(super::dialect::too_large(bytes as u64, most)) }
    }

    /// The connection, for one statement; until [`Self::answered`] it counts as lost.
    fn ask(&mut self) -> Outcome<&mut MySqlConnection> {
        self.answering = true;
        self.connection.as_deref_mut().ok_or_else(|| Fault::corrupt("a connection that was given back is used".into()))
    }

    fn answered<T>(&mut self, answer: std::result::Result<sqlx::Result<T>, Elapsed>) -> Outcome<T> {
        match answer {
            Ok(answer) => {
                self.answering = false;
                let answer = answer.map_err(|e| Dialect::MySql.classify(&e));
                if !matches!(answer, Err(Fault::Server { kind: Kind::Lost, .. })) {
                    self.reach.answered();
                }
                answer
            }
            // Final: what did not answer in this time would not answer to a second try, and the caller must hear of it.
            Err(_) => {
                let detail = format!("the database has not answered within {:?}", self.limit.unwrap_or_default());
                self.reach.silent(&detail);
                Err(Fault::Final(StoreError::Unavailable { store: "ledger", detail }))
            }
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        if self.answering {
            // By a caller that has less patience than the statement's limit.
            self.reach.silent("the database has not answered as long as anybody waited");
        }
        let runtime = tokio::runtime::Handle::try_current();
        let (false, Ok(runtime)) = (self.answering, runtime) else { return drop(connection.detach()) };
        let (wait, roll_back) = (self.limit.unwrap_or(RETURN_WAIT).min(RETURN_WAIT), self.in_transaction);
        runtime.spawn(async move {
            let rolled_back = async { !roll_back || sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.is_ok() };
            if !matches!(tokio::time::timeout(wait, rolled_back).await, Ok(true)) {
                return drop(connection.detach());
            }
            // Its ping is what must not last for ever; given up, the connection is closed and its place is free.
            drop(tokio::time::timeout(wait, connection.return_to_pool()).await);
        });
    }
}

/// One statement on a loan, within its limit.
macro_rules! ask {
    ($loan:expr, $connection:ident => $work:expr) => {{
        let loan: &mut Loan = $loan;
        let limit = loan.limit.unwrap_or(NO_LIMIT);
        let $connection = loan.ask()?;
        let answer = tokio::time::timeout(limit, $work).await;
        loan.answered(answer)
    }};
}

macro_rules! bound {
    ($text:expr, $args:expr) => {{
        let mut query = sqlx::query(AssertSqlSafe($text.to_owned()));
        for arg in $args {
            query = match arg {
                Value::Int(n) => query.bind(*n),
                Value::Float(n) => query.bind(*n),
                Value::Text(text) => query.bind(text.clone()),
                Value::Bytes(bytes) => query.bind(bytes.clone()),
                Value::Null => query.bind(None::<String>),
            };
        }
        query
    }};
}

/// Reads the answers to several statements: counts and rows.
macro_rules! collect {
    ($answers:expr, $from:expr, $matched:expr, $rows:expr) => {{
        let mut answers = $answers;
        loop {
            match answers.try_next().await {
                Ok(Some(Either::Left(done))) => $matched.push(done.rows_affected()),
                Ok(Some(Either::Right(row))) => match $from(&row) {
                    Ok(row) => $rows.push(row),
                    Err(error) => break Err(error),
                },
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        }
    }};
}

/// Bytes that are sent together at most: below the smallest `max_allowed_packet` in use.
const BATCH_BYTES: usize = 512 * 1024;
/// What a value and a statement cost in a packet beside their bytes, generously.
const ARG_BYTES: usize = 16;
const PACKET_HEAD: usize = 256;
/// How long a rollback, or the ping before a connection is taken back, may last before the connection is closed instead.
const RETURN_WAIT: Duration = Duration::from_secs(5);
/// For statements of people's own. Longer than anything waits.
const NO_LIMIT: Duration = Duration::from_secs(365 * 86_400);
/// Idle for longer than this, a pooled connection is asked whether it still lives before it is used (case B-01).
const PING_AFTER_IDLE: Duration = Duration::from_secs(1);

impl Db {
    pub(crate) fn dialect(&self) -> Dialect {
        match self {
            Db::MySql { .. } => Dialect::MySql,
            Db::Sqlite { .. } => Dialect::Sqlite,
        }
    }

    pub(crate) async fn mysql(url: &str, options: &SqlOptions) -> Outcome<Self> {
        // The parser's own error may quote the URL, and with it the password.
        let connect = MySqlConnectOptions::from_str(url)
            .map_err(|_| {
                Fault::invalid("the database's URL can't be read; it looks like mysql://user:password@host:3306/name")
            })?
            .disable_statement_logging();
        let reach = Arc::new(Reach::default());
        let told = reach.clone();
        let pool = MySqlPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for < PING_AFTER_IDLE {
                        return Ok(true);
                    }
                    Ok(connection.ping().await.is_ok())
                })
            })
            .after_connect(move |connection, _| {
                let told = told.clone();
                Box::pin(async move {
                    // A process that is frozen, or cut off without a word, within a transaction keeps its locks as long as the server
                    // waits for its next statement: the shards of such a worker could not be taken over, and the leader's row would
                    // let nobody else lead. We never leave a transaction idle for longer than it takes to send the next statement.
                    // Strict mode: without it, a text that is too long is cut and becomes a "duplicate" (case I-03).
                    // The comments are read by MariaDB alone and by MySQL alone. MySQL knows only idleness as such, so there the
                    // pool's idle connections end, too; a new one is made when it is needed.
                    let setup = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                                 SET SESSION innodb_lock_wait_timeout = 10 \
                                 /*M!100300 , SESSION idle_transaction_timeout = 3 */ /*!80000 , SESSION wait_timeout = 3 */; \
                                 SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_TRANS_TABLES')";
                    sqlx::raw_sql(setup).execute(&mut *connection).await?;
                    let packet = sqlx::raw_sql("SELECT @@max_allowed_packet").fetch_one(connection).await?;
                    told.set_packet(packet.try_get_unchecked::<u64, _>(0)?);
                    Ok(())
                })
            })
            .connect_with(connect)
            .await
            .map_err(|e| Dialect::MySql.classify(&e))?;
        Ok(Db::MySql { pool, limit: options.call_timeout, reach })
    }

    pub(crate) async fn sqlite(path: &str, options: &SqlOptions) -> Outcome<Self> {
        create_private(Path::new(path))?;
        let connect = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            // NORMAL would lose the last commits when the machine loses power, after they were acked (invariant A1).
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(options.busy_timeout)
            .disable_statement_logging();
        let pool = |size| SqlitePoolOptions::new().max_connections(size).acquire_timeout(options.acquire_timeout);
        let writer_wait = options.acquire_timeout.max(options.busy_timeout * 2);
        let writer = opened(pool(1).acquire_timeout(writer_wait), &connect, options.busy_timeout).await?;
        // A statement that writes through a reader would get past the one writer, and wait for it with nobody's order.
        let reading = connect.clone().pragma("query_only", "ON");
        let readers = opened(pool(4), &reading, options.busy_timeout).await?;
        Ok(Db::Sqlite { writer, readers })
    }

    pub(crate) async fn begin(&self) -> Outcome<Tx> {
        let begin = self.dialect().begin();
        Ok(match self {
            Db::MySql { pool, limit, reach } => {
                let mut loan = Loan::of(pool, Some(*limit), reach).await?;
                ask!(&mut loan, connection => sqlx::raw_sql(begin).execute(connection))?;
                loan.in_transaction = true;
                Tx::MySql(loan)
            }
            Db::Sqlite { writer, .. } => {
                Tx::Sqlite(writer.begin_with(begin).await.map_err(|e| Dialect::Sqlite.classify(&e))?)
            }
        })
    }

    /// A transaction of a server that refuses to write, and ends a statement by itself after `limit`. SQLite has readers for that.
    pub(super) async fn begin_reading(&self, limit: Duration) -> Outcome<Tx> {
        let Db::MySql { pool, limit: answer, reach } = self else { return self.begin().await };
        let mut loan = Loan::of(pool, Some(*answer), reach).await?;
        let limits = super::reading::limits(limit);
        ask!(&mut loan, connection => sqlx::raw_sql(AssertSqlSafe(limits)).execute(connection))?;
        ask!(&mut loan, connection => sqlx::raw_sql("START TRANSACTION READ ONLY").execute(connection))?;
        loan.in_transaction = true;
        Ok(Tx::MySql(loan))
    }

    /// Rows, outside a transaction.
    pub(crate) async fn rows(&self, text: &str, args: &[Value]) -> Outcome<Vec<Row>> {
        let read = match self {
            Db::MySql { pool, limit, reach } => {
                let mut loan = Loan::of(pool, Some(*limit), reach).await?;
                loan.fits(text, args)?;
                let rows = ask!(&mut loan, connection => bound!(text, args).fetch_all(connection))?;
                rows.iter().map(from_mysql).collect()
            }
            Db::Sqlite { readers, .. } => {
                bound!(text, args).fetch_all(readers).await.and_then(|rows| rows.iter().map(from_sqlite).collect())
            }
        };
        read.map_err(|e| self.dialect().classify(&e))
    }

    /// Rows of a text without parameters, not prepared, outside a transaction.
    pub(crate) async fn raw_rows(&self, text: &str) -> Outcome<Vec<Row>> {
        let query = sqlx::raw_sql(AssertSqlSafe(text.to_owned()));
        let read = match self {
            Db::MySql { pool, limit, reach } => {
                let mut loan = Loan::of(pool, Some(*limit), reach).await?;
                let rows = ask!(&mut loan, connection => query.fetch_all(connection))?;
                rows.iter().map(from_mysql).collect()
            }
            Db::Sqlite { readers, .. } => {
                query.fetch_all(readers).await.and_then(|rows| rows.iter().map(from_sqlite).collect())
            }
        };
        read.map_err(|e| self.dialect().classify(&e))
    }

    /// A write that is its own transaction; the count of rows that it matched.
    pub(crate) async fn run(&self, text: &str, args: &[Value]) -> Outcome<u64> {
        let done = match self {
            Db::MySql { pool, limit, reach } => {
                let mut loan = Loan::of(pool, Some(*limit), reach).await?;
                loan.fits(text, args)?;
                return ask!(&mut loan, connection => bound!(text, args).execute(connection))
                    .map(|d| d.rows_affected());
            }
            Db::Sqlite { writer, .. } => bound!(text, args).execute(writer).await.map(|d| d.rows_affected()),
        };
        done.map_err(|e| self.dialect().classify(&e))
    }

    /// The same for a text without parameters, not prepared.
    pub(crate) async fn raw(&self, text: &str) -> Outcome<u64> {
        let limit = match self {
            Db::MySql { limit, .. } => Some(*limit),
            Db::Sqlite { .. } => None,
        };
        self.raw_within(text, limit).await
    }

    /// The same for a text that may take as long as it likes.
    pub(crate) async fn script(&self, text: &str) -> Outcome<u64> {
        self.raw_within(text, None).await
    }

    async fn raw_within(&self, text: &str, limit: Option<Duration>) -> Outcome<u64> {
        let query = sqlx::raw_sql(AssertSqlSafe(text.to_owned()));
        let done = match self {
            Db::MySql { pool, reach, .. } => {
                let mut loan = Loan::of(pool, limit, reach).await?;
                loan.fits(text, &[])?;
                return ask!(&mut loan, connection => query.execute(connection)).map(|d| d.rows_affected());
            }
            Db::Sqlite { writer, .. } => query.execute(writer).await.map(|d| d.rows_affected()),
        };
        done.map_err(|e| self.dialect().classify(&e))
    }
}

impl Tx {
    pub(crate) fn dialect(&self) -> Dialect {
        match self {
            Tx::MySql(_) => Dialect::MySql,
            Tx::Sqlite(_) => Dialect::Sqlite,
        }
    }

    /// Changes the time that each statement has, and returns what it was: `None` for as long as it likes. SQLite has no limit.
    pub(crate) fn limit(&mut self, limit: Option<Duration>) -> Option<Duration> {
        match self {
            Tx::MySql(loan) => std::mem::replace(&mut loan.limit, limit),
            Tx::Sqlite(_) => None,
        }
    }

    pub(crate) async fn rows(&mut self, text: &str, args: &[Value]) -> Outcome<Vec<Row>> {
        let read = match self {
            Tx::MySql(tx) => {
                tx.fits(text, args)?;
                let rows = ask!(tx, connection => bound!(text, args).fetch_all(connection))?;
                rows.iter().map(from_mysql).collect()
            }
            Tx::Sqlite(tx) => {
                bound!(text, args).fetch_all(&mut **tx).await.and_then(|rows| rows.iter().map(from_sqlite).collect())
            }
        };
        read.map_err(|e| self.dialect().classify(&e))
    }

    pub(crate) async fn raw_rows(&mut self, text: &str) -> Outcome<Vec<Row>> {
        let query = sqlx::raw_sql(AssertSqlSafe(text.to_owned()));
        let read = match self {
            Tx::MySql(tx) => {
                let rows = ask!(tx, connection => query.fetch_all(connection))?;
                rows.iter().map(from_mysql).collect()
            }
            Tx::Sqlite(tx) => query.fetch_all(&mut **tx).await.and_then(|rows| rows.iter().map(from_sqlite).collect()),
        };
        read.map_err(|e| self.dialect().classify(&e))
    }

    pub(crate) async fn run(&mut self, text: &str, args: &[Value]) -> Outcome<u64> {
        let done = match self {
            Tx::MySql(tx) => {
                tx.fits(text, args)?;
                return ask!(tx, connection => bound!(text, args).execute(connection)).map(|d| d.rows_affected());
            }
            Tx::Sqlite(tx) => bound!(text, args).execute(&mut **tx).await.map(|d| d.rows_affected()),
        };
        done.map_err(|e| self.dialect().classify(&e))
    }

    pub(crate) async fn raw(&mut self, text: &str) -> Outcome<u64> {
        let query = sqlx::raw_sql(AssertSqlSafe(text.to_owned()));
        let done = match self {
            Tx::MySql(tx) => {
                tx.fits(text, &[])?;
                return ask!(tx, connection => query.execute(connection)).map(|d| d.rows_affected());
            }
            Tx::Sqlite(tx) => query.execute(&mut **tx).await.map(|d| d.rows_affected()),
        };
        done.map_err(|e| self.dialect().classify(&e))
    }

    /// Sends statements together, in as few round trips as their size allows. For each the count of rows that it matched, and all
    /// rows that any of them read.
    pub(crate) async fn raw_batch(&mut self, statements: &[String]) -> Outcome<(Vec<u64>, Vec<Row>)> {
        let (mut matched, mut rows) = (Vec::with_capacity(statements.len()), Vec::new());
        let mut from = 0;
        while from < statements.len() {
            let mut text = statements[from].clone();
            let mut upto = from + 1;
            while upto < statements.len() && text.len() + statements[upto].len() < BATCH_BYTES {
                text.push_str(";\n");
                text.push_str(&statements[upto]);
                upto += 1;
            }
            if let Tx::MySql(tx) = &self {
                tx.fits(&text, &[])?;
            }
            let query = sqlx::raw_sql(AssertSqlSafe(text));
            let sent = match self {
                Tx::MySql(tx) => {
                    ask!(tx, connection => async { collect!(query.fetch_many(connection), from_mysql, matched, rows) })?;
                    Ok(())
                }
                Tx::Sqlite(tx) => collect!(query.fetch_many(&mut **tx), from_sqlite, matched, rows),
            };
            sent.map_err(|e| self.dialect().classify(&e))?;
            from = upto;
        }
        if matched.len() == statements.len() {
            Ok((matched, rows))
        } else {
            Err(Fault::corrupt(format!("{} answers to {} statements", matched.len(), statements.len())))
        }
    }

    pub(crate) async fn commit(self) -> Outcome<()> {
        let dialect = self.dialect();
        let done = match self {
            Tx::MySql(mut tx) => {
                ask!(&mut tx, connection => sqlx::raw_sql("COMMIT").execute(connection))?;
                tx.in_transaction = false;
                Ok(())
            }
            Tx::Sqlite(tx) => tx.commit().await,
        };
        done.map_err(|e| dialect.classify(&e))
    }
}

/// The wait between two tries to open a file that others open at this moment; nothing says when they are done.
const OPEN_AGAIN: Duration = Duration::from_millis(10);

/// Opens a file, and tries again as long as `busy_timeout` says: SQLite itself does not wait where waiting could be a deadlock, and so it
/// is when several processes turn the log of a new file on at the same time. One of them would be told that it is locked (case B-04).
async fn opened(pool: SqlitePoolOptions, connect: &SqliteConnectOptions, patience: Duration) -> Outcome<SqlitePool> {
    let until = Instant::now() + patience;
    loop {
        let opened = pool.clone().connect_with(connect.clone()).await;
        match opened.map_err(|e| Dialect::Sqlite.classify(&e)) {
            Err(Fault::Server { kind: Kind::Contention, .. }) if Instant::now() < until => {
                tokio::time::sleep(OPEN_AGAIN).await;
            }
            answer => return answer,
        }
    }
}

/// Makes the file before SQLite does, so that nobody else can read it; its log and index files take over its mode.
fn create_private(path: &Path) -> Outcome<()> {
    let mut open = std::fs::OpenOptions::new();
    open.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        open.mode(0o600);
    }
    match open.open(path) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(Fault::Final(StoreError::Unavailable {
            store: "ledger",
            detail: format!("the file {} can't be made: {e}", path.display()),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::SqlOptions;

    /// Another process writes to a file that is new and has no log yet: SQLite says at once that it is locked, `busy_timeout` or not.
    #[tokio::test]
    async fn b_04_a_new_file_that_another_writes_to_is_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("new.db").display().to_string();
        let other = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
        let mut other = other.journal_mode(SqliteJournalMode::Delete).connect().await.expect("the other process");
        sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.expect("its transaction");
        let options = SqlOptions::default();
        let mut opening = std::pin::pin!(Db::sqlite(&path, &options));
        let early = tokio::time::timeout(Duration::from_millis(100), &mut opening).await;
        assert!(early.is_err(), "it waits, and neither fails nor gets in: {early:?}");
        sqlx::raw_sql("COMMIT").execute(&mut other).await.expect("its end");
        opening.await.expect("the file is free");
    }

    /// A worker or leader that is frozen within a transaction must not keep the others out for as long as it sleeps.
    #[tokio::test(flavor = "multi_thread")]
    async fn who_stands_still_within_a_transaction_loses_its_locks() {
        let url = tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.expect("a database");
        let [frozen, other] = [1, 2].map(|_| SqlOptions { max_connections: 2, ..SqlOptions::default() });
        let (frozen, other) =
            (Db::mysql(&url, &frozen).await.expect("connect"), Db::mysql(&url, &other).await.expect("connect"));
        other
            .script("CREATE TABLE t (id INT PRIMARY KEY, n INT) ENGINE=InnoDB; INSERT INTO t VALUES (1, 0)")
            .await
            .expect("t");
        let mut held = frozen.begin().await.expect("begin");
        held.run("UPDATE t SET n = n + 1 WHERE id = 1", &[]).await.expect("the lock");
        // Would fail after `innodb_lock_wait_timeout`, which is 10 s here.
        other.run("UPDATE t SET n = n + 10 WHERE id = 1", &[]).await.expect("the row is free in time");
        assert!(held.commit().await.is_err(), "who wakes up is told that nothing of it counts");
        let rows = other.rows("SELECT n FROM t WHERE id = 1", &[]).await.expect("the row");
        assert_eq!(rows, [Row(vec![Value::Int(10)])]);
    }

    #[tokio::test]
    async fn a_reader_of_sqlite_refuses_to_write() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.db").display().to_string();
        let db = Db::sqlite(&path, &SqlOptions::default()).await.expect("open");
        db.script("CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1)").await.expect("the writer writes");
        for write in ["INSERT INTO t VALUES (2)", "DELETE FROM t", "CREATE TABLE other (id INT)"] {
            for answer in [db.rows(write, &[]).await, db.raw_rows(write).await] {
                let fault = answer.expect_err(write).into_store_error().to_string();
                assert!(fault.contains("readonly"), "{write}: {fault}");
            }
        }
        assert_eq!(db.rows("SELECT id FROM t", &[]).await.expect("the rows"), [Row(vec![Value::Int(1)])]);
    }
}
