"""Processes of a run that a supervisor starts, watches and stops: their interface, groups, and backends."""

import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bridge.liveness import Activity
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch import cli
from launch.supervision.child import Child
from launch.supervision.hang_detector import HangTimeouts
from launch.supervision.placement import EnginePlace, Machine, place
from launch.supervision.process_tree import kill_leftovers
from launch.supervision.snapshot_cleanup import CleanupProcess, remove_snapshots

CPU_DEVICES = "--xla_force_host_platform_device_count"
"""XLA flag that sets the number of CPU devices."""
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
        """Returns the member with the likeliest cause.

        Order: rejected input, error exit, hang or SIGKILL, other signals, SIGABRT, with which JAX
        aborts the surviving members.
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


class ProcessBackend(Protocol):
    """The run's processes, which start on request."""

    @property
    def learner(self) -> Process:
        """The learner; a process group if it has several processes."""
        ...

    @property
    def actors(self) -> Sequence[Process]:
        """Actors, one per engine, by index."""
        ...

    def open(self, is_over: Callable[[], bool]) -> list[str]:
        """Cleans up after an earlier start before the first process starts; returns messages.

        `is_over` returns True once the run is asked to stop; it is polled during this and later waits. Raises OSError
        if there are no resources for the processes, and InterruptedError if the run was asked to stop.
        """
        ...

    def close(self) -> None:
        """Removes what killed processes left, after all have exited."""
        ...


class LocalBackend:
    """The run's processes on this machine."""

    def __init__(self, config: Config, folder: pathlib.Path, machine: Machine | None = None) -> None:
        """Places the processes on `machine` (None: all visible devices). Raises ValueError if there are too few."""
        placement = place(config, machine or Machine.here())
        self._config, self._run = config, RunFolder(folder)
        self._mark = run_tag(folder)
        self._cleanup: CleanupProcess | None = None
        self.learner = self._learner(folder, placement.learner, placement.helper)
        self.actors = [self._actor(f"actor-{i}", folder, one) for i, one in enumerate(placement.engines)]

    def _learner(self, folder: pathlib.Path, devices: Sequence[str], helper: EnginePlace) -> Process:
        count = self._config.learner.num_processes
        arguments = [f"--run_dir={folder}"]
        if helper.devices:
            arguments.append(f"--helper_devices={','.join(helper.devices)}")
        if helper.cpu_cores:
            arguments.append(f"--helper_cores={helper.cpu_cores}")
        if count == 1:
            # Explicit, because the learner would otherwise detect a surrounding Slurm or MPI job.
            return self._learner_process("learner", [*arguments, "--num_processes=1"], devices, {})
        each = self._config.mesh.num_devices // count
        members = [
            self._learner_process(
                f"learner-{i}" if i else "learner",
                arguments,
                devices[i * each : (i + 1) * each],
                with_cpu_devices(each, os.environ),
            )
            for i in range(count)
        ]
        return ProcessGroup("learner", members, meeting=free_local_address)

    def _learner_process(
        self, role: str, arguments: list[str], devices: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        return Child(
            role,
            arguments,
            self._run.log(role),
            devices=",".join(devices),
            environment=environment,
            mark=f"{self._mark}{role}",
            bounds=hang_timeouts(self._config, of_actor=False),
        )

    def _actor(self, role: str, folder: pathlib.Path, where: EnginePlace) -> Child:
        # The limits file is named by role, so that limits survive the actor's new name after a restart. No grace
        # period, because a finished run discards unfinished work. The learner starts at the same time.
        limits = f"--limits={self._run.limits(role)}"
        arguments = [f"--run_dir={folder}", limits, "--shutdown_grace_s=0", "--wait_for_learner"]
        if where.shares_with:
            arguments.append(f"--shares_devices_with={where.shares_with}")
        return Child(
            role,
            arguments + [f"--cpu_cores={where.cpu_cores}"] * bool(where.cpu_cores),
            self._run.log(role),
            devices=",".join(where.devices),
            mark=f"{self._mark}{role}",
            bounds=hang_timeouts(self._config, of_actor=True),
        )

    def open(self, is_over: Callable[[], bool]) -> list[str]:
        """Kills processes that a killed start of this run left, before their names are claimed.

        This process holds the run's lock, so they cannot belong to a live supervisor.
        """
        del is_over  # nothing here waits long
        self._cleanup = CleanupProcess(self._run.path, snapshot_folder(self._config))
        return [
            f"killed process {one.pid} ({one.title}) of {one.mark.removeprefix(self._mark)}, left by an earlier start "
            "of this run"
            for one in kill_leftovers(lambda mark: mark.startswith(self._mark))
        ]

    def close(self) -> None:
        """Removes shared memory of killed processes, unless a live learner uses it."""
        remove_snapshots(self._run.path, snapshot_folder(self._config))
        if self._cleanup is not None:
            self._cleanup.close()


def run_tag(folder: pathlib.Path) -> str:
    """Returns the prefix of a run's process marks, with the path, because a copied folder has the same run id."""
    return f"{run_id(folder)}:{folder.resolve()}:"


def with_cpu_devices(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that makes XLA show `count` CPU devices, unless XLA_FLAGS already sets a count."""
    flags = environment.get("XLA_FLAGS", "")
    return {} if CPU_DEVICES in flags else {"XLA_FLAGS": f"{flags} {CPU_DEVICES}={count}".strip()}


def free_local_address() -> str:
    """Returns a host:port on this machine that is currently free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def hang_timeouts(config: Config, *, of_actor: bool) -> HangTimeouts:
    """Returns the hang timeouts of a learner, or of an actor, which exits by itself at its earlier startup deadline."""
    limits = config.supervision
    return HangTimeouts(
        first_heartbeat_timeout_s=limits.first_heartbeat_timeout_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        start_timeout_s=limits.start_timeout_s + (limits.heartbeat_timeout_s if of_actor else 0.0),
        progress_timeout_s=limits.engine_timeout_s if of_actor else limits.progress_timeout_s,
    )
