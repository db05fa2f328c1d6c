-- Who led, from when, and until when it was seen leading: why a firing was late.
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    from_ms INTEGER NOT NULL,
    seen_ms INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS epochs_from ON epochs (from_ms);

-- Firings that wait: 0 for their instant, 1 for the job to be free, 2 as parts of a backfill. In the order of the ids.
CREATE TABLE IF NOT EXISTS waiting (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id INTEGER NOT NULL,
    fire_key TEXT NOT NULL,
    nominal_ms INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    scheduled INTEGER NOT NULL,
    not_before_ms INTEGER NOT NULL,
    request TEXT NOT NULL,
    batch TEXT NULL,
    put_ms INTEGER NOT NULL,
    UNIQUE (job_id, fire_key)
);
CREATE INDEX IF NOT EXISTS waiting_turn ON waiting (job_id, kind, id);
CREATE INDEX IF NOT EXISTS waiting_batch ON waiting (job_id, batch);

-- Why an execution was cancelled.
CREATE TABLE IF NOT EXISTS cancellations (
    execution_id BLOB NOT NULL PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    who TEXT NOT NULL,
    reason TEXT NOT NULL
);

-- Pauses of more than one job: 'all', or 'tier:' and its name. A job's own pause stands in its row.
CREATE TABLE IF NOT EXISTS pauses (
    scope TEXT NOT NULL PRIMARY KEY,
    paused_by TEXT NOT NULL,
    at_ms INTEGER NOT NULL
);

-- Requests to run past instants; what is left of one are its rows in waiting.
CREATE TABLE IF NOT EXISTS backfills (
    job_id INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    from_ms INTEGER NOT NULL,
    to_ms INTEGER NOT NULL,
    forced INTEGER NOT NULL,
    who TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    instants INTEGER NOT NULL,
    already INTEGER NOT NULL,
    PRIMARY KEY (job_id, request_id)
);

-- Which job follows which; written with the job's specification.
CREATE TABLE IF NOT EXISTS job_edges (
    job_id INTEGER NOT NULL,
    upstream_id INTEGER NOT NULL,
    PRIMARY KEY (job_id, upstream_id)
);
CREATE INDEX IF NOT EXISTS job_edges_upstream ON job_edges (upstream_id);

-- Upstream executions whose end a downstream job has not taken up. Written with the execution, deleted with the decision.
CREATE TABLE IF NOT EXISTS watches (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id INTEGER NOT NULL,
    upstream_id INTEGER NOT NULL,
    execution_id BLOB NOT NULL,
    UNIQUE (job_id, execution_id)
);
CREATE INDEX IF NOT EXISTS watches_pair ON watches (job_id, upstream_id, id);
