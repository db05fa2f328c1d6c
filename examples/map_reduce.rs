//! The flights whose plane is not in the register, counted by map and reduce: the first shard reads which carriers there are and
//! emits a shard for each, those count, and the last one adds up. See `examples/map-reduce/job.toml`.

use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::OnceLock;

/// Tail numbers of each carrier's flights, one for each flight.
type Flights = BTreeMap<String, Vec<String>>;

/// Read once in each worker process: what a handler keeps between its shards is its own business.
static DATA: OnceLock<(Flights, BTreeSet<String>)> = OnceLock::new();

fn data(context: &ShardContext) -> Result<&'static (Flights, BTreeSet<String>), ShardError> {
    if let Some(data) = DATA.get() {
        return Ok(data);
    }
    let folder = context.params.get("folder").and_then(|v| v.as_str()).unwrap_or("examples/reconcile-flights/data");
    let broken = |e: csv::Error| ShardError::transient(format!("the data in {folder}: {e}"));
    let opened = |name: &str| {
        File::open(format!("{folder}/{name}")).map_err(|e| ShardError::permanent(format!("{folder}/{name}: {e}")))
    };
    let mut flights = Flights::new();
    for row in csv::Reader::from_reader(flate2::read::GzDecoder::new(opened("flights.csv.gz")?)).deserialize() {
        let mut row: BTreeMap<String, String> = row.map_err(broken)?;
        let mut take = |column: &str| row.remove(column).unwrap_or_default();
        flights.entry(take("carrier")).or_default().push(take("tailnum"));
    }
    let mut planes = BTreeSet::new();
    for row in csv::Reader::from_reader(opened("planes.csv")?).deserialize() {
        let mut row: BTreeMap<String, String> = row.map_err(broken)?;
        planes.insert(row.remove("tailnum").unwrap_or_default());
    }
    Ok(DATA.get_or_init(|| (flights, planes)))
}

/// One handler for the three kinds of shards.
pub struct ReconcileByCarrier;

#[async_trait]
impl ShardHandler for ReconcileByCarrier {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        match &context.slice {
            ShardSlice::Map { .. } => {
                for carrier in data(&context)?.0.keys() {
                    context.emit(carrier.as_str()).await?;
                }
                Ok(ShardOutput::default())
            }
            ShardSlice::Task { payload, .. } => {
                let (flights, planes) = data(&context)?;
                let of = flights.get(payload.as_str().unwrap_or_default()).map_or(&[][..], Vec::as_slice);
                Ok(ShardOutput::rows(of.iter().filter(|tail| !planes.contains(*tail)).count() as u64))
            }
            ShardSlice::Reduce { .. } => {
                let (mut unmatched, mut next) = (0, 0);
                loop {
                    let page = context.sub_results(next).await?;
                    let Some(last) = page.last() else { break };
                    next = last.number + 1;
                    unmatched += page.iter().filter_map(|result| result.rows).sum::<u64>();
                }
                let summary = Some(serde_json::json!({ "unmatched": unmatched }));
                Ok(ShardOutput { summary, ..ShardOutput::rows(unmatched) })
            }
            other => Err(ShardError::permanent(format!(
                "the job needs shards = {{ map = {{ reduce = true }} }}, not {other}"
            ))),
        }
    }
}

#[allow(dead_code, reason = "the tests take the handler and not the program")]
fn main() -> std::process::ExitCode {
    shardcron::run_with(std::env::args_os(), Registry::default().with("reconcile-by-carrier", ReconcileByCarrier))
}
