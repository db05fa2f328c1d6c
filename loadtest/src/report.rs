//! What comes out, for programs and for people. The names of the JSON's fields are relied on from outside.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Two percentiles of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half are no longer than this.
    pub p50: f64,
    /// Of a hundred, one is longer than this.
    pub p99: f64,
}

impl Percentiles {
    /// The nearest ranks. Zero over nothing.
    #[must_use]
    pub fn of(mut values: Vec<i64>) -> Self {
        values.sort_unstable();
        let rank = |percent: usize| {
            let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
            values.get(at).map_or(0.0, |v| *v as f64)
        };
        Percentiles { p50: rank(50), p99: rank(99) }
    }
}

/// What `throughput` found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Throughput {
    /// Shards of the execution.
    pub shards: u64,
    /// Worker processes.
    pub workers: u64,
    /// From the fire to the recorded end, by the ledger's stored times.
    pub seconds: f64,
    /// The rate over that time.
    pub shards_per_second: f64,
    /// RabbitMQ alone.
    pub broker_ceiling_per_second: f64,
    /// The database alone.
    pub ledger_ceiling_per_second: f64,
    /// The rate beside RabbitMQ alone.
    pub broker_ratio: f64,
    /// The rate beside the database alone.
    pub ledger_ratio: f64,
    /// From the trigger to the decision in the ledger, for the large execution.
    pub fire_ms: f64,
    /// From the fire to the first handler's start, at a low rate.
    pub fire_to_start_ms: Percentiles,
    /// How many firings that is from.
    pub fire_to_start_samples: u64,
    /// Processor time per shard, in microseconds, by part.
    pub cpu_us_per_shard: BTreeMap<String, f64>,
    /// All processors over that time: what the rate can't exceed on this machine. Absent where the services are not ours and so
    /// their share is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_bound_per_second: Option<f64>,
    /// Peak resident memory by process, in MiB.
    pub rss_mib: BTreeMap<String, f64>,
    /// Counted by the oracle.
    pub lost: u64,
    /// Counted by the oracle.
    pub recorded_twice: u64,
    /// Counted by the oracle.
    pub failed: u64,
    /// Where it ran.
    pub machine: Machine,
}

/// Where a run took place.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Processors.
    pub processors: u64,
    /// RabbitMQ's version.
    pub broker: String,
    /// The database's version.
    pub ledger: String,
    /// Whether this program was built with optimisation; figures of a build without it say nothing.
    pub optimised: bool,
}

/// What `worker-kill` found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerKill {
    /// Workers killed.
    pub kills: u64,
    /// Shards taken from them.
    pub taken_over: u64,
    /// Counted by the oracle.
    pub lost: u64,
    /// Counted by the oracle.
    pub recorded_twice: u64,
    /// Counted by the oracle.
    pub failed: u64,
    /// The whole run, from the first trigger to the last recorded end.
    pub seconds: f64,
    /// Executions fired.
    pub executions: u64,
    /// Their shards.
    pub shards: u64,
    /// The seed that repeats the choice of victims and moments.
    pub seed: u64,
}

/// Percentiles of how late something was, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lateness {
    /// Half are no later.
    pub p50: f64,
    /// Of a hundred, one is later.
    pub p99: f64,
    /// The latest.
    pub max: f64,
}

impl Lateness {
    /// The nearest ranks. Zero over nothing.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = i64>) -> Self {
        let values: Vec<i64> = values.into_iter().collect();
        let max = values.iter().copied().max().unwrap_or(0) as f64;
        let Percentiles { p50, p99 } = Percentiles::of(values);
        Lateness { p50, p99, max }
    }
}

/// What `precision` found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Precision {
    /// Jobs with a schedule that the scheduler held.
    pub jobs: u64,
    /// How long was measured.
    pub seconds: f64,
    /// Executions made for instants of that time.
    pub fired: u64,
    /// Instants of that time without one.
    pub missed: u64,
    /// Executions beside the first of an instant, or of no instant.
    pub doubled: u64,
    /// Of the firing: from the nominal instant to the beginning of the transaction that decides it.
    pub lateness_ms: Lateness,
    /// From the nominal instant to the start of the handler in a worker, through the ledger, the queue and the claim.
    pub start_lateness_ms: Lateness,
    /// `start_lateness_ms` of the jobs that fire every second.
    pub per_second_start_ms: Lateness,
    /// Processor time of the scheduler, in cores.
    pub cpu_cores: f64,
    /// The same of every part.
    pub cores: BTreeMap<String, f64>,
    /// Peak resident memory of the scheduler.
    pub rss_mib: f64,
    /// How long writing the jobs took.
    pub apply_seconds: f64,
    /// Thousands due at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
    /// Other schedulers on the same machine.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Peer>,
    /// Whether this program was built with optimisation.
    pub optimised: bool,
}

/// Many jobs due in the same second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Burst {
    /// How many.
    pub jobs: u64,
    /// Until all executions were in the ledger.
    pub recorded_ms: i64,
    /// Until the first shard of each was with the broker.
    pub published_ms: i64,
    /// Decisions of the per-second jobs in the five seconds of it.
    pub per_second_lateness_ms: Lateness,
    /// Starts of their handlers.
    pub per_second_start_ms: Lateness,
}

/// How another scheduler did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Peer {
    /// Its name and version.
    pub name: String,
    /// Jobs that it held.
    pub jobs: u64,
    /// Its lateness, by its own call of the job.
    pub lateness_ms: Lateness,
    /// Instants that it fired.
    pub fired: u64,
    /// Instants that it did not.
    pub missed: u64,
    /// Its processor time, in cores.
    pub cpu_cores: f64,
    /// Why there is no figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

impl Precision {
    /// For people.
    pub fn print(&self) {
        println!("{} jobs on one scheduler, {:.0} s measured", grouped(self.jobs as f64), self.seconds);
        if !self.optimised {
            println!("built without optimisation: figures mean nothing; run with cargo run --release");
        }
        println!();
        println!("  {:<34}{:>8}{:>8}{:>8}", "late by, ms", "p50", "p99", "max");
        let line = |what: &str, l: &Lateness| {
            println!("  {what:<34}{:>8.0}{:>8.0}{:>8.0}", l.p50, l.p99, l.max);
        };
        line("fired", &self.lateness_ms);
        line("handler started", &self.start_lateness_ms);
        line("handler started, per-second jobs", &self.per_second_start_ms);
        println!();
        println!("  fired {}, missed {}, doubled {}", grouped(self.fired as f64), self.missed, self.doubled);
        println!(
            "  scheduler: {:.2} cores, {:.0} MiB; {:.1} s to write the jobs",
            self.cpu_cores, self.rss_mib, self.apply_seconds
        );
        let parts: Vec<String> = self.cores.iter().map(|(part, cores)| format!("{part} {cores:.2}")).collect();
        println!("  cores: {}", parts.join(", "));
        if let Some(burst) = &self.burst {
            println!();
            println!(
                "  {} jobs due at once: recorded after {} ms, published after {} ms",
                grouped(burst.jobs as f64),
                burst.recorded_ms,
                burst.published_ms
            );
            line("per-second jobs beside it, fired", &burst.per_second_lateness_ms);
            line("per-second jobs beside it, start", &burst.per_second_start_ms);
        }
        for peer in &self.peers {
            println!();
            match &peer.absent {
                Some(why) => println!("  {}: {why}", peer.name),
                None => {
                    line(&peer.name, &peer.lateness_ms);
                    println!(
                        "  {:<34}{} jobs, fired {}, missed {}, {:.2} cores",
                        "", peer.jobs, peer.fired, peer.missed, peer.cpu_cores
                    );
                }
            }
        }
    }
}

/// Prints an answer as one JSON object.
///
/// # Errors
/// It can't be written as JSON.
pub fn json(answer: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(answer)?);
    Ok(())
}

fn grouped(n: f64) -> String {
    let digits = format!("{n:.0}");
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(c);
    }
    text
}

impl Throughput {
    /// For people.
    pub fn print(&self) {
        let Machine { processors, broker, ledger, optimised } = &self.machine;
        println!(
            "{} no-op shards, {} workers, everything on {processors} processors",
            grouped(self.shards as f64),
            self.workers
        );
        println!("{broker}, {ledger}");
        if !optimised {
            println!("built without optimisation: figures mean nothing; run with cargo run --release");
        }
        println!();
        println!("  end to end          {:>9} shards/s  in {:.1} s", grouped(self.shards_per_second), self.seconds);
        let ratio = |r: f64| format!("{:.0} % of it", r * 100.0);
        println!(
            "  RabbitMQ alone      {:>9} /s        {}",
            grouped(self.broker_ceiling_per_second),
            ratio(self.broker_ratio)
        );
        println!(
            "  the database alone  {:>9} /s        {}",
            grouped(self.ledger_ceiling_per_second),
            ratio(self.ledger_ratio)
        );
        println!(
            "  fire to start       p50 {:.0} ms, p99 {:.0} ms  ({} firings at a low rate)",
            self.fire_to_start_ms.p50, self.fire_to_start_ms.p99, self.fire_to_start_samples
        );
        println!("  trigger to decision {:.0} ms for the large execution", self.fire_ms);
        println!("  lost {}, recorded twice {}, failed {}", self.lost, self.recorded_twice, self.failed);
        println!();
        println!("  processor time per shard, µs");
        let total: f64 = self.cpu_us_per_shard.values().sum();
        for (part, us) in &self.cpu_us_per_shard {
            println!("    {part:<14}{us:>8.0}");
        }
        println!("    {:<14}{total:>8.0}", "all");
        if let Some(bound) = self.cpu_bound_per_second {
            println!("    bound by processors: {} shards/s", grouped(bound));
        }
        println!("  peak memory, MiB");
        for (process, mib) in &self.rss_mib {
            println!("    {process:<14}{mib:>8.1}");
        }
    }
}

impl WorkerKill {
    /// For people.
    pub fn print(&self) {
        println!("{} workers killed in {:.0} s (seed {})", self.kills, self.seconds, self.seed);
        println!("  {} executions with {} shards", grouped(self.executions as f64), grouped(self.shards as f64));
        println!("  {} shards taken over", grouped(self.taken_over as f64));
        println!("  lost {}, recorded twice {}, failed {}", self.lost, self.recorded_twice, self.failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: &impl Serialize) -> Vec<String> {
        let value = serde_json::to_value(value).unwrap();
        value.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn the_names_that_are_relied_on() {
        let throughput = fields(&Throughput::default());
        for name in [
            "shards_per_second",
            "broker_ceiling_per_second",
            "ledger_ceiling_per_second",
            "fire_to_start_ms",
            "rss_mib",
            "lost",
            "recorded_twice",
        ] {
            assert!(throughput.iter().any(|f| f == name), "{name} in {throughput:?}");
        }
        assert_eq!(fields(&Percentiles::default()), ["p50", "p99"]);
        let precision = fields(&Precision::default());
        for name in ["lateness_ms", "cpu_cores", "rss_mib", "fired", "missed", "doubled"] {
            assert!(precision.iter().any(|f| f == name), "{name} in {precision:?}");
        }
        assert_eq!(fields(&Lateness::default()), ["max", "p50", "p99"]);
        let worker_kill = fields(&WorkerKill::default());
        for name in ["kills", "taken_over", "lost", "recorded_twice", "seconds"] {
            assert!(worker_kill.iter().any(|f| f == name), "{name} in {worker_kill:?}");
        }
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        assert_eq!(Percentiles::of((1..=200).rev().collect()), Percentiles { p50: 100.0, p99: 198.0 });
        assert_eq!(Percentiles::of(vec![5]), Percentiles { p50: 5.0, p99: 5.0 });
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(1_234_567.4), "1,234,567");
        assert_eq!(grouped(999.0), "999");
    }
}
