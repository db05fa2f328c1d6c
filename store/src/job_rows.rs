//! Jobs as they go into the ledger and come out, with their versions.

use crate::rows::{Applied, JobRecord};
use serde::Serialize;
use shardcron_domain::{JobId, JobSpec};

/// Changes of jobs, made in one transaction or not at all.
#[derive(Clone, Debug, Default)]
pub struct JobChanges {
    /// Jobs that are to be as given.
    pub apply: Vec<JobChange>,
    /// Jobs that are to go, each with the version that was looked at.
    pub delete: Vec<(String, u32)>,
    /// Where the applied jobs come from; `None` leaves it as it is.
    pub source: Option<String>,
}

/// One job that is to be as given.
#[derive(Clone, Debug)]
pub struct JobChange {
    /// The job.
    pub spec: JobSpec,
    /// The next instant that its schedule has from now.
    pub next_fire_ms: Option<i64>,
    /// What was looked at before; `None` does not care.
    pub expected: Option<Expected>,
}

/// What a change was made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// There was no such job.
    Absent,
    /// It was at this version.
    Version(u32),
}

/// What became of [`JobChanges`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The applied jobs, in their order.
    pub applied: Vec<Applied>,
    /// The deleted jobs; one that was gone before is not among them.
    pub deleted: Vec<String>,
}

/// How far a reader of the jobs' changes has come. The default is the beginning: everything that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobsCursor {
    /// The revision of the last job that was read.
    pub revision: i64,
    /// Its number.
    pub job: i64,
}

impl Default for JobsCursor {
    fn default() -> Self {
        JobsCursor { revision: -1, job: 0 }
    }
}

/// Some of the jobs that were changed, in the order of their changes.
#[derive(Clone, Debug, Default)]
pub struct JobPage {
    /// Those that are there.
    pub jobs: Vec<JobRecord>,
    /// Those that were deleted.
    pub gone: Vec<JobId>,
    /// Where the next page begins.
    pub next: JobsCursor,
    /// Whether there may be more already.
    pub more: bool,
}

/// One version of a job.
#[derive(Clone, Debug)]
pub struct VersionRow {
    /// Its number.
    pub version: u32,
    /// When it was made.
    pub created_ms: i64,
    /// Who made it, where that was noted.
    pub who: Option<String>,
    /// The specification; the text of the fault if it can't be read.
    pub spec: std::result::Result<JobSpec, String>,
}
