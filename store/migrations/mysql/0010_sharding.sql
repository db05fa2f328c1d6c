-- Shards at the end of a plan that are not handed out before all others have ended well: the reducing one. MySQL has no ADD COLUMN
-- IF NOT EXISTS, and every statement must bear being run again.
SET @step = (SELECT IF(COUNT(*) = 0, 'ALTER TABLE executions ADD COLUMN held BIGINT NOT NULL DEFAULT 0', 'DO 0')
    FROM information_schema.columns
    WHERE table_schema = DATABASE() AND table_name = 'executions' AND column_name = 'held');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;

-- What the first shard of a map emits: staged under its attempt, and the slices of the other shards once that attempt has ended well.
CREATE TABLE IF NOT EXISTS emitted (
    execution_id BINARY(16) NOT NULL,
    attempt BIGINT NOT NULL,
    shard_index BIGINT NOT NULL,
    payload MEDIUMTEXT NOT NULL,
    PRIMARY KEY (execution_id, attempt, shard_index)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Shards of a broadcast that have not ended, by the process life that alone may run them.
CREATE TABLE IF NOT EXISTS addressed (
    incarnation BINARY(16) NOT NULL,
    execution_id BINARY(16) NOT NULL,
    shard_index BIGINT NOT NULL,
    PRIMARY KEY (incarnation, execution_id, shard_index),
    KEY addressed_execution (execution_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
