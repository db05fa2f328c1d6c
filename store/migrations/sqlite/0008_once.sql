-- See mysql/0008_once.sql.
CREATE TABLE IF NOT EXISTS once_records (
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    record_key BLOB NOT NULL,
    state INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    message TEXT NULL,
    PRIMARY KEY (execution_id, shard_index, record_key)
) WITHOUT ROWID;
