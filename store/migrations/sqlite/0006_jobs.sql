-- Which file or directory applied a job last, for --prune.
CREATE TABLE IF NOT EXISTS job_sources (
    job_id INTEGER NOT NULL PRIMARY KEY,
    source TEXT NOT NULL
);

-- Who made a version.
CREATE TABLE IF NOT EXISTS job_authors (
    job_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    who TEXT NOT NULL,
    PRIMARY KEY (job_id, version)
);

-- Jobs that are deleted. Their rows stay for the history, and for a job of the same name.
CREATE TABLE IF NOT EXISTS deleted_jobs (
    job_id INTEGER NOT NULL PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    who TEXT NOT NULL
);

-- Schedules that were replaced while instants of theirs were due and undecided: up to upto_ms they decide, not the job's own.
-- A row matters as long as the job's next instant is not later.
CREATE TABLE IF NOT EXISTS job_owed (
    job_id INTEGER NOT NULL,
    upto_ms INTEGER NOT NULL,
    schedule TEXT NOT NULL,
    PRIMARY KEY (job_id, upto_ms)
);
