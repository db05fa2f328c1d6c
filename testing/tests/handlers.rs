//! Handlers of each kind, crashed on each side of each of their commits.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test ends there, and says where")]

use shardcron_sdk::{
    Checkpoint, EffectError, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, Stream, SubResult,
    async_trait, values,
};
use shardcron_testing::{Crash, Outcome, TestShard, crash_everywhere};

const RECORDS: i64 = 20;
const CHUNK: i64 = 5;

/// How its records are done once.
#[derive(Clone, Copy)]
enum Way {
    /// Effects and checkpoint in one transaction.
    Checkpoint,
    /// Noted before, in a transaction of ours; settled with the effects.
    Noted,
    /// Only the records' rows say what is done.
    Unordered,
}

struct Add(Way);

async fn add(tx: &mut shardcron_sdk::Transaction<'_>, key: &[u8]) -> Result<(), EffectError> {
    let id: i64 = std::str::from_utf8(key).unwrap().parse().unwrap();
    tx.execute("UPDATE counters SET n = n + 1 WHERE id = ?", &values![id]).await.map(drop)
}

#[async_trait]
impl ShardHandler for Add {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        while let Some(batch) = context.left_over().await? {
            let mut tx = context.transaction().await?;
            for n in batch.open() {
                add(&mut tx, batch.key(n)).await?;
            }
            tx.settle(batch);
            tx.commit_records(0).await?;
        }
        let mut next = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { 1 };
        while next <= RECORDS {
            if context.should_stop() {
                return Err(ShardError::stopped("told to stop"));
            }
            let end = next + CHUNK - 1;
            let keys = (next..=end).map(|id| id.to_string());
            let batch = match self.0 {
                Way::Noted => Some(context.once(keys.clone()).await?),
                Way::Checkpoint | Way::Unordered => None,
            };
            let mut tx = context.transaction().await?;
            let batch = match batch {
                Some(batch) => batch,
                None => tx.once(keys).await?,
            };
            for n in batch.open() {
                add(&mut tx, batch.key(n)).await?;
            }
            tx.settle(batch);
            match self.0 {
                Way::Checkpoint | Way::Noted => tx.commit(Checkpoint::Number(end), CHUNK as u64).await?,
                Way::Unordered => tx.commit_records(CHUNK as u64).await?,
            }
            next = end + 1;
        }
        Ok(ShardOutput::rows(RECORDS as u64))
    }
}

async fn counters() -> shardcron_testing::Result<TestShard> {
    let shard = TestShard::new(ShardSlice::Range { from: 1, to: RECORDS }).await?;
    let rows: Vec<String> = (1..=RECORDS).map(|id| format!("({id}, 0)")).collect();
    let rows = rows.join(",");
    shard.script(&format!("CREATE TABLE counters (id BIGINT, n BIGINT); INSERT INTO counters VALUES {rows}")).await?;
    Ok(shard)
}

async fn exact(shard: &TestShard) -> shardcron_testing::Result<()> {
    assert_eq!(shard.number("SELECT COUNT(*) FROM counters WHERE n = 1").await?, RECORDS);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_counter_is_one_wherever_the_worker_dies() {
    for (way, crashes) in [(Way::Checkpoint, 8), (Way::Noted, 16), (Way::Unordered, 8)] {
        assert_eq!(crash_everywhere(counters, &Add(way), exact).await.unwrap(), crashes);
    }
}

/// A drain costs nothing that was done, and what follows goes on at the checkpoint.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_attempt_is_gone_on_from() {
    let mut shard = counters().await.unwrap();
    let crash = Crash::after(2);
    assert!(matches!(shard.attempt_with_crash(&Add(Way::Checkpoint), crash).await.unwrap(), Outcome::Crashed));
    assert_eq!(shard.checkpoint().await.unwrap(), Some(Checkpoint::Number(10)));
    assert!(matches!(shard.attempt(&Add(Way::Checkpoint)).await.unwrap(), Outcome::Done(_)));
    exact(&shard).await.unwrap();
    let mut shard = counters().await.unwrap();
    shard.stop();
    let Outcome::Failed(error) = shard.attempt(&Add(Way::Checkpoint)).await.unwrap() else { panic!() };
    assert_eq!(error.message, "told to stop");
}

/// 40 records in chunks of 15; the first 30 are broken.
struct Skips;

#[async_trait]
impl ShardHandler for Skips {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let mut next = if let Some(Checkpoint::Number(done)) = context.checkpoint { done + 1 } else { 1 };
        while next <= 40 {
            let end = (next + 14).min(40);
            let mut tx = context.transaction().await?;
            let mut batch = tx.once((next..=end).map(|id| format!("{id:02}"))).await?.skip_limit(30);
            for n in batch.open() {
                let id = next + n as i64;
                tx.execute("INSERT INTO tried VALUES (?)", &values![id]).await?;
                if id <= 30 {
                    batch.skip(n, "broken");
                }
            }
            tx.settle(batch);
            tx.commit(Checkpoint::Number(end), 1).await?;
            next = end + 1;
        }
        Ok(ShardOutput::rows(40))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c_02_what_was_skipped_is_never_tried_again() {
    let mut shard = TestShard::new(ShardSlice::Range { from: 1, to: 40 }).await.unwrap();
    shard.script("CREATE TABLE tried (id BIGINT)").await.unwrap();
    // In the last chunk, which is not committed.
    assert!(matches!(shard.attempt_with_crash(&Skips, Crash::before(3)).await.unwrap(), Outcome::Crashed));
    assert!(matches!(shard.attempt(&Skips).await.unwrap(), Outcome::Done(_)));
    assert_eq!(shard.number("SELECT COUNT(*) FROM tried").await.unwrap(), 40, "each once");
    let summary = shard.query("SELECT summary FROM results").await.unwrap();
    let summary = format!("{summary:?}");
    assert!(summary.contains("\\\"count\\\":30") && summary.contains("broken"), "{summary}");
}

/// A batch without a checkpoint, and none settled, would be done again: it is refused.
struct Forgets;

#[async_trait]
impl ShardHandler for Forgets {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let mut tx = context.transaction().await?;
        add(&mut tx, b"1").await?;
        tx.commit_records(1).await?;
        Ok(ShardOutput::default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_nothing_would_remember_is_refused() {
    let mut shard = counters().await.unwrap();
    let Outcome::Failed(error) = shard.attempt(&Forgets).await.unwrap() else { panic!() };
    assert!(error.message.contains("without a checkpoint"), "{error}");
    assert_eq!(shard.number("SELECT SUM(n) FROM counters").await.unwrap(), 0);
}

/// The last record of each attempt is left for the next one.
struct Fails;

#[async_trait]
impl ShardHandler for Fails {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        while let Some(mut batch) = context.left_over().await? {
            batch.retry(0, "still not");
            if context.attempt.attempt > 2 {
                batch = context.left_over().await?.unwrap();
            }
            context.settle_records(batch).await?;
        }
        if context.checkpoint.is_none() {
            let mut batch = context.once(["a", "b"]).await?;
            batch.retry(1, "not now");
            context.settle(batch, Checkpoint::Number(2)).await?;
        }
        Ok(ShardOutput::default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_to_be_tried_again_keeps_the_shard_from_ending_well() {
    // The first shard of a map ends in another way, by the same rule.
    for slice in [ShardSlice::Range { from: 1, to: 2 }, ShardSlice::Map { max: 10 }] {
        let mut shard = TestShard::new(slice).await.unwrap();
        for (tries, words) in [(1, "not now"), (2, "still not")] {
            let Outcome::Failed(error) = shard.attempt(&Fails).await.unwrap() else { panic!() };
            let expected = format!("1 record is still to be done: 'b' (tried {tries} times: {words})");
            assert_eq!(error.message, expected);
        }
        assert!(matches!(shard.attempt(&Fails).await.unwrap(), Outcome::Done(_)));
        assert_eq!(shard.record_rows().await.unwrap(), 0);
    }
}

/// Writes more than one page of output, and a number of lines for each shard that it reduces.
struct Sums;

#[async_trait]
impl ShardHandler for Sums {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let mut sum = 0;
        let mut from = 0;
        loop {
            let page = context.sub_results(from).await?;
            let Some(last) = page.last() else { break };
            from = last.number + 1;
            for result in page {
                context.log(format!("shard {} came to {:?}", result.number, result.rows));
                sum += result.rows.unwrap_or_default();
            }
        }
        let cached: Option<u64> = context.cache("sum").get("all", async { Ok(Some(sum)) }).await?;
        Ok(ShardOutput::rows(cached.unwrap_or_default()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reducing_shard_reads_what_the_test_gives_it() {
    let results = (0..30).map(|number| SubResult { number, rows: Some(2), summary: None }).collect();
    let mut shard = TestShard::reducing(results).await.unwrap();
    let Outcome::Done(output) = shard.attempt(&Sums).await.unwrap() else { panic!() };
    assert_eq!(output.rows, Some(60));
    let log = shard.log().await.unwrap();
    assert_eq!((log.len(), log[29].1.as_str()), (30, "shard 29 came to Some(2)"));
    assert_eq!((shard.attempts(), shard.progress(1), shard.progress(2)), (1, 30, 0));
    assert!(shard.emitted().await.unwrap().is_empty() && shard.output(Stream::Stdout).await.unwrap().is_empty());
}

/// Emits and logs so much that both go to the ledger in several pieces; then it fails once.
struct Many;

#[async_trait]
impl ShardHandler for Many {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        for n in 0..1_203 {
            context.emit(serde_json::json!(n)).await?;
            context.log(format!("line {n}"));
        }
        match context.attempt.attempt {
            1 => Err(ShardError::transient("once more")),
            _ => Ok(ShardOutput::default()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_good_attempt_emitted_counts_and_all_lines_are_kept() {
    let mut shard = TestShard::new(ShardSlice::Map { max: 2_000 }).await.unwrap();
    assert!(matches!(shard.attempt(&Many).await.unwrap(), Outcome::Failed(_)));
    assert!(shard.emitted().await.unwrap().is_empty());
    assert_eq!(shard.emitted_by(1).len(), 1_203);
    assert!(matches!(shard.attempt(&Many).await.unwrap(), Outcome::Done(_)));
    let emitted = shard.emitted().await.unwrap();
    assert_eq!((emitted.len(), emitted[1_202].as_i64()), (1_203, Some(1_202)));
    let log = shard.log().await.unwrap();
    assert_eq!((log.len(), log[1_203].clone()), (2_406, (2, "line 0".to_owned())));
    // As in a worker: too many are refused, and so is emitting from a shard that is no map's first.
    let mut small = TestShard::new(ShardSlice::Map { max: 10 }).await.unwrap();
    let Outcome::Failed(error) = small.attempt(&Many).await.unwrap() else { panic!() };
    assert!(error.message.contains("more than 10 shards"), "{error}");
    let mut other = TestShard::new(ShardSlice::Range { from: 1, to: 2 }).await.unwrap();
    let Outcome::Failed(error) = other.attempt(&Many).await.unwrap() else { panic!() };
    assert!(error.message.contains("ShardSlice::Map"), "{error}");
}

/// Batches of two records, but four in the first attempt. Whom it tells knows no key.
#[derive(Default)]
struct OtherBatches(std::sync::Mutex<Vec<String>>);

impl OtherBatches {
    fn tell(&self, batch: &shardcron_sdk::Batch) {
        let keys = batch.open().into_iter().map(|n| String::from_utf8_lossy(batch.key(n)).into_owned());
        self.0.lock().unwrap().extend(keys);
    }
}

#[async_trait]
impl ShardHandler for OtherBatches {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        while let Some(batch) = context.left_over().await? {
            self.tell(&batch);
            context.settle_records(batch).await?;
        }
        let records = if context.attempt.attempt == 1 { 4 } else { 2 };
        for begin in (1..=4).step_by(records as usize) {
            let end = begin + records - 1;
            let batch = context.once((begin..=end).map(|id: i64| id.to_string())).await?;
            self.tell(&batch);
            context.settle(batch, Checkpoint::Number(end)).await?;
        }
        Ok(ShardOutput::default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_forgets_no_record_that_lies_beyond_it() {
    let mut shard = TestShard::new(ShardSlice::Range { from: 1, to: 4 }).await.unwrap();
    let handler = OtherBatches::default();
    // All four are noted, and told of; that they are done is not written.
    assert!(matches!(shard.attempt_with_crash(&handler, Crash::before(2)).await.unwrap(), Outcome::Crashed));
    handler.0.lock().unwrap().clear();
    assert!(matches!(shard.attempt(&handler).await.unwrap(), Outcome::Done(_)));
    assert_eq!(*handler.0.lock().unwrap(), ["1", "2", "3", "4"], "each once, whatever the batches were");
    assert_eq!(shard.record_rows().await.unwrap(), 0);
}
