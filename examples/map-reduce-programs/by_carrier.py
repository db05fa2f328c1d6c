"""The flights whose plane is not in the register, by map and reduce: one program for the three kinds of shards.

The first shard emits the others by lines on its stdout, each with a payload of its own choice; they become shards when it has ended well,
and only then. An attempt that fails has emitted nothing, so the next one emits everything anew. The last shard finds what the others
said as their results in the file that SHARDCRON_INPUT names.
"""

import gzip
import json
import os

GROUPS = 4


def say(kind, **fields):
    print(json.dumps({"shardcron": kind, **fields}), flush=True)


def tails_by_carrier(folder):
    tails = {}
    with gzip.open(os.path.join(folder, "flights.csv.gz"), "rt", encoding="utf-8") as lines:
        columns = next(lines).rstrip().split(",")
        carrier, tail = columns.index("carrier"), columns.index("tailnum")
        for line in lines:
            fields = line.rstrip().split(",")
            tails.setdefault(fields[carrier], []).append(fields[tail])
    return tails


def emit_groups(folder):
    """Groups of carriers with about as many flights as each other: the largest first, each to the smallest group so far."""
    groups = [[0, []] for _ in range(GROUPS)]
    by_size = sorted(tails_by_carrier(folder).items(), key=lambda of: -len(of[1]))
    for carrier, tails in by_size:
        smallest = min(groups)
        smallest[0] += len(tails)
        smallest[1].append(carrier)
    for flights, carriers in groups:
        say("emit", payload={"carriers": carriers, "flights": flights})


def count(folder, carriers):
    with open(os.path.join(folder, "planes.csv"), encoding="utf-8") as lines:
        planes = {line.split(",", 1)[0] for line in lines}
    tails = tails_by_carrier(folder)
    found = {carrier: sum(tail not in planes for tail in tails[carrier]) for carrier in carriers}
    say("result", rows=sum(len(tails[carrier]) for carrier in carriers), summary=found)


def add_up(results):
    unmatched = {}
    for result in results:
        unmatched.update(result["summary"])
    say("result", rows=sum(result["rows"] for result in results), summary={"unmatched": sum(unmatched.values()), **unmatched})


with open(os.environ["SHARDCRON_INPUT"], encoding="utf-8") as file:
    given = json.load(file)
stage, folder = os.environ["SHARDCRON_STAGE"], given["params"]["folder"]
if stage == "map":
    emit_groups(folder)
elif stage == "task":
    count(folder, given["slice"]["task"]["payload"]["carriers"])
else:
    add_up(given["results"])
