"""Compiles the learner's steps for a TPU slice and measures the programs; runs where libtpu is.

`python -m launch.compile_tpu.worker ANSWER < JOB`, both JSON. The job holds `config`, `model` (a config.json) and
`topology`; the answer `programs` and `state_bytes`, or `error`. `launch.compile_tpu` is the command for people.
"""

import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from configs import overrides
from configs.schema import Config
from launch.compile_tpu.estimate import micro_batch_lengths
from launch.processes import by_hand
from learner.costs import hlo, hlo_costs
from learner.costs.flops import TPU_CHIPS
from learner.devices.compiler_options import compiler_options
from learner.devices.mesh import AXES, make_mesh
from learner.model.config import Architecture
from learner.update.loss_sum import default_logit_chunk
from learner.update.packing import empty_batch
from learner.update.step import Steps, build_steps

_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


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
    chunk = config.model.logit_chunk_tokens or default_logit_chunk(model, mesh)
    options = (compiler_options(mesh) or {}) | (job.get("compiler_options") or {})
    num_chunks = head_chunks(config, chunk)
    links = Links(job["topology"].partition(":")[0], mesh)
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
        answer["programs"][name] = program(compiled, text, links, num_chunks) | {"compile_s": time.monotonic() - start}
    return answer


def head_chunks(config: Config, chunk: int) -> int:
    """How often the one loop runs whose bound is data: over the trained tokens of a chip, a chunk at a time."""
    _, scored, _ = micro_batch_lengths(config)
    return math.ceil(scored / (config.mesh.batch_shards * config.mesh.sequence) / chunk)


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


@dataclasses.dataclass(frozen=True)
class Links:
    """The interconnect between the chips of a mesh."""

    family: str
    mesh: Mesh

    def bytes_per_s(self, group: tuple[int, ...]) -> float:
        """What a chip can send to the others of a group at most: by the links in the dims that the group spans.

        A dim counts two links where the group closes a ring in it (a v5p dim of a multiple of 4 wraps around,
        a v5e or v6e dim of 16), else one.
        """
        chip = TPU_CHIPS[self.family]
        everywhere = [d.coords for d in self.mesh.devices.flat]
        coords = [everywhere[i] for i in group] or everywhere
        num_links = 0
        for dim in range(chip.torus_dims):
            size = len({c[dim] for c in everywhere})
            wraps = size % 4 == 0 if self.family == "v5p" else size == 16
            spanned = len({c[dim] for c in coords})
            num_links += 0 if spanned == 1 else 2 if wraps and spanned == size else 1
        return chip.ici_bytes_per_s / (2 * chip.torus_dims) * max(num_links, 1)


def program(compiled: Any, text: str, links: Links, dynamic_trips: int) -> dict[str, Any]:
    """One compiled program's memory and work a chip, as plain numbers."""
    memory = compiled.memory_analysis()
    costs = hlo_costs.costs(hlo.parse(text), dynamic_trips=dynamic_trips)
    analysis = compiled.cost_analysis() or {}
    collectives = [
        dataclasses.asdict(c) | {"sent_bytes": c.sent_bytes, "seconds": c.sent_bytes / links.bytes_per_s(c.group)}
        for c in costs.collectives
        if c.group_size > 1
    ]
    return {
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in _MEMORY},
        "matmul_flops": costs.matmul_flops,
        "hbm_bytes": costs.hbm_bytes,
        "estimated_cycles": costs.estimated_cycles,
        "unknown_loops": list(costs.unknown_loops),
        "kernels": [dataclasses.asdict(k) for k in costs.kernels],
        "collectives": collectives,
        # What XLA says of itself; it counts the body of a loop once.
        "xla": {k: analysis.get(k) for k in ("flops", "bytes accessed", "optimal_seconds")},
    }


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
