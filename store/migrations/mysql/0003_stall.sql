-- How long an attempt of the execution may go without progress; NULL: not watched. MySQL has no ADD COLUMN IF NOT EXISTS, and every
-- statement must bear being run again.
SET @step = (SELECT IF(COUNT(*) = 0, 'ALTER TABLE executions ADD COLUMN stall_ms BIGINT NULL', 'DO 0')
    FROM information_schema.columns
    WHERE table_schema = DATABASE() AND table_name = 'executions' AND column_name = 'stall_ms');
PREPARE step FROM @step;
EXECUTE step;
DEALLOCATE PREPARE step;
