"""How a tool talks to processes of its own: one JSON object a line, both ways, with deadlines.

A child answers on a descriptor of its own, since libraries print to stdout.
"""

import collections
import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from configs import extension
from launch.processes import by_hand, lifeline

_ANSWERS = "SLUICE_ANSWERS_FD"
_LOG_TAIL = 3000
_END_S = 30.0


class ChildError(RuntimeError):
    """A process failed, or did not answer in time; its log's end is in the message."""


class PipedProcess:
    """A process, seen from the tool that started it.

    It lives as long as this object and is asked for things; one that must be replaced when it dies, and is never spoken
    to, is a `child.Child`.
    """

    def __init__(
        self, module: str, arguments: list[str], log: pathlib.Path, *, env: dict[str, str] | None = None
    ) -> None:
        """Starts `python -P -m module arguments...`; what it prints goes to `log`."""
        self.name = module.rsplit(".", 1)[-1]
        self._log = log
        read, write = os.pipe()
        self._answers = read
        self._buffer = b""
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=os.environ
                | {"PYTHONPATH": extension.python_path(), _ANSWERS: str(write), lifeline.VARIABLE: str(os.getpid())}
                | (env or {}),
            )
        os.close(write)

    def send(self, message: dict[str, Any]) -> None:
        """Asks for something; the answer comes later."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("ended") from None

    def failure(self, what: str) -> ChildError:
        """The error that says what this process did, with the end of its log."""
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.exists() else ""
        return ChildError(f"{self.name} {what}; its log {self._log} ends with\n{tail}")

    def close(self) -> None:
        """Asks it to end, then insists; also after a failed `send`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what a failed send left in the buffer
            self.process.stdin.close()
        try:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    self.process.send_signal(number)
                try:
                    self.process.wait(_END_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            os.close(self._answers)

    def _read(self) -> None:
        """Queues the whole answers that are there.

        Raises:
          ChildError: the process ended, or says that something failed.
        """
        data = os.read(self._answers, 1 << 20)
        if not data:
            raise self.failure("ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise self.failure(f"failed: {answer['error']}")
            self._queue.append(answer)


def wait_for(child: PipedProcess, *others: PipedProcess, deadline_s: float) -> dict[str, Any]:
    """The next answer of `child`; those of the `others` that come meanwhile are kept for their own turn.

    Raises:
      ChildError: it, or one of the `others`, failed or ended meanwhile; or the time is up.
    """
    end = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        for one in (child, *others):
            selector.register(one._answers, selectors.EVENT_READ, one)
        while not child._queue and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data._read()
    if child._queue:
        return child._queue.popleft()
    raise child.failure(f"did not answer in {deadline_s:.0f} s")


class Parent:
    """The tool, seen from a child."""

    def __init__(self) -> None:
        """Takes over the descriptor to answer on; this process ends with its parent from here on.

        Without a parent, started by hand, it ends at once, with one line and code 2.
        """
        if _ANSWERS not in os.environ:
            by_hand.refuse("the tool that asks it", "it has nobody to answer")
        lifeline.die_with_parent()
        self._out = os.fdopen(int(os.environ[_ANSWERS]), "w", buffering=1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when there will be none."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, message: dict[str, Any]) -> None:
        """Answers the request."""
        self._out.write(json.dumps(message) + "\n")

    def fail(self, error: BaseException) -> None:
        """Says what ended this process."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.answer({"error": f"{type(error).__name__}: {error}"})
