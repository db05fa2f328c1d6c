-- Which file or directory applied a job last, for --prune.
CREATE TABLE IF NOT EXISTS job_sources (
    job_id BIGINT NOT NULL PRIMARY KEY,
    source VARCHAR(1000) NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Who made a version.
CREATE TABLE IF NOT EXISTS job_authors (
    job_id BIGINT NOT NULL,
    version BIGINT NOT NULL,
    who VARCHAR(255) NOT NULL,
    PRIMARY KEY (job_id, version)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Jobs that are deleted. Their rows stay for the history, and for a job of the same name.
CREATE TABLE IF NOT EXISTS deleted_jobs (
    job_id BIGINT NOT NULL PRIMARY KEY,
    at_ms BIGINT NOT NULL,
    who VARCHAR(255) NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Schedules that were replaced while instants of theirs were due and undecided: up to upto_ms they decide, not the job's own.
-- A row matters as long as the job's next instant is not later.
CREATE TABLE IF NOT EXISTS job_owed (
    job_id BIGINT NOT NULL,
    upto_ms BIGINT NOT NULL,
    schedule MEDIUMTEXT NOT NULL,
    PRIMARY KEY (job_id, upto_ms)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
