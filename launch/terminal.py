"""Rich console of every command, heartbeat lines of slow steps, and output streams that survive their reader."""

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

from absl import logging
from rich.console import Console

MIN_COLUMNS = 20
"""Minimum valid terminal width. Some shells, editors and CI systems set COLUMNS=0, at which rich prints nothing."""
_SIZES = {"COLUMNS": MIN_COLUMNS, "LINES": 2}
_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a write after the reader is gone: a closed pipe or a terminal that hung up."""


def make_console(**options: Any) -> Console:
    """Returns a rich console with the terminal's width, or 80 columns if there is no terminal."""
    return Console(**options, _environ=_with_sizes(os.environ))


def _with_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without impossible terminal sizes."""
    return {name: value for name, value in environ.items() if name not in _SIZES or _is_size(value, _SIZES[name])}


def _is_size(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text)


WAIT_MESSAGE_S = 5.0
"""Maximum time without a line in a plain log while a step runs, in seconds."""


class WaitMessages:
    """Prints a running step with its elapsed time every `WAIT_MESSAGE_S`; as a context manager, from a thread."""

    def __init__(self, say: Callable[[str], None], what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the step `what`; `clock` is monotonic, in seconds."""
        self._say, self._what, self._clock = say, what, clock
        self._started_s = self._said_s = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wait messages", daemon=True)

    def look(self) -> None:
        """Prints the line if it is due."""
        now_s = self._clock()
        if now_s - self._said_s >= WAIT_MESSAGE_S:
            self._said_s = now_s
            self._say(f"{self._what}, {now_s - self._started_s:.0f} s")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(WAIT_MESSAGE_S / 10):
            self.look()


def outlive_readers() -> None:
    """Redirects stdout and stderr to /dev/null once their reader is gone, instead of raising an error.

    A run behind `| head`, `| tee` or ssh continues, and its logs are in its folder. Streams that were closed before the
    process started go to /dev/null. Characters that the encoding lacks are escaped.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # closed: the next opened file would get this descriptor
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(cast("io.TextIOWrapper | None", sys.__stdout__), 1)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        before, sys.stderr = sys.stderr, _lasting(cast("io.TextIOWrapper | None", sys.__stderr__), 2)
        handler = logging.get_absl_handler().python_handler
        if handler.stream is before:
            handler.stream = sys.stderr


def _lasting(stream: io.TextIOWrapper | None, fd: int) -> io.TextIOWrapper:
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(fd, "wb", closefd=False)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors=stream.errors if stream is not None and stream.errors != "strict" else "backslashreplace",
        line_buffering=stream is None or stream.line_buffering or stream.write_through,
    )


class _Lasting(io.FileIO):
    """File descriptor whose writes succeed after its reader is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in _GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes
