-- One row. While since_ms is there, shards are handed out for which no message was sent, and workers poll for them.
CREATE TABLE IF NOT EXISTS polling (
    id INTEGER NOT NULL PRIMARY KEY,
    since_ms INTEGER NULL,
    marks INTEGER NOT NULL
);
INSERT INTO polling (id, since_ms, marks) VALUES (1, NULL, 0) ON CONFLICT (id) DO NOTHING;

-- Pollers go through the active executions of a tier in the order of their ids, some at a time.
CREATE INDEX IF NOT EXISTS executions_polled ON executions (state, tier, id);
