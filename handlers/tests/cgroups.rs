//! Programs in cgroups of their own, on the real kernel. What a machine can't show is told loudly and left out: a cgroup2 file system
//! that this user may make folders in is needed, and for limits its controllers.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]
#![cfg(target_os = "linux")]

mod common;

use common::OneShard;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use shardcron_domain::ExecutionId;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::program::{Bytes, ProgramLimits, ProgramOptions};
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{Cgroups, HandlerOptions, Handlers};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardOutput, ShardSlice, Stream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A folder of this test alone. Dropped, it is removed with everything in it.
struct Folder {
    path: PathBuf,
    cgroups: Cgroups,
}

impl Folder {
    /// `None`, and a word about it, where this machine has none.
    fn of(test: &str) -> Option<Self> {
        let mut reasons = Vec::new();
        for above in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            let path = Path::new(above).join(format!("shardcron-test-{}-{test}", std::process::id()));
            match Cgroups::look(&path.display().to_string()) {
                Ok(Some(cgroups)) => return Some(Folder { path, cgroups }),
                Ok(None) => {}
                Err(why) => reasons.push(why),
            }
        }
        eprintln!("SKIPPED, not passed: {test}: this machine has no cgroup2 folder for it: {}", reasons.join("; "));
        None
    }

    fn worker(&self, kill: bool) -> HandlerOptions {
        let owner = TestContext::new(SLICE).context().owner;
        let mut options =
            HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default()).allow_exec(["sh"]);
        options.programs.cgroups = Some(self.cgroups.clone());
        options.programs.kill_leftovers = kill;
        options
    }

    fn groups(&self) -> usize {
        std::fs::read_dir(&self.path).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::write(self.path.join("cgroup.kill"), "1");
        let until = Instant::now() + Duration::from_secs(5);
        while self.path.exists() && Instant::now() < until {
            for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir(entry.path());
            }
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

const SLICE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };

fn context(test: &TestContext) -> ShardContext {
    let mut context = test.context();
    context.attempt.execution = ExecutionId(uuid::Uuid::now_v7());
    context
}

async fn sh(
    worker: HandlerOptions,
    script: &str,
    options: ProgramOptions,
    context: ShardContext,
) -> Result<ShardOutput, ShardError> {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    Handlers::new(worker).resolve(&HandlerSpec::Exec { argv, options: Box::new(options) })?.run(context).await
}

fn is_gone(id: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    kill(Pid::from_raw(id), None) == Err(Errno::ESRCH) || matches!(state, Some('Z' | 'X'))
}

/// Leaves the group, the session and the environment behind, so that neither a signal nor a look for the attempt's mark finds it; and
/// says its id once it has.
const ESCAPES: &str = "said=$(mktemp); env -i setsid sh -c \"echo \\$\\$ > $said; exec sleep 600\" >/dev/null 2>&1 & \
                       while ! [ -s \"$said\" ]; do :; done; cat \"$said\"; rm \"$said\"";

fn stdout(output: &ShardOutput) -> String {
    output.summary.as_ref().unwrap()["stdout"].as_str().unwrap().trim().to_owned()
}

#[tokio::test]
async fn x_01_whoever_leaves_group_session_and_environment_is_ended() {
    let Some(folder) = Folder::of("escapes") else { return };
    let test = TestContext::new(SLICE);
    let output = sh(folder.worker(true), ESCAPES, ProgramOptions::default(), context(&test)).await.unwrap();
    assert!(is_gone(stdout(&output).parse().unwrap()), "{output:?}");
    assert!(output.summary.as_ref().unwrap()["leftovers"].as_str().unwrap().contains(" ("), "{output:?}");
    assert!(test.output(Stream::Log).contains("killed"), "{}", test.output(Stream::Log));
    assert_eq!(folder.groups(), 0, "removed with the attempt");
    // Cut off at its timeout, it is the same.
    let late = TestContext::new(SLICE).timeout(Duration::from_millis(500));
    let script = format!("{ESCAPES}; sleep 600");
    let error = sh(folder.worker(true), &script, ProgramOptions::default(), context(&late)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Timeout, "{error}");
    assert!(is_gone(late.output(Stream::Stdout).trim().parse().unwrap()));
    assert_eq!(folder.groups(), 0);
}

#[tokio::test]
async fn a_worker_that_only_reports_leaves_them_until_a_later_attempt_ends_them() {
    let Some(folder) = Folder::of("reports") else { return };
    let test = TestContext::new(SLICE);
    let mut attempt = context(&test);
    let output = sh(folder.worker(false), ESCAPES, ProgramOptions::default(), attempt.clone()).await.unwrap();
    let left: i32 = stdout(&output).parse().unwrap();
    assert!(!is_gone(left) && test.output(Stream::Log).contains("left alone"), "{}", test.output(Stream::Log));
    assert_eq!(folder.groups(), 1);
    // Of another shard: not its business.
    let other = context(&TestContext::new(SLICE));
    sh(folder.worker(true), "exit 0", ProgramOptions::default(), other).await.unwrap();
    assert!(!is_gone(left));
    // As after a worker that was killed.
    attempt.attempt.attempt = 2;
    sh(folder.worker(true), "exit 0", ProgramOptions::default(), attempt).await.unwrap();
    assert!(is_gone(left) && test.output(Stream::Log).contains("an earlier attempt"), "{}", test.output(Stream::Log));
    assert_eq!(folder.groups(), 0);
}

#[tokio::test]
async fn a_program_is_in_its_group_from_its_first_instruction_and_reads_what_it_did_without() {
    let Some(folder) = Folder::of("inside") else { return };
    let test = TestContext::new(SLICE);
    let script = "cat /proc/self/cgroup; read x; echo \"read $? '$x'\"";
    let output = sh(folder.worker(true), script, ProgramOptions::default(), context(&test)).await.unwrap();
    let said = stdout(&output);
    let name = folder.path.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(said.contains(&format!("/{name}/{}.", std::process::id())), "{said}");
    assert!(said.ends_with("read 1 ''"), "nothing waits for a keyboard: {said}");
    // One that is told of its checkpoints is told of them and of nothing else.
    let script = r#"echo '{"shardcron":"checkpoint","at":6}'; read -r line; echo "$line""#;
    let options = ProgramOptions { acknowledge: true, ..ProgramOptions::default() };
    let output = sh(folder.worker(true), script, options, context(&TestContext::new(SLICE))).await.unwrap();
    assert_eq!(stdout(&output), r#"{"at":6,"shardcron":"committed"}"#);
    // Its end is its own: exit codes pass, and so does a program that is not there.
    let error = sh(folder.worker(true), "exit 65", ProgramOptions::default(), context(&test)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Permanent, "{error}");
}

#[tokio::test]
async fn a_task_that_is_dropped_takes_the_whole_cgroup_with_it() {
    let Some(folder) = Folder::of("dropped") else { return };
    let test = TestContext::new(SLICE);
    let (worker, attempt) = (folder.worker(true), context(&test));
    let running =
        tokio::spawn(
            async move { sh(worker, &format!("{ESCAPES}; sleep 600"), ProgramOptions::default(), attempt).await },
        );
    while !test.output(Stream::Stdout).ends_with('\n') {
        tokio::task::yield_now().await;
    }
    running.abort();
    let _ = running.await;
    let left: i32 = test.output(Stream::Stdout).trim().parse().unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while !is_gone(left) && Instant::now() < until {
        tokio::task::yield_now().await;
    }
    assert!(is_gone(left));
}

#[tokio::test]
async fn limits_hold_for_all_processes_together() {
    let Some(folder) = Folder::of("limits") else { return };
    let has = folder.cgroups.controllers();
    let limited = |limits| ProgramOptions { limits, ..ProgramOptions::default() };
    let pids = limited(ProgramLimits { processes: Some(3), ..ProgramLimits::default() });
    let forks = "for i in 1 2 3 4 5; do sleep 600 & done; exit 0";
    let result = sh(folder.worker(true), forks, pids, context(&TestContext::new(SLICE))).await;
    if has.pids {
        let error = result.unwrap_err();
        assert!(error.message.to_lowercase().contains("fork"), "{error}");
    } else {
        assert!(result.unwrap_err().message.contains("limits.processes can't be held"));
        eprintln!(
            "SKIPPED, not passed: limits.processes: the kernel does not give the controller 'pids' below {}",
            folder.path.display()
        );
    }
    let share = limited(ProgramLimits { cpu_percent: Some(50), ..ProgramLimits::default() });
    let script = format!("cat {}/*/cpu.max", folder.path.display());
    let result = sh(folder.worker(true), &script, share, context(&TestContext::new(SLICE))).await;
    if has.cpu {
        assert_eq!(stdout(&result.unwrap()), "50000 100000");
    } else {
        assert!(result.unwrap_err().message.contains("limits.cpu_percent can't be held"));
        eprintln!("SKIPPED, not passed: limits.cpu_percent: no controller 'cpu' below {}", folder.path.display());
    }
    if has.memory {
        let memory = limited(ProgramLimits { memory: Some(Bytes(32 << 20)), ..ProgramLimits::default() });
        let script = "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo ${#x}";
        let error = sh(folder.worker(true), script, memory, context(&TestContext::new(SLICE))).await.unwrap_err();
        assert!(error.message.contains("over its memory limit of 32MiB"), "{error}");
    } else {
        eprintln!(
            "SKIPPED, not passed: limits.memory by cgroup: no controller 'memory' below {}",
            folder.path.display()
        );
    }
}

#[test]
fn a_folder_that_can_not_be_used_says_why() {
    let dir = tempfile::tempdir().unwrap();
    for setting in [dir.path().display().to_string(), "/proc/1".to_owned(), "/nowhere/at/all".to_owned()] {
        let why = Cgroups::look(&setting).unwrap_err();
        assert!(why.contains(&setting) && why.contains("cgroup2"), "{why}");
    }
    assert_eq!(Cgroups::look("off"), Ok(None));
}
