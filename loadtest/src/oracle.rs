//! The oracle: what was lost and what was recorded twice, counted from the ledger's tables by statements of its own. It uses none
//! of the program's counters but to compare them with the rows.

pub mod firings;

use anyhow::{Context, Result};
use serde::Serialize;
use shardcron_store::SqlArg;
use shardcron_store::sql::SqlLedger;

/// What stands in the ledger when everything has ended, or has stopped moving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// Executions.
    pub executions: u64,
    /// Shards that they must have.
    pub shards: u64,
    /// Result rows.
    pub results: u64,
    /// Shards that ended badly, with their dead letter: recorded, but not what a load test is for.
    pub failed: u64,
    /// Shards without a recorded end: no row, not ended, or ended well without a result; and firings that made no execution.
    pub lost: u64,
    /// Shards with more than one result, with a result besides their recorded end, or counted more often than they ended; and
    /// firings that made more than one execution.
    pub recorded_twice: u64,
    /// Executions that have not ended although all their shards have: their end was lost.
    pub unended: u64,
    /// Shards taken from workers that died.
    pub taken_over: u64,
}

impl Count {
    /// Nothing lost, nothing twice, nothing failed.
    #[must_use]
    pub fn clean(&self) -> bool {
        self.lost == 0 && self.recorded_twice == 0 && self.failed == 0 && self.unended == 0
    }
}

/// Each shard once, with what its end and its result say. States: 0 pending, 1 running, 2 success, 3 failed, 4 cancelled. The
/// join is by both primary keys as they stand: over a derived table the server may read it whole for each shard. Were there two
/// results of one shard, [`DOUBLE_RESULTS`] says so.
const SHARDS: &str = "\
SELECT s.execution_id AS id, \
 SUM(CASE WHEN s.state = 2 AND r.execution_id IS NOT NULL OR s.state IN (3, 4) THEN 1 ELSE 0 END) AS settled, \
 SUM(CASE WHEN s.state = 2 THEN 1 ELSE 0 END) AS well, \
 SUM(CASE WHEN s.state = 3 THEN 1 ELSE 0 END) AS badly, \
 SUM(CASE WHEN s.state = 4 THEN 1 ELSE 0 END) AS cancelled, \
 SUM(CASE WHEN r.execution_id IS NOT NULL AND (s.state <> 2 OR r.attempt <> s.attempt) THEN 1 ELSE 0 END) AS beside \
FROM shards s LEFT JOIN results r ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index \
GROUP BY s.execution_id";

/// Each execution once, its counters beside the sums over its shards; in the order of `Sums`.
const EXECUTIONS: &str = "\
SELECT COUNT(*), SUM(e.shards_total), \
 SUM(e.shards_total - COALESCE(s.settled, 0)), \
 SUM(COALESCE(s.badly, 0)), SUM(COALESCE(s.beside, 0)), \
 SUM(CASE WHEN e.succeeded > COALESCE(s.well, 0) THEN e.succeeded - COALESCE(s.well, 0) ELSE 0 END) \
 + SUM(CASE WHEN e.failed > COALESCE(s.badly, 0) THEN e.failed - COALESCE(s.badly, 0) ELSE 0 END) \
 + SUM(CASE WHEN e.cancelled > COALESCE(s.cancelled, 0) THEN e.cancelled - COALESCE(s.cancelled, 0) ELSE 0 END), \
 SUM(CASE WHEN e.state = 0 AND COALESCE(s.settled, 0) = e.shards_total THEN 1 ELSE 0 END) \
FROM executions e LEFT JOIN (SHARDS) s ON s.id = e.id";

const RESULTS: &str = "SELECT COUNT(*) FROM results";
/// The primary key keeps these out; the oracle does not take its word for it.
const DOUBLE_RESULTS: &str = "\
SELECT COUNT(*) FROM (SELECT execution_id FROM results GROUP BY execution_id, shard_index HAVING COUNT(*) > 1) d";
/// A result of a shard that does not exist.
const STRAY_RESULTS: &str = "\
SELECT COUNT(*) FROM results r LEFT JOIN shards s ON s.execution_id = r.execution_id AND s.shard_index = r.shard_index \
WHERE s.execution_id IS NULL";
const TAKEN_OVER: &str = "SELECT COUNT(*) FROM attempts WHERE outcome = 'worker_lost'";

/// Counts over the whole ledger, which must hold nothing but the run's executions. `fired` is how many firings were asked for.
///
/// # Errors
/// The ledger does not answer.
pub async fn count(ledger: &SqlLedger, fired: u64) -> Result<Count> {
    let sums = numbers(ledger, &EXECUTIONS.replace("SHARDS", SHARDS)).await?;
    let sum = |at: usize| sums.get(at).copied().unwrap_or(0);
    let (executions, counted_twice) = (sum(0), sum(5));
    let double = number(ledger, DOUBLE_RESULTS).await? + number(ledger, STRAY_RESULTS).await?;
    Ok(Count {
        executions,
        shards: sum(1),
        results: number(ledger, RESULTS).await?,
        failed: sum(3),
        lost: sum(2) + fired.saturating_sub(executions),
        recorded_twice: sum(4) + counted_twice + double + executions.saturating_sub(fired),
        unended: sum(6),
        taken_over: number(ledger, TAKEN_OVER).await?,
    })
}

/// Each shard that has no recorded end, and each execution that has not ended, in words; the first of them.
///
/// # Errors
/// The ledger does not answer.
pub async fn open_ends(ledger: &SqlLedger) -> Result<Vec<String>> {
    let shards = "SELECT j.name, HEX(e.id), e.nominal_ms, s.shard_index, s.state, s.attempt, \
                  CASE WHEN r.execution_id IS NULL THEN 'no result' ELSE 'a result' END \
                  FROM shards s JOIN executions e ON e.id = s.execution_id JOIN jobs j ON j.id = e.job_id \
                  LEFT JOIN results r ON r.execution_id = s.execution_id AND r.shard_index = s.shard_index \
                  WHERE s.state IN (0, 1) OR s.state = 2 AND r.execution_id IS NULL LIMIT 20";
    let executions = "SELECT j.name, HEX(e.id), e.nominal_ms, e.materialized, e.dispatched, e.shards_total, e.succeeded \
                      FROM executions e JOIN jobs j ON j.id = e.job_id WHERE e.state = 0 LIMIT 20";
    let mut words = Vec::new();
    for row in rows_of(ledger, shards, &[]).await? {
        if let [job, id, nominal, index, state, attempt, result] = row.as_slice() {
            words.push(format!(
                "{job} of {nominal} ({id}): shard {index} has state {state}, attempt {attempt} and {result}"
            ));
        }
    }
    for row in rows_of(ledger, executions, &[]).await? {
        if let [job, id, nominal, written, handed, total, done] = row.as_slice() {
            words.push(format!(
                "{job} of {nominal} ({id}) has not ended: of {total} shards {written} written, {handed} handed out, {done} done"
            ));
        }
    }
    Ok(words)
}

/// Rows as text; NULL is empty.
pub(crate) async fn rows_of(ledger: &SqlLedger, sql: &str, args: &[SqlArg]) -> Result<Vec<Vec<String>>> {
    let rows = ledger.query(sql, args).await.context("the oracle's question to the ledger")?;
    let text = |value| match value {
        SqlArg::Int(n) => n.to_string(),
        SqlArg::Float(n) => n.to_string(),
        SqlArg::Text(text) => text,
        SqlArg::Null => String::new(),
    };
    Ok(rows.into_iter().map(|row| row.into_iter().map(text).collect()).collect())
}

async fn number(ledger: &SqlLedger, sql: &str) -> Result<u64> {
    Ok(numbers(ledger, sql).await?.first().copied().unwrap_or(0))
}

/// The first row. Sums are NULL over nothing, and decimals, which come as text, in MySQL.
async fn numbers(ledger: &SqlLedger, sql: &str) -> Result<Vec<u64>> {
    let rows = ledger.query(sql, &[]).await.context("the oracle's question to the ledger")?;
    let first = rows.into_iter().next().unwrap_or_default();
    first
        .into_iter()
        .map(|value| match value {
            SqlArg::Int(n) => u64::try_from(n).context("a count below zero"),
            SqlArg::Float(n) if n >= 0.0 => Ok(n as u64),
            SqlArg::Text(text) => text.parse().with_context(|| format!("a count that reads '{text}'")),
            SqlArg::Null => Ok(0),
            SqlArg::Float(n) => anyhow::bail!("a count of {n}"),
        })
        .collect()
}

/// Milliseconds from the fire to the first handler's start, by the ledger's stored times, for each execution of a job.
///
/// # Errors
/// The ledger does not answer.
pub async fn fire_to_start_ms(ledger: &SqlLedger, job: &str) -> Result<Vec<i64>> {
    let sql = "SELECT MIN(r.started_ms) - MIN(e.fired_ms) FROM executions e JOIN jobs j ON j.id = e.job_id \
               JOIN results r ON r.execution_id = e.id WHERE j.name = ? GROUP BY e.id";
    let rows = ledger.query(sql, &[SqlArg::Text(job.into())]).await.context("the times in the ledger")?;
    let waits = rows.into_iter().filter_map(|row| match row.into_iter().next() {
        Some(SqlArg::Int(ms)) => Some(ms),
        Some(SqlArg::Text(text)) => text.parse().ok(),
        _ => None,
    });
    Ok(waits.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_domain::job::OverlapPolicy;
    use shardcron_domain::plan::ShardPlan;
    use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, jobfile};
    use shardcron_store::sql::SqlOptions;
    use shardcron_store::{AttemptOutcome, Ended, FireAction, FireIntent, FireOutcome, Ledger, NewExecution};

    const SHARDS_EACH: u32 = 20;

    /// A ledger with two executions of twenty shards, all recorded, written by the program's own code.
    async fn finished(dir: &tempfile::TempDir) -> SqlLedger {
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        let jobs =
            jobfile::parse("[job.j]\nshards = { count = 20 }\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n")
                .unwrap();
        let retry = jobs[0].retry;
        ledger.apply_jobs(&[(jobs[0].clone(), None)], "test", 0).await.unwrap();
        let job = ledger.job("j").await.unwrap().unwrap();
        let epoch: Epoch = ledger.begin_epoch("test", 0).await.unwrap();
        let owner = Incarnation(uuid::Uuid::now_v7());
        for key in ["a", "b"] {
            let id = ExecutionId(uuid::Uuid::now_v7());
            let plan = ShardPlan::from_spec(&jobs[0].shards).unwrap();
            let new = NewExecution {
                id,
                plan,
                params: Default::default(),
                tier: "core".into(),
                timeout_ms: None,
                stall_ms: None,
                overlap: OverlapPolicy::Allow,
            };
            let intent = FireIntent {
                job: job.id,
                version: job.version,
                fire_key: key.into(),
                nominal_ms: 0,
                scheduled: false,
                action: FireAction::Fire(new),
                next_fire_ms: None,
                extra: Default::default(),
            };
            assert_eq!(ledger.fire(epoch, &[intent], 1_000).await.unwrap(), [FireOutcome::Fired(id)]);
            let attempts: Vec<AttemptRef> =
                (0..SHARDS_EACH).map(|index| AttemptRef { execution: id, index, attempt: 1 }).collect();
            ledger.claim(owner, &attempts, 1_000).await.unwrap();
            let outcome = AttemptOutcome::Success { rows: None, summary: None };
            let end = |attempt| Ended {
                attempt,
                outcome: outcome.clone(),
                started_ms: 1_007,
                ended_ms: 1_008,
                retry,
                seed: 1,
            };
            ledger.record(owner, &attempts.into_iter().map(end).collect::<Vec<_>>(), 1_010).await.unwrap();
        }
        ledger
    }

    async fn after(fault: &str) -> Count {
        let dir = tempfile::tempdir().unwrap();
        let ledger = finished(&dir).await;
        ledger.execute_script(fault).await.unwrap();
        count(&ledger, 2).await.unwrap()
    }

    #[tokio::test]
    async fn a_good_ledger_is_clean() {
        let good = after("SELECT 1").await;
        assert!(good.clean(), "{good:?}");
        assert_eq!((good.executions, good.shards, good.results), (2, 40, 40));
    }

    #[tokio::test]
    async fn a_result_that_is_gone_is_lost() {
        let count = after("DELETE FROM results WHERE shard_index = 7").await;
        assert_eq!((count.lost, count.recorded_twice), (2, 0));
        assert!(!count.clean());
    }

    #[tokio::test]
    async fn a_shard_that_is_stuck_or_gone_is_lost() {
        for fault in [
            "DELETE FROM results WHERE shard_index = 3; UPDATE shards SET state = 0 WHERE shard_index = 3",
            "DELETE FROM results WHERE shard_index = 3; UPDATE shards SET state = 1 WHERE shard_index = 3",
            "DELETE FROM results WHERE shard_index = 3; DELETE FROM shards WHERE shard_index = 3",
        ] {
            assert_eq!(after(fault).await.lost, 2, "{fault}");
        }
    }

    #[tokio::test]
    async fn what_is_counted_or_recorded_twice_is_found() {
        let both = after("UPDATE executions SET succeeded = succeeded + 1").await;
        assert_eq!((both.lost, both.recorded_twice), (0, 2));
        // One too many and one too few must not make up for each other.
        let one =
            after("UPDATE executions SET succeeded = succeeded + CASE fire_key WHEN 'a' THEN 1 ELSE -1 END").await;
        assert_eq!(one.recorded_twice, 1);
        let reopened = after("UPDATE shards SET state = 0 WHERE shard_index = 3").await;
        assert_eq!((reopened.lost, reopened.recorded_twice), (2, 4), "a result besides an open shard, and its count");
        let superseded = after("UPDATE results SET attempt = 2 WHERE shard_index = 3").await;
        assert_eq!((superseded.lost, superseded.recorded_twice), (0, 2));
        let stray = after("INSERT INTO results SELECT execution_id, 99, attempt, owner, started_ms, ended_ms, row_count, summary FROM results WHERE shard_index = 0").await;
        assert_eq!(stray.recorded_twice, 2);
    }

    #[tokio::test]
    async fn firings_are_counted_against_what_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = finished(&dir).await;
        assert_eq!(count(&ledger, 3).await.unwrap().lost, 1);
        assert_eq!(count(&ledger, 1).await.unwrap().recorded_twice, 1);
    }

    #[tokio::test]
    async fn an_end_that_was_never_written_is_found() {
        let count = after("UPDATE executions SET state = 0, ended_ms = NULL").await;
        assert_eq!((count.unended, count.clean()), (2, false));
    }

    #[tokio::test]
    async fn an_empty_ledger_that_nobody_used_is_clean() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        assert_eq!(count(&ledger, 0).await.unwrap(), Count::default());
    }

    #[tokio::test]
    async fn waits_are_from_the_fire_to_the_first_start() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = finished(&dir).await;
        assert_eq!(fire_to_start_ms(&ledger, "j").await.unwrap(), [7, 7]);
    }
}
