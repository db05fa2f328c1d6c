-- The revision of all jobs (meta.jobs_revision) with which a job was changed last: a leader reads again what is later than it knows.
-- MySQL has no 'IF NOT EXISTS' for a column or an index, and every statement must bear being run again.
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.columns
                WHERE table_schema = DATABASE() AND table_name = 'jobs' AND column_name = 'revision');
SET @step = IF(@missing, 'ALTER TABLE jobs ADD COLUMN revision BIGINT NOT NULL DEFAULT 0', 'DO 0');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.statistics
                WHERE table_schema = DATABASE() AND table_name = 'jobs' AND index_name = 'jobs_changed');
SET @step = IF(@missing, 'ALTER TABLE jobs ADD KEY jobs_changed (revision, id)', 'DO 0');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;
