"""Where the run's processes may be: the learner's as one group, all or none; each actor by itself."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.processes.vigil import Bounds
from launch.ray.resources import Asked, Kind
from launch.ray.station import Station


class LearnerBerths:
    """A placement group with a bundle for each of the learner's processes, on nodes of their own if there are enough.

    Of a TPU the group is a whole slice. Ray looks for other nodes for the bundles of one that died.
    """

    def __init__(self, kind: Kind, asked: Asked, count: int, *, name: str, place_s: float) -> None:
        """Asks for all of it; of a TPU it waits until a slice is found, `group` is for waiting for its nodes.

        Raises:
          TimeoutError: no slice was free within `place_s`.
          OSError: Ray has no such slice.
        """
        self._slice: Any = None
        if kind.device == "tpu":
            from ray.util.tpu import slice_placement_group

            try:
                self._slice = slice_placement_group(
                    kind.topology, kind.accelerator, name=name, head_reservation_timeout_s=place_s
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


def check_hosts(kind: Kind, count: int) -> None:
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


class Place:
    """Of one process; see `launch.ray.remote_child.Berth`."""

    def __init__(
        self,
        role: str,
        asked: Asked,
        *,
        mark: str,
        bounds: Bounds,
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
          mark: see `Station`.
          bounds: see `Station`.
          stop_s: see `Station`.
          files: see `Station`.
          environment: see `Station`.
          runtime: Ray's runtime environment of the station.
          group: the placement group it belongs to.
          index: its bundle there.
        """
        self._asked, self._group, self._index, self._runtime = asked, group, index, dict(runtime)
        told = {"files": dict(files), "environment": dict(environment)}
        self._made_of: dict[str, Any] = {"role": role, "mark": mark, "bounds": bounds, "stop_s": stop_s, **told}

    def take(self) -> Any:
        """See `Berth`."""
        resources = {n: v for n, v in self._asked.bundle().items() if n not in ("CPU", "GPU")}
        where = (
            PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=self._index)
            if self._group is not None
            else "SPREAD"
        )
        return (
            ray.remote(Station)
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
