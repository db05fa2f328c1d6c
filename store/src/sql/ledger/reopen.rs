//! Sending failed shards back: a new round of an execution, opened by a person (docs/decisions/0025).

use super::rows::{execution_phase, read_shards_of, unsigned};
use crate::ops_rows::{Reopen, ReopenShards, Reopened, ReopeningRow};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Value, hex, number_list};
use shardcron_domain::after::set_key;
use shardcron_domain::execution::{self, Execution};
use shardcron_domain::firing::DecisionKind;
use shardcron_domain::job::{OverlapPolicy, RetryPolicy};
use shardcron_domain::limits::{ERROR_BYTES, REOPEN_BATCH, UPSTREAMS_MAX};
use shardcron_domain::reopen::{Around, Refused, decide};
use shardcron_domain::shard::{Event, Phase, apply};
use shardcron_domain::units::rfc3339;
use shardcron_domain::{AttemptRef, ExecutionId, JobSpec, ShardRef};
use std::collections::BTreeMap;

/// An execution with its row locked.
struct Held {
    job: i64,
    nominal_ms: i64,
    counters: Execution,
    overlap: OverlapPolicy,
    others: Vec<ExecutionId>,
    deleting: bool,
}

impl SqlLedger {
    pub(super) async fn write_reopening(
        &self,
        wanted: &Reopen,
        now_ms: i64,
    ) -> Outcome<std::result::Result<Reopened, Refused>> {
        let mut tx = self.db.begin().await?;
        let answer = reopen(&mut tx, wanted, now_ms).await?;
        // A refusal has written nothing, and gives the job's row back at once.
        tx.commit().await.map_err(Fault::once)?;
        Ok(answer)
    }

    pub(super) async fn read_reopenings(&self, id: ExecutionId) -> Outcome<Vec<ReopeningRow>> {
        let sql = "SELECT round, at_ms, who, reason, shards FROM reopenings WHERE execution_id = ? ORDER BY round";
        let rows = self.db.rows(sql, &[id.as_bytes().into()]).await?;
        rows.iter()
            .map(|row| {
                Ok(ReopeningRow {
                    round: row.count(0)?,
                    at_ms: row.int(1)?,
                    who: row.text(2)?,
                    reason: row.opt_text(3)?,
                    shards: unsigned(row.int(4)?),
                })
            })
            .collect()
    }
}

/// Refuses, or writes everything.
async fn reopen(tx: &mut Tx, wanted: &Reopen, now_ms: i64) -> Outcome<std::result::Result<Reopened, Refused>> {
    let id = wanted.execution;
    let Some(held) = lock(tx, id).await? else { return Ok(Err(Refused::NoSuchExecution(id))) };
    let around = Around { overlap: held.overlap, others: &held.others, deleting: held.deleting };
    if let Err(refused) = decide(id, &held.counters, around) {
        return Ok(Err(refused));
    }
    let (found, next) = match find(tx, wanted).await? {
        Ok(found) => found,
        Err(refused) => return Ok(Err(refused)),
    };
    let count = u32::try_from(found.len()).unwrap_or(u32::MAX);
    if found.is_empty() {
        return Ok(Err(Refused::NothingFailed(id)));
    }
    let after = execution::apply(&held.counters, execution::Event::Reopen { shards: count })
        .map_err(|e| Fault::corrupt(format!("execution {id}: {e}")))?;
    send_back(tx, id, &found, (held.counters, after)).await?;
    super::addressed::address_again(tx, id, &found.iter().map(|at| at.index).collect::<Vec<_>>()).await?;
    let letters = settle_letters(tx, id, &found).await?;
    // Who follows was told of an end, and only of an end.
    let followers =
        if held.counters.phase.is_terminal() { tell_followers(tx, wanted, &held, now_ms).await? } else { 0 };
    note(tx, wanted, (held.counters.phase, count), now_ms).await?;
    Ok(Ok(Reopened { shards: found, next, letters, followers }))
}

/// Locks the job, as a firing does, so that none can pass between the look at what runs and the write; then the execution.
async fn lock(tx: &mut Tx, id: ExecutionId) -> Outcome<Option<Held>> {
    let (hex, lock) = (hex(id.as_bytes()), tx.dialect().for_update());
    let rows = tx.raw_rows(&format!("SELECT job_id FROM executions WHERE id = {hex}")).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let job = row.int(0)?;
    let rows = tx.raw_rows(&format!("SELECT spec FROM jobs WHERE id = {job}{lock}")).await?;
    let spec = rows.first().map(|row| row.text(0)).transpose()?;
    // What firings go by now. One that can't be read allows nothing.
    let spec = spec.and_then(|text| serde_json::from_str::<JobSpec>(&text).ok());
    let overlap = spec.map_or(OverlapPolicy::Skip, |spec| spec.overlap);
    let columns = "state, shards_total, succeeded, failed, cancelled, nominal_ms, held, pruning_ms";
    let rows = tx.raw_rows(&format!("SELECT {columns} FROM executions WHERE id = {hex}{lock}")).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let counters = Execution {
        phase: execution_phase(row.int(0)?)?,
        shards_total: row.count(1)?,
        succeeded: row.count(2)?,
        failed: row.count(3)?,
        cancelled: row.count(4)?,
        held: row.count(6)?,
    };
    let (nominal_ms, deleting) = (row.int(5)?, row.opt_int(7)?.is_some());
    let sql =
        format!("SELECT id FROM executions WHERE state = 0 AND job_id = {job} AND id <> {hex} ORDER BY id LIMIT 1");
    let others = tx.raw_rows(&sql).await?;
    let others = others.iter().map(|row| row.id(0, ExecutionId::from_slice)).collect::<Outcome<_>>()?;
    Ok(Some(Held { job, nominal_ms, counters, overlap, others, deleting }))
}

type Found = (Vec<AttemptRef>, Option<u32>);

/// The shards that are meant, each checked by the domain's machine, and where the next batch begins.
async fn find(tx: &mut Tx, wanted: &Reopen) -> Outcome<std::result::Result<Found, Refused>> {
    let execution = wanted.execution;
    let (indexes, next) = match &wanted.shards {
        ReopenShards::These(indexes) => (indexes.clone(), None),
        ReopenShards::Failed { from } => {
            let sql = format!(
                "SELECT shard_index FROM shards WHERE execution_id = {} AND state = {} AND shard_index >= {from} \
                 ORDER BY shard_index LIMIT {}",
                hex(execution.as_bytes()),
                Phase::Failed.code(),
                REOPEN_BATCH + 1
            );
            let rows = tx.raw_rows(&sql).await?;
            let mut indexes: Vec<u32> = rows.iter().map(|row| row.count(0)).collect::<Outcome<_>>()?;
            let next = indexes.get(REOPEN_BATCH).copied();
            indexes.truncate(REOPEN_BATCH);
            (indexes, next)
        }
    };
    if indexes.is_empty() {
        return Ok(Ok((Vec::new(), None)));
    }
    // Without locks: what failed changes by a reopening only, and those wait for the execution's row.
    let rows = read_shards_of(tx, indexes.iter().map(|index| ShardRef { execution, index: *index }), "").await?;
    let mut found = BTreeMap::new();
    for index in indexes {
        let Some(held) = rows.get(&ShardRef { execution, index }) else {
            return Ok(Err(Refused::NotFailed { index, found: None }));
        };
        let event = Event::Reopen { attempt: held.shard.attempt };
        if apply(&held.shard, &event, &RetryPolicy::default(), 0).is_err() {
            return Ok(Err(Refused::NotFailed { index, found: Some(held.shard.phase) }));
        }
        found.insert(index, AttemptRef { execution, index, attempt: held.shard.attempt });
    }
    Ok(Ok((found.into_values().collect(), next)))
}

async fn send_back(
    tx: &mut Tx,
    id: ExecutionId,
    found: &[AttemptRef],
    (before, after): (Execution, Execution),
) -> Outcome<()> {
    let (hex, list) = (hex(id.as_bytes()), number_list(found.iter().map(|at| at.index)));
    let update = format!(
        "UPDATE shards SET state = 0, attempt = attempt + 1, failures = 0, owner = NULL, claimed_ms = 0, not_before_ms = 0 \
         WHERE execution_id = {hex} AND shard_index IN ({list}) AND state = {}",
        Phase::Failed.code()
    );
    if tx.raw(&update).await? != found.len() as u64 {
        return Err(Fault::Moved);
    }
    let tail = tx.dialect().upsert("execution_id, shard_index", &["attempt", "not_before_ms"]);
    let mut again =
        Bulk::new("INSERT INTO redispatch (execution_id, shard_index, attempt, not_before_ms) VALUES ", tail);
    for at in found {
        let next = at.attempt.saturating_add(1);
        again.push_row(tx.dialect(), &[id.as_bytes().into(), at.index.into(), next.into(), 0_i64.into()]);
    }
    again.send(tx).await?;
    let update = format!(
        "UPDATE executions SET state = {}, failed = {}, ended_ms = NULL WHERE id = {hex}",
        after.phase.code(),
        after.failed
    );
    tx.raw(&update).await?;
    if before.cancelled > 0 {
        // A reducing shard that was cancelled with them waits again, as before the others had ended: without a row.
        let others = after.shards_total.saturating_sub(after.held);
        tx.raw(&format!("DELETE FROM shards WHERE execution_id = {hex} AND shard_index >= {others}")).await?;
        let held = after.held;
        let update =
            format!("UPDATE executions SET held = {held}, cancelled = 0, materialized = {others} WHERE id = {hex}");
        tx.raw(&update).await?;
    }
    Ok(())
}

async fn settle_letters(tx: &mut Tx, id: ExecutionId, found: &[AttemptRef]) -> Outcome<u64> {
    let list = number_list(found.iter().map(|at| at.index));
    let hex = hex(id.as_bytes());
    tx.raw(&format!("DELETE FROM dead_letters WHERE execution_id = {hex} AND shard_index IN ({list})")).await
}

/// The round and the audit.
async fn note(tx: &mut Tx, wanted: &Reopen, (was, count): (execution::Phase, u32), now_ms: i64) -> Outcome<()> {
    let id = wanted.execution;
    let sql = format!("SELECT COALESCE(MAX(round), 0) FROM reopenings WHERE execution_id = {}", hex(id.as_bytes()));
    let rows = tx.raw_rows(&sql).await?;
    let round = rows.first().map_or(Ok(0), |row| row.int(0))? + 1;
    let reason = wanted.reason.as_deref().map(|text| kept(text, ERROR_BYTES));
    let who = kept(&wanted.who, 255);
    let insert = "INSERT INTO reopenings (execution_id, round, at_ms, who, reason, shards) VALUES (?, ?, ?, ?, ?, ?)";
    let args: [Value; 6] = [
        id.as_bytes().into(),
        round.into(),
        now_ms.into(),
        who.as_str().into(),
        reason.as_deref().into(),
        i64::from(count).into(),
    ];
    tx.run(insert, &args).await?;
    let words = format!(
        "{}, round {round}: {count} failed shards run again{}",
        execution::Phase::Running.word(),
        reason.map(|text| format!("; {text}")).unwrap_or_default()
    );
    let insert =
        "INSERT INTO audit (at_ms, who, action, subject, before_text, after_text) VALUES (?, ?, 'retry', ?, ?, ?)";
    let args: [Value; 5] = [now_ms.into(), who.into(), id.to_string().into(), was.word().into(), words.into()];
    tx.run(insert, &args).await.map(drop)
}

/// A follower that did not fire because this execution failed has its notes back, and fires for the set's next end under the same key.
/// One that fired does not fire again for the same set; nor does one whose notes are still there, as they are.
async fn tell_followers(tx: &mut Tx, wanted: &Reopen, held: &Held, now_ms: i64) -> Outcome<u64> {
    let rows = tx.raw_rows(&format!("SELECT job_id FROM job_edges WHERE upstream_id = {}", held.job)).await?;
    let followers: Vec<i64> = rows.iter().map(|row| row.int(0)).collect::<Outcome<_>>()?;
    let mut told = 0;
    for follower in followers {
        let Some((fire_key, reason, nominal_ms)) = refused(tx, follower, wanted.execution, held.nominal_ms).await?
        else {
            continue;
        };
        let Some(set) = set_of(tx, follower, (wanted.execution, held.job), (&fire_key, nominal_ms)).await? else {
            continue;
        };
        let (head, tail) = tx.dialect().insert_ignore("watches", "job_id, execution_id");
        let mut watches = Bulk::new(format!("{head} (job_id, upstream_id, execution_id) VALUES "), tail);
        for (upstream, execution) in set {
            watches.push_row(tx.dialect(), &[follower.into(), upstream.into(), execution.as_bytes().into()]);
        }
        watches.send(tx).await?;
        let reason = format!(
            "{reason}. Execution {} runs again since {}, and its next end counts",
            wanted.execution,
            rfc3339(now_ms)
        );
        let update = "UPDATE decisions SET reason = ? WHERE job_id = ? AND fire_key = ?";
        tx.run(update, &[kept(&reason, ERROR_BYTES).into(), follower.into(), fire_key.into()]).await?;
        told += 1;
    }
    Ok(told)
}

/// The decision of a follower not to fire because of this execution. Its sentence names the execution.
async fn refused(tx: &mut Tx, job: i64, id: ExecutionId, from_ms: i64) -> Outcome<Option<(String, String, i64)>> {
    let sql = "SELECT fire_key, reason, nominal_ms FROM decisions WHERE job_id = ? AND nominal_ms >= ? AND kind = ? \
               AND reason LIKE ? ORDER BY nominal_ms LIMIT 1";
    let kind = DecisionKind::SkippedUpstream.code();
    let args: [Value; 4] = [job.into(), from_ms.into(), kind.into(), format!("%{id}%").into()];
    let rows = tx.rows(sql, &args).await?;
    rows.first().map(|row| Ok((row.text(0)?, row.opt_text(1)?.unwrap_or_default(), row.int(2)?))).transpose()
}

/// The executions of the set that a decision was about, with their jobs: this one, and of each other upstream the latest up to the set's
/// instant. Whether it is that set is known, for the fire key names it; where it can't be found any more nobody is told.
async fn set_of(
    tx: &mut Tx,
    follower: i64,
    (id, job): (ExecutionId, i64),
    (fire_key, nominal_ms): (&str, i64),
) -> Outcome<Option<Vec<(i64, ExecutionId)>>> {
    let mut set = vec![(job, id)];
    if fire_key == set_key(&[id]) {
        return Ok(Some(set));
    }
    let sql = format!(
        "SELECT upstream_id FROM job_edges WHERE job_id = {follower} AND upstream_id <> {job} ORDER BY upstream_id \
         LIMIT {UPSTREAMS_MAX}"
    );
    for row in tx.raw_rows(&sql).await? {
        let upstream = row.int(0)?;
        let sql = format!(
            "SELECT id FROM executions WHERE job_id = {upstream} AND nominal_ms <= {nominal_ms} \
             ORDER BY nominal_ms DESC, id DESC LIMIT 1"
        );
        for row in tx.raw_rows(&sql).await? {
            set.push((upstream, row.id(0, ExecutionId::from_slice)?));
        }
    }
    let ids: Vec<ExecutionId> = set.iter().map(|(_, id)| *id).collect();
    Ok((set_key(&ids) == fire_key).then_some(set))
}
