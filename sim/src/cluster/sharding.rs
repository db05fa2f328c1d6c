//! What the oracle knows of plans that are more than a count: shards for one worker, shards that a shard makes, and effects.

use super::oracle::{Broken, Checked, Oracle, Row, broken};
use shardcron_domain::effects::StepEnd;
use shardcron_domain::invariants::{self, InvariantId};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::once::RecordState;
use shardcron_domain::plan::{ShardPlan, ShardSlice};
use shardcron_domain::shard::{self, Checkpoint, Event, Phase, Rejection, apply};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, ShardRef, execution};
use shardcron_store::{Ended, Growth, Recorded};
use std::collections::BTreeMap;

/// A record of a shard, by its key.
pub(crate) type Key = (ShardRef, Vec<u8>);

impl Oracle {
    /// Under which fence a write would pass.
    pub(crate) fn holder(&self, at: AttemptRef) -> Option<(Incarnation, AttemptRef)> {
        let shard = &self.row(at)?.shard;
        Some((shard.owner?, AttemptRef { attempt: shard.attempt, ..at }))
    }

    pub(crate) fn checkpoint(&self, at: AttemptRef) -> Option<Checkpoint> {
        self.row(at)?.shard.checkpoint.clone()
    }

    /// Whether a claim that the ledger took was one to take: a broadcast's shard its own worker, and a reducing one nobody before all others have ended well.
    pub(crate) fn may_run(&self, at: AttemptRef, owner: Incarnation) -> Checked {
        let Some(run) = self.runs.get(&at.execution) else { return Ok(()) };
        if let Some(worker) = run.plan.addressee(at.index).filter(|worker| worker.incarnation != owner) {
            return broken(InvariantId::S5, format!("{at} is for {} and was given to {owner}", worker.incarnation));
        }
        if run.counters.held > 0 && at.index + 1 == run.counters.shards_total {
            return broken(InvariantId::S5, format!("{at} reduces before the others have ended"));
        }
        Ok(())
    }

    /// What an attempt has emitted, by its handler's own words.
    pub(crate) fn emits(&mut self, at: AttemptRef, payloads: Vec<String>) {
        self.emitting.insert(at, payloads);
    }

    /// What attempts before this one emitted.
    pub(crate) fn emitted_before(&self, at: AttemptRef) -> Vec<String> {
        let first = AttemptRef { attempt: 0, ..at };
        self.emitting.range(first..at).flat_map(|(_, payloads)| payloads.clone()).collect()
    }

    pub(crate) fn grown(
        &mut self,
        owner: Incarnation,
        end: &Ended,
        growth: Growth,
        (verdict, now_ms): (&Result<Recorded, Rejection>, i64),
    ) -> Checked {
        let at = end.attempt;
        if let (Ok(_), Some(run)) = (verdict, self.runs.get_mut(&at.execution)) {
            let told = self.emitting.get(&at).cloned().unwrap_or_default();
            if growth.emitted as usize != told.len() {
                let seen = format!("{at} emitted {} shards, and {} were kept", told.len(), growth.emitted);
                return broken(InvariantId::S5, seen);
            }
            run.emitted = told;
            let event = execution::Event::Grow { emitted: growth.emitted, reduce: growth.reduce };
            run.counters =
                execution::apply(&run.counters, event).map_err(|e| Broken::Rules(format!("{at} grows: {e}")))?;
            run.rows.resize_with(run.counters.shards_total as usize, Row::fresh);
        }
        self.recorded(owner, std::slice::from_ref(end), std::slice::from_ref(verdict), now_ms)
    }

    pub(crate) fn reduces(&self, at: AttemptRef, (tasks, seen): (u32, u32)) -> Checked {
        let Some(run) = self.runs.get(&at.execution) else { return Ok(()) };
        // An attempt that was taken away may read what it likes.
        if self.row(at).is_none_or(|row| row.shard.attempt != at.attempt || row.shard.phase != Phase::Running) {
            return Ok(());
        }
        match u32::try_from(run.emitted.len()) {
            Ok(emitted) if (tasks, seen) == (emitted, emitted) => Ok(()),
            _ => broken(
                InvariantId::S5,
                format!("{at} reduces {tasks} and sees {seen} of {} emitted", run.emitted.len()),
            ),
        }
    }

    pub(crate) fn abandoned(&mut self, epoch: Epoch, who: Incarnation, shards: &[AttemptRef], now_ms: i64) -> Checked {
        self.led(epoch)?;
        for at in shards {
            let addressee = self.runs.get(&at.execution).and_then(|run| run.plan.addressee(at.index));
            if addressee.is_none_or(|worker| worker.incarnation != who) {
                return Err(Broken::Rules(format!("{at} was not for {who}, and ended with it")));
            }
            self.step(*at, &Event::Abandon, (&RetryPolicy::default(), now_ms), (Ok(()), false))?;
        }
        Ok(())
    }

    /// A handler's transaction was committed, or refused.
    pub(crate) fn stepped(
        &mut self,
        owner: Incarnation,
        at: AttemptRef,
        end: &StepEnd,
        verdict: Result<(), &Rejection>,
    ) -> Checked {
        if verdict.is_ok() {
            let Some(shard) = self.row(at).map(|row| row.shard.clone()) else {
                return Err(Broken::Rules(format!("{at} took a step, and nobody fired it")));
            };
            invariants::check_accepted(at.attempt, &shard)?;
            let probe = Event::HandBack { attempt: at.attempt, owner };
            if let Err(refusal) = apply(&shard, &probe, &RetryPolicy::default(), 0) {
                return Err(Broken::Rules(format!("{at} took a step, and {refusal}")));
            }
            let skipped = end.writes.iter().filter(|w| w.state == RecordState::Skipped);
            self.skipped.extend(skipped.map(|w| (at.shard(), w.key.clone())));
        }
        match &end.advance {
            Some((from, to)) => self.advanced(owner, at, (from.clone(), to.clone()), verdict),
            None => Ok(()),
        }
    }

    /// An execution's job, whether it is a map that has grown, and its shards.
    pub(crate) fn shape(&self, id: ExecutionId) -> Option<(shardcron_domain::JobId, bool, u32)> {
        let run = self.runs.get(&id)?;
        let map = matches!(run.plan, ShardPlan::Map { .. }) && run.rows.len() > 1;
        Some((run.job, map, run.counters.shards_total))
    }

    pub(crate) fn first_failed(&self, id: ExecutionId) -> Option<u32> {
        let rows = &self.runs.get(&id)?.rows;
        let at = rows.iter().position(|row| row.shard.phase == Phase::Failed)?;
        u32::try_from(at).ok()
    }

    // ---- effects ------------------------------------------------------------------------------------------------------

    pub(crate) fn was_told(&self, key: &Key) -> bool {
        self.told.contains(key)
    }

    /// A record's effect outside of the ledger. Who was not warned that it may be done already does it for the first time.
    pub(crate) fn tell(&mut self, key: Key) -> Checked {
        let name = String::from_utf8_lossy(&key.1).into_owned();
        if self.skipped.contains(&key) {
            return broken(InvariantId::S1, format!("record {name} of {} was given up, and is done", key.0));
        }
        if !self.told.insert(key.clone()) {
            return broken(InvariantId::S1, format!("record {name} of {} is done a second time", key.0));
        }
        Ok(())
    }

    /// The records of a shard, by its plan.
    fn records(&self, id: ExecutionId, index: u32) -> Vec<i64> {
        let Some(run) = self.runs.get(&id) else { return Vec::new() };
        let task = index > 0 && index as usize <= run.emitted.len() && matches!(run.plan, ShardPlan::Map { .. });
        match run.plan.slice(index) {
            Some(slice) => super::jobs::records(&slice),
            None if task => super::jobs::records(&ShardSlice::Task { number: 0, payload: serde_json::Value::Null }),
            None => Vec::new(),
        }
    }

    /// Of a shard that ended well each record is done once, or was given up; of any other, at most once.
    pub(crate) fn check_told(&self, id: ExecutionId) -> Checked {
        self.each(id, |shard, record| {
            let key = (shard, record.to_string().into_bytes());
            i64::from(self.told.contains(&key) || self.skipped.contains(&key))
        })
    }

    pub(crate) fn check_written(&self, id: ExecutionId, counts: &BTreeMap<(u32, i64), i64>) -> Checked {
        if let Some(((index, record), count)) = counts.iter().find(|(_, count)| **count > 1) {
            return broken(InvariantId::S1, format!("record {record} of {id}/{index} was written {count} times"));
        }
        self.each(id, |shard, record| counts.get(&(shard.index, record)).copied().unwrap_or_default())
    }

    fn each(&self, id: ExecutionId, count: impl Fn(ShardRef, i64) -> i64) -> Checked {
        let rows = self.runs.get(&id).map(|run| run.rows.as_slice()).unwrap_or_default();
        for (index, _) in (0_u32..).zip(rows).filter(|(_, row)| row.shard.phase == shard::Phase::Success) {
            let shard = ShardRef { execution: id, index };
            if let Some(record) = self.records(id, index).into_iter().find(|record| count(shard, *record) != 1) {
                return broken(InvariantId::S1, format!("{shard} ended well, and its record {record} was not done"));
            }
        }
        Ok(())
    }

    /// S5 of a map: what its first shard emitted is what it has.
    pub(crate) fn check_emitted(&self, id: ExecutionId, index: u32, kept: Option<&str>) -> Checked {
        let emitted = self.runs.get(&id).map(|run| run.emitted.as_slice()).unwrap_or_default();
        let told = index.checked_sub(1).and_then(|n| emitted.get(n as usize)).map(String::as_str);
        if told == kept {
            return Ok(());
        }
        broken(InvariantId::S5, format!("shard {id}/{index} was emitted as {told:?} and is {kept:?}"))
    }
}
