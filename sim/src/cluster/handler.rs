//! What the jobs of a simulation do: take time, move checkpoints, fail, panic, and not listen.

use super::life::{Life, sleep_ms};
use super::plan::Class;
use async_trait::async_trait;
use shardcron_sdk::{Checkpoint, CheckpointError, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice};
use std::time::Duration;

pub(crate) struct SimHandler(pub(crate) Life);

impl SimHandler {
    /// Milliseconds that the attempt takes.
    fn work_ms(&self, job: &str) -> i64 {
        let world = &self.0.world;
        let drawn = world.plan.jobs.iter().find(|j| j.spec.name == job).map_or(1, |j| j.work_ms);
        let most = if world.chaos() { drawn } else { drawn.min(world.plan.calm_work_ms) };
        world.dice(|d| d.of(1, most.max(1)))
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
}

#[async_trait]
impl ShardHandler for SimHandler {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let steps = self.0.world.dice(|d| d.of(1, 4));
        let listens = !self.strikes(Class::ForgetfulHandlers, 30);
        let step_ms = (self.work_ms(&context.job) / steps).max(1);
        let (from, to) = match context.slice {
            ShardSlice::Range { from, to } => (from, to),
            _ => return Err(ShardError::permanent("only ranges are simulated")),
        };
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
            let reached = from + (to - from) * step / steps;
            let further = !matches!(context.checkpoint, Some(Checkpoint::Number(at)) if at >= reached);
            if step < steps && further {
                match context.advance(Checkpoint::Number(reached), 1).await {
                    Ok(()) | Err(CheckpointError::Unavailable(_)) => {}
                    Err(e @ CheckpointError::Superseded(_)) if listens => {
                        return Err(ShardError::stopped(e.to_string()));
                    }
                    Err(CheckpointError::Superseded(_)) => {}
                }
            }
        }
        Ok(ShardOutput::rows((to - from + 1).unsigned_abs()))
    }
}
