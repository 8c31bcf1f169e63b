"""On a node of the cluster: holds one process of the run, watches it as `launch.local` would, and tells the driver.

Imported on each node by Ray's worker, so it imports neither jax nor torch.
"""

import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from bridge.liveness import Activity
from launch.supervision.child import Child
from launch.supervision.hang_detector import HangTimeouts
from launch.supervision.process_tree import kill_leftovers

HERE = "{here}"
"""In an argument: a folder of the node that stays while the station does."""
MAX_LOG_BYTES = 1 << 18
"""Of a log, in one answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What a station says of its process."""

    returncode: int | None
    pid: int
    doing: int
    hung: str
    log: bytes
    """What was written since the last look."""


class NodeAgent:
    """Keeps one process of the run. Ray makes one a process, on the node that has what it asks for."""

    def __init__(
        self,
        role: str,
        *,
        mark: str,
        bounds: HangTimeouts,
        stop_s: float,
        files: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        """Starts nothing; ends what an earlier one left on this node.

        Args:
          role: as `Child`'s.
          mark: by which the process and all it starts are found again.
          bounds: for how long it may be silent.
          stop_s: how long it may take to end when its node is asked to: an agreed save.
          files: names of files with secrets, in variables that this node may have set to files of its own.
          environment: of the process besides.
        """
        for name, value in files.items():
            os.environ.setdefault(name, value)
        self._role, self._mark, self._bounds, self._environment = role, mark, bounds, dict(environment)
        self._stop_s = stop_s
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        self._log = self._folder / "log"
        self._offset = 0
        self._child: Child | None = None
        kill_leftovers(lambda found: found == mark)
        self._ending = signal.signal(signal.SIGTERM, self._end)

    def where(self) -> tuple[str, str, str]:
        """Of this node: its name, the address others reach it at, its Python."""
        return socket.gethostname(), _own_address(), sys.version.split()[0]

    def free_port(self) -> int:
        """One that nobody listens at now."""
        with socket.create_server((_own_address(), 0)) as server:
            return server.getsockname()[1]

    def sees(self, path: str, content: bytes) -> bool:
        """Whether a file is here, with that content: whether a folder is shared."""
        try:
            return pathlib.Path(path).read_bytes() == content
        except OSError:
            return False

    def start(self, arguments: Sequence[str], *, num_restarts: int) -> None:
        """Starts the process, anew if there was one."""
        own = [a.replace(HERE, str(self._folder)) for a in arguments]
        self._child = Child(
            self._role,
            own,
            self._log,
            devices="",  # Ray has set what this node's devices are
            environment=self._environment,
            mark=self._mark,
            bounds=self._bounds,
        )
        self._child.num_restarts = num_restarts
        self._child.start()

    def look(self) -> ProcessStatus:
        """How the process is, and what it wrote; kills it if it hangs."""
        child = self._child
        if child is None:
            return ProcessStatus(None, 0, Activity.STARTING, "", b"")
        child.end_if_hung()
        returncode = child.returncode  # before the log: what a dead one wrote is there
        return ProcessStatus(returncode, child.pid, int(child.doing), child.hung, self._new_log())

    def request_stop(self) -> None:
        """SIGTERM, if it runs."""
        if self._child is not None:
            self._child.request_stop()

    def kill(self) -> None:
        """Kills it and all it started."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Kills it, and removes what it left on this node."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_log(self) -> bytes:
        try:
            with open(self._log, "rb") as log:
                log.seek(self._offset)
                new = log.read(MAX_LOG_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(new)
        return new

    def _end(self, number: int, frame: object) -> None:
        """The node is to go: the process gets a moment to end in order, then this one ends as it would have."""
        del frame
        child = self._child
        if child is not None:
            child.request_stop()
            end_s = time.monotonic() + self._stop_s
            child.kill_after(lambda: time.monotonic() >= end_s)
        signal.signal(signal.SIGTERM, self._ending if self._ending is not None else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _own_address() -> str:
    """The address at which other nodes reach this one, as Ray knows it."""
    import ray.util

    return ray.util.get_node_ip_address()
