//! The processes that stay: scheduler, worker, or both.
//!
//! Three runtimes: a multi-thread one for all I/O and for the handlers that come with the program, another for users' own code, and
//! the actix system on the main thread for the actors.
//! Shutdown: the first SIGTERM or SIGINT drains; the second hands back what a worker still runs; the third ends at once, as the second
//! does where no worker runs.

use crate::allowed::Leftovers;
use crate::config::Config;
use crate::health;
use crate::stand_in::StandIn;
use crate::wiring::{self, Wired};
use anyhow::{Context, Result};
use shardcron_actors::guardian::OnFatal;
use shardcron_actors::worker::{PreloadKeys, Resolve};
use shardcron_actors::{Io, ledger_time};
use shardcron_actors::{Scheduler, SchedulerOptions, TierOptions, Worker, WorkerOptions};
use shardcron_handlers::{Callbacks, Cgroups, HandlerOptions, Handlers, HttpRules, ProgramRules};
use shardcron_sdk::Registry;
use shardcron_web::{CallbackDesk, PortsState, ProcessHealth, WebHandle, WebOptions};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// What a process is.
#[derive(Clone, Copy, Debug)]
pub struct Roles {
    /// It fires, hands out and supervises, if it leads.
    pub scheduler: bool,
    /// It runs shards.
    pub worker: bool,
}

/// The exit code for a process that gave itself up: its supervisor is to start it again (`EX_SOFTWARE`).
const GAVE_UP: i32 = 70;

/// Threads for users' own code at most. What waits and does not block shares them.
const HANDLER_THREADS_MAX: usize = 32;

/// Logs for a command that a person waits for: warnings only, plain, to standard error.
pub fn log_plainly() {
    let filter = EnvFilter::try_from_env("SHARDCRON_LOG").unwrap_or_else(|_| EnvFilter::new("warn,lapin=off"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .try_init();
}

fn log(config: &Config) -> Result<()> {
    let filter =
        EnvFilter::try_new(&config.log.filter).with_context(|| format!("log.filter = \"{}\"", config.log.filter))?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    match config.log.format.as_str() {
        "json" => lines.json().flatten_event(true).init(),
        _ => lines.with_ansi(ansi).with_target(false).init(),
    }
    Ok(())
}

/// Runs until a signal ends it.
pub fn serve(config: Config, roles: Roles, registry: Registry) -> Result<ExitCode> {
    log(&config)?;
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get()).clamp(2, 8);
    let io = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("shardcron-io")
        .enable_all()
        .build()
        .context("the I/O runtime")?;
    let handlers = handlers_runtime(&config, roles, threads)?;
    // First of all, so that nothing that is counted is lost.
    let metrics = shardcron_web::install_metrics(io.handle())?;
    shardcron_broker::metric_definitions::describe();
    let system = actix::System::new();
    let handles = (io.handle().clone(), handlers.handle().clone());
    let result = system.block_on(run(config, roles, registry, handles, metrics));
    // Code that blocks can't be ended but with the process, and must not keep it.
    handlers.shutdown_background();
    io.shutdown_timeout(Duration::from_secs(2));
    result.map(|()| ExitCode::SUCCESS)
}

/// As many threads as slots, within reason: a handler that blocks its thread then keeps no other handler waiting.
fn handlers_runtime(config: &Config, roles: Roles, threads: usize) -> Result<tokio::runtime::Runtime> {
    let slots = if roles.worker { config.worker.tiers.values().sum() } else { 1 };
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(slots.clamp(1, HANDLER_THREADS_MAX.max(threads)))
        .thread_name("shardcron-handler")
        .enable_all()
        .build()
        .context("the handlers' runtime")
}

async fn run(
    config: Config,
    roles: Roles,
    registry: Registry,
    (io, handlers): (tokio::runtime::Handle, tokio::runtime::Handle),
    metrics: metrics_exporter_prometheus::PrometheusHandle,
) -> Result<()> {
    let shutdown = CancellationToken::new();
    let hurry = CancellationToken::new();
    io.spawn(watch_signals(shutdown.clone(), roles.worker.then(|| hurry.clone())));
    let name = process_name(&config, roles);
    let prepare = {
        let config = config.clone();
        io.spawn(async move {
            let wired = wiring::connect(&config, &name).await?;
            if config.ledger.migrate {
                migrate(&wired).await?;
            }
            Ok::<_, anyhow::Error>(wired)
        })
    };
    let mut wired = tokio::select! {
        prepared = prepare => prepared.context("the start was interrupted")??,
        () = shutdown.cancelled() => return Ok(()),
    };
    wired.ports.handlers = Io::on(handlers);
    let first = wired.ports.clone();
    let _ = io.spawn(async move { ledger_time::measure(&first).await }).await;
    io.spawn(ledger_time::follow(wired.ports.clone()));
    let on_fatal = Arc::new(give_up());
    let (health_tx, health_rx) = watch::channel(ProcessHealth::default());
    let callbacks = roles.worker.then(|| Arc::new(Callbacks::default()));
    // Before anything leads or consumes: what is wrong in a worker's configuration ends the process here.
    let worker = match &callbacks {
        Some(callbacks) => Some(worker_options(&config, &wired, registry, callbacks.clone())?),
        None => None,
    };
    let web = start_web(&config, &wired, &io, (metrics, health_rx), callbacks).await?;
    let scheduler =
        roles.scheduler.then(|| Scheduler::start(wired.ports.clone(), scheduler_options(&config), on_fatal.clone()));
    let status = scheduler.as_ref().map(Scheduler::status);
    wired.follow_faults();
    io.spawn(health::report(wired.ports.broker.state(), wired.ports.modes.watch(), status, roles, health_tx));
    // A process that is a scheduler, too, needs no other.
    let stand_in = (roles.worker && !roles.scheduler && config.fallback.enabled).then(|| {
        let (options, name) = (scheduler_options(&config), process_name(&config, roles));
        let ends = (on_fatal.clone(), shutdown.clone());
        actix::spawn(StandIn::new(&config, name, wired.ports.clone(), options, ends).run())
    });
    if let Some(options) = worker {
        live(&config, &wired, options, on_fatal, (&shutdown, &hurry)).await?;
    } else {
        shutdown.cancelled().await;
    }
    if let Some(scheduler) = scheduler {
        scheduler.shut_down().await;
    }
    if let Some(stand_in) = stand_in {
        let _ = stand_in.await;
    }
    let broker = wired.ports.broker.clone();
    let _ = io.spawn(async move { broker.close().await }).await;
    if let Some(web) = web {
        let _ = io.spawn(web.shutdown()).await;
    }
    tracing::info!("ended");
    Ok(())
}

/// Keeps a worker alive through its incarnations until the shutdown, then drains it.
async fn live(
    config: &Config,
    wired: &Wired,
    options: WorkerOptions,
    on_fatal: Arc<OnFatal>,
    (shutdown, hurry): (&CancellationToken, &CancellationToken),
) -> Result<()> {
    loop {
        let start = Worker::start(wired.ports.clone(), options.clone(), on_fatal.clone());
        let mut worker = tokio::select! {
            started = start => started.context("the worker can't consume")?,
            () = shutdown.cancelled() => return Ok(()),
        };
        let status = worker.status();
        tracing::info!(worker = %options.name, worker_incarnation = %status.incarnation, tiers = ?config.worker.tiers, "worker runs");
        tokio::select! {
            end = worker.ended() => {
                tracing::warn!(?end, "this incarnation has ended; beginning another");
                worker.discard().await;
            }
            () = shutdown.cancelled() => {
                tracing::info!(running = status.running(), limit = %config.worker.drain, "draining");
                let drain = worker.drain(config.worker.drain.as_std(), hurry.clone());
                tokio::pin!(drain);
                // Handlers are told to stop at the limit and may take some seconds to do it; what is longer waits for the ledger.
                let patience = config.worker.drain.as_std() + Duration::from_secs(12);
                if tokio::time::timeout(patience, &mut drain).await.is_err() {
                    tracing::warn!("still waiting for the ledger to take what is finished; two more signals end at once, and others take the shards over");
                    drain.await;
                }
                return Ok(());
            }
        }
    }
}

/// Several processes may start at once; one migrates, the others wait. A ledger that goes away meanwhile is waited for.
async fn migrate(wired: &Wired) -> Result<()> {
    loop {
        match wired.ports.ledger.migrate().await {
            Ok(()) => return Ok(()),
            Err(e) if e.is_transient() => {
                tracing::warn!(error = %e, "the ledger's tables could not be looked at yet");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Err(e) => return Err(e).context("bringing the ledger's tables up to date"),
        }
    }
}

fn give_up() -> OnFatal {
    Box::new(|why| {
        tracing::error!(reason = %why, "giving this process up; its supervisor is to start it again");
        std::process::exit(GAVE_UP);
    })
}

/// `hurry`: what the second signal cancels in a process with a worker.
async fn watch_signals(shutdown: CancellationToken, hurry: Option<CancellationToken>) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("signals can't be received; end this process with SIGKILL");
        return;
    };
    let mut steps = vec![(shutdown, "shutting down; a second signal ends at once")];
    if let Some(hurry) = hurry {
        steps[0].1 = "shutting down; a second signal stops what runs and hands it back, a third ends at once";
        steps.push((hurry, "handing back what runs; another signal ends at once"));
    }
    for (step, words) in steps {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        tracing::info!("{words}");
        step.cancel();
    }
    tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    tracing::info!("ending at once");
    std::process::exit(1);
}

fn host() -> String {
    nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_else(|| "unknown-host".into())
}

fn process_name(config: &Config, roles: Roles) -> String {
    let configured = if roles.worker { &config.worker.name } else { &config.scheduler.name };
    configured.clone().unwrap_or_else(|| format!("{}-{}", host(), std::process::id()))
}

fn scheduler_options(config: &Config) -> SchedulerOptions {
    let name = config.scheduler.name.clone().unwrap_or_else(|| format!("{}-{}", host(), std::process::id()));
    SchedulerOptions {
        lease_ttl: config.scheduler.lease_ttl.as_std(),
        lost_after: config.worker.lost_after.as_std(),
        sweep_every: config.scheduler.sweep_every.as_std(),
        republish_after: config.scheduler.republish_after.as_std(),
        tiers: config.worker.tiers.keys().cloned().collect(),
        retention: config.retention.options(),
        ..SchedulerOptions::named(name)
    }
}

fn worker_options(
    config: &Config,
    wired: &Wired,
    registry: Registry,
    callbacks: Arc<Callbacks>,
) -> Result<WorkerOptions> {
    let mut options = HandlerOptions::new(wired.ports.ledger.clone(), registry)
        .allow_exec(config.worker.allow_exec.clone())
        .databases(config.databases.urls()?)
        .reader(wired.sql.clone());
    options.programs = ProgramRules {
        work_dir: config.worker.work_dir.clone(),
        pass_env: config.worker.pass_env.clone(),
        allow_users: config.worker.allow_users.clone(),
        limits: config.worker.limits,
        kill_leftovers: config.worker.leftovers == Leftovers::Kill,
        cgroups: cgroups(config)?,
    };
    options.calls = HttpRules {
        allow: config.worker.allow_http.clone(),
        secrets: config.worker.allow_secrets.clone(),
        authorities: config.worker.http_ca.clone(),
        callbacks,
    };
    options.calls.check().map_err(anyhow::Error::msg)?;
    let handlers = Handlers::new(options);
    let asked = handlers.clone();
    let preload_keys: PreloadKeys = Arc::new(move |query, context| {
        let handlers = asked.clone();
        Box::pin(async move { handlers.preload_keys(&query, &context).await })
    });
    let resolve: Resolve = Arc::new(move |spec| handlers.resolve(spec));
    Ok(WorkerOptions {
        name: config.worker.name.clone().unwrap_or_else(|| format!("{}-{}", host(), std::process::id())),
        host: host(),
        tiers: config
            .worker
            .tiers
            .iter()
            .map(|(name, n)| TierOptions { name: name.clone(), concurrency: *n })
            .collect(),
        lost_after: config.worker.lost_after.as_std(),
        ack_horizon: config.worker.ack_horizon.as_std(),
        resolve,
        preload_keys: Some(preload_keys),
        caches: shardcron_actors::worker::caches(config.cache.options(), wired.cache.clone()),
    })
}

/// Where programs get cgroups, if this worker runs any.
fn cgroups(config: &Config) -> Result<Option<Cgroups>> {
    if config.worker.allow_exec.is_empty() {
        return Ok(None);
    }
    let found = Cgroups::look(&config.worker.cgroup).map_err(anyhow::Error::msg)?;
    if let Some(cgroups) = &found {
        tracing::info!(cgroups = cgroups.describe(), "programs get cgroups");
    }
    Ok(found)
}

/// The handlers' side of the web server's door.
struct Desk(Arc<Callbacks>);

impl CallbackDesk for Desk {
    fn admit(&self, token: &str) -> Result<usize, (u16, String)> {
        self.0.admit(token).map_err(|refused| (refused.status, refused.sentence))
    }

    fn take(&self, token: &str, kind: &str, body: &[u8]) -> (u16, String) {
        let reply = self.0.take(token, kind, body);
        (reply.status, reply.sentence)
    }
}

/// Where services reach this process. On all addresses it listens as its host's name.
fn reached_at(config: &Config, listens: SocketAddr) -> String {
    match (&config.worker.callback_url, listens.ip().is_unspecified()) {
        (Some(url), _) => url.clone(),
        (None, true) => format!("http://{}:{}", host(), listens.port()),
        (None, false) => format!("http://{listens}"),
    }
}

async fn start_web(
    config: &Config,
    wired: &Wired,
    io: &tokio::runtime::Handle,
    (metrics, own): (metrics_exporter_prometheus::PrometheusHandle, watch::Receiver<ProcessHealth>),
    callbacks: Option<Arc<Callbacks>>,
) -> Result<Option<WebHandle>> {
    let web = listen(config, wired, io, (metrics, own), callbacks.clone()).await?;
    if let (Some(web), Some(callbacks)) = (&web, callbacks) {
        callbacks.reached_at(&reached_at(config, web.local_addr()));
    }
    Ok(web)
}

async fn listen(
    config: &Config,
    wired: &Wired,
    io: &tokio::runtime::Handle,
    (metrics, own): (metrics_exporter_prometheus::PrometheusHandle, watch::Receiver<ProcessHealth>),
    callbacks: Option<Arc<Callbacks>>,
) -> Result<Option<WebHandle>> {
    let (listen, asked_for) = match config.http.listen.as_deref() {
        Some("off") => return Ok(None),
        Some(text) => (
            text.parse::<SocketAddr>()
                .with_context(|| format!("http.listen = \"{text}\" is not written like 127.0.0.1:8081"))?,
            true,
        ),
        None => (SocketAddr::from(([127, 0, 0, 1], 8081)), false),
    };
    let mut state = PortsState::new(wired.ports.ledger.clone(), wired.ports.presence.clone(), own);
    if wired.redis.is_some() {
        state = state.presence_optional();
    }
    let state = Arc::new(state);
    let mut options = WebOptions::new(listen);
    options.token = config.http.token.clone();
    options.lost_after = config.worker.lost_after.as_std();
    options.metrics = Some(metrics);
    options.callbacks = callbacks.map(|callbacks| Arc::new(Desk(callbacks)) as Arc<dyn CallbackDesk>);
    let first = io.spawn(shardcron_web::serve(options.clone(), state.clone())).await.context("the web server")?;
    match first {
        Ok(web) => Ok(Some(web)),
        Err(e) if asked_for => Err(e.into()),
        Err(e) => {
            // Several processes on one machine is the normal case of a try-out: the default port is the first one's.
            tracing::info!(reason = %e, "taking another port for health and metrics");
            options.listen.set_port(0);
            Ok(Some(io.spawn(shardcron_web::serve(options, state)).await.context("the web server")??))
        }
    }
}
