-- Shards at the end of a plan that are not handed out before all others have ended well: the reducing one.
ALTER TABLE executions ADD COLUMN held INTEGER NOT NULL DEFAULT 0;

-- What the first shard of a map emits: staged under its attempt, and the slices of the other shards once that attempt has ended well.
CREATE TABLE IF NOT EXISTS emitted (
    execution_id BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    shard_index INTEGER NOT NULL,
    payload TEXT NOT NULL,
    PRIMARY KEY (execution_id, attempt, shard_index)
) WITHOUT ROWID;

-- Shards of a broadcast that have not ended, by the process life that alone may run them.
CREATE TABLE IF NOT EXISTS addressed (
    incarnation BLOB NOT NULL,
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    PRIMARY KEY (incarnation, execution_id, shard_index)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS addressed_execution ON addressed (execution_id);
