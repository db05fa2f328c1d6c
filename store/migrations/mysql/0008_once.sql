-- Records that a handler works on once: a row for each that is under way, done beyond the checkpoint, to be tried again, or given
-- up. Keys are bytes: a text column would hold 'k1' and 'k1 ' for the same, and cut what is too long (cases I-02, I-03).
CREATE TABLE IF NOT EXISTS once_records (
    execution_id BINARY(16) NOT NULL,
    shard_index INT NOT NULL,
    record_key VARBINARY(1000) NOT NULL,
    state TINYINT NOT NULL,
    attempt INT NOT NULL,
    tries INT NOT NULL DEFAULT 0,
    message TEXT NULL,
    PRIMARY KEY (execution_id, shard_index, record_key)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
