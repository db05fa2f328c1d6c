//! However a test process ends, its servers and folders go with it.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::{unique_prefix, wait_for, wait_until_some};

const BOUND: Duration = Duration::from_secs(60);

/// `testkit run` with a command that tells us what it was given and then waits.
fn run_until_told(folder: &std::path::Path) -> Result<Child> {
    let script = r#"{ env; echo "COMMAND_PID=$$"; } > "$1.tmp" && mv "$1.tmp" "$1"; exec sleep 600"#;
    let child = Command::new(env!("CARGO_BIN_EXE_testkit"))
        .args(["run", "--services", "redis,sql", "--", "sh", "-c", script, "sh"])
        .arg(folder.join("told"))
        // Its folders lie below this one, so that what it leaves behind can be seen.
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .spawn()?;
    Ok(child)
}

/// Redis's port and the command's process id.
fn told(folder: &std::path::Path, child: &mut Child) -> (u16, i32) {
    wait_until_some("the services", BOUND, || {
        assert!(matches!(child.try_wait(), Ok(None)), "testkit ended before its command ran");
        let told = std::fs::read_to_string(folder.join("told")).ok()?;
        let value = |name: &str| told.lines().find_map(|line| line.strip_prefix(name));
        let port = value("SHARDCRON_TEST_REDIS_URL=")?.rsplit_once(':')?.1.parse().ok()?;
        Some((port, value("COMMAND_PID=")?.parse().ok()?))
    })
}

fn listens(port: u16) -> bool {
    std::net::TcpStream::connect((std::net::Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn private_folders(folder: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("shardcron-test-")).count()
}

fn ends_with_nothing_left(signal: Signal) -> Result<Option<i32>> {
    let folder = tempfile::Builder::new().prefix(&unique_prefix()).tempdir()?;
    let mut child = run_until_told(folder.path())?;
    let (port, command) = told(folder.path(), &mut child);
    assert!(listens(port));
    assert_eq!(private_folders(folder.path()), 2, "one for each service");
    kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
    let status = child.wait()?;
    wait_for("the server to be gone", BOUND, || !listens(port));
    // After a SIGKILL the command goes on without us; a test runner would see its services gone.
    let _ = kill(Pid::from_raw(command), Signal::SIGKILL);
    wait_for("the folders to be gone", BOUND, || private_folders(folder.path()) == 0);
    Ok(status.code())
}

#[test]
fn after_a_termination() -> Result<()> {
    let code = ends_with_nothing_left(Signal::SIGTERM)?;
    assert_eq!(code, Some(128 + 15), "the command got the signal, and its end is passed on");
    Ok(())
}

#[test]
fn after_a_kill() -> Result<()> {
    assert_eq!(ends_with_nothing_left(Signal::SIGKILL)?, None);
    Ok(())
}

#[test]
fn the_exit_code_is_passed_on() -> Result<()> {
    let code = |arguments: &[&str]| -> Result<i32> {
        let output = Command::new(env!("CARGO_BIN_EXE_testkit")).args(arguments).stderr(Stdio::null()).output()?;
        output.status.code().context("an exit code")
    };
    assert_eq!(code(&["run", "--services", "", "--", "sh", "-c", "exit 7"])?, 7);
    assert_eq!(code(&["run", "--services", "", "--", "true"])?, 0);
    assert_eq!(code(&["run", "--services", "kafka", "--", "true"])?, 2);
    assert_eq!(code(&["run"])?, 2);
    Ok(())
}
