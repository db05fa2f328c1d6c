"""A service that the job `reconcile-http` calls: finds the flights whose plane is not in the register, in a run of flight ids.

    python3 service.py PORT DATA_FOLDER TARGET_DATABASE

It honours the Idempotency-Key: what it answers is kept under the key, in the same transaction as its findings, and a repeated request
gets the kept answer. So its effects are there once, although it may be called more than once. With `?later=1` in the address it answers
202 at once and says where it can be asked for the end. With `?forgetful=1` it does not look at the key, as a service that was never told
of it: then what was asked for twice is done twice.
"""

import gzip
import json
import os
import sqlite3
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit


class Register:
    """The data, read once, and the database that the findings go into."""

    def __init__(self, data, target):
        with open(os.path.join(data, "planes.csv"), encoding="utf-8") as lines:
            self.planes = {line.split(",", 1)[0] for line in lines}
        with gzip.open(os.path.join(data, "flights.csv.gz"), "rt", encoding="utf-8") as lines:
            next(lines)
            self.tails = [line.split(",", 5)[4] for line in lines]  # of the flights 1, 2, …
        self.target = target
        with self.connect() as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE IF NOT EXISTS unmatched (flight INTEGER NOT NULL, tailnum TEXT NOT NULL, key TEXT NOT NULL)")
            database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            database.execute("CREATE TABLE IF NOT EXISTS calls (key TEXT NOT NULL, attempt INTEGER NOT NULL, shard INTEGER NOT NULL)")
            database.execute("CREATE TABLE IF NOT EXISTS ended (call INTEGER PRIMARY KEY)")
        self.running = set()
        self.lock = threading.Lock()

    def connect(self):
        return sqlite3.connect(self.target, timeout=60, isolation_level=None)

    def answer(self, key):
        row = self.connect().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def called(self, key, attempt, shard):
        return self.connect().execute("INSERT INTO calls VALUES (?, ?, ?)", (key, attempt, shard)).lastrowid

    def ended(self, call):
        """It was answered, whether or not somebody still listened. Nothing more comes of it, but where it was answered with 202."""
        self.connect().execute("INSERT INTO ended VALUES (?)", (call,))

    def reconcile(self, key, wanted, pause_ms, forgetful=False):
        first, last = wanted["slice"]["range"]["from"], wanted["slice"]["range"]["to"]
        found = [(n, self.tails[n - 1], key) for n in range(first, last + 1) if self.tails[n - 1] not in self.planes]
        time.sleep(pause_ms / 1000)
        answer = json.dumps({"rows": last - first + 1, "summary": {"unmatched": len(found)}})
        database = self.connect()
        database.execute("BEGIN IMMEDIATE")
        # Another request with the same key may have come first; then its findings are the findings.
        if forgetful or database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer)).rowcount == 1:
            database.executemany("INSERT INTO unmatched VALUES (?, ?, ?)", found)
        database.execute("COMMIT")
        return answer if forgetful else self.answer(key)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    register = None

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass  # whoever called was killed between two of its requests

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        call = self.register.called(key, int(self.headers["Shardcron-Attempt"]), wanted["shard_index"])
        try:
            self.work(key, wanted)
        finally:
            self.register.ended(call)

    def work(self, key, wanted):
        pause_ms = wanted["params"].get("pause_ms", 0)
        how = parse_qs(urlsplit(self.path).query)
        if "forgetful" in how:
            return self.say(200, self.register.reconcile(key, wanted, pause_ms, forgetful=True))
        if "later" not in how:
            return self.say(200, self.register.answer(key) or self.register.reconcile(key, wanted, pause_ms))
        with self.register.lock:
            if key not in self.register.running and not self.register.answer(key):
                self.register.running.add(key)
                threading.Thread(target=self.register.reconcile, args=(key, wanted, pause_ms), daemon=True).start()
        self.say(202, "", {"Location": "/ends/" + quote(key, safe="")})

    def do_GET(self):
        key = unquote(self.path.rsplit("/", 1)[-1])
        answer = self.register.answer(key)
        if answer:
            self.say(200, answer)
        elif key in self.register.running:
            self.say(202, "")
        else:
            self.say(404, "")

    def say(self, status, text, headers={}):
        body = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        try:
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked is gone; who asks again finds the answer under the key

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port, data, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    Handler.register = Register(data, target)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
