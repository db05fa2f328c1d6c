//! What the jobs of a simulation do: take time, move checkpoints, write and tell, fail, panic, and not listen.

use super::jobs::{Work, emitted, records};
use super::life::{Life, sleep_ms};
use super::plan::Class;
use async_trait::async_trait;
use shardcron_domain::once::Batch;
use shardcron_sdk::{
    Checkpoint, CheckpointError, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, SqlValue,
};
use std::time::Duration;

pub(crate) struct SimHandler(pub(crate) Life);

/// Records of one shard that may be given up.
const SKIPPED_MAX: u32 = 2;

impl SimHandler {
    /// Milliseconds that the attempt takes, and what it does.
    fn work(&self, job: &str) -> (i64, Work) {
        let world = &self.0.world;
        let found = world.plan.jobs.iter().find(|j| j.spec.name == job);
        let (drawn, work) = found.map_or((1, Work::Count), |j| (j.work_ms, j.work));
        let most = if world.chaos() { drawn } else { drawn.min(world.plan.calm_work_ms) };
        (world.dice(|d| d.of(1, most.max(1))), work)
    }

    fn strikes(&self, class: Class, percent: i64) -> bool {
        let world = &self.0.world;
        world.chaos() && world.plan.has(class) && world.dice(|d| d.percent(percent))
    }

    fn misfortune(&self) -> Result<(), ShardError> {
        if self.strikes(Class::PanicHandlers, 3) {
            // Without the hook that prints: it is meant to happen.
            std::panic::resume_unwind(Box::new("simulated"));
        }
        if self.strikes(Class::FailHandlers, 2) {
            return Err(ShardError::permanent("simulated"));
        }
        if self.strikes(Class::FailHandlers, 8) {
            return Err(ShardError::transient("simulated"));
        }
        if self.strikes(Class::FailHandlers, 4) {
            let wait_ms = self.0.world.dice(|d| d.of(1, 3_000)).unsigned_abs();
            return Err(ShardError::not_before("simulated", Duration::from_millis(wait_ms)));
        }
        Ok(())
    }

    /// Rows in the ledger's own database, and the checkpoint with them.
    async fn write(&self, context: &mut ShardContext, records: &[i64], reached: i64) -> Result<(), ShardError> {
        let (execution, shard) = (context.attempt.execution.to_string(), context.attempt.index);
        let mut tx = context.transaction().await?;
        for record in records {
            let args: [SqlValue; 3] = [execution.as_str().into(), shard.into(), (*record).into()];
            tx.execute("INSERT INTO sim_effects (execution_id, shard_index, record) VALUES (?, ?, ?)", &args).await?;
        }
        Ok(tx.commit(Checkpoint::Number(reached), records.len() as u64).await?)
    }

    /// Tells somebody outside, who knows what he was told by its key.
    async fn tell(&self, context: &ShardContext, batch: &mut Batch) -> Result<(), ShardError> {
        let world = &self.0.world;
        for n in batch.open() {
            sleep_ms(world.dice(|d| d.of(0, 20))).await;
            let key = (context.attempt.shard(), batch.key(n).to_vec());
            if batch.is_again(n) && world.oracle(|o| o.was_told(&key)) {
                continue;
            }
            if self.strikes(Class::FailHandlers, 10) {
                batch.retry(n, "simulated");
            } else if self.strikes(Class::FailHandlers, 5) {
                batch.skip(n, "simulated");
            } else {
                world.check(world.oracle(|o| o.tell(key)));
            }
            if self.strikes(Class::Poison, 1) {
                world.kill(self.0.id);
                std::future::pending::<()>().await;
            }
        }
        Ok(())
    }

    async fn once(&self, context: &mut ShardContext, records: &[i64], reached: i64) -> Result<(), ShardError> {
        let batch = context.once(records.iter().map(|r| r.to_string())).await?;
        let mut batch = batch.skip_limit(SKIPPED_MAX);
        self.tell(context, &mut batch).await?;
        Ok(context.settle(batch, Checkpoint::Number(reached)).await?)
    }

    /// What a map's first shard emits.
    async fn emit(&self, context: &ShardContext) -> Result<(), ShardError> {
        let world = &self.0.world;
        let shards = world.dice(emitted);
        let payload = |n| serde_json::json!({ "of": context.attempt.attempt, "number": n });
        for n in 0..shards {
            context.emit(payload(n)).await?;
        }
        let told = (0..shards).map(|n| payload(n).to_string()).collect();
        world.oracle(|o| o.emits(context.attempt, told));
        Ok(())
    }

    async fn reduce(&self, context: &ShardContext, tasks: u32) -> Result<(), ShardError> {
        let mut seen = 0;
        loop {
            let page = context.sub_results(seen).await?;
            let Some(last) = page.last() else { break };
            seen = last.number + 1;
        }
        self.0.world.check(self.0.world.oracle(|o| o.reduces(context.attempt, (tasks, seen))));
        Ok(())
    }
}

#[async_trait]
impl ShardHandler for SimHandler {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let steps = self.0.world.dice(|d| d.of(1, 4));
        let listens = !self.strikes(Class::ForgetfulHandlers, 30);
        let (work_ms, work) = self.work(&context.job);
        let step_ms = (work_ms / steps).max(1);
        let records = records(&context.slice);
        let count = i64::try_from(records.len()).unwrap_or(i64::MAX);
        if work == Work::Once {
            while let Some(batch) = context.left_over().await? {
                let mut batch = batch.skip_limit(SKIPPED_MAX);
                self.tell(&context, &mut batch).await?;
                context.settle_records(batch).await?;
            }
        }
        // Before whatever befalls it: what it emits is to be gone with it.
        if matches!(context.slice, ShardSlice::Map { .. }) {
            self.emit(&context).await?;
        }
        for step in 1..=steps {
            tokio::select! {
                biased;
                () = sleep_ms(step_ms) => {}
                () = context.stop.cancelled(), if listens => return Err(ShardError::stopped("told to stop")),
            }
            if self.strikes(Class::Poison, 1) {
                self.0.world.kill(self.0.id);
                std::future::pending::<()>().await;
            }
            self.misfortune()?;
            let reached = count * step / steps;
            let done = match context.checkpoint {
                Some(Checkpoint::Number(at)) => at,
                _ => 0,
            };
            if reached <= done {
                continue;
            }
            let some = records.get(done as usize..reached as usize).unwrap_or_default();
            match work {
                Work::Transactions => self.write(&mut context, some, reached).await?,
                Work::Once => self.once(&mut context, some, reached).await?,
                Work::Count if step < steps => match context.advance(Checkpoint::Number(reached), 1).await {
                    Ok(()) | Err(CheckpointError::Unavailable(_)) => {}
                    Err(e @ CheckpointError::Superseded(_)) if listens => {
                        return Err(ShardError::stopped(e.to_string()));
                    }
                    Err(CheckpointError::Superseded(_)) => {}
                },
                Work::Count => {}
            }
        }
        if let ShardSlice::Reduce { tasks } = context.slice {
            self.reduce(&context, tasks).await?;
        }
        Ok(ShardOutput::rows(count.unsigned_abs()))
    }
}
