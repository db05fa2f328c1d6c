-- The revision of all jobs (meta.jobs_revision) with which a job was changed last: a leader reads again what is later than it knows.
ALTER TABLE jobs ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS jobs_changed ON jobs (revision, id);
