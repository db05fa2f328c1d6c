//! The wires: each process reaches each service by a relay of its own, so that any link, or all links of a process or a service,
//! can be cut, stalled or slowed down.

use super::matrix::{Cell, Fault, Part};
use crate::services::Services;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use testkit::Relay;

/// Each byte is late by this, each way.
const LATE: Duration = Duration::from_millis(100);

/// A service, as the end of a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// RabbitMQ
    RabbitMq,
    /// Redis
    Redis,
    /// The ledger
    MySql,
}

const ENDS: [End; 3] = [End::RabbitMq, End::Redis, End::MySql];

/// Which wires a fault is on.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Of this process only; `None`: of all.
    pub process: Option<String>,
    /// To these services.
    pub ends: Vec<End>,
}

impl Reach {
    /// The wires of a cell whose victim is `process`.
    pub fn of(cell: Cell, process: Option<&str>) -> Self {
        let ends = match (cell.part, cell.fault) {
            (Part::RabbitMq, _) | (_, Fault::CutRabbitMq) => vec![End::RabbitMq],
            (Part::Redis, _) | (_, Fault::CutRedis) => vec![End::Redis],
            (Part::MySql, _) | (_, Fault::CutMySql) => vec![End::MySql],
            _ => ENDS.to_vec(),
        };
        Reach { process: process.map(str::to_owned), ends }
    }

    fn has(&self, (process, end): &(String, End)) -> bool {
        self.ends.contains(end) && self.process.as_ref().is_none_or(|name| name == process)
    }
}

/// All wires of a cluster. Clones are the same wires.
#[derive(Clone)]
pub struct Links {
    urls: Arc<BTreeMap<End, (String, u16)>>,
    relays: Arc<Mutex<BTreeMap<(String, End), Relay>>>,
}

impl Links {
    /// No wire yet.
    ///
    /// # Errors
    /// A service's URL names no port.
    pub fn new(services: &Services) -> Result<Self> {
        let with_port = |end, url: &str| Ok((end, (url.to_owned(), port_of(url)?)));
        let urls = [
            with_port(End::RabbitMq, &services.amqp_url),
            with_port(End::Redis, &services.redis_url),
            with_port(End::MySql, &services.sql_url),
        ];
        let urls = urls.into_iter().collect::<Result<_>>()?;
        Ok(Links { urls: Arc::new(urls), relays: Arc::default() })
    }

    /// The port of a service itself.
    pub fn port(&self, end: End) -> u16 {
        self.urls.get(&end).map_or(0, |(_, port)| *port)
    }

    /// Lays the wires of a process; gives the variables that lead it to them.
    ///
    /// # Errors
    /// No port is free.
    pub fn join(&self, process: &str) -> Result<Vec<(&'static str, String)>> {
        let mut variables = Vec::new();
        for (end, (url, port)) in self.urls.iter() {
            let variable = match end {
                End::RabbitMq => "SHARDCRON_BROKER_URL",
                End::Redis => "SHARDCRON_REDIS_URL",
                End::MySql => "SHARDCRON_LEDGER_URL",
            };
            let relay = Relay::start(*port).with_context(|| format!("a wire for {process}"))?;
            variables.push((variable, relay.url(url)));
            self.relays().insert((process.to_owned(), *end), relay);
        }
        Ok(variables)
    }

    /// Closes all connections, and refuses new ones.
    pub fn cut(&self, reach: &Reach) {
        self.each(reach, |relay| {
            relay.cut();
            Ok(())
        })
        // Cutting can't fail.
        .unwrap_or_default();
    }

    /// Makes every byte late.
    pub fn slow(&self, reach: &Reach) {
        self.each(reach, |relay| {
            relay.delay(LATE);
            Ok(())
        })
        .unwrap_or_default();
    }

    /// Lets nothing through, and closes nothing.
    pub fn stall(&self, reach: &Reach) {
        self.each(reach, |relay| {
            relay.stall();
            Ok(())
        })
        .unwrap_or_default();
    }

    /// As before any fault.
    ///
    /// # Errors
    /// A port was taken meanwhile.
    pub fn heal(&self, reach: &Reach) -> Result<()> {
        self.each(reach, Relay::heal)
    }

    fn each(&self, reach: &Reach, mut act: impl FnMut(&mut Relay) -> Result<()>) -> Result<()> {
        self.relays().iter_mut().filter(|(wire, _)| reach.has(wire)).try_for_each(|(_, relay)| act(relay))
    }

    fn relays(&self) -> MutexGuard<'_, BTreeMap<(String, End), Relay>> {
        self.relays.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn port_of(url: &str) -> Result<u16> {
    let place = url.split_once("://").map_or(url, |(_, rest)| rest);
    let place = place.split(['/', '?']).next().unwrap_or_default();
    let port = place.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.context("a service's URL has to name its port")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_port_behind_a_password() {
        assert_eq!(port_of("amqp://me:p:1@127.0.0.1:5672/%2f").unwrap(), 5672);
        assert_eq!(port_of("redis://127.0.0.1:6379").unwrap(), 6379);
        assert!(port_of("redis://localhost").is_err());
    }

    #[test]
    fn a_fault_is_on_the_wires_of_its_cell() {
        let wire = |process: &str, end| (process.to_owned(), end);
        let cell = |name: &str| name.parse::<Cell>().unwrap();
        let one = Reach::of(cell("worker/cut-redis"), Some("worker-2"));
        assert!(one.has(&wire("worker-2", End::Redis)));
        assert!(!one.has(&wire("worker-2", End::MySql)) && !one.has(&wire("worker-1", End::Redis)));
        let host = Reach::of(cell("leader/cut"), Some("scheduler-1"));
        assert!(ENDS.iter().all(|end| host.has(&wire("scheduler-1", *end))));
        let service = Reach::of(cell("mysql/slow"), None);
        assert!(service.has(&wire("worker-1", End::MySql)) && service.has(&wire("scheduler-2", End::MySql)));
        assert!(!service.has(&wire("worker-1", End::RabbitMq)));
    }
}
