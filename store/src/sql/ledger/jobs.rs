//! Jobs and their versions.

use crate::job_rows::{JobPage, JobsCursor, VersionRow};
use crate::rows::JobRecord;
use crate::sql::SqlLedger;
use crate::sql::bulk::{Bulk, kept};
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::sql::value::{Row, Value, number_list};
use shardcron_domain::JobId;
use shardcron_domain::schedule::ScheduleSpec;
use std::collections::HashMap;

/// Of a row of `jobs`: it is not deleted.
pub(super) const LIVING: &str = "NOT EXISTS (SELECT 1 FROM deleted_jobs d WHERE d.job_id = jobs.id)";

impl SqlLedger {
    pub(super) async fn read_jobs(&self, name: Option<&str>) -> Outcome<Vec<JobRecord>> {
        let columns = "SELECT id, name, version, spec, paused_by, next_fire_ms FROM jobs";
        let rows = match name {
            Some(name) => self.db.rows(&format!("{columns} WHERE name = ? AND {LIVING}"), &[name.into()]).await?,
            None => self.db.rows(&format!("{columns} WHERE {LIVING} ORDER BY name"), &[]).await?,
        };
        let mut jobs: Vec<JobRecord> = rows.iter().map(job_record).collect::<Outcome<_>>()?;
        let rows = match name {
            Some(name) => {
                self.db.rows(&format!("{OWED} AND j.name = ? ORDER BY o.job_id, o.upto_ms"), &[name.into()]).await?
            }
            None => self.db.raw_rows(&format!("{OWED} ORDER BY o.job_id, o.upto_ms")).await?,
        };
        give_owed(&mut jobs, &rows)?;
        Ok(jobs)
    }

    pub(super) async fn read_changed_jobs(&self, after: JobsCursor, limit: usize) -> Outcome<JobPage> {
        let JobsCursor { revision, job } = after;
        let sql = format!(
            "SELECT id, name, version, spec, paused_by, next_fire_ms, revision, CASE WHEN {LIVING} THEN 0 ELSE 1 END FROM jobs \
             WHERE revision > {revision} OR (revision = {revision} AND id > {job}) ORDER BY revision, id LIMIT {limit}"
        );
        let rows = self.db.raw_rows(&sql).await?;
        let mut page = JobPage { next: after, more: rows.len() == limit, ..JobPage::default() };
        for row in &rows {
            page.next = JobsCursor { revision: row.int(6)?, job: row.int(0)? };
            if row.int(7)? == 0 {
                page.jobs.push(job_record(row)?);
            } else {
                page.gone.push(JobId(row.int(0)?));
            }
        }
        if !page.jobs.is_empty() {
            let list = number_list(page.jobs.iter().map(|job| job.id));
            let sql = format!("{OWED} AND o.job_id IN ({list}) ORDER BY o.job_id, o.upto_ms");
            let rows = self.db.raw_rows(&sql).await?;
            give_owed(&mut page.jobs, &rows)?;
        }
        Ok(page)
    }

    pub(super) async fn read_versions(
        &self,
        name: &str,
        version: Option<u32>,
        limit: usize,
    ) -> Outcome<Vec<VersionRow>> {
        let mut sql =
            "SELECT v.version, v.created_ms, v.spec, a.who FROM job_versions v JOIN jobs j ON j.id = v.job_id \
                       LEFT JOIN job_authors a ON a.job_id = v.job_id AND a.version = v.version WHERE j.name = ?"
                .to_owned();
        let mut args: Vec<Value> = vec![name.into()];
        if let Some(version) = version {
            sql.push_str(" AND v.version = ?");
            args.push(version.into());
        }
        sql.push_str(" ORDER BY v.version DESC LIMIT ?");
        args.push(limit.into());
        let row_of = |row: &Row| {
            let text = row.text(2)?;
            Ok(VersionRow {
                version: row.count(0)?,
                created_ms: row.int(1)?,
                spec: serde_json::from_str(&text).map_err(|e| e.to_string()),
                who: row.opt_text(3)?,
            })
        };
        self.db.rows(&sql, &args).await?.iter().map(row_of).collect()
    }

    pub(super) async fn read_source(&self, source: &str) -> Outcome<Vec<(String, u32)>> {
        let sql = format!(
            "SELECT jobs.name, jobs.version FROM jobs JOIN job_sources s ON s.job_id = jobs.id \
             WHERE s.source = ? AND {LIVING} ORDER BY jobs.name"
        );
        self.db.rows(&sql, &[source.into()]).await?.iter().map(|row| Ok((row.text(0)?, row.count(1)?))).collect()
    }

    pub(super) async fn write_paused(
        &self,
        name: &str,
        paused_by: Option<&str>,
        who: &str,
        now_ms: i64,
    ) -> Outcome<bool> {
        let mut tx = self.db.begin().await?;
        let lock = format!("SELECT paused_by, id FROM jobs WHERE name = ? AND {LIVING}{}", tx.dialect().for_update());
        let rows = tx.rows(&lock, &[name.into()]).await?;
        let Some(row) = rows.first() else { return Ok(false) };
        let (before, id) = (row.opt_text(0)?, row.int(1)?);
        let paused = paused_by.map(|by| kept(by, 255));
        if before == paused {
            return Ok(true);
        }
        // Only this column: a leader that moves the next instant at the same time keeps its write, and this stays (case S-18).
        tx.run("UPDATE jobs SET paused_by = ? WHERE name = ?", &[paused.clone().into(), name.into()]).await?;
        bump_revision(&mut tx, &[id]).await?;
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
        owed: Vec::new(),
    })
}

/// Earlier schedules that decide about instants still.
const OWED: &str = "SELECT o.job_id, o.upto_ms, o.schedule FROM job_owed o JOIN jobs j ON j.id = o.job_id \
                    WHERE j.next_fire_ms <= o.upto_ms";

fn give_owed(jobs: &mut [JobRecord], rows: &[Row]) -> Outcome<()> {
    let mut of_job: HashMap<i64, Vec<(ScheduleSpec, i64)>> = HashMap::new();
    for row in rows {
        // One that can't be read decides nothing; it was read when it was written.
        if let Ok(schedule) = serde_json::from_str(&row.text(2)?) {
            of_job.entry(row.int(0)?).or_default().push((schedule, row.int(1)?));
        }
    }
    if !of_job.is_empty() {
        for job in jobs {
            job.owed = of_job.remove(&job.id.0).unwrap_or_default();
        }
    }
    Ok(())
}

/// Notes that these jobs have changed. The last write of its transaction: the row of `meta` is locked from here to the commit, so
/// that revisions are seen in their order, and who has seen one has seen all before it.
pub(super) async fn bump_revision(tx: &mut Tx, jobs: &[i64]) -> Outcome<()> {
    tx.raw("UPDATE meta SET jobs_revision = jobs_revision + 1 WHERE id = 1").await?;
    for chunk in jobs.chunks(1_000) {
        let revision = "(SELECT jobs_revision FROM meta WHERE id = 1)";
        tx.raw(&format!("UPDATE jobs SET revision = {revision} WHERE id IN ({})", number_list(chunk))).await?;
    }
    Ok(())
}

/// Lines for the audit table.
pub(super) struct Audit {
    who: String,
    now_ms: i64,
    bulk: Bulk,
}

impl Audit {
    pub(super) fn who(&self) -> &str {
        &self.who
    }

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
