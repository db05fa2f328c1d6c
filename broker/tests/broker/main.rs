//! The broker's tests: one suite for both adapters, and what is RabbitMQ's alone.
#![allow(clippy::unwrap_used, reason = "a test that can't go on should stop where it is")]

mod blocking;
mod conformance;
mod faults;
mod rabbit;
mod support;
