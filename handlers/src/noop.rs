//! A handler that does nothing: `handler = { rust = "noop" }`. For smoke tests (does a firing reach a worker and come back?)
//! and for load tests, where everything that is measured is then the system's own.

use shardcron_sdk::{ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};

/// Its name in a job file.
pub(crate) const NAME: &str = "noop";

/// Ends well, at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noop;

#[async_trait]
impl ShardHandler for Noop {
    async fn run(&self, _context: ShardContext) -> Result<ShardOutput, ShardError> {
        Ok(ShardOutput::default())
    }

    fn effects_are_fenced(&self) -> bool {
        true
    }
}
