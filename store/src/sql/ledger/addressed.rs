//! Shards of broadcasts: each waits in the ledger for the one worker that may run it, and is lost with that worker.

use super::leader::check_fence;
use super::record::{Settled, check_counters, counter_writes, let_go_writes};
use super::rows::read_shards_of;
use crate::sql::SqlLedger;
use crate::sql::bulk::Bulk;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Value, hex};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::plan::{ADDRESSED, ShardPlan};
use shardcron_domain::shard::{Event, Phase, apply};
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, ShardRef};

/// Shards of one lost worker that one transaction ends.
const ABANDONED: usize = 200;
/// The word in the history of an attempt that never began.
const OUTCOME: &str = "abandoned";
const REASON: &str = "the worker that alone was to run this shard of a broadcast is gone; the next firing is for the workers that \
                      are there then";

impl SqlLedger {
    pub(super) async fn read_addressed(
        &self,
        who: Incarnation,
        now_ms: i64,
        limit: usize,
    ) -> Outcome<Vec<(String, AttemptRef)>> {
        let sql = format!(
            "SELECT a.execution_id, a.shard_index, s.attempt, s.state, s.not_before_ms, e.tier FROM addressed a \
             JOIN shards s ON s.execution_id = a.execution_id AND s.shard_index = a.shard_index \
             JOIN executions e ON e.id = a.execution_id WHERE a.incarnation = {} LIMIT {limit}",
            hex(who.as_bytes())
        );
        let (mut waiting, mut ended) = (Vec::new(), Vec::new());
        for row in self.db.raw_rows(&sql).await? {
            let (execution, index) = (row.id(0, ExecutionId::from_slice)?, row.count(1)?);
            let phase = super::rows::shard_phase(row.int(3)?)?;
            if phase.is_terminal() {
                ended.push(ShardRef { execution, index });
            } else if phase == Phase::Pending && row.int(4)? <= now_ms {
                let attempt = AttemptRef { execution, index, attempt: row.count(2)? };
                waiting.push((row.text(5)?.trim_start_matches(ADDRESSED).to_owned(), attempt));
            }
        }
        for shard in ended {
            self.db.raw(&forget(who, shard)).await?;
        }
        Ok(waiting)
    }

    pub(super) async fn read_addressees(&self) -> Outcome<Vec<Incarnation>> {
        let rows = self.db.raw_rows("SELECT DISTINCT incarnation FROM addressed").await?;
        rows.iter().map(|row| row.id(0, Incarnation::from_slice)).collect()
    }

    pub(super) async fn write_abandoned(
        &self,
        epoch: Epoch,
        who: Incarnation,
        now_ms: i64,
    ) -> Outcome<Vec<AttemptRef>> {
        let mut tx = self.db.begin().await?;
        check_fence(&mut tx, epoch).await?;
        let list = format!(
            "SELECT execution_id, shard_index FROM addressed WHERE incarnation = {} ORDER BY execution_id, shard_index LIMIT {ABANDONED}",
            hex(who.as_bytes())
        );
        let wanted = tx.raw_rows(&list).await?;
        let wanted = wanted
            .iter()
            .map(|row| Ok(ShardRef { execution: row.id(0, ExecutionId::from_slice)?, index: row.count(1)? }))
            .collect::<Outcome<Vec<_>>>()?;
        let lock = tx.dialect().for_update();
        let held = read_shards_of(&mut tx, wanted.iter().copied(), lock).await?;
        let mut settled = Settled::new();
        let (mut updates, mut forgotten, mut abandoned) = (Vec::new(), Vec::new(), Vec::new());
        let mut history = Bulk::new(
            "INSERT INTO attempts (execution_id, shard_index, attempt, outcome, owner, started_ms, ended_ms, message) VALUES ",
            "",
        );
        let mut dead =
            Bulk::new("INSERT INTO dead_letters (kind, at_ms, reason, execution_id, shard_index, body) VALUES ", "");
        for shard in wanted {
            let Some(row) = held.get(&shard).map(|held| &held.shard) else {
                forgotten.push(forget(who, shard));
                continue;
            };
            match apply(row, &Event::Abandon, &RetryPolicy::default(), now_ms) {
                Ok(_) => {}
                // It still runs there, as far as is known: the loss of its owner is seen to first.
                Err(_) if !row.phase.is_terminal() => continue,
                Err(_) => {
                    forgotten.push(forget(who, shard));
                    continue;
                }
            }
            let (id, index) = (hex(shard.execution.as_bytes()), shard.index);
            abandoned.push(AttemptRef { execution: shard.execution, index, attempt: row.attempt });
            updates.push(format!(
                "UPDATE shards SET state = {}, owner = NULL WHERE execution_id = {id} AND shard_index = {index} AND state = 0",
                Phase::Failed.code()
            ));
            let execution = || Value::from(shard.execution.as_bytes());
            history.push_row(
                tx.dialect(),
                &[
                    execution(),
                    index.into(),
                    row.attempt.into(),
                    OUTCOME.into(),
                    who.as_bytes().into(),
                    now_ms.into(),
                    now_ms.into(),
                    REASON.into(),
                ],
            );
            let letter = ["shard".into(), now_ms.into(), REASON.into(), execution(), index.into(), Value::Null];
            dead.push_row(tx.dialect(), &letter);
            forgotten.push(format!("DELETE FROM redispatch WHERE execution_id = {id} AND shard_index = {index}"));
            forgotten.push(forget(who, shard));
            settled.entry(shard.execution).or_default().1 += 1;
        }
        let guarded = updates.len();
        let mut statements = updates;
        statements.extend([history, dead].into_iter().flat_map(Bulk::into_statements));
        statements.extend(forgotten);
        statements.extend(counter_writes(&settled, now_ms));
        if statements.is_empty() {
            return Ok(abandoned);
        }
        let (matched, counters) = tx.raw_batch(&statements).await?;
        if matched[..guarded].iter().sum::<u64>() != guarded as u64 {
            return Err(Fault::Moved);
        }
        let (_, let_go) = check_counters(&settled, &counters)?;
        let let_go = let_go_writes(&let_go, now_ms);
        if !let_go.is_empty() {
            tx.raw_batch(&let_go).await?;
        }
        tx.commit().await?;
        Ok(abandoned)
    }
}

/// Shards of a broadcast that run again wait for the workers that they are for. For one that is gone, each ends as before.
pub(super) async fn address_again(tx: &mut Tx, execution: ExecutionId, indexes: &[u32]) -> Outcome<()> {
    let sql =
        format!("SELECT plan FROM executions WHERE id = {} AND tier LIKE '{ADDRESSED}%'", hex(execution.as_bytes()));
    let rows = tx.raw_rows(&sql).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let plan: ShardPlan = serde_json::from_str(&row.text(0)?)
        .map_err(|e| Fault::corrupt(format!("the plan of execution {execution}: {e}")))?;
    let (head, tail) = tx.dialect().insert_ignore("addressed", "incarnation, execution_id, shard_index");
    let mut rows = Bulk::new(format!("{head} (incarnation, execution_id, shard_index) VALUES "), tail);
    for index in indexes {
        if let Some(worker) = plan.addressee(*index) {
            let (who, id) = (worker.incarnation.as_bytes(), execution.as_bytes());
            rows.push_row(tx.dialect(), &[who.into(), id.into(), (*index).into()]);
        }
    }
    rows.send(tx).await?;
    Ok(())
}

fn forget(who: Incarnation, shard: ShardRef) -> String {
    format!(
        "DELETE FROM addressed WHERE incarnation = {} AND execution_id = {} AND shard_index = {}",
        hex(who.as_bytes()),
        hex(shard.execution.as_bytes()),
        shard.index
    )
}
