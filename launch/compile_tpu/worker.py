"""Compiles the learner's steps for a TPU slice and measures the programs; runs where libtpu is.

`python -m launch.compile_tpu.worker ANSWER < JOB`, both JSON. The job holds `config`, `model` (a config.json) and
`topology`; the answer `programs` and `state_bytes`, or `error`. `launch.compile_tpu` is the command for people.
"""

import collections
import json
import math
import pathlib
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from configs import overrides
from configs.schema import Config
from launch.processes import by_hand
from learner.devices.compiler_options import compiler_options
from learner.devices.mesh import AXES, make_mesh
from learner.model.config import Architecture
from learner.update.packing import empty_batch
from learner.update.step import Steps, build_steps

_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?\("
)


def main() -> None:
    """Reads the job, writes the answer."""
    (file,) = by_hand.arguments(sys.argv, "ANSWER", command="launch.compile_tpu")
    try:
        job = json.load(sys.stdin)
    except ValueError as e:
        by_hand.refuse("launch.compile_tpu", f"its input is no job ({e})")
    try:
        answer = measure(job)
    except (ValueError, NotImplementedError) as e:
        answer = {"error": {"kind": "input", "message": str(e)}}
    pathlib.Path(file).write_text(json.dumps(answer))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Compiles every step of the job and adds up what it needs.

    Raises:
      ValueError: a topology, mesh or model that doesn't fit together.
    """
    config = overrides.from_dict(job["config"])
    mesh = topology_mesh(job["topology"], config)
    model = Architecture.from_hf(job["model"])
    steps = build_steps(model, config, mesh)
    options = (compiler_options(mesh) or {}) | (job.get("compiler_options") or {})
    answer: dict[str, Any] = {
        "device_kind": mesh.devices.flat[0].device_kind,
        "num_chips": mesh.devices.size,
        "remat": steps.remat,
        "state_bytes": state_bytes(steps, config),
        "programs": {},
    }
    for name, lowered in steps.lower().items():
        start = time.monotonic()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            return answer | {"error": {"kind": "memory", "program": name, "message": str(e)}}
        text = compiled.as_text() or ""
        if job.get("dump"):
            (pathlib.Path(job["dump"]) / f"{name}.hlo").write_text(text)
        answer["programs"][name] = program(compiled, text) | {"compile_s": time.monotonic() - start}
    return answer


def topology_mesh(topology: str, config: Config) -> Mesh:
    """The config's mesh over the chips of a slice, ordered along its links as on the real one.

    Raises:
      ValueError: libtpu doesn't know the topology, or the mesh has another number of chips.
    """
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as e:  # libtpu's own errors have no common type
        raise ValueError(f"libtpu doesn't know the topology {topology!r}: {str(e).splitlines()[0]}") from e
    sizes = config.mesh.axes
    shape = tuple(sizes[axis] for axis in AXES)
    if math.prod(shape) == len(devices):
        devices = list(jax.make_mesh(shape, AXES, devices=devices).devices.flat)
    return make_mesh(**sizes, devices=devices)


def program(compiled: Any, text: str) -> dict[str, Any]:
    """Returns a compiled program's memory and work per chip as plain numbers; XLA counts the body of a loop once."""
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in _MEMORY},
        "collectives": count_collectives(text),
        "xla": {key: costs.get(key) for key in ("flops", "bytes accessed")},
    }


def count_collectives(text: str) -> dict[str, int]:
    """Counts the collective instructions of a program's HLO text by kind, the body of a loop once."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def state_bytes(steps: Steps, config: Config) -> dict[str, int]:
    """Bytes a chip of the state's parts and of a batch, without the padding of tiles."""
    state = steps.abstract_state()

    def size(tree: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.shape
        )

    batch = sum(x.nbytes for x in jax.tree.leaves(empty_batch(config.packing)))
    return {
        "parameters": size(state.params),
        "optimizer": size(state.opt_state),
        "accumulator": size(state.accumulator),
        "base": size(steps.abstract_base()),
        # With adapters a reference is the base, and takes nothing more; one of its own is another model.
        "reference": size(steps.abstract_base()) if steps.needs.reference and config.loss.reference_path else 0,
        "batch": batch // (config.mesh.batch_shards * config.mesh.sequence),
    }


if __name__ == "__main__":
    main()
