//! The HTTP surface of the program: health, metrics, workers, pending jobs. It only looks; but for the answers that services bring to
//! this process's handlers, which it hands on.
//!
//! Owns: the server, who may ask it (case Z-01), the shape of its answers, and the descriptions of the program's metrics.
//!
//! Must not: change anything (only GET and HEAD exist, and POST for callbacks), block on a sick service (every question has a time limit), show a
//! parameter, a statement or an argument of a job (case Z-05), or put an id into a metric's label.
//!
//! | path | answer |
//! | --- | --- |
//! | `/healthz` | JSON; 503 when a dependency that this process needs is away. Asked without the token, the bare states only |
//! | `/livez` | 200 as long as the process answers: for supervisors that would restart it, which cures no database |
//! | `/metrics` | Prometheus text |
//! | `/workers` | JSON: who is alive, draining or lost, and what it runs |
//! | `/jobs` | JSON: jobs with their next instants; overdue ones say so (case A-05) |
//! | `/callbacks/…` | POST only: a service's answer to one attempt, under an address that it was told |
//! | `/jobs/pending` | JSON: what waits and runs by tier, and the executions that have not ended |

mod access;
mod callbacks;
mod listener;
pub mod metric_definitions;
mod routes;
mod server;
mod state;
mod views;

pub use callbacks::CallbackDesk;
pub use metric_definitions::{build_recorder, install_metrics};
pub use server::{WebError, WebHandle, WebOptions, serve};
pub use state::{
    Degraded, Dependency, Health, Leader, Pending, PendingExecution, PortsState, ProcessHealth, Status, WebState,
};
