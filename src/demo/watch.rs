//! The live view of the demo's execution, and the faults in its middle.

use super::children::Children;
use crate::output::number;
use crate::wiring::Wired;
use anyhow::{Context, Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use nix::sys::signal::Signal;
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::shard::Checkpoint;
use shardcron_domain::{ExecutionId, Incarnation};
use shardcron_store::{ExecutionRow, RunningRow};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Which faults to make.
pub struct Faults {
    /// Kill a worker that is in the middle of a shard.
    pub worker: bool,
    /// Kill the leader.
    pub leader: bool,
}

const LOOK_EVERY: Duration = Duration::from_millis(40);
/// No execution of the demo takes this long; something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// The view.
pub struct Show<'a> {
    wired: &'a Wired,
    execution: ExecutionId,
    talk: bool,
    total: ProgressBar,
    lines: Vec<ProgressBar>,
    bars: MultiProgress,
    names: BTreeMap<Incarnation, String>,
    killed: Vec<String>,
    began: Instant,
}

impl<'a> Show<'a> {
    pub fn new(wired: &'a Wired, execution: ExecutionId, draw: bool, talk: bool) -> Self {
        let bars = if draw {
            MultiProgress::new()
        } else {
            MultiProgress::with_draw_target(indicatif::ProgressDrawTarget::hidden())
        };
        let total = bars.add(ProgressBar::new(0));
        if let Ok(style) = ProgressStyle::with_template("  {bar:32.green} {pos:>2}/{len} shards  {msg}") {
            total.set_style(style.progress_chars("━━╌"));
        }
        let lines = (0..3)
            .map(|_| {
                let line = bars.add(ProgressBar::new_spinner());
                if let Ok(style) = ProgressStyle::with_template("    {msg}") {
                    line.set_style(style);
                }
                line
            })
            .collect();
        Show {
            wired,
            execution,
            talk,
            total,
            lines,
            bars,
            names: BTreeMap::new(),
            killed: Vec::new(),
            began: Instant::now(),
        }
    }

    /// Who was killed.
    pub fn killed(&self) -> &[String] {
        &self.killed
    }

    fn say(&self, text: &str) {
        if self.talk && self.bars.println(text).is_ok() && self.bars.is_hidden() {
            eprintln!("{text}");
        }
    }

    /// Watches to the end, and makes the faults on the way.
    pub async fn run(&mut self, children: &mut Children, faults: &Faults) -> Result<()> {
        let ledger = &self.wired.ports.ledger;
        let head = ledger.execution_head(self.execution).await?.context("the execution is not in the ledger")?;
        let (mut worker_due, mut leader_due) = (faults.worker, faults.leader);
        while self.began.elapsed() < PATIENCE {
            let row = ledger.execution(self.execution).await?.context("the execution is not in the ledger")?;
            let running: Vec<RunningRow> =
                ledger.running(1_000).await?.into_iter().filter(|r| r.attempt.execution == self.execution).collect();
            self.learn_names().await?;
            self.draw(&row, &running, &head.plan);
            if row.phase.is_terminal() {
                self.total.finish_and_clear();
                self.lines.iter().for_each(ProgressBar::finish_and_clear);
                return Ok(());
            }
            if let Some(name) = children.ended() {
                bail!("{name} ended by itself; its log: {}", children.log_of(&name).display());
            }
            if worker_due && row.succeeded >= 3 {
                worker_due = !self.kill_worker(children, &running).await?;
            } else if leader_due && row.succeeded >= 6 {
                leader_due = !self.kill_leader(children).await?;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("the execution did not end within {} s; look into the logs with --keep DIR", PATIENCE.as_secs())
    }

    async fn learn_names(&mut self) -> Result<()> {
        // A store that is busy for a moment only makes a name appear later.
        if let Ok(workers) = self.wired.ports.presence.workers().await {
            self.names.extend(workers.into_iter().map(|w| (w.beat.incarnation, w.beat.name)));
        }
        Ok(())
    }

    /// Kills a worker in the middle of a shard. It is frozen first and looked at again, so that the shard is certain.
    async fn kill_worker(&mut self, children: &mut Children, running: &[RunningRow]) -> Result<bool> {
        let in_the_middle = running.iter().find(|r| r.checkpoint.is_some() && self.names.contains_key(&r.owner));
        let Some(candidate) = in_the_middle else { return Ok(false) };
        let Some(name) = self.names.get(&candidate.owner).cloned() else { return Ok(false) };
        if children.pid_of(&name).is_none() {
            return Ok(false);
        }
        children.signal(&name, Signal::SIGSTOP)?;
        let now = self.wired.ports.ledger.running(1_000).await;
        let held = now.map(|rows| rows.into_iter().filter(|r| r.owner == candidate.owner).collect::<Vec<_>>());
        match held {
            Ok(held) if held.iter().any(|r| r.checkpoint.is_some()) => {
                // Those with a checkpoint are in the middle; the others are claimed ahead and have not begun.
                let (begun, ahead): (Vec<_>, Vec<_>) = held.iter().partition(|r| r.checkpoint.is_some());
                let begun: Vec<String> = begun.iter().map(|r| r.attempt.index.to_string()).collect();
                let mut shards = begun.join(" and ");
                if !ahead.is_empty() {
                    shards = format!("{shards}, with {} more in hand", ahead.len());
                }
                let pid = children.pid_of(&name).unwrap_or(0);
                children.kill(&name)?;
                self.say(&format!(
                    "  killed   {name} (pid {pid}, SIGKILL) in the middle of shard {}; watch them being taken over",
                    shards
                ));
                self.killed.push(name);
                Ok(true)
            }
            _ => {
                children.signal(&name, Signal::SIGCONT)?;
                Ok(false)
            }
        }
    }

    async fn kill_leader(&mut self, children: &mut Children) -> Result<bool> {
        let leader = self.wired.ports.ledger.leadership().await?;
        let name = leader.holder.split('/').next().unwrap_or("").to_owned();
        if children.pid_of(&name).is_none() {
            return Ok(false);
        }
        children.kill(&name)?;
        self.say(&format!("  killed   {name}, the leader (epoch {})", leader.epoch));
        self.killed.push(name);
        Ok(true)
    }

    fn draw(&self, row: &ExecutionRow, running: &[RunningRow], plan: &ShardPlan) {
        let done = row.succeeded + row.failed + row.cancelled;
        let waiting = row.shards_total - done - running.len() as u32;
        let flights: u64 =
            running.iter().map(|r| progressed(plan, r)).sum::<u64>() + u64::from(done) * shard_length(plan);
        let rate = flights as f64 / self.began.elapsed().as_secs_f64().max(0.1);
        self.total.set_length(row.shards_total.into());
        self.total.set_position(done.into());
        self.total.set_message(format!(
            "{} running, {waiting} waiting  {} flights/s",
            running.len(),
            number(rate as u64)
        ));
        let mut by_worker: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for shard in running {
            let name = self.names.get(&shard.owner).map_or("?", String::as_str);
            let again =
                if shard.attempt.attempt > 1 { format!(" (attempt {})", shard.attempt.attempt) } else { String::new() };
            let percent = progressed(plan, shard) * 100 / shard_length(plan).max(1);
            by_worker.entry(name).or_default().push(format!("shard {:>2}{again} {percent:>3} %", shard.attempt.index));
        }
        for (line, name) in self.lines.iter().zip(["worker-1", "worker-2", "worker-3"]) {
            let dead = self.killed.iter().any(|k| k == name);
            let what = by_worker.get(name).map(|s| s.join("  "));
            let text = match (dead, what) {
                (true, Some(what)) => format!("killed, still holds {what}"),
                (true, None) => "killed".to_owned(),
                (false, Some(what)) => what,
                (false, None) => "idle".to_owned(),
            };
            line.set_message(format!("{name}  {text}"));
        }
    }
}

fn shard_length(plan: &ShardPlan) -> u64 {
    match plan.slice(0) {
        Some(ShardSlice::Range { from, to }) => to.abs_diff(from) + 1,
        _ => 0,
    }
}

fn progressed(plan: &ShardPlan, shard: &RunningRow) -> u64 {
    match (plan.slice(shard.attempt.index), &shard.checkpoint) {
        (Some(ShardSlice::Range { from, .. }), Some(Checkpoint::Number(at))) => at.abs_diff(from) + 1,
        _ => 0,
    }
}
