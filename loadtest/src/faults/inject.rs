//! Putting a fault on its victim, and taking it off again.

use super::links::{End, Links, Reach};
use super::matrix::{Cell, Fault, Part, Rule};
use crate::cluster::Role;
use crate::oracle::rows_of;
use crate::services::Services;
use crate::session::{Session, now_ms};
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use shardcron_store::{Ledger, SqlArg};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};
use testkit::{RabbitMq, Redis, Sql};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const LOOK_EVERY: Duration = Duration::from_millis(20);
const VICTIM_PATIENCE: Duration = Duration::from_secs(20);
/// A network that is slow also stands still for this long.
const STALL: Duration = Duration::from_secs(2);
/// A service that says nothing within this time: its start has failed, and says why.
const ANSWER_PATIENCE: Duration = Duration::from_secs(120);

/// A shard that the victim had in hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The execution's id in hexadecimal digits.
    pub execution: String,
    /// The shard.
    pub index: i64,
    /// The attempt that was in hand.
    pub attempt: i64,
}

/// What was done, and when.
#[derive(Clone, Debug, Default)]
pub struct Injected {
    /// When the fault began, milliseconds UTC.
    pub at_ms: i64,
    /// When it was over: a service answered again, a wire was whole, a process was woken or replaced.
    pub back_ms: i64,
    /// The process, if the fault was on one of ours.
    pub victim: Option<String>,
    /// The incarnations that the victim has had until then, in hexadecimal digits.
    pub incarnations: Vec<String>,
    /// What it had in hand.
    pub held: Vec<Held>,
}

/// A fault that is on.
pub struct Active {
    cell: Cell,
    reach: Reach,
    /// So far.
    pub injected: Injected,
}

/// Chooses the victim and puts the fault on it.
///
/// # Errors
/// There is no victim, or it can't be reached.
pub async fn strike(session: &mut Session, links: &Links, cell: Cell) -> Result<Active> {
    let victim = match cell.part {
        Part::Leader => Some(leader(session).await?),
        Part::Worker => Some(busiest_worker(session).await?),
        _ => None,
    };
    let reach = Reach::of(cell, victim.as_deref());
    let mut injected = Injected { victim: victim.clone(), ..Injected::default() };
    injected.at_ms = now_ms();
    match (cell.fault, &victim) {
        (Fault::Killed, Some(name)) => session.cluster.kill(name)?,
        (Fault::Frozen, Some(name)) => session.cluster.signal(name, Signal::SIGSTOP)?,
        (Fault::Killed | Fault::Wiped, None) => with_service(&mut session.services, cell.part, |s| s.kill()).await?,
        (Fault::Frozen, None) => with_service(&mut session.services, cell.part, |s| s.freeze()).await?,
        (Fault::Slow, _) => links.slow(&reach),
        (Fault::Wiped, Some(_)) => bail!("{cell} is not a cell"),
        (Fault::Cut | Fault::CutRabbitMq | Fault::CutRedis | Fault::CutMySql, _) => blocking_cut(links, &reach).await?,
    }
    if let (Part::Worker, Some(name)) = (cell.part, &victim) {
        injected.incarnations = session.cluster.incarnations(name);
        injected.held = held(session, &injected.incarnations).await?;
    }
    Ok(Active { cell, reach, injected })
}

impl Active {
    /// Lets the fault last; a slow network also stands still in the middle of it.
    ///
    /// # Errors
    /// A process ends by itself.
    pub async fn last(&self, session: &mut Session, links: &Links, rule: &Rule) -> Result<()> {
        if self.cell.fault == Fault::Slow {
            let part = rule.lasts.saturating_sub(STALL) / 2;
            watch(session, part).await?;
            links.stall(&self.reach);
            watch(session, STALL).await?;
            links.heal(&self.reach)?;
            links.slow(&self.reach);
            return watch(session, part).await;
        }
        watch(session, rule.lasts).await
    }

    /// Takes it off.
    ///
    /// # Errors
    /// What was stopped does not start again.
    pub async fn heal(&mut self, session: &mut Session, links: &Links) -> Result<()> {
        self.injected.back_ms = match (self.cell.fault, &self.injected.victim) {
            (Fault::Killed, Some(_)) => {
                let role = if self.cell.part == Part::Leader { Role::Scheduler } else { Role::Worker };
                session.cluster.start(role)?;
                now_ms()
            }
            (Fault::Frozen, Some(name)) => {
                // Before the signal: the woken process may be faster than this one, and what it ends then is late.
                let woken = now_ms();
                session.cluster.signal(name, Signal::SIGCONT)?;
                woken
            }
            (Fault::Frozen, None) => {
                with_service(&mut session.services, self.cell.part, |s| s.thaw()).await?;
                now_ms()
            }
            (Fault::Killed | Fault::Wiped, None) => {
                let end = end_of(self.cell.part)?;
                let wiped = self.cell.fault == Fault::Wiped;
                let up = with_service(&mut session.services, self.cell.part, move |s| {
                    if wiped { s.restart_wiped() } else { s.restart() }
                });
                let (up, answered) = tokio::join!(up, first_answer(end, links.port(end)));
                up?;
                answered
            }
            _ => {
                links.heal(&self.reach)?;
                now_ms()
            }
        };
        Ok(())
    }
}

/// Waits, and looks whether all processes live.
async fn watch(session: &mut Session, time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        session.cluster.check()?;
        tokio::time::sleep(LOOK_EVERY.min(until.saturating_duration_since(Instant::now()))).await;
    }
    Ok(())
}

async fn blocking_cut(links: &Links, reach: &Reach) -> Result<()> {
    let (links, reach) = (links.clone(), reach.clone());
    tokio::task::spawn_blocking(move || links.cut(&reach)).await.context("cutting")
}

/// When the service says its first word: earlier than what the test kit waits for, and what everybody's reconnecting can see.
async fn first_answer(end: End, port: u16) -> i64 {
    let until = Instant::now() + ANSWER_PATIENCE;
    while Instant::now() < until {
        if let Ok(Ok(())) = tokio::time::timeout(ANSWER_PATIENCE, answers(end, port)).await {
            break;
        }
        tokio::time::sleep(LOOK_EVERY / 4).await;
    }
    now_ms()
}

/// A database greets by itself; RabbitMQ answers to its protocol's header, Redis to a command.
async fn answers(end: End, port: u16) -> std::io::Result<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    match end {
        End::RabbitMq => stream.write_all(b"AMQP\x00\x00\x09\x01").await?,
        End::Redis => stream.write_all(b"PING\r\n").await?,
        End::MySql => {}
    }
    stream.read_exact(&mut [0]).await.map(drop)
}

/// The leader, once the one that the ledger names is among those that run.
async fn leader(session: &mut Session) -> Result<String> {
    let until = Instant::now() + VICTIM_PATIENCE;
    while Instant::now() < until {
        session.cluster.check()?;
        let holder = session.ledger.leadership().await?.holder;
        let name = holder.split('/').next().unwrap_or_default().to_owned();
        if session.cluster.names(Role::Scheduler).contains(&name) {
            return Ok(name);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!("no scheduler led within {} s", VICTIM_PATIENCE.as_secs())
}

/// The worker with the most shards in hand, at a moment at which it has some of `dwell`, which are deaf and last.
async fn busiest_worker(session: &mut Session) -> Result<String> {
    let sql = "SELECT HEX(s.owner), SUM(CASE WHEN j.name = 'dwell' THEN 1 ELSE 0 END), COUNT(*) FROM shards s \
               JOIN executions e ON e.id = s.execution_id JOIN jobs j ON j.id = e.job_id \
               WHERE s.state = 1 GROUP BY s.owner ORDER BY 2 DESC, 3 DESC";
    let until = Instant::now() + VICTIM_PATIENCE;
    while Instant::now() < until {
        session.cluster.check()?;
        let rows = rows_of(&session.ledger, sql, &[]).await?;
        let busiest = rows.into_iter().find(|row| row.get(1).is_some_and(|n| n.as_str() >= "2" || n.len() > 1));
        if let Some(owner) = busiest.and_then(|row| row.into_iter().next()) {
            let names = session.cluster.names(Role::Worker);
            if let Some(name) = names.into_iter().find(|name| session.cluster.incarnations(name).contains(&owner)) {
                return Ok(name);
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!("no worker had shards in hand within {} s", VICTIM_PATIENCE.as_secs())
}

async fn held(session: &Session, incarnations: &[String]) -> Result<Vec<Held>> {
    let sql = "SELECT HEX(execution_id), shard_index, attempt FROM shards WHERE state = 1 AND HEX(owner) = ?";
    let mut held = Vec::new();
    for owner in incarnations {
        for row in rows_of(&session.ledger, sql, &[SqlArg::Text(owner.clone())]).await? {
            if let [execution, index, attempt] = row.as_slice() {
                held.push(Held { execution: execution.clone(), index: index.parse()?, attempt: attempt.parse()? });
            }
        }
    }
    Ok(held)
}

fn end_of(part: Part) -> Result<End> {
    match part {
        Part::RabbitMq => Ok(End::RabbitMq),
        Part::Redis => Ok(End::Redis),
        Part::MySql => Ok(End::MySql),
        Part::Leader | Part::Worker => bail!("{part} is no service"),
    }
}

/// A service under a fault, whichever it is.
trait Service {
    fn kill(&mut self) -> Result<()>;
    fn freeze(&mut self) -> Result<()>;
    fn thaw(&mut self) -> Result<()>;
    fn restart(&mut self) -> Result<()>;
    fn restart_wiped(&mut self) -> Result<()>;
}

macro_rules! service {
    ($kind:ty, $wiped:expr) => {
        impl Service for $kind {
            fn kill(&mut self) -> Result<()> {
                <$kind>::kill(self)
            }
            fn freeze(&mut self) -> Result<()> {
                <$kind>::freeze(self)
            }
            fn thaw(&mut self) -> Result<()> {
                <$kind>::thaw(self)
            }
            fn restart(&mut self) -> Result<()> {
                <$kind>::restart(self)
            }
            fn restart_wiped(&mut self) -> Result<()> {
                $wiped(self)
            }
        }
    };
}
service!(RabbitMq, RabbitMq::restart_wiped);
service!(Redis, Redis::restart_wiped);
service!(Sql, |_: &mut Sql| bail!("the ledger is never wiped: it is the truth"));

/// The test kit waits in the calling thread, so this is done in a thread for that.
async fn with_service(
    services: &mut Services,
    part: Part,
    act: impl FnOnce(&mut dyn Service) -> Result<()> + Send + 'static,
) -> Result<()> {
    async fn run<T: Service + Send + 'static>(
        slot: &mut Option<T>,
        act: impl FnOnce(&mut dyn Service) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut service = slot.take().context("a service that was not started for this run can't be harmed")?;
        let (service, done) = tokio::task::spawn_blocking(move || {
            let done = act(&mut service);
            (service, done)
        })
        .await
        .context("the thread that handles the service")?;
        *slot = Some(service);
        done
    }
    match part {
        Part::RabbitMq => run(&mut services.rabbitmq, act).await,
        Part::Redis => run(&mut services.redis, act).await,
        Part::MySql => run(&mut services.sql, act).await,
        Part::Leader | Part::Worker => bail!("{part} is no service"),
    }
}
