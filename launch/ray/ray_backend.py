"""`RayBackend` and placement groups."""

import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from bridge.credentials import CA, CERTIFICATE, KEY, TOKEN_FILE
from configs import custom_functions
from configs.run_folder import RunFolder
from configs.schema import Config
from launch.ray.node_agent import HERE, NodeAgent
from launch.ray.remote_process import RemoteProcess, answered
from launch.ray.resources import DeviceKind, ResourceRequest, of_actor, of_learner
from launch.startup.join_run import allowing
from launch.supervision.backend import actor_bounds, learner_bounds, run_tag, with_cpu_devices
from launch.supervision.hang_detector import HangTimeouts
from launch.supervision.process_group import NodeLostError, Process, ProcessGroup


class LearnerPlacementGroup:
    """A placement group with a bundle for each of the learner's processes, on nodes of their own if there are enough.

    Of a TPU the group is a whole slice. Ray looks for other nodes for the bundles of one that died.
    """

    def __init__(
        self, kind: DeviceKind, asked: ResourceRequest, count: int, *, name: str, placement_timeout_s: float
    ) -> None:
        """Asks for all of it; of a TPU it waits until a slice is found, `group` is for waiting for its nodes.

        Raises:
          TimeoutError: no slice was free within `placement_timeout_s`.
          OSError: Ray has no such slice.
        """
        self._slice: Any = None
        if kind.device == "tpu":
            from ray.util.tpu import slice_placement_group

            try:
                self._slice = slice_placement_group(
                    kind.topology, kind.accelerator, name=name, head_reservation_timeout_s=placement_timeout_s
                )
            except (ValueError, RuntimeError) as e:
                raise OSError(f"Ray has no {kind.accelerator} slice of {kind.topology}: {e}") from e
            self.group: PlacementGroup = self._slice.placement_group
        else:
            self.group = placement_group([asked.bundle()] * count, strategy="SPREAD", name=name)

    def close(self) -> None:
        """Gives all of it back."""
        if self._slice is not None:
            self._slice.shutdown()
        else:
            remove_placement_group(self.group)


def check_hosts(kind: DeviceKind, count: int) -> None:
    """Refuses another number of processes than a TPU slice has hosts, or a slice that there is none of.

    Raises:
      ValueError: says how many it has.
    """
    from ray.util.tpu import get_tpu_worker_resources

    num_hosts, _ = get_tpu_worker_resources(topology=kind.topology, accelerator_type=kind.accelerator)
    if num_hosts != count:
        raise ValueError(
            f"a {kind.accelerator} slice of {kind.topology} has {num_hosts} hosts: set "
            f"learner.num_processes={num_hosts}, one each"
        )


class PlacementBundle:
    """Of one process; see `launch.ray.remote_process.ProcessLocation`."""

    def __init__(
        self,
        role: str,
        asked: ResourceRequest,
        *,
        mark: str,
        bounds: HangTimeouts,
        stop_s: float,
        files: Mapping[str, str],
        environment: Mapping[str, str],
        runtime: Mapping[str, Any],
        group: PlacementGroup | None = None,
        index: int = 0,
    ) -> None:
        """Takes nothing yet.

        Args:
          role: the process's.
          asked: what it asks for.
          mark: see `NodeAgent`.
          bounds: see `NodeAgent`.
          stop_s: see `NodeAgent`.
          files: see `NodeAgent`.
          environment: see `NodeAgent`.
          runtime: Ray's runtime environment of the station.
          group: the placement group it belongs to.
          index: its bundle there.
        """
        self._asked, self._group, self._index, self._runtime = asked, group, index, dict(runtime)
        told = {"files": dict(files), "environment": dict(environment)}
        self._made_of: dict[str, Any] = {"role": role, "mark": mark, "bounds": bounds, "stop_s": stop_s, **told}

    def take(self) -> Any:
        """See `ProcessLocation`."""
        resources = {n: v for n, v in self._asked.bundle().items() if n not in ("CPU", "GPU")}
        where = (
            PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=self._index)
            if self._group is not None
            else "SPREAD"
        )
        return (
            ray.remote(NodeAgent)
            .options(
                num_cpus=self._asked.num_cpus,
                num_gpus=self._asked.num_gpus,
                resources=resources,
                scheduling_strategy=where,
                max_restarts=0,  # the supervisor starts another one, and counts
                runtime_env=self._runtime,
            )
            .remote(**self._made_of)
        )

    def __str__(self) -> str:
        """What it asks for."""
        return str(self._asked)


SECRET_FILES = (TOKEN_FILE, CERTIFICATE, KEY, CA, "PGPASSFILE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY")
"""Name files, which each node must have; nothing of what is in them passes through the cluster."""


class RayBackend:
    """Learner processes and actors, each at a `NodeAgent` on a node that has what it asks for."""

    def __init__(
        self,
        config: Config,
        folder: pathlib.Path,
        *,
        learner_on: DeviceKind,
        actors_on: DeviceKind,
        actor_store: str,
        placement_timeout_s: float,
        console: Console | None,
    ) -> None:
        """Starts nothing, and asks the cluster for nothing.

        Args:
          config: the run's; its store is a database, and its weights are served to other machines.
          folder: the run's, in which the driver and all of the learner's nodes see the same files.
          learner_on: what the learner's processes compute on.
          actors_on: what engines compute on.
          actor_store: the store's URL as actors reach it, in their role.
          placement_timeout_s: how long the cluster may take to find places.
          console: where the processes' logs are shown besides; None: nowhere.

        Raises:
          ValueError: the config can't be spread so.
        """
        if learner_on.device == "tpu":
            check_hosts(learner_on, config.learner.num_processes)
        self._config, self._run, self._folder = config, RunFolder(folder), folder
        self._learner_on, self._placement_timeout_s, self._console = learner_on, placement_timeout_s, console
        self._actor_store = actor_store
        self._learner_asked, self._actor_asked = of_learner(config, learner_on), of_actor(config, actors_on)
        self._mark = run_tag(folder)
        self._placement_group: LearnerPlacementGroup | None = None
        self._is_over: Callable[[], bool] = lambda: False
        self._learners = [self._learner(i) for i in range(config.learner.num_processes)]
        self.learner: Process = (
            ProcessGroup("learner", self._learners, meeting=self._meeting)
            if len(self._learners) > 1
            else self._learners[0]
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
        end_s = time.monotonic() + self._placement_timeout_s
        try:
            self._placement_group = LearnerPlacementGroup(
                self._learner_on, self._learner_asked, count, name=name, placement_timeout_s=self._placement_timeout_s
            )
            answered(self._placement_group.group.ready(), wait_s=max(0.0, end_s - time.monotonic()), is_over=is_over)
        except ray.exceptions.RayError as e:
            raise OSError(f"the cluster gave the learner no place: {custom_functions.first_line(e)}") from e
        except TimeoutError:
            raise TimeoutError(
                f"the cluster has no place for the learner, {count} x ({self._learner_asked}), within "
                f"{self._placement_timeout_s:.0f} s; it has {_has()} in all"
            ) from None
        return [*self._check_folder(), f"the learner has {count} x ({self._learner_asked})"]

    def close(self) -> None:
        """Gives the learner's nodes back; each station has removed what was of its process."""
        if self._placement_group is not None:
            self._placement_group.close()

    def _learner(self, index: int) -> RemoteProcess:
        role = f"learner-{index}" if index else "learner"
        alone = ["--num_processes=1"] * (self._config.learner.num_processes == 1)
        return RemoteProcess(
            role,
            [f"--run_dir={self._folder}", *alone],
            self._run.log(role),
            location=_LazyPlacement(lambda: self._learner_place(role, index), str(self._learner_asked)),
            placement_timeout_s=self._placement_timeout_s,
            console=self._console,
        )

    def _learner_place(self, role: str, index: int) -> PlacementBundle:
        assert self._placement_group is not None, "open comes first"
        return PlacementBundle(
            role,
            self._learner_asked,
            mark=f"{self._mark}{role}",
            bounds=learner_bounds(self._config),
            stop_s=self._config.supervision.shutdown_grace_s,
            files=_secret_files(),
            environment=self._devices(),
            runtime=_runtime(),
            group=self._placement_group.group,
            index=index,
        )

    def _devices(self) -> dict[str, str]:
        """What makes a process without accelerators show as many devices as it has of the mesh."""
        count = self._config.learner.num_processes
        if self._learner_on.device != "cpu" or count == 1:
            return {}
        return with_cpu_devices(self._config.mesh.num_devices // count, os.environ)

    def _actor(self, index: int) -> RemoteProcess:
        role = f"actor-{index}"
        return RemoteProcess(
            role,
            [
                f"--store={self._actor_store}",
                f"--run={self._config.run.name}",
                f"--limits={HERE}/limits.json",
                f"--work_dir={HERE}/work",
                "--shutdown_grace_s=0",
                "--wait_for_learner",
                *allowing(self._config),
            ],
            self._run.log(role),
            location=PlacementBundle(
                role,
                self._actor_asked,
                mark=f"{self._mark}{role}",
                bounds=actor_bounds(self._config),
                stop_s=self._config.supervision.shutdown_grace_s,
                files=_secret_files(),
                environment={},
                runtime=_runtime(),
            ),
            placement_timeout_s=float("inf"),  # the run goes on with those that have one
            console=self._console,
        )

    def _meeting(self) -> str:
        """host:port at the first process's node."""
        first = self._learners[0]
        _, address, _ = first.ask(lambda node_agent: node_agent.where.remote(), self._is_over)
        return f"{address}:{first.ask(lambda station: station.free_port.remote(), self._is_over)}"

    def _check_folder(self) -> list[str]:
        """Puts a file into the run's folder, and has each of the learner's nodes read it."""
        proof, content = self._folder / f".shared-{secrets.token_hex(8)}", secrets.token_bytes(16)
        proof.write_bytes(content)
        said: list[str] = []
        try:
            for one in self._learners:
                try:
                    host, address, _ = one.ask(lambda node_agent: node_agent.where.remote(), self._is_over)
                    is_seen = one.ask(lambda node_agent: node_agent.sees.remote(str(proof), content), self._is_over)
                except NodeLostError as e:
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


class _LazyPlacement:
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
    return {"env_vars": {"PYTHONPATH": custom_functions.python_path()}}


def _has() -> str:
    found = ray.cluster_resources()
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU"))
