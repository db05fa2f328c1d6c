//! A small world, explored to its last state: two schedulers, two workers, one ledger, and a network that loses, duplicates and
//! reorders.
//!
//! Every transition of a shard, an execution or a decision is the domain's own (`shard::apply`, `execution::apply`,
//! `firing::decide`, `recovery::reconcile`, `liveness::Observer`). The model adds who may do what when:
//!
//! - A transaction of the ledger is one step. Between any two steps anybody else may have any number of steps: a pause needs no
//!   step of its own, and whoever was paused acts later on what it knew.
//! - What a leader read (the next instant, the outbox, its plan of reclaims) is kept in its own state and used later, deposed or
//!   not, until the ledger refuses its epoch.
//! - The broker delivers in any order, again until the ack, and forgets or doubles what the faults say.
//! - Faults are drawn from a budget, in any combination and at any point.
//! - The two schedulers are interchangeable, and so are the two workers: of states that differ in such names only, one is kept.
//!
//! # What is proved
//! For the bounds of the tests, in every reachable state: F1, S1, S2, S3, S4, L1, A1, O1.
//!
//! P1 as two facts. (1) In every state in which no step but a fault is possible, every instant is decided, and every execution
//! and shard has ended: whenever faults stop, nothing can stop before it is finished. (2) The graph of states has no cycle: it
//! stops. Together: from every state, once faults stop, every way ends finished, whatever the order. (stateright's own
//! `eventually` would say less: it overlooks ways that join an explored state.)
//!
//! # What is not
//! There is no time: every wait may have passed, a silent worker may be seen as lost at once or never. F2 is proved only as
//! "each instant is decided" (P1) "and decided once" (the ledger has one place per instant). L2, S5, cancels, checkpoints of
//! more than one step, the idempotency keys and the ack horizon are not in this world; most of them are in [`crate::world`].

mod act;
mod ledger;
mod state;

pub use act::{Action, Protocol};
pub use ledger::{Ledger, Row, Run};
pub use state::{Bounds, Entry, FAULTS, Fault, Leader, Message, Outcome, State, Step, Worker};
