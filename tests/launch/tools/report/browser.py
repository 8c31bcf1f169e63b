"""A headless Chromium, driven over its DevTools protocol: a page, what it logged, and what its script says."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium on PATH (Debian: apt-get install chromium)"
DEADLINE_S = 120.0


class Page:
    """A page of the browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._id = socket, 0
        self.problems: list[str] = []
        """Errors and warnings on the console, exceptions, and whatever could not be loaded."""
        self.requests: list[str] = []
        """URLs that were asked for."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if message.get("id") == self._id:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:600])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:600])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """What an expression is in the page; JSON."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end_s = time.monotonic() + DEADLINE_S
        while not self.run(script):
            assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {script}; {self.problems}"

    def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        ready: str = "document.documentElement?.dataset.drawn === 'yes'",
    ) -> None:
        """Opens a page and waits until it is drawn, as a report says it of itself."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait(ready)

    def screenshot(self, file: pathlib.Path, *, selector: str = "html") -> None:
        """An element, all of it."""
        script = f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        box = self.run(script + "return [b.x, b.y + scrollY, b.width, b.height]; })()")
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with one empty page; it ends with the block."""
    assert PROGRAM, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # helper processes may outlive it
        arguments = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
        arguments += [
            "--disable-gpu",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
        ]
        arguments += ["--no-sandbox"] * (os.geteuid() == 0)
        process = subprocess.Popen(
            [PROGRAM, *arguments, "about:blank"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            port = _port(pathlib.Path(profile) / "DevToolsActivePort", process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=DEADLINE_S) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def _port(file: pathlib.Path, process: subprocess.Popen[bytes]) -> int:
    """Where it listens; it says so in a file, once it does."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        assert process.poll() is None, "Chromium ended"
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
    raise TimeoutError("Chromium did not say where it listens")
