//! Retention, against every adapter: what is old enough goes with everything that belongs to it, and nothing else does.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::ExecutionId;
use shardcron_domain::job::OverlapPolicy;
use shardcron_domain::limits::{PRUNE_ROWS, PRUNE_ROWS_LEAST};
use shardcron_domain::output::{Buffer, Stream};
use shardcron_domain::reopen::Refused;
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(
    b_06_what_is_old_enough_goes_and_nothing_else,
    b_06_a_large_execution_goes_in_bounded_steps,
    b_06_rows_that_hold_a_lot_go_in_short_statements,
    what_is_half_deleted_never_runs_again,
    a_retry_races_with_the_retention_and_loses_no_shard,
    b_06_a_job_of_100_000_runs_is_deleted_at_once
);

const DAY: i64 = 86_400_000;

/// An id as the leader makes it at that instant.
fn id_at(ms: i64) -> ExecutionId {
    let now = ExecutionId(uuid::Uuid::now_v7());
    let mut bytes = *now.as_bytes();
    bytes[..6].copy_from_slice(&ms.to_be_bytes()[2..]);
    ExecutionId(uuid::Uuid::from_bytes(bytes))
}

/// An execution that was fired and has ended at that instant, well or badly.
async fn ended(ledger: &SqlLedger, at_ms: i64, shards: u32, well: bool) -> ExecutionId {
    let job = apply(ledger, "job").await;
    let epoch = ledger.begin_epoch("test", at_ms).await.unwrap();
    let new = NewExecution { id: id_at(at_ms), ..new_execution(shards, OverlapPolicy::Allow) };
    let id = new.id;
    let intent = FireIntent { nominal_ms: at_ms, ..intent(job, &id.to_string(), new) };
    ledger.fire(epoch, &[intent], at_ms).await.unwrap();
    ledger.materialize(epoch, id, shards).await.unwrap();
    ledger.mark_dispatched(epoch, &[(id, shards)], &[]).await.unwrap();
    let me = worker();
    let all: Vec<_> = (0..shards).map(|index| attempt(id, index, 1)).collect();
    for some in all.chunks(500) {
        ledger.claim(me, some, at_ms).await.unwrap();
        let ends: Vec<Ended> = some
            .iter()
            .map(|at| if well { success(*at) } else { Ended { retry: policy(1), ..failure(*at) } })
            .collect();
        assert!(ledger.record(me, &ends, at_ms).await.unwrap().iter().all(|r| r.is_ok()));
    }
    id
}

async fn prune(ledger: &SqlLedger, before: &PruneBefore) -> Pruned {
    let (mut cursor, mut all) = (PruneCursor::default(), Pruned::default());
    while cursor != PruneCursor::Done {
        let some = ledger.prune(before, &mut cursor).await.unwrap();
        assert!(some.rows <= PRUNE_ROWS * 5, "a step is bounded: {some:?}");
        all += some;
    }
    all
}

async fn count(ledger: &SqlLedger, table: &str) -> i64 {
    number(ledger, &format!("SELECT COUNT(*) FROM {table}")).await
}

async fn b_06_what_is_old_enough_goes_and_nothing_else(world: World) {
    let ledger = &world.ledger;
    let now = T0 + 1_000 * DAY;
    let before = PruneBefore { success_ms: now - 30 * DAY, failed_ms: now - 90 * DAY, decisions_ms: now - 90 * DAY };
    let mut kept = Vec::new();
    for (age, well, stays) in [
        (100, true, false),
        (100, false, false),
        (31, true, false),
        (31, false, true),
        (29, true, true),
        (29, false, true),
    ] {
        let id = ended(ledger, now - age * DAY, 3, well).await;
        let mut output = Buffer::default();
        output.push(Stream::Stdout, b"said");
        let write = OutputWrite { attempt: attempt(id, 1, 1), write: output.take() };
        ledger.keep_output(&[write], now - age * DAY).await.unwrap();
        if stays {
            kept.push(id);
        }
    }
    // Old, and not ended: it stays however old it is.
    let job = ledger.job("job").await.unwrap().unwrap().id;
    let epoch = ledger.begin_epoch("test", now).await.unwrap();
    let new = NewExecution { id: id_at(now - 200 * DAY), ..new_execution(2, OverlapPolicy::Allow) };
    kept.push(new.id);
    let old = FireIntent { nominal_ms: now - 200 * DAY, ..intent(job, "running", new) };
    ledger.fire(epoch, &[old], now).await.unwrap();

    let pruned = prune(ledger, &before).await;
    assert_eq!((pruned.executions, pruned.decisions, pruned.dead_letters), (3, 2, 3), "{pruned:?}");
    let mut left: Vec<_> = ledger.executions(None, None, 100).await.unwrap().into_iter().map(|e| e.id).collect();
    left.sort_unstable();
    kept.sort_unstable();
    assert_eq!(left, kept);
    // Nothing is left of what went, and all of what stays: three shards of three executions and two of the one that runs.
    let counts = [count(ledger, "shards").await, count(ledger, "results").await, count(ledger, "attempts").await];
    assert_eq!(counts, [11, 3, 6]);
    assert_eq!(count(ledger, "output_chunks").await, 3, "output goes with its execution");
    assert_eq!(count(ledger, "decisions").await, 5, "four that are young, and one that was decided now");
    assert_eq!(count(ledger, "dead_letters").await, 6);
    assert_eq!(prune(ledger, &before).await, Pruned::default(), "a second pass finds nothing");
}

async fn b_06_a_large_execution_goes_in_bounded_steps(world: World) {
    let ledger = &world.ledger;
    let shards = 7_000;
    assert!(u64::from(shards) > PRUNE_ROWS);
    ended(ledger, T0, shards, true).await;
    let now = T0 + 31 * DAY;
    let before = PruneBefore { success_ms: now - 30 * DAY, failed_ms: now - 90 * DAY, decisions_ms: now - 90 * DAY };
    let pruned = prune(ledger, &before).await;
    assert_eq!((pruned.executions, pruned.rows), (1, 2 * u64::from(shards) + 1));
    assert_eq!((count(ledger, "shards").await, count(ledger, "results").await), (0, 0));
    assert_eq!(count(ledger, "decisions").await, 1, "its decision is younger than 90 days");
}

/// The bound holds for a machine that has time; where more runs than there are processors, everything waits for its turn.
fn slack() -> u64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap();
    let load: f64 = load.split(' ').next().unwrap().parse().unwrap();
    let processors = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    (load / processors).clamp(1.0, 8.0).round() as u64
}

/// Output of 32 KiB for each of 4,000 shards: the locks of a statement must last no longer than where rows are small.
async fn b_06_rows_that_hold_a_lot_go_in_short_statements(world: World) {
    let ledger = &world.ledger;
    let shards = 4_000;
    ended(ledger, T0, shards, true).await;
    let body = match ledger.dialect_name() {
        "mysql" => "REPEAT('x', 32768)",
        _ => "zeroblob(32768)",
    };
    let fill = format!(
        "INSERT INTO output_chunks (execution_id, shard_index, attempt, seq, at_ms, stream, position, body) \
         SELECT execution_id, shard_index, 1, 0, {T0}, 0, 0, {body} FROM shards"
    );
    ledger.execute_script(&fill).await.unwrap();
    let now = T0 + 31 * DAY;
    let before = PruneBefore { success_ms: now - 30 * DAY, failed_ms: now - 90 * DAY, decisions_ms: now - 90 * DAY };
    let began = std::time::Instant::now();
    let pruned = prune(ledger, &before).await;
    println!("{}: {pruned:?} in {:?}", ledger.dialect_name(), began.elapsed());
    assert_eq!((pruned.executions, pruned.rows), (1, 3 * u64::from(shards) + 1));
    assert!(pruned.longest_ms < 200 * slack(), "{pruned:?}");
}

fn retry(execution: ExecutionId) -> Reopen {
    Reopen { execution, shards: ReopenShards::Failed { from: 0 }, who: "ops".into(), reason: None }
}

async fn number(ledger: &SqlLedger, sql: &str) -> i64 {
    let rows = ledger.query(sql, &[]).await.unwrap();
    match rows[0][0] {
        SqlArg::Int(n) => n,
        ref other => panic!("{other:?}"),
    }
}

/// Between two steps of its deletion a retry finds an execution that lacks rows. It is refused, and what was begun is finished by
/// whoever comes later, even if the retention keeps such executions for longer by then.
async fn what_is_half_deleted_never_runs_again(world: World) {
    let ledger = &world.ledger;
    let shards = 6_000;
    assert!(u64::from(shards) > PRUNE_ROWS);
    let id = ended(ledger, T0, shards, false).await;
    let now = T0 + 91 * DAY;
    let before = PruneBefore { success_ms: now - 30 * DAY, failed_ms: now - 90 * DAY, decisions_ms: now - 90 * DAY };
    let mut cursor = PruneCursor::default();
    let first = ledger.prune(&before, &mut cursor).await.unwrap();
    assert_eq!(
        (first.rows, first.executions),
        (PRUNE_ROWS_LEAST, 0),
        "the first step leaves it half deleted: {first:?}"
    );
    assert_eq!(ledger.reopen(&retry(id), now).await.unwrap(), Err(Refused::Deleting(id)));
    assert!(ledger.reopenings(id).await.unwrap().is_empty(), "a refusal writes nothing");
    // The process ends here. Another one, with a retention of a year.
    let year = PruneBefore { failed_ms: now - 365 * DAY, ..before };
    let rest = prune(&world.again().await, &year).await;
    assert_eq!(rest.executions, 1);
    let left = [count(ledger, "executions").await, count(ledger, "shards").await, count(ledger, "attempts").await];
    assert_eq!(left, [0, 0, 0]);
    assert_eq!(ledger.reopen(&retry(id), now).await.unwrap(), Err(Refused::NoSuchExecution(id)));
}

/// People send back what the retention is about to delete. Each execution goes as a whole or runs again as a whole.
async fn a_retry_races_with_the_retention_and_loses_no_shard(world: World) {
    let (ledger, other) = (&world.ledger, world.again().await);
    let now = T0 + 91 * DAY;
    let before = PruneBefore { success_ms: now - 30 * DAY, failed_ms: now - 90 * DAY, decisions_ms: now - 90 * DAY };
    let mut ids = Vec::new();
    for n in 0..48 {
        ids.push(ended(ledger, T0 + n, 5, false).await);
    }
    // So that one that runs again is not in the way of the next.
    let text = "[job.job]\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n";
    let allowed = shardcron_domain::jobfile::parse(text).unwrap().remove(0);
    ledger.apply_jobs(&[(allowed, None)], "test", T0).await.unwrap();
    let retries = async {
        let mut answers = Vec::new();
        for id in ids.iter().rev() {
            answers.push((*id, other.reopen(&retry(*id), now).await.unwrap()));
        }
        answers
    };
    let (_, answers) = tokio::join!(prune(ledger, &before), retries);
    let (mut back, mut gone) = (0, 0);
    for (id, answer) in answers {
        match answer {
            Ok(reopened) => {
                back += 1;
                assert_eq!(reopened.shards.len(), 5);
                let shards = ledger.shards(id, 0, 10).await.unwrap();
                assert_eq!(shards.len(), 5, "{id} runs again with every shard");
                assert_eq!(ledger.attempts(id, 100).await.unwrap().len(), 5, "and its history");
            }
            Err(Refused::Deleting(_) | Refused::NoSuchExecution(_)) => {
                gone += 1;
                let rest = (ledger.execution(id).await.unwrap(), ledger.shards(id, 0, 10).await.unwrap());
                assert!(rest.0.is_none() && rest.1.is_empty(), "{id}: {rest:?}");
            }
            Err(other) => panic!("{id}: {other}"),
        }
    }
    println!("{back} run again, {gone} are gone");
    let orphans = "SELECT COUNT(*) FROM shards s LEFT JOIN executions e ON e.id = s.execution_id WHERE e.id IS NULL";
    assert_eq!(number(ledger, orphans).await, 0);
}

/// A job with a long history is gone from the schedule in a moment; the history goes with the retention.
async fn b_06_a_job_of_100_000_runs_is_deleted_at_once(world: World) {
    let ledger = &world.ledger;
    let job = apply(ledger, "job").await;
    let digit = "(SELECT 0 AS n UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 \
                 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)";
    let (number, id, key) = ("a.n + 10 * b.n + 100 * c.n + 1000 * d.n + 10000 * e.n", "id", "fire_key");
    let text = |of: &str| match world.url.starts_with("sqlite") {
        true => format!("CAST(printf('%016d', {of}) AS BLOB)"),
        false => format!("LPAD({of}, 16, '0')"),
    };
    let insert = format!(
        "INSERT INTO executions ({id}, job_id, version, {key}, state, tier, nominal_ms, fired_ms, ended_ms, epoch, plan, params, \
         shards_total, materialized, succeeded) SELECT {0}, {job}, 1, {0}, 1, 'core', {T0}, {T0}, {T0}, 1, '{{}}', '{{}}', 1, 1, 1 \
         FROM {digit} a, {digit} b, {digit} c, {digit} d, {digit} e",
        text(number)
    );
    ledger.execute_script(&insert).await.unwrap();
    assert_eq!(count(ledger, "executions").await, 100_000);
    let asked = std::time::Instant::now();
    let changes = JobChanges { delete: vec![("job".into(), 1)], ..JobChanges::default() };
    ledger.change_jobs(&changes, "ops", T0).await.unwrap();
    let took = asked.elapsed();
    println!("deleted in {took:?}");
    assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    assert!(ledger.job("job").await.unwrap().is_none());
}
