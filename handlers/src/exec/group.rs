//! A program with everything that it starts: one process group, ended as a whole.
//!
//! The group's number is the first process's id, and stays reserved only while that process has not been waited for. So the end
//! of the program is looked at without reaping it, the group is killed, and only then is the program reaped: a signal can never
//! reach somebody else's group that got the number anew.

use super::ExecLimits;
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use shardcron_sdk::ShardContext;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

/// How a program ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// By itself, with this code.
    Exited(i32),
    /// By a signal that was not ours.
    Signalled(String),
    /// By us, because its time was over.
    TimedOut { how: &'static str },
    /// By us, because it was told to stop.
    Stopped { how: &'static str },
    /// It can't be said.
    Lost(io::Error),
}

const BY_TERM: &str = "its process group ended on SIGTERM";
const BY_KILL: &str = "its process group did not end on SIGTERM and was killed with SIGKILL";
const NOT_GONE: &str = "its process group was sent SIGKILL, but has not gone yet (it hangs in the kernel)";

/// A running program. Dropped before its end, it takes its group with it.
pub(crate) struct Group {
    pub(crate) child: Child,
    ends: SignalStream,
    /// `None` once the program is reaped: the number may belong to others then.
    id: Option<Pid>,
}

impl Group {
    /// Starts a program as the first of its own group.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        // Before the start, so that no end is missed.
        let ends = signal(SignalKind::child())?;
        let child = command.spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok()).filter(|id| *id > 1).map(Pid::from_raw);
        Ok(Group { child, ends, id })
    }

    /// The id of the program, while it has not been waited for.
    pub(crate) fn first(&self) -> Option<i32> {
        self.id.map(Pid::as_raw)
    }

    /// Waits for the end, or brings it about when the attempt's time is over or it is told to stop.
    pub(crate) async fn see_through(&mut self, context: &ShardContext, limits: &ExecLimits) -> Ending {
        tokio::select! {
            biased;
            ended = self.ended() => return match ended {
                Ok(()) => self.reap(limits).await,
                Err(error) => Ending::Lost(error),
            },
            () = context.stop.cancelled() => {}
            () = at_deadline(context) => {}
        }
        let timed_out = context.is_overdue();
        let grace = match context.time_left() {
            Some(left) if !timed_out => limits.term_grace.min(left),
            _ => limits.term_grace,
        };
        let how = self.end(grace, limits).await;
        if timed_out { Ending::TimedOut { how } } else { Ending::Stopped { how } }
    }

    async fn end(&mut self, grace: Duration, limits: &ExecLimits) -> &'static str {
        self.signal(Signal::SIGTERM);
        let by_itself = tokio::time::timeout(grace, self.ended()).await.is_ok();
        self.signal(Signal::SIGKILL);
        let gone = by_itself || tokio::time::timeout(limits.reap, self.ended()).await.is_ok();
        if !gone {
            return NOT_GONE;
        }
        let _ = self.reap(limits).await;
        if by_itself { BY_TERM } else { BY_KILL }
    }

    /// Ends when the program has, without reaping it. Safe to be dropped and begun again.
    async fn ended(&mut self) -> io::Result<()> {
        let Some(id) = self.id else { return Ok(()) };
        loop {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
            match waitid(Id::Pid(id), flags) {
                Ok(WaitStatus::StillAlive) => {}
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if self.ends.recv().await.is_none() {
                return Err(io::Error::other("the stream of SIGCHLD ended"));
            }
        }
    }

    /// Kills what is left of the group and takes the program's exit status.
    async fn reap(&mut self, limits: &ExecLimits) -> Ending {
        self.signal(Signal::SIGKILL);
        self.id = None;
        match tokio::time::timeout(limits.reap, self.child.wait()).await {
            Ok(Ok(status)) => match (status.code(), status.signal()) {
                (Some(code), _) => Ending::Exited(code),
                (None, Some(number)) => Ending::Signalled(signal_name(number)),
                (None, None) => Ending::Lost(io::Error::other(format!("unknown status {status}"))),
            },
            Ok(Err(error)) => Ending::Lost(error),
            Err(_) => Ending::Lost(io::Error::other("its status did not come")),
        }
    }

    fn signal(&self, which: Signal) {
        if let Some(id) = self.id {
            // ESRCH: nobody is left in the group, and that is what is wanted.
            let _ = killpg(id, which);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

async fn at_deadline(context: &ShardContext) {
    match context.deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

fn signal_name(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.as_str().to_owned())
}
