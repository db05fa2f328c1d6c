//! The `exec` handler: a program and its arguments, as they stand in the job. No shell, no template, no inherited environment.
//!
//! Promises: an attempt that is over (ended, cut off, told to stop, or dropped with its task) leaves no process of its group
//! behind; a process that left the group and holds the output open delays the worker by one second at most, and is found and reported
//! or ended (case X-01); what is kept of the output is bounded and valid text (cases B-02, B-09).
//!
//! At least once: a program may run again after a crash, from its last committed checkpoint, under the same idempotency key.

mod cgroup;
mod environment;
mod group;
mod launch;
mod leftovers;
mod lines;
mod output;
mod reports;

pub use cgroup::Cgroups;
pub use launch::ProgramRules;
pub(crate) use lines::FailClass;

use crate::exec::group::{Ending, Group};
use crate::exec::leftovers::Leftover;
use crate::exec::output::{Captured, Pipes};
use crate::exec::reports::Reports;
use serde_json::{Value, json};
use shardcron_domain::limits::{OUTPUT_BYTES, RESULT_BYTES};
use shardcron_domain::output::Stream;
use shardcron_domain::program::{ProgramLimits, ProgramOptions};
use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use std::sync::Arc;
use std::time::Duration;

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
    /// How long the program's last checkpoint is waited for after its end.
    pub settle: Duration,
}

impl Default for ExecLimits {
    fn default() -> Self {
        ExecLimits {
            term_grace: Duration::from_secs(5),
            drain: Duration::from_secs(1),
            reap: Duration::from_secs(5),
            settle: Duration::from_secs(3),
        }
    }
}

/// Exit codes of `sysexits.h` that mean: another try would fail the same way. Wrong usage, wrong data, wrong configuration.
const PERMANENT_CODES: [i32; 3] = [64, 65, 78];

/// Runs a program.
pub struct ExecHandler {
    argv: Vec<String>,
    options: ProgramOptions,
    rules: Arc<ProgramRules>,
    limits: ExecLimits,
}

impl ExecHandler {
    /// A handler of `argv`, the program first. Whether it is allowed is checked by [`crate::Handlers::resolve`].
    #[must_use]
    pub fn new(argv: Vec<String>, options: ProgramOptions, rules: Arc<ProgramRules>, limits: ExecLimits) -> Self {
        ExecHandler { argv, options, rules, limits }
    }

    /// Deletes the input files and the cgroups of workers that were killed; for a worker's start.
    pub fn sweep(rules: &ProgramRules) {
        environment::sweep();
        if let Some(cgroups) = &rules.cgroups {
            cgroups.sweep();
        }
    }

    fn program(&self) -> &str {
        self.argv.first().map_or("", String::as_str)
    }
}

#[async_trait]
impl ShardHandler for ExecHandler {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        // A refused checkpoint ends the program as a stop does.
        let ended = context.stop.child_token();
        context.stop = ended.clone();
        let input = environment::write_input(&context).await?;
        let mut launch = launch::prepare(&context, &self.argv, &self.options, &self.rules, input)?;
        self.end_earlier(&context).await;
        let mut group = Group::spawn(&mut launch.command)
            .map_err(|error| launch::not_started(self.program(), self.rules.work_dir.as_deref(), &error))?;
        if let Some(cgroup) = &launch.cgroup {
            launch::open_gate(&mut group.child, cgroup, self.options.acknowledge).await?;
        }
        let reports = Arc::new(Reports::new(context.clone(), ended));
        let keeper = tokio::spawn(reports.clone().keep(group.child.stdin.take()));
        let pipes = Pipes::read(&mut group.child, &context.effects, &reports);
        let first = group.first();
        let ending = group.see_through(&context, &self.limits).await;
        // Before the output's end is waited for: who is ended here holds it open no more.
        let in_cgroup = cgroup_end(launch.cgroup.take(), first).await;
        let mut captured = pipes.finish(self.limits.drain, || reports.is_emitting()).await;
        if let Some(first) = first {
            self.look_for_leftovers(&context, first, in_cgroup.as_ref(), &mut captured).await;
        }
        reports.close();
        settle(keeper, self.limits.settle).await;
        if let (Some(true), Some(memory)) = (in_cgroup.map(|e| e.out_of_memory), launch.memory)
            && matches!(&ending, Ending::Signalled(_) | Ending::Exited(1..))
        {
            return Err(ShardError::transient(format!(
                "'{}' was killed by the kernel: over its memory limit of {memory} (limits.memory, for all its processes together){}",
                self.program(),
                captured.last_words(MESSAGE_BYTES)
            )));
        }
        self.judge(&context, ending, &captured, &reports, launch.limits)
    }
}

/// Ends what is left in a program's cgroup, and removes it.
async fn cgroup_end(group: Option<cgroup::AttemptGroup>, first: Option<i32>) -> Option<cgroup::Ended> {
    let group = group?;
    Some(tokio::task::spawn_blocking(move || group.finish(first)).await.unwrap_or_default())
}

/// Waits for the last checkpoint. What is not committed then never will be: the attempt is over.
async fn settle(mut keeper: tokio::task::JoinHandle<()>, patience: Duration) {
    if tokio::time::timeout(patience, &mut keeper).await.is_err() {
        keeper.abort();
        tracing::warn!(
            "a program's last checkpoint could not be kept in time; the next attempt goes on from the one before"
        );
    }
}

impl ExecHandler {
    /// Programs of earlier attempts, whose worker was killed: they would work beside this one.
    async fn end_earlier(&self, context: &ShardContext) {
        let (key, attempt) = (context.idempotency_key(), context.attempt.attempt);
        let kill = self.rules.kill_leftovers;
        let (mut found, mut gone) = leftovers::of_earlier(key, attempt, kill).await;
        if let Some(cgroups) = self.rules.cgroups.clone() {
            let attempt = context.attempt;
            let also =
                tokio::task::spawn_blocking(move || cgroups.end_earlier(attempt, kill)).await.unwrap_or_default();
            gone = also.gone && (gone || found.is_empty());
            found.extend(also.left.into_iter().filter(|one| !found.contains(one)).collect::<Vec<_>>());
        }
        self.say_left(context, "processes of an earlier attempt still ran here", &found, gone);
    }

    /// A cgroup knows who is left, whatever they did; without one they are looked for.
    async fn look_for_leftovers(
        &self,
        context: &ShardContext,
        first: i32,
        in_cgroup: Option<&cgroup::Ended>,
        captured: &mut Captured,
    ) {
        let mark = environment::mark_of(context);
        let (found, gone) = match in_cgroup {
            Some(ended) => (ended.left.clone(), ended.gone),
            None => leftovers::of_attempt(mark, first, self.rules.kill_leftovers).await,
        };
        let names = self.say_left(context, "processes left the program's group and ran on after its end", &found, gone);
        if names.is_none() && captured.left_open {
            tracing::warn!(job = context.job, execution_id = %context.attempt.execution, shard_no = context.attempt.index,
                program = self.program(), "a process that left the program's group still holds its output; it is not waited for");
        }
        (captured.leftovers, captured.leftovers_gone) = (names, gone);
    }

    fn say_left(&self, context: &ShardContext, what: &str, found: &[Leftover], gone: bool) -> Option<String> {
        if found.is_empty() {
            return None;
        }
        let names: Vec<String> = found.iter().map(|process| format!("{} ({})", process.command, process.id)).collect();
        let (names, done) = (names.join(", "), if gone { "killed" } else { "left alone" });
        tracing::warn!(job = context.job, execution_id = %context.attempt.execution, shard_no = context.attempt.index,
            program = self.program(), processes = names, done, "{what}");
        context.effects.output(Stream::Log, format!("{what}: {names}; {done}\n").as_bytes());
        Some(names)
    }

    fn judge(
        &self,
        context: &ShardContext,
        ending: Ending,
        captured: &Captured,
        reports: &Reports,
        limits: ProgramLimits,
    ) -> Result<ShardOutput, ShardError> {
        let program = self.program();
        let tail = captured.last_words(MESSAGE_BYTES);
        if let Some(why) = reports.superseded() {
            return Err(ShardError::stopped(format!(
                "a checkpoint of '{program}' was refused, and it was ended: {why}"
            )));
        }
        if let Some(error) = reports.refused() {
            return Err(ShardError { message: format!("{}{tail}", error.message), ..error });
        }
        if let (Ending::Exited(_) | Ending::Signalled(_), Some(failure)) = (&ending, reports.failure()) {
            let message = format!("'{program}' failed: {}", failure.message);
            return Err(match (failure.class, failure.wait) {
                (FailClass::Permanent, _) => ShardError::permanent(message),
                (FailClass::Transient, Some(wait)) => ShardError::not_before(message, wait.as_std()),
                (FailClass::Transient, None) => ShardError::transient(message),
            });
        }
        match ending {
            Ending::Exited(0) if captured.left_open && matches!(context.slice, ShardSlice::Map { .. }) => {
                Err(ShardError::transient(format!(
                    "'{program}' ended, but a process that left its group holds its output open; what that one emits would be lost{tail}"
                )))
            }
            Ending::Exited(0) => {
                let (rows, said) = reports.result();
                Ok(ShardOutput { rows, summary: Some(said.unwrap_or_else(|| summary(0, captured))), committed: false })
            }
            Ending::Exited(code) if PERMANENT_CODES.contains(&code) => Err(ShardError::permanent(format!(
                "'{program}' ended with exit code {code}, which says that another try is no use{tail}"
            ))),
            Ending::Exited(code) => {
                Err(ShardError::transient(format!("'{program}' ended with exit code {code}{tail}")))
            }
            Ending::Signalled(signal) => {
                let hint = hint(&signal, limits);
                Err(ShardError::transient(format!("'{program}' was killed by {signal}{hint}{tail}")))
            }
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

/// What probably sent a signal.
fn hint(signal: &str, limits: ProgramLimits) -> String {
    match (signal, limits.cpu_time, limits.memory) {
        ("SIGXCPU", Some(time), _) => format!(" (it used up its processor time of {time}; limits.cpu_time)"),
        ("SIGSEGV" | "SIGABRT" | "SIGKILL" | "SIGBUS", _, Some(memory)) => {
            format!(" (its memory is limited to {memory} by limits.memory, and not every program bears that)")
        }
        ("SIGKILL", ..) => " (out of memory, or somebody's kill -9)".into(),
        _ => String::new(),
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
            "leftovers": captured.leftovers,
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
