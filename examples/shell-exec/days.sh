#!/bin/sh
# One shard of the job `days`: a report for each day of a run of days. Plain sh; no other program is needed.
#
# A report is written beside its place and then moved there, so a report is whole or not there at all, and one that is written again
# after a crash is the same. Then the day is the checkpoint: a later attempt goes on behind it.
set -eu

day=${SHARDCRON_CHECKPOINT:-$((SHARDCRON_SHARD_FROM - 1))}
while [ "$day" -lt "$SHARDCRON_SHARD_TO" ]; do
    day=$((day + 1))
    # Exit code 65: wrong data, another try is no use. 75 would be: try again later.
    [ "$day" -le 366 ] || { echo "a year has no day $day" >&2; exit 65; }
    echo "day $day, attempt $SHARDCRON_ATTEMPT, key $SHARDCRON_IDEMPOTENCY_KEY" > "$REPORTS/day-$day.new"
    mv "$REPORTS/day-$day.new" "$REPORTS/day-$day.txt"
    echo "{\"shardcron\":\"checkpoint\",\"at\":$day,\"rows\":1}"
done
echo "days $SHARDCRON_SHARD_FROM to $SHARDCRON_SHARD_TO are done"
