//! What processes and services hold over time, and whether it stays flat.

use crate::procfs::{self, Held};
use crate::services::Services;
use crate::session::Session;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// A life is judged from its second sample on (it has connected to everything), and only if it has this many more.
const SAMPLES_MIN: usize = 6;

/// How much more the last third of a series may hold than the first: a part of it, and a number beside that. The parts are for
/// what is really in use at a moment and differs from one to the next; a leak goes on and passes any of them.
#[derive(Clone, Copy)]
struct Allowance {
    part: f64,
    beside: f64,
}

/// Memory: an allocator keeps what a burst has needed once.
const MEMORY: Allowance = Allowance { part: 0.25, beside: 8.0 };
/// Handles: a pool of database connections grows to 8 and shrinks; a wire that reconnects has two for a moment.
const HANDLES: Allowance = Allowance { part: 0.2, beside: 8.0 };
/// Threads: the runtime starts threads for blocking calls, and ends them.
const THREADS: Allowance = Allowance { part: 0.2, beside: 4.0 };
/// Connections and channels of all processes together at one service.
const CONNECTIONS: Allowance = Allowance { part: 0.2, beside: 8.0 };

/// One quantity over time.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<f64>);

/// What is said of it.
#[derive(Clone, Debug, Serialize)]
pub struct Said {
    /// The median of the first third of the samples.
    first: f64,
    /// The median of the last third.
    last: f64,
    /// Of all.
    max: f64,
    samples: usize,
    /// Whether `last` is within the allowance over `first`; true where there are too few samples to say.
    flat: bool,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

impl Said {
    /// For people.
    pub fn words(&self) -> String {
        let verdict = if self.flat { "" } else { "  GROWS" };
        format!(
            "first {:>7.1}  last {:>7.1}  max {:>7.1}  ({} samples){verdict}",
            self.first, self.last, self.max, self.samples
        )
    }
}

impl Series {
    fn say(&self, allowance: Allowance) -> Said {
        let counted = if self.0.len() > 1 { &self.0[1..] } else { &self.0[..] };
        let third = (counted.len() / 3).max(1).min(counted.len());
        let first = median(&counted[..third]);
        let last = median(&counted[counted.len() - third..]);
        let enough = counted.len() >= SAMPLES_MIN;
        Said {
            first: tenths(first),
            last: tenths(last),
            max: tenths(self.0.iter().copied().fold(0.0, f64::max)),
            samples: self.0.len(),
            flat: !enough || last <= first * (1.0 + allowance.part) + allowance.beside,
        }
    }
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// All series of a soak. A process that is killed and replaced has another name, and so another series.
#[derive(Debug, Default)]
pub struct Resources {
    processes: BTreeMap<String, [Series; 3]>,
    services: BTreeMap<&'static str, Series>,
}

/// Everything that is said.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By service and quantity.
    pub services: BTreeMap<&'static str, Said>,
    /// By process life and quantity.
    pub processes: BTreeMap<String, Life>,
    /// All of it.
    pub flat: bool,
    /// Lives that were long enough to be judged.
    pub lives_judged: usize,
}

/// A process life.
#[derive(Debug, Serialize)]
pub struct Life {
    /// Resident memory.
    pub rss_mib: Said,
    /// File handles.
    pub handles: Said,
    /// Threads.
    pub threads: Said,
}

impl Resources {
    /// Takes one sample of everything, at a moment without a fault.
    ///
    /// # Errors
    /// A service does not answer.
    pub async fn sample(&mut self, session: &Session) -> Result<()> {
        for (name, pid) in session.cluster.pids() {
            let Some(Held { rss_mib, handles, threads }) = procfs::held(pid) else { continue };
            let life = self.processes.entry(name).or_default();
            for (series, value) in life.iter_mut().zip([rss_mib, handles, threads]) {
                series.0.push(value);
            }
        }
        let sql = session.ledger.query("SHOW GLOBAL STATUS LIKE 'Threads_connected'", &[]).await;
        let sql = sql.context("the database's count of connections")?;
        let sql = match sql.first().and_then(|row| row.get(1)) {
            Some(shardcron_store::SqlArg::Text(text)) => text.parse().context("the database's count of connections")?,
            Some(shardcron_store::SqlArg::Int(n)) => *n as f64,
            other => anyhow::bail!("the database's count of connections reads {other:?}"),
        };
        self.services.entry("mysql_connections").or_default().0.push(sql);
        for (name, value) in of_services(&session.services)? {
            self.services.entry(name).or_default().0.push(value);
        }
        Ok(())
    }

    /// What there is to say.
    pub fn report(&self) -> Report {
        let services: BTreeMap<_, _> = self.services.iter().map(|(name, s)| (*name, s.say(CONNECTIONS))).collect();
        let life = |[rss, handles, threads]: &[Series; 3]| Life {
            rss_mib: rss.say(MEMORY),
            handles: handles.say(HANDLES),
            threads: threads.say(THREADS),
        };
        let processes: BTreeMap<_, _> = self.processes.iter().map(|(name, all)| (name.clone(), life(all))).collect();
        let flat = services.values().all(|said| said.flat)
            && processes.values().all(|life| life.rss_mib.flat && life.handles.flat && life.threads.flat);
        let lives_judged = processes.values().filter(|life| life.rss_mib.samples > SAMPLES_MIN).count();
        Report { services, processes, flat, lives_judged }
    }
}

/// Connections and channels at RabbitMQ, connections at Redis.
fn of_services(services: &Services) -> Result<Vec<(&'static str, f64)>> {
    let rabbitmq = services.rabbitmq.as_ref().context("RabbitMQ is not ours")?;
    let redis = services.redis.as_ref().context("Redis is not ours")?;
    let count = |what: &str| -> Result<f64> {
        let list = rabbitmq.management().call("GET", what, None)?;
        Ok(list.as_array().map_or(0, Vec::len) as f64)
    };
    let clients = redis.command(&["INFO", "clients"])?;
    let clients = clients.lines().find_map(|line| line.strip_prefix("connected_clients:"));
    let clients = clients.and_then(|n| n.trim().parse().ok()).context("Redis's count of connections")?;
    Ok(vec![
        ("rabbitmq_connections", count("connections")?),
        ("rabbitmq_channels", count("channels")?),
        ("redis_connections", clients),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(values: impl IntoIterator<Item = f64>, allowance: Allowance) -> Said {
        Series(values.into_iter().collect()).say(allowance)
    }

    #[test]
    fn what_goes_up_and_down_is_flat_and_what_grows_is_not() {
        let wave = (0..60).map(|n| 40.0 + f64::from(n % 5));
        assert!(said(wave, MEMORY).flat);
        let leak = (0..60).map(|n| 40.0 + f64::from(n));
        let leak = said(leak, MEMORY);
        assert!(!leak.flat && leak.last > leak.first, "{leak:?}");
        let handles = (0..60).map(|n| 30.0 + f64::from(n) / 2.0);
        assert!(!said(handles, HANDLES).flat);
        assert!(said([1.0, 900.0, 900.0], MEMORY).flat, "too little to say");
        assert!(said([], MEMORY).flat);
    }

    #[test]
    fn one_peak_is_no_growth() {
        let mut peak = vec![40.0; 30];
        peak[20] = 400.0;
        let peak = said(peak, MEMORY);
        assert!(peak.flat && (peak.max - 400.0).abs() < 0.1, "{peak:?}");
    }
}
