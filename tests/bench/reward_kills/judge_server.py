"""A judge's endpoint on loopback, in a process of its own: `python -m ... PORT`. It scores by the response's text.

SIGUSR1: it answers the next requests with status 500. SIGUSR2: with text that holds no score.
"""

import collections
import contextlib
import http.server
import json
import re
import signal
import sys
import time
from typing import Any

from launch.supervision.process_tree import die_with_parent
from tests.bench.reward_kills.busy import busy
from tests.bench.reward_kills.truth import JUDGE, earned

NUM_BAD = 6
"""Requests that a signal spoils."""
ANSWER_S = 0.05
_RESPONSE = re.compile(r"<<<response (\w+)>>>\n(.*)\n<<<end \1>>>", re.DOTALL)
_WORD_JOINER = "\u2060"
"""Put into marks of chat templates before the response is shown to a judge; no token of the model is one."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    spoiled: collections.deque[str] = collections.deque()
    """How the next requests go wrong."""

    def do_POST(self) -> None:
        with busy():
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(ANSWER_S)
            how = ""
            with contextlib.suppress(IndexError):
                how = self.spoiled.popleft()
            if how == "500":
                self._say(500, {"error": "out of order"})
            else:
                said = "I had rather not say." if how == "garbage" else score_of(body["messages"][-1]["content"])
                self._say(200, {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def score_of(asked: str) -> str:
    """The answer to a request: 0 to 10, as JSON."""
    found = _RESPONSE.search(asked)
    assert found is not None, asked
    return json.dumps({"reason": "by its hash", "score": 10 * earned(JUDGE, found[2].replace(_WORD_JOINER, ""))})


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    """Serves until it is killed."""
    die_with_parent()
    signal.signal(signal.SIGUSR1, lambda *_: _Handler.spoiled.extend(["500"] * NUM_BAD))
    signal.signal(signal.SIGUSR2, lambda *_: _Handler.spoiled.extend(["garbage"] * NUM_BAD))
    _Server(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
