"""One live process a role in a run folder; the kernel lets go of the lock of a dead one."""

import fcntl
import os
import pathlib

from bridge.files import try_flock


class RunLock:
    """Held from when it is made until it is released, or its process ends."""

    def __init__(self, file: pathlib.Path, role: str) -> None:
        """Takes the lock.

        Raises:
          ValueError: a live process holds it.
        """
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_flock(self._fd, fcntl.LOCK_EX):
            os.close(self._fd)
            raise ValueError(
                f"a live {role} runs in {file.parent}; wait for its end, or choose another --config.run.dir"
            )

    def release(self) -> None:
        """Lets the next one in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
