"""The run's processes on a Ray cluster."""

import os
import pathlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions
from rich.console import Console

from bridge.secrets import CA, CERTIFICATE, KEY, TOKEN_FILE
from configs import extension
from configs.run_folder import RunFolder
from configs.schema import Config
from launch.crew import actor_bounds, learner_bounds, run_mark, with_cpu_devices
from launch.processes.group import Group, LostError, Process
from launch.ray.berths import LearnerBerths, Place, check_hosts
from launch.ray.remote_child import RemoteChild, answered
from launch.ray.resources import Kind, of_actor, of_learner
from launch.ray.station import HERE
from launch.trust import allowing

SECRET_FILES = (TOKEN_FILE, CERTIFICATE, KEY, CA, "PGPASSFILE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY")
"""Name files, which each node must have; nothing of what is in them passes through the cluster."""


class RayCrew:
    """Learner processes and actors, each at a `Station` on a node that has what it asks for."""

    def __init__(
        self,
        config: Config,
        folder: pathlib.Path,
        *,
        learner_on: Kind,
        actors_on: Kind,
        actor_store: str,
        place_s: float,
        console: Console | None,
    ) -> None:
        """Starts nothing, and asks the cluster for nothing.

        Args:
          config: the run's; its store is a database, and its weights are served to other machines.
          folder: the run's, in which the driver and all of the learner's nodes see the same files.
          learner_on: what the learner's processes compute on.
          actors_on: what engines compute on.
          actor_store: the store's URL as actors reach it, in their role.
          place_s: how long the cluster may take to find places.
          console: where the processes' logs are shown besides; None: nowhere.

        Raises:
          ValueError: the config can't be spread so.
        """
        if learner_on.device == "tpu":
            check_hosts(learner_on, config.learner.num_processes)
        self._config, self._run, self._folder = config, RunFolder(folder), folder
        self._learner_on, self._place_s, self._console = learner_on, place_s, console
        self._actor_store = actor_store
        self._learner_asked, self._actor_asked = of_learner(config, learner_on), of_actor(config, actors_on)
        self._mark = run_mark(folder)
        self._berths: LearnerBerths | None = None
        self._is_over: Callable[[], bool] = lambda: False
        self._learners = [self._learner(i) for i in range(config.learner.num_processes)]
        self.learner: Process = (
            Group("learner", self._learners, meeting=self._meeting) if len(self._learners) > 1 else self._learners[0]
        )
        self.actors: Sequence[Process] = [self._actor(i) for i in range(config.actor.num_engines)]

    def open(self, is_over: Callable[[], bool]) -> list[str]:
        """Takes the learner's nodes, all or none, and sees that they have the run's folder.

        A TPU slice is looked for by Ray itself, which does not look at `is_over` meanwhile.

        Raises:
          TimeoutError: the cluster has no place for all of the learner.
          InterruptedError: `is_over`.
          OSError: one of its nodes does not see the run's folder.
        """
        self._is_over = is_over
        count = len(self._learners)
        name = f"sluice-{self._config.run.name}-learner"
        end_s = time.monotonic() + self._place_s
        try:
            self._berths = LearnerBerths(self._learner_on, self._learner_asked, count, name=name, place_s=self._place_s)
            answered(self._berths.group.ready(), wait_s=max(0.0, end_s - time.monotonic()), is_over=is_over)
        except ray.exceptions.RayError as e:
            raise OSError(f"the cluster gave the learner no place: {extension.one_line(e)}") from e
        except TimeoutError:
            raise TimeoutError(
                f"the cluster has no place for the learner, {count} x ({self._learner_asked}), within "
                f"{self._place_s:.0f} s; it has {_has()} in all"
            ) from None
        return [*self._check_folder(), f"the learner has {count} x ({self._learner_asked})"]

    def close(self) -> None:
        """Gives the learner's nodes back; each station has removed what was of its process."""
        if self._berths is not None:
            self._berths.close()

    def _learner(self, index: int) -> RemoteChild:
        role = f"learner-{index}" if index else "learner"
        alone = ["--num_processes=1"] * (self._config.learner.num_processes == 1)
        return RemoteChild(
            role,
            [f"--run_dir={self._folder}", *alone],
            self._run.log(role),
            berth=_Late(lambda: self._learner_place(role, index), str(self._learner_asked)),
            place_s=self._place_s,
            console=self._console,
        )

    def _learner_place(self, role: str, index: int) -> Place:
        assert self._berths is not None, "open comes first"
        return Place(
            role,
            self._learner_asked,
            mark=f"{self._mark}{role}",
            bounds=learner_bounds(self._config),
            stop_s=self._config.supervision.stop_s,
            files=_secret_files(),
            environment=self._devices(),
            runtime=_runtime(),
            group=self._berths.group,
            index=index,
        )

    def _devices(self) -> dict[str, str]:
        """What makes a process without accelerators show as many devices as it has of the mesh."""
        count = self._config.learner.num_processes
        if self._learner_on.device != "cpu" or count == 1:
            return {}
        return with_cpu_devices(self._config.mesh.num_devices // count, os.environ)

    def _actor(self, index: int) -> RemoteChild:
        role = f"actor-{index}"
        return RemoteChild(
            role,
            [
                f"--store={self._actor_store}",
                f"--run={self._config.run.name}",
                f"--limits={HERE}/limits.json",
                f"--work_dir={HERE}/work",
                "--leave_s=0",
                "--wait_for_learner",
                *allowing(self._config),
            ],
            self._run.log(role),
            berth=Place(
                role,
                self._actor_asked,
                mark=f"{self._mark}{role}",
                bounds=actor_bounds(self._config),
                stop_s=self._config.supervision.stop_s,
                files=_secret_files(),
                environment={},
                runtime=_runtime(),
            ),
            place_s=float("inf"),  # the run goes on with those that have one
            console=self._console,
        )

    def _meeting(self) -> str:
        """host:port at the first process's node."""
        first = self._learners[0]
        _, address, _ = first.ask(lambda station: station.where.remote(), self._is_over)
        return f"{address}:{first.ask(lambda station: station.free_port.remote(), self._is_over)}"

    def _check_folder(self) -> list[str]:
        """Puts a file into the run's folder, and has each of the learner's nodes read it."""
        proof, content = self._folder / f".shared-{secrets.token_hex(8)}", secrets.token_bytes(16)
        proof.write_bytes(content)
        said: list[str] = []
        try:
            for one in self._learners:
                try:
                    host, address, _ = one.ask(lambda station: station.where.remote(), self._is_over)
                    is_seen = one.ask(lambda station: station.sees.remote(str(proof), content), self._is_over)
                except LostError as e:
                    said.append(str(e))  # its start is elsewhere
                    continue
                if not is_seen:
                    raise OSError(
                        f"node {host} ({address}) does not see {self._folder}: give --config.run.dir a folder that "
                        "the driver and all of the learner's nodes share"
                    )
                said.append(f"{one.role} is on {host} ({address})")
        finally:
            proof.unlink()
        return said


class _Late:
    """A berth whose place is known once the learner's nodes are taken."""

    def __init__(self, place, asked: str) -> None:
        self._place, self._asked = place, asked

    def take(self) -> Any:
        return self._place().take()

    def __str__(self) -> str:
        return self._asked


def _secret_files() -> dict[str, str]:
    """The names of files with secrets, as they are here; a node that has its own keeps them."""
    return {name: os.environ[name] for name in SECRET_FILES if name in os.environ}


def _runtime() -> dict[str, Any]:
    """Where a node's Python finds the project, if it isn't installed there: at the same place as here."""
    return {"env_vars": {"PYTHONPATH": extension.python_path()}}


def _has() -> str:
    found = ray.cluster_resources()
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU"))
