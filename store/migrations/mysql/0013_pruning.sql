-- Since when retention deletes an execution; NULL for all that stay. Its rows go in several steps, and from the first of them on nobody may
-- run its shards again. Set in one statement with the look at whether it has ended and is old, under the lock of its row.
-- MySQL has no 'IF NOT EXISTS' for a column or an index, and every statement must bear being run again.
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.columns
                WHERE table_schema = DATABASE() AND table_name = 'executions' AND column_name = 'pruning_ms');
SET @step = IF(@missing, 'ALTER TABLE executions ADD COLUMN pruning_ms BIGINT NULL', 'DO 0');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;
SET @missing = (SELECT COUNT(*) = 0 FROM information_schema.statistics
                WHERE table_schema = DATABASE() AND table_name = 'executions' AND index_name = 'executions_pruning');
SET @step = IF(@missing, 'ALTER TABLE executions ADD KEY executions_pruning (pruning_ms)', 'DO 0');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;
