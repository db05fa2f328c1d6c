//! The cells of the matrix, and what each promises: the one table of bounds, each with its reason.

use clap::ValueEnum;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What a fault is put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// The scheduler that leads.
    Leader,
    /// The worker that has the most shards in hand.
    Worker,
    /// The queue.
    #[value(name = "rabbitmq")]
    RabbitMq,
    /// Lease, presence, idempotency keys.
    Redis,
    /// The ledger.
    #[value(name = "mysql")]
    MySql,
}

/// What is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Fault {
    /// SIGKILL. A service is started again with its data; a process of ours is replaced by another.
    Killed,
    /// SIGSTOP, and woken when the others have gone on without it.
    Frozen,
    /// Killed and started again with nothing in it.
    Wiped,
    /// A service: from everybody. A process of ours: from all its neighbours at once.
    Cut,
    /// A process of ours from RabbitMQ alone.
    #[value(name = "cut-rabbitmq")]
    CutRabbitMq,
    /// A process of ours from Redis alone.
    CutRedis,
    /// A process of ours from the ledger alone.
    #[value(name = "cut-mysql")]
    CutMySql,
    /// Every byte late, and for some seconds none at all.
    Slow,
}

fn word(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&word(self))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&word(self))
    }
}

/// One field of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// On what.
    pub part: Part,
    /// What.
    pub fault: Fault,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part, self.fault)
    }
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Cell::all().into_iter().find(|cell| cell.to_string() == text).ok_or_else(|| {
            let all: Vec<String> = Cell::all().iter().map(Cell::to_string).collect();
            format!("there is no cell '{text}'; there are {}", all.join(", "))
        })
    }
}

/// The times that the cluster runs with.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// `scheduler.lease_ttl`
    pub lease_ttl: Duration,
    /// `worker.lost_after`
    pub lost_after: Duration,
    /// Whether these are the program's defaults, and nothing is configured.
    pub defaults: bool,
}

impl Timings {
    /// The program's defaults.
    pub const DEFAULT: Timings =
        Timings { lease_ttl: Duration::from_secs(5), lost_after: Duration::from_secs(15), defaults: true };
    /// For runs that have to be short.
    pub const FAST: Timings =
        Timings { lease_ttl: Duration::from_secs(2), lost_after: Duration::from_secs(2), defaults: false };
    /// For the soak: each fault, and what follows from it, has its place between two others.
    pub const SOAK: Timings =
        Timings { lease_ttl: Duration::from_secs(3), lost_after: Duration::from_secs(4), defaults: false };
}

/// How the time to recover is read from the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// From the fault: how late the latest decision was that came after it.
    Firing,
    /// From the fault: until the last shard that the victim had in hand ran elsewhere, or was recorded.
    Shards,
    /// From the return: until every execution of which the victim had a shard in hand had ended.
    Recorded,
    /// From the return (or the end of the fault): until every per-second job has fired again and recorded a shard of that.
    Return,
}

/// What a cell promises, and how long its fault lasts.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The most that recovering may take.
    pub bound: Duration,
    /// What is measured.
    pub measure: Measure,
    /// From the fault to the heal. For a service that is killed, to its start.
    pub lasts: Duration,
    /// Why this bound.
    pub why: &'static str,
}

/// Work resumes within this time of a service's return, whichever it was.
const RESUMED: Duration = Duration::from_secs(5);
/// What a fail-over may take beyond the lease or the liveness that it waits for.
const FAIL_OVER: Duration = Duration::from_secs(1);
const TAKE_OVER: Duration = Duration::from_secs(2);
/// How long the network is late, before and after it stands still.
const SLOW: Duration = Duration::from_secs(6);

impl Cell {
    /// All of them.
    pub fn all() -> Vec<Cell> {
        use Fault::{Cut, CutMySql, CutRabbitMq, CutRedis, Frozen, Killed, Slow, Wiped};
        let ours = [Killed, Frozen, Cut, CutRabbitMq, CutRedis, CutMySql, Slow];
        let forgetful = [Killed, Frozen, Wiped, Cut, Slow];
        let durable = [Killed, Frozen, Cut, Slow];
        let parts: [(Part, &[Fault]); 5] = [
            (Part::Leader, &ours),
            (Part::Worker, &ours),
            (Part::RabbitMq, &forgetful),
            (Part::Redis, &forgetful),
            (Part::MySql, &durable),
        ];
        parts.iter().flat_map(|(part, faults)| faults.iter().map(|fault| Cell { part: *part, fault: *fault })).collect()
    }

    /// Whether the cell needs its service for itself: it will not survive it unharmed.
    pub fn owns_service(self) -> bool {
        matches!(self.fault, Fault::Killed | Fault::Frozen | Fault::Wiped)
    }

    /// Its promise.
    pub fn rule(self, timings: Timings) -> Rule {
        let fail_over = timings.lease_ttl + FAIL_OVER;
        let take_over = timings.lost_after + TAKE_OVER;
        let rule = |bound, measure, lasts, why| Rule { bound, measure, lasts, why };
        let past = |bound: Duration| bound + Duration::from_secs(1);
        match (self.part, self.fault) {
            (Part::Leader, Fault::Killed) => rule(
                fail_over,
                Measure::Firing,
                past(fail_over),
                "the lease ends at most its TTL after the last renewal; a standby looks often enough to have it within the second",
            ),
            (Part::Leader, Fault::Frozen) => rule(
                fail_over,
                Measure::Firing,
                past(fail_over),
                "as killed; when it wakes, the ledger refuses its epoch",
            ),
            (Part::Leader, Fault::Cut | Fault::CutRedis) => rule(
                fail_over,
                Measure::Firing,
                past(fail_over),
                "it stops acting before its trust window ends, and another takes the lease",
            ),
            (Part::Leader, Fault::CutMySql) => rule(
                fail_over,
                Measure::Firing,
                past(fail_over),
                "who can't write to the ledger gives up the lease, and another takes it",
            ),
            (Part::Leader, Fault::CutRabbitMq) => rule(
                RESUMED,
                Measure::Return,
                past(fail_over),
                "it fires on into the ledger; what it could not hand out follows when RabbitMQ is in reach again",
            ),
            (Part::Worker, Fault::Killed) => rule(
                take_over,
                Measure::Shards,
                past(take_over),
                "its heartbeat is missed for the lost-after time; the sweep and the hand-out follow within two seconds",
            ),
            (Part::Worker, Fault::Frozen) => {
                rule(take_over, Measure::Shards, past(take_over), "as killed; what it reports when it wakes is refused")
            }
            (Part::Worker, Fault::CutMySql) => rule(
                RESUMED,
                Measure::Recorded,
                past(take_over),
                "it beats and its handlers run, so nobody takes its shards: it holds what has ended, and records it on return",
            ),
            (Part::Worker, Fault::Cut | Fault::CutRedis | Fault::CutRabbitMq) => rule(
                take_over,
                Measure::Shards,
                past(take_over),
                "its shards end where they are, are handed back, or are taken as from a dead worker",
            ),
            (_, Fault::Slow) => rule(
                RESUMED,
                Measure::Return,
                SLOW,
                "late answers are waited for and lost ones asked for again; nothing waits for a person",
            ),
            (Part::RabbitMq, Fault::Wiped) => rule(
                RESUMED,
                Measure::Return,
                Duration::ZERO,
                "queues are declared again at once; what was lost with them follows after republish_after",
            ),
            (Part::Redis, Fault::Wiped) => rule(
                RESUMED,
                Measure::Return,
                Duration::ZERO,
                "nobody holds the lease: the first that asks leads, under a later epoch",
            ),
            (Part::RabbitMq | Part::Redis | Part::MySql, _) => rule(
                RESUMED,
                Measure::Return,
                past(timings.lease_ttl),
                "everybody reconnects by itself and tries at least each second",
            ),
            (Part::Leader | Part::Worker, Fault::Wiped) => {
                rule(Duration::ZERO, Measure::Return, Duration::ZERO, "has no data to lose; not a cell")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_fault_of_every_part_has_a_cell() {
        let names: BTreeSet<String> = Cell::all().iter().map(Cell::to_string).collect();
        assert_eq!(names.len(), Cell::all().len(), "each once");
        for part in ["leader", "worker", "rabbitmq", "redis", "mysql"] {
            for fault in ["killed", "frozen", "cut", "slow"] {
                assert!(names.contains(&format!("{part}/{fault}")), "{part}/{fault}");
            }
        }
        assert!(names.contains("rabbitmq/wiped") && names.contains("redis/wiped"));
        for name in names {
            assert_eq!(name.parse::<Cell>().unwrap().to_string(), name);
        }
        assert!("worker/wiped".parse::<Cell>().unwrap_err().contains("there are leader/killed"));
    }

    #[test]
    fn the_bounds_that_are_promised() {
        let bound = |name: &str| name.parse::<Cell>().unwrap().rule(Timings::DEFAULT).bound.as_secs();
        assert_eq!((bound("leader/killed"), bound("worker/killed"), bound("worker/frozen")), (6, 17, 17));
        for service in ["rabbitmq", "redis", "mysql"] {
            assert_eq!(bound(&format!("{service}/killed")), 5);
        }
    }
}
