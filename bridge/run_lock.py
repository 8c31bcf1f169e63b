"""One live process a role in a run folder; the kernel lets go of the lock of a dead one.

A lock says nothing to other machines; there the store's lead does, held by a place (`place_of`).
"""

import fcntl
import os
import pathlib
import platform

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


def place_of(folder: pathlib.Path) -> str:
    """Where a run's folder lies in the world: two places differ where a lock in one is no lock in the other.

    Rather too many differ than too few: containers of one image share the machine's id, clones of a machine both name
    and id, so the folder's own number on its disk is in it too.
    """
    machine = pathlib.Path("/etc/machine-id")
    machine_id = machine.read_text().strip() if machine.is_file() else ""
    folder = folder.resolve()
    return f"{platform.node()}/{machine_id}:{folder}#{folder.stat().st_ino}"
