-- How long an attempt of the execution may go without progress; NULL: not watched.
ALTER TABLE executions ADD COLUMN stall_ms INTEGER NULL;
