//! `shardcron doctor`: reaches each service, says its version, and checks what must hold.

use super::Misuse;
use crate::config::Config;
use crate::output::{Out, line};
use crate::wiring::{self, Wired};
use anyhow::Result;
use serde::Serialize;
use shardcron_broker::{Broker, BrokerError, BrokerState};
use shardcron_domain::address::masked;
use shardcron_domain::fallback;
use shardcron_domain::modes::Mode;
use shardcron_handlers::{Cgroups, HttpRules};
use shardcron_store::SeenWorker;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// One line of the report.
#[derive(Serialize)]
struct Check {
    what: String,
    ok: bool,
    detail: String,
}

const PATIENCE: Duration = Duration::from_secs(5);

/// Checks everything that the configuration names.
pub async fn run(config: Config, out: Out) -> Result<ExitCode> {
    let mut checks = Vec::new();
    match tokio::time::timeout(PATIENCE, wiring::connect(&config, "shardcron-doctor")).await {
        Ok(Ok(wired)) => {
            ledger(&wired, &config, &mut checks).await;
            redis(&wired, &config, &mut checks).await;
            broker(&wired, &config, &mut checks).await;
            cluster(&wired, &config, &mut checks).await;
            checks.extend(programs(&config));
            checks.extend(authorities(&config));
            databases(&config, &mut checks).await;
            wired.ports.broker.close().await;
        }
        Ok(Err(e)) => checks.push(bad("configuration", format!("{e:#}"))),
        Err(_) => checks.push(bad(
            "ledger",
            format!(
                "{} does not answer within {} s; is it up, and is ledger.url right?",
                masked(&config.ledger.url),
                PATIENCE.as_secs()
            ),
        )),
    }
    if checks.is_empty() {
        return Err(Misuse("nothing is configured".into()).into());
    }
    let well = checks.iter().all(|c| c.ok);
    out.answer(&checks, || {
        let width = checks.iter().map(|c| c.what.len()).max().unwrap_or(0);
        for check in &checks {
            line(&format!("{} {:width$}  {}", if check.ok { "ok  " } else { "BAD " }, check.what, check.detail));
        }
    });
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn good(what: &str, detail: String) -> Check {
    Check { what: what.into(), ok: true, detail }
}

fn bad(what: &str, detail: String) -> Check {
    Check { what: what.into(), ok: false, detail }
}

/// What this machine gives to programs, if it were a worker with this configuration.
fn programs(config: &Config) -> Vec<Check> {
    let worker = &config.worker;
    if worker.allow_exec.is_empty() {
        return Vec::new();
    }
    let mut checks = Vec::new();
    match std::path::Path::new("/bin/sh").exists() {
        true => {
            checks.push(cgroups(&worker.cgroup));
        }
        false => checks.push(bad("programs", "there is no /bin/sh, which sets the limits of jobs; install one".into())),
    }
    if !std::path::Path::new("/proc/self/environ").exists() {
        checks.push(bad(
            "programs",
            "there is no /proc: processes that leave their program's group are not found".into(),
        ));
    }
    if !worker.allow_users.is_empty() && !nix::unistd::Uid::effective().is_root() {
        let users = worker.allow_users.join(", ");
        checks.push(bad(
            "programs",
            format!("allow_users = {users} needs a worker that runs as root, and this user is not"),
        ));
    }
    checks
}

/// The certificates that `http` handlers trust beside the machine's own.
fn authorities(config: &Config) -> Option<Check> {
    let file = config.worker.http_ca.clone()?;
    let found = format!("{} is trusted beside the machine's own certificates", file.display());
    let rules = HttpRules { authorities: Some(file), ..HttpRules::default() };
    Some(rules.check().map_or_else(|why| bad("services", why), |()| good("services", found)))
}

/// Which of the two ways of limiting programs holds here.
fn cgroups(setting: &str) -> Check {
    let each = "open files and processor time are limited for each process, by setrlimit";
    match Cgroups::look(setting) {
        Ok(Some(found)) if found.controllers().memory => good("programs", format!("{}; {each}", found.describe())),
        Ok(Some(found)) => good("programs", format!("{}; memory, {each}", found.describe())),
        Ok(None) => {
            let why = if setting == "off" { "are switched off" } else { "were not found" };
            good(
                "programs",
                format!("memory, {each}; cgroups {why} (worker.cgroup), so cpu_percent and processes can't be limited"),
            )
        }
        Err(why) => bad("programs", why),
    }
}

async fn ledger(wired: &Wired, config: &Config, checks: &mut Vec<Check>) {
    let ledger = &wired.ports.ledger;
    match ledger.server_version().await {
        Ok(version) => checks.push(good("ledger", format!("{} ({version})", masked(&config.ledger.url)))),
        Err(e) => return checks.push(bad("ledger", e.to_string())),
    }
    match ledger.check_server().await {
        Ok(faults) => checks.extend(faults.into_iter().map(|f| bad("ledger", f))),
        Err(e) => checks.push(bad("ledger", e.to_string())),
    }
}

/// The databases of jobs that run here, as this process reaches them: a worker elsewhere may have others under the same names.
async fn databases(config: &Config, checks: &mut Vec<Check>) {
    for name in config.databases.names() {
        let what = format!("databases.{name}");
        let url = match config.databases.url(name, |key| std::env::var(key).ok()) {
            Ok(url) => url,
            Err(why) => {
                checks.push(bad(&what, format!("{why:#}")));
                continue;
            }
        };
        let version = tokio::time::timeout(PATIENCE, wiring::version_of(&url)).await;
        let shown = masked(&url);
        checks.push(match version {
            Ok(Ok(version)) => good(&what, format!("{shown} ({version})")),
            Ok(Err(why)) => bad(&what, format!("{shown} is not reachable ({why}); is it up, and is its URL right?")),
            Err(_) => bad(
                &what,
                format!("{shown} does not answer within {} s; is it up, and is its URL right?", PATIENCE.as_secs()),
            ),
        });
    }
}

async fn redis(wired: &Wired, config: &Config, checks: &mut Vec<Check>) {
    let (Some(stores), Some(url)) = (&wired.redis, &config.redis.url) else {
        return checks.push(good("redis", "not configured: lease and presence are rows in the ledger".into()));
    };
    match stores.server_version().await {
        Ok(version) => checks.push(good("redis", format!("{} ({version})", masked(url)))),
        Err(e) => {
            let meanwhile = Mode::RedisAway.what_goes_on();
            return checks.push(bad("redis", format!("{e}; is it up, and is redis.url right? Meanwhile {meanwhile}")));
        }
    }
    match stores.check_server().await {
        Ok(faults) => checks.extend(faults.into_iter().map(|f| bad("redis", f))),
        Err(e) => checks.push(bad("redis", e.to_string())),
    }
}

async fn broker(wired: &Wired, config: &Config, checks: &mut Vec<Check>) {
    let Some(url) = &config.broker.url else {
        return checks.push(good("broker", "not configured: workers poll the ledger".into()));
    };
    let broker: &dyn Broker = &*wired.ports.broker;
    let tiers: Vec<String> = config.worker.tiers.keys().cloned().collect();
    let answer = tokio::time::timeout(PATIENCE, async {
        loop {
            // The connection is made in the background; a refusal is an answer, being away is not one yet.
            match broker.server_version().await {
                Ok(version) => return version,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;
    match answer {
        Ok(version) => checks.push(good("broker", format!("{} ({version})", masked(url)))),
        Err(_) => {
            let why = match &*broker.state().borrow() {
                BrokerState::Up => "it does not say its version".to_owned(),
                BrokerState::Blocked(why) | BrokerState::Away(why) => why.clone(),
            };
            return checks.push(bad(
                "broker",
                format!("{} is not reachable ({why}); is it up, and is broker.url right?", masked(url)),
            ));
        }
    }
    match broker.declare(&tiers).await {
        Ok(()) => checks.push(good("broker", format!("queues of {} are as they must be", tiers.join(", ")))),
        Err(e @ BrokerError::Unavailable(_)) => checks.push(bad(
            "broker",
            format!("{e}. The server answers and one of its queues does not: docs/errors/queue-silent.md"),
        )),
        Err(e) => checks.push(bad("broker", e.to_string())),
    }
}

async fn cluster(wired: &Wired, config: &Config, checks: &mut Vec<Check>) {
    match wired.ports.ledger.leadership().await {
        Ok(leader) if leader.epoch.0 > 0 => {
            let since = shardcron_domain::units::rfc3339(leader.since_ms);
            checks.push(good(
                "leader",
                format!(
                    "epoch {}, begun by {} at {since}; /healthz of a scheduler says whether it leads now",
                    leader.epoch, leader.holder
                ),
            ));
        }
        Ok(_) => checks.push(good("leader", "no scheduler has led yet; start one with: shardcron scheduler".into())),
        Err(e) => checks.push(bad("leader", e.to_string())),
    }
    match wired.ports.presence.workers().await {
        Ok(workers) => {
            let lost_after_ms = config.worker.lost_after.as_ms();
            let alive: Vec<_> = workers.iter().filter(|w| w.age_ms <= lost_after_ms).collect();
            let none = if alive.is_empty() { "; start one with: shardcron worker" } else { "" };
            checks.push(good("workers", format!("{} alive{none}", alive.len())));
            checks.extend(modes(&alive));
        }
        Err(e) => checks.push(bad("workers", e.to_string())),
    }
    match wired.fallback_rows().await {
        Ok(holder) => {
            let by = holder.map_or("nobody holds it now".to_owned(), |holder| match fallback::is_stand_in(&holder) {
                true => format!("held by {holder}, a worker that stands in until a scheduler leads"),
                false => format!("held by {holder}"),
            });
            checks.push(good("lease", format!("the ledger's row is there; {by}")));
        }
        Err(e) => checks.push(bad("lease", format!("the ledger's rows for lease and presence can't be read: {e}"))),
    }
}

/// The degraded modes that workers say they are in: one line for each mode.
fn modes(alive: &[&SeenWorker]) -> Vec<Check> {
    let mut in_mode: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for worker in alive {
        for mode in &worker.beat.modes {
            in_mode.entry(mode).or_default().push(&worker.beat.name);
        }
    }
    in_mode
        .into_iter()
        .map(|(mode, mut workers)| {
            workers.sort_unstable();
            let goes_on = Mode::from_name(mode).map_or("a mode of a later version", Mode::what_goes_on);
            bad("degraded", format!("{mode}, say {}: {goes_on}", workers.join(", ")))
        })
        .collect()
}
