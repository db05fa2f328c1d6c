//! What every scenario needs: services, the cluster on them, a way to trigger jobs and to watch executions, and a voice.

use crate::cluster::{Cluster, ClusterOptions, Role};
use crate::services::{ServiceArgs, Services};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use shardcron_broker::Broker;
use shardcron_broker::rabbitmq::{RabbitMq, RabbitOptions};
use shardcron_domain::firing::{DecisionKind, request_key};
use shardcron_domain::messages::TriggerRequest;
use shardcron_domain::{ExecutionId, JobId, jobfile};
use shardcron_store::sql::{SqlLedger, SqlOptions};
use shardcron_store::{ExecutionRow, Ledger};
use std::future::Future;
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The tier of all jobs here.
pub const TIER: &str = "core";
const READY_PATIENCE: Duration = Duration::from_secs(60);
const FIRE_PATIENCE: Duration = Duration::from_secs(30);
/// An execution that has not moved for this long is stuck; the oracle then says what is missing.
const STUCK_AFTER: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Runs a scenario.
///
/// # Errors
/// Those of the scenario.
pub fn run(scenario: impl Future<Output = Result<bool>>) -> Result<bool> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("the runtime")?;
    let result = runtime.block_on(scenario);
    runtime.shutdown_timeout(Duration::from_millis(500));
    result
}

/// Milliseconds UTC.
#[must_use]
pub fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

/// Tells a person how it goes: a bar on a terminal, lines elsewhere, nothing where a program reads the answer.
pub struct Voice {
    bar: ProgressBar,
    lines: bool,
}

impl Voice {
    /// `quiet`: say nothing but on a terminal.
    #[must_use]
    pub fn new(quiet: bool) -> Self {
        let drawn = std::io::stderr().is_terminal();
        let bar = if drawn { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        bar.enable_steady_tick(Duration::from_millis(120));
        Voice { bar, lines: !drawn && !quiet }
    }

    /// For what is one of many: the whole has the voice.
    #[must_use]
    pub fn silent() -> Self {
        Voice { bar: ProgressBar::hidden(), lines: false }
    }

    /// What is being done now.
    pub fn phase(&self, text: &str) {
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            self.bar.set_style(style);
        }
        self.bar.set_message(text.to_owned());
        if self.lines {
            eprintln!("{text}");
        }
    }

    /// A line that stays, whoever reads: what a failed run is repeated with.
    pub fn note(&self, text: &str) {
        // Nothing in here may ask the bar anything: it is locked meanwhile.
        self.bar.suspend(|| eprintln!("{text}"));
    }

    /// A line that stays, where lines are wanted or a person looks.
    pub fn line(&self, text: &str) {
        if self.lines {
            eprintln!("{text}");
        } else {
            self.bar.println(text);
        }
    }

    /// One more of what is counted.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// A bar over so many of `what`.
    pub fn count(&self, total: u64, what: &str) {
        let template = format!("{{msg}} [{{bar:40}}] {{human_pos}}/{{human_len}} {what}  {{per_sec}}  {{elapsed}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            self.bar.set_style(style.progress_chars("=> "));
        }
        self.bar.set_length(total);
        self.bar.reset();
    }

    /// Nothing more will be said.
    pub fn done(&self) {
        self.bar.finish_and_clear();
    }
}

/// A cluster under test, and the test's own connections to its services.
pub struct Session {
    /// The services.
    pub services: Services,
    /// The processes.
    pub cluster: Cluster,
    /// The ledger, through the store's code.
    pub ledger: SqlLedger,
    /// For triggers.
    pub broker: RabbitMq,
    /// For the person.
    pub voice: Voice,
}

impl Session {
    /// Starts the services and connects; no process of the program yet.
    ///
    /// # Errors
    /// A service does not start or does not answer.
    pub async fn open(args: ServiceArgs, options: ClusterOptions, voice: Voice) -> Result<Self> {
        let services = Services::start(args, |text| voice.phase(text)).await?;
        let ledger =
            SqlLedger::connect(&services.sql_url, SqlOptions { max_connections: 4, ..SqlOptions::default() }).await?;
        ledger.migrate().await.context("the ledger's tables")?;
        let name = format!("loadtest-{}", std::process::id());
        let named = RabbitOptions { prefix: services.prefix.clone(), name, ..RabbitOptions::default() };
        let broker = RabbitMq::connect(&services.amqp_url, named)?;
        let cluster = Cluster::new(&services, options)?;
        Ok(Session { services, cluster, ledger, broker, voice })
    }

    /// Takes a job file's jobs into the ledger.
    ///
    /// # Errors
    /// A fault in the file, or the ledger does not answer.
    pub async fn apply(&self, job_file: &str) -> Result<()> {
        let jobs: Vec<_> =
            jobfile::parse(job_file).context("the scenario's jobs")?.into_iter().map(|job| (job, None)).collect();
        self.ledger.apply_jobs(&jobs, "loadtest", now_ms()).await?;
        Ok(())
    }

    /// Starts processes and waits until one leads and all workers consume.
    ///
    /// # Errors
    /// A process ends, or they are not ready in time.
    pub async fn start(&mut self, schedulers: usize, workers: usize) -> Result<()> {
        self.voice.phase("starting schedulers and workers");
        for _ in 0..schedulers {
            self.cluster.start(Role::Scheduler)?;
        }
        for _ in 0..workers {
            self.cluster.start(Role::Worker)?;
        }
        let until = Instant::now() + READY_PATIENCE;
        loop {
            self.cluster.check()?;
            let leads = self.ledger.leadership().await.is_ok_and(|leader| leader.epoch.0 > 0);
            let consumers = self.broker.depth(TIER).await.map_or(0, |depth| depth.consumers);
            if leads && consumers as usize >= workers {
                return Ok(());
            }
            if Instant::now() >= until {
                let tail = self.cluster.tail_of("scheduler-1");
                bail!(
                    "not ready within {} s: led = {leads}, {consumers} consumers; the scheduler says:\n{tail}",
                    READY_PATIENCE.as_secs()
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The ledger's number of a job.
    ///
    /// # Errors
    /// There is no such job.
    pub async fn job(&self, name: &str) -> Result<JobId> {
        Ok(self.ledger.job(name).await?.with_context(|| format!("job {name} is not in the ledger"))?.id)
    }

    /// Sends a trigger; gives its request id.
    ///
    /// # Errors
    /// RabbitMQ does not take it.
    pub async fn send(&self, job: &str) -> Result<String> {
        let request_id = uuid::Uuid::now_v7().to_string();
        let request = TriggerRequest {
            job: job.into(),
            params: Default::default(),
            request_id: Some(request_id.clone()),
            ..TriggerRequest::default()
        };
        self.broker.send_trigger(&request).await.context("sending a trigger")?;
        Ok(request_id)
    }

    /// Sends a trigger and waits for its execution; gives that and the seconds until the decision was in the ledger.
    ///
    /// # Errors
    /// Nobody fires it.
    pub async fn fire(&self, job: &str) -> Result<(ExecutionId, f64)> {
        let id = self.job(job).await?;
        let began = Instant::now();
        let key = request_key(&self.send(job).await?);
        while began.elapsed() < FIRE_PATIENCE {
            let decision = self.ledger.decision(id, &key).await?;
            // One that waits (for its plan, or for the job) becomes another.
            if let Some(decision) = decision.filter(|d| d.kind != DecisionKind::Waiting) {
                let took = began.elapsed().as_secs_f64();
                return Ok((
                    decision.execution.with_context(|| format!("{job} did not fire: {:?}", decision.reason))?,
                    took,
                ));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        bail!("nobody fired {job} within {} s", FIRE_PATIENCE.as_secs())
    }

    /// Watches an execution to its end, or until it is stuck.
    ///
    /// # Errors
    /// A process ends by itself, or the ledger does not answer.
    pub async fn watch(&mut self, id: ExecutionId, what: &str) -> Result<ExecutionRow> {
        self.voice.phase(what);
        let (mut last, mut moved) = (0, Instant::now());
        let mut counted = false;
        loop {
            let row = self.ledger.execution(id).await?.context("the execution is not in the ledger")?;
            let ended = row.succeeded + row.failed + row.cancelled;
            if !std::mem::replace(&mut counted, true) {
                self.voice.count(row.shards_total.into(), "shards");
            }
            self.voice.bar.set_position(ended.into());
            if ended != last {
                (last, moved) = (ended, Instant::now());
            }
            if row.phase.is_terminal() || moved.elapsed() > STUCK_AFTER {
                return Ok(row);
            }
            self.cluster.check()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until no execution is active any more, or nothing has moved for a while.
    ///
    /// # Errors
    /// A process ends by itself, or the ledger does not answer.
    pub async fn settle(&mut self) -> Result<()> {
        let (mut last, mut moved) = (Vec::new(), Instant::now());
        loop {
            let active = self.ledger.active_executions().await?;
            if active.is_empty() || moved.elapsed() > STUCK_AFTER {
                return Ok(());
            }
            if active != last {
                (last, moved) = (active, Instant::now());
            }
            self.cluster.check()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Names and ids of everything that is ours.
    #[must_use]
    pub fn pids(&self) -> Vec<(String, u32)> {
        let mut pids = self.cluster.pids();
        pids.extend(self.services.pids());
        pids
    }

    /// Ends the processes in order and takes away what was made at services that go on.
    ///
    /// # Errors
    /// Something was left at a service.
    pub async fn close(self, tiers: &[&str]) -> Result<()> {
        self.voice.phase("stopping");
        self.cluster.stop().await;
        self.broker.close().await;
        let cleaned = self.services.clean_up(&tiers.iter().map(|tier| (*tier).to_owned()).collect::<Vec<_>>()).await;
        self.voice.done();
        cleaned
    }
}
