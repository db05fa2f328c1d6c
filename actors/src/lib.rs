//! The actors: thin. They receive, ask the domain, call a port, send on.
//!
//! Owns: the scheduler's actors (trigger, dispatcher, supervisor), the worker's (consumer, recorder, heartbeat), the lease task
//! and the guardian, and their order at start and shutdown.
//!
//! Must not: hold a connection on an arbiter (all I/O is spawned onto the I/O runtime that is handed in), run a user's code
//! inside an actor, or decide anything that `shardcron_domain` decides.

pub mod clock;
pub mod entropy;
pub mod guardian;
mod heads;
pub mod io;
mod leadership;
pub mod ledger_time;
pub mod modes;
pub mod ports;
pub mod scheduler;
mod telemetry;
pub mod trace;
mod traced;
pub mod worker;

pub use clock::{Clock, SystemClock};
pub use entropy::{Entropy, SystemEntropy};
pub use io::Io;
pub use leadership::LeaderState;
pub use ports::Ports;
pub use scheduler::{RetentionOptions, Scheduler, SchedulerOptions, SchedulerStatus};
pub use trace::{Trace, TraceFile, TraceSink};
pub use worker::{TierOptions, Worker, WorkerEnd, WorkerOptions, WorkerStatus};
