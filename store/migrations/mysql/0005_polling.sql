-- One row. While since_ms is there, shards are handed out for which no message was sent, and workers poll for them.
CREATE TABLE IF NOT EXISTS polling (
    id TINYINT NOT NULL PRIMARY KEY,
    since_ms BIGINT NULL,
    marks BIGINT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT INTO polling (id, since_ms, marks) VALUES (1, NULL, 0) ON DUPLICATE KEY UPDATE id = id;

-- Pollers go through the active executions of a tier in the order of their ids, some at a time. MySQL has no 'IF NOT EXISTS' for
-- an index, and this step may be run again.
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.statistics
                WHERE table_schema = DATABASE() AND table_name = 'executions' AND index_name = 'executions_polled');
SET @step = IF(@missing, 'ALTER TABLE executions ADD KEY executions_polled (state, tier, id)', 'DO 0');
PREPARE add_index FROM @step;
EXECUTE add_index;
DEALLOCATE PREPARE add_index;
