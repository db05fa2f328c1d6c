//! A cgroup (v2) for each attempt's program, where the worker has been given a folder for them: limits that hold for all of its processes
//! together, and an end that reaches every one of them, wherever it went.
//!
//! Promises: a program is in its group before its first instruction; the group is gone after the attempt, unless processes are left in it
//! that the worker's configuration lets run on; groups of workers that were killed are found by their names. The worker writes nowhere
//! but below the folder.

use super::leftovers::{Leftover, command_of};
use nix::errno::Errno;
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shardcron_domain::AttemptRef;
use shardcron_domain::cgroup::{Controllers, cpu_max, name_of, oom_kills, populated, read_name};
use shardcron_domain::program::ProgramLimits;
use shardcron_sdk::ShardError;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where `auto` looks. The second one is where version 1 holds the first.
const AUTO: [&str; 2] = ["/sys/fs/cgroup/shardcron", "/sys/fs/cgroup/unified/shardcron"];

/// The time that killed processes have to be gone. What is not gone then hangs in the kernel.
const DYING: Duration = Duration::from_secs(2);

/// The folder that a worker may make groups in, with what the kernel lets it limit there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    folder: PathBuf,
    controllers: Controllers,
}

impl Cgroups {
    /// Looks for the folder that the configuration names: a path, `auto`, or `off`. A named one is made if only it is missing. `None`: there
    /// is none, and none was asked for by name.
    ///
    /// # Errors
    /// The named folder can't be used: why, and what to do.
    pub fn look(setting: &str) -> Result<Option<Self>, String> {
        match setting {
            "off" => Ok(None),
            "auto" => Ok(AUTO.iter().find_map(|folder| Self::at(Path::new(folder)).ok())),
            folder => {
                let folder = Path::new(folder);
                if folder.parent().is_some_and(|above| above.join("cgroup.procs").exists()) && !folder.exists() {
                    fs::create_dir(folder).map_err(|e| unusable(folder, &format!("it can't be made: {e}")))?;
                }
                Self::at(folder).map(Some)
            }
        }
    }

    /// An existing folder.
    fn at(folder: &Path) -> Result<Self, String> {
        let there = fs::read_to_string(folder.join("cgroup.controllers"))
            .map_err(|e| unusable(folder, &format!("it is no folder of a cgroup2 file system ({e})")))?;
        if !folder.join("cgroup.kill").exists() {
            return Err(unusable(
                folder,
                "the kernel has no cgroup.kill there (Linux 5.14 has, but for the topmost folder)",
            ));
        }
        let trial = folder.join(format!("trial-{}", std::process::id()));
        fs::create_dir(&trial)
            .and_then(|()| fs::remove_dir(&trial))
            .map_err(|e| unusable(folder, &format!("this user can't make groups in it: {e}")))?;
        let control = folder.join("cgroup.subtree_control");
        // One by one: one that can't be had does not keep the others away. What came of it is read afterwards.
        for name in Controllers::read(&there).names() {
            if let Err(error) = fs::write(&control, format!("+{name}")) {
                tracing::debug!(folder = %folder.display(), controller = name, %error, "a controller of cgroups can't be had");
            }
        }
        let had = fs::read_to_string(&control).map_err(|e| unusable(folder, &e.to_string()))?;
        Ok(Cgroups { folder: folder.to_owned(), controllers: Controllers::read(&had) })
    }

    /// For people: where it is, and what it limits.
    #[must_use]
    pub fn describe(&self) -> String {
        let names = self.controllers.names();
        let limits = if names.is_empty() { "limits nothing".into() } else { format!("limits {}", names.join(", ")) };
        format!("{} ends programs as a whole and {limits}", self.folder.display())
    }

    /// What the kernel lets this worker limit for a program as a whole.
    #[must_use]
    pub fn controllers(&self) -> Controllers {
        self.controllers
    }

    /// Makes the group of an attempt, with its limits.
    pub(super) fn make(
        &self,
        attempt: AttemptRef,
        limits: &ProgramLimits,
        kill: bool,
    ) -> Result<AttemptGroup, ShardError> {
        let folder = self.folder.join(name_of(std::process::id(), attempt));
        fs::create_dir(&folder).map_err(|e| {
            ShardError::transient(format!("the cgroup {} of the program can't be made: {e}", folder.display()))
        })?;
        let group = AttemptGroup { folder, kill, done: false };
        group.limit(limits, self.controllers).map_err(|e| {
            ShardError::transient(format!("the limits of the program can't be set in {}: {e}", group.folder.display()))
        })?;
        Ok(group)
    }

    fn children(&self) -> impl Iterator<Item = (PathBuf, u32, AttemptRef)> {
        let all = fs::read_dir(&self.folder).ok().into_iter().flatten().flatten();
        all.filter_map(|entry| {
            let (worker, attempt) = read_name(entry.file_name().to_str()?)?;
            Some((entry.path(), worker, attempt))
        })
    }

    /// Removes the groups of workers that are gone, where nobody is left in them.
    pub(super) fn sweep(&self) {
        for (folder, worker, _) in self.children() {
            let gone = i32::try_from(worker)
                .is_ok_and(|id| nix::sys::signal::kill(Pid::from_raw(id), None) == Err(Errno::ESRCH));
            if gone {
                let _ = fs::remove_dir(folder);
            }
        }
    }

    /// Finds who is left of earlier attempts at a shard, and ends them if told to. Blocks for some seconds at most.
    pub(super) fn end_earlier(&self, attempt: AttemptRef, kill: bool) -> Ended {
        let same = |of: &AttemptRef| of.execution == attempt.execution && of.index == attempt.index;
        let mut all = Ended { gone: true, ..Ended::default() };
        for (folder, ..) in self.children().filter(|(_, _, of)| same(of) && of.attempt < attempt.attempt) {
            all.left.extend(named(processes(&folder)));
            all.gone &= if kill { end(&folder) } else { remove(&folder) };
        }
        all
    }
}

fn unusable(folder: &Path, why: &str) -> String {
    format!(
        "worker.cgroup = \"{}\" can't be used: {why}. Name a folder of a cgroup2 file system that is delegated to this user and holds no \
         processes itself, or set it to \"off\"",
        folder.display()
    )
}

/// The group of one attempt. Dropped, it is removed, with everybody in it if the worker kills what is left.
#[derive(Debug)]
pub(super) struct AttemptGroup {
    folder: PathBuf,
    kill: bool,
    done: bool,
}

/// What became of a group.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Processes that outlived the program.
    pub(super) left: Vec<Leftover>,
    /// They are gone now.
    pub(super) gone: bool,
    /// The kernel has killed one of its processes for their memory.
    pub(super) out_of_memory: bool,
}

impl AttemptGroup {
    fn limit(&self, limits: &ProgramLimits, controllers: Controllers) -> io::Result<()> {
        if let Some(memory) = limits.memory.filter(|_| controllers.memory) {
            self.set("memory.max", &memory.0.to_string())?;
            // A kernel without swap accounting has none of it to give either.
            let _ = self.set("memory.swap.max", "0");
            // One process that is killed for memory takes the others with it: half a program helps nobody.
            let _ = self.set("memory.oom.group", "1");
        }
        if let Some(percent) = limits.cpu_percent {
            self.set("cpu.max", &cpu_max(percent))?;
        }
        if let Some(processes) = limits.processes {
            self.set("pids.max", &processes.to_string())?;
        }
        Ok(())
    }

    fn set(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), text)
    }

    /// Takes a process in.
    pub(super) fn admit(&self, id: i32) -> io::Result<()> {
        self.set("cgroup.procs", &id.to_string())
    }

    /// After the program's end: sees who is left, ends them if the worker does, and removes the group if it is empty then. Those of the
    /// program's process group, whose first one is `program`, were killed a moment ago and are no leftovers. Blocks for some seconds
    /// at most.
    pub(super) fn finish(mut self, program: Option<i32>) -> Ended {
        self.done = true;
        let out_of_memory =
            fs::read_to_string(self.folder.join("memory.events")).is_ok_and(|text| oom_kills(&text) > 0);
        let dying = |id: &i32| nix::unistd::getpgid(Some(Pid::from_raw(*id))).ok().map(Pid::as_raw) == program;
        let left = named(processes(&self.folder).into_iter().filter(|id| program.is_none() || !dying(id)).collect());
        let gone = match (self.kill, left.is_empty()) {
            (true, _) => end(&self.folder),
            (false, true) => wait_until_empty(&self.folder, DYING) && remove(&self.folder),
            (false, false) => false,
        };
        Ended { left, gone, out_of_memory }
    }
}

impl Drop for AttemptGroup {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        if self.kill {
            let _ = self.set("cgroup.kill", "1");
        }
        // Whoever still dies keeps the folder for a moment, and nobody can wait for it here.
        if fs::remove_dir(&self.folder).is_err() && self.kill {
            let folder = std::mem::take(&mut self.folder);
            std::thread::spawn(move || end(&folder));
        }
    }
}

/// The processes of a group. Those of another pid namespace show as 0, and are nobody's that could be named.
fn processes(folder: &Path) -> Vec<i32> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.trim().parse().ok()).filter(|id| *id > 0).collect()
}

fn named(ids: Vec<i32>) -> Vec<Leftover> {
    ids.into_iter().map(|id| Leftover { id, command: command_of(id) }).collect()
}

/// Kills everybody in a group, waits until they are gone, and removes it. Whether it is gone.
fn end(folder: &Path) -> bool {
    let _ = fs::write(folder.join("cgroup.kill"), "1");
    wait_until_empty(folder, DYING) && remove(folder)
}

fn remove(folder: &Path) -> bool {
    match fs::remove_dir(folder) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// The kernel says on `cgroup.events` when the last process has gone.
fn wait_until_empty(folder: &Path, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        // Opened anew for each look: what has changed since it was opened is what is told.
        let Ok(events) = File::open(folder.join("cgroup.events")) else { return !folder.exists() };
        match io::read_to_string(&events) {
            Ok(text) if populated(&text) => {}
            _ => return true,
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let _ = poll(&mut [PollFd::new(&events, PollFlags::PRI)], Timespec::try_from(left).ok().as_ref());
    }
}
