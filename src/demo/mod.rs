//! `shardcron demo`: the main job on real input, in separate processes, with one of them killed in the middle.

mod children;
pub mod data;
mod report;
mod watch;

use crate::config::Config;
use crate::output::{Out, draws, number};
use crate::{commands, wiring};
use anyhow::{Context, Result, bail};
use children::{Children, Role};
use clap::Args;
use shardcron_domain::firing::request_key;
use shardcron_domain::messages::TriggerRequest;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const JOB: &str = "reconcile-flights";
const JOB_FILE: &str = include_str!("../../examples/reconcile-flights/job.toml");

/// What can be said.
#[derive(Args)]
pub struct DemoArgs {
    /// Keep the ledger and the processes' logs in this folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run on the RabbitMQ, Redis and MySQL of the configuration, with two schedulers, and kill the leader, too
    #[arg(long)]
    cluster: bool,
    /// Kill nobody
    #[arg(long)]
    calm: bool,
}

/// Runs it. Exit code 0 only if every figure matches the published ones.
pub fn run(args: &DemoArgs, config: &Config, out: Out) -> Result<ExitCode> {
    let temporary = if args.keep.is_none() { Some(tempfile::tempdir().context("a temporary folder")?) } else { None };
    let dir = match (&args.keep, &temporary) {
        (Some(dir), _) => {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
            dir.clone()
        }
        (None, Some(temporary)) => temporary.path().to_owned(),
        (None, None) => bail!("no folder"),
    };
    let config = if args.cluster { cluster_config(config)? } else { embedded_config(config, &dir) };
    commands::run(demo(args, config, dir, out))
}

/// Without any service: SQLite in the folder, lease and presence in its rows, the ledger polled. Short times, because it is a show.
fn embedded_config(config: &Config, dir: &std::path::Path) -> Config {
    let mut config = config.clone();
    config.ledger.url = format!("sqlite://{}", dir.join("shardcron.db").display());
    config.broker.url = None;
    config.redis.url = None;
    config
}

fn cluster_config(config: &Config) -> Result<Config> {
    if config.broker.url.is_none() || config.redis.url.is_none() || !config.ledger.url.starts_with("mysql") {
        return Err(commands::Misuse(
            "--cluster needs ledger.url = \"mysql://…\", broker.url and redis.url, in shardcron.toml or as SHARDCRON_LEDGER_URL, \
             SHARDCRON_BROKER_URL and SHARDCRON_REDIS_URL"
                .into(),
        )
        .into());
    }
    Ok(config.clone())
}

async fn demo(args: &DemoArgs, config: Config, dir: PathBuf, out: Out) -> Result<ExitCode> {
    let began = Instant::now();
    let say = |text: String| {
        if !out.json {
            eprintln!("{text}");
        }
    };
    let wired = wiring::connect(&config, "shardcron-demo").await?;
    crate::wiring::migrate(&*wired.ports.ledger).await.context("the ledger's tables")?;
    say("Shardcron demo: every flight that left New York City in 2013, matched against the aircraft register."
        .to_owned());
    let loaded = data::load(&wired.sql).await.context("loading the example's data")?;
    say(format!(
        "  loaded   {} flights and {} planes into {} in {:.1} s",
        number(loaded.flights),
        number(loaded.planes),
        wired.sql.dialect_name(),
        began.elapsed().as_secs_f64()
    ));
    let jobs = shardcron_domain::jobfile::parse(JOB_FILE).context("the example's job file")?;
    let jobs = commands::jobs::with_next(jobs, commands::now_ms())?;
    wired.ports.ledger.apply_jobs(&jobs, "demo", commands::now_ms()).await?;

    let mut children = Children::new(&dir, &config);
    let schedulers = if args.cluster { 2 } else { 1 };
    for n in 1..=schedulers {
        children.start(Role::Scheduler, &format!("scheduler-{n}"))?;
    }
    for n in 1..=3 {
        children.start(Role::Worker, &format!("worker-{n}"))?;
    }
    say(format!(
        "  started  {schedulers} scheduler{} and 3 workers as processes",
        if schedulers == 1 { "" } else { "s" }
    ));

    let Some(job) = wired.ports.ledger.job(JOB).await? else { bail!("the job is not in the ledger") };
    let request_id = uuid::Uuid::now_v7().to_string();
    let request = TriggerRequest {
        job: JOB.into(),
        params: Default::default(),
        request_id: Some(request_id.clone()),
        ..TriggerRequest::default()
    };
    commands::trigger::send(&wired, &request, Duration::from_secs(15)).await?;
    let key = request_key(&request_id);
    let decision = commands::trigger::wait_for_decision(&wired, job.id, &key, Duration::from_secs(30)).await?;
    let execution = match decision {
        Some(d) => match d.execution {
            Some(execution) if d.kind == shardcron_domain::firing::DecisionKind::Fired => execution,
            _ => bail!("the job did not fire: {}", d.reason.unwrap_or_default()),
        },
        None => bail!("no scheduler fired the job within 30 s; its log: {}", children.log_of("scheduler-1").display()),
    };
    let fired = Instant::now();
    let mut show = watch::Show::new(&wired, execution, draws() && !out.json, !out.json);
    show.run(&mut children, &watch::Faults { worker: !args.calm, leader: args.cluster && !args.calm }).await?;
    let report = report::Report::collect(&wired, execution, fired.elapsed(), show.killed()).await?;
    children.stop_all().await;
    out.answer(&report, || report.print(args, &config, &dir));
    Ok(if report.all_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
