//! Claims: the hottest statement, one for each execution and attempt of a batch.

use super::rows::{Held, read_shards_of};
use crate::ledger::Verdicts;
use crate::rows::Claimed;
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{hex, id_list, number_list};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::{Event, Phase, Rejection, apply};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation, ShardRef};
use std::collections::{BTreeMap, HashMap, HashSet};

type Groups = BTreeMap<(ExecutionId, u32), Vec<u32>>;

impl SqlLedger {
    pub(super) async fn write_claims(
        &self,
        owner: Incarnation,
        attempts: &[AttemptRef],
        now_ms: i64,
    ) -> Outcome<Verdicts<Claimed>> {
        let distinct: HashSet<AttemptRef> = attempts.iter().copied().collect();
        let mut groups = Groups::new();
        for attempt in &distinct {
            groups.entry((attempt.execution, attempt.attempt)).or_default().push(attempt.index);
        }
        // In the primary key's order, so that two batches never wait for each other in a circle.
        groups.values_mut().for_each(|indexes| indexes.sort_unstable());
        let fresh = groups.keys().all(|(_, attempt)| *attempt == 1) && distinct.len() == attempts.len();
        let statements = claim_statements(&groups, (owner, now_ms));
        if let (true, [update]) = (fresh, statements.as_slice())
            && self.db.raw(update).await? == attempts.len() as u64
        {
            return Ok(attempts.iter().map(|_| Ok(Claimed { checkpoint: None })).collect());
        }
        let mut tx = self.db.begin().await?;
        let (matched, _) = tx.raw_batch(&statements).await?;
        let verdicts = if fresh && matched.iter().sum::<u64>() == attempts.len() as u64 {
            attempts.iter().map(|_| Ok(Claimed { checkpoint: None })).collect()
        } else {
            settle(&mut tx, owner, attempts, now_ms).await?
        };
        tx.commit().await?;
        Ok(verdicts)
    }
}

/// One statement for all executions of which the same shards are claimed: with many small executions due at once, that is one
/// for the whole batch instead of one for each.
fn claim_statements(groups: &Groups, (owner, now_ms): (Incarnation, i64)) -> Vec<String> {
    let mut alike: BTreeMap<(u32, &[u32]), Vec<&ExecutionId>> = BTreeMap::new();
    for ((execution, attempt), indexes) in groups {
        alike.entry((*attempt, indexes)).or_default().push(execution);
    }
    let owner = hex(owner.as_bytes());
    let statement = |((attempt, indexes), executions): ((u32, &[u32]), Vec<&ExecutionId>)| {
        format!(
            "UPDATE shards SET state = 1, owner = {owner}, claimed_ms = {now_ms} WHERE execution_id IN ({}) \
             AND shard_index IN ({}) AND attempt = {attempt} AND state = 0 AND not_before_ms <= {now_ms}",
            id_list(executions.into_iter().map(ExecutionId::as_bytes)),
            number_list(indexes)
        )
    };
    alike.into_iter().map(statement).collect()
}

/// One verdict for each entry, from the rows as they stand after the claim. What runs at this owner under the named attempt is
/// claimed, by this call or by an earlier one whose answer was lost.
async fn settle(tx: &mut Tx, owner: Incarnation, attempts: &[AttemptRef], now_ms: i64) -> Outcome<Verdicts<Claimed>> {
    let rows = read_shards_of(tx, attempts.iter().map(AttemptRef::shard), "").await?;
    let mut given = HashSet::new();
    attempts.iter().map(|attempt| verdict(&rows, &mut given, (owner, *attempt, now_ms))).collect()
}

fn verdict(
    rows: &HashMap<ShardRef, Held>,
    given: &mut HashSet<AttemptRef>,
    (owner, attempt, now_ms): (Incarnation, AttemptRef, i64),
) -> Outcome<Result<Claimed, Rejection>> {
    let Some(Held { shard, .. }) = rows.get(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
    let mine = shard.phase == Phase::Running && shard.attempt == attempt.attempt && shard.owner == Some(owner);
    if mine && given.insert(attempt) {
        return Ok(Ok(Claimed { checkpoint: shard.checkpoint.clone() }));
    }
    let event = Event::Claim { attempt: attempt.attempt, owner };
    match apply(shard, &event, &RetryPolicy::default(), now_ms) {
        Err(rejection) => Ok(Err(rejection)),
        // Claimable now although the statement did not match: it changed between the two.
        Ok(_) => Err(Fault::Moved),
    }
}
