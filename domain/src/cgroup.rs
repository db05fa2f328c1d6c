//! What stands in the files of cgroups (v2), and what is written into them.

use crate::{AttemptRef, ExecutionId};

/// Kinds of limits that the kernel gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controllers {
    /// Memory of all processes together.
    pub memory: bool,
    /// A share of the processors.
    pub cpu: bool,
    /// How many processes.
    pub pids: bool,
}

impl Controllers {
    /// Reads `cgroup.controllers` or `cgroup.subtree_control`: names with blanks between them. Others than ours are left out.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let has = |name: &str| text.split_whitespace().any(|word| word == name);
        Controllers { memory: has("memory"), cpu: has("cpu"), pids: has("pids") }
    }

    /// Their names, as the kernel has them.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        let all = [("memory", self.memory), ("cpu", self.cpu), ("pids", self.pids)];
        all.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect()
    }
}

/// Microseconds in which `cpu.max` is counted.
const PERIOD_US: u64 = 100_000;

/// `cpu.max` for a share of the processors: 100 is one whole processor.
#[must_use]
pub fn cpu_max(percent: u32) -> String {
    // The kernel refuses less than a millisecond.
    let quota = (u64::from(percent) * PERIOD_US / 100).max(1_000);
    format!("{quota} {PERIOD_US}")
}

fn value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Whether `cgroup.events` says that a process is there, in the group or below it.
#[must_use]
pub fn populated(text: &str) -> bool {
    value(text, "populated") != Some(0)
}

/// Processes that the kernel has killed for memory, by `memory.events`.
#[must_use]
pub fn oom_kills(text: &str) -> u64 {
    value(text, "oom_kill").unwrap_or(0)
}

/// The folder of an attempt's program: whose it is, and which attempt's.
#[must_use]
pub fn name_of(worker: u32, attempt: AttemptRef) -> String {
    format!("{worker}.{}.{}.{}", attempt.execution, attempt.index, attempt.attempt)
}

/// The worker's process and the attempt; `None` for another folder.
#[must_use]
pub fn read_name(name: &str) -> Option<(u32, AttemptRef)> {
    let mut parts = name.split('.');
    let worker = parts.next()?.parse().ok()?;
    let execution: ExecutionId = parts.next()?.parse().ok()?;
    let (index, attempt) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some((worker, AttemptRef { execution, index, attempt }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let read = Controllers::read("cpuset cpu io memory hugetlb pids rdma\n");
        assert_eq!(read, Controllers { memory: true, cpu: true, pids: true });
        assert_eq!(Controllers::read("cpuset memory.x\n").names(), Vec::<&str>::new());
        assert_eq!(Controllers::read("pids memory").names(), ["memory", "pids"]);
        assert!(populated("populated 1\nfrozen 0\n") && !populated("populated 0\nfrozen 0\n"));
        assert!(populated("garbage"), "what can't be read is not taken for empty");
        let events = "low 0\nhigh 0\nmax 4\noom 2\noom_kill 1\noom_group_kill 0\n";
        assert_eq!((oom_kills(events), oom_kills("oom 3\n"), oom_kills("")), (1, 0, 0));
    }

    #[test]
    fn limits_are_written_as_the_kernel_wants_them() {
        assert_eq!(cpu_max(150), "150000 100000");
        assert_eq!(cpu_max(0), "1000 100000", "the least that it takes");
        assert_eq!(cpu_max(u32::MAX), format!("{} 100000", u64::from(u32::MAX) * 1_000));
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        let attempt = AttemptRef { execution: ExecutionId(uuid::Uuid::from_u128(7)), index: 3, attempt: 2 };
        assert_eq!(read_name(&name_of(41, attempt)), Some((41, attempt)));
        for other in ["", "trial-7", "41", "41.x.3.2", &format!("{}.9", name_of(41, attempt)), "cgroup.procs"] {
            assert_eq!(read_name(other), None, "{other}");
        }
    }
}
