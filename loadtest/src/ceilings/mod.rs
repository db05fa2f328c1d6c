//! What the services can do alone, measured in the same run: the bounds of what the whole can do with them.

pub mod broker;
pub mod ledger;
