"""Server of the report on loopback, which rebuilds the page when a run has changed."""

import http.server
import pathlib
import threading
import time
from collections.abc import Sequence

from absl import logging

from configs.run_folder import RunFolder
from launch.tools.report.build import build
from launch.tools.report.run_data import files_of, read_results, read_run
from launch.tools.report.timeline_events import num_bytes

_HOSTS = ("127.0.0.1", "localhost")
MIN_AGE_S = 5.0
"""Minimum age of a page before a rebuild, in seconds; at least three times its build time."""
EVENTS_EVERY_S = 15.0
"""Interval between checks of the event log, in seconds. It always grows, but only it shows hangs and starts."""


class Pages:
    """Newest page of some runs, built on request."""

    def __init__(self, folders: Sequence[pathlib.Path], results: Sequence[pathlib.Path] = ()) -> None:
        self._folders, self._results = list(folders), list(results)
        self._lock = threading.Lock()
        self._version, self._page = "", b""
        self._next_s = 0.0
        self._events, self._events_s = "", -EVENTS_EVERY_S

    def version(self) -> str:
        """Returns the version of a page built now, or of the last page if it is too recent for a rebuild."""
        return self._version if time.monotonic() < self._next_s else self._state()

    def page(self) -> bytes:
        """Returns the page at the current version; raises ValueError or OSError if a run folder is unreadable."""
        with self._lock:
            version = self.version()
            if version != self._version:
                start_s = time.monotonic()
                self._page = build(self._folders, results=self._results, follow=version).encode("utf-8", "replace")
                self._version = version
                self._next_s = time.monotonic() + max(MIN_AGE_S, 3 * (time.monotonic() - start_s))
            return self._page

    def _state(self) -> str:
        """Returns a string that changes with each update, evaluation and end of a run, and now and then its events."""
        found = [self._state_of_events()]
        for run in map(RunFolder, self._folders):
            for file in (run.metrics, run.samples, run.summary, *files_of(run.path)):
                stat = file.stat() if file.is_file() else None
                found.append(f"{stat.st_size}.{stat.st_mtime_ns}" if stat else "-")
        return "_".join(found)

    def _state_of_events(self) -> str:
        now_s = time.monotonic()
        if now_s - self._events_s >= EVENTS_EVERY_S:
            self._events = ".".join(str(num_bytes(folder)) for folder in self._folders)
            self._events_s = now_s
        return self._events


class _PageHandler(http.server.BaseHTTPRequestHandler):
    pages: Pages

    def do_GET(self) -> None:  # name required by http.server
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:  # DNS rebinding: a foreign name that resolves to this server
            self._answer(403, b"host: expected 127.0.0.1 or localhost", "text/plain")
            return
        try:
            match self.path:
                case "/":
                    self._answer(200, self.pages.page(), "text/html; charset=utf-8")
                case "/version":
                    self._answer(200, self.pages.version().encode(), "text/plain")
                case _:
                    self._answer(404, b"path: expected / or /version", "text/plain")
        except (ValueError, OSError) as e:
            self._report_error(str(e))
        except Exception as e:  # a file damaged in an unforeseen way must not stop the server
            logging.debug("report of %s", self.path, exc_info=True)
            self._report_error(f"cannot build the report: {type(e).__name__}: {e}")

    def _report_error(self, reason: str) -> None:
        line = " ".join(reason.split())
        self._answer(500, line.encode("utf-8", "replace"), "text/plain; charset=utf-8")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        try:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the client disconnected
            pass

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because a following page polls every few seconds."""


def make_server(
    folders: Sequence[pathlib.Path], *, port: int, results: Sequence[pathlib.Path] = ()
) -> http.server.ThreadingHTTPServer:
    """Returns a server on loopback that is not running yet; raises ValueError for a wrong folder, file or port."""
    for folder in folders:
        read_run(folder)
    for file in results:
        read_results(file)
    handler = type("Handler", (_PageHandler,), {"pages": Pages(folders, results)})
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as e:
        raise ValueError(
            f"--port={port}: cannot listen at 127.0.0.1:{port} ({e.strerror}). Set another port, or 0 for a free one."
        ) from e


def serve(folders: Sequence[pathlib.Path], *, port: int, results: Sequence[pathlib.Path] = ()) -> int:
    """Serves until Ctrl-C."""
    with make_server(folders, port=port, results=results) as server:
        print(f"report at http://127.0.0.1:{server.server_address[1]}/   (press Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
