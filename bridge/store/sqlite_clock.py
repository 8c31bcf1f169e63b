"""Clock of a SQLite store: it counts leases, so it goes forward by what really passed, and never back.

All processes of a machine share the kernel's clock since boot, which nobody can set. A reboot sets it back to zero, so
the store keeps its last reading and what has to be added to get Unix seconds: store time = reading + offset. A reading
that lies below the kept one is of a later boot (or of a clock that was set back): the offset then becomes the one by
which the store's time goes on from where it was, or from Unix time, if that is later.
"""

import sqlite3
import time
from collections.abc import Callable

Clock = Callable[[], float]
_READING, _OFFSET = "clock_reading_us", "clock_offset_us"
_STEP_S = 1.0
"""A reading is kept if it is later than the kept one by so much; a step back by less is not noticed."""
_AFTER_STEP_S = 2.0
"""Seconds after the kept time at which the clock continues after a step back: later than any time it gave."""
_PUT = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


def since_boot_s() -> float:
    """Returns the seconds since this machine's start, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SqliteClock:
    """The clock of one store file, the same for all its processes."""

    def __init__(self, reading: Clock | None = None) -> None:
        """Reads nothing yet.

        Args:
          reading: seconds, by a clock that all processes of the file share; None: `since_boot_s`.
        """
        self._reading: Clock = since_boot_s if reading is None else reading
        self._unix: Clock = time.time if reading is None else reading

    def look(self, db: sqlite3.Connection) -> float:
        """Returns the store's time, in Unix seconds; writes nothing."""
        reading_s, offset_s, _ = self._now(db)
        return reading_s + offset_s

    def tick(self, db: sqlite3.Connection) -> float:
        """Returns the store's time, in Unix seconds, and keeps the reading; called within a write transaction."""
        reading_s, offset_s, is_kept = self._now(db)
        if not is_kept:
            db.executemany(_PUT, [(_READING, round(reading_s * 1e6)), (_OFFSET, round(offset_s * 1e6))])
        return reading_s + offset_s

    def _now(self, db: sqlite3.Connection) -> tuple[float, float, bool]:
        """A reading, the offset that goes with it, and whether both stand in the file closely enough."""
        kept = dict(db.execute("SELECT key, value FROM meta WHERE key IN (?, ?)", (_READING, _OFFSET)).fetchall())
        reading_s = self._reading()
        to_unix_s = self._unix() - reading_s
        if len(kept) < 2:
            return reading_s, to_unix_s, False
        kept_s, offset_s = kept[_READING] / 1e6, kept[_OFFSET] / 1e6
        if reading_s < kept_s - _STEP_S:
            return reading_s, max(to_unix_s, kept_s + offset_s + _AFTER_STEP_S - reading_s), False
        return reading_s, offset_s, reading_s < kept_s + _STEP_S
