//! How a program is started: where, as whom, and within which limits.
//!
//! Limits have to hold before the program's first instruction, and this crate has no `unsafe`, without which nothing can be done
//! between fork and exec. So where there are limits, `/bin/sh` sets them and becomes the program (`exec "$@"`). The shell reads a text
//! that is always the same; the job's words are its positional parameters, which no shell looks into (case Z-03).

use super::cgroup::{AttemptGroup, Cgroups};
use super::environment;
use nix::unistd::{Uid, User};
use shardcron_domain::cgroup::Controllers;
use shardcron_domain::program::{Bytes, ProgramLimits, ProgramOptions};
use shardcron_sdk::{ShardContext, ShardError};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

/// What a worker's configuration says about programs.
#[derive(Clone, Debug, Default)]
pub struct ProgramRules {
    /// Where programs start; the worker's own directory if absent.
    pub work_dir: Option<PathBuf>,
    /// Variables of the worker's environment that reach programs beside `PATH`, `HOME`, `LANG` and `TZ`.
    pub pass_env: Vec<String>,
    /// Users that jobs may name.
    pub allow_users: Vec<String>,
    /// The most that a program may use, whatever its job says.
    pub limits: ProgramLimits,
    /// Whether processes that left their program's group are ended, or only reported.
    pub kill_leftovers: bool,
    /// Where each program gets a cgroup of its own.
    pub cgroups: Option<Cgroups>,
}

/// Seconds between SIGXCPU, which says what happened, and SIGKILL.
const CPU_GRACE_S: u64 = 5;

/// A program ready to be started, and what has to live as long as it runs.
pub(super) struct Launch {
    pub(super) command: Command,
    /// What is limited for each process, by the shell.
    pub(super) limits: ProgramLimits,
    /// What is limited for all of its processes, or how they are ended as a whole.
    pub(super) cgroup: Option<AttemptGroup>,
    /// The memory that the cgroup has.
    pub(super) memory: Option<Bytes>,
    /// Deleted when dropped.
    _input: tempfile::NamedTempFile,
}

/// Makes the command.
pub(super) fn prepare(
    context: &ShardContext,
    argv: &[String],
    options: &ProgramOptions,
    rules: &ProgramRules,
    input: tempfile::NamedTempFile,
) -> Result<Launch, ShardError> {
    let program = argv.first().map_or("", String::as_str);
    let user = options.user.as_deref().map(|name| find_user(name, rules)).transpose()?;
    let mut variables = environment::of(context, options, &rules.pass_env)?;
    variables.push(("SHARDCRON_INPUT".into(), input.path().display().to_string()));
    let dir = folder(options.dir.as_deref(), rules.work_dir.as_deref())?;
    let mut limits = options.limits.within(rules.limits);
    let has = rules.cgroups.as_ref().map_or(Controllers::default(), Cgroups::controllers);
    held(&limits, has)?;
    let make = |cgroups: &Cgroups| cgroups.make(context.attempt, &limits, rules.kill_leftovers);
    let cgroup = rules.cgroups.as_ref().map(make).transpose()?;
    // One or the other: address space is a poor measure of memory where there is a better one.
    let memory = if has.memory { limits.memory.take() } else { None };
    let gate = cgroup.is_some().then_some(options.acknowledge);
    let mut command = match script(&limits, gate) {
        None => {
            let mut command = Command::new(program);
            command.args(argv.iter().skip(1));
            command
        }
        Some(script) => {
            // The shell would only say 127.
            let path = variables.iter().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value.as_str());
            if !is_there(program, path, dir.as_deref()) {
                return Err(not_there(program));
            }
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(script).arg("sh").args(argv);
            command
        }
    };
    command
        .env_clear()
        .envs(variables)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    command.stdin(if options.acknowledge || gate.is_some() { Stdio::piped() } else { Stdio::null() });
    if let Some(dir) = dir {
        command.current_dir(dir);
    }
    if let Some(user) = user {
        let owned = std::os::unix::fs::chown(input.path(), Some(user.uid.as_raw()), Some(user.gid.as_raw()));
        owned.map_err(|error| {
            ShardError::transient(format!("the program's input could not be given to its user: {error}"))
        })?;
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw()).env("HOME", &user.dir).env("USER", &user.name);
    }
    Ok(Launch { command, limits, cgroup, memory, _input: input })
}

/// A limit that nothing here holds must not be taken for one that does.
fn held(limits: &ProgramLimits, has: Controllers) -> Result<(), ShardError> {
    let missing = match (limits.cpu_percent.is_some() && !has.cpu, limits.processes.is_some() && !has.pids) {
        (true, _) => "cpu_percent",
        (_, true) => "processes",
        _ => return Ok(()),
    };
    Err(ShardError::permanent(format!(
        "limits.{missing} can't be held at this worker: it has no cgroup that limits it. Give it one (worker.cgroup in its configuration; \
         `shardcron doctor` says what it has), or leave the limit out"
    )))
}

/// Lets a program go that waits at its gate for its cgroup. `acknowledge`: it reads on.
pub(super) async fn open_gate(child: &mut Child, cgroup: &AttemptGroup, acknowledge: bool) -> Result<(), ShardError> {
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    let admitted = id.map_or(Ok(()), |id| cgroup.admit(id));
    admitted.map_err(|e| ShardError::transient(format!("the program could not be put into its cgroup: {e}")))?;
    if let Some(stdin) = &mut child.stdin {
        // Who is gone by now has its end told elsewhere.
        let _ = stdin.write_all(b"\n").await;
    }
    if !acknowledge {
        child.stdin = None;
    }
    Ok(())
}

/// The text that sets limits; `None` without limits. Numbers only go into it. `gate`: it waits for a line first, until it is in its
/// cgroup, and the program has the rest of its input if that is true.
fn script(limits: &ProgramLimits, gate: Option<bool>) -> Option<String> {
    let mut steps = Vec::new();
    if gate.is_some() {
        steps.push("IFS= read -r _".to_owned());
    }
    if let Some(memory) = limits.memory {
        steps.push(format!("ulimit -v {}", memory.0.div_ceil(1_024)));
    }
    if let Some(time) = limits.cpu_time {
        let seconds = time.0.div_ceil(1_000).max(1);
        steps.push(format!("ulimit -S -t {seconds} && ulimit -H -t {}", seconds + CPU_GRACE_S));
    }
    if let Some(files) = limits.open_files {
        steps.push(format!("ulimit -n {files}"));
    }
    if steps.is_empty() {
        return None;
    }
    // 126: as shells say that something is there and can't be run.
    Some(format!(
        "{} || {{ echo 'the limits of this job can not be set here' >&2; exit 126; }}; exec \"$@\"{}",
        steps.join(" && "),
        if gate == Some(false) { " </dev/null" } else { "" }
    ))
}

fn is_there(program: &str, path: &str, dir: Option<&Path>) -> bool {
    let runs = |file: &Path| file.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    if program.contains('/') {
        return runs(&dir.map_or_else(|| PathBuf::from(program), |dir| dir.join(program)));
    }
    path.split(':').any(|folder| runs(&Path::new(folder).join(program)))
}

fn not_there(program: &str) -> ShardError {
    ShardError::permanent(format!(
        "this worker has no program '{program}'; install it on this machine, or give its full path in the job's exec (PATH is the \
         worker's own)"
    ))
}

/// A job's folder, which can't lead out of the worker's, by a symbolic link either.
fn folder(dir: Option<&str>, work_dir: Option<&Path>) -> Result<Option<PathBuf>, ShardError> {
    let Some(dir) = dir else { return Ok(work_dir.map(Path::to_owned)) };
    let base = work_dir.unwrap_or(Path::new("."));
    let found = base.canonicalize().and_then(|base| Ok((base.join(dir).canonicalize()?, base)));
    match found {
        Ok((inside, base)) if inside.starts_with(&base) && inside.is_dir() => Ok(Some(inside)),
        Ok(_) => Err(ShardError::permanent(format!(
            "dir = \"{dir}\" is no folder within the work_dir {} of this worker",
            base.display()
        ))),
        Err(error) => Err(ShardError::permanent(format!(
            "dir = \"{dir}\" can't be entered in the work_dir {} of this worker: {error}; make it, or change the job",
            base.display()
        ))),
    }
}

fn find_user(name: &str, rules: &ProgramRules) -> Result<User, ShardError> {
    if !rules.allow_users.iter().any(|allowed| allowed == name) {
        return Err(ShardError::permanent(format!(
            "this worker does not let jobs run as the user '{name}'. To allow it, add \"{name}\" to allow_users in the worker's own \
             configuration (a job can't do that)"
        )));
    }
    if !Uid::effective().is_root() {
        return Err(ShardError::permanent(format!(
            "user = \"{name}\": only a worker that runs as root can run programs as another user; start it so, or leave 'user' out"
        )));
    }
    match User::from_name(name) {
        Ok(Some(user)) => Ok(user),
        Ok(None) => {
            Err(ShardError::permanent(format!("this machine has no user '{name}'; make one, or change the job")))
        }
        Err(error) => Err(ShardError::transient(format!("the user '{name}' could not be looked up: {error}"))),
    }
}

/// Why a program could not be started.
pub(super) fn not_started(program: &str, work_dir: Option<&Path>, error: &std::io::Error) -> ShardError {
    let dir_missing = work_dir.filter(|dir| !dir.is_dir());
    match (error.kind(), dir_missing) {
        (_, Some(dir)) => ShardError::permanent(format!(
            "the work_dir {} of this worker is not a directory; make it, or change it in the worker's configuration",
            dir.display()
        )),
        (ErrorKind::NotFound, _) => not_there(program),
        (ErrorKind::PermissionDenied, _) => ShardError::permanent(format!(
            "'{program}' may not be run by this worker's user; make it executable (chmod +x), or name its interpreter first"
        )),
        (ErrorKind::InvalidInput, _) => ShardError::permanent(format!(
            "'{program}' can't be started: a NUL character stands in an argument or in a value for its environment"
        )),
        (ErrorKind::ArgumentListTooLong, _) => ShardError::permanent(format!(
            "'{program}' can't be started: its arguments and its environment are too long; hand over a file"
        )),
        _ if error.raw_os_error() == Some(nix::libc::ENOEXEC) => ShardError::permanent(format!(
            "'{program}' is no program that this machine can run; a script needs a first line such as #!/bin/sh, or its \
             interpreter first in the job's exec"
        )),
        // Too many processes, no memory: another moment may be better.
        _ => ShardError::transient(format!("'{program}' could not be started: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_domain::units::Span;

    #[test]
    fn without_limits_no_shell_is_near() {
        assert_eq!(script(&ProgramLimits::default(), None), None);
        let limits = ProgramLimits {
            memory: Some(Bytes(1 << 20)),
            cpu_time: Some(Span(1_500)),
            open_files: Some(9),
            ..ProgramLimits::default()
        };
        let gated = script(&ProgramLimits::default(), Some(false)).unwrap();
        assert!(gated.starts_with("IFS= read -r _ || ") && gated.ends_with("exec \"$@\" </dev/null"), "{gated}");
        assert!(script(&limits, Some(true)).unwrap().ends_with("exec \"$@\""));
        let script = script(&limits, None).unwrap();
        assert!(
            script.starts_with("ulimit -v 1024 && ulimit -S -t 2 && ulimit -H -t 7 && ulimit -n 9 || "),
            "{script}"
        );
        assert!(script.ends_with("exec \"$@\""), "{script}");
    }

    #[test]
    fn a_limit_that_nothing_holds_is_refused() {
        let all = Controllers { memory: true, cpu: true, pids: true };
        for limits in [
            ProgramLimits { cpu_percent: Some(50), ..ProgramLimits::default() },
            ProgramLimits { processes: Some(9), ..ProgramLimits::default() },
        ] {
            assert_eq!(held(&limits, all), Ok(()));
            let refused = held(&limits, Controllers { memory: true, ..Controllers::default() }).unwrap_err();
            assert!(refused.message.contains("worker.cgroup"), "{refused}");
        }
    }

    #[test]
    fn a_folder_does_not_lead_out() {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir(base.path().join("in")).unwrap();
        std::os::unix::fs::symlink("/etc", base.path().join("out")).unwrap();
        assert!(folder(Some("in"), Some(base.path())).unwrap().unwrap().ends_with("in"));
        assert!(folder(Some("out"), Some(base.path())).is_err(), "by a link");
        assert!(folder(Some("none"), Some(base.path())).is_err());
        assert_eq!(folder(None, None), Ok(None));
    }
}
