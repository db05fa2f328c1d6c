//! The scenarios, one file each.

pub mod effects;
pub mod groups;
pub mod once;
pub mod precision;
pub mod skew;
pub mod throughput;
pub mod ways;
pub mod worker_kill;

const SCENARIOS: [(&str, &str); 10] = [
    ("throughput", "no-op shards end to end in a cluster, beside what RabbitMQ and the database can do alone"),
    (
        "precision",
        "many jobs on one scheduler: how late they fire, and what thousands due in one second do to the others",
    ),
    (
        "worker-kill",
        "workers killed at random under load and replaced; the oracle counts what was lost or recorded twice",
    ),
    ("effects", "each record adds 1 to a counter while workers are killed at random: every counter is 1 at the end"),
    ("groups", "a job of very many tiny shards, singly and grouped, and the small jobs that run beside it"),
    ("once", "what it costs to work on a record once, beside the insert of a bare row"),
    (
        "skew",
        "the flights by their carriers, two of which hold nearly all the work; cut anew by the durations of the last run",
    ),
    (
        "ways",
        "reconcile-flights in every way to write a job, each with ten workers killed: the same answer, and once where that is promised",
    ),
    (
        "faults",
        "each fault on each part, in the middle of load: what was lost, doubled or missed, and the time to recover",
    ),
    (
        "soak",
        "a random fault every ten seconds for long: the same counts, and memory, handles and connections stay flat",
    ),
];

/// Prints them, a line each.
pub fn list() {
    for (name, what) in SCENARIOS {
        println!("{name:<14}{what}");
    }
}
