"""Ray backend and placement groups."""

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
from launch.supervision.backend import NodeLostError, Process, ProcessGroup, hang_timeouts, run_tag, with_cpu_devices
from launch.supervision.hang_detector import HangTimeouts


class LearnerPlacementGroup:
    """Placement group with one bundle per learner process, on separate nodes if there are enough.

    A TPU group is a whole slice. Ray re-places the bundles of a dead node.
    """

    def __init__(
        self, kind: DeviceKind, asked: ResourceRequest, count: int, *, name: str, placement_timeout_s: float
    ) -> None:
        """Requests the group. Waits for a TPU slice; otherwise `group` may still be pending.

        Raises TimeoutError if no slice was free within `placement_timeout_s`, and OSError if Ray has no such slice.
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
        """Releases all bundles."""
        if self._slice is not None:
            self._slice.shutdown()
        else:
            remove_placement_group(self.group)


def check_hosts(kind: DeviceKind, count: int) -> None:
    """Raises ValueError if the number of processes differs from the hosts of the TPU slice, or the slice is unknown."""
    from ray.util.tpu import get_tpu_worker_resources

    num_hosts, _ = get_tpu_worker_resources(topology=kind.topology, accelerator_type=kind.accelerator)
    if num_hosts != count:
        raise ValueError(
            f"learner.num_processes: a {kind.accelerator} slice of {kind.topology} has {num_hosts} hosts; set "
            f"learner.num_processes={num_hosts}, one per host"
        )


SECRET_FILES = (TOKEN_FILE, CERTIFICATE, KEY, CA, "PGPASSFILE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY")
"""Variables that name secret files, which each node must have; their content never passes through the cluster."""


class RayBackend:
    """Backend with every learner process and actor in a `NodeAgent` on a node with the requested resources."""

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
        """Prepares the processes without contacting the cluster.

        The driver and all learner nodes share the run folder. `actor_store` is the store URL with the actors' role. The
        processes' logs also go to `console`, if any. Raises ValueError if the learner's processes do not match the
        slice, or the devices do not fit the config.
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
        """Reserves all of the learner's nodes and checks that they share the run's folder.

        While Ray searches a TPU slice it does not poll `is_over`. Raises TimeoutError if the cluster cannot place the
        whole learner, and OSError if a node does not see the run's folder.
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
            raise OSError(f"placing the learner on the cluster failed: {custom_functions.first_line(e)}") from e
        except TimeoutError:
            raise TimeoutError(
                f"timed out after {self._placement_timeout_s:.0f} s waiting for resources for the learner, "
                f"{count} x ({self._learner_asked}); the cluster has {_has()}"
            ) from None
        return [*self._check_folder(), f"learner placed: {count} x ({self._learner_asked})"]

    def close(self) -> None:
        """Releases the learner's nodes; each agent has already cleaned up its own node."""
        if self._placement_group is not None:
            self._placement_group.close()

    def _learner(self, index: int) -> RemoteProcess:
        role = f"learner-{index}" if index else "learner"
        alone = ["--num_processes=1"] * (self._config.learner.num_processes == 1)
        return RemoteProcess(
            role,
            [f"--run_dir={self._folder}", *alone],
            self._run.log(role),
            take=lambda: self._learner_agent(role, index),
            asked=str(self._learner_asked),
            placement_timeout_s=self._placement_timeout_s,
            console=self._console,
        )

    def _learner_agent(self, role: str, index: int) -> Any:
        assert self._placement_group is not None, "open() must be called first"
        place = PlacementGroupSchedulingStrategy(self._placement_group.group, placement_group_bundle_index=index)
        bounds, environment = hang_timeouts(self._config, of_actor=False), self._devices()
        return self._agent(role, self._learner_asked, place, bounds=bounds, environment=environment)

    def _agent(
        self, role: str, asked: ResourceRequest, place: Any, *, bounds: HangTimeouts, environment: Mapping[str, str]
    ) -> Any:
        """Creates the `NodeAgent` of a process, at a place by a scheduling strategy of Ray."""
        of_agent = ray.remote(NodeAgent).options(
            num_cpus=asked.num_cpus,
            num_gpus=asked.num_gpus,
            resources={n: v for n, v in asked.bundle().items() if n not in ("CPU", "GPU")},
            scheduling_strategy=place,
            max_restarts=0,  # the supervisor restarts it and counts restarts
            # A node without an installation finds the project at the driver's path.
            runtime_env={"env_vars": {"PYTHONPATH": custom_functions.python_path()}},
        )
        return of_agent.remote(
            role=role,
            mark=f"{self._mark}{role}",
            bounds=bounds,
            stop_s=self._config.supervision.shutdown_grace_s,
            files={name: os.environ[name] for name in SECRET_FILES if name in os.environ},
            environment=dict(environment),
        )

    def _devices(self) -> dict[str, str]:
        """Returns the variables that give a CPU process its share of the mesh's devices."""
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
                "--wait_for_learner",
                *allowing(self._config),
            ],
            self._run.log(role),
            take=lambda: self._agent(
                role, self._actor_asked, "SPREAD", bounds=hang_timeouts(self._config, of_actor=True), environment={}
            ),
            asked=str(self._actor_asked),
            placement_timeout_s=float("inf"),  # the run continues with the actors that have a node
            console=self._console,
        )

    def _meeting(self) -> str:
        first = self._learners[0]
        _, address, _ = first.ask(lambda node_agent: node_agent.where.remote(), self._is_over)
        return f"{address}:{first.ask(lambda station: station.free_port.remote(), self._is_over)}"

    def _check_folder(self) -> list[str]:
        """Checks that each learner node can read a new file in the run's folder; returns messages."""
        proof, content = self._folder / f".shared-{secrets.token_hex(8)}", secrets.token_bytes(16)
        proof.write_bytes(content)
        said: list[str] = []
        try:
            for one in self._learners:
                try:
                    host, address, _ = one.ask(lambda node_agent: node_agent.where.remote(), self._is_over)
                    is_seen = one.ask(lambda node_agent: node_agent.sees.remote(str(proof), content), self._is_over)
                except NodeLostError as e:
                    said.append(str(e))  # it will start on another node
                    continue
                if not is_seen:
                    raise OSError(
                        f"node {host} ({address}) cannot read {self._folder}: set --config.run.dir to a folder "
                        "shared by the driver and all learner nodes"
                    )
                said.append(f"{one.role} is on {host} ({address})")
        finally:
            proof.unlink()
        return said


def _has() -> str:
    found = ray.cluster_resources()
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU"))
