//! Queries of people that read and change nothing, bounded in rows and time.

use super::SqlLedger;
use super::dialect::Dialect;
use super::fault::{Fault, Kind, Outcome, with_retries};
use super::pool::{Db, Tx};
use super::value::{Row, Value};
use crate::error::{Result, StoreError};
use crate::rows::{BoundSql, SqlArg};
use std::time::Duration;

/// How much longer the client waits than the server may work: the server's own end says what it was, and keeps the connection.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

impl SqlLedger {
    /// The first `rows` rows of a query, within `limit`. It stands in a `SELECT … FROM (query)`, in a transaction (MySQL) or on a
    /// connection (SQLite) that is only for reading, so a statement that writes is refused by the database, whatever it looks like.
    ///
    /// To be awaited to its end: a call that is dropped counts as an answer that never came.
    ///
    /// # Errors
    /// [`StoreError::Statement`] with the server's words, also when the time is up; [`StoreError::Unavailable`].
    pub async fn read_only(&self, query: &BoundSql, rows: usize, limit: Duration) -> Result<Vec<Vec<SqlArg>>> {
        let text = format!("SELECT * FROM ({}) AS wanted LIMIT {rows}", query.text);
        let args: Vec<Value> = query.args.iter().cloned().map(Value::from).collect();
        let rows: Vec<Row> = with_retries!(read(&self.db, (&text, &args), limit))?;
        Ok(rows.into_iter().map(|row| row.0.into_iter().map(SqlArg::from).collect()).collect())
    }
}

async fn read(db: &Db, (text, args): (&str, &[Value]), limit: Duration) -> Outcome<Vec<Row>> {
    if db.dialect() == Dialect::Sqlite {
        // Its readers refuse writes. There is no server that would end it; the connection is free again when the statement has ended.
        let Ok(answer) = tokio::time::timeout(limit, db.rows(text, args)).await else {
            return Err(of_the_query(format!("it has not ended within {limit:?}")));
        };
        return answer.map_err(refused);
    }
    let mut tx = db.begin_reading(limit).await?;
    tx.limit(Some(limit + ANSWER_WAIT));
    let answer = tx.rows(text, args).await;
    if !matches!(answer, Err(Fault::Final(_) | Fault::Server { kind: Kind::Lost, .. })) {
        end(tx).await?;
    }
    answer.map_err(refused)
}

fn of_the_query(detail: String) -> Fault {
    Fault::Final(StoreError::Statement { detail, transient: false })
}

/// What the server says about a query that is not ours.
fn refused(fault: Fault) -> Fault {
    match fault {
        Fault::Server { kind: Kind::Missing | Kind::Refused | Kind::Duplicate, detail } => of_the_query(detail),
        other => other,
    }
}

/// Gives the connection back as it was.
async fn end(mut tx: Tx) -> Outcome<()> {
    tx.raw(NO_LIMITS).await?;
    tx.commit().await
}

const NO_LIMITS: &str = "SET SESSION innodb_lock_wait_timeout = 10 /*M!100300 , SESSION max_statement_time = 0 */ /*!80000 , SESSION max_execution_time = 0 */";

/// What a server is told before a transaction that only reads: MariaDB and MySQL each by its own name.
pub(super) fn limits(limit: Duration) -> String {
    let (seconds, ms) = (limit.as_secs_f64(), limit.as_millis());
    format!(
        "SET SESSION innodb_lock_wait_timeout = 10 /*M!100300 , SESSION max_statement_time = {seconds} */ \
         /*!80000 , SESSION max_execution_time = {ms} */"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::SqlOptions;

    fn query(text: &str) -> BoundSql {
        BoundSql { text: text.into(), args: Vec::new() }
    }

    async fn reads_and_writes_nothing(db: SqlLedger, (sleep, words): (&str, &str)) {
        let limit = Duration::from_secs(2);
        db.execute_script("CREATE TABLE users (id BIGINT PRIMARY KEY, region VARCHAR(10))").await.unwrap();
        let rows =
            (1..=9).map(|n| vec![SqlArg::Int(n), SqlArg::Text(if n < 8 { "eu" } else { "us" }.into())]).collect();
        db.insert_rows("users", &["id", "region"], rows).await.unwrap();
        let bound = BoundSql {
            text: "SELECT id FROM users WHERE region = ? ORDER BY id".into(),
            args: vec![SqlArg::Text("us".into())],
        };
        let two = [[SqlArg::Int(8)], [SqlArg::Int(9)]].map(Vec::from);
        assert_eq!(db.read_only(&bound, 10, limit).await.unwrap(), two);
        assert_eq!(db.read_only(&query("SELECT id FROM users"), 3, limit).await.unwrap().len(), 3);
        for write in [
            "DELETE FROM users",
            "INSERT INTO users VALUES (77, 'x')",
            "SELECT 1) AS a; DELETE FROM users; SELECT (1",
            "DROP TABLE users",
            "UPDATE users SET region = 'x'",
        ] {
            let refused = db.read_only(&query(write), 10, limit).await;
            assert!(matches!(refused, Err(StoreError::Statement { .. })), "{write}: {refused:?}");
        }
        let late = db.read_only(&query(sleep), 10, Duration::from_millis(300)).await.unwrap_err().to_string();
        assert!(late.contains(words), "{late}");
        // Neither its limit nor its transaction stays with the connection.
        assert_eq!(db.query("SELECT COUNT(*) FROM users WHERE region = 'eu'", &[]).await.unwrap(), [[SqlArg::Int(7)]]);
        db.execute_script("DELETE FROM users WHERE id = 1").await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite_reads_and_writes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("t.db").display());
        let db = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        let long =
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 20000000) SELECT MAX(x) FROM n";
        reads_and_writes_nothing(db, (long, "within")).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn mysql_reads_and_writes_nothing() {
        let url = tokio::task::spawn_blocking(|| testkit::shared().fresh_database()).await.unwrap();
        // One connection, so that what is left on it would be met.
        let options = SqlOptions { max_connections: 1, ..SqlOptions::default() };
        let db = SqlLedger::connect(&url, options).await.unwrap();
        let settings = "SELECT @@session.transaction_read_only, @@session.innodb_lock_wait_timeout";
        let before = db.query(settings, &[]).await;
        // What a function does is not seen in the text; the transaction refuses it.
        db.execute_script(
            "CREATE TABLE calls (n BIGINT); CREATE FUNCTION counted() RETURNS BIGINT BEGIN INSERT INTO calls VALUES (1); RETURN 1; END",
        )
        .await
        .unwrap();
        let refused =
            db.read_only(&query("SELECT counted()"), 10, Duration::from_secs(2)).await.unwrap_err().to_string();
        assert!(refused.to_ascii_uppercase().contains("READ ONLY"), "{refused}");
        assert_eq!(db.query("SELECT COUNT(*) FROM calls", &[]).await.unwrap(), [[SqlArg::Int(0)]]);
        reads_and_writes_nothing(db.clone(), ("SELECT BENCHMARK(2000000000, SHA1('x'))", "")).await;
        assert_eq!(format!("{before:?}"), format!("{:?}", db.query(settings, &[]).await));
    }
}
