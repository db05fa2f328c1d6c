//! A handler's transactions, and records that are worked on once: every case runs against every adapter.
#![allow(clippy::unwrap_used, reason = "a test ends there, and says where")]

#[macro_use]
mod common;

use common::*;
use shardcron_domain::effects::{SqlValue, StepEnd};
use shardcron_domain::limits::RECORD_KEY_BYTES;
use shardcron_domain::once::{Batch, RecordState};
use shardcron_domain::shard::{Checkpoint, Phase, Rejection};
use shardcron_domain::{AttemptRef, ExecutionId, Incarnation};
use shardcron_store::sql::SqlLedger;
use shardcron_store::*;

conformance!(
    a_transaction_commits_statements_and_checkpoint_together,
    a_superseded_attempt_can_not_begin,
    a_refused_statement_leaves_the_transaction_open,
    what_came_of_a_commit_can_be_read_back,
    records_are_started_done_and_gone_with_the_checkpoint,
    i_02_keys_compare_as_bytes,
    i_03_long_keys_are_told_apart_or_refused,
    i_04_batches_of_many_shards_do_not_disturb_each_other,
    c_01_a_skip_limit_holds_over_attempts,
    c_03_a_failed_record_is_all_that_is_tried_again,
    a_shard_with_open_records_does_not_end_well,
    retention_takes_the_rows_of_failed_shards,
);

struct Shard {
    ledger: SqlLedger,
    me: Incarnation,
    at: AttemptRef,
    id: ExecutionId,
}

fn n(number: i64) -> Checkpoint {
    Checkpoint::Number(number)
}

fn to(from: Option<i64>, to: i64) -> StepEnd {
    StepEnd { advance: Some((from.map(n), n(to))), rows: 1, ..StepEnd::default() }
}

impl Shard {
    async fn of(world: &World) -> Self {
        let ledger = world.ledger.clone();
        let (_, _, id) = fired(&ledger, 1).await;
        ledger.execute_script("CREATE TABLE sink (id BIGINT PRIMARY KEY, n BIGINT)").await.unwrap();
        let (me, at) = (worker(), attempt(id, 0, 1));
        ledger.claim(me, &[at], T0).await.unwrap()[0].as_ref().unwrap();
        Shard { ledger, me, at, id }
    }

    async fn begin(&self) -> Box<dyn StepTx> {
        self.ledger.begin_step(self.me, self.at).await.unwrap().unwrap()
    }

    /// The attempt dies without a word, and the next one runs.
    async fn next_attempt(&mut self) {
        let failed = failure(self.at);
        self.ledger.record(self.me, &[failed], T0).await.unwrap()[0].as_ref().unwrap();
        self.me = worker();
        self.at.attempt += 1;
        let later = T0 + 3_600_000;
        self.ledger.claim(self.me, &[self.at], later).await.unwrap()[0].as_ref().unwrap();
    }

    /// A batch in our own transaction.
    async fn once(&self, keys: &[&[u8]]) -> Batch {
        let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.to_vec()).collect();
        let mut tx = self.begin().await;
        let known = tx.known(&keys, true).await.unwrap();
        tx.commit(&StepEnd::default()).await.unwrap().unwrap();
        Batch::new(keys, known).unwrap().noted()
    }

    async fn settle(&self, batch: &Batch, end: StepEnd) {
        let mut tx = self.begin().await;
        let skipped = tx.skipped().await.unwrap();
        let settled = batch.settle(end.advance.is_some(), skipped);
        let end = StepEnd { writes: settled.writes, erased: settled.erased, ..end };
        tx.commit(&end).await.unwrap().unwrap();
    }

    async fn sink(&self) -> usize {
        self.ledger.query("SELECT id FROM sink", &[]).await.unwrap().len()
    }

    async fn rows(&self) -> usize {
        self.ledger.query("SELECT record_key FROM once_records", &[]).await.unwrap().len()
    }

    async fn row(&self) -> ShardRow {
        self.ledger.shards(self.id, 0, 1).await.unwrap().remove(0)
    }
}

async fn put(tx: &mut Box<dyn StepTx>, id: i64) -> Result<u64> {
    tx.execute("INSERT INTO sink (id, n) VALUES (?, ?)", &[SqlValue::Int(id), SqlValue::Int(1)]).await
}

async fn a_transaction_commits_statements_and_checkpoint_together(world: World) {
    let shard = Shard::of(&world).await;
    let mut tx = shard.begin().await;
    assert_eq!(put(&mut tx, 1).await.unwrap(), 1);
    let seen = tx.query("SELECT id, n FROM sink WHERE id = ?", &[SqlValue::Int(1)]).await.unwrap();
    assert_eq!(seen, [[SqlValue::Int(1), SqlValue::Int(1)]]);
    drop(tx);
    let mut tx = shard.begin().await;
    put(&mut tx, 1).await.expect("what was dropped is rolled back");
    tx.commit(&to(None, 10)).await.unwrap().unwrap();
    assert_eq!((shard.sink().await, shard.row().await.checkpoint), (1, Some(n(10))));
    // The checkpoint is moved from where it stands, or nothing happens.
    let mut tx = shard.begin().await;
    put(&mut tx, 2).await.unwrap();
    assert_eq!(tx.commit(&to(None, 20)).await.unwrap(), Err(Rejection::CheckpointGap));
    assert_eq!((shard.sink().await, shard.row().await.checkpoint), (1, Some(n(10))));
    // What two statements did for one record is undone together.
    let mut tx = shard.begin().await;
    put(&mut tx, 3).await.unwrap();
    tx.mark().await.unwrap();
    put(&mut tx, 4).await.unwrap();
    tx.undo().await.unwrap();
    tx.commit(&to(Some(10), 20)).await.unwrap().unwrap();
    assert_eq!((shard.sink().await, shard.row().await.rows_done), (2, 2));
}

async fn a_superseded_attempt_can_not_begin(world: World) {
    let mut shard = Shard::of(&world).await;
    let (old, me) = (shard.at, shard.me);
    shard.next_attempt().await;
    let stale = Rejection::StaleAttempt { named: 1, current: 2 };
    assert_eq!(shard.ledger.begin_step(me, old).await.unwrap().err(), Some(stale));
    assert!(shard.ledger.begin_step(me, shard.at).await.unwrap().is_err(), "another worker's");
    assert_eq!(shard.ledger.begin_step(me, attempt(shard.id, 9, 1)).await.unwrap().err(), Some(Rejection::NoSuchShard));
}

async fn a_refused_statement_leaves_the_transaction_open(world: World) {
    let shard = Shard::of(&world).await;
    let mut tx = shard.begin().await;
    put(&mut tx, 1).await.unwrap();
    let error = put(&mut tx, 1).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement { transient: false, .. }), "{error:?}");
    for ends in ["COMMIT", "/* so */ ROLLBACK"] {
        assert!(matches!(tx.execute(ends, &[]).await, Err(StoreError::Statement { .. })));
    }
    put(&mut tx, 2).await.unwrap();
    tx.commit(&to(None, 1)).await.unwrap().unwrap();
    assert_eq!(shard.sink().await, 2);
}

async fn what_came_of_a_commit_can_be_read_back(world: World) {
    let mut shard = Shard::of(&world).await;
    let end = to(None, 5);
    let stands = |shard: &Shard, end: StepEnd| {
        let (ledger, me, at) = (shard.ledger.clone(), shard.me, shard.at);
        async move { ledger.step_stands(me, at, &end).await.unwrap() }
    };
    assert_eq!(stands(&shard, end.clone()).await, Ok(false));
    shard.begin().await.commit(&end).await.unwrap().unwrap();
    assert_eq!(stands(&shard, end.clone()).await, Ok(true));
    let batch = shard.once(&[b"a"]).await;
    let records = StepEnd { writes: batch.settle(false, 0).writes, ..StepEnd::default() };
    assert_eq!(stands(&shard, records.clone()).await, Ok(false));
    shard.settle(&batch, StepEnd::default()).await;
    assert_eq!(stands(&shard, records).await, Ok(true));
    let (old, me) = (shard.at, shard.me);
    shard.next_attempt().await;
    assert!(shard.ledger.step_stands(me, old, &end).await.unwrap().is_err(), "superseded");
}

async fn records_are_started_done_and_gone_with_the_checkpoint(world: World) {
    let mut shard = Shard::of(&world).await;
    let first = shard.once(&[b"a", b"b"]).await;
    assert_eq!((first.open().len(), shard.rows().await), (2, 2));
    // It dies in the middle: what was started is done again, and never left out.
    shard.next_attempt().await;
    let left = shard.ledger.open_records(shard.at, 10).await.unwrap();
    assert_eq!(left.iter().map(|row| row.key.as_slice()).collect::<Vec<_>>(), [b"a", b"b"]);
    let again = shard.once(&[b"a", b"b", b"c"]).await;
    assert_eq!(again.open(), [0, 1, 2]);
    assert!(again.is_again(0) && !again.is_again(2));
    shard.settle(&again, StepEnd::default()).await;
    assert_eq!(shard.rows().await, 3, "without a checkpoint they stay");
    shard.next_attempt().await;
    assert_eq!(shard.once(&[b"a", b"b", b"c", b"d"]).await.open(), [3], "done before");
    let last = shard.once(&[b"d"]).await;
    shard.settle(&last, to(None, 4)).await;
    assert_eq!(
        shard.rows().await,
        3,
        "the checkpoint covers its own batch; what else is done stays until the shard's end"
    );
    let ended = shard.ledger.end_records(shard.me, &success(shard.at), T0).await.unwrap();
    assert!(matches!(ended, Ok(RecordsEnd::Recorded(_))), "{ended:?}");
    assert_eq!(shard.rows().await, 0);
}

async fn i_02_keys_compare_as_bytes(world: World) {
    let mut shard = Shard::of(&world).await;
    let keys: [&[u8]; 6] = [b"k1", b"k1 ", b"k1\t", b"k1\0", b"K1", &[0xff, 0xfe]];
    assert_eq!(shard.once(&keys).await.open().len(), 6);
    assert_eq!(shard.rows().await, 6);
    shard.next_attempt().await;
    let batch = shard.once(&keys[..1]).await;
    shard.settle(&batch, StepEnd::default()).await;
    assert_eq!(shard.once(&keys).await.open(), [1, 2, 3, 4, 5]);
    // In one batch, the same key is one record.
    assert_eq!(shard.once(&[b"x", b"y", b"x"]).await.open(), [0, 1]);
}

async fn i_03_long_keys_are_told_apart_or_refused(world: World) {
    let shard = Shard::of(&world).await;
    let long = |end: u8, length: usize| [vec![b'x'; length - 1], vec![end]].concat();
    let (one, two) = (long(b'1', 300), long(b'2', 300));
    let (three, four) = (long(b'1', RECORD_KEY_BYTES), long(b'2', RECORD_KEY_BYTES));
    assert_eq!(shard.once(&[&one, &two, &three, &four]).await.open().len(), 4);
    assert_eq!(shard.rows().await, 4);
    let error = shard.begin().await.known(&[long(b'1', 4_000)], true).await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(why) if why.contains("never")), "{error:?}");
    assert_eq!(shard.rows().await, 4);
}

/// 16 shards, each with 300 keys that all have, in batches of 50: no deadlock reaches anybody, and each key is there once.
async fn i_04_batches_of_many_shards_do_not_disturb_each_other(world: World) {
    let ledger = world.ledger.clone();
    let (_, _, id) = fired(&ledger, 16).await;
    let me = worker();
    let all: Vec<AttemptRef> = (0..16).map(|index| attempt(id, index, 1)).collect();
    ledger.claim(me, &all, T0).await.unwrap();
    let work = all.iter().map(|at| {
        let (ledger, at) = (ledger.clone(), *at);
        tokio::spawn(async move {
            for batch in 0..12 {
                // Each of the keys twice, from different places on.
                let key = |k: usize| format!("key-{}", (k * 7 + batch * 50 + at.index as usize) % 300).into_bytes();
                let keys: Vec<Vec<u8>> = (0..50).map(key).collect();
                let mut tx = ledger.begin_step(me, at).await.unwrap().unwrap();
                let known = tx.known(&keys, true).await.unwrap();
                tx.commit(&StepEnd::default()).await.unwrap().unwrap();
                // Half of the batches are done, and their rows gone, while others insert theirs.
                if batch % 2 == 0 {
                    let settled = Batch::new(keys, known).unwrap().noted().settle(true, 0);
                    let end = StepEnd { erased: settled.erased, ..StepEnd::default() };
                    let tx = ledger.begin_step(me, at).await.unwrap().unwrap();
                    tx.commit(&end).await.unwrap().unwrap();
                }
            }
        })
    });
    for task in work.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let counts = ledger
        .query("SELECT COUNT(*), COUNT(DISTINCT record_key) FROM once_records GROUP BY shard_index", &[])
        .await
        .unwrap();
    assert_eq!(counts.len(), 16);
    assert!(counts.iter().all(|row| row[0] == row[1]), "{counts:?}");
}

async fn c_01_a_skip_limit_holds_over_attempts(world: World) {
    let mut shard = Shard::of(&world).await;
    let mut batch = shard.once(&[b"1", b"2", b"3"]).await.skip_limit(2);
    batch.skip(0, "no");
    batch.skip(1, "no");
    shard.settle(&batch, to(None, 3)).await;
    assert_eq!(shard.rows().await, 2, "what was given up is kept for the report");
    shard.next_attempt().await;
    assert_eq!(shard.once(&[b"1", b"2", b"3"]).await.open(), [2], "never tried again");
    assert_eq!(shard.begin().await.skipped().await.unwrap(), 2, "they count on");
    let mut batch = shard.once(&[b"4"]).await.skip_limit(2);
    batch.skip(0, "too much");
    assert!(batch.settle(true, 2).over.is_some());
}

async fn c_03_a_failed_record_is_all_that_is_tried_again(world: World) {
    let mut shard = Shard::of(&world).await;
    let keys: [&[u8]; 5] = [b"1", b"2", b"3", b"4", b"5"];
    put_once(&shard, &keys, Some(1)).await;
    assert_eq!((shard.sink().await, shard.rows().await), (4, 5));
    shard.next_attempt().await;
    let left = shard.ledger.open_records(shard.at, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].key.as_slice(), left[0].state, left[0].tries), (&b"2"[..], RecordState::Retry, 1));
    let report = shard.ledger.record_report(shard.id, 10).await.unwrap();
    assert_eq!(report[0].message.as_deref(), Some("not this time"));
    put_once(&shard, &keys, None).await;
    assert_eq!(shard.sink().await, 5);
}

/// Puts records into the sink in the handler's own transaction; one of them fails.
async fn put_once(shard: &Shard, keys: &[&[u8]], fails: Option<usize>) {
    let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.to_vec()).collect();
    let mut tx = shard.begin().await;
    let known = tx.known(&keys, false).await.unwrap();
    let mut batch = Batch::new(keys, known).unwrap();
    for position in batch.open() {
        if Some(position) == fails {
            batch.retry(position, "not this time");
        } else {
            let id: i64 = std::str::from_utf8(batch.key(position)).unwrap().parse().unwrap();
            put(&mut tx, id).await.unwrap();
        }
    }
    let writes = batch.settle(false, 0).writes;
    tx.commit(&StepEnd { writes, rows: 4, ..StepEnd::default() }).await.unwrap().unwrap();
}

async fn a_shard_with_open_records_does_not_end_well(world: World) {
    let mut shard = Shard::of(&world).await;
    let mut batch = shard.once(&[b"a", b"b", b"c"]).await.skip_limit(1);
    batch.retry(0, "later");
    batch.skip(1, "never");
    shard.settle(&batch, to(None, 9)).await;
    let end = shard.ledger.end_records(shard.me, &success(shard.at), T0).await.unwrap().unwrap();
    let RecordsEnd::Open(1, some) = end else { panic!("{end:?}") };
    assert_eq!((some[0].key.as_slice(), some[0].tries), (&b"a"[..], 1));
    assert_eq!(shard.row().await.phase, Phase::Running, "nothing was written");
    shard.next_attempt().await;
    let batch = shard.once(&[b"a"]).await;
    shard.settle(&batch, StepEnd::default()).await;
    let end = shard.ledger.end_records(shard.me, &success(shard.at), T0).await.unwrap().unwrap();
    assert!(matches!(end, RecordsEnd::Recorded(_)), "{end:?}");
    assert_eq!((shard.rows().await, shard.row().await.phase), (0, Phase::Success));
    let summary = shard.ledger.query("SELECT summary FROM results", &[]).await.unwrap().remove(0).remove(0);
    let SqlArg::Text(summary) = summary else { panic!("{summary:?}") };
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["skipped_records"]["count"], 1);
    assert_eq!(summary["skipped_records"]["first"][0], serde_json::json!({ "key": "b", "why": "never" }));
    // Its answer was lost.
    let end = shard.ledger.end_records(shard.me, &success(shard.at), T0).await.unwrap().unwrap();
    assert_eq!(end, RecordsEnd::Before);
}

async fn retention_takes_the_rows_of_failed_shards(world: World) {
    let shard = Shard::of(&world).await;
    shard.once(&[b"a"]).await;
    shard.ledger.cancel(shard.id, "test", "enough", T0).await.unwrap();
    let before = PruneBefore { success_ms: i64::MAX, failed_ms: i64::MAX, decisions_ms: 0 };
    let mut cursor = PruneCursor::Executions { after: None };
    while !matches!(cursor, PruneCursor::Done) {
        shard.ledger.prune(&before, &mut cursor).await.unwrap();
    }
    assert_eq!(shard.rows().await, 0);
}
