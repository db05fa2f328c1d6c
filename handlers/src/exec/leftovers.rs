//! Processes of an attempt that left its group: they have a session of their own, and no signal to the group reaches them.
//!
//! They are found by a variable of their environment that names the attempt (Linux: `/proc/<id>/environ`), which a process inherits
//! unless it clears its environment. Looked for after the program's end, and before a later attempt at the same shard begins.

use super::environment::MARK;
use std::fs;

/// Rounds of finding and killing: a process that forks meanwhile is found in the next one.
const ROUNDS: usize = 3;

/// A process that is still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leftover {
    pub(super) id: i32,
    pub(super) command: String,
}

/// Whose processes are looked for.
#[derive(Clone, Debug)]
enum Whose {
    /// Of one attempt: younger than its program.
    Attempt { mark: String, program: i32 },
    /// Of attempts before this one at the same shard: their worker was killed, and nobody ended them.
    Earlier { key: String, attempt: u32 },
}

impl Whose {
    fn is(&self, variable: &[u8]) -> bool {
        let Some(mark) = variable.strip_prefix(MARK.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) else {
            return false;
        };
        match self {
            Whose::Attempt { mark: wanted, .. } => mark == wanted.as_bytes(),
            Whose::Earlier { key, attempt } => {
                let number = mark.strip_prefix(key.as_bytes()).and_then(|rest| rest.strip_prefix(b"/"));
                let number = number.and_then(|n| std::str::from_utf8(n).ok()?.parse::<u32>().ok());
                number.is_some_and(|number| number < *attempt)
            }
        }
    }

    /// Whether a process can be one at all, by its id: ids grow, until they begin again.
    fn may_be(&self, id: i32, newest: i32) -> bool {
        match self {
            Whose::Attempt { program, .. } => id > *program || newest < *program,
            Whose::Earlier { .. } => true,
        }
    }
}

fn find(whose: &Whose) -> Vec<Leftover> {
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    let ids: Vec<i32> =
        all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|id| *id > 1).collect();
    let own = std::process::id();
    let newest = newest_id();
    ids.into_iter()
        .filter(|id| whose.may_be(*id, newest) && u32::try_from(*id) != Ok(own))
        .filter(|id| carries(*id, whose))
        .map(|id| Leftover { id, command: command_of(id) })
        .collect()
}

/// The id that was given last.
fn newest_id() -> i32 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // What can't be read is treated as "begun again": more is looked at.
    load.split_whitespace().next_back().and_then(|id| id.parse().ok()).unwrap_or(0)
}

fn carries(id: i32, whose: &Whose) -> bool {
    fs::read(format!("/proc/{id}/environ")).is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| whose.is(one)))
}

pub(super) fn command_of(id: i32) -> String {
    fs::read_to_string(format!("/proc/{id}/comm")).map_or_else(|_| "?".into(), |name| name.trim().to_owned())
}

/// Finds what is left of an attempt and kills it if told to. Returns what was found, and whether it is gone.
pub(super) async fn of_attempt(mark: String, program: i32, end_them: bool) -> (Vec<Leftover>, bool) {
    look(Whose::Attempt { mark, program }, end_them).await
}

/// The same for what earlier attempts left on this machine, whose worker was killed and could not end them.
pub(super) async fn of_earlier(key: String, attempt: u32, end_them: bool) -> (Vec<Leftover>, bool) {
    if attempt < 2 {
        return (Vec::new(), false);
    }
    look(Whose::Earlier { key, attempt }, end_them).await
}

async fn look(whose: Whose, end_them: bool) -> (Vec<Leftover>, bool) {
    let work = move || {
        let found = find(&whose);
        if found.is_empty() || !end_them {
            return (found, false);
        }
        let mut left = found.clone();
        for _ in 0..ROUNDS {
            ending::end(&left, &whose);
            left = find(&whose);
            if left.is_empty() {
                break;
            }
        }
        let gone = left.is_empty();
        (found, gone)
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_default()
}

/// Ending processes by descriptors of them. Elsewhere than on Linux none is found, for there is no `/proc`.
#[cfg(target_os = "linux")]
mod ending {
    use super::{Leftover, Whose, carries};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    /// The time that killed processes have to be gone. A kill is only asked for by the signal; the kernel does it when the
    /// process runs next. What is not gone then hangs in the kernel.
    const DYING: Duration = Duration::from_secs(2);

    /// Kills these processes and waits until they are gone, for a bounded time.
    pub(super) fn end(processes: &[Leftover], whose: &Whose) {
        // What can't be opened is gone, which is as good.
        let killed: Vec<OwnedFd> = processes.iter().filter_map(|process| kill(process.id, whose)).collect();
        let until = Instant::now() + DYING;
        for process in &killed {
            // A descriptor of a process becomes readable when it has ended. One that was interrupted is looked at again by `find`.
            let left = until.saturating_duration_since(Instant::now());
            let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], Timespec::try_from(left).ok().as_ref());
        }
    }

    /// Kills one process through a descriptor, which stays that process's even when its number is given to another.
    fn kill(id: i32, whose: &Whose) -> Option<OwnedFd> {
        let process = pidfd_open(Pid::from_raw(id)?, PidfdFlags::empty()).ok()?;
        // The number may have passed to somebody else between finding and opening.
        if !carries(id, whose) {
            return None;
        }
        pidfd_send_signal(&process, Signal::KILL).ok()?;
        Some(process)
    }
}

#[cfg(not(target_os = "linux"))]
mod ending {
    pub(super) fn end(_: &[super::Leftover], _: &super::Whose) {}
}
