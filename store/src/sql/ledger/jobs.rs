//! Jobs and their versions.

use super::too_many;
use crate::error::{Result, StoreError};
use crate::rows::{Applied, ApplyOutcome, JobRecord};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, Value};
use shardcron_domain::firing::next_after_change;
use shardcron_domain::{JobId, JobSpec};
use std::collections::{BTreeSet, HashMap};

/// Jobs of one call at most: a job file of this size is refused by its reader long before.
const JOBS_MAX: usize = 100_000;
/// Names in one `IN`.
const NAMES: usize = 500;

/// A job file's table can't hold a name twice; a caller in Rust can.
pub(crate) fn check_batch(jobs: &[(JobSpec, Option<i64>)]) -> Result<()> {
    if jobs.len() > JOBS_MAX {
        return Err(too_many("jobs", jobs.len(), JOBS_MAX));
    }
    let mut names = BTreeSet::new();
    match jobs.iter().find(|(spec, _)| !names.insert(&spec.name)) {
        Some((spec, _)) => Err(StoreError::Invalid(format!("the job '{}' is given twice", spec.name))),
        None => Ok(()),
    }
}

struct Stored {
    id: i64,
    version: u32,
    spec: String,
    next_fire_ms: Option<i64>,
}

impl Stored {
    /// The next instant under the new specification. A stored one that can't be read says nothing of what was due.
    fn next_under(&self, new: &JobSpec, fresh: Option<i64>, now_ms: i64) -> Option<i64> {
        let Ok(old) = serde_json::from_str::<JobSpec>(&self.spec) else { return fresh };
        next_after_change(old.schedule.as_ref(), new.schedule.as_ref(), self.next_fire_ms, fresh, now_ms)
    }
}

impl SqlLedger {
    pub(super) async fn write_jobs(
        &self,
        jobs: &[(JobSpec, Option<i64>)],
        who: &str,
        now_ms: i64,
    ) -> Outcome<Vec<Applied>> {
        let mut tx = self.db.begin().await?;
        let applied = apply(&mut tx, jobs, who, now_ms).await.map_err(|fault| match fault {
            // Another node has just created the same job: the next try finds it.
            Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
            other => other,
        })?;
        tx.commit().await?;
        Ok(applied)
    }

    pub(super) async fn read_jobs(&self, name: Option<&str>) -> Outcome<Vec<JobRecord>> {
        let columns = "SELECT id, name, version, spec, paused_by, next_fire_ms FROM jobs";
        let rows = match name {
            Some(name) => self.db.rows(&format!("{columns} WHERE name = ?"), &[name.into()]).await?,
            None => self.db.rows(&format!("{columns} ORDER BY name"), &[]).await?,
        };
        rows.iter().map(job_record).collect()
    }

    pub(super) async fn write_paused(
        &self,
        name: &str,
        paused_by: Option<&str>,
        who: &str,
        now_ms: i64,
    ) -> Outcome<bool> {
        let mut tx = self.db.begin().await?;
        let lock = format!("SELECT paused_by FROM jobs WHERE name = ?{}", tx.dialect().for_update());
        let rows = tx.rows(&lock, &[name.into()]).await?;
        let Some(before) = rows.first().map(|row| row.opt_text(0)).transpose()? else { return Ok(false) };
        let paused = paused_by.map(|by| kept(by, 255));
        if before == paused {
            return Ok(true);
        }
        // Only this column: a leader that moves the next instant at the same time keeps its write, and this stays (case S-18).
        tx.run("UPDATE jobs SET paused_by = ? WHERE name = ?", &[paused.clone().into(), name.into()]).await?;
        bump_revision(&mut tx).await?;
        let action = if paused.is_some() { "pause" } else { "resume" };
        let mut audit = Audit::new(who, now_ms);
        audit.note(&tx, action, name, (before.as_deref(), paused.as_deref()));
        audit.write(&mut tx).await?;
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn read_revision(&self) -> Outcome<i64> {
        let rows = self.db.raw_rows("SELECT jobs_revision FROM meta WHERE id = 1").await?;
        rows.first().map_or_else(|| Err(Fault::corrupt("the row of meta is gone".into())), |row| row.int(0))
    }
}

fn job_record(row: &Row) -> Outcome<JobRecord> {
    let text = row.text(3)?;
    Ok(JobRecord {
        id: JobId(row.int(0)?),
        name: row.text(1)?,
        version: row.count(2)?,
        spec: serde_json::from_str(&text).map_err(|e| e.to_string()),
        paused_by: row.opt_text(4)?,
        next_fire_ms: row.opt_int(5)?,
    })
}

async fn apply(tx: &mut Tx, jobs: &[(JobSpec, Option<i64>)], who: &str, now_ms: i64) -> Outcome<Vec<Applied>> {
    let names: Vec<&str> = jobs.iter().map(|(spec, _)| spec.name.as_str()).collect();
    let stored = read_stored(tx, &names).await?;
    let dialect = tx.dialect();
    let mut applied = Vec::with_capacity(jobs.len());
    let mut created = Bulk::new("INSERT INTO jobs (name, version, spec, next_fire_ms) VALUES ", "");
    let mut new_versions: Vec<(&str, u32, String)> = Vec::new();
    let mut audit = Audit::new(who, now_ms);
    for (spec, next_fire_ms) in jobs {
        let text = spec.canonical_json();
        let (version, outcome) = match stored.get(&spec.name) {
            Some(old) if old.spec == text => (old.version, ApplyOutcome::Unchanged),
            Some(old) => (old.version.saturating_add(1), ApplyOutcome::Updated),
            None => (1, ApplyOutcome::Created),
        };
        let old = stored.get(&spec.name);
        let before = old.map(|old| old.spec.as_str());
        match outcome {
            ApplyOutcome::Unchanged => {}
            ApplyOutcome::Created => {
                let row = [spec.name.as_str().into(), version.into(), text.as_str().into(), (*next_fire_ms).into()];
                created.push_row(dialect, &row);
                audit.note(tx, "create", &spec.name, (None, Some(&text)));
            }
            ApplyOutcome::Updated => {
                let update = "UPDATE jobs SET version = ?, spec = ?, next_fire_ms = ? WHERE name = ?";
                let next = old.map_or(*next_fire_ms, |old| old.next_under(spec, *next_fire_ms, now_ms));
                let args = [version.into(), text.as_str().into(), next.into(), spec.name.as_str().into()];
                tx.run(update, &args).await?;
                audit.note(tx, "update", &spec.name, (before, Some(&text)));
            }
        }
        if outcome != ApplyOutcome::Unchanged {
            new_versions.push((spec.name.as_str(), version, text));
        }
        applied.push(Applied { name: spec.name.clone(), version, outcome });
    }
    if new_versions.is_empty() {
        return Ok(applied);
    }
    created.send(tx).await?;
    write_versions(tx, &new_versions, now_ms).await?;
    let changed: BTreeSet<&str> = new_versions.iter().map(|(name, ..)| *name).collect();
    let specs: Vec<&JobSpec> =
        jobs.iter().map(|(spec, _)| spec).filter(|s| changed.contains(s.name.as_str())).collect();
    super::edges::write_edges(tx, &specs).await?;
    audit.write(tx).await?;
    bump_revision(tx).await?;
    Ok(applied)
}

async fn read_stored(tx: &mut Tx, names: &[&str]) -> Outcome<HashMap<String, Stored>> {
    let mut stored = HashMap::new();
    for chunk in names.chunks(NAMES) {
        let holes = vec!["?"; chunk.len()].join(",");
        let sql = format!(
            "SELECT name, id, version, spec, next_fire_ms FROM jobs WHERE name IN ({holes}) ORDER BY id{}",
            tx.dialect().for_update()
        );
        let args: Vec<Value> = chunk.iter().map(|name| Value::from(*name)).collect();
        for row in tx.rows(&sql, &args).await? {
            let (id, version, spec) = (row.int(1)?, row.count(2)?, row.text(3)?);
            stored.insert(row.text(0)?, Stored { id, version, spec, next_fire_ms: row.opt_int(4)? });
        }
    }
    Ok(stored)
}

async fn write_versions(tx: &mut Tx, versions: &[(&str, u32, String)], now_ms: i64) -> Outcome<()> {
    let dialect = tx.dialect();
    let names: Vec<&str> = versions.iter().map(|(name, ..)| *name).collect();
    let stored = read_stored(tx, &names).await?;
    let mut bulk = Bulk::new("INSERT INTO job_versions (job_id, version, spec, created_ms) VALUES ", "");
    for (name, version, text) in versions {
        let Some(job) = stored.get(*name) else { return Err(Fault::Moved) };
        bulk.push_row(dialect, &[job.id.into(), (*version).into(), text.as_str().into(), now_ms.into()]);
    }
    bulk.send(tx).await.map(drop)
}

async fn bump_revision(tx: &mut Tx) -> Outcome<()> {
    tx.raw("UPDATE meta SET jobs_revision = jobs_revision + 1 WHERE id = 1").await.map(drop)
}

/// Lines for the audit table.
pub(super) struct Audit {
    who: String,
    now_ms: i64,
    bulk: Bulk,
}

impl Audit {
    pub(super) fn new(who: &str, now_ms: i64) -> Self {
        let head = "INSERT INTO audit (at_ms, who, action, subject, before_text, after_text) VALUES ";
        Audit { who: kept(who, 255), now_ms, bulk: Bulk::new(head, "") }
    }

    pub(super) fn note(&mut self, tx: &Tx, action: &str, subject: &str, change: (Option<&str>, Option<&str>)) {
        let who = self.who.as_str().into();
        let subject = kept(subject, 255).into();
        let row = [self.now_ms.into(), who, action.into(), subject, change.0.into(), change.1.into()];
        self.bulk.push_row(tx.dialect(), &row);
    }

    pub(super) async fn write(self, tx: &mut Tx) -> Outcome<()> {
        self.bulk.send(tx).await.map(drop)
    }
}
