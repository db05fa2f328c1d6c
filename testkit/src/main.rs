//! `testkit run [--services rabbitmq,redis,sql] -- COMMAND…`: one set of services for a whole command.
//!
//! Test runners give each test a process of its own; starting RabbitMQ for each would take most of the time.

use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use testkit::shared::{AMQP_URL, MANAGEMENT_URL, REDIS_URL, SQL_URL};
use testkit::{RabbitMq, Redis, Sql};

const USAGE: &str = "usage: testkit run [--services rabbitmq,redis,sql] -- COMMAND [ARGUMENT]…";
const SIGNALS: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (services, command) = match parse(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("testkit: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&services, command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("testkit: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: &[String]) -> Result<(Vec<&str>, &[String])> {
    let (services, rest) = match arguments {
        [run, option, list, rest @ ..] if run == "run" && option == "--services" => {
            (list.split(',').filter(|name| !name.is_empty()).collect(), rest)
        }
        [run, rest @ ..] if run == "run" => (vec!["rabbitmq", "redis", "sql"], rest),
        _ => bail!("what should be done?"),
    };
    if let Some(unknown) = services.iter().find(|name| !["rabbitmq", "redis", "sql"].contains(name)) {
        bail!("unknown service '{unknown}'");
    }
    let command = match rest {
        [dashes, command @ ..] if dashes == "--" => command,
        command => command,
    };
    if command.is_empty() {
        bail!("no command is given");
    }
    Ok((services, command))
}

fn run(services: &[&str], command: &[String]) -> Result<u8> {
    let started = Instant::now();
    let wanted = |name: &str| services.contains(&name);
    let (rabbitmq, redis, sql) = thread::scope(|scope| {
        let rabbitmq = scope.spawn(|| wanted("rabbitmq").then(RabbitMq::start).transpose());
        let redis = scope.spawn(|| wanted("redis").then(Redis::start).transpose());
        let sql = scope.spawn(|| wanted("sql").then(Sql::start).transpose());
        (rabbitmq.join(), redis.join(), sql.join())
    });
    let died = |_| anyhow!("a starting thread panicked");
    let rabbitmq = rabbitmq.map_err(died)?.context("RabbitMQ")?;
    let redis = redis.map_err(died)?.context("Redis")?;
    let sql = sql.map_err(died)?.context("the SQL server")?;
    eprintln!("testkit: {} ready after {:.1} s", services.join(", "), started.elapsed().as_secs_f32());

    let [program, arguments @ ..] = command else { bail!("no command is given") };
    let mut child = Command::new(program);
    child.args(arguments);
    if let Some(rabbitmq) = &rabbitmq {
        child.env(AMQP_URL, rabbitmq.amqp_url()).env(MANAGEMENT_URL, rabbitmq.management_url_with_login());
    }
    if let Some(redis) = &redis {
        child.env(REDIS_URL, redis.url());
    }
    if let Some(sql) = &sql {
        child.env(SQL_URL, sql.url());
    }
    let mut child = child.spawn().with_context(|| format!("starting {program}"))?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    // Blocked from here on and taken one by one: a signal must end the services, too, not only us. Not earlier, because the
    // command and the services inherit the mask; until here the watchdog clears up after us.
    let signals: SigSet = SIGNALS.into_iter().collect();
    signals.thread_block()?;
    // Ends with the process: waiting for a signal is all it does.
    thread::spawn(move || forward(signals, pid));
    let status = child.wait()?;
    // A shell's convention for a command that a signal ended.
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    Ok(u8::try_from(code).unwrap_or(1))
}

fn forward(signals: SigSet, child: Pid) {
    while let Ok(signal) = signals.wait() {
        // A terminal sends its signals to the command itself; a second one would make a test runner give up at once.
        let from_terminal = matches!(signal, Signal::SIGINT | Signal::SIGQUIT) && std::io::stdin().is_terminal();
        if !from_terminal {
            // It may have just ended.
            let _ = kill(child, signal);
        }
    }
}
