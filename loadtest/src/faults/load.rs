//! The load that the faults meet: jobs that fire each second in both tiers, longer shards that a worker always has in hand, an `sql`
//! execution that is always under way, and triggers now and then.

use crate::oracle::firings::Due;
use crate::oracle::rows_of;
use crate::session::now_ms;
use anyhow::{Context, Result};
use shardcron_broker::Broker;
use shardcron_broker::rabbitmq::{RabbitMq, RabbitOptions};
use shardcron_domain::firing::request_key;
use shardcron_domain::jobfile;
use shardcron_domain::messages::TriggerRequest;
use shardcron_store::Ledger;
use shardcron_store::sql::SqlLedger;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The jobs with a schedule, with their periods in milliseconds.
pub const PERIODIC: [(&str, i64); 3] = [("tick-core", 1_000), ("tick-bulk", 1_000), ("dwell", 2_000)];
/// Those whose shards are over at once: by them it is seen that work goes on.
pub const TICKS: [&str; 2] = ["tick-core", "tick-bulk"];
/// The tiers in use.
pub const TIERS: [&str; 2] = ["core", "bulk"];

/// Many tries: a shard may meet the fault several times, and that must not be what fails it. The longest wait for a retry is a second.
const JOB_FILE: &str = r#"
[job.tick-core]
schedule = { cron = "* * * * * *" }
shards   = { count = 4 }
handler  = { rust = "nap" }
overlap  = "allow"
misfire  = { policy = "fire_all", grace = "5m", limit = 300 }
retry    = { attempts = 1000, first = "50ms", factor = 2.0, max = "1s", jitter = 0.2 }

[job.tick-bulk]
schedule = { cron = "* * * * * *" }
shards   = { count = 3 }
handler  = { rust = "nap" }
tier     = "bulk"
overlap  = "allow"
misfire  = { policy = "fire_all", grace = "5m", limit = 300 }
retry    = { attempts = 1000, first = "50ms", factor = 2.0, max = "1s", jitter = 0.2 }

[job.dwell]
schedule = { cron = "*/2 * * * * *" }
shards   = { count = 9 }
handler  = { rust = "dwell" }
overlap  = "allow"
misfire  = { policy = "fire_all", grace = "5m", limit = 300 }
retry    = { attempts = 1000, first = "50ms", factor = 2.0, max = "1s", jitter = 0.2 }

[job.asked]
shards   = { count = 2 }
handler  = { rust = "nap" }
tier     = "bulk"
overlap  = "allow"
retry    = { attempts = 1000, first = "50ms", factor = 2.0, max = "1s", jitter = 0.2 }

[job.sum]
shards   = { range = { from = 1, to = 480 }, count = 6 }
handler  = { sql = "INSERT INTO effects (execution, n) SELECT :execution, n FROM numbers WHERE n BETWEEN :shard_from AND :shard_to AND SLEEP(0.02) = 0", chunk = 5 }
overlap  = "allow"
retry    = { attempts = 1000, first = "50ms", factor = 2.0, max = "1s", jitter = 0.2 }
"#;
const ASKED: &str = "asked";
const SUM: &str = "sum";
/// Rows that each execution of `sum` has to write, each once.
const SUM_ROWS: u64 = 480;
/// No key keeps a second effect out: that is what is counted.
const TABLES: &str = "\
CREATE TABLE numbers (n INT NOT NULL PRIMARY KEY) ENGINE=InnoDB; \
CREATE TABLE effects (execution VARCHAR(64) NOT NULL, n INT NOT NULL, KEY effects_execution (execution)) ENGINE=InnoDB";

const ASK_EVERY: Duration = Duration::from_millis(1_500);
const LOOK_EVERY: Duration = Duration::from_millis(250);
const SEND_PATIENCE: Duration = Duration::from_secs(3);
/// After this, a request that may have gone down with RabbitMQ's data is sent again, under its own id.
const RESEND_AFTER: Duration = Duration::from_secs(3);

/// Writes jobs and tables into a fresh ledger.
///
/// # Errors
/// The ledger does not answer.
pub async fn prepare(ledger: &SqlLedger) -> Result<()> {
    let numbers: Vec<String> = (1..=SUM_ROWS).map(|n| format!("({n})")).collect();
    let fill = format!("{TABLES}; INSERT INTO numbers (n) VALUES {}", numbers.join(","));
    ledger.execute_script(&fill).await.context("the tables of the load")?;
    let now = now_ms();
    let mut jobs = Vec::new();
    for job in jobfile::parse(JOB_FILE).context("the jobs of the load")? {
        let next = match &job.schedule {
            Some(schedule) => schedule.compile()?.next_after(now)?,
            None => None,
        };
        jobs.push((job, next));
    }
    ledger.apply_jobs(&jobs, "loadtest", now).await?;
    Ok(())
}

/// Stops the schedules; what is fired goes on.
///
/// # Errors
/// The ledger does not answer.
pub async fn pause(ledger: &SqlLedger) -> Result<()> {
    for (job, _) in PERIODIC {
        ledger.set_paused(job, Some("loadtest"), "loadtest", now_ms()).await?;
    }
    Ok(())
}

/// A trigger that was asked for.
struct Request {
    job: &'static str,
    id: String,
    /// When RabbitMQ confirmed it.
    taken: Option<Instant>,
    decided: bool,
}

/// Triggers that are sent as long as this lives.
pub struct Load {
    /// Until when to wait for what was asked; nothing new is asked for from then on.
    end: watch::Sender<Option<Instant>>,
    task: JoinHandle<Vec<Request>>,
}

impl Load {
    /// Begins. `forgetful`: RabbitMQ may lose what it has confirmed, and a request is repeated until it is decided.
    ///
    /// # Errors
    /// RabbitMQ's URL can't be used.
    pub fn start(ledger: SqlLedger, amqp_url: &str, prefix: &str, forgetful: bool) -> Result<Self> {
        let options =
            RabbitOptions { prefix: prefix.into(), name: "loadtest-triggers".into(), ..RabbitOptions::default() };
        let broker = RabbitMq::connect(amqp_url, options)?;
        let (end, ending) = watch::channel(None);
        let asking = Asking { ledger, broker, forgetful, requests: Vec::new() };
        Ok(Load { end, task: tokio::spawn(asking.run(ending)) })
    }

    /// Asks for nothing new, waits until all that was asked for is decided or `patience` is over, and says what was due.
    ///
    /// # Errors
    /// The task was ended.
    pub async fn finish(self, patience: Duration, (after_ms, until_ms): (i64, i64)) -> Result<Due> {
        // It looks at this value; that nobody hears it means that it has ended.
        let _ = self.end.send(Some(Instant::now() + patience));
        let requests = self.task.await.context("the sender of triggers")?;
        let requests = requests.into_iter().map(|r| (r.job, r.id)).collect();
        Ok(Due { periodic: PERIODIC.to_vec(), after_ms, until_ms, requests })
    }
}

struct Asking {
    ledger: SqlLedger,
    broker: RabbitMq,
    forgetful: bool,
    requests: Vec<Request>,
}

impl Asking {
    async fn run(mut self, ending: watch::Receiver<Option<Instant>>) -> Vec<Request> {
        let mut asked = Instant::now();
        loop {
            let end = *ending.borrow();
            if end.is_none() && (asked.elapsed() >= ASK_EVERY || self.requests.is_empty()) {
                asked = Instant::now();
                self.ask(ASKED);
            }
            if end.is_none() && self.sum_is_over().await {
                self.ask(SUM);
            }
            self.look().await;
            if end.is_some_and(|end| Instant::now() > end || self.requests.iter().all(|r| r.decided)) {
                self.broker.close().await;
                return self.requests;
            }
            self.send().await;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn ask(&mut self, job: &'static str) {
        let id = uuid::Uuid::now_v7().to_string();
        self.requests.push(Request { job, id, taken: None, decided: false });
    }

    /// Whether no `sum` is under way. While the ledger is away: not known, so no.
    async fn sum_is_over(&self) -> bool {
        if self.requests.iter().any(|r| r.job == SUM && !r.decided) {
            return false;
        }
        let sql =
            "SELECT COUNT(*) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name = 'sum' AND e.state = 0";
        rows_of(&self.ledger, sql, &[]).await.is_ok_and(|rows| rows.first().is_some_and(|row| row == &["0"]))
    }

    async fn look(&mut self) {
        for request in self.requests.iter_mut().filter(|r| !r.decided) {
            let Ok(Some(job)) = self.ledger.job(request.job).await else { return };
            let found = self.ledger.decision(job.id, &request_key(&request.id)).await;
            request.decided = matches!(found, Ok(Some(_)));
        }
    }

    async fn send(&mut self) {
        let forgetful = self.forgetful;
        let due = |r: &Request| match r.taken {
            None => true,
            Some(at) => forgetful && at.elapsed() > RESEND_AFTER,
        };
        for request in self.requests.iter_mut().filter(|r| !r.decided && due(r)) {
            let message = TriggerRequest {
                job: request.job.into(),
                params: Default::default(),
                request_id: Some(request.id.clone()),
                ..Default::default()
            };
            // Away or without an answer: asked again at the next look, under the same id.
            match tokio::time::timeout(SEND_PATIENCE, self.broker.send_trigger(&message)).await {
                Ok(Ok(())) => request.taken = Some(Instant::now()),
                _ => return,
            }
        }
    }
}

/// Effects of `sum` that are missing or there twice, each execution in words.
#[derive(Debug, Default)]
pub struct Effects {
    /// Rows that are missing.
    pub lost: u64,
    /// Rows that are there more than once.
    pub twice: u64,
    /// Where.
    pub words: Vec<String>,
}

/// Counts them over all executions that ended well.
///
/// # Errors
/// The ledger does not answer.
pub async fn effects(ledger: &SqlLedger) -> Result<Effects> {
    let ended =
        "SELECT LOWER(HEX(e.id)) FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name = 'sum' AND e.state = 1";
    let written = "SELECT REPLACE(execution, '-', ''), COUNT(*), COUNT(DISTINCT n) FROM effects GROUP BY execution";
    let mut by_execution = BTreeMap::new();
    for row in rows_of(ledger, written, &[]).await? {
        let number = |at: usize| row.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        by_execution.insert(row.first().cloned().unwrap_or_default(), (number(1), number(2)));
    }
    let mut found = Effects::default();
    for id in rows_of(ledger, ended, &[]).await?.into_iter().flatten() {
        let (rows, different) = by_execution.get(&id).copied().unwrap_or_default();
        if rows != SUM_ROWS || different != SUM_ROWS {
            found.lost += SUM_ROWS.saturating_sub(different);
            found.twice += rows - different;
            found.words.push(format!("sum {id}: {rows} effects, {different} different, {SUM_ROWS} due"));
        }
    }
    Ok(found)
}
