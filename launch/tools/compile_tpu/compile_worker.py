"""Compile worker for TPU topologies, and its virtual environment.

`python -m launch.tools.compile_tpu.compile_worker ANSWER < JOB`, both JSON. The job has `config`, `model` (a
config.json) and `topology`. The answer has `programs` and `state_bytes`, or `error`. Users run
`launch.tools.compile_tpu` instead.
"""

import collections
import fcntl
import hashlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
import venv
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from configs import overrides
from configs.schema import Config
from launch.startup.tiny_model import cache_folder
from launch.supervision import process_tree
from learner.distributed.sharding import AXES, compiler_options, make_mesh, param_shardings, placed
from learner.model.architecture import Architecture
from learner.model.decoder import abstract_params
from learner.update.packing import empty_batch
from learner.update.train_step import TrainStep, build_train_step

_EXTRAS = ("learner", "tpu")


def requirements() -> list[str]:
    """Returns the project's requirements of a learner on a TPU, in pip's format."""
    try:
        declared = metadata.requires("sluice") or []
    except metadata.PackageNotFoundError as e:
        raise ValueError("sluice is not installed in this Python; run bash launch/setup.sh first") from e
    wanted = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        is_ours = requirement.startswith("sluice")
        if not is_ours and (extra is None or extra.group(1) in _EXTRAS):
            wanted.append(requirement.strip())
    return sorted(wanted)


def tpu_python() -> pathlib.Path:
    """Returns the Python of the environment with jax and libtpu, creating it if needed (about a minute).

    The environment is $SLUICE_TPU_VENV, or a cache folder whose name depends on the requirements. Raises ValueError if
    it cannot be created.
    """
    wanted = requirements()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256("\n".join([version, *wanted]).encode()).hexdigest()
    chosen = os.environ.get("SLUICE_TPU_VENV")
    folder = pathlib.Path(chosen).expanduser().absolute() if chosen else cache_folder() / f"tpu-venv-{key[:12]}"
    python, stamp = folder / "bin" / "python", folder / ".sluice-stamp"
    if stamp.is_file() and stamp.read_text().strip() == key:
        return python
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise ValueError(f"{folder} (SLUICE_TPU_VENV) has files but is not a virtual environment; set another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process creates it while others wait
        if not (stamp.is_file() and stamp.read_text().strip() == key):
            print(f"installing jax[tpu] into {folder} (once, about 1 min)", file=sys.stderr, flush=True)
            _make(folder, python, wanted)
            stamp.write_text(f"{key}\n")
    return python


def environment(python: pathlib.Path) -> dict[str, str]:
    """Returns the environment variables with which libtpu compiles without a TPU."""
    library = next((python.parent.parent / "lib").glob("python*/site-packages/libtpu/libtpu.so"), None)
    if library is None:
        raise ValueError(f"{python.parent.parent} has no libtpu; remove the folder and start again")
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "TPU_LIBRARY_PATH": str(library),
        # There is no metadata server, and compiling does not need its answers.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # libtpu's lock protects the chips. Without chips, several compilers may run concurrently.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _make(folder: pathlib.Path, python: pathlib.Path, wanted: list[str]) -> None:
    venv.create(folder, with_pip=True, clear=folder.is_dir())
    log = folder / "install.log"
    with log.open("w") as out:
        done = subprocess.run(
            [str(python), "-P", "-m", "pip", "install", "--progress-bar", "off", *wanted],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        last = next((line for line in reversed(log.read_text().splitlines()) if "ERROR" in line), "see the log")
        raise ValueError(f"installation of jax[tpu] into {folder} failed: {last} (log: {log})")


_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?\("
)


def main() -> None:
    """Reads the job and writes the answer."""
    (file,) = process_tree.arguments(sys.argv, "ANSWER", command="launch.tools.compile_tpu")
    try:
        job = json.load(sys.stdin)
    except ValueError as e:
        process_tree.refuse("launch.tools.compile_tpu", f"expected a job as input, got {e}")
    try:
        answer = measure(job)
    except (ValueError, NotImplementedError) as e:
        answer = {"error": {"kind": "input", "message": str(e)}}
    pathlib.Path(file).write_text(json.dumps(answer))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Compiles every step of the job and collects its requirements; raises ValueError for invalid input."""
    config = overrides.from_dict(job["config"])
    mesh = topology_mesh(job["topology"], config)
    model = Architecture.from_hf(job["model"])
    steps = build_train_step(model, config, mesh)
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
    """Returns the config's mesh over the chips of a slice, ordered along its links as on hardware.

    Raises ValueError if libtpu does not know the topology, or the mesh has another number of chips.
    """
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as e:  # libtpu's own errors have no common type
        raise ValueError(f"libtpu does not support the topology {topology!r}: {str(e).splitlines()[0]}") from e
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
    """Counts the collective instructions in HLO text by kind; the body of a loop counts once."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def state_bytes(steps: TrainStep, config: Config) -> dict[str, int]:
    """Returns the bytes per chip of the parts of the state and of a batch, without tile padding."""
    state = steps.abstract_state()

    def size(tree: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.shape
        )

    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    teachers = [
        abstract_params(Architecture.from_hf(folder), config.model.compute_dtype)
        for _, folder in config.loss.teacher_folders.values()
    ]
    batch = sum(x.nbytes for x in jax.tree.leaves(empty_batch(config.packing, steps.routing)))
    return {
        "parameters": size(state.params),
        "optimizer": size(state.opt_state),
        "accumulator": size(state.accumulator),
        "base": size(steps.abstract_base()),
        # With adapters the reference is the base and needs no extra memory. Only a separate reference model does.
        "reference": size(steps.abstract_base()) if steps.needs.reference and config.loss.reference_path else 0,
        "teachers": size(placed(teachers, [param_shardings(params, mesh) for params in teachers])),
        "batch": batch // (config.mesh.batch_shards * config.mesh.sequence),
    }


if __name__ == "__main__":
    main()
