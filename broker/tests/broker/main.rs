//! The broker's tests: one suite for all adapters, what is RabbitMQ's alone, and the changes between it and the ledger.
#![allow(clippy::unwrap_used, reason = "a test that can't go on should stop where it is")]

mod blocking;
mod conformance;
mod fallback;
mod faults;
mod rabbit;
mod runs;
mod support;
