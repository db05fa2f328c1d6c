//! The example's data, in the program itself, so that the demo needs no file and no network.

use anyhow::{Context, Result};
use shardcron_store::SqlArg;
use shardcron_store::sql::SqlLedger;
use std::io::Read;

const FLIGHTS: &[u8] = include_bytes!("../../examples/reconcile-flights/data/flights.csv.gz");
const PLANES: &[u8] = include_bytes!("../../examples/reconcile-flights/data/planes.csv");

/// How much was loaded.
pub struct Loaded {
    /// Rows of `demo_flights`.
    pub flights: u64,
    /// Rows of `demo_planes`.
    pub planes: u64,
}

/// Makes the three tables anew and fills two of them.
///
/// # Errors
/// The database refuses it.
pub async fn load(ledger: &SqlLedger) -> Result<Loaded> {
    ledger
        .execute_script(
            "DROP TABLE IF EXISTS demo_unmatched;
             DROP TABLE IF EXISTS demo_flights;
             DROP TABLE IF EXISTS demo_planes;
             CREATE TABLE demo_flights (id BIGINT NOT NULL PRIMARY KEY, carrier VARCHAR(8) NOT NULL, tailnum VARCHAR(16) NOT NULL);
             CREATE TABLE demo_planes (tailnum VARCHAR(16) NOT NULL PRIMARY KEY, model VARCHAR(64) NOT NULL);
             CREATE TABLE demo_unmatched (flight_id BIGINT NOT NULL, carrier VARCHAR(8) NOT NULL, tailnum VARCHAR(16) NOT NULL);",
        )
        .await?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(FLIGHTS).read_to_string(&mut text).context("flights.csv.gz")?;
    let flights = rows(text.as_bytes(), &["id", "carrier", "tailnum"], 1)?;
    let planes = rows(PLANES, &["tailnum", "model"], 0)?;
    let loaded = Loaded { flights: flights.len() as u64, planes: planes.len() as u64 };
    ledger.insert_rows("demo_planes", &["tailnum", "model"], planes).await?;
    ledger.insert_rows("demo_flights", &["id", "carrier", "tailnum"], flights).await?;
    Ok(loaded)
}

/// The wanted columns; the first `numbers` of them are whole numbers.
fn rows(text: &[u8], columns: &[&str], numbers: usize) -> Result<Vec<Vec<SqlArg>>> {
    let mut reader = csv::Reader::from_reader(text);
    let headers = reader.headers()?.clone();
    let wanted: Vec<usize> = columns
        .iter()
        .map(|c| headers.iter().position(|h| h == *c).with_context(|| format!("there is no column {c}")))
        .collect::<Result<_>>()?;
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record?;
        let mut row = Vec::with_capacity(wanted.len());
        for (i, at) in wanted.iter().enumerate() {
            let text = record.get(*at).unwrap_or("");
            row.push(if i < numbers {
                SqlArg::Int(text.parse().context("an id")?)
            } else {
                SqlArg::Text(text.to_owned())
            });
        }
        rows.push(row);
    }
    Ok(rows)
}
