//! What the kernel knows of a process: memory and processor time.

/// Ticks of `/proc/<pid>/stat` per second: `USER_HZ`, which is 100 on every Linux that Rust's standard library supports.
const TICKS_PER_SECOND: f64 = 100.0;

/// The most memory that the process had resident so far, in MiB. `None` once it is gone.
pub fn peak_rss_mib(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}

/// What a process holds at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Held {
    /// Resident memory in MiB.
    pub rss_mib: f64,
    /// Open file handles, sockets included.
    pub handles: f64,
    /// Threads.
    pub threads: f64,
}

/// What the process holds now. `None` once it is gone.
pub fn held(pid: u32) -> Option<Held> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<f64> {
        status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
    };
    let handles = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some(Held { rss_mib: field("VmRSS:")? / 1024.0, handles: handles as f64, threads: field("Threads:")? })
}

/// Processor seconds, user and system, of the process and all its threads. `None` once it is gone.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    parse_cpu(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The command's name is in brackets and may contain anything, so fields are counted from behind it.
fn parse_cpu(stat: &str) -> Option<f64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / TICKS_PER_SECOND)
}

/// Processes that were started with a value of a variable that begins so, with their names. One that has ended, or is just ending, has no
/// environment any more and can do nothing either.
pub fn with_variable(variable: &str, begin: &str) -> Vec<String> {
    let wanted = format!("{variable}={begin}");
    let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
    let ids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let carries = |id: &u32| {
        let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one.starts_with(wanted.as_bytes()))
    };
    let name = |id| {
        let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        format!("{} ({id})", name.trim())
    };
    ids.filter(carries).map(name).collect()
}

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_times_behind_any_name() {
        let stat = "7 (a) b 1 2) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 100 1000 10";
        assert_eq!(parse_cpu(stat), Some(3.0));
        assert_eq!(parse_cpu("nonsense"), None);
    }

    #[test]
    fn knows_this_process() {
        assert!(peak_rss_mib(std::process::id()).unwrap() > 1.0);
        assert!(cpu_seconds(std::process::id()).is_some());
        assert_eq!(peak_rss_mib(u32::MAX), None);
        let held = held(std::process::id()).unwrap();
        assert!(held.rss_mib > 1.0 && held.handles > 2.0 && held.threads >= 1.0, "{held:?}");
    }
    #[test]
    fn finds_processes_by_what_they_were_started_with() {
        let mark = format!("of-{}", std::process::id());
        let mut child =
            std::process::Command::new("sleep").arg("300").env("LOADTEST_MARK", format!("{mark}/1/2")).spawn().unwrap();
        // The environment is the program's own only once it has been executed.
        let found = testkit::poll(std::time::Duration::from_secs(10), || {
            Some(with_variable("LOADTEST_MARK", &format!("{mark}/"))).filter(|found| !found.is_empty())
        });
        let other = with_variable("LOADTEST_MARK", &format!("{mark}/2"));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, Some(vec![format!("sleep ({})", child.id())]));
        assert!(other.is_empty(), "{other:?}");
        assert!(with_variable("LOADTEST_MARK", &mark).is_empty(), "gone");
    }
}
