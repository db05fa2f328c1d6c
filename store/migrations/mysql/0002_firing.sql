-- Who led, from when, and until when it was seen leading: why a firing was late.
CREATE TABLE IF NOT EXISTS epochs (
    epoch BIGINT NOT NULL PRIMARY KEY,
    holder VARCHAR(255) NOT NULL,
    from_ms BIGINT NOT NULL,
    seen_ms BIGINT NOT NULL,
    KEY epochs_from (from_ms)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Firings that wait: 0 for their instant, 1 for the job to be free, 2 as parts of a backfill. In the order of the ids.
CREATE TABLE IF NOT EXISTS waiting (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    job_id BIGINT NOT NULL,
    fire_key VARBINARY(180) NOT NULL,
    nominal_ms BIGINT NOT NULL,
    kind TINYINT NOT NULL,
    scheduled TINYINT NOT NULL,
    not_before_ms BIGINT NOT NULL,
    request MEDIUMTEXT NOT NULL,
    batch VARBINARY(160) NULL,
    put_ms BIGINT NOT NULL,
    UNIQUE KEY waiting_firing (job_id, fire_key),
    KEY waiting_turn (job_id, kind, id),
    KEY waiting_batch (job_id, batch)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Why an execution was cancelled.
CREATE TABLE IF NOT EXISTS cancellations (
    execution_id BINARY(16) NOT NULL PRIMARY KEY,
    at_ms BIGINT NOT NULL,
    who VARCHAR(255) NOT NULL,
    reason MEDIUMTEXT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Pauses of more than one job: 'all', or 'tier:' and its name. A job's own pause stands in its row.
CREATE TABLE IF NOT EXISTS pauses (
    scope VARBINARY(64) NOT NULL PRIMARY KEY,
    paused_by VARCHAR(255) NOT NULL,
    at_ms BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Requests to run past instants; what is left of one are its rows in waiting.
CREATE TABLE IF NOT EXISTS backfills (
    job_id BIGINT NOT NULL,
    request_id VARBINARY(160) NOT NULL,
    from_ms BIGINT NOT NULL,
    to_ms BIGINT NOT NULL,
    forced TINYINT NOT NULL,
    who VARCHAR(255) NOT NULL,
    at_ms BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    instants BIGINT NOT NULL,
    already BIGINT NOT NULL,
    PRIMARY KEY (job_id, request_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which job follows which; written with the job's specification.
CREATE TABLE IF NOT EXISTS job_edges (
    job_id BIGINT NOT NULL,
    upstream_id BIGINT NOT NULL,
    PRIMARY KEY (job_id, upstream_id),
    KEY job_edges_upstream (upstream_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Upstream executions whose end a downstream job has not taken up. Written with the execution, deleted with the decision.
CREATE TABLE IF NOT EXISTS watches (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    job_id BIGINT NOT NULL,
    upstream_id BIGINT NOT NULL,
    execution_id BINARY(16) NOT NULL,
    UNIQUE KEY watches_once (job_id, execution_id),
    KEY watches_pair (job_id, upstream_id, id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
