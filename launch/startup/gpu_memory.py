"""Memory of a GPU that learner and engine share: each reserves its part at the start, and together they must fit.

JAX reserves a share of the GPU before it computes, vLLM one for weights and KV cache, a colocated judge a third one.
"""

import os
from collections.abc import Mapping

from configs.schema import Config
from launch.supervision.placement import Machine, Placement

FRACTION, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
"""JAX's own variables, which go before `learner.gpu_memory_fraction`."""
MOST = 0.95
"""Share of a GPU's memory that its processes may reserve together: each has a context outside its share."""


def reserve(config: Config, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what to set before JAX is loaded, so that the learner reserves its share and no more."""
    if FRACTION in environment or PREALLOCATE in environment:
        return {}
    return {FRACTION: f"{config.learner.gpu_memory_fraction:g}"}


def check_shared(
    config: Config, placement: Placement, machine: Machine, environment: Mapping[str, str] = os.environ
) -> None:
    """Checks that the shares of each GPU that learner and engines have together fit into it.

    Args:
      config: the run's.
      placement: who has which device.
      machine: the devices that an empty list of devices stands for.
      environment: of the learner; one that reserves nothing, or computes on a CPU, is not counted.

    Raises:
      ValueError: they do not; names the two fields to set.
    """
    if environment.get("JAX_PLATFORMS", "").strip() == "cpu" or environment.get(PREALLOCATE, "").lower() == "false":
        return
    learners = float(environment.get(FRACTION) or config.learner.gpu_memory_fraction)
    engines = config.actor.gpu_memory_utilization + config.judge.gpu_memory_utilization * config.judge.colocate
    for device in placement.learner or machine.gpus:
        names = [f"actor-{i}" for i, e in enumerate(placement.engines) if device in (e.devices or machine.gpus)]
        if names and round(learners + len(names) * engines, 6) > MOST:
            share = int(100 * MOST / (1 + len(names))) / 100
            judge = (
                f" and judge.gpu_memory_utilization={config.judge.gpu_memory_utilization:g}"
                if config.judge.colocate
                else ""
            )
            raise ValueError(
                f"learner and {' and '.join(names)} share device {device}: learner.gpu_memory_fraction={learners:g} "
                f"and actor.gpu_memory_utilization={config.actor.gpu_memory_utilization:g}{judge} must be at most "
                f"{MOST:g} together; set both, as in --config.learner.gpu_memory_fraction={share:g} "
                f"--config.actor.gpu_memory_utilization={share:g}, or give each its own devices (mesh.devices, "
                "actor.devices)"
            )
