-- Rounds of an execution beyond its first: each time a person sent failed shards back.
CREATE TABLE IF NOT EXISTS reopenings (
    execution_id BLOB NOT NULL,
    round INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    who TEXT NOT NULL,
    reason TEXT NULL,
    shards INTEGER NOT NULL,
    PRIMARY KEY (execution_id, round)
) WITHOUT ROWID;

-- The dead letters of a shard are settled with its retry.
CREATE INDEX IF NOT EXISTS dead_letters_shard ON dead_letters (execution_id, shard_index);
