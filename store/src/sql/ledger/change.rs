//! Changes of jobs: created, updated, deleted, in one transaction.

use super::edges;
use super::jobs::{Audit, LIVING, bump_revision};
use super::too_many;
use crate::error::{Result, StoreError};
use crate::job_rows::{Changed, Expected, JobChange, JobChanges};
use crate::rows::{Applied, ApplyOutcome};
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Kind, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::Value;
use shardcron_domain::JobSpec;
use shardcron_domain::firing::{AfterChange, BeforeChange, next_after_change};
use shardcron_domain::schedule::ScheduleSpec;
use shardcron_domain::units::rfc3339;
use std::collections::{BTreeSet, HashMap};

/// Jobs of one call at most: a job file of this size is refused by its reader long before.
const JOBS_MAX: usize = 100_000;
/// Names in one `IN`.
const NAMES: usize = 500;

/// Schedules that one job may owe decisions for: this many changes while no leader decides.
const OWED_MAX: usize = 50;

/// A job file's table can't hold a name twice; a caller in Rust can.
pub(crate) fn check_batch(changes: &JobChanges) -> Result<()> {
    let count = changes.apply.len() + changes.delete.len();
    if count > JOBS_MAX {
        return Err(too_many("jobs", count, JOBS_MAX));
    }
    let mut names = BTreeSet::new();
    let all = changes.apply.iter().map(|change| &change.spec.name).chain(changes.delete.iter().map(|(name, _)| name));
    match all.into_iter().find(|name| !names.insert(name.as_str())) {
        Some(name) => Err(StoreError::Invalid(format!("the job '{name}' is given twice"))),
        None => Ok(()),
    }
}

struct Stored {
    id: i64,
    version: u32,
    spec: String,
    next_fire_ms: Option<i64>,
    deleted: bool,
}

impl Stored {
    /// The next instant under the new specification, and the old schedule if it owes decisions. A stored specification that can't be
    /// read says nothing of what was due.
    fn next_under(
        &self,
        (new, fresh): (&JobSpec, Option<i64>),
        owes: bool,
        now_ms: i64,
    ) -> (AfterChange, Option<ScheduleSpec>) {
        match serde_json::from_str::<JobSpec>(&self.spec) {
            Ok(old) if !self.deleted => {
                let next_fire_ms = self.next_fire_ms;
                let before = BeforeChange { schedule: old.schedule.as_ref(), next_fire_ms, owes };
                (next_after_change(before, new.schedule.as_ref(), fresh, now_ms), old.schedule)
            }
            _ => (AfterChange { next_fire_ms: fresh, owed_upto_ms: None }, None),
        }
    }
}

impl SqlLedger {
    pub(super) async fn write_changes(&self, changes: &JobChanges, who: &str, now_ms: i64) -> Outcome<Changed> {
        let mut tx = self.db.begin().await?;
        let writer = Writer { changes, audit: Audit::new(who, now_ms), now_ms };
        let changed = writer.write(&mut tx).await.map_err(|fault| match fault {
            // Another node has just created the same job: the next try finds it.
            Fault::Server { kind: Kind::Duplicate, .. } => Fault::Moved,
            other => other,
        })?;
        tx.commit().await?;
        Ok(changed)
    }
}

/// One call's changes.
struct Writer<'c> {
    changes: &'c JobChanges,
    audit: Audit,
    now_ms: i64,
}

/// A version to be written.
struct NewVersion<'c> {
    name: &'c str,
    version: u32,
    text: String,
}

impl<'c> Writer<'c> {
    async fn write(mut self, tx: &mut Tx) -> Outcome<Changed> {
        let JobChanges { apply, delete, source } = self.changes;
        let names = apply.iter().map(|change| change.spec.name.as_str()).chain(delete.iter().map(|(n, _)| n.as_str()));
        let names: Vec<&str> = names.collect();
        let stored = read_stored(tx, &names).await?;
        let mut changed = Changed::default();
        let mut created = Bulk::new("INSERT INTO jobs (name, version, spec, next_fire_ms) VALUES ", "");
        let mut versions: Vec<NewVersion<'c>> = Vec::new();
        for change in apply {
            let old = stored.get(&change.spec.name);
            let text = change.spec.canonical_json();
            let outcome = match old {
                Some(old) if old.spec == text && !old.deleted => ApplyOutcome::Unchanged,
                Some(old) if !old.deleted => ApplyOutcome::Updated,
                _ => ApplyOutcome::Created,
            };
            let version = match (outcome, old) {
                (ApplyOutcome::Unchanged, Some(old)) => old.version,
                (_, Some(old)) => old.version.saturating_add(1),
                (_, None) => 1,
            };
            if outcome != ApplyOutcome::Unchanged {
                check_expected(tx, change, old).await?;
                self.put(tx, (change, &text, version), (old, &mut created)).await?;
                versions.push(NewVersion { name: &change.spec.name, version, text });
            }
            changed.applied.push(Applied { name: change.spec.name.clone(), version, outcome });
        }
        created.send(tx).await?;
        for (name, version) in delete {
            if let Some(old) = stored.get(name).filter(|old| !old.deleted) {
                self.delete(tx, (name, *version), old).await?;
                changed.deleted.push(name.clone());
            }
        }
        let gone: Vec<i64> = changed.deleted.iter().filter_map(|name| stored.get(name)).map(|old| old.id).collect();
        let mut known = HashMap::new();
        if source.is_some() || !versions.is_empty() {
            known = read_stored(tx, &names).await?;
            self.write_versions(tx, &versions, &known).await?;
            if let Some(source) = source {
                self.write_sources(tx, source, &known).await?;
            }
        }
        let new: BTreeSet<&str> = versions.iter().map(|version| version.name).collect();
        let specs: Vec<&JobSpec> =
            apply.iter().map(|change| &change.spec).filter(|spec| new.contains(spec.name.as_str())).collect();
        edges::write_edges(tx, &specs).await?;
        edges::drop_edges(tx, &gone).await?;
        if !versions.is_empty() || !changed.deleted.is_empty() {
            self.audit.write(tx).await?;
            let versioned = versions.iter().filter_map(|version| known.get(version.name)).map(|job| job.id);
            bump_revision(tx, &versioned.chain(gone.iter().copied()).collect::<Vec<_>>()).await?;
        }
        Ok(changed)
    }

    /// One job that is new or changed.
    async fn put(
        &mut self,
        tx: &mut Tx,
        (change, text, version): (&JobChange, &str, u32),
        (old, created): (Option<&Stored>, &mut Bulk),
    ) -> Outcome<()> {
        let name = change.spec.name.as_str();
        let Some(old) = old else {
            created.push_row(tx.dialect(), &[name.into(), version.into(), text.into(), change.next_fire_ms.into()]);
            self.audit.note(tx, "create", name, (None, Some(text)));
            return Ok(());
        };
        // What was owed before the job's next instant is decided.
        let decided = old.next_fire_ms.unwrap_or(i64::MAX);
        tx.run("DELETE FROM job_owed WHERE job_id = ? AND upto_ms < ?", &[old.id.into(), decided.into()]).await?;
        let owes = !tx.rows("SELECT 1 FROM job_owed WHERE job_id = ? LIMIT 1", &[old.id.into()]).await?.is_empty();
        let fresh = (&change.spec, change.next_fire_ms);
        let (after, old_schedule) = old.next_under(fresh, owes, self.now_ms);
        if let (Some(upto), Some(schedule)) = (after.owed_upto_ms, old_schedule) {
            owe(tx, (name, old), &schedule, upto).await?;
        }
        if old.deleted {
            tx.run("DELETE FROM deleted_jobs WHERE job_id = ?", &[old.id.into()]).await?;
            tx.run("UPDATE jobs SET paused_by = NULL WHERE id = ?", &[old.id.into()]).await?;
        }
        let update = "UPDATE jobs SET version = ?, spec = ?, next_fire_ms = ? WHERE id = ?";
        tx.run(update, &[version.into(), text.into(), after.next_fire_ms.into(), old.id.into()]).await?;
        let before = (!old.deleted).then_some(old.spec.as_str());
        self.audit.note(tx, if old.deleted { "create" } else { "update" }, name, (before, Some(text)));
        Ok(())
    }

    /// The row stays: executions and decisions name it.
    async fn delete(&mut self, tx: &mut Tx, (name, version): (&str, u32), old: &Stored) -> Outcome<()> {
        if old.version != version {
            return Err(conflict(tx, name, Some(old), &format!("version {version}")).await?);
        }
        let who = self.audit.who().to_owned();
        let insert = "INSERT INTO deleted_jobs (job_id, at_ms, who) VALUES (?, ?, ?)";
        tx.run(insert, &[old.id.into(), self.now_ms.into(), who.into()]).await?;
        tx.run("UPDATE jobs SET next_fire_ms = NULL WHERE id = ?", &[old.id.into()]).await?;
        tx.run("DELETE FROM job_owed WHERE job_id = ?", &[old.id.into()]).await?;
        tx.run("DELETE FROM job_sources WHERE job_id = ?", &[old.id.into()]).await?;
        self.audit.note(tx, "delete", name, (Some(&old.spec), None));
        Ok(())
    }

    async fn write_versions(
        &self,
        tx: &mut Tx,
        versions: &[NewVersion<'_>],
        stored: &HashMap<String, Stored>,
    ) -> Outcome<()> {
        let dialect = tx.dialect();
        let mut specs = Bulk::new("INSERT INTO job_versions (job_id, version, spec, created_ms) VALUES ", "");
        let mut authors = Bulk::new("INSERT INTO job_authors (job_id, version, who) VALUES ", "");
        for NewVersion { name, version, text } in versions {
            let Some(job) = stored.get(*name) else { return Err(Fault::Moved) };
            let (id, version) = (job.id, *version);
            specs.push_row(dialect, &[id.into(), version.into(), text.as_str().into(), self.now_ms.into()]);
            authors.push_row(dialect, &[id.into(), version.into(), self.audit.who().into()]);
        }
        specs.send(tx).await?;
        authors.send(tx).await.map(drop)
    }

    async fn write_sources(&self, tx: &mut Tx, source: &str, stored: &HashMap<String, Stored>) -> Outcome<()> {
        let source = kept(source, 1_000);
        let ids: Vec<i64> = self.changes.apply.iter().filter_map(|c| stored.get(&c.spec.name)).map(|s| s.id).collect();
        for chunk in ids.chunks(NAMES) {
            let list = crate::sql::value::number_list(chunk);
            tx.raw(&format!("DELETE FROM job_sources WHERE job_id IN ({list})")).await?;
            let mut rows = Bulk::new("INSERT INTO job_sources (job_id, source) VALUES ", "");
            for id in chunk {
                rows.push_row(tx.dialect(), &[(*id).into(), source.as_str().into()]);
            }
            rows.send(tx).await?;
        }
        Ok(())
    }
}

/// Leaves a replaced schedule the instants that have come of it.
async fn owe(tx: &mut Tx, (name, old): (&str, &Stored), schedule: &ScheduleSpec, upto_ms: i64) -> Outcome<()> {
    let rows = tx.rows("SELECT COUNT(*) FROM job_owed WHERE job_id = ?", &[old.id.into()]).await?;
    let owed = rows.first().map_or(Ok(0), |row| row.count(0))? as usize;
    if owed >= OWED_MAX {
        let since = old.next_fire_ms.map_or_else(String::new, rfc3339);
        // Not the caller's mistake: the same is taken once somebody leads.
        return Err(Fault::Final(StoreError::Conflict(format!(
            "the schedule of job '{name}' was changed {owed} times since {since}, and no scheduler has decided about its instants \
             from then on; start a scheduler, then apply again"
        ))));
    }
    let text = serde_json::to_string(schedule).map_err(|e| Fault::invalid(format!("the schedule of '{name}': {e}")))?;
    // Two changes in the same millisecond: the first one's schedule decides up to then.
    let known =
        tx.rows("SELECT 1 FROM job_owed WHERE job_id = ? AND upto_ms = ?", &[old.id.into(), upto_ms.into()]).await?;
    if known.is_empty() {
        let insert = "INSERT INTO job_owed (job_id, upto_ms, schedule) VALUES (?, ?, ?)";
        tx.run(insert, &[old.id.into(), upto_ms.into(), text.into()]).await?;
    }
    Ok(())
}

async fn check_expected(tx: &mut Tx, change: &JobChange, old: Option<&Stored>) -> Outcome<()> {
    let found = old.filter(|old| !old.deleted).map(|old| old.version);
    let (fits, expected) = match change.expected {
        None => return Ok(()),
        Some(Expected::Absent) => (found.is_none(), "absent".to_owned()),
        Some(Expected::Version(version)) => (found == Some(version), format!("version {version}")),
    };
    if fits { Ok(()) } else { Err(conflict(tx, &change.spec.name, old, &expected).await?) }
}

/// Who changed the job since the caller looked, and when.
async fn conflict(tx: &mut Tx, name: &str, old: Option<&Stored>, expected: &str) -> Outcome<Fault> {
    let text = match old {
        None => format!("job '{name}' is gone"),
        Some(old) if old.deleted => {
            let rows = tx.rows("SELECT who, at_ms FROM deleted_jobs WHERE job_id = ?", &[old.id.into()]).await?;
            let by =
                rows.first().map(|row| Ok(format!(" by {} at {}", row.text(0)?, rfc3339(row.int(1)?)))).transpose()?;
            format!("job '{name}' was deleted{}", by.unwrap_or_default())
        }
        Some(old) => {
            let sql = "SELECT a.who, v.created_ms FROM job_versions v \
                       LEFT JOIN job_authors a ON a.job_id = v.job_id AND a.version = v.version \
                       WHERE v.job_id = ? AND v.version = ?";
            let rows = tx.rows(sql, &[old.id.into(), old.version.into()]).await?;
            let by = rows.first().map(|row| {
                let who = row.opt_text(0)?.unwrap_or_else(|| "somebody".into());
                Ok(format!(", changed by {who} at {}", rfc3339(row.int(1)?)))
            });
            format!("job '{name}' is at version {}{}", old.version, by.transpose()?.unwrap_or_default())
        }
    };
    Ok(Fault::Final(StoreError::Conflict(format!(
        "{text}; expected was {expected}. Nothing was changed; look at it again"
    ))))
}

async fn read_stored(tx: &mut Tx, names: &[&str]) -> Outcome<HashMap<String, Stored>> {
    let mut stored = HashMap::new();
    for chunk in names.chunks(NAMES) {
        let holes = vec!["?"; chunk.len()].join(",");
        let sql = format!(
            "SELECT name, id, version, spec, next_fire_ms, CASE WHEN {LIVING} THEN 0 ELSE 1 END FROM jobs \
             WHERE name IN ({holes}) ORDER BY id{}",
            tx.dialect().for_update()
        );
        let args: Vec<Value> = chunk.iter().map(|name| Value::from(*name)).collect();
        for row in tx.rows(&sql, &args).await? {
            let (id, version, spec) = (row.int(1)?, row.count(2)?, row.text(3)?);
            let (next_fire_ms, deleted) = (row.opt_int(4)?, row.int(5)? == 1);
            stored.insert(row.text(0)?, Stored { id, version, spec, next_fire_ms, deleted });
        }
    }
    Ok(stored)
}
