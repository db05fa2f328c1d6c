-- Instants are milliseconds UTC in INTEGER, so that no session's time zone matters; ids are the sixteen bytes of a UUID.

CREATE TABLE IF NOT EXISTS meta (
    id INTEGER NOT NULL PRIMARY KEY,
    jobs_revision INTEGER NOT NULL
);
INSERT INTO meta (id, jobs_revision) VALUES (1, 0) ON CONFLICT (id) DO NOTHING;

-- One row: the fence of leaders' writes (invariant L1).
CREATE TABLE IF NOT EXISTS leader (
    id INTEGER NOT NULL PRIMARY KEY,
    epoch INTEGER NOT NULL,
    holder TEXT NOT NULL,
    since_ms INTEGER NOT NULL
);
INSERT INTO leader (id, epoch, holder, since_ms) VALUES (1, 0, '', 0) ON CONFLICT (id) DO NOTHING;

CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    spec TEXT NOT NULL,
    paused_by TEXT NULL,
    next_fire_ms INTEGER NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_name ON jobs (name);

CREATE TABLE IF NOT EXISTS job_versions (
    job_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    spec TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (job_id, version)
);

CREATE TABLE IF NOT EXISTS executions (
    id BLOB NOT NULL PRIMARY KEY,
    job_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    fire_key TEXT NOT NULL,
    state INTEGER NOT NULL,
    tier TEXT NOT NULL,
    nominal_ms INTEGER NOT NULL,
    fired_ms INTEGER NOT NULL,
    ended_ms INTEGER NULL,
    epoch INTEGER NOT NULL,
    timeout_ms INTEGER NULL,
    plan TEXT NOT NULL,
    params TEXT NOT NULL,
    shards_total INTEGER NOT NULL,
    materialized INTEGER NOT NULL,
    dispatched INTEGER NOT NULL DEFAULT 0,
    succeeded INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS executions_firing ON executions (job_id, fire_key);
CREATE INDEX IF NOT EXISTS executions_active ON executions (state, job_id);
CREATE INDEX IF NOT EXISTS executions_of_job ON executions (job_id, id);

-- The only secondary index is on what is NULL but for running shards, so that it stays as small as what runs.
CREATE TABLE IF NOT EXISTS shards (
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 1,
    failures INTEGER NOT NULL DEFAULT 0,
    owner BLOB NULL,
    claimed_ms INTEGER NOT NULL DEFAULT 0,
    not_before_ms INTEGER NOT NULL DEFAULT 0,
    rows_done INTEGER NOT NULL DEFAULT 0,
    progress TEXT NULL,
    PRIMARY KEY (execution_id, shard_index)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS shards_owner ON shards (owner);

-- The primary key is the idempotency key: a shard has one result (invariant S1).
CREATE TABLE IF NOT EXISTS results (
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    owner BLOB NOT NULL,
    started_ms INTEGER NOT NULL,
    ended_ms INTEGER NOT NULL,
    row_count INTEGER NULL,
    summary TEXT NULL,
    PRIMARY KEY (execution_id, shard_index)
);

CREATE TABLE IF NOT EXISTS attempts (
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    owner BLOB NOT NULL,
    started_ms INTEGER NOT NULL,
    ended_ms INTEGER NOT NULL,
    message TEXT NULL,
    PRIMARY KEY (execution_id, shard_index, attempt)
);

CREATE TABLE IF NOT EXISTS decisions (
    job_id INTEGER NOT NULL,
    fire_key TEXT NOT NULL,
    nominal_ms INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    reason TEXT NULL,
    decided_ms INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    execution_id BLOB NULL,
    PRIMARY KEY (job_id, fire_key)
);
CREATE INDEX IF NOT EXISTS decisions_nominal ON decisions (job_id, nominal_ms);

-- Later attempts that wait to be handed to the broker; first attempts need no row (executions.dispatched).
CREATE TABLE IF NOT EXISTS redispatch (
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    not_before_ms INTEGER NOT NULL,
    PRIMARY KEY (execution_id, shard_index)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS redispatch_due ON redispatch (not_before_ms);

CREATE TABLE IF NOT EXISTS dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    reason TEXT NOT NULL,
    execution_id BLOB NULL,
    shard_index INTEGER NULL,
    body TEXT NULL
);

CREATE TABLE IF NOT EXISTS stored_triggers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    payload BLOB NOT NULL,
    put_ms INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms INTEGER NOT NULL,
    who TEXT NOT NULL,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    before_text TEXT NULL,
    after_text TEXT NULL
);

CREATE TABLE IF NOT EXISTS lease (
    name TEXT NOT NULL PRIMARY KEY,
    token TEXT NOT NULL,
    expires_ms INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS presence (
    incarnation BLOB NOT NULL PRIMARY KEY,
    beat TEXT NOT NULL,
    beat_ms INTEGER NOT NULL,
    keep_until_ms INTEGER NOT NULL
);
