//! The `exec` handler: a program and its arguments, as they stand in the job. No shell, no template, no inherited environment.
//!
//! Promises: an attempt that is over (ended, cut off, told to stop, or dropped with its task) leaves no process of its group
//! behind; a process that left the group and holds the output open delays the worker by one second at most (case X-01); what is
//! kept of the output is bounded and valid text (cases B-02, B-09).

mod environment;
mod group;
mod output;

use crate::exec::group::{Ending, Group};
use crate::exec::output::{Captured, Pipes};
use serde_json::{Value, json};
use shardcron_domain::limits::{OUTPUT_BYTES, RESULT_BYTES};
use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// Bytes of stderr and stdout in the message of a failure. Both fit into `limits::ERROR_BYTES` with room for the sentence.
const MESSAGE_BYTES: usize = 1_500;

/// Waits around programs.
#[derive(Clone, Copy, Debug)]
pub struct ExecLimits {
    /// Between SIGTERM and SIGKILL; less where the attempt has less time left.
    pub term_grace: Duration,
    /// How long output is read on after the program has ended: only a process outside of the group still holds the pipe then.
    pub drain: Duration,
    /// How long a killed program may take to disappear before the worker stops waiting for it.
    pub reap: Duration,
}

impl Default for ExecLimits {
    fn default() -> Self {
        ExecLimits { term_grace: Duration::from_secs(5), drain: Duration::from_secs(1), reap: Duration::from_secs(5) }
    }
}

/// Runs a program.
pub struct ExecHandler {
    argv: Vec<String>,
    work_dir: Option<PathBuf>,
    limits: ExecLimits,
}

impl ExecHandler {
    /// A handler of `argv`, the program first. Whether it is allowed is checked by [`crate::Handlers::resolve`].
    #[must_use]
    pub fn new(argv: Vec<String>, work_dir: Option<PathBuf>, limits: ExecLimits) -> Self {
        ExecHandler { argv, work_dir, limits }
    }

    fn program(&self) -> &str {
        self.argv.first().map_or("", String::as_str)
    }

    fn command(&self, context: &ShardContext) -> Result<Command, ShardError> {
        let mut command = Command::new(self.program());
        command
            .args(self.argv.iter().skip(1))
            .env_clear()
            .envs(environment::of(context)?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        if let Some(dir) = &self.work_dir {
            command.current_dir(dir);
        }
        Ok(command)
    }

    fn not_started(&self, error: &std::io::Error) -> ShardError {
        let program = self.program();
        let dir_missing = self.work_dir.as_ref().filter(|dir| !dir.is_dir());
        match (error.kind(), dir_missing) {
            (_, Some(dir)) => ShardError::permanent(format!(
                "the work_dir {} of this worker is not a directory; make it, or change it in the worker's configuration",
                dir.display()
            )),
            (ErrorKind::NotFound, _) => ShardError::permanent(format!(
                "this worker has no program '{program}'; install it on this machine, or give its full path in the job's exec \
                 (PATH is the worker's own)"
            )),
            (ErrorKind::PermissionDenied, _) => ShardError::permanent(format!(
                "'{program}' may not be run by this worker's user; make it executable (chmod +x), or name its interpreter first"
            )),
            (ErrorKind::InvalidInput, _) => ShardError::permanent(format!(
                "'{program}' can't be started: a NUL character stands in an argument or in a value for its environment"
            )),
            (ErrorKind::ArgumentListTooLong, _) => ShardError::permanent(format!(
                "'{program}' can't be started: its arguments and its environment are too long; cut the job into more shards, or \
                 hand over a file"
            )),
            _ if error.raw_os_error() == Some(nix::libc::ENOEXEC) => ShardError::permanent(format!(
                "'{program}' is no program that this machine can run; a script needs a first line such as #!/bin/sh, or its \
                 interpreter first in the job's exec"
            )),
            // Too many processes, no memory: another moment may be better.
            _ => ShardError::transient(format!("'{program}' could not be started: {error}")),
        }
    }
}

#[async_trait]
impl ShardHandler for ExecHandler {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let mut command = self.command(&context)?;
        let mut group = Group::spawn(&mut command).map_err(|error| self.not_started(&error))?;
        let pipes = Pipes::read(&mut group.child, &context.effects);
        let ending = group.see_through(&context, &self.limits).await;
        let captured = pipes.finish(self.limits.drain).await;
        if captured.left_open {
            tracing::warn!(job = context.job, execution_id = %context.attempt.execution, shard_no = context.attempt.index,
                program = self.program(), "a process that left the program's group still holds its output; it is not waited for");
        }
        self.judge(&context, ending, &captured)
    }
}

impl ExecHandler {
    fn judge(&self, context: &ShardContext, ending: Ending, captured: &Captured) -> Result<ShardOutput, ShardError> {
        let program = self.program();
        let tail = captured.last_words(MESSAGE_BYTES);
        match ending {
            Ending::Exited(0) => Ok(ShardOutput { rows: None, summary: Some(summary(0, captured)), committed: false }),
            Ending::Exited(code) => {
                Err(ShardError::transient(format!("'{program}' ended with exit code {code}{tail}")))
            }
            Ending::Signalled(signal) => Err(ShardError::transient(format!(
                "'{program}' was killed by {signal}{}{tail}",
                if signal == "SIGKILL" { " (out of memory, or somebody's kill -9)" } else { "" }
            ))),
            Ending::TimedOut { how } => {
                let limit = context.deadline.map_or(String::new(), |_| " at the job's timeout".into());
                Err(ShardError::timeout(format!("'{program}' was cut off{limit}; {how}{tail}")))
            }
            Ending::Stopped { how } => Err(ShardError::stopped(format!("told to stop; {how}{tail}"))),
            Ending::Lost(error) => {
                Err(ShardError::transient(format!("'{program}' could not be waited for: {error}{tail}")))
            }
        }
    }
}

/// What people see of a run, within `limits::RESULT_BYTES` as JSON whatever has to be escaped.
fn summary(exit_code: i32, captured: &Captured) -> Value {
    let mut limit = OUTPUT_BYTES;
    loop {
        let (stdout, stderr) = (captured.stdout.text(limit / 4 * 3), captured.stderr.text(limit / 4));
        let value = json!({
            "exit_code": exit_code,
            "truncated": stdout.cut || stderr.cut,
            "stdout_bytes": captured.stdout.total(),
            "stderr_bytes": captured.stderr.total(),
            "left_open": captured.left_open,
            "stdout": stdout.text,
            "stderr": stderr.text,
        });
        if limit == 0 || value.to_string().len() <= RESULT_BYTES {
            return value;
        }
        // Escapes have blown it up, six bytes for one at worst.
        limit = limit / 4 * 3;
        if limit < 64 {
            limit = 0;
        }
    }
}
