"""Turns on devices that engines and training share on one machine: engines sample, or a trainer computes.

The trainer is the learner (actor.colocated) or its gradient helper (helpers.num_engines); each shares other engines'
devices. Two file locks of each in the run folder. `NAME.lock`: whoever has memory on the devices, all engines together
or the trainer alone. An engine's workers hold it too, since they may outlive their actor. `NAME.wanted`: the trainer,
from before it waits for the devices until it has returned them; engines stand down while it is held. The kernel
releases the locks of a process that dies, so a death ends its turn.
"""

import asyncio
import fcntl
import os
import pathlib
import time
from collections.abc import Callable

from bridge.files import try_flock

POLL_S = 0.02
LEARNER, HELPER = "devices", "helper-devices"
"""Names of the locks on devices that engines share with the learner, and with its gradient helper."""


class TrainerTurn:
    """The trainer's side."""

    def __init__(self, folder: pathlib.Path, name: str = LEARNER) -> None:
        self._lock, self._wanted = _open(folder, name)
        self.is_held = False

    def take(self, on_wait: Callable[[], None]) -> None:
        """Waits until no engine has memory on the devices; `on_wait` is called repeatedly and may raise."""
        try:
            for fd in (self._wanted, self._lock):
                while not try_flock(fd, fcntl.LOCK_EX):
                    on_wait()
                    time.sleep(POLL_S)
        except BaseException:
            self.give_back()
            raise
        self.is_held = True

    def give_back(self) -> None:
        """Lets the engines have the devices, whose memory must be free; has no effect if they are not held."""
        self.is_held = False
        for fd in (self._lock, self._wanted):
            fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the turn up."""
        for fd in (self._lock, self._wanted):
            os.close(fd)


class EngineTurn:
    """An engine's side."""

    def __init__(self, folder: pathlib.Path, name: str = LEARNER) -> None:
        self.name = name
        self._lock, self._wanted = _open(folder, name)

    def is_wanted(self) -> bool:
        """Returns True if the trainer has the devices or waits for them."""
        if not try_flock(self._wanted, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._wanted, fcntl.LOCK_UN)
        return False

    def try_take(self) -> bool:
        """Takes the devices unless the trainer wants them; returns True if this engine has them."""
        return not self.is_wanted() and try_flock(self._lock, fcntl.LOCK_SH)

    def join(self) -> None:
        """Takes the devices beside another process of the same engine that has them."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    async def take(self) -> None:
        """Waits until the engines have the devices."""
        while not self.try_take():
            await asyncio.sleep(POLL_S)

    def give_back(self) -> None:
        """Lets the trainer have the devices, whose memory must be free."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the turn up."""
        for fd in (self._lock, self._wanted):
            os.close(fd)


def _open(folder: pathlib.Path, name: str) -> tuple[int, int]:
    files = (folder / f"{name}.lock", folder / f"{name}.wanted")
    lock, wanted = (os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) for file in files)
    return lock, wanted
