"""Celery beat with one worker over Redis: interval entries, whose last run is set so that they are due at their anchors."""

import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone

import celery
from celery import Celery

import common

app = Celery("peer", broker=os.environ.get("PEER_REDIS", ""))
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=64, beat_max_loop_interval=1, enable_utc=True,
                broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

START = float(os.environ.get("PEER_START", "0"))
JOBS = int(os.environ.get("PEER_JOBS", "0"))
SEEN = os.environ.get("PEER_SEEN", "")


@app.task(name="peer.tick")
def tick(anchor):
    with open(f"{SEEN}.{os.getpid()}", "a", encoding="ascii") as seen:
        seen.write(f"{time.time()} {anchor}\n")


def schedule():
    from celery.beat import ScheduleEntry
    from celery.schedules import schedule as every

    entries = {}
    for i, anchor in enumerate(common.anchors(JOBS, START)):
        last = datetime.fromtimestamp(anchor - common.PERIOD, tz=timezone.utc)
        entries[f"job-{i}"] = ScheduleEntry(name=f"job-{i}", task="peer.tick", last_run_at=last, total_run_count=0,
                                            schedule=every(common.PERIOD, app=app), args=(anchor,), app=app)
    return entries


def beat():
    from celery.beat import Scheduler

    class InMemory(Scheduler):
        def setup_schedule(self):
            self.data = schedule()

    app.Beat(scheduler_cls=InMemory, loglevel="ERROR", max_interval=1, quiet=True, pidfile=None).run()


def ticks_of(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def main():
    args = common.arguments()
    start = time.time() + 10 + args.jobs / 1000
    folder = tempfile.mkdtemp(prefix="celery-peer-")
    environment = dict(os.environ, PEER_REDIS=args.redis, PEER_START=repr(start), PEER_JOBS=str(args.jobs),
                       PEER_SEEN=os.path.join(folder, "seen"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment,
             "cwd": os.path.dirname(os.path.abspath(__file__))}
    worker = subprocess.Popen([sys.executable, "-m", "celery", "-A", "celery_peer", "worker", "--pool=threads",
                               "--concurrency=8", "--loglevel=ERROR", "--without-gossip", "--without-mingle"], **quiet)
    beater = subprocess.Popen([sys.executable, "-c", "import celery_peer; celery_peer.beat()"], **quiet)
    try:
        begin, end = start + 5, start + 5 + args.seconds
        common.sleep_until(begin)
        before = ticks_of(beater.pid)
        common.sleep_until(end)
        cores = (ticks_of(beater.pid) - before) / args.seconds
        time.sleep(2)
    finally:
        for process in (beater, worker):
            process.terminate()
        for process in (beater, worker):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    late = []
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), encoding="ascii") as seen:
            for line in seen:
                at, anchor = map(float, line.split())
                behind = common.lateness_ms(anchor, at)
                if begin <= at - behind / 1000 < end:
                    late.append(behind)
    wanted = common.expected(common.anchors(args.jobs, start), begin, end)
    common.answer(f"celery beat {celery.__version__}", args.jobs, late, wanted, cores)


if __name__ == "__main__":
    main()
