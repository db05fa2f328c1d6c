//! The inbox of a database that is not the ledger's: what has been done there of which shard.
//!
//! A step's statements and the row that says how far the shard has got are one transaction in that database; the ledger's checkpoint
//! follows. Whoever comes after a crash finds a row that is a step ahead of the ledger, and leaves out what it says is done. The row
//! keeps the highest attempt that has been there, so that an earlier one, which may still run, is refused from then on.

use super::fault::{Fault, Outcome, with_retries};
use super::ledger::shared::{check_step, checkpoint_from, checkpoint_text, run_users};
use super::value::{Value, hex};
use super::{SqlLedger, SqlOptions};
use crate::error::{Result, StoreError};
use crate::rows::{BoundSql, SqlArg, SqlStep};
use shardcron_domain::shard::{Checkpoint, Rejection};
use std::time::Duration;
use tokio::sync::OnceCell;

type Answer<T> = std::result::Result<T, Rejection>;

const TABLE: &str = "shardcron_inbox";
/// Rows that nobody has touched for so long are of shards that will never be run again.
const KEEP_MS: i64 = 90 * 86_400_000;
/// Rows that one clean-up deletes at most.
const CLEAN_ROWS: u32 = 1_000;

/// A named database of a worker's configuration. Connects when it is first needed. Cheap to share.
pub struct Inbox {
    name: String,
    url: String,
    options: SqlOptions,
    database: OnceCell<SqlLedger>,
    /// Whether the inbox's table is there: who only reads needs none.
    table: OnceCell<()>,
}

impl std::fmt::Debug for Inbox {
    /// Without the URL, which may hold a password (case Z-05).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Inbox {
    /// A database, by the name and the URL of the worker's own configuration.
    #[must_use]
    pub fn new(name: impl Into<String>, url: impl Into<String>, options: SqlOptions) -> Self {
        Inbox { name: name.into(), url: url.into(), options, database: OnceCell::new(), table: OnceCell::new() }
    }

    /// Does a step's statements, unless they have been done; the rows that they changed, then or now.
    ///
    /// # Errors
    /// [`StoreError::Statement`], [`StoreError::Unavailable`]; a step that may have been done may be asked for again.
    pub async fn apply(&self, step: &SqlStep, now_ms: i64) -> Result<Answer<u64>> {
        let database = self.database().await?;
        check_step(database.db.dialect(), step)?;
        let done: Result<Answer<u64>> = with_retries!(apply(database, step, now_ms));
        done.map_err(|e| self.named(e))
    }

    /// See [`SqlLedger::read_only`]; for databases that only allow that, too.
    ///
    /// # Errors
    /// The same, with the database's name.
    pub async fn read_only(&self, query: &BoundSql, rows: usize, limit: Duration) -> Result<Vec<Vec<SqlArg>>> {
        self.connected().await?.read_only(query, rows, limit).await.map_err(|e| self.named(e))
    }

    async fn connected(&self) -> Result<&SqlLedger> {
        let open = SqlLedger::connect(&self.url, self.options);
        self.database.get_or_try_init(|| open).await.map_err(|e| self.named(e))
    }

    async fn database(&self) -> Result<&SqlLedger> {
        let database = self.connected().await?;
        let make = async { database.execute_script(&table(database.dialect_name())).await };
        self.table.get_or_try_init(|| make).await.map_err(|e| self.named(e))?;
        Ok(database)
    }

    /// The same fault, with the database's name.
    fn named(&self, error: StoreError) -> StoreError {
        match error {
            StoreError::Unavailable { detail, .. } => {
                StoreError::Unavailable { store: "job's database", detail: format!("'{}': {detail}", self.name) }
            }
            StoreError::Statement { detail, transient } => {
                StoreError::Statement { detail: format!("{detail} (in the database '{}')", self.name), transient }
            }
            StoreError::Invalid(detail) => StoreError::Invalid(format!("the database '{}': {detail}", self.name)),
            other => other,
        }
    }
}

fn table(dialect: &str) -> String {
    let (id, engine) = match dialect {
        "sqlite" => ("BLOB", ""),
        _ => ("BINARY(16)", " ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"),
    };
    format!(
        "CREATE TABLE IF NOT EXISTS {TABLE} (execution_id {id} NOT NULL, shard_index INT NOT NULL, attempt INT NOT NULL, \
         progress VARCHAR(2048) NULL, finished INT NOT NULL, last_rows BIGINT NOT NULL, touched_ms BIGINT NOT NULL, \
         PRIMARY KEY (execution_id, shard_index)){engine}"
    )
}

/// How a shard stands in the inbox.
struct Place {
    attempt: u32,
    progress: Option<Checkpoint>,
    finished: bool,
    last_rows: u64,
}

async fn apply(database: &SqlLedger, step: &SqlStep, now_ms: i64) -> Outcome<Answer<u64>> {
    let mut tx = database.db.begin().await?;
    let (attempt, shard) = (step.attempt.attempt, step.attempt.shard());
    let dialect = tx.dialect();
    let at = format!("execution_id = {} AND shard_index = {}", hex(shard.execution.as_bytes()), shard.index);
    // Makes the row, and locks it either way.
    let (head, tail) = dialect.insert_ignore(TABLE, "execution_id, shard_index");
    let id = hex(shard.execution.as_bytes());
    tx.raw(&format!(
        "{head} (execution_id, shard_index, attempt, progress, finished, last_rows, touched_ms) \
         VALUES ({id}, {}, {attempt}, NULL, 0, 0, {now_ms}){tail}",
        shard.index
    ))
    .await?;
    let select =
        format!("SELECT attempt, progress, finished, last_rows FROM {TABLE} WHERE {at}{}", dialect.for_update());
    let rows = tx.raw_rows(&select).await?;
    let row = rows.first().ok_or_else(|| Fault::corrupt(format!("a row of {TABLE} that was made is gone")))?;
    let place = Place {
        attempt: row.count(0)?,
        progress: row.opt_text(1)?.map(|text| checkpoint_from(&text)).transpose()?,
        finished: row.int(2)? != 0,
        last_rows: u64::try_from(row.int(3)?).unwrap_or(0),
    };
    if place.attempt > attempt {
        return Ok(Err(Rejection::StaleAttempt { named: attempt, current: place.attempt }));
    }
    match look(&place, step) {
        Look::Done => {
            tx.run(&format!("UPDATE {TABLE} SET attempt = ? WHERE {at}"), &[attempt.into()]).await?;
            tx.commit().await?;
            return Ok(Ok(place.last_rows));
        }
        Look::Gap => {
            return Err(Fault::invalid(format!(
                "its table {TABLE} says that shard {shard} is done up to {:?}, and this step begins after {:?}. Was it restored from \
                 a backup? Nothing was written; look which keys are done, and correct the row",
                place.progress,
                step.advance.as_ref().and_then(|(from, _)| from.clone())
            )));
        }
        Look::Next => {}
    }
    let mut rows = 0;
    // The user's statements have the attempt's limit.
    let limit = tx.limit(None);
    for statement in &step.statements {
        let args: Vec<Value> = statement.args.iter().cloned().map(Value::from).collect();
        rows += run_users(&mut tx, &statement.text, &args).await?;
    }
    tx.limit(limit);
    let progress = match &step.advance {
        Some((_, to)) => Some(checkpoint_text(to)?),
        None => place.progress.as_ref().map(checkpoint_text).transpose()?,
    };
    let finished = i64::from(step.finish.is_some());
    let update =
        format!("UPDATE {TABLE} SET attempt = ?, progress = ?, finished = ?, last_rows = ?, touched_ms = ? WHERE {at}");
    let changed = i64::try_from(rows).unwrap_or(i64::MAX);
    tx.run(&update, &[attempt.into(), progress.into(), finished.into(), changed.into(), now_ms.into()]).await?;
    // A lost answer needs no care: asked again, the row says what happened.
    tx.commit().await?;
    if step.finish.is_some() && shard.index == 0 {
        clean_up(database, now_ms).await;
    }
    Ok(Ok(rows))
}

/// Once for each execution; that it fails is no reason for the step to fail.
async fn clean_up(database: &SqlLedger, now_ms: i64) {
    let old = now_ms.saturating_sub(KEEP_MS);
    let delete = match database.dialect_name() {
        "sqlite" => format!(
            "DELETE FROM {TABLE} WHERE (execution_id, shard_index) IN \
             (SELECT execution_id, shard_index FROM {TABLE} WHERE touched_ms < {old} LIMIT {CLEAN_ROWS})"
        ),
        _ => format!("DELETE FROM {TABLE} WHERE touched_ms < {old} LIMIT {CLEAN_ROWS}"),
    };
    if let Err(fault) = database.db.raw(&delete).await {
        tracing::debug!(?fault, "old rows of the inbox could not be deleted; the next execution tries again");
    }
}

/// What a step is to the inbox.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// What it does has been done.
    Done,
    /// It is the next one.
    Next,
    /// Something between the inbox and it is missing.
    Gap,
}

fn look(place: &Place, step: &SqlStep) -> Look {
    if place.finished {
        return Look::Done;
    }
    match &step.advance {
        Some((_, to)) if place.progress.as_ref() == Some(to) && step.finish.is_none() => Look::Done,
        Some((from, _)) if place.progress == *from => Look::Next,
        Some(_) => Look::Gap,
        None => Look::Next,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{AttemptOutcome, Ended};
    use shardcron_domain::job::RetryPolicy;
    use shardcron_domain::{AttemptRef, ExecutionId};

    fn step(advance: Option<(Option<i64>, i64)>, last: bool) -> SqlStep {
        let attempt = AttemptRef { execution: ExecutionId(uuid::Uuid::nil()), index: 0, attempt: 1 };
        let finish = last.then(|| Ended {
            attempt,
            outcome: AttemptOutcome::HandBack,
            started_ms: 0,
            ended_ms: 0,
            retry: RetryPolicy::default(),
            seed: 0,
        });
        let advance = advance.map(|(from, to)| (from.map(Checkpoint::Number), Checkpoint::Number(to)));
        SqlStep { attempt, statements: Vec::new(), advance, finish, rows_elsewhere: 0 }
    }

    fn place(progress: Option<i64>, finished: bool) -> Place {
        Place { attempt: 1, progress: progress.map(Checkpoint::Number), finished, last_rows: 7 }
    }

    #[test]
    fn a_step_is_done_next_or_out_of_order() {
        assert_eq!(look(&place(None, false), &step(Some((None, 10)), false)), Look::Next);
        assert_eq!(look(&place(Some(10), false), &step(Some((None, 10)), false)), Look::Done);
        assert_eq!(look(&place(Some(10), false), &step(Some((Some(10), 20)), true)), Look::Next);
        assert_eq!(look(&place(Some(20), false), &step(Some((None, 10)), false)), Look::Gap);
        assert_eq!(look(&place(None, false), &step(Some((Some(10), 20)), false)), Look::Gap);
        assert_eq!(look(&place(Some(20), true), &step(Some((Some(10), 20)), true)), Look::Done);
        assert_eq!(look(&place(None, false), &step(None, true)), Look::Next);
        assert_eq!(look(&place(None, true), &step(None, true)), Look::Done);
    }
}
