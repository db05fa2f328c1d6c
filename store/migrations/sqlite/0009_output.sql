-- What attempts wrote, in pieces, in the order in which they came in. The unique key lets a write be repeated whose answer was lost.
-- AUTOINCREMENT: who follows goes on behind the last id that was seen, so none may come again.
CREATE TABLE IF NOT EXISTS output_chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    execution_id BLOB NOT NULL,
    shard_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    stream INTEGER NOT NULL,
    position INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS output_chunks_of_attempt ON output_chunks (execution_id, shard_index, attempt, seq);
CREATE INDEX IF NOT EXISTS output_chunks_of_execution ON output_chunks (execution_id, id);
