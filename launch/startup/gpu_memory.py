"""GPU memory shared by learner and engine: each reserves its share at startup, and the shares must fit.

JAX reserves a share of the GPU before it computes, vLLM one for weights and KV cache, and a colocated judge a third.
"""

import os
from collections.abc import Mapping

from configs.schema import Config
from launch.supervision.placement import Machine, Placement

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
FRACTION, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
"""JAX's own variables, which override `learner.gpu_memory_fraction`."""
IN_TURNS = {ALLOCATOR: "platform", PREALLOCATE: "false"}
"""Variables of a process that has all memory of its devices in turns: JAX returns what it frees to the device."""
MOST = 0.95
"""Maximum share of a GPU's memory reserved by its processes. CUDA contexts need memory in addition to these shares."""


def reserve(config: Config, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that limit the learner to its memory share; set them before JAX is imported.

    With actor.colocated it has all memory in its turns.
    """
    if config.actor.colocated:
        return IN_TURNS
    if FRACTION in environment or PREALLOCATE in environment:
        return {}
    return {FRACTION: f"{config.learner.gpu_memory_fraction:g}"}


def check_shared(
    config: Config, placement: Placement, machine: Machine, environment: Mapping[str, str] = os.environ
) -> None:
    """Checks that the memory shares of learner and engines fit into each shared GPU.

    There is no check if the learner's `environment` selects the CPU or preallocates nothing. An empty device list
    stands for all devices of `machine`. Raises ValueError that names the fields to set.
    """
    if config.actor.colocated:
        return
    if environment.get("JAX_PLATFORMS", "").strip() == "cpu" or environment.get(PREALLOCATE, "").lower() == "false":
        return
    learners = float(environment.get(FRACTION) or config.learner.gpu_memory_fraction)
    judge_share = config.judge.engine_settings.gpu_memory_utilization
    engines = config.actor.gpu_memory_utilization + judge_share * config.judge.colocate
    for device in placement.learner or machine.gpus:
        names = [f"actor-{i}" for i, e in enumerate(placement.engines) if device in (e.devices or machine.gpus)]
        if names and round(learners + len(names) * engines, 6) > MOST:
            share = int(100 * MOST / (1 + len(names))) / 100
            judge = f" and judge.engine.gpu_memory_utilization={judge_share:g}" if config.judge.colocate else ""
            raise ValueError(
                f"learner and {' and '.join(names)} share device {device}: learner.gpu_memory_fraction={learners:g} "
                f"and actor.gpu_memory_utilization={config.actor.gpu_memory_utilization:g}{judge} must be at most "
                f"{MOST:g} together; set both, as in --config.learner.gpu_memory_fraction={share:g} "
                f"--config.actor.gpu_memory_utilization={share:g}, or give each its own devices (mesh.devices, "
                "actor.devices)"
            )
