"""Processes that a campaign keeps alive, as a cluster's scheduler would: watched by their pulse, started again."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from launch.supervision import process_tree
from launch.supervision.child import Child
from launch.supervision.hang_detector import HangTimeouts
from tests.integration.faults.evidence import End
from tests.integration.network.namespaces import Host

_SAID_CHARS = 200


class Kept(Child):
    """A process on a host of the network; what it is told may change between two lives."""

    def __init__(
        self,
        name: str,
        host: Host,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        log: pathlib.Path,
        mark: str,
        bounds: HangTimeouts,
    ) -> None:
        """Not started; it and what it starts are found by `mark`, and `bounds` say for how long it may be silent."""
        super().__init__(name, list(arguments), log, devices="", mark=f"{mark}{name}", bounds=bounds)
        self.host, self.mark, self.module, self.arguments, self.env = host, f"{mark}{name}", module, arguments, env
        self.ends: list[End] = []
        """How its lives ended, but for the one that there is now."""
        self.had_new_step = self.had_full_disk = False
        """In the life that there is now; see `End`."""
        self.num_orphans = 0

    def command(self) -> list[str]:
        """With shared memory of the host's own."""
        own = ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', self.host.shm)
        env = ("env", *(f"{k}={v}" for k, v in self.env.items()))
        return self.host.command(*own, *env, sys.executable, "-P", "-m", self.module, *self.arguments)

    def start(self, more: Sequence[str] = ()) -> None:
        """A new life."""
        self.had_new_step = self.had_full_disk = False
        super().start(more)

    @property
    def end(self) -> End:
        """How the last life ended; RuntimeError if it has not."""
        if (code := self.returncode) is None:
            raise RuntimeError(f"{self.role} has not ended")
        return End(
            code=code,
            had_new_step=self.had_new_step,
            had_full_disk=self.had_full_disk,
            said=self.last_error()[:_SAID_CHARS],
        )

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def below(self, word: str) -> int | None:
        """The process below this one that has the word in its command line or title."""
        for pid in sorted(process_tree.descendants(self.pid)):
            if word in command_line(pid):
                return pid
        return None


def marked(mark: str) -> list[int]:
    """Live processes whose environment has the mark, read from the kernel; zombies are none."""
    found: list[int] = []
    needle = f"{process_tree.RUN_TAG}={mark}".encode()
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                values = (entry / "environ").read_bytes().split(b"\0")
                if any(v.startswith(needle) for v in values):
                    found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    """A process's arguments and title; empty where it is gone."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{words} {pathlib.Path(f'/proc/{pid}/comm').read_text().strip()}"
    except OSError:
        return ""
