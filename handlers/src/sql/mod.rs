//! The `sql` handler: a user's statements in one transaction with the shard's checkpoint and result.

mod elsewhere;
mod params;
mod port;
mod run;
mod tokens;

pub(crate) use elsewhere::Elsewhere;
pub(crate) use params::Values;
pub use port::ShardLedger;
pub(crate) use port::Whole;
pub use run::{SqlHandler, SqlLimits};
pub use tokens::SqlTemplate;
