"""What a process last said it is at, from its log."""

import pathlib

from bridge.phases import read_phase

_MAX_BYTES = 1 << 20
"""Read at one look; of a longer piece the end."""


class PhaseLog:
    """Reads a log as it grows, from where it ended when this was made."""

    def __init__(self, log: pathlib.Path) -> None:
        """The log need not exist yet; what is in it is of an earlier process."""
        self._log, self._rest, self._phase = log, b"", ""
        try:
            self._offset = log.stat().st_size
        except FileNotFoundError:
            self._offset = 0

    def phase(self) -> str:
        """What the process is at; empty if it says nothing of it."""
        try:
            size = self._log.stat().st_size
            if size != self._offset:
                self._read(size)
        except OSError:  # it is not there yet, or its disk fails: what was known holds
            pass
        return self._phase

    def _read(self, size: int) -> None:
        if size < self._offset:  # cut short
            self._offset, self._rest = 0, b""
        with open(self._log, "rb") as file:
            file.seek(max(self._offset, size - _MAX_BYTES))
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            said = read_phase(line.decode(errors="replace"))
            self._phase = self._phase if said is None else said
