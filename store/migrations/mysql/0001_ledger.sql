-- Instants are milliseconds UTC in BIGINT, so that no session's time zone matters; ids are the sixteen bytes of a UUID.
-- Every statement can be run again: MySQL commits each by itself, and a node may die between two of them.

CREATE TABLE IF NOT EXISTS meta (
    id TINYINT NOT NULL PRIMARY KEY,
    jobs_revision BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT INTO meta (id, jobs_revision) VALUES (1, 0) ON DUPLICATE KEY UPDATE id = id;

-- One row. Leaders' writes lock it shared, a new epoch locks it exclusively (invariant L1).
CREATE TABLE IF NOT EXISTS leader (
    id TINYINT NOT NULL PRIMARY KEY,
    epoch BIGINT NOT NULL,
    holder VARCHAR(255) NOT NULL,
    since_ms BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT INTO leader (id, epoch, holder, since_ms) VALUES (1, 0, '', 0) ON DUPLICATE KEY UPDATE id = id;

CREATE TABLE IF NOT EXISTS jobs (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name VARCHAR(100) NOT NULL,
    version BIGINT NOT NULL,
    spec MEDIUMTEXT NOT NULL,
    paused_by VARCHAR(255) NULL,
    next_fire_ms BIGINT NULL,
    UNIQUE KEY jobs_name (name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS job_versions (
    job_id BIGINT NOT NULL,
    version BIGINT NOT NULL,
    spec MEDIUMTEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (job_id, version)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- fire_key is binary: utf8mb4_bin would hold 'k1' and 'k1 ' for the same (case I-02).
CREATE TABLE IF NOT EXISTS executions (
    id BINARY(16) NOT NULL PRIMARY KEY,
    job_id BIGINT NOT NULL,
    version BIGINT NOT NULL,
    fire_key VARBINARY(180) NOT NULL,
    state TINYINT NOT NULL,
    tier VARCHAR(32) NOT NULL,
    nominal_ms BIGINT NOT NULL,
    fired_ms BIGINT NOT NULL,
    ended_ms BIGINT NULL,
    epoch BIGINT NOT NULL,
    timeout_ms BIGINT NULL,
    plan MEDIUMTEXT NOT NULL,
    params MEDIUMTEXT NOT NULL,
    shards_total BIGINT NOT NULL,
    materialized BIGINT NOT NULL,
    dispatched BIGINT NOT NULL DEFAULT 0,
    succeeded BIGINT NOT NULL DEFAULT 0,
    failed BIGINT NOT NULL DEFAULT 0,
    cancelled BIGINT NOT NULL DEFAULT 0,
    UNIQUE KEY executions_firing (job_id, fire_key),
    KEY executions_active (state, job_id),
    KEY executions_of_job (job_id, id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The only secondary index is on what is NULL but for running shards, so that it stays as small as what runs.
CREATE TABLE IF NOT EXISTS shards (
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    state TINYINT NOT NULL DEFAULT 0,
    attempt INT NOT NULL DEFAULT 1,
    failures INT NOT NULL DEFAULT 0,
    owner BINARY(16) NULL,
    claimed_ms BIGINT NOT NULL DEFAULT 0,
    not_before_ms BIGINT NOT NULL DEFAULT 0,
    rows_done BIGINT NOT NULL DEFAULT 0,
    progress VARBINARY(8192) NULL,
    PRIMARY KEY (execution_id, shard_index),
    KEY shards_owner (owner)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The primary key is the idempotency key: a shard has one result (invariant S1).
CREATE TABLE IF NOT EXISTS results (
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    attempt INT NOT NULL,
    owner BINARY(16) NOT NULL,
    started_ms BIGINT NOT NULL,
    ended_ms BIGINT NOT NULL,
    row_count BIGINT NULL,
    summary MEDIUMTEXT NULL,
    PRIMARY KEY (execution_id, shard_index)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS attempts (
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    attempt INT NOT NULL,
    outcome VARCHAR(20) NOT NULL,
    owner BINARY(16) NOT NULL,
    started_ms BIGINT NOT NULL,
    ended_ms BIGINT NOT NULL,
    message MEDIUMTEXT NULL,
    PRIMARY KEY (execution_id, shard_index, attempt)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS decisions (
    job_id BIGINT NOT NULL,
    fire_key VARBINARY(180) NOT NULL,
    nominal_ms BIGINT NOT NULL,
    kind TINYINT NOT NULL,
    reason MEDIUMTEXT NULL,
    decided_ms BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    execution_id BINARY(16) NULL,
    PRIMARY KEY (job_id, fire_key),
    KEY decisions_nominal (job_id, nominal_ms)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Later attempts that wait to be handed to the broker; first attempts need no row (executions.dispatched).
CREATE TABLE IF NOT EXISTS redispatch (
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    attempt INT NOT NULL,
    not_before_ms BIGINT NOT NULL,
    PRIMARY KEY (execution_id, shard_index),
    KEY redispatch_due (not_before_ms)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS dead_letters (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    kind VARCHAR(10) NOT NULL,
    at_ms BIGINT NOT NULL,
    reason MEDIUMTEXT NOT NULL,
    execution_id BINARY(16) NULL,
    shard_index INT NULL,
    body MEDIUMTEXT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS stored_triggers (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    payload MEDIUMBLOB NOT NULL,
    put_ms BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS audit (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at_ms BIGINT NOT NULL,
    who VARCHAR(255) NOT NULL,
    action VARCHAR(40) NOT NULL,
    subject VARCHAR(255) NOT NULL,
    before_text MEDIUMTEXT NULL,
    after_text MEDIUMTEXT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS lease (
    name VARBINARY(100) NOT NULL PRIMARY KEY,
    token VARBINARY(255) NOT NULL,
    expires_ms BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS presence (
    incarnation BINARY(16) NOT NULL PRIMARY KEY,
    beat MEDIUMTEXT NOT NULL,
    beat_ms BIGINT NOT NULL,
    keep_until_ms BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
