"""One shard of the job `reconcile-python`: finds the flights whose plane is not in the register, in a run of flight ids.

It works in chunks. A chunk's findings are committed to its own database first, then its checkpoint is told to the worker, so a program
that dies in between does that chunk again. That is "at least once", and here it is harmless: a finding has a key, the flight's id, and
is written at most once however often its chunk is done. `times` counts how often that was, to show it.

Everything that it needs is Python's standard library. What it is told stands in the file that SHARDCRON_INPUT names.
"""

import gzip
import json
import os
import sqlite3
import sys
import time

CHUNK = 2000


def tell(**message):
    """A line for the worker; the key "shardcron" comes first. Flushed, since the worker reads it while this program runs."""
    print(json.dumps(message), flush=True)


def flights(path, first, last):
    """(id, tail number) of the flights first..=last; the file is in the order of ids."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            fields = line.rstrip("\n").split(",")
            flight = int(fields[0])
            if flight > last:
                return
            if flight >= first:
                yield flight, fields[4]


def main():
    with open(os.environ["SHARDCRON_INPUT"], encoding="utf-8") as file:
        given = json.load(file)
    data, params = given["params"]["data"], given["params"]
    first, last = given["slice"]["range"]["from"], given["slice"]["range"]["to"]
    begin = first if given["checkpoint"] is None else given["checkpoint"] + 1

    with open(os.path.join(data, "planes.csv"), encoding="utf-8") as lines:
        planes = {line.split(",", 1)[0] for line in lines}

    target = sqlite3.connect(params["target"], timeout=60, isolation_level=None)
    target.execute("PRAGMA journal_mode = WAL")
    target.execute(
        "CREATE TABLE IF NOT EXISTS unmatched (flight INTEGER PRIMARY KEY, tailnum TEXT NOT NULL, key TEXT NOT NULL, times INTEGER NOT NULL)"
    )
    target.execute("CREATE TABLE IF NOT EXISTS starts (key TEXT NOT NULL, attempt INTEGER NOT NULL, shard INTEGER NOT NULL, begin INTEGER NOT NULL)")
    key = given["idempotency_key"]
    target.execute("INSERT INTO starts VALUES (?, ?, ?, ?)", (key, given["attempt"], given["shard_index"], begin))

    def commit(chunk):
        found = [(flight, tail, key) for flight, tail in chunk if tail not in planes]
        target.execute("BEGIN IMMEDIATE")
        target.executemany(
            "INSERT INTO unmatched VALUES (?, ?, ?, 1) ON CONFLICT (flight) DO UPDATE SET times = times + 1", found
        )
        target.execute("COMMIT")
        tell(shardcron="checkpoint", at=chunk[-1][0], rows=len(chunk))
        tell(shardcron="metric", name="unmatched", kind="counter", value=len(found))
        time.sleep(params.get("pause_ms", 0) / 1000)
        return len(found)

    rows = unmatched = 0
    chunk = []
    for one in flights(os.path.join(data, "flights.csv.gz"), begin, last):
        chunk.append(one)
        if len(chunk) == CHUNK:
            rows, unmatched, chunk = rows + len(chunk), unmatched + commit(chunk), []
    if chunk:
        rows, unmatched = rows + len(chunk), unmatched + commit(chunk)

    print(f"{rows} flights from {begin} to {last}, {unmatched} without a plane", file=sys.stderr)
    # Without "rows": the checkpoints have counted them, those of earlier attempts, too.
    tell(shardcron="result", summary={"unmatched": unmatched, "from": begin, "to": last})


if __name__ == "__main__":
    main()
