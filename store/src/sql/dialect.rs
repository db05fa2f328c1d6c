//! Every difference between the two servers' SQL.

use super::fault::{Fault, Kind};
use super::value::hex;
use crate::error::StoreError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::sqlite::SqliteError;

/// Which SQL is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// MySQL 8 and later, MariaDB 10.6 and later: what both understand (no RETURNING, no row alias).
    MySql,
    /// SQLite.
    Sqlite,
}

impl Dialect {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dialect::MySql => "mysql",
            Dialect::Sqlite => "sqlite",
        }
    }

    /// Begins a transaction that will write. SQLite takes the write lock at once: a transaction that reads first and writes later
    /// fails on the spot if another has written in between, whatever the busy timeout (case B-05).
    pub(crate) fn begin(self) -> &'static str {
        match self {
            Dialect::MySql => "START TRANSACTION",
            Dialect::Sqlite => "BEGIN IMMEDIATE",
        }
    }

    /// Locks the rows read; in SQLite the transaction has locked everything already.
    pub(crate) fn for_update(self) -> &'static str {
        match self {
            Dialect::MySql => " FOR UPDATE",
            Dialect::Sqlite => "",
        }
    }

    /// The same, but leaves out what somebody else has locked.
    pub(crate) fn for_update_skipping(self) -> &'static str {
        match self {
            Dialect::MySql => " FOR UPDATE SKIP LOCKED",
            Dialect::Sqlite => "",
        }
    }

    /// Locks the rows read against writers. The older form, which MariaDB shares.
    pub(crate) fn for_share(self) -> &'static str {
        match self {
            Dialect::MySql => " LOCK IN SHARE MODE",
            Dialect::Sqlite => "",
        }
    }

    /// The database's clock in milliseconds UTC, as an expression.
    pub(crate) fn now_ms(self) -> &'static str {
        match self {
            Dialect::MySql => "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
            Dialect::Sqlite => "CAST(ROUND(unixepoch('subsec') * 1000) AS INTEGER)",
        }
    }

    /// The larger of two expressions.
    pub(crate) fn greatest(self) -> &'static str {
        match self {
            Dialect::MySql => "GREATEST",
            Dialect::Sqlite => "MAX",
        }
    }

    /// Equality that holds between two NULLs.
    pub(crate) fn null_safe_equal(self) -> &'static str {
        match self {
            Dialect::MySql => "<=>",
            Dialect::Sqlite => "IS",
        }
    }

    /// The type that a sum is cast to.
    pub(crate) fn integer(self) -> &'static str {
        match self {
            Dialect::MySql => "SIGNED",
            Dialect::Sqlite => "INTEGER",
        }
    }

    /// The tail of an insert that replaces `columns` where `keys` exist.
    pub(crate) fn upsert(self, keys: &str, columns: &[&str]) -> String {
        let set = |f: &dyn Fn(&str) -> String| columns.iter().map(|c| f(c)).collect::<Vec<_>>().join(", ");
        match self {
            Dialect::MySql => format!(" ON DUPLICATE KEY UPDATE {}", set(&|c| format!("{c} = VALUES({c})"))),
            Dialect::Sqlite => {
                format!(" ON CONFLICT ({keys}) DO UPDATE SET {}", set(&|c| format!("{c} = excluded.{c}")))
            }
        }
    }

    /// The head and the tail of an insert that leaves a row alone which exists under `keys`.
    pub(crate) fn insert_ignore(self, table: &str, keys: &str) -> (String, String) {
        match self {
            Dialect::MySql => (format!("INSERT IGNORE INTO {table}"), String::new()),
            Dialect::Sqlite => (format!("INSERT INTO {table}"), format!(" ON CONFLICT ({keys}) DO NOTHING")),
        }
    }

    /// The beginning of a DELETE that finds its rows by the primary key whatever the statistics say: a scan of the whole table would
    /// wait for everybody's rows, and two of them for each other.
    pub(crate) fn delete_by_key(self, table: &str) -> String {
        match self {
            Dialect::MySql => format!("DELETE {table} FROM {table} FORCE INDEX (PRIMARY)"),
            Dialect::Sqlite => format!("DELETE FROM {table}"),
        }
    }

    /// A text literal of hexadecimal digits, which can't end a statement.
    pub(crate) fn text(self, text: &str) -> String {
        match self {
            Dialect::MySql => format!("_utf8mb4 {}", hex(text.as_bytes())),
            Dialect::Sqlite => format!("CAST({} AS TEXT)", hex(text.as_bytes())),
        }
    }

    /// The first words of statements that would end the transaction that they stand in.
    pub(crate) fn ends_a_transaction(self, first_word: &str) -> bool {
        let word = first_word.to_ascii_uppercase();
        let both =
            ["BEGIN", "START", "COMMIT", "ROLLBACK", "END", "SAVEPOINT", "RELEASE", "XA", "PRAGMA", "ATTACH", "DETACH"];
        let by_implicit_commit =
            ["CREATE", "ALTER", "DROP", "TRUNCATE", "RENAME", "LOCK", "UNLOCK", "SET", "GRANT", "REVOKE"];
        both.contains(&word.as_str()) || (self == Dialect::MySql && by_implicit_commit.contains(&word.as_str()))
    }

    /// What an error means, and its words without anything of the connection's address.
    pub(crate) fn classify(self, error: &sqlx::Error) -> Fault {
        let server = |kind, detail: String| Fault::Server { kind, detail };
        match error {
            sqlx::Error::Database(inner) => {
                if let Some(mysql) = inner.try_downcast_ref::<MySqlDatabaseError>() {
                    return mysql_fault(mysql.number(), mysql.message());
                }
                if let Some(sqlite) = inner.try_downcast_ref::<SqliteError>() {
                    return sqlite_fault(sqlite);
                }
                server(Kind::Refused, inner.message().to_owned())
            }
            sqlx::Error::Io(io) => server(Kind::Lost, io.to_string()),
            sqlx::Error::Tls(tls) => server(Kind::Lost, format!("TLS: {tls}")),
            sqlx::Error::PoolTimedOut => server(Kind::Lost, "no connection became free in time".into()),
            sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
                server(Kind::Lost, "the connections are closed".into())
            }
            // What a killed connection says when its answer ends in the middle.
            sqlx::Error::Protocol(what) => server(Kind::Lost, what.clone()),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => Fault::corrupt(error.to_string()),
            other => server(Kind::Refused, other.to_string()),
        }
    }
}

/// A statement that the server would not take. The next try would be as large.
pub(super) fn too_large(bytes: u64, most: u64) -> Fault {
    Fault::Final(StoreError::Invalid(format!(
        "a statement of {bytes} bytes is larger than the {most} of the server's max_allowed_packet; write less in one statement, or set it \
         to 16M or more"
    )))
}

fn mysql_fault(number: u16, message: &str) -> Fault {
    let kind = match number {
        1062 | 1586 => Kind::Duplicate,
        // Lock wait, deadlock; MariaDB's snapshot check; too many transactions.
        1205 | 1213 | 1020 | 1637 => Kind::Contention,
        // Too many connections, shutdown in progress, gone away, lost, killed, timed out idle (MariaDB, MySQL).
        1040 | 1053 | 1077 | 1152 | 1158..=1161 | 1184 | 1203 | 1226 | 1317 | 1927 | 2003 | 2006 | 2013 | 4031 => {
            Kind::Lost
        }
        1146 | 1054 => Kind::Missing,
        1153 => {
            return Fault::Final(StoreError::Invalid(format!(
                "a statement was larger than the server's max_allowed_packet ({message}); set it to 16M or more"
            )));
        }
        _ => Kind::Refused,
    };
    Fault::Server { kind, detail: format!("{message} (error {number})") }
}

fn sqlite_fault(error: &SqliteError) -> Fault {
    use sqlx::error::DatabaseError as _;
    let code = error.code().and_then(|c| c.parse::<i64>().ok()).unwrap_or_default();
    let message = error.message();
    let kind = match (code, code & 0xff) {
        (1555 | 2067 | 2579, _) => Kind::Duplicate,
        (_, 5 | 6) => Kind::Contention,
        (_, 1) if message.starts_with("no such table") || message.starts_with("no such column") => Kind::Missing,
        _ => Kind::Refused,
    };
    Fault::Server { kind, detail: format!("{message} (error {code})") }
}
