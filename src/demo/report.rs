//! The demo's answer beside the published one.

use super::DemoArgs;
use crate::config::Config;
use crate::output::{line, number, table};
use crate::wiring::Wired;
use anyhow::{Context, Result};
use serde::Serialize;
use shardcron_domain::ExecutionId;
use shardcron_domain::address::masked;
use shardcron_domain::invariants::check_tally;
use shardcron_store::SqlArg;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The published answer; see `examples/reconcile-flights/data/README.md`.
const UNMATCHED: u64 = 52_606;
const TAILNUMS: u64 = 722;
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

/// What came out.
#[derive(Serialize)]
pub struct Report {
    unmatched: u64,
    distinct_tailnums: u64,
    by_carrier: BTreeMap<String, u64>,
    shards: u64,
    attempts: u64,
    taken_over: u64,
    recorded_twice: u64,
    lost: u64,
    seconds: f64,
    matches_published: bool,
    execution: ExecutionId,
    killed: Vec<String>,
    rows_twice: u64,
}

impl Report {
    pub async fn collect(wired: &Wired, execution: ExecutionId, took: Duration, killed: &[String]) -> Result<Self> {
        let ledger = &wired.ports.ledger;
        let (tally, attempts) = ledger.tally(execution).await?;
        let histories = ledger.attempts(execution, 10_000).await?;
        let taken_over = histories.iter().filter(|a| a.outcome == "worker_lost").count() as u64;
        let unmatched = one(wired, "SELECT COUNT(*) FROM demo_unmatched").await?;
        let distinct_flights = one(wired, "SELECT COUNT(DISTINCT flight_id) FROM demo_unmatched").await?;
        let distinct_tailnums = one(wired, "SELECT COUNT(DISTINCT tailnum) FROM demo_unmatched").await?;
        let rows = wired.sql.query("SELECT carrier, COUNT(*) FROM demo_unmatched GROUP BY carrier", &[]).await?;
        let mut by_carrier = BTreeMap::new();
        for row in rows {
            if let [SqlArg::Text(carrier), SqlArg::Int(n)] = row.as_slice() {
                by_carrier.insert(carrier.clone(), u64::try_from(*n)?);
            }
        }
        let published: BTreeMap<String, u64> = BY_CARRIER.iter().map(|(c, n)| ((*c).to_owned(), *n)).collect();
        let matches_published = unmatched == UNMATCHED && distinct_tailnums == TAILNUMS && by_carrier == published;
        Ok(Report {
            unmatched,
            distinct_tailnums,
            by_carrier,
            shards: tally.shards_total,
            attempts,
            taken_over,
            recorded_twice: tally.recorded_twice,
            lost: tally.shards_total.saturating_sub(tally.terminal),
            seconds: (took.as_secs_f64() * 100.0).round() / 100.0,
            matches_published: matches_published && check_tally(&tally).is_ok(),
            execution,
            killed: killed.to_vec(),
            rows_twice: unmatched - distinct_flights,
        })
    }

    /// Every figure is as published, nothing lost, nothing twice, and who was killed was made up for.
    pub fn all_well(&self) -> bool {
        let killed_worker = self.killed.iter().any(|k| k.starts_with("worker"));
        self.matches_published
            && self.recorded_twice == 0
            && self.lost == 0
            && self.rows_twice == 0
            && (!killed_worker || self.taken_over > 0)
    }

    pub fn print(&self, args: &DemoArgs, config: &Config, dir: &Path) {
        line("");
        let verdict =
            |found: u64, published: u64| if found == published { "✓".to_owned() } else { "WRONG".to_owned() };
        let mut rows: Vec<Vec<String>> = BY_CARRIER
            .iter()
            .map(|(carrier, published)| {
                let found = self.by_carrier.get(*carrier).copied().unwrap_or(0);
                vec![(*carrier).to_owned(), number(found), number(*published), verdict(found, *published)]
            })
            .collect();
        rows.push(vec!["all".into(), number(self.unmatched), number(UNMATCHED), verdict(self.unmatched, UNMATCHED)]);
        rows.push(vec![
            "tail numbers".into(),
            number(self.distinct_tailnums),
            number(TAILNUMS),
            verdict(self.distinct_tailnums, TAILNUMS),
        ]);
        table(&["carrier", "unmatched flights", "published", ""], rows);
        line("");
        line(&format!(
            "  {} shards, {} attempts, {} taken over from the dead, in {:.1} s",
            self.shards, self.attempts, self.taken_over, self.seconds
        ));
        line(&format!(
            "  results recorded twice: {}   lost: {}   rows written twice: {}",
            self.recorded_twice, self.lost, self.rows_twice
        ));
        line("");
        if !self.all_well() {
            line("The figures do NOT match. Run it again with --keep DIR and look into the logs there.");
            return;
        }
        let ledger = if args.cluster {
            masked(&config.ledger.url)
        } else {
            format!("sqlite://{}", dir.join("shardcron.db").display())
        };
        let flag = if args.cluster { String::new() } else { format!(" --ledger {ledger}") };
        line("Every figure matches the published answer. What to try next:");
        if args.keep.is_none() && !args.cluster {
            line("  shardcron demo --keep /tmp/shardcron-demo    keep the ledger and the logs");
            line(
                "  shardcron jobs next examples/reconcile-flights/job.toml    the coming firings, clock changes included",
            );
            line("  shardcron up    a scheduler and a worker in one process, on shardcron.db here");
        } else {
            line(&format!("  shardcron executions show {}{flag}    each shard and attempt", self.execution));
            line(&format!("  shardcron jobs list{flag}    the jobs and their next instants"));
            line(&format!("  shardcron up{flag}    a scheduler and a worker in one process"));
        }
    }
}

async fn one(wired: &Wired, sql: &str) -> Result<u64> {
    let rows = wired.sql.query(sql, &[]).await?;
    match rows.first().and_then(|r| r.first()) {
        Some(SqlArg::Int(n)) => Ok(u64::try_from(*n)?),
        other => Err(anyhow::anyhow!("{sql} answered {other:?}")).context("the demo's own tables"),
    }
}
