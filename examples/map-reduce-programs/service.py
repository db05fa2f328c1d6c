"""A service that the job `by-carrier-http` calls for each of its shards: the first one is to say what the others are, those count, and
the last one gets what they said.

    python3 service.py PORT DATA_FOLDER

Every request can be repeated: the service only reads. With `?later=1` in the address it answers 202 at once, and brings its answer to
the address that the request's header Shardcron-Callback names.
"""

import gzip
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def read(folder):
    with open(os.path.join(folder, "planes.csv"), encoding="utf-8") as lines:
        planes = {line.split(",", 1)[0] for line in lines}
    found = {}
    with gzip.open(os.path.join(folder, "flights.csv.gz"), "rt", encoding="utf-8") as lines:
        columns = next(lines).rstrip().split(",")
        carrier, tail = columns.index("carrier"), columns.index("tailnum")
        for line in lines:
            fields = line.rstrip().split(",")
            flights = found.setdefault(fields[carrier], [0, 0])
            flights[0] += 1
            flights[1] += fields[tail] not in planes
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    carriers = {}

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "later=1" not in self.path:
            return self.say(200, self.answer(wanted))
        threading.Thread(target=self.bring, args=(self.headers["Shardcron-Callback"], wanted), daemon=True).start()
        self.say(202, {})

    def answer(self, wanted):
        shard = wanted["slice"]
        if "map" in shard:
            return {"emit": sorted(self.carriers)}
        if "task" in shard:
            flights, unmatched = self.carriers[shard["task"]["payload"]]
            return {"rows": flights, "summary": {"unmatched": unmatched}}
        results = wanted["results"]
        unmatched = sum(result["summary"]["unmatched"] for result in results)
        return {"rows": sum(result["rows"] for result in results), "summary": {"unmatched": unmatched}}

    def bring(self, address, wanted):
        request = urllib.request.Request(address, json.dumps(self.answer(wanted)).encode(), {"Content-Type": "application/json"})
        for wait in (0.1, 0.5, 2, 5):
            try:
                return urllib.request.urlopen(request, timeout=10).close()
            except urllib.error.HTTPError as refused:
                # 404, 410: nobody waits for it any more. If it is still wanted, it is asked for again, with another address.
                return print(f"{refused.code} {refused.read().decode()}", file=sys.stderr)
            except OSError:
                time.sleep(wait)

    def say(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    Handler.carriers = read(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
