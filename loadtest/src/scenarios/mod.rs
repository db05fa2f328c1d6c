//! The scenarios, one file each.

pub mod throughput;
pub mod worker_kill;

const SCENARIOS: [(&str, &str); 2] = [
    ("throughput", "no-op shards end to end in a cluster, beside what RabbitMQ and the database can do alone"),
    (
        "worker-kill",
        "workers killed at random under load and replaced; the oracle counts what was lost or recorded twice",
    ),
];

/// Prints them, a line each.
pub fn list() {
    for (name, what) in SCENARIOS {
        println!("{name:<14}{what}");
    }
}
