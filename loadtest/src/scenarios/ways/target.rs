//! What each way left behind, counted in its target by statements of the scenario's own, beside the published answer.

use crate::oracle::rows_of;
use crate::rows::numbers;
use anyhow::{Context, Result, ensure};
use shardcron_domain::ExecutionId;
use shardcron_store::SqlArg;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use std::path::Path;

/// The table that a way's findings go into. No key: what is made twice is there twice.
pub const FOUND: &str = "ways_found";
/// Flights whose plane is not in the register, as published with the data.
pub const UNMATCHED: u64 = 52_606;
/// All flights.
pub const FLIGHTS: u64 = 336_776;
/// The published answer by carrier.
const BY_CARRIER: [(&str, u64); 10] = [
    ("MQ", 25_397),
    ("AA", 22_558),
    ("UA", 1_693),
    ("9E", 1_044),
    ("B6", 830),
    ("US", 699),
    ("FL", 187),
    ("DL", 110),
    ("F9", 50),
    ("WN", 38),
];
const TRUTH: &str = "
DROP TABLE IF EXISTS ways_truth;
CREATE TABLE ways_truth (flight_id BIGINT NOT NULL PRIMARY KEY, tailnum VARCHAR(16) NOT NULL);
INSERT INTO ways_truth (flight_id, tailnum) SELECT id, tailnum FROM demo_flights f
    WHERE NOT EXISTS (SELECT 1 FROM demo_planes p WHERE p.tailnum = f.tailnum);
";

/// What stands in a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Flights that were found.
    pub rows: u64,
    /// Unmatched flights that were not found, and findings that are none.
    pub wrong: u64,
    /// Findings that were made again.
    pub duplicates: u64,
    /// Whether each carrier has as many as published, and no other carrier has any.
    pub by_carrier: bool,
}

/// The keys under which a program or a service was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Shards that were asked for.
    pub shards: u64,
    /// The most keys of one shard.
    pub most: u64,
    /// The most attempts of one shard.
    pub attempts: u64,
    /// Different keys of all shards.
    pub keys: u64,
}

/// The flights, the register, and what is to be found.
///
/// # Errors
/// The database refuses it.
pub async fn load(ledger: &SqlLedger) -> Result<()> {
    shardcron::load_example(ledger).await?;
    ledger.execute_script(TRUTH).await.context("the table of what is to be found")?;
    let truth = numbers(ledger, "SELECT COUNT(*) FROM ways_truth", &[]).await?;
    ensure!(truth == [UNMATCHED], "{truth:?} unmatched flights in the data instead of {UNMATCHED}");
    Ok(())
}

/// Makes a target. `database` is empty, or a name with a dot.
fn found_table(database: &str) -> String {
    format!(
        "CREATE TABLE {database}{FOUND} (flight_id BIGINT NOT NULL, tailnum VARCHAR(16) NOT NULL, \
         KEY ways_found_flight (flight_id)) ENGINE=InnoDB"
    )
}

/// An empty target in the ledger's database.
///
/// # Errors
/// The database refuses it.
pub async fn empty(ledger: &SqlLedger) -> Result<()> {
    ledger.execute_script(&format!("DROP TABLE IF EXISTS {FOUND}; {};", found_table(""))).await?;
    Ok(())
}

/// The flights, the register and an empty target in another database of the same server, as a script.
pub fn elsewhere(database: &str) -> String {
    format!(
        "{};
         CREATE TABLE {database}.demo_flights (PRIMARY KEY (id)) AS SELECT * FROM demo_flights;
         CREATE TABLE {database}.demo_planes (PRIMARY KEY (tailnum)) AS SELECT * FROM demo_planes;",
        found_table(&format!("{database}."))
    )
}

/// Counts. `table` is the target, with its database's name where that is not the ledger's.
///
/// # Errors
/// The database does not answer.
pub async fn count(ledger: &SqlLedger, table: &str) -> Result<Found> {
    let one = |sql: String| async move { Ok::<_, anyhow::Error>(numbers(ledger, &sql, &[]).await?[0]) };
    let all = one(format!("SELECT COUNT(*) FROM {table}")).await?;
    let rows = one(format!("SELECT COUNT(DISTINCT flight_id) FROM {table}")).await?;
    let missing = one(format!(
        "SELECT COUNT(*) FROM ways_truth t LEFT JOIN {table} u ON u.flight_id = t.flight_id WHERE u.flight_id IS NULL"
    ))
    .await?;
    let strange = one(format!(
        "SELECT COUNT(*) FROM {table} u LEFT JOIN ways_truth t ON t.flight_id = u.flight_id AND t.tailnum = u.tailnum \
         WHERE t.flight_id IS NULL"
    ))
    .await?;
    let sql = format!(
        "SELECT f.carrier, COUNT(DISTINCT u.flight_id) FROM {table} u JOIN demo_flights f ON f.id = u.flight_id \
         GROUP BY f.carrier ORDER BY 2 DESC"
    );
    let carriers = ledger.query(&sql, &[]).await.context("the sums by carrier")?;
    let is = |row: &Vec<SqlArg>, (carrier, flights): &(&str, u64)| matches!(row.as_slice(), [SqlArg::Text(c), SqlArg::Int(n)] if c == carrier && n.unsigned_abs() == *flights);
    let by_carrier =
        carriers.len() == BY_CARRIER.len() && carriers.iter().zip(&BY_CARRIER).all(|(row, known)| is(row, known));
    Ok(Found { rows, wrong: missing + strange, duplicates: all - rows, by_carrier })
}

/// The database of an example's own: a file, which its program or service writes.
pub struct File {
    database: SqlLedger,
}

impl File {
    /// Opens what the program has made.
    ///
    /// # Errors
    /// There is none.
    pub async fn open(path: &Path) -> Result<Self> {
        ensure!(path.exists(), "{} has not been made", path.display());
        let options = SqlOptions { max_connections: 1, ..SqlOptions::default() };
        let database = SqlLedger::connect(&format!("sqlite://{}", path.display()), options).await;
        Ok(File { database: database.with_context(|| format!("the database {}", path.display()))? })
    }

    /// Copies the findings into the ledger's database, each as often as it was made. `sql` gives flight, tail number and how often.
    ///
    /// # Errors
    /// A database does not answer.
    pub async fn copy(&self, ledger: &SqlLedger, sql: &str, of: ExecutionId) -> Result<()> {
        let found = self.database.query(sql, &[SqlArg::Text(format!("{of}/%"))]).await.context("the findings")?;
        let mut rows = Vec::with_capacity(found.len());
        for row in found {
            let [flight, tail, SqlArg::Int(times)] = row.as_slice() else {
                anyhow::bail!("a finding that reads {row:?}");
            };
            rows.extend((0..*times).map(|_| vec![flight.clone(), tail.clone()]));
        }
        ledger.insert_rows(FOUND, &["flight_id", "tailnum"], rows).await?;
        Ok(())
    }

    /// How shards were asked for: from a table with the columns `key`, `attempt` and `shard`.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn keys(&self, table: &str, of: ExecutionId) -> Result<Keys> {
        let sql = format!(
            "SELECT COUNT(*), MAX(k), MAX(a) FROM (SELECT COUNT(DISTINCT key) AS k, COUNT(DISTINCT attempt) AS a \
             FROM {table} WHERE key LIKE ? GROUP BY shard) s"
        );
        let like = [SqlArg::Text(format!("{of}/%"))];
        let by_shard = numbers(&self.database, &sql, &like).await?;
        let sql = format!("SELECT COUNT(DISTINCT key) FROM {table} WHERE key LIKE ?");
        let keys = numbers(&self.database, &sql, &like).await?[0];
        Ok(Keys { shards: by_shard[0], most: by_shard[1], attempts: by_shard[2], keys })
    }

    /// The keys of requests that the service has not come to the end of: their workers may be dead, their effects come all the same.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn open_requests(&self, of: ExecutionId) -> Result<Vec<String>> {
        let sql = "SELECT key FROM calls WHERE key LIKE ? AND rowid NOT IN (SELECT call FROM ended)";
        rows_of(&self.database, sql, &[SqlArg::Text(format!("{of}/%"))]).await.map(|rows| rows.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_open_until_the_service_says_that_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("service.db");
        let (one, other) = (ExecutionId(uuid::Uuid::from_u128(1)), ExecutionId(uuid::Uuid::from_u128(2)));
        let url = format!("sqlite://{}", path.display());
        let service = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        let script = format!(
            "CREATE TABLE calls (key TEXT NOT NULL); CREATE TABLE ended (call INTEGER PRIMARY KEY); \
             INSERT INTO calls VALUES ('{one}/0'), ('{one}/0'), ('{one}/1'), ('{other}/0'); INSERT INTO ended VALUES (1)"
        );
        service.execute_script(&script).await.unwrap();
        let file = File::open(&path).await.unwrap();
        let mut open = file.open_requests(one).await.unwrap();
        open.sort_unstable();
        assert_eq!(
            open,
            [format!("{one}/0"), format!("{one}/1")],
            "the second call for the first shard, and the other shard's"
        );
        service.execute_script("INSERT INTO ended VALUES (2), (3)").await.unwrap();
        assert_eq!(file.open_requests(one).await.unwrap(), Vec::<String>::new());
    }
}
