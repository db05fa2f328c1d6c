//! What a plan is made of: a table's keys at their quantiles, and the durations of the last execution.

use super::rows::{execution_phase, unsigned};
use crate::error::StoreError;
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::value::{Row, Value};
use shardcron_domain::limits::CUTS_MAX;
use shardcron_domain::plan::ShardPlan;
use shardcron_domain::planning::{KeyBounds, LastRun};
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::{ExecutionId, JobId};

/// Executions of a job that are looked at for one that can be learned from.
const LOOKED_AT: u32 = 5;

/// The words of a query on the keys. Names are checked by the specification, so they may stand in it as they are.
struct Keys {
    key: String,
    /// `FROM … WHERE …`
    from: String,
}

impl Keys {
    fn of(query: &QuerySpec) -> Self {
        let quoted = |name: &str| format!("`{}`", name.replace('.', "`.`"));
        let filter = query.filter.as_ref().map_or_else(|| "1 = 1".to_owned(), |text| format!("({text})"));
        Keys { key: quoted(&query.key), from: format!("FROM {} WHERE {filter}", quoted(&query.table)) }
    }
}

/// The database's word about a statement that the job's author wrote a part of.
fn users(fault: Fault) -> Fault {
    match fault {
        Fault::Server { kind: Kind::Missing | Kind::Refused, detail } => Fault::Final(StoreError::Statement {
            detail: format!("the query of its shards: {detail}"),
            transient: false,
        }),
        other => other,
    }
}

impl SqlLedger {
    async fn ask(&self, sql: &str, args: &[Value]) -> Outcome<Vec<Row>> {
        self.db.rows(sql, args).await.map_err(users)
    }

    pub(super) async fn read_key_bounds(&self, query: &QuerySpec) -> Outcome<KeyBounds> {
        let Keys { key, from } = Keys::of(query);
        let rows = self.ask(&format!("SELECT COUNT(*), COUNT({key}), MIN({key}), MAX({key}) {from}"), &[]).await?;
        let Some(row) = rows.first() else { return Ok(KeyBounds::Empty) };
        let (all, keyed) = (unsigned(row.int(0)?), unsigned(row.int(1)?));
        if keyed < all {
            let (nulls, name, table) = (all - keyed, &query.key, &query.table);
            return Err(Fault::invalid(format!(
                "{nulls} rows of {table} have NULL in {name} and would be in no shard. If they are not meant, say so with \
                 where = \"{name} IS NOT NULL\"; else cut by another key"
            )));
        }
        if keyed == 0 {
            return Ok(KeyBounds::Empty);
        }
        let (first, last) = (row.0.get(2).cloned(), row.0.get(3).cloned());
        let starts = self.walk(query, first.clone().unwrap_or(Value::Null), keyed).await?;
        bounds(query, (first, last), starts)
    }

    /// The keys at which shards begin, but for the first: each as near to its share of the rows as the keys allow. From key to key
    /// along the index, so that nothing is sorted and nothing is held.
    async fn walk(&self, query: &QuerySpec, first: Value, rows: u64) -> Outcome<Vec<Value>> {
        let Keys { key, from } = Keys::of(query);
        let (mut current, mut position, mut starts) = (first, 0_u64, Vec::new());
        for shard in 1..query.count {
            let target = u64::try_from(u128::from(rows) * u128::from(shard) / u128::from(query.count)).unwrap_or(rows);
            let Some(step) = target.checked_sub(position).filter(|step| *step > 0) else { continue };
            let next = format!("SELECT {key} {from} AND {key} >= ? ORDER BY {key} LIMIT 1 OFFSET {step}");
            let found = self.ask(&next, std::slice::from_ref(&current)).await?;
            // Rows may have gone meanwhile.
            let Some(found) = found.into_iter().next().and_then(|row| row.0.into_iter().next()) else { break };
            if found == current {
                continue;
            }
            // A key that many rows share begins before its quantile.
            let between = format!("SELECT COUNT(*) {from} AND {key} >= ? AND {key} < ?");
            let between = self.ask(&between, &[current, found.clone()]).await?;
            position += between.first().map_or(Ok(0), |row| row.int(0)).map(unsigned)?;
            starts.push(found.clone());
            current = found;
        }
        Ok(starts)
    }

    pub(super) async fn read_last_run(&self, job: JobId) -> Outcome<Option<LastRun>> {
        let sql = format!(
            "SELECT id, plan, shards_total, state FROM executions WHERE job_id = ? AND state = 1 ORDER BY id DESC LIMIT {LOOKED_AT}"
        );
        for row in self.db.rows(&sql, &[job.0.into()]).await? {
            let (id, total) = (row.id(0, ExecutionId::from_slice)?, row.count(2)?);
            let _ = execution_phase(row.int(3)?)?;
            // Written by another version perhaps: nothing to learn from then.
            let Ok(plan) = serde_json::from_str::<ShardPlan>(&row.text(1)?) else { continue };
            if total > CUTS_MAX || matches!(plan, ShardPlan::Picked { .. } | ShardPlan::Map { .. }) {
                continue;
            }
            let sql = "SELECT shard_index, ended_ms - started_ms FROM results WHERE execution_id = ?";
            let rows = self.db.rows(sql, &[id.as_bytes().into()]).await?;
            let took_ms = rows.iter().map(|row| Ok((row.count(0)?, unsigned(row.int(1)?)))).collect::<Outcome<_>>()?;
            let run = LastRun { plan, took_ms };
            if run.took_ms.len() == total as usize {
                return Ok(Some(run));
            }
        }
        Ok(None)
    }
}

/// All of one type, or it is said what can't be cut.
fn bounds(query: &QuerySpec, ends: (Option<Value>, Option<Value>), starts: Vec<Value>) -> Outcome<KeyBounds> {
    let refuse = |what: &str| {
        Fault::invalid(format!(
            "the key {} of {} is {what}; shards are cut by whole numbers or by text. Add a column of one of these, or cut with \
             modulo",
            query.key, query.table
        ))
    };
    match ends {
        // What is beyond the largest whole number arrives as the largest, and a cut there would be wrong.
        (Some(Value::Int(_)), Some(Value::Int(i64::MAX))) => Err(refuse("beyond the largest whole number")),
        (Some(Value::Int(first)), Some(Value::Int(last))) => {
            let starts = starts
                .into_iter()
                .map(|value| match value {
                    Value::Int(n) => Ok(n),
                    _ => Err(refuse("of several types")),
                })
                .collect::<Outcome<_>>()?;
            Ok(KeyBounds::Numbers { first, last, starts })
        }
        (Some(Value::Text(first)), Some(Value::Text(_))) => {
            let rest = starts.into_iter().map(|value| match value {
                Value::Text(text) => Ok(text),
                _ => Err(refuse("of several types")),
            });
            Ok(KeyBounds::Texts { starts: std::iter::once(Ok(first)).chain(rest).collect::<Outcome<_>>()? })
        }
        (Some(Value::Bytes(_)), _) => Err(refuse("binary")),
        (Some(Value::Float(_)), _) => Err(refuse("a fraction")),
        _ => Err(refuse("of several types")),
    }
}
