-- Since when retention deletes an execution; NULL for all that stay. Its rows go in several steps, and from the first of them on nobody may
-- run its shards again. Set in one statement with the look at whether it has ended and is old.
ALTER TABLE executions ADD COLUMN pruning_ms INTEGER NULL;
CREATE INDEX IF NOT EXISTS executions_pruning ON executions (pruning_ms) WHERE pruning_ms IS NOT NULL;
