//! Checkpoints, and a user's statements in one transaction with the shard's own writes.

use super::record::{change_of, event_of, write_changes};
use super::rows::{Held, check_checkpoint, checkpoint_text, read_shards_of, signed, unsigned};
use crate::error::{Result, StoreError};
use crate::rows::{SqlDone, SqlStep};
use crate::sql::SqlLedger;
use crate::sql::dialect::Dialect;
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, Value};
use shardcron_domain::job::RetryPolicy;
use shardcron_domain::shard::{Checkpoint, Event, Phase, Rejection, Shard, apply};
use shardcron_domain::{AttemptRef, Incarnation};

use std::time::Instant;

type Answer<T> = std::result::Result<T, Rejection>;

/// Refuses statements that would end the transaction that the shard's own writes share with them: a result without its effects,
/// or effects without their result, would be the end of "exactly once".
pub(in crate::sql) fn check_step(dialect: Dialect, step: &SqlStep) -> Result<()> {
    if let Some((_, to)) = &step.advance {
        check_checkpoint(to)?;
    }
    step.statements.iter().try_for_each(|statement| check_statement(dialect, &statement.text))
}

/// The same for one statement.
pub(super) fn check_statement(dialect: Dialect, text: &str) -> Result<()> {
    let word = first_word(text);
    if dialect.ends_a_transaction(word) {
        return Err(StoreError::Statement {
            detail: format!(
                "{} would end the transaction in which the shard's result is recorded; put it into a migration of your own",
                word.to_ascii_uppercase()
            ),
            transient: false,
        });
    }
    Ok(())
}

/// The first word after blanks and comments.
fn first_word(sql: &str) -> &str {
    let mut rest = sql.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
    loop {
        let after = if let Some(comment) = rest.strip_prefix("/*") {
            comment.split_once("*/").map_or("", |(_, after)| after)
        } else if rest.starts_with("--") || rest.starts_with('#') {
            rest.split_once('\n').map_or("", |(_, after)| after)
        } else {
            return rest.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or("");
        };
        rest = after.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
    }
}

impl SqlLedger {
    pub(super) async fn write_checkpoint(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        (from, to): (Option<&Checkpoint>, &Checkpoint),
        rows: u64,
    ) -> Outcome<Answer<()>> {
        let event = advance_event(owner, attempt, (from, to));
        let equal = self.db.dialect().null_safe_equal();
        // As the row would be if all is well: then one guarded statement is enough.
        let guess = Shard {
            phase: Phase::Running,
            attempt: attempt.attempt,
            owner: Some(owner),
            checkpoint: from.cloned(),
            ..Shard::new()
        };
        let forward = apply(&guess, &event, &RetryPolicy::default(), 0).is_ok();
        if forward {
            let update = format!(
                "UPDATE shards SET progress = ?, rows_done = rows_done + ? WHERE execution_id = ? AND shard_index = ? \
                 AND attempt = ? AND state = 1 AND owner = ? AND progress {equal} ?"
            );
            let from = from.map(checkpoint_text).transpose()?;
            let args = [
                checkpoint_text(to)?.into(),
                signed(rows).into(),
                attempt.execution.as_bytes().into(),
                attempt.index.into(),
                attempt.attempt.into(),
                owner.as_bytes().into(),
                from.into(),
            ];
            if self.db.run(&update, &args).await? == 1 {
                return Ok(Ok(()));
            }
        }
        let mut tx = self.db.begin().await?;
        let held = read_shards_of(&mut tx, [attempt.shard()], "").await?;
        let Some(Held { shard, .. }) = held.get(&attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        // An earlier try was committed and its answer lost: the checkpoint stands there, and its rows are counted.
        if forward && stands(shard, owner, attempt, to) {
            return Ok(Ok(()));
        }
        match apply(shard, &event, &RetryPolicy::default(), 0) {
            Err(rejection) => Ok(Err(rejection)),
            Ok(_) => Err(Fault::Moved),
        }
    }

    pub(super) async fn write_step(&self, owner: Incarnation, step: &SqlStep, now_ms: i64) -> Outcome<Answer<SqlDone>> {
        let mut tx = self.db.begin().await?;
        let lock = tx.dialect().for_update();
        let mut held = read_shards_of(&mut tx, [step.attempt.shard()], lock).await?;
        let Some(held) = held.remove(&step.attempt.shard()) else { return Ok(Err(Rejection::NoSuchShard)) };
        let change = match guard(&held.shard, owner, step, now_ms)? {
            Ok(change) => change,
            Err(rejection) => return Ok(Err(rejection)),
        };
        let mut rows = step.rows_elsewhere;
        let began = Instant::now();
        // The user's statements have the attempt's limit.
        let limit = tx.limit(None);
        for statement in &step.statements {
            let args: Vec<Value> = statement.args.iter().cloned().map(Value::from).collect();
            rows += run_users(&mut tx, &statement.text, &args).await?;
        }
        tx.limit(limit);
        if step.advance.is_some() || rows > 0 {
            move_on(&mut tx, step, rows).await?;
        }
        let mut recorded = None;
        if let Some(mut change) = change {
            // What the caller took for the end was the beginning of the statements, which is where the time goes.
            let took_ms = i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX);
            change.ended_ms = change.ended_ms.saturating_add(took_ms);
            let now_ms = now_ms.saturating_add(took_ms);
            // Over all steps of all attempts, whatever the caller counted.
            change.rows = Some(unsigned(held.rows_done) + rows);
            recorded = write_changes(&mut tx, &[change], now_ms).await?.pop();
        }
        // Without a checkpoint or an end in it, nothing would keep a second try from doing it all again.
        tx.commit().await.map_err(Fault::once)?;
        Ok(Ok(SqlDone { rows, recorded }))
    }
}

/// Whether the attempt runs at this owner and has got exactly here.
fn stands(shard: &Shard, owner: Incarnation, attempt: AttemptRef, to: &Checkpoint) -> bool {
    shard.phase == Phase::Running
        && shard.attempt == attempt.attempt
        && shard.owner == Some(owner)
        && shard.checkpoint.as_ref() == Some(to)
}

fn advance_event(owner: Incarnation, attempt: AttemptRef, (from, to): (Option<&Checkpoint>, &Checkpoint)) -> Event {
    Event::Advance { attempt: attempt.attempt, owner, from: from.cloned(), to: to.clone() }
}

/// Everything that could refuse the step, before the user's statements run. Returns the change that its end makes, if it has one.
fn guard<'a>(
    shard: &Shard,
    owner: Incarnation,
    step: &'a SqlStep,
    now_ms: i64,
) -> Outcome<Answer<Option<super::record::Change<'a>>>> {
    let policy = step.finish.as_ref().map_or_else(RetryPolicy::default, |end| end.retry);
    // A hand-back passes exactly where the attempt is running at this owner.
    let probe = Event::HandBack { attempt: step.attempt.attempt, owner };
    if let Err(rejection) = apply(shard, &probe, &policy, now_ms) {
        return Ok(Err(rejection));
    }
    if let Some((from, to)) = &step.advance {
        let event = advance_event(owner, step.attempt, (from.as_ref(), to));
        if let Err(rejection) = apply(shard, &event, &policy, now_ms) {
            return Ok(Err(rejection));
        }
    }
    let Some(end) = &step.finish else { return Ok(Ok(None)) };
    if end.attempt != step.attempt {
        return Err(Fault::invalid("a step can finish its own attempt only"));
    }
    match apply(shard, &event_of(end, owner), &policy, now_ms) {
        Ok((next, effect)) => Ok(Ok(Some(change_of(end, owner, super::record::To::from_step(&next, effect)?)))),
        Err(rejection) => Ok(Err(rejection)),
    }
}

/// One statement of the user's. Its faults are the user's to see, but for a lost connection.
pub(in crate::sql) async fn run_users(tx: &mut Tx, text: &str, args: &[Value]) -> Outcome<u64> {
    let before = total_changes(tx).await?;
    let changed = tx.run(text, args).await.map_err(users_fault)?;
    // SQLite answers a SELECT with the count of the statement before it.
    let unchanged = before.is_some() && before == total_changes(tx).await?;
    Ok(if unchanged { 0 } else { changed })
}

/// The same for a statement whose rows are wanted.
pub(super) async fn read_users(tx: &mut Tx, text: &str, args: &[Value]) -> Outcome<Vec<Row>> {
    tx.rows(text, args).await.map_err(users_fault)
}

fn users_fault(fault: Fault) -> Fault {
    match fault {
        Fault::Server { kind: kind @ (Kind::Duplicate | Kind::Missing | Kind::Refused | Kind::Contention), detail } => {
            Fault::Final(StoreError::Statement { detail, transient: kind == Kind::Contention })
        }
        Fault::Final(StoreError::Invalid(detail) | StoreError::Corrupt(detail)) => {
            Fault::Final(StoreError::Statement { detail, transient: false })
        }
        other => other,
    }
}

async fn total_changes(tx: &mut Tx) -> Outcome<Option<i64>> {
    if tx.dialect() == Dialect::MySql {
        return Ok(None);
    }
    let rows = tx.rows("SELECT total_changes()", &[]).await?;
    rows.first().map(|row| row.int(0)).transpose()
}

async fn move_on(tx: &mut Tx, step: &SqlStep, rows: u64) -> Outcome<()> {
    let mut args = vec![Value::Int(signed(rows))];
    let mut set = String::from("rows_done = rows_done + ?");
    if let Some((_, to)) = &step.advance {
        set.push_str(", progress = ?");
        args.push(checkpoint_text(to)?.into());
    }
    args.push(step.attempt.execution.as_bytes().into());
    args.push(step.attempt.index.into());
    let sql = format!("UPDATE shards SET {set} WHERE execution_id = ? AND shard_index = ?");
    tx.run(&sql, &args).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::first_word;

    #[test]
    fn the_first_word_is_found_behind_comments() {
        for (sql, word) in [
            ("INSERT INTO x", "INSERT"),
            (" ;; /* a */ -- b\n  commit", "commit"),
            ("# c\nrollback;", "rollback"),
            ("/* never closed", ""),
            ("", ""),
        ] {
            assert_eq!(first_word(sql), word, "{sql}");
        }
    }
}
