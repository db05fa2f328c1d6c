//! What programs and services emit for a map, and what they get to reduce: the same for both.
//!
//! Waits for a ledger that is away as long as the attempt is not told to stop: an emitted shard that was dropped would be work that
//! nobody does, and the program or service is not there to say it again.

use shardcron_sdk::{EmitError, ShardContext, ShardError, SubResult};
use std::time::Duration;

/// Waits for a ledger that is away: the first, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Emits a shard. It is the execution's own only with the good end of the attempt.
///
/// # Errors
/// Permanent: this shard emits nothing, there are too many, or the payload is too large. Stopped: told to stop, or superseded.
pub(crate) async fn emit(context: &ShardContext, payload: serde_json::Value) -> Result<(), ShardError> {
    let mut wait = WAITS.0;
    loop {
        match context.emit(payload.clone()).await {
            Err(EmitError::Unavailable(why)) => pause(context, &mut wait, &why).await?,
            other => return other.map_err(ShardError::from),
        }
    }
}

async fn pause(context: &ShardContext, wait: &mut Duration, why: &str) -> Result<(), ShardError> {
    tracing::debug!(reason = why, "a shard of a map waits for the ledger");
    tokio::select! {
        biased;
        () = context.stop.cancelled() => return Err(ShardError::stopped("told to stop while the ledger was away")),
        () = tokio::time::sleep(*wait) => {}
    }
    *wait = (*wait * 2).min(WAITS.1);
    Ok(())
}

/// The results of the sub-tasks as the elements of a JSON array, page by page, so that memory holds one page only.
pub(crate) struct Results<'c> {
    context: &'c ShardContext,
    next: u32,
    written: usize,
    most: usize,
}

impl<'c> Results<'c> {
    /// All of them, `most` bytes of JSON at most.
    pub(crate) fn of(context: &'c ShardContext, most: usize) -> Self {
        Results { context, next: 0, written: 0, most }
    }

    /// The next ones with the commas before them; `None` behind the last.
    ///
    /// # Errors
    /// Permanent: they are more than fits. Stopped: told to stop while the ledger was away.
    pub(crate) async fn page(&mut self) -> Result<Option<String>, ShardError> {
        let mut wait = WAITS.0;
        let page = loop {
            match self.context.sub_results(self.next).await {
                Err(EmitError::Unavailable(why)) => pause(self.context, &mut wait, &why).await?,
                other => break other?,
            }
        };
        let Some(last) = page.last() else { return Ok(None) };
        self.next = last.number.saturating_add(1);
        let text = joined(&page, self.written == 0);
        self.written += text.len();
        if self.written > self.most {
            return Err(ShardError::permanent(format!(
                "the results of the sub-tasks are more than {} bytes of JSON, which is the most that this kind of handler is given. \
                 Let each say less in its summary, or keep what it found where its data is",
                self.most
            )));
        }
        self.context.progress();
        Ok(Some(text))
    }
}

/// One element a line.
fn joined(page: &[SubResult], first: bool) -> String {
    let mut text = String::new();
    for (at, result) in page.iter().enumerate() {
        text.push_str(if first && at == 0 { "\n" } else { ",\n" });
        let element =
            serde_json::json!({ "number": result.number, "rows": result.rows, "summary": result.summary }).to_string();
        text.push_str(&element);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_sdk::ShardSlice;
    use shardcron_sdk::testing::TestContext;

    fn results(count: u32) -> Vec<SubResult> {
        (0..count).map(|number| SubResult { number, rows: Some(u64::from(number)), summary: None }).collect()
    }

    #[tokio::test]
    async fn pages_make_one_array() {
        for count in [0, 1, 3] {
            let context = TestContext::new(ShardSlice::Map { max: 1 }).reducing(results(count)).context();
            let (mut pages, mut text) = (Results::of(&context, 1_000), String::new());
            while let Some(page) = pages.page().await.unwrap() {
                text.push_str(&page);
            }
            let read: Vec<serde_json::Value> = serde_json::from_str(&format!("[{text}]")).unwrap();
            assert_eq!(read.len(), count as usize);
            assert!(read.iter().enumerate().all(|(n, result)| result["rows"] == n));
        }
        assert_eq!(joined(&results(1), false).get(..2), Some(",\n"), "a later page goes on");
    }

    #[tokio::test]
    async fn more_than_fits_is_an_error_that_says_so() {
        let context = TestContext::new(ShardSlice::Map { max: 1 }).reducing(results(9)).context();
        let error = Results::of(&context, 99).page().await.unwrap_err();
        assert!(error.message.contains("more than 99 bytes"), "{error}");
    }
}
