//! What programs and their worker say to each other, and what a worker lets them do: with real programs.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use nix::unistd::Uid;
use serde_json::{Value, json};
use shardcron_domain::ExecutionId;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::program::{Bytes, ProgramLimits, ProgramOptions};
use shardcron_domain::shard::FailureClass;
use shardcron_domain::units::Span;
use shardcron_handlers::{HandlerOptions, Handlers, ProgramRules};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Checkpoint, Registry, ShardContext, ShardError, ShardOutput, ShardSlice, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANGE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };

fn worker() -> HandlerOptions {
    let owner = TestContext::new(RANGE).context().owner;
    HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default()).allow_exec(["sh", "python3"])
}

async fn run(
    worker: HandlerOptions,
    argv: &[&str],
    options: ProgramOptions,
    test: &TestContext,
) -> Result<ShardOutput, ShardError> {
    run_as(worker, argv, options, unique(test)).await
}

/// Of an execution that no other test has: programs are found by it, on the whole machine.
fn unique(test: &TestContext) -> ShardContext {
    let mut context = test.context();
    context.attempt.execution = ExecutionId(uuid::Uuid::now_v7());
    context
}

async fn run_as(
    worker: HandlerOptions,
    argv: &[&str],
    options: ProgramOptions,
    context: ShardContext,
) -> Result<ShardOutput, ShardError> {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    let spec = HandlerSpec::Exec { argv, options: Box::new(options) };
    Handlers::new(worker).resolve(&spec)?.run(context).await
}

async fn sh(script: &str, test: &TestContext) -> Result<ShardOutput, ShardError> {
    run(worker(), &["sh", "-c", script], ProgramOptions::default(), test).await
}

fn stdout(output: &ShardOutput) -> String {
    output.summary.as_ref().unwrap()["stdout"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_program_speaks_by_lines_among_its_output() {
    let test = TestContext::new(RANGE);
    let script = r#"echo hello
        echo '{"shardcron":"checkpoint","at":6,"rows":2}'
        echo '{"shardcron":"progress"}'
        echo '{"shardcron":"checkpoint","at":"back"'
        echo '{"shardcron":"metric","name":"cache_hits","value":3,"kind":"counter"}'
        printf 'half a line'
        echo '{"shardcron":"checkpoint","at":9,"rows":3}' >&2
        echo
        echo '{"shardcron":"checkpoint","at":9,"rows":3}'
        printf '{"shardcron":"result","rows":5,"summary":{"unmatched":2}}'"#;
    let output = sh(script, &test).await.unwrap();
    assert_eq!((output.rows, output.summary), (Some(5), Some(json!({ "unmatched": 2 }))));
    let taken = test.checkpoints();
    assert_eq!(taken.last().unwrap().0, Checkpoint::Number(9), "{taken:?}");
    assert_eq!(taken.iter().map(|(_, rows)| rows).sum::<u64>(), 5, "merged or not, all records are counted: {taken:?}");
    let kept = test.output(Stream::Stdout);
    assert_eq!(
        kept, "hello\n{\"shardcron\":\"checkpoint\",\"at\":\"back\"\nhalf a line\n",
        "messages are no output, slips are"
    );
    assert!(test.output(Stream::Stderr).contains("\"at\":9"), "on stderr it is ordinary");
    assert!(test.output(Stream::Log).contains("begins like a message and is none"), "{}", test.output(Stream::Log));
}

#[tokio::test]
async fn exit_codes_and_failures_have_classes() {
    let test = TestContext::new(RANGE);
    for (script, class, words) in [
        ("exit 1", FailureClass::Transient, "exit code 1"),
        ("exit 75", FailureClass::Transient, "exit code 75"),
        ("echo the account is closed >&2; exit 65", FailureClass::Permanent, "account is closed"),
        ("exit 64", FailureClass::Permanent, "another try is no use"),
        (
            r#"echo '{"shardcron":"fail","class":"permanent","message":"no such month"}'"#,
            FailureClass::Permanent,
            "no such month",
        ),
        (r#"echo '{"shardcron":"fail","message":"busy"}'; exit 65"#, FailureClass::Transient, "busy"),
        (
            r#"echo '{"shardcron":"fail","message":"busy","wait":"2m"}'; exit 1"#,
            FailureClass::NotBefore { wait_ms: 120_000 },
            "busy",
        ),
    ] {
        let error = sh(script, &test).await.unwrap_err();
        assert_eq!(error.class, class, "{script}: {error}");
        assert!(error.message.contains(words) && !error.stopped, "{script}: {error}");
    }
}

#[tokio::test]
async fn the_input_is_a_private_file_that_goes_with_the_attempt() {
    let items: Vec<String> = (0..30_000).map(|i| format!("item-{i}")).collect();
    let test =
        TestContext::new(ShardSlice::List { items }).param("date", "2013-01-31").resumed(3, Checkpoint::Number(7));
    let script = r#"import json, os, stat
path = os.environ["SHARDCRON_INPUT"]
given = json.load(open(path))
print(json.dumps({"shardcron": "result", "rows": len(given["slice"]["list"]["items"]), "summary": {
    "path": path, "mode": stat.S_IMODE(os.stat(path).st_mode), "attempt": given["attempt"], "checkpoint": given["checkpoint"],
    "date": given["params"]["date"], "key": given["idempotency_key"] == os.environ["SHARDCRON_IDEMPOTENCY_KEY"],
    "variable": "SHARDCRON_SLICE" in os.environ}}))"#;
    let output = run(worker(), &["python3", "-c", script], ProgramOptions::default(), &test).await.unwrap();
    assert_eq!(output.rows, Some(30_000), "more than an environment holds");
    let found = output.summary.unwrap();
    let path = found["path"].as_str().unwrap();
    assert!(!std::path::Path::new(path).exists(), "{path} is gone");
    let expected = json!({ "path": path, "mode": 0o600, "attempt": 3, "checkpoint": 7, "date": "2013-01-31", "key": true, "variable": false });
    assert_eq!(found, expected);
}

#[tokio::test]
async fn a_refused_checkpoint_ends_the_program() {
    let test = TestContext::new(RANGE);
    let mut elsewhere = test.context();
    elsewhere.advance(Checkpoint::Number(8), 1).await.unwrap();
    let began = Instant::now();
    let error = sh(r#"echo '{"shardcron":"checkpoint","at":6}'; exec sleep 300"#, &test).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(error.stopped && error.message.contains("refused"), "{error:?}");
    assert_eq!(test.checkpoints().len(), 1, "nothing of it was taken");
}

#[tokio::test]
async fn what_is_committed_is_told_to_who_asks_for_it() {
    let test = TestContext::new(RANGE);
    let options = ProgramOptions { acknowledge: true, ..ProgramOptions::default() };
    let script = r#"for at in 6 7; do echo "{\"shardcron\":\"checkpoint\",\"at\":$at,\"rows\":1}"; read answer; echo "$answer"; done"#;
    let output = run(worker(), &["sh", "-c", script], options, &test).await.unwrap();
    let expected = "{\"at\":6,\"shardcron\":\"committed\"}\n{\"at\":7,\"shardcron\":\"committed\"}\n";
    assert_eq!(stdout(&output), expected);
    assert_eq!(
        test.checkpoints(),
        [(Checkpoint::Number(6), 1), (Checkpoint::Number(7), 1)],
        "one by one, since it waits"
    );
}

#[tokio::test]
async fn z_03_arguments_stay_what_they_are() {
    let test = TestContext::new(RANGE);
    let dir = tempfile::tempdir().unwrap();
    let pwn = dir.path().join("pwn");
    let evil =
        [format!("; touch {}", pwn.display()), "$(id)".into(), "--output=/etc/x".into(), "a\nb".into(), "`id`".into()];
    let mut argv = vec!["python3", "-c", "import json,sys; print(json.dumps(sys.argv[1:]))"];
    argv.extend(evil.iter().map(String::as_str));
    // With a limit, too: then a shell sets it, and must not look into them.
    let limited =
        ProgramOptions { limits: ProgramLimits { open_files: Some(64), ..Default::default() }, ..Default::default() };
    for options in [ProgramOptions::default(), limited] {
        let output = run(worker(), &argv, options, &test).await.unwrap();
        assert_eq!(serde_json::from_str::<Value>(&stdout(&output)).unwrap(), json!(evil));
    }
    assert!(!pwn.exists());
    for name in ["LD_PRELOAD", "PATH", "BASH_ENV"] {
        let options = ProgramOptions { env: [(name.to_owned(), "x".to_owned())].into(), ..Default::default() };
        let error = run(worker(), &["sh", "-c", "true"], options, &test).await.unwrap_err();
        assert!(error.class == FailureClass::Permanent && error.message.contains("can't set"), "{error}");
    }
}

#[tokio::test]
async fn the_worker_decides_what_passes_to_programs() {
    let test = TestContext::new(RANGE);
    let mut worker = worker();
    // Whatever runs the tests has these, and programs have them only if they are named.
    worker.programs.pass_env = vec!["CARGO_MANIFEST_DIR".into(), "NO_SUCH_VARIABLE".into()];
    let options = ProgramOptions { env: [("MODE".to_owned(), "$HOME; x".to_owned())].into(), ..Default::default() };
    let output = run(worker, &["sh", "-c", "env | sort"], options, &test).await.unwrap();
    let text = stdout(&output);
    let names: Vec<&str> =
        text.lines().filter_map(|l| l.split('=').next()).filter(|n| !n.starts_with("SHARDCRON_")).collect();
    let allowed = ["CARGO_MANIFEST_DIR", "HOME", "LANG", "MODE", "PATH", "PWD", "TZ", "_", "OLDPWD", "SHLVL"];
    assert!(names.iter().all(|name| allowed.contains(name)), "{names:?}");
    assert!(text.contains("MODE=$HOME; x\n") && text.contains("CARGO_MANIFEST_DIR=/"), "{text}");
}

#[tokio::test]
async fn limits_hold_from_the_first_instruction() {
    let test = TestContext::new(RANGE);
    let limits = |limits: ProgramLimits| ProgramOptions { limits, ..Default::default() };
    let memory = limits(ProgramLimits { memory: Some(Bytes(256 << 20)), ..Default::default() });
    let error = run(worker(), &["python3", "-c", "x = bytearray(400 << 20)"], memory.clone(), &test).await.unwrap_err();
    assert!(error.message.contains("MemoryError"), "{error}");
    run(worker(), &["python3", "-c", "x = bytearray(20 << 20)"], memory, &test).await.unwrap();
    let files = limits(ProgramLimits { open_files: Some(33), ..Default::default() });
    assert_eq!(stdout(&run(worker(), &["sh", "-c", "ulimit -n; ulimit -Hn"], files, &test).await.unwrap()), "33\n33\n");
    let mut strict = worker();
    strict.programs.limits.open_files = Some(20);
    let more = limits(ProgramLimits { open_files: Some(1_000), ..Default::default() });
    assert_eq!(
        stdout(&run(strict, &["sh", "-c", "ulimit -n"], more, &test).await.unwrap()),
        "20\n",
        "the worker's is the most"
    );
    let time = limits(ProgramLimits { cpu_time: Some(Span::secs(1)), ..Default::default() });
    let error = run(worker(), &["sh", "-c", "while :; do :; done"], time.clone(), &test).await.unwrap_err();
    assert!(error.message.contains("SIGXCPU") && error.message.contains("limits.cpu_time"), "{error}");
    let mut missing = worker();
    missing.allow_exec.push("no-such-program".into());
    let error = run(missing, &["no-such-program"], time, &test).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("install it"), "{error}");
}

#[tokio::test]
async fn another_user_needs_root_and_the_workers_consent() {
    let test = TestContext::new(RANGE);
    let as_nobody = ProgramOptions { user: Some("nobody".into()), ..Default::default() };
    let argv = ["sh", "-c", "id -un; id -Gn | wc -w; test -r \"$SHARDCRON_INPUT\" && echo reads"];
    let error = run(worker(), &argv, as_nobody.clone(), &test).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("allow_users"), "{error}");
    let mut consenting = worker();
    consenting.programs =
        ProgramRules { allow_users: vec!["nobody".into()], work_dir: Some("/".into()), ..Default::default() };
    let ended = run(consenting, &argv, as_nobody, &test).await;
    if Uid::effective().is_root() {
        let text = stdout(&ended.unwrap());
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert_eq!(lines, ["nobody", "1", "reads"], "none of the worker's groups, and its input");
    } else {
        assert!(ended.unwrap_err().message.contains("runs as root"));
    }
}

#[tokio::test]
async fn x_01_what_left_the_group_is_found_and_ended_if_the_worker_says_so() {
    let test = TestContext::new(RANGE);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("id");
    // It holds no output, so nothing but its mark shows it. The program waits until it has left.
    let script = format!(
        "setsid sh -c 'echo $$ > {0}; exec sleep 300' >/dev/null 2>&1 & until [ -s {0} ]; do :; done",
        file.display()
    );
    let id = || std::fs::read_to_string(&file).unwrap().trim().parse::<i32>().unwrap();
    let mut killing = worker();
    killing.programs.kill_leftovers = true;
    let output = run(killing, &["sh", "-c", &script], ProgramOptions::default(), &test).await.unwrap();
    let said = test.output(Stream::Log);
    assert!(said.contains(&format!("({})", id())) && said.trim_end().ends_with("killed"), "{said}");
    let state = std::fs::read_to_string(format!("/proc/{}/stat", id())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z") || state.contains(") X"), "{state}");
    assert!(output.summary.unwrap()["leftovers"].as_str().unwrap().contains(&id().to_string()));
    std::fs::remove_file(&file).unwrap();
    let test = TestContext::new(RANGE);
    sh(&script, &test).await.unwrap();
    let said = test.output(Stream::Log);
    assert!(said.contains(&format!("({})", id())) && said.trim_end().ends_with("left alone"), "{said}");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(id()), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn what_an_earlier_attempt_left_is_ended_before_the_next_begins() {
    // A worker that was killed could not end its program, which goes on under the earlier attempt's mark.
    let test = TestContext::new(RANGE).resumed(2, Checkpoint::Number(6));
    let context = unique(&test);
    let key = context.idempotency_key();
    let mut command = std::process::Command::new("sleep");
    let mut orphan = command.arg("300").env("SHARDCRON_ATTEMPT_ID", format!("{key}/1")).spawn().unwrap();
    let mut other = command.env("SHARDCRON_ATTEMPT_ID", format!("{key}/3")).spawn().unwrap();
    let mut killing = worker();
    killing.programs.kill_leftovers = true;
    run_as(killing, &["sh", "-c", "true"], ProgramOptions::default(), context).await.unwrap();
    let said = test.output(Stream::Log);
    assert!(said.contains(&format!("earlier attempt still ran here: sleep ({})", orphan.id())), "{said}");
    assert!(!said.contains(&format!("({})", other.id())), "only earlier ones: {said}");
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(orphan.wait().unwrap().signal(), Some(9));
    let _ = other.kill();
    other.wait().unwrap();
}

#[tokio::test]
async fn b_09_any_bytes_are_kept() {
    let test = TestContext::new(RANGE);
    let script = r"printf '\000\377\376\303\050 😀 \033[31mred\033[0m\n'; head -c 1048576 /dev/zero | tr '\0' x";
    let output = sh(script, &test).await.unwrap();
    let text = stdout(&output);
    assert!(text.starts_with("\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}( 😀 "), "{:?}", &text[..40]);
    assert_eq!(output.summary.as_ref().unwrap()["stdout_bytes"], 1_048_576 + 24);
    assert_eq!(test.output(Stream::Stdout).len(), test.output(Stream::Stdout).trim_end().len(), "nothing was added");
}
