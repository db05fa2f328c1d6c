"""What the peers' measurements share: the load, the count, and the answer as one line of JSON."""

import argparse
import json
import resource
import time

PERIOD = 60.0


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--redis", default="")
    return parser.parse_args()


def anchors(jobs, start):
    """Job i is due at start + i/jobs minutes, and each minute after that."""
    return [start + i * PERIOD / jobs for i in range(jobs)]


def lateness_ms(anchor, now):
    """Behind the latest instant of a job that is due each minute from its anchor. A scheduler that drifts is late by its drift."""
    return ((now - anchor) % PERIOD) * 1000.0


def expected(all_anchors, begin, end):
    """How many instants lie in the window."""
    count = 0
    for anchor in all_anchors:
        first = anchor + max(0, -(-(begin - anchor) // PERIOD)) * PERIOD
        if first < end:
            count += int((end - 1e-9 - first) // PERIOD) + 1
    return count


def cpu_seconds(who=resource.RUSAGE_SELF):
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def rank(values, percent):
    if not values:
        return 0.0
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def answer(name, jobs, late, wanted, cores):
    late = sorted(late)
    ms = {"p50": round(rank(late, 50), 1), "p99": round(rank(late, 99), 1), "max": round(late[-1] if late else 0.0, 1)}
    print(json.dumps({
        "name": name, "jobs": jobs, "lateness_ms": ms, "fired": len(late), "missed": max(0, wanted - len(late)),
        "cpu_cores": round(cores, 2),
    }), flush=True)


def sleep_until(instant):
    while (left := instant - time.time()) > 0:
        time.sleep(min(left, 1.0))
