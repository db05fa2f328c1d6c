//! Which job follows which: written with the jobs, in one transaction, so that no two appliers make a circle between them.

use super::jobs::LIVING;
use crate::sql::bulk::Bulk;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::number_list;
use shardcron_domain::JobSpec;
use shardcron_domain::after;
use shardcron_domain::trigger::suggest;
use std::collections::{BTreeMap, HashMap};

/// Replaces the edges of these jobs, which the transaction has written already.
pub(super) async fn write_edges(tx: &mut Tx, specs: &[&JobSpec]) -> Outcome<()> {
    let dialect = tx.dialect();
    let follows_any = specs.iter().any(|spec| spec.after.is_some());
    // Appliers of followers take turns at this row, which every change of jobs writes in its end.
    if follows_any {
        let sql = format!("SELECT jobs_revision FROM meta WHERE id = 1{}", dialect.for_update());
        tx.raw_rows(&sql).await?;
    }
    let ids = if follows_any { all_ids(tx).await? } else { ids_of(tx, specs).await? };
    let mut edges = Bulk::new("INSERT INTO job_edges (job_id, upstream_id) VALUES ", "");
    for spec in specs {
        for upstream in spec.after.iter().flat_map(|after| &after.jobs) {
            let Some(id) = ids.get(upstream) else {
                let hint = match suggest(upstream, ids.keys().map(String::as_str)) {
                    Some(near) => format!("; did you mean '{near}'?"),
                    None => "; apply it first, or in the same file".into(),
                };
                let sentence = format!("job '{}': after: there is no job '{upstream}'{hint}", spec.name);
                return Err(Fault::invalid(sentence));
            };
            let Some(own) = ids.get(&spec.name) else { return Err(Fault::Moved) };
            edges.push_row(dialect, &[(*own).into(), (*id).into()]);
        }
    }
    let own: Vec<i64> = specs.iter().filter_map(|spec| ids.get(&spec.name)).copied().collect();
    for chunk in own.chunks(1_000) {
        tx.raw(&format!("DELETE FROM job_edges WHERE job_id IN ({})", number_list(chunk))).await?;
    }
    edges.send(tx).await?;
    if follows_any { refuse_circles(tx, &ids).await } else { Ok(()) }
}

/// Deleted jobs follow nobody and wait for nothing. One that others follow can't go before they let it.
pub(super) async fn drop_edges(tx: &mut Tx, gone: &[i64]) -> Outcome<()> {
    for chunk in gone.chunks(1_000) {
        let list = number_list(chunk);
        for table in ["job_edges", "waiting", "watches"] {
            tx.raw(&format!("DELETE FROM {table} WHERE job_id IN ({list})")).await?;
        }
    }
    for chunk in gone.chunks(1_000) {
        let sql = format!(
            "SELECT u.name, d.name FROM job_edges e JOIN jobs u ON u.id = e.upstream_id JOIN jobs d ON d.id = e.job_id \
             WHERE e.upstream_id IN ({}) LIMIT 1",
            number_list(chunk)
        );
        if let Some(row) = tx.raw_rows(&sql).await?.first() {
            let (upstream, follower) = (row.text(0)?, row.text(1)?);
            return Err(Fault::invalid(format!(
                "job '{upstream}' can't be deleted: job '{follower}' follows it. Take it out of the 'after' of '{follower}' first, or \
                 delete both at once"
            )));
        }
    }
    Ok(())
}

async fn all_ids(tx: &mut Tx) -> Outcome<HashMap<String, i64>> {
    let rows = tx.raw_rows(&format!("SELECT name, id FROM jobs WHERE {LIVING}")).await?;
    rows.iter().map(|row| Ok((row.text(0)?, row.int(1)?))).collect()
}

async fn ids_of(tx: &mut Tx, specs: &[&JobSpec]) -> Outcome<HashMap<String, i64>> {
    let mut ids = HashMap::new();
    for chunk in specs.chunks(500) {
        let holes = vec!["?"; chunk.len()].join(",");
        let names: Vec<_> = chunk.iter().map(|spec| spec.name.as_str().into()).collect();
        for row in tx.rows(&format!("SELECT name, id FROM jobs WHERE name IN ({holes})"), &names).await? {
            ids.insert(row.text(0)?, row.int(1)?);
        }
    }
    Ok(ids)
}

async fn refuse_circles(tx: &mut Tx, ids: &HashMap<String, i64>) -> Outcome<()> {
    let names: HashMap<i64, &str> = ids.iter().map(|(name, id)| (*id, name.as_str())).collect();
    let mut follows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in tx.raw_rows("SELECT job_id, upstream_id FROM job_edges ORDER BY job_id, upstream_id").await? {
        if let (Some(job), Some(upstream)) = (names.get(&row.int(0)?), names.get(&row.int(1)?)) {
            follows.entry((*job).to_owned()).or_default().push((*upstream).to_owned());
        }
    }
    match after::cycle(&follows) {
        None => Ok(()),
        Some(circle) => Err(Fault::invalid(format!(
            "after: the jobs would follow each other in a circle ({circle}); take one of the arrows out"
        ))),
    }
}
