//! A worker of one's own: the whole program, with one more handler in it.

use shardcron_sdk::*;

struct Settle;

#[async_trait]
impl ShardHandler for Settle {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let ShardSlice::Range { from, to } = context.slice else {
            return Err(ShardError::permanent("a range, please"));
        };
        let mut next = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { from };
        while next <= to && !context.should_stop() {
            let end = to.min(next + 999);
            let mut tx = context.transaction().await?;
            let sql = "UPDATE accounts SET settled = settled + 1 WHERE id BETWEEN ? AND ?";
            let rows = tx.execute(sql, &values![next, end]).await?;
            tx.commit(Checkpoint::Number(end), rows).await?;
            next = end + 1;
        }
        if next <= to { Err(ShardError::stopped("told to stop")) } else { Ok(ShardOutput::default()) }
    }
}

fn main() -> std::process::ExitCode {
    shardcron::run_with(std::env::args_os(), Registry::default().with("settle", Settle))
}
