"""Agent on a cluster node: runs one process, monitors it like `launch.local`, and reports to the driver.

Ray's worker imports this module on each node, so it imports neither jax nor torch.
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
"""Placeholder in arguments for the agent's temporary folder."""
MAX_LOG_BYTES = 1 << 18
"""Maximum log bytes per status reply."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Status of an agent's process."""

    returncode: int | None
    pid: int
    doing: int
    hung: str
    log: bytes
    """Log output since the previous status."""


class NodeAgent:
    """Ray actor that manages one process of the run."""

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
        """Kills what an earlier agent left on this node; starts no process.

        `stop_s` is the grace period in seconds for saving when the node is preempted. `files` are default paths of
        secret files by variable; this node's own variables take precedence.
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
        """Returns this node's host name, IP address and Python version."""
        return socket.gethostname(), _own_address(), sys.version.split()[0]

    def free_port(self) -> int:
        """Returns a port that is currently free."""
        with socket.create_server((_own_address(), 0)) as server:
            return server.getsockname()[1]

    def sees(self, path: str, content: bytes) -> bool:
        """Returns True if the file exists here with that content, which shows that its folder is shared."""
        try:
            return pathlib.Path(path).read_bytes() == content
        except OSError:
            return False

    def start(self, arguments: Sequence[str], *, num_restarts: int) -> None:
        """Starts or restarts the process."""
        own = [a.replace(HERE, str(self._folder)) for a in arguments]
        self._child = Child(
            self._role,
            own,
            self._log,
            devices="",  # Ray sets this node's visible devices
            environment=self._environment,
            mark=self._mark,
            bounds=self._bounds,
        )
        self._child.num_restarts = num_restarts
        self._child.start()

    def look(self) -> ProcessStatus:
        """Returns the process's status and new log output; kills the process if it hangs."""
        child = self._child
        if child is None:
            return ProcessStatus(None, 0, Activity.STARTING, "", b"")
        child.end_if_hung()
        returncode = child.returncode  # before the log, so that a dead process's log is complete
        return ProcessStatus(returncode, child.pid, int(child.doing), child.hung, self._new_log())

    def request_stop(self) -> None:
        """Sends SIGTERM if the process runs."""
        if self._child is not None:
            self._child.request_stop()

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Kills the process and removes its folder on this node."""
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
        """Handles SIGTERM: stops the process gracefully within its timeout, then ends this Ray worker."""
        del frame
        child = self._child
        if child is not None:
            child.request_stop()
            end_s = time.monotonic() + self._stop_s
            child.kill_after(lambda: time.monotonic() >= end_s)
        signal.signal(signal.SIGTERM, self._ending if self._ending is not None else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _own_address() -> str:
    import ray.util

    return ray.util.get_node_ip_address()
