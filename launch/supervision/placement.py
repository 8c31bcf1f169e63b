"""Placement of the learner and its engines on this machine's devices and cores, and their shares of GPU memory.

With GPUs, a role without explicit devices (`mesh.devices`, `actor.devices`) gets what the other leaves. The learner
takes the first GPUs, as many as its mesh has. Each engine takes the next ones, as many as it can use. A single engine
without free GPUs shares the learner's, and on a machine with one GPU all share it. With actor.colocated the engines
split the learner's GPUs.

Without GPUs, several engines get separate cores, because engines on shared cores slow each other down, mostly during
startup. The learner is not bound to cores.
"""

import contextlib
import dataclasses
import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from actor.vllm.compiler import engine_is_for_cpus
from configs.schema import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
JAX_MEMORY_FRACTION, JAX_PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
"""JAX's own variables, which override `learner.gpu_memory_fraction`."""
JAX_VARIABLES_IN_TURNS = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", JAX_PREALLOCATE: "false"}
"""Variables of a process that has all memory of its devices in turns: JAX returns what it frees to the device."""
MAX_GPU_MEMORY_SHARE = 0.95
"""Maximum share of a GPU's memory reserved by its processes. CUDA contexts need memory in addition to these shares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and cores available for placement."""

    gpus: tuple[str, ...]
    """GPU ids, as in CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...]
    """Cores that this process may run on."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Machine":
        """Returns this machine, limited to what this process may use."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
        if engine_is_for_cpus():  # nothing that is installed here uses them
            gpus = []
        if gpus and VISIBLE in environment:  # CUDA ignores the ids after an invalid one
            named = [d.strip() for d in environment[VISIBLE].split(",")]
            gpus = list(itertools.takewhile(lambda d: d and d != "-1", named))
        return cls(gpus=tuple(gpus), cores=cores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Devices and cores of one engine."""

    devices: tuple[str, ...] = ()
    """Value of CUDA_VISIBLE_DEVICES; empty leaves it unchanged."""
    cpu_cores: str = ""
    """Cores of a CPU engine, in the format of `actor.cpu_cores`; empty leaves the choice to the engine."""
    shares_with: Literal["", "learner", "helper"] = ""
    """Trainer that uses the devices in turns with the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of a run's processes on one machine."""

    learner: tuple[str, ...]
    """Devices of the learner; empty leaves them unchanged."""
    engines: tuple[EnginePlace, ...]

    @property
    def helper(self) -> EnginePlace:
        """Devices and cores of the gradient helper: those of its engines."""
        engines = [engine for engine in self.engines if engine.shares_with == "helper"]
        cores = ",".join(engine.cpu_cores.replace("|", ",") for engine in engines if engine.cpu_cores)
        return EnginePlace(devices=tuple(d for engine in engines for d in engine.devices), cpu_cores=cores)

    def warnings(self, machine: Machine, *, is_colocated: bool = False) -> list[str]:
        """Returns warnings about devices with several owners; with actor.colocated the learner is none."""
        found = []
        for index, place in enumerate(() if is_colocated else self.engines):
            if shared := sorted(set(self.learner or machine.gpus) & set(place.devices or machine.gpus)):
                found.append(
                    f"warning: learner and actor-{index} share device {', '.join(shared)}; assign separate "
                    "devices (mesh.devices, actor.devices), or lower actor.gpu_memory_utilization"
                )
        owners: dict[str, list[str]] = {}
        for index, place in enumerate(self.engines):
            for device in place.devices:
                owners.setdefault(device, []).append(f"actor-{index}")
        found += [f"warning: {' and '.join(names)} share device {d}" for d, names in owners.items() if len(names) > 1]
        return found


def place(config: Config, machine: Machine) -> Placement:
    """Assigns devices and cores to the learner and the engines; raises ValueError if there are too few devices."""
    learner = _ids(config.mesh.devices)
    if config.loss.is_supervised:
        learner = learner or tuple(machine.gpus[: config.mesh.num_devices])
        _check_mesh(config, learner)
        return Placement(learner=learner, engines=())
    if config.actor.devices:
        groups: Sequence[tuple[str, ...]] = config.actor.device_groups
        learner = learner or _left_by_engines(config, machine.gpus)
    elif machine.gpus and config.actor.colocated:
        learner = learner or tuple(machine.gpus[: config.mesh.num_devices])
        groups = _shared(config, learner, machine.gpus)
    elif machine.gpus:
        learner, groups = _split(config, machine.gpus, learner)
    else:
        groups = [()] * config.actor.num_engines
    cores = _cores(config, machine)
    num_serving = config.actor.num_engines - config.helpers.num_engines
    if num_serving < 1:
        raise ValueError(
            f"helpers.num_engines ({config.helpers.num_engines}) must be below actor.num_engines "
            f"({config.actor.num_engines}): the other engines finish the round"
        )
    of_helper = [d for group in groups[num_serving:] for d in group]
    others = {*learner, *(d for group in groups[:num_serving] for d in group)}
    if shared := sorted({d for d in of_helper if d in others or of_helper.count(d) > 1}):
        raise ValueError(
            f"helpers.num_engines: device {', '.join(shared)} of the last {config.helpers.num_engines} engines must be "
            "theirs alone, since the helper uses all of its memory in turns; set actor.devices and mesh.devices"
        )
    own: Literal["", "learner"] = "learner" if config.actor.colocated else ""
    _check_mesh(config, learner)
    return Placement(
        learner=learner,
        engines=tuple(
            EnginePlace(devices=d, cpu_cores=c, shares_with=own if i < num_serving else "helper")
            for i, (d, c) in enumerate(zip(groups, cores, strict=True))
        ),
    )


def _check_mesh(config: Config, learner: Sequence[str]) -> None:
    if learner and len(learner) != config.mesh.num_devices:
        raise ValueError(
            f"mesh: its axes need {config.mesh.num_devices} devices, found {len(learner)} for the learner "
            f"({', '.join(learner)}); change mesh.data, mesh.fsdp, ... or mesh.devices"
        )


def of_one_engine(config: Config, cpu_cores: str | None) -> Config:
    """Returns the config of one actor, with one engine and only the given cores (default: the config's only group)."""
    actor = config.actor
    cores = actor.cpu_cores if cpu_cores is None and actor.num_engines == 1 else cpu_cores or ""
    own = dataclasses.replace(actor, num_engines=1, devices="", cpu_cores="")
    if cores:
        own = dataclasses.replace(own, cpu_cores=spread_cores(cores, own.tensor_parallel_size))
    return dataclasses.replace(config, actor=own)


def spread_cores(cores: str, size: int) -> str:
    """Splits cores for `size` processes, separated by "|"; unchanged if they are already split so."""
    if len(cores.split("|")) == size:
        return cores
    return "|".join(",".join(map(str, part)) for part in _parts(core_ids(cores), size))


def core_ids(cores: str) -> list[int]:
    """Parses core ids from a text such as "0-3|4,6"; raises ValueError if the text is malformed."""
    bounds = [part.split("-") for part in cores.replace("|", ",").split(",")]
    try:
        return sorted({i for b in bounds for i in range(int(b[0]), int(b[-1]) + 1)})
    except ValueError:
        raise ValueError(f"cores: expected a list such as 0-3 or 0,2, got {cores!r}") from None


def _split(
    config: Config, gpus: Sequence[str], learner: tuple[str, ...]
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """Returns the learner's devices, and an equal part of the other devices per engine, up to its maximum."""
    num_engines, least = config.actor.num_engines, config.actor.tensor_parallel_size
    found = learner or tuple(gpus[: config.mesh.num_devices])
    left = [d for d in gpus if d not in found]
    if len(left) >= num_engines * least:
        most = min(len(left) // num_engines, config.actor.max_devices_per_engine)
        size = least * 2 ** ((most // least).bit_length() - 1)  # sizes of an elastic engine double
        return found, [tuple(left[i * size : (i + 1) * size]) for i in range(num_engines)]
    if num_engines == 1 and max(config.mesh.num_devices, least) <= len(gpus):
        # Both see all devices, which is CUDA's default. But a subset must be explicit, and so must devices that several
        # learner processes split.
        is_all = len(found) == len(gpus) and config.learner.num_processes == 1
        return learner or (() if is_all else found), [()]
    raise ValueError(
        f"actor.num_engines={num_engines}: expected {num_engines * least} devices ({least} per engine, "
        f"actor.tensor_parallel_size) in addition to the learner's {len(found)}, got {len(gpus)} on this machine; "
        "use fewer engines, or share devices with actor.devices and mesh.devices"
    )


def _shared(config: Config, learner: tuple[str, ...], gpus: Sequence[str]) -> Sequence[tuple[str, ...]]:
    """Splits the learner's devices evenly over the engines, which use them in turns with it (actor.colocated).

    The engines of a helper have as many of the next devices each.
    """
    num_helping, least = config.helpers.num_engines, config.actor.tensor_parallel_size
    num_engines = config.actor.num_engines - num_helping
    size = min(len(learner) // num_engines, config.actor.max_devices_per_engine)
    if size < least or size * num_engines != len(learner):
        raise ValueError(
            f"actor.colocated: {num_engines} engines (actor.num_engines, less helpers.num_engines) of "
            f"actor.tensor_parallel_size={least} must use all {len(learner)} devices of the learner's mesh"
        )
    left = [d for d in gpus if d not in learner]
    if len(left) < num_helping * size:
        raise ValueError(
            f"helpers.num_engines={num_helping}: expected {num_helping * size} devices in addition to the learner's "
            f"{len(learner)}, got {len(gpus)} on this machine"
        )
    devices = (*learner, *left)
    return [devices[i * size : (i + 1) * size] for i in range(config.actor.num_engines)]


def _left_by_engines(config: Config, gpus: Sequence[str]) -> tuple[str, ...]:
    """Returns the learner's devices: those that actor.devices leaves, or the only GPU of the machine.

    Empty on a machine without GPUs.
    """
    num_wanted = config.mesh.num_devices
    if not gpus or len(gpus) == num_wanted == 1:
        return tuple(gpus)
    named = {d for group in config.actor.device_groups for d in group}
    if other := sorted(d for d in named if d.isdigit() != gpus[0].isdigit()):
        raise ValueError(
            f"actor.devices: expected devices of this machine ({', '.join(gpus)}), got {', '.join(other)}, which "
            "leaves the learner's devices unknown; set mesh.devices as well"
        )
    left = [d for d in gpus if d not in named]
    if len(left) < num_wanted:
        raise ValueError(
            f"actor.devices={config.actor.devices!r}: expected to leave {num_wanted} of this machine's {len(gpus)} "
            f"devices for the learner's mesh, got {len(left)}; name fewer devices, or set mesh.devices"
        )
    return tuple(left[:num_wanted])


def gpu_memory_variables(config: Config, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that limit the learner to its memory share; set them before JAX is imported.

    With actor.colocated it has all memory in its turns.
    """
    if config.actor.colocated:
        return JAX_VARIABLES_IN_TURNS
    if JAX_MEMORY_FRACTION in environment or JAX_PREALLOCATE in environment:
        return {}
    return {JAX_MEMORY_FRACTION: f"{config.learner.gpu_memory_fraction:g}"}


def check_gpu_memory_shares(
    config: Config, placement: Placement, machine: Machine, environment: Mapping[str, str] = os.environ
) -> None:
    """Checks that the memory shares of learner and engines fit into each shared GPU.

    JAX reserves a share of a GPU before it computes, vLLM one for weights and KV cache, and a colocated judge a third.
    There is no check if the learner's `environment` selects the CPU or preallocates nothing. An empty device list
    stands for all devices of `machine`. Raises ValueError that names the fields to set.
    """
    if config.actor.colocated:
        return
    if environment.get("JAX_PLATFORMS", "").strip() == "cpu" or environment.get(JAX_PREALLOCATE, "").lower() == "false":
        return
    learners = float(environment.get(JAX_MEMORY_FRACTION) or config.learner.gpu_memory_fraction)
    judge_share = config.judge.engine_settings.gpu_memory_utilization
    engines = config.actor.gpu_memory_utilization + judge_share * config.judge.colocate
    for device in placement.learner or machine.gpus:
        names = [f"actor-{i}" for i, e in enumerate(placement.engines) if device in (e.devices or machine.gpus)]
        if names and round(learners + len(names) * engines, 6) > MAX_GPU_MEMORY_SHARE:
            share = int(100 * MAX_GPU_MEMORY_SHARE / (1 + len(names))) / 100
            judge = f" and judge.engine.gpu_memory_utilization={judge_share:g}" if config.judge.colocate else ""
            raise ValueError(
                f"learner and {' and '.join(names)} share device {device}: learner.gpu_memory_fraction={learners:g} "
                f"and actor.gpu_memory_utilization={config.actor.gpu_memory_utilization:g}{judge} must be at most "
                f"{MAX_GPU_MEMORY_SHARE:g} together; set both, as in --config.learner.gpu_memory_fraction={share:g} "
                f"--config.actor.gpu_memory_utilization={share:g}, or give each its own devices (mesh.devices, "
                "actor.devices)"
            )


def bind_to_cores(cores: Sequence[int]) -> None:
    """Binds all threads of this process to cores, which children inherit. Raises OSError if it cannot run on them."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def _cores(config: Config, machine: Machine) -> Sequence[str]:
    num_engines, size = config.actor.num_engines, config.actor.tensor_parallel_size
    if config.actor.cpu_cores:
        return config.actor.core_groups
    is_left_alone = num_engines == 1 and size == 1
    if machine.gpus or config.actor.devices or is_left_alone:
        return [""] * num_engines
    parts = _parts(machine.cores, num_engines)
    return ["|".join(",".join(map(str, p)) for p in _parts(part, size)) for part in parts]


def _parts(cores: Sequence[int], number: int) -> list[Sequence[int]]:
    """Splits cores into `number` parts whose sizes differ by at most one; reuses cores if there are too few."""
    if len(cores) < number:
        return [[cores[i % len(cores)]] for i in range(number)]
    bounds = [i * len(cores) // number for i in range(number + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]


def _ids(devices: str) -> tuple[str, ...]:
    """Parses the learner's devices, whose processes are separated by ";"."""
    return tuple(d.strip() for group in devices.split(";") for d in group.split(",")) if devices else ()
