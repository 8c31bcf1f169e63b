"""Removal of a run's weight snapshots from shared memory, also after a supervisor that was killed.

SIGKILL gives a supervisor no time to clean up, and shared memory outlives its processes. So a small process in its own
session, which no signal of the terminal reaches, waits for the supervisor's death and removes the snapshots.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

from configs import custom_functions
from launch.supervision.process_tree import arguments

_LEFT_S = 60.0
"""Timeout for the processes of a killed supervisor to exit, in seconds."""
_LOOK_S = 0.1
_STOP = b"stop"


def remove_snapshots(folder: pathlib.Path, snapshots: pathlib.Path) -> bool:
    """Removes a run's snapshots, unless a live learner uses them; returns True if they are removed.

    Such a learner was started by hand or, if this folder is a copy, runs in the original folder with the same
    snapshots.
    """
    # Imported here, because a cleanup process waits for most of its life and should stay small.
    from actor.weights.source import sweep
    from bridge.files import RunLock
    from bridge.snapshots.snapshot_format import HostFiles
    from configs.run_folder import RunFolder

    with contextlib.ExitStack() as locks, contextlib.suppress(ValueError):
        locks.callback(RunLock(RunFolder(folder).learner_lock, "learner").release)
        if snapshots.is_dir():
            locks.callback(RunLock(snapshots / HostFiles().writer, "learner").release)
        shutil.rmtree(snapshots, ignore_errors=True)
        sweep(snapshots)
        return True
    return False


class CleanupProcess:
    """Process that removes a run's snapshots if this process dies before `close`."""

    def __init__(self, folder: pathlib.Path, snapshots: pathlib.Path) -> None:
        """Starts the process. This process must hold the run's supervisor lock."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(folder.resolve()), str(snapshots.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": custom_functions.python_path()},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process, which then removes nothing."""
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._process.communicate(_STOP)


def main() -> None:
    """Waits for the end of stdin, then removes the snapshots unless a new supervisor has the run."""
    folder, snapshots = map(pathlib.Path, arguments(sys.argv, "RUN_DIR SNAPSHOTS", command="launch.local"))
    if sys.stdin.buffer.read():
        return
    from bridge.files import RunLock
    from configs.run_folder import RunFolder

    end_s = time.monotonic() + _LEFT_S
    while time.monotonic() < end_s:
        # A new supervisor holds this lock, and then it is responsible for the snapshots. The lock of a dying one may
        # be released a little after its pipe.
        with contextlib.suppress(ValueError, FileNotFoundError):
            lock = RunLock(RunFolder(folder).supervisor_lock, "launch.local")
            is_done = remove_snapshots(folder, snapshots)
            lock.release()
            if is_done:
                return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
