-- What attempts wrote, in pieces, in the order in which they came in. The unique key lets a write be repeated whose answer was lost.
CREATE TABLE IF NOT EXISTS output_chunks (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    attempt INT NOT NULL,
    seq BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    stream TINYINT NOT NULL,
    position BIGINT NOT NULL,
    body MEDIUMBLOB NOT NULL,
    UNIQUE KEY output_chunks_of_attempt (execution_id, shard_index, attempt, seq),
    KEY output_chunks_of_execution (execution_id, id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
