"""One shard of the job `months`: a program that knows what it is to do from its environment.

It may be run more than once for the same shard (after a crash, a timeout, a lost worker): "at least once". SHARDCRON_IDEMPOTENCY_KEY
is the same each time, so hand it to whatever can tell a repeated request by a key.
Exit code 0 is success. Any other is a failure that is tried again, with the last lines of stderr and stdout as its message.
"""

import json
import os
import sys

job = os.environ["SHARDCRON_JOB"]
key = os.environ["SHARDCRON_IDEMPOTENCY_KEY"]  # <execution>/<shard>
index = int(os.environ["SHARDCRON_SHARD_INDEX"])  # from 0
total = int(os.environ["SHARDCRON_SHARDS_TOTAL"])
attempt = int(os.environ["SHARDCRON_ATTEMPT"])  # from 1
nominal = os.environ["SHARDCRON_NOMINAL"]  # the instant that the execution is for, RFC 3339 in UTC
items = json.loads(os.environ["SHARDCRON_SLICE"])["list"]["items"]
params = json.loads(os.environ["SHARDCRON_PARAMS"])

for month in items:
    print(f"{job}: month {params['year']}-{month}, shard {index} of {total}, attempt {attempt}, for {nominal}, key {key}")

if not isinstance(params["year"], int):
    sys.exit(f"year must be a number, not {params['year']!r}")
