"""Process group that its supervisor treats as one process: members start and restart together."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bridge.liveness import Activity
from launch import cli

TOGETHER_S = 15.0
"""Seconds for the other members to exit by themselves after one has died, because only they know their state."""


class NodeLostError(Exception):
    """The machine or resource of a process is gone. Its `returncode` reports that, and its next start is elsewhere."""


class Process(Protocol):
    """Interface of a supervisor to a role of the run; `Child` implements it on this machine."""

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
    """Processes of one role, led by the first one; itself a `Process`."""

    def __init__(
        self,
        role: str,
        members: Sequence[Process],
        *,
        meeting: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the group without starting it.

        `meeting` is called before each start and returns the coordinator's host:port. On its NodeLostError the first
        member counts as dead.
        """
        self.role, self._members, self._meeting, self._clock = role, members, meeting, clock
        self.num_restarts = self.num_restarts_in_a_row = 0
        self._broken_s: float | None = None
        """Time at which a member was first seen dead."""

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.role

    @property
    def hung(self) -> str:
        """Name of the first hung member and the evidence; empty if none hung."""
        return next((f"{m.name}: {m.hung}" for m in self._members if m.hung), "")

    @property
    def doing(self) -> Activity:
        """Activity of the first member, because only the leader waits for actors."""
        return self._members[0].doing

    @property
    def returncode(self) -> int | None:
        """0 once the first member succeeds; the code of the root cause once a failed group has exited or timed out."""
        codes = [m.returncode for m in self._members]
        if codes[0] == 0:
            return 0
        if not any(codes):  # no member failed, so the others continue
            return None
        now_s = self._clock()
        self._broken_s = now_s if self._broken_s is None else self._broken_s
        if None in codes and now_s - self._broken_s < TOGETHER_S:
            return None
        return self._root_cause_member().returncode

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts all members, or none if the first one's node is lost, which later restarts the group."""
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
        """Kills every hung member, which breaks the group; returns True if any hung."""
        return any([m.end_if_hung() for m in self._members])

    def request_stop(self) -> None:
        """Requests a stop of all members, which agree on the step."""
        for member in self._members:
            member.request_stop()

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        """Waits for all members until `is_over` returns True, then kills them and their children."""
        for member in self._members:
            member.kill_after(is_over)

    def kill(self) -> None:
        """Kills all members and their children."""
        for member in self._members:
            member.kill()

    def describe(self) -> str:
        """Returns the status of the first member, the number of live others, and each dead one."""
        others = self._members[1:]
        dead = [f"{m.name} {m.describe()}" for m in others if m.returncode is not None]
        return ", ".join([f"{self._members[0].describe()}, {len(others) - len(dead)} of {len(others)} others", *dead])

    def last_error(self) -> str:
        """Returns the name and error line of the root cause."""
        one = self._root_cause_member()
        return f"{one.name}: {one.last_error()}"

    def _root_cause_member(self) -> Process:
        """Returns the member with the likeliest cause; JAX aborts the surviving members by SIGABRT."""

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
