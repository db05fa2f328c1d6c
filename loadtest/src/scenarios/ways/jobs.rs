//! The eight ways: their jobs, what each promises, and how slow each is made so that all kills fit.

use super::handlers::STEP;
use super::target::{FLIGHTS, FOUND, UNMATCHED};
use clap::ValueEnum;
use serde::Serialize;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Attempts at the same time in each worker, and workers.
pub const SLOTS: u32 = 4;
/// Worker processes at a time.
pub const WORKERS: u32 = 3;
/// What the whole work is stretched to for each kill, and once more. About the time in which a dead worker is noticed.
const MS_PER_KILL: u64 = 1_200;
/// Pause of a shard that is not cut into steps.
const WHOLE_PAUSE_MS: u64 = 800;
/// Shards of those that are.
const SHARDS: u64 = 24;
/// Each program reads the whole file: fewer of them.
const PROGRAMS: u64 = 12;
/// Flights of a program's step, as it is written there.
const PROGRAM_STEP: u64 = 2_000;
/// The part of the work behind which nobody is killed any more.
const LAST: f64 = 0.85;
/// What the first shard of the map takes in all, so that one kill can be while it emits.
const EMIT_MS: u64 = 2_000;

/// A way to write the same job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Statements on the ledger's own database
    Sql,
    /// A Rust handler's transactions
    RustTransaction,
    /// A Rust handler's records
    RustOnce,
    /// A program
    Exec,
    /// A service that does not look at the key
    Http,
    /// A service that honours the key
    HttpKey,
    /// Map and reduce
    Map,
    /// Statements on another database, by the inbox there
    SqlElsewhere,
}

/// How often an effect may be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Promise {
    /// Once, whatever dies.
    #[serde(rename = "once")]
    Once,
    /// Once, or more often if something dies; under the same key.
    #[serde(rename = "at least once")]
    AtLeastOnce,
}

impl Promise {
    /// As people read it.
    pub fn words(self) -> &'static str {
        match self {
            Promise::Once => "once",
            Promise::AtLeastOnce => "at least once",
        }
    }
}

/// Where a run has its files and its service.
pub struct Place {
    /// A folder of the run's own, which goes with this.
    pub folder: TempDir,
    /// The service, if a way needs it.
    pub service: Option<String>,
}

impl Place {
    /// What the workers read for their configuration.
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("shardcron.toml")
    }

    /// What the programs write into.
    pub fn of_programs(&self) -> PathBuf {
        self.folder.path().join("programs.db")
    }

    /// What the service writes into.
    pub fn of_service(&self) -> PathBuf {
        self.folder.path().join("service.db")
    }
}

/// The folder of the examples.
pub fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

impl Way {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Way::Sql => "sql",
            Way::RustTransaction => "rust-transaction",
            Way::RustOnce => "rust-once",
            Way::Exec => "exec",
            Way::Http => "http",
            Way::HttpKey => "http-key",
            Way::Map => "map",
            Way::SqlElsewhere => "sql-elsewhere",
        }
    }

    /// What the documents promise of its effects; for `http-key` with the service's help.
    pub fn promise(self) -> Promise {
        match self {
            Way::Exec | Way::Http => Promise::AtLeastOnce,
            _ => Promise::Once,
        }
    }

    /// Whether it needs the service.
    pub fn needs_service(self) -> bool {
        matches!(self, Way::Http | Way::HttpKey)
    }

    /// The job's name.
    pub fn job(self) -> String {
        format!("ways-{}", self.name())
    }

    /// What the ledger's count of records is at the end: what progress is measured against.
    pub fn records(self) -> u64 {
        match self {
            Way::Sql | Way::SqlElsewhere | Way::RustOnce => UNMATCHED,
            _ => FLIGHTS,
        }
    }

    /// The part of the work in which kills are. Behind it there has to be some left for the last one to meet; where shards are not cut
    /// into steps, the count of records moves by as many shards at once as there are slots.
    pub fn killed_until(self, kills: u32) -> f64 {
        let last = match self {
            Way::Http | Way::HttpKey | Way::Map => 1.0 - 2.0 * f64::from(SLOTS * WORKERS) / self.shards(kills) as f64,
            _ => LAST,
        };
        last.min(LAST)
    }

    /// Shards that are asked for of a program or a service.
    pub fn shards(self, kills: u32) -> u64 {
        match self {
            Way::Exec => PROGRAMS,
            Way::Http | Way::HttpKey | Way::Map => {
                let slots = u64::from(SLOTS * WORKERS);
                (total_ms(kills) * slots).div_ceil(WHOLE_PAUSE_MS)
            }
            _ => SHARDS,
        }
    }

    /// What a step pauses: a kill can come at any time within it.
    pub fn step_ms(self, kills: u32) -> u64 {
        let pause = |steps: u64| total_ms(kills) * u64::from(SLOTS * WORKERS) / steps.max(1);
        match self {
            Way::Http | Way::HttpKey | Way::Map => WHOLE_PAUSE_MS,
            Way::Exec => pause(FLIGHTS.div_ceil(PROGRAM_STEP)),
            _ => pause(FLIGHTS.div_ceil(STEP.unsigned_abs())),
        }
    }

    /// The job file.
    pub fn job_file(self, kills: u32, place: &Place) -> String {
        let (name, shards) = (self.job(), self.shards(kills));
        let range = format!("{{ range = {{ from = 1, to = {FLIGHTS} }}, count = {shards} }}");
        let pause_ms = self.step_ms(kills);
        let sql = |database: &str| {
            format!(
                "shards = {range}\ntakeover = \"immediate\"\nparams = {{ pause_ms = {pause_ms} }}\n\
                 handler = {{ chunk = {STEP}, sql = \"\"\"{}\"\"\"{database} }}",
                statements()
            )
        };
        let rust = |handler: &str| {
            format!(
                "shards = {range}\ntakeover = \"immediate\"\nparams = {{ pause_ms = {pause_ms} }}\nhandler = {{ rust = \"{handler}\" }}"
            )
        };
        let http = |query: &str| {
            let url = place.service.as_deref().unwrap_or_default();
            format!(
                "shards = {range}\nparams = {{ pause_ms = {pause_ms} }}\n\
                 handler = {{ http = {{ url = \"{url}/reconcile{query}\", timeout = \"30s\" }} }}"
            )
        };
        let body = match self {
            Way::Sql => sql(""),
            Way::SqlElsewhere => sql(", database = \"other\""),
            Way::RustTransaction => rust("ways-transaction"),
            Way::RustOnce => rust("ways-once"),
            Way::Exec => {
                let (data, target) = (examples().join("reconcile-flights/data"), place.of_programs());
                format!(
                    "shards = {range}\nparams = {{ data = '{}', target = '{}', pause_ms = {pause_ms} }}\n\
                     handler = {{ exec = {{ run = [\"python3\", \"reconcile.py\"], dir = \"reconcile-python\" }} }}",
                    data.display(),
                    target.display()
                )
            }
            Way::Http => http("?forgetful=1"),
            Way::HttpKey => http(""),
            Way::Map => format!(
                "shards = {{ map = {{ reduce = true, max = {shards} }} }}\ntakeover = \"immediate\"\n\
                 params = {{ flights = {FLIGHTS}, tasks = {shards}, pause_ms = {pause_ms}, emit_pause_ms = {} }}\n\
                 handler = {{ rust = \"ways-map\" }}",
                EMIT_MS / shards
            ),
        };
        format!(
            "[job.{name}]\ntimeout = \"10m\"\n\
             retry = {{ attempts = 1000, first = \"50ms\", factor = 1.0, max = \"50ms\", jitter = 0.0 }}\n{body}\n"
        )
    }
}

/// The example's statement, and a pause in its transaction: a kill meets it with its rows written and not committed.
fn statements() -> String {
    format!(
        "INSERT INTO {FOUND} (flight_id, tailnum) SELECT f.id, f.tailnum FROM demo_flights f \
         LEFT JOIN demo_planes p ON p.tailnum = f.tailnum \
         WHERE f.id BETWEEN :shard_from AND :shard_to AND p.tailnum IS NULL; DO SLEEP(:pause_ms / 1000)"
    )
}

fn total_ms(kills: u32) -> u64 {
    MS_PER_KILL * (u64::from(kills) + 1)
}
