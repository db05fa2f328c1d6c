"""APScheduler: interval jobs in memory, run by its thread pool."""

import time
from datetime import datetime, timezone

import apscheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

import common


def main():
    args = common.arguments()
    start = time.time() + 5 + args.jobs / 1000
    all_anchors = common.anchors(args.jobs, start)
    seen = []

    def job(anchor):
        seen.append((time.time(), anchor))

    scheduler = BackgroundScheduler(timezone=timezone.utc, job_defaults={"misfire_grace_time": None, "max_instances": 10})
    scheduler.start(paused=True)
    for anchor in all_anchors:
        first = datetime.fromtimestamp(anchor, tz=timezone.utc)
        scheduler.add_job(job, IntervalTrigger(seconds=60, start_date=first), args=[anchor])
    scheduler.resume()
    begin, end = start + 5, start + 5 + args.seconds
    common.sleep_until(begin)
    before = common.cpu_seconds()
    common.sleep_until(end)
    cores = (common.cpu_seconds() - before) / args.seconds
    time.sleep(1)
    scheduler.shutdown(wait=False)
    late = [common.lateness_ms(anchor, at) for at, anchor in seen if begin <= at - common.lateness_ms(anchor, at) / 1000 < end]
    common.answer(f"APScheduler {apscheduler.version}", args.jobs, late, common.expected(all_anchors, begin, end), cores)


if __name__ == "__main__":
    main()
