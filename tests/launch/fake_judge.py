"""A server in the judge's place that does what a test says: `python -m tests.launch.fake_judge FOLDER ARGUMENTS`.

`FOLDER/starts.json` lists what its first process does, its second, and so on; the last entry is for all after it:
serve; fail (it ends at once, with a word); dumb (it never answers); late (it never answers and ends once there is
`FOLDER/end`); hang (it serves until there is `FOLDER/hang`, and then answers no more). Each writes what it was given to
`FOLDER/N.json`.
"""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from launch.supervision.process_tree import die_with_parent

HANGS = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    """/health, and a completion for who shows the key."""

    def do_GET(self) -> None:  # the library's name
        if HANGS.is_set():
            threading.Event().wait()
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_known = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        said = {"choices": [{"message": {"content": '{"reason": "r", "score": 7}'}, "finish_reason": "stop"}]}
        data = json.dumps(said).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def main() -> None:
    die_with_parent()
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    number = len([*folder.glob("[0-9]*.json")])
    behaviours = json.loads((folder / "starts.json").read_text())
    what = behaviours[min(number, len(behaviours) - 1)]
    engine = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    given = {
        "pid": os.getpid(),
        "engine": engine.pid,
        "arguments": arguments,
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    written = folder / f"{number}.json.part"
    written.write_text(json.dumps(given))
    written.rename(folder / f"{number}.json")
    if what == "fail":
        sys.exit("error: no memory left")
    if what == "dumb":
        threading.Event().wait()
    if what == "late":
        wait_for(folder / "end")
        sys.exit("error: no memory left")
    if what == "hang":
        threading.Thread(target=lambda: wait_for(folder / "hang") or HANGS.set(), daemon=True).start()
    port = next(int(a.removeprefix("--port=")) for a in arguments if a.startswith("--port="))
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
