-- Rounds of an execution beyond its first: each time a person sent failed shards back.
CREATE TABLE IF NOT EXISTS reopenings (
    execution_id BINARY(16) NOT NULL,
    round INT NOT NULL,
    at_ms BIGINT NOT NULL,
    who VARCHAR(255) NOT NULL,
    reason MEDIUMTEXT NULL,
    shards BIGINT NOT NULL,
    PRIMARY KEY (execution_id, round)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The dead letters of a shard are settled with its retry. MySQL has no 'IF NOT EXISTS' for an index, and this step may be run again.
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.statistics
                WHERE table_schema = DATABASE() AND table_name = 'dead_letters' AND index_name = 'dead_letters_shard');
SET @step = IF(@missing, 'ALTER TABLE dead_letters ADD KEY dead_letters_shard (execution_id, shard_index)', 'DO 0');
PREPARE add_index FROM @step;
EXECUTE add_index;
DEALLOCATE PREPARE add_index;
