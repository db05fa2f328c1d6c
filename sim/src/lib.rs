//! The protocol of Shardcron under every fault that a cluster has, without a cluster.
//!
//! Owns two worlds, both over the domain's own transition functions:
//!
//! - [`model`]: a small world that a model checker explores to its last state;
//! - [`world`]: a large world with time, policies and a seed, of which thousands of lives are simulated.
//!
//! Both keep their ledger's guards in [`guard`], where the mutations are that prove that the checks can fail. Must not read a
//! clock, sleep, or draw from anything but the seed. What runs here is the protocol, not the actix actors and not the SQL: the
//! rules of *when to do what* are written down a second time, and the conformance suites and the tests on real services hold
//! the first writing to the same promises.

pub mod cluster;
pub mod guard;
pub mod model;
pub mod world;
