"""Backends: interface to the processes of a run that a supervisor starts, watches and stops."""

import os
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch.supervision.child import Child
from launch.supervision.hang_detector import HangTimeouts
from launch.supervision.placement import EnginePlace, Machine, place
from launch.supervision.process_group import Process, ProcessGroup
from launch.supervision.process_tree import kill_leftovers
from launch.supervision.snapshot_cleanup import CleanupProcess, remove_snapshots

CPU_DEVICES = "--xla_force_host_platform_device_count"
"""XLA flag that sets the number of CPU devices."""


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
            bounds=learner_bounds(self._config),
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
            bounds=actor_bounds(self._config),
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


def learner_bounds(config: Config) -> HangTimeouts:
    """Returns the hang timeouts of a learner."""
    return _bounds(
        config,
        start_timeout_s=config.supervision.start_timeout_s,
        progress_timeout_s=config.supervision.progress_timeout_s,
    )


def actor_bounds(config: Config) -> HangTimeouts:
    """Returns the hang timeouts of an actor, which exits by itself at its earlier startup deadline."""
    return _bounds(
        config,
        start_timeout_s=config.supervision.start_timeout_s + config.supervision.heartbeat_timeout_s,
        progress_timeout_s=config.supervision.engine_timeout_s,
    )


def _bounds(config: Config, *, start_timeout_s: float, progress_timeout_s: float) -> HangTimeouts:
    limits = config.supervision
    return HangTimeouts(
        first_heartbeat_timeout_s=limits.first_heartbeat_timeout_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        start_timeout_s=start_timeout_s,
        progress_timeout_s=progress_timeout_s,
    )
