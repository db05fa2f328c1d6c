//! A worker program of one's own: the whole `shardcron` program, with one more handler in it. See `examples/own-worker/job.toml`.

use shardcron_sdk::{
    Checkpoint, Registry, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait,
};

struct Settle;

#[async_trait]
impl ShardHandler for Settle {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Range { from, to } = context.slice else {
            return Err(ShardError::permanent("the job needs a range"));
        };
        let mut next = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { from };
        while next <= to && !context.should_stop() {
            let end = to.min(next + 999);
            // Here: settle the accounts next..=end. After a crash it is done again from the last checkpoint on.
            let rows = end.abs_diff(next) + 1;
            context.advance(Checkpoint::Number(end), rows).await.map_err(|e| ShardError::transient(e.to_string()))?;
            next = end + 1;
        }
        if next <= to { Err(ShardError::stopped("told to stop")) } else { Ok(ShardOutput::rows(to.abs_diff(from) + 1)) }
    }
}

fn main() -> std::process::ExitCode {
    shardcron::run_with(std::env::args_os(), Registry::default().with("settle", Settle))
}
