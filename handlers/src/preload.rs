//! The queries of jobs' preloads: which keys of a cache an attempt is about to ask for. They are there to help: one that fails is a line in
//! the log and no keys.

use crate::HandlerOptions;
use crate::sql::{SqlTemplate, Values};
use shardcron_domain::ExecutionId;
use shardcron_domain::cache::{PreloadQuery, check_key};
use shardcron_domain::limits::{PRELOAD_ANSWERS, PRELOAD_KEYS, PRELOAD_QUERY_MS};
use shardcron_sdk::ShardContext;
use shardcron_store::{BoundSql, SqlArg};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// The keys that a query found, or `None` while it runs.
type Answer = watch::Receiver<Option<Arc<[String]>>>;
/// What makes two queries of one execution the same: where, what, and with which values.
type Asked = (ExecutionId, Option<String>, String);

/// The queries that this process has been asked for lately. A query runs once for all shards of an execution that bind the same values.
#[derive(Default)]
pub(crate) struct Queries {
    asked: Mutex<VecDeque<(Asked, Answer)>>,
}

impl Queries {
    /// The keys that a query finds for this attempt; none if it fails. May be dropped: the query goes on for the next shards.
    pub(crate) async fn keys(
        &self,
        options: &Arc<HandlerOptions>,
        query: &PreloadQuery,
        context: &ShardContext,
    ) -> Arc<[String]> {
        let bound = bind(query, context);
        let execution = context.attempt.execution;
        let asked = (execution, query.database.clone(), format!("{} {bound:?}", query.cache));
        let mut answer = self.answer(asked, || {
            let (told, answer) = watch::channel(None);
            let (options, query, job) = (options.clone(), query.clone(), context.job.clone());
            let ask = async move {
                tracing::debug!(%job, execution_id = %execution, cache = %query.cache, "asking the query of a preload");
                let found = match bound {
                    Ok(bound) => read(&options, &query, &bound).await,
                    Err(why) => Err(why),
                };
                let keys = found.unwrap_or_else(|why| {
                    tracing::warn!(
                        %job, execution_id = %execution, cache = %query.cache, error = %why,
                        "the query of a preload failed; the attempts go on without its keys"
                    );
                    Vec::new()
                });
                told.send_replace(Some(keys.into()));
            };
            Handle::current().spawn(ask);
            answer
        });
        let keys = answer.wait_for(Option::is_some).await;
        keys.ok().and_then(|keys| keys.clone()).unwrap_or_default()
    }

    fn answer(&self, asked: Asked, ask: impl FnOnce() -> Answer) -> Answer {
        let mut all = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, answer)) = all.iter().find(|(known, _)| *known == asked) {
            return answer.clone();
        }
        while all.len() >= PRELOAD_ANSWERS {
            all.pop_front();
        }
        let answer = ask();
        all.push_back((asked, answer.clone()));
        answer
    }
}

fn bind(query: &PreloadQuery, context: &ShardContext) -> Result<BoundSql, String> {
    let template = SqlTemplate::parse(&query.query)?;
    let mut bound = Values::new(context, None).bind(&template)?;
    match (bound.pop(), bound.len()) {
        (Some(only), 0) => Ok(only),
        _ => Err("it has several statements; one SELECT is possible".into()),
    }
}

async fn read(options: &HandlerOptions, query: &PreloadQuery, bound: &BoundSql) -> Result<Vec<String>, String> {
    let limit = Duration::from_millis(PRELOAD_QUERY_MS);
    let rows = match &query.database {
        None => match &options.reader {
            Some(ledger) => ledger.read_only(bound, PRELOAD_KEYS, limit).await,
            None => return Err("this worker has no ledger that can be asked; name a database".into()),
        },
        Some(name) => match options.databases.get(name) {
            Some(database) => database.read_only(bound, PRELOAD_KEYS, limit).await,
            None => return Err(crate::unknown_database(name, options.databases.keys())),
        },
    };
    let rows = rows.map_err(|e| e.to_string())?;
    Ok(rows.into_iter().filter_map(|row| key(row.into_iter().next()?)).collect())
}

/// As a handler would write it.
fn key(value: SqlArg) -> Option<String> {
    let key = match value {
        SqlArg::Int(n) => n.to_string(),
        SqlArg::Float(n) => n.to_string(),
        SqlArg::Text(text) => text,
        SqlArg::Null => return None,
    };
    check_key(&key).is_ok().then_some(key)
}
