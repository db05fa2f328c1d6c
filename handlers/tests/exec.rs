//! The exec handler with real programs.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::limits::{ERROR_BYTES, RESULT_BYTES};
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{ExecLimits, HandlerOptions, Handlers};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANGE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };

fn options() -> HandlerOptions {
    let owner = TestContext::new(RANGE).context().owner;
    HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default()).allow_exec(["sh"])
}

fn exec(argv: &[&str]) -> HandlerSpec {
    HandlerSpec::exec(argv.iter().copied())
}

async fn run_in(options: HandlerOptions, argv: &[&str], test: &TestContext) -> Result<ShardOutput, ShardError> {
    Handlers::new(options).resolve(&exec(argv))?.run(test.context()).await
}

async fn sh(script: &str, test: &TestContext) -> Result<ShardOutput, ShardError> {
    run_in(options(), &["sh", "-c", script], test).await
}

fn field(output: &ShardOutput, name: &str) -> Value {
    output.summary.as_ref().unwrap()[name].clone()
}

/// A process that is gone, or a corpse that nobody in this test has to wait for.
fn is_gone(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH) || matches!(state, Some('Z' | 'X'))
}

/// Whether it is gone within a second: a signal is delivered when the kernel gets to it.
async fn goes_away(pid: i32) -> bool {
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        if is_gone(pid) {
            return true;
        }
        tokio::task::yield_now().await;
    }
    is_gone(pid)
}

fn pid_in(path: &Path) -> i32 {
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Waits until the program has written its file.
async fn written(path: &Path) {
    while !std::fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n')) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn x_01_a_timeout_ends_the_whole_group() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let test = TestContext::new(RANGE).timeout(Duration::from_millis(500));
    let begin = Instant::now();
    let error =
        sh(&format!("echo said; sleep 300 & echo $! > {}; sleep 300", file.display()), &test).await.unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_eq!((error.class, error.stopped), (FailureClass::Timeout, false));
    assert!(error.message.contains("SIGTERM") && error.message.contains("last on stdout: said"), "{error}");
    assert!(goes_away(pid_in(&file)).await, "the grandchild is gone");
}

#[tokio::test]
async fn x_01_a_grandchild_in_its_own_session_does_not_hold_the_worker() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let test = TestContext::new(RANGE).timeout(Duration::from_millis(700));
    let begin = Instant::now();
    let script = format!("(setsid sh -c 'echo $$ > {}; exec sleep 300') & echo hi; wait", file.display());
    let error = sh(&script, &test).await.unwrap_err();
    let elapsed = begin.elapsed();
    let leftover = pid_in(&file);
    let _ = killpg(Pid::from_raw(leftover), Signal::SIGKILL);
    assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
    assert_eq!(error.class, FailureClass::Timeout);
    assert!(error.message.contains("last on stdout: hi"), "what it said is kept: {error}");
    assert!(error.message.contains("left the group"), "the leftover is reported: {error}");
}

#[tokio::test]
async fn a_daemon_left_behind_by_a_success_is_reported_or_ended() {
    let test = TestContext::new(RANGE);
    let begin = Instant::now();
    let output = sh("sleep 300 & echo $!", &test).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(3));
    let pid: i32 = field(&output, "stdout").as_str().unwrap().trim().parse().unwrap();
    assert!(goes_away(pid).await, "what stays in the group ends with the attempt");
    assert_eq!(field(&output, "left_open"), false);
}

#[tokio::test]
async fn a_program_that_ignores_sigterm_is_killed_after_the_grace() {
    let mut options = options();
    options.exec = ExecLimits { term_grace: Duration::from_millis(200), ..ExecLimits::default() };
    let test = TestContext::new(RANGE).timeout(Duration::from_millis(300));
    let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let error = run_in(options, &["sh", "-c", script], &test).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Timeout);
    assert!(error.message.contains("SIGKILL"), "{error}");
}

#[tokio::test]
async fn a_stop_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let test = TestContext::new(RANGE);
    let script = format!("echo $$ > {}; exec sleep 300", file.display());
    let (outcome, ()) = tokio::join!(sh(&script, &test), async {
        written(&file).await;
        test.stop();
    });
    assert!(outcome.unwrap_err().stopped);
    assert!(goes_away(pid_in(&file)).await);
}

#[tokio::test]
async fn an_aborted_task_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let script = format!("sleep 300 & echo $! > {0}; echo $$ >> {0}; wait", file.display());
    let test = TestContext::new(RANGE);
    let task = tokio::spawn(async move { sh(&script, &test).await });
    while std::fs::read_to_string(&file).unwrap_or_default().lines().count() < 2 {
        tokio::task::yield_now().await;
    }
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    for pid in std::fs::read_to_string(&file).unwrap().lines() {
        assert!(goes_away(pid.parse().unwrap()).await, "{pid}");
    }
}

#[tokio::test]
async fn x_03_stdin_is_empty_and_never_waits() {
    let test = TestContext::new(RANGE);
    let mut cat = options();
    cat.allow_exec.push("cat".into());
    let output = run_in(cat, &["cat"], &test).await.unwrap();
    assert_eq!(field(&output, "stdout"), "");
    assert_eq!(field(&sh("read x; echo done", &test).await.unwrap(), "stdout"), "done\n");
}

#[tokio::test]
async fn z_03_arguments_are_passed_as_they_are() {
    let evil = ["; touch /tmp/pwn", "$(id)", "--output=/etc/x", "two\nlines", "`id`", "*", "", "--"];
    let script = "for a; do printf '%s|' \"$a\"; done";
    let mut argv = vec!["sh", "-c", script, "sh"];
    argv.extend(evil);
    let test = TestContext::new(RANGE);
    let output = run_in(options(), &argv, &test).await.unwrap();
    assert_eq!(field(&output, "stdout"), evil.map(|a| format!("{a}|")).concat());
    let nul = run_in(options(), &["sh", "-c", "echo \0"], &test).await.unwrap_err();
    assert!(nul.class == FailureClass::Permanent && nul.message.contains("NUL"), "{nul}");
}

/// A variable can't hold a NUL: a shard that would be one is refused for good, in a sentence. As JSON it is text like any other.
#[tokio::test]
async fn z_03_a_nul_in_the_data_is_refused_or_escaped() {
    let nul = "a\0b".to_owned();
    for slice in [
        ShardSlice::Task { number: 0, payload: nul.clone().into() },
        ShardSlice::Part { item: nul.clone(), part: 0, parts: 1 },
        ShardSlice::Keys { from: nul.clone(), before: None },
    ] {
        let refused = sh("true", &TestContext::new(slice.clone())).await.unwrap_err();
        assert!(refused.class == FailureClass::Permanent && refused.message.contains("a NUL"), "{slice:?}: {refused}");
    }
    let test = TestContext::new(ShardSlice::List { items: vec![nul.clone()] }).param("nul", nul.clone());
    let output =
        sh("printf '%s\\n' \"$SHARDCRON_SLICE\" \"$SHARDCRON_PARAMS\"; cat $SHARDCRON_INPUT", &test).await.unwrap();
    let text = field(&output, "stdout").as_str().unwrap().to_owned();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["list"]["items"][0], &lines[1]["nul"]), (&nul.clone().into(), &nul.clone().into()));
    assert_eq!(
        (&lines[2]["slice"]["list"]["items"][0], &lines[2]["params"]["nul"]),
        (&nul.clone().into(), &nul.into())
    );
}

#[tokio::test]
async fn z_03_the_environment_is_the_allow_list_and_the_shards_own() {
    let test = TestContext::new(RANGE).param("LD_PRELOAD", "/tmp/evil.so").param("q", "$(id)");
    let mut options = options();
    options.allow_exec.push("env".into());
    let output = run_in(options, &["env"], &test).await.unwrap();
    let stdout = field(&output, "stdout");
    let all: Vec<(&str, &str)> = stdout.as_str().unwrap().lines().filter_map(|line| line.split_once('=')).collect();
    let inherited = ["PATH", "HOME", "LANG", "TZ"];
    assert!(all.iter().all(|(name, _)| name.starts_with("SHARDCRON_") || inherited.contains(name)), "{all:?}");
    let value = |name: &str| all.iter().find(|(n, _)| *n == format!("SHARDCRON_{name}")).map(|(_, v)| *v);
    let execution = "00000000-0000-0000-0000-000000000001";
    assert_eq!(value("JOB"), Some("test"));
    assert_eq!(value("EXECUTION"), Some(execution));
    assert_eq!((value("SHARD_INDEX"), value("SHARDS_TOTAL"), value("ATTEMPT")), (Some("0"), Some("1"), Some("1")));
    assert_eq!((value("SHARD_FROM"), value("SHARD_TO")), (Some("5"), Some("9")));
    assert_eq!(value("IDEMPOTENCY_KEY"), Some(format!("{execution}/0").as_str()));
    assert_eq!(value("SLICE"), Some("{\"range\":{\"from\":5,\"to\":9}}"));
    assert_eq!(value("PARAMS"), Some("{\"LD_PRELOAD\":\"/tmp/evil.so\",\"q\":\"$(id)\"}"));
    assert_eq!((value("NOMINAL"), value("CHECKPOINT")), (Some("1970-01-01T00:00:00Z"), None));
}

#[tokio::test]
async fn b_09_any_output_becomes_text() {
    let test = TestContext::new(RANGE);
    let script = r"printf '\000\377\376\303\050'; printf '\360\237\233\253'; printf '\033[31mred\033[0m'";
    let output = sh(script, &test).await.unwrap();
    let text = "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}(\u{1F6EB}\u{1b}[31mred\u{1b}[0m";
    assert_eq!(field(&output, "stdout"), text);
    let json = output.summary.unwrap().to_string();
    assert!(serde_json::from_str::<Value>(&json).is_ok());
}

#[tokio::test]
async fn b_02_large_output_is_cut_and_the_exit_is_real() {
    let test = TestContext::new(RANGE);
    for (name, source) in
        [("zeros", "head -c 5000000 /dev/zero"), ("escapes", "head -c 5000000 /dev/zero | tr '\\0' '\\033'")]
    {
        let output = sh(&format!("echo first; {source}; echo; echo last; {source} >&2"), &test).await.unwrap();
        assert_eq!(field(&output, "truncated"), true, "{name}");
        assert_eq!(field(&output, "stdout_bytes"), 5_000_012, "{name}");
        let stdout = field(&output, "stdout");
        let stdout = stdout.as_str().unwrap();
        assert!(stdout.starts_with("first\n") && stdout.ends_with("last\n") && stdout.contains("bytes cut"), "{name}");
        let json = output.summary.unwrap().to_string();
        assert!(json.len() <= RESULT_BYTES, "{name}: {}", json.len());
    }
    let error = sh("head -c 5000000 /dev/zero >&2; echo the reason >&2; exit 3", &test).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Transient);
    assert!(error.message.contains("exit code 3") && error.message.ends_with("the reason"), "{}", error.message.len());
    assert!(error.message.len() <= ERROR_BYTES);
}

#[tokio::test]
async fn bad_ends_say_which() {
    let test = TestContext::new(RANGE);
    let killed = sh("kill -9 $$", &test).await.unwrap_err();
    assert!(killed.message.contains("killed by SIGKILL"), "{killed}");
    let plain = tempfile::NamedTempFile::new().unwrap();
    let plain = plain.path().to_str().unwrap();
    let mut options = options().allow_exec(["no-such-program-anywhere", "sh", plain]);
    let missing = run_in(options.clone(), &["no-such-program-anywhere"], &test).await.unwrap_err();
    assert!(missing.class == FailureClass::Permanent && missing.message.contains("install it"), "{missing}");
    let not_executable = run_in(options.clone(), &[plain], &test).await.unwrap_err();
    assert!(not_executable.message.contains("chmod +x"), "{not_executable}");
    options.programs.work_dir = Some("/no/such/dir".into());
    let no_dir = run_in(options, &["sh", "-c", "true"], &test).await.unwrap_err();
    assert!(no_dir.message.contains("work_dir /no/such/dir"), "{no_dir}");
}

#[tokio::test]
async fn programs_start_in_the_work_dir() {
    let dir = tempfile::tempdir().unwrap();
    let test = TestContext::new(RANGE);
    let output = run_in(options().work_dir(dir.path()), &["sh", "-c", "pwd -P"], &test).await.unwrap();
    let real = dir.path().canonicalize().unwrap();
    assert_eq!(field(&output, "stdout"), format!("{}\n", real.display()));
}

struct Named;

#[async_trait]
impl ShardHandler for Named {
    async fn run(&self, _: ShardContext) -> Result<ShardOutput, ShardError> {
        Ok(ShardOutput::rows(1))
    }
}

#[tokio::test]
async fn only_what_this_worker_allows_is_resolved() {
    let mut options = options();
    options.registry = Registry::default().with("reconcile", Named);
    let handlers = Handlers::new(options.clone());
    let refusal = |spec: HandlerSpec| {
        let error = handlers.resolve(&spec).err().expect("refused");
        assert_eq!(error.class, FailureClass::Permanent);
        error.message
    };
    for argv in [&["bash"][..], &["/bin/sh"], &["SH"], &["sh "], &["../sh"]] {
        assert!(refusal(exec(argv)).contains("it allows: sh"), "{argv:?}");
    }
    let misspelt = refusal(HandlerSpec::Rust { name: "recncile".into() });
    assert!(misspelt.contains("did you mean 'reconcile'?") && misspelt.contains("noop, reconcile"), "{misspelt}");
    assert!(refusal(HandlerSpec::Sql { sql: "COMMIT".into(), chunk: None, database: None }).contains("transaction"));
    let rust = |name: &str| handlers.resolve(&HandlerSpec::Rust { name: name.into() }).unwrap();
    let context = TestContext::new(RANGE).context();
    assert_eq!(rust("noop").run(context.clone()).await, Ok(ShardOutput::default()));
    assert_eq!(rust("reconcile").run(context).await, Ok(ShardOutput::rows(1)));
    let none = Handlers::new(HandlerOptions { allow_exec: vec![], ..options.clone() });
    assert!(none.resolve(&exec(&["sh"])).err().expect("refused").message.contains("it allows none"));
    let any = Handlers::new(HandlerOptions { allow_exec: vec!["*".into()], ..options });
    assert!(any.resolve(&exec(&["/bin/sh"])).is_ok());
}
