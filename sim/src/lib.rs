//! Shardcron under every fault that a cluster has, without a cluster.
//!
//! Owns three worlds:
//!
//! - [`cluster`]: the real actors on the real SQL, in virtual time and from a seed;
//! - [`model`]: a small world over the domain's transition functions that a model checker explores to its last state;
//! - [`world`]: a large world over the same functions, with time, policies and a seed: the protocol without the actors. Its rules of
//!   *when to do what* are written down a second time, so it is quick, and sees what is wrong with the rules themselves.
//!
//! The mutations that prove that the checks can fail are in [`guard`] for the latter two, and in the ports of [`cluster`]. Must not
//! draw from anything but the seed, or let a clock of the host decide anything.

pub mod cluster;
pub mod guard;
pub mod model;
pub mod world;
