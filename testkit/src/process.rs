//! Owns the life of a server process: it runs in its own process group and never outlives us.
//!
//! `Drop` covers the ordinary ends, panics included. For the others (SIGKILL, abort, a static that is never dropped) a
//! watchdog shell holds the far end of a pipe to us: when that closes, it kills what we still had running and deletes
//! our folders. A parent-death signal would need unsafe code, and would miss the grandchildren.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::root::Root;
use crate::wait::poll;

const LOG_TAIL_LINES: usize = 30;
/// Erlang writes whole stack traces in one line.
const LOG_LINE_CHARS_MAX: usize = 400;
const STATE_CHANGE_BOUND: Duration = Duration::from_secs(5);

/// What to start, and where it may write.
pub(crate) struct Launch<'a> {
    pub what: &'static str,
    pub root: &'a Root,
    pub program: &'a str,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub log: PathBuf,
}

/// A running (or ended) server process and its group.
#[derive(Debug)]
pub(crate) struct Process {
    what: &'static str,
    child: Child,
    group: Pid,
    log: PathBuf,
}

impl Process {
    pub fn start(launch: Launch<'_>) -> Result<Self> {
        let Launch { what, root, program, args, env, log } = launch;
        let output = OpenOptions::new().create(true).append(true).open(&log)?;
        // The shell waits for a word from us before it becomes the server: by then the watchdog knows the group, so
        // there is no moment in which our death would leave the server behind.
        let mut command = Command::new("sh");
        command.args(["-c", r#"read -r go || exit 1; exec "$@" </dev/null"#, "sh"]);
        command.args(root.words(program)).args(args);
        root.clean_environment(&mut command);
        command.envs(env);
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let mut child = command.spawn().with_context(|| format!("starting {what}"))?;
        let group = Pid::from_raw(i32::try_from(child.id())?);
        let mut gate = child.stdin.take().context("the gate of a new process")?;
        // From here on, Drop cleans up.
        let process = Self { what, child, group, log };
        watchdog(&format!("+ {group}"))?;
        gate.write_all(b"go\n").with_context(|| format!("starting {what}"))?;
        Ok(process)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        killpg(self.group, signal).with_context(|| format!("sending {signal} to {}", self.what))
    }

    /// How the process ended, if it did.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// SIGKILL to the whole group; returns when the process is gone. Does nothing if it already is.
    pub fn kill(&mut self) -> Result<()> {
        if self.ended()?.is_none() {
            self.signal(Signal::SIGKILL)?;
            self.child.wait()?;
        }
        self.forget()
    }

    /// SIGTERM, and SIGKILL to what is still there after `bound`.
    pub fn terminate(&mut self, bound: Duration) -> Result<()> {
        if self.ended()?.is_none() {
            self.signal(Signal::SIGTERM)?;
            self.signal(Signal::SIGCONT)?;
            self.wait_end(bound)?;
        }
        self.kill()
    }

    /// Waits for the process to end by itself; true if it did within `bound`.
    pub fn wait_end(&mut self, bound: Duration) -> Result<bool> {
        Ok(poll(bound, || self.ended().transpose()).transpose()?.is_some())
    }

    /// SIGSTOP; returns when the kernel has really stopped it.
    pub fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        self.wait_state("frozen", |state| state == 'T')
    }

    /// SIGCONT; returns when it may run again.
    pub fn thaw(&mut self) -> Result<()> {
        self.signal(Signal::SIGCONT)?;
        self.wait_state("thawed", |state| state != 'T')
    }

    fn wait_state(&self, state_name: &str, wanted: impl Fn(char) -> bool) -> Result<()> {
        let what = self.what;
        poll(STATE_CHANGE_BOUND, || process_state(self.pid()).filter(|state| wanted(*state)))
            .with_context(|| format!("{what} could not be {state_name}"))?;
        Ok(())
    }

    /// Polls `ready` until it holds; an error (with the end of the log) when the process ends first or the bound passes.
    pub fn wait_ready(&mut self, bound: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
        let outcome = poll(bound, || match self.ended() {
            Ok(None) => ready().then_some(None),
            Ok(Some(status)) => Some(Some(describe_exit(status))),
            Err(error) => Some(Some(error.to_string())),
        });
        match outcome {
            Some(None) => Ok(()),
            Some(Some(end)) => bail!("{} ended while starting: {end}\n{}", self.what, self.log_tail()),
            None => bail!("{} was not ready within {bound:?}\n{}", self.what, self.log_tail()),
        }
    }

    fn log_tail(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines.iter().skip(lines.len().saturating_sub(LOG_TAIL_LINES));
        tail.map(|line| line.chars().take(LOG_LINE_CHARS_MAX).collect::<String>()).collect::<Vec<_>>().join("\n")
    }

    /// The number may be given to a stranger once the process is reaped: the watchdog must not keep it.
    fn forget(&self) -> Result<()> {
        watchdog(&format!("- {}", self.group))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing sensible can be done about an error here, and a panic in a panic would abort before others clean up.
        let _ = self.kill();
    }
}

fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// The letter in `/proc/<pid>/stat` behind the command's name, which is in brackets and may contain anything.
fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Has `folder` deleted when we are gone.
pub(crate) fn guard_folder(folder: &Path) -> Result<()> {
    watchdog(&format!("d {}", folder.display()))
}

/// Lines: `+ GROUP` now runs, `- GROUP` is gone, `d FOLDER` is ours. At end of file: kill, then delete.
const WATCHDOG: &str = r#"
trap '' HUP INT TERM QUIT
groups=
folders=
while IFS= read -r line; do
    value=${line#??}
    case $line in
        '+ '*) groups="$groups $value" ;;
        '- '*)
            kept=
            for group in $groups; do [ "$group" = "$value" ] || kept="$kept $group"; done
            groups=$kept
            ;;
        'd '*) folders="$folders$value
" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
IFS='
'
set -f
for folder in $folders; do
    case $folder in
        */shardcron-test-*) ;;
        *) continue ;;
    esac
    tries=0
    # What was just killed may still be writing its last file.
    while [ -e "$folder" ] && [ "$tries" -lt 50 ]; do
        rm -rf -- "$folder" || sleep 0.1
        tries=$((tries + 1))
    done
done
"#;

fn watchdog(line: &str) -> Result<()> {
    static PIPE: OnceLock<Mutex<Option<ChildStdin>>> = OnceLock::new();
    let pipe = PIPE.get_or_init(|| Mutex::new(None));
    let mut pipe = pipe.lock().unwrap_or_else(PoisonError::into_inner);
    if pipe.is_none() {
        // Its own group: a Ctrl-C or a test runner's kill is meant for us, and the watchdog acts after us. No inherited
        // output: a test runner would wait for it.
        let mut command = Command::new("sh");
        command.args(["-c", WATCHDOG]).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        let mut child = command.spawn().context("starting the watchdog")?;
        *pipe = child.stdin.take();
    }
    let pipe = pipe.as_mut().context("the watchdog's pipe")?;
    writeln!(pipe, "{line}").context("telling the watchdog")
}

/// The methods that every service has, by its field `process`.
macro_rules! process_methods {
    () => {
        /// The server's process id (of the last start, if it does not run now).
        pub fn pid(&self) -> u32 {
            self.process.pid()
        }

        /// SIGKILL, as a power cut for the process; returns when it is gone.
        ///
        /// # Errors
        /// When the process can't be signalled.
        pub fn kill(&mut self) -> anyhow::Result<()> {
            self.process.kill()
        }

        /// SIGSTOP to the whole process group: its connections stay open and nothing answers.
        ///
        /// # Errors
        /// When the process can't be signalled or does not stop.
        pub fn freeze(&mut self) -> anyhow::Result<()> {
            self.process.freeze()
        }

        /// SIGCONT after [`Self::freeze`].
        ///
        /// # Errors
        /// When the process can't be signalled.
        pub fn thaw(&mut self) -> anyhow::Result<()> {
            self.process.thaw()
        }

        /// True while the process exists (also when frozen).
        pub fn is_running(&mut self) -> bool {
            matches!(self.process.ended(), Ok(None))
        }
    };
}
pub(crate) use process_methods;
