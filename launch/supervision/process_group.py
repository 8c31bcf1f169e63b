"""Processes that are one to their supervisor: they begin together, and when one dies all begin anew."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bridge.liveness import Activity
from launch import cli

TOGETHER_S = 15.0
"""How long the others may take to end by themselves once one has died: it is they who know where they are."""


class NodeLostError(Exception):
    """What a process was to run on is gone. Its `returncode` says so, too, and its next start is elsewhere."""


class Process(Protocol):
    """What a supervisor asks of a role of the run; see `Child`, which is one on this machine."""

    role: str
    num_restarts: int
    num_restarts_in_a_row: int

    @property
    def hung(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def returncode(self) -> int | None: ...  # noqa: D102
    @property
    def doing(self) -> Activity: ...  # noqa: D102
    def start(self, more: Sequence[str] = ()) -> None: ...  # noqa: D102
    def end_if_hung(self) -> bool: ...  # noqa: D102
    def request_stop(self) -> None: ...  # noqa: D102
    def kill_after(self, is_over: Callable[[], bool]) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102
    def describe(self) -> str: ...  # noqa: D102
    def last_error(self) -> str: ...  # noqa: D102


class ProcessGroup:
    """Processes of one role, the first of which leads; a `Process` itself."""

    def __init__(
        self,
        role: str,
        members: Sequence[Process],
        *,
        meeting: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Not started.

        Args:
          role: of all.
          members: by index.
          meeting: called before each start: host:port at which they meet. Its NodeLostError is the first member's,
            which counts as dead from then on.
          clock: monotonic, in seconds.
        """
        self.role, self._members, self._meeting, self._clock = role, members, meeting, clock
        self.num_restarts = self.num_restarts_in_a_row = 0
        self._broken_s: float | None = None
        """When one was first seen dead."""

    @property
    def name(self) -> str:
        """The role's."""
        return self.role

    @property
    def hung(self) -> str:
        """What showed that one hung, and which."""
        return next((f"{m.name}: {m.hung}" for m in self._members if m.hung), "")

    @property
    def doing(self) -> Activity:
        """What the first one does: it alone waits for others' work."""
        return self._members[0].doing

    @property
    def returncode(self) -> int | None:
        """0 once the first one ended well; the telling one's once all have ended, or were given long enough to."""
        codes = [m.returncode for m in self._members]
        if codes[0] == 0:
            return 0
        if not any(codes):  # none ended but well: the others go on
            return None
        now_s = self._clock()
        self._broken_s = now_s if self._broken_s is None else self._broken_s
        if None in codes and now_s - self._broken_s < TOGETHER_S:
            return None
        return self._root_cause_member().returncode

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts all, or none where the first one is lost: then they begin anew as after a death."""
        self._broken_s = None
        try:
            meeting = self._meeting()
        except NodeLostError:
            return
        count = len(self._members)
        for index, member in enumerate(self._members):
            member.num_restarts = self.num_restarts
            member.start([*more, f"--coordinator={meeting}", f"--num_processes={count}", f"--process_id={index}"])

    def end_if_hung(self) -> bool:
        """Looks at each; what hangs is killed, and so breaks the group."""
        return any([m.end_if_hung() for m in self._members])

    def request_stop(self) -> None:
        """All: they agree on where."""
        for member in self._members:
            member.request_stop()

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        """All have until then."""
        for member in self._members:
            member.kill_after(is_over)

    def kill(self) -> None:
        """All, and what they started."""
        for member in self._members:
            member.kill()

    def describe(self) -> str:
        """What the first one does, and how many others live; each that died."""
        others = self._members[1:]
        dead = [f"{m.name} {m.describe()}" for m in others if m.returncode is not None]
        return ", ".join([f"{self._members[0].describe()}, {len(others) - len(dead)} of {len(others)} others", *dead])

    def last_error(self) -> str:
        """Of the one that tells most, and which it is."""
        one = self._root_cause_member()
        return f"{one.name}: {one.last_error()}"

    def _root_cause_member(self) -> Process:
        """Whose end says most: of one that refused or failed, then of one that hung or died, not one it took along.

        JAX aborts those by SIGABRT.
        """

        def rank(member: Process) -> int:
            code = member.returncode
            if code == cli.USAGE_ERROR:
                return 0
            if code is not None and code > 0 and code != cli.BUSY:
                return 1
            if member.hung or code == -9:
                return 2
            if code == -signal.SIGABRT:
                return 4
            return 5 if code in (None, 0) else 3

        return min(self._members, key=rank)
