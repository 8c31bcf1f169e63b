"""Which of this machine's devices and cores the learner and each of its engines get: pure, but for what is here.

On a machine with GPUs whoever is not told (`mesh.devices`, `actor.devices`) gets what the other leaves: the learner the
first of them, as many as its mesh has; then each engine the next ones, as many as it takes. One engine that nothing is
left for shares them with the learner, and so do all on a machine with one GPU.

On a machine without, several engines are bound to cores of their own: two on the same cores hold each other up, most of
all while they start. The learner is not bound: it works where engines leave time.
"""

import contextlib
import dataclasses
import glob
import itertools
import os
from collections.abc import Mapping, Sequence

from configs.schema import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to share out."""

    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""
    cores: tuple[int, ...]
    """Those that this process may run on."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Machine":
        """This machine, as far as this process may use it."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
        if gpus and VISIBLE in environment:  # what follows an id that is none is not visible
            named = [d.strip() for d in environment[VISIBLE].split(",")]
            gpus = list(itertools.takewhile(lambda d: d and d != "-1", named))
        return cls(gpus=tuple(gpus), cores=cores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Where one engine runs."""

    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES is set to; empty leaves it as it is."""
    cpu_cores: str = ""
    """Cores of an engine on a CPU, as `actor.cpu_cores` writes them; empty leaves it to the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the processes of a run on one machine run."""

    learner: tuple[str, ...]
    """Devices of the learner; empty leaves them as they are."""
    engines: tuple[EnginePlace, ...]

    def warnings(self) -> list[str]:
        """What to know of devices that several have."""
        found = []
        for index, place in enumerate(self.engines):
            if shared := sorted(set(self.learner) & set(place.devices)):
                found.append(
                    f"warning: learner and actor-{index} both have device {', '.join(shared)}; give each its own "
                    "(mesh.devices, actor.devices), or leave the engine less of it (actor.gpu_memory_utilization)"
                )
        owners: dict[str, list[str]] = {}
        for index, place in enumerate(self.engines):
            for device in place.devices:
                owners.setdefault(device, []).append(f"actor-{index}")
        found += [f"warning: device {d} is of {' and '.join(names)}" for d, names in owners.items() if len(names) > 1]
        return found


def place(config: Config, machine: Machine) -> Placement:
    """Shares the machine out.

    Raises:
      ValueError: there are too few devices; one line says what to do.
    """
    learner = _ids(config.mesh.devices)
    if config.actor.devices:
        groups: Sequence[tuple[str, ...]] = config.actor.device_groups
        learner = learner or _left_by_engines(config, machine.gpus)
    elif machine.gpus:
        learner, groups = _split(config, machine.gpus, learner)
    else:
        groups = [()] * config.actor.num_engines
    cores = _cores(config, machine)
    return Placement(
        learner=learner,
        engines=tuple(EnginePlace(devices=d, cpu_cores=c) for d, c in zip(groups, cores, strict=True)),
    )


def of_one_engine(config: Config, cpu_cores: str | None) -> Config:
    """The config as one actor reads it: nothing of other engines, and of the cores those given, or its only group."""
    actor = config.actor
    cores = actor.cpu_cores if cpu_cores is None and actor.num_engines == 1 else cpu_cores or ""
    own = dataclasses.replace(actor, num_engines=1, devices="", cpu_cores="")
    if cores:
        own = dataclasses.replace(own, cpu_cores=spread_cores(cores, own.tensor_parallel_size))
    return dataclasses.replace(config, actor=own)


def spread_cores(cores: str, size: int) -> str:
    """Cores for `size` processes, with "|" between them; as they are if they are for so many."""
    if len(cores.split("|")) == size:
        return cores
    return "|".join(",".join(map(str, part)) for part in _parts(core_ids(cores), size))


def core_ids(cores: str) -> list[int]:
    """The ids in a text like "0-3|4,6".

    Raises:
      ValueError: it is no such text.
    """
    bounds = [part.split("-") for part in cores.replace("|", ",").split(",")]
    try:
        return sorted({i for b in bounds for i in range(int(b[0]), int(b[-1]) + 1)})
    except ValueError:
        raise ValueError(f"{cores!r} is no list of cores like 0-3 or 0,2") from None


def _split(
    config: Config, gpus: Sequence[str], learner: tuple[str, ...]
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """The learner's devices, and each engine's: an even part of what the learner leaves, as far as it can take it."""
    num_engines, least = config.actor.num_engines, config.actor.tensor_parallel_size
    found = learner or tuple(gpus[: config.mesh.num_devices])
    left = [d for d in gpus if d not in found]
    if len(left) >= num_engines * least:
        size = min(len(left) // num_engines, config.actor.max_devices_per_engine)
        return found, [tuple(left[i * size : (i + 1) * size]) for i in range(num_engines)]
    if num_engines == 1:
        # Both see all, as they would without us; but a part is said, and so is what several processes divide.
        is_all = len(found) == len(gpus) and config.learner.num_processes == 1
        return learner or (() if is_all else found), [()]
    raise ValueError(
        f"actor.num_engines={num_engines} engines of {least} devices each (actor.tensor_parallel_size) want "
        f"{num_engines * least} beside the learner's {len(found)}, this machine shows {len(gpus)}; take fewer engines, "
        "or say who shares what with actor.devices and mesh.devices"
    )


def _left_by_engines(config: Config, gpus: Sequence[str]) -> tuple[str, ...]:
    """The learner's devices beside those that actor.devices names; of a machine with one GPU that one, whoever has it.

    Nothing is said of a machine without GPUs.
    """
    num_wanted = config.mesh.num_devices
    if not gpus or len(gpus) == num_wanted == 1:
        return tuple(gpus)
    named = {d for group in config.actor.device_groups for d in group}
    if other := sorted(d for d in named if d.isdigit() != gpus[0].isdigit()):
        raise ValueError(
            f"actor.devices names {', '.join(other)}, this machine's devices are {', '.join(gpus)} here: which of them "
            "are left for the learner can't be told; give mesh.devices too"
        )
    left = [d for d in gpus if d not in named]
    if len(left) < num_wanted:
        raise ValueError(
            f"actor.devices={config.actor.devices!r} leaves the learner {len(left)} of this machine's {len(gpus)} "
            f"devices, its mesh wants {num_wanted}; name fewer there, or say with mesh.devices which ones it takes or "
            "shares"
        )
    return tuple(left[:num_wanted])


def bind_to_cores(cores: Sequence[int]) -> None:
    """Binds this process, each thread that it has: a process started from a thread runs where that thread may.

    Raises:
      OSError: it can't run on them.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
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
    """The cores in so many parts that differ by one at most; where they are too few, some have the same one."""
    if len(cores) < number:
        return [[cores[i % len(cores)]] for i in range(number)]
    bounds = [i * len(cores) // number for i in range(number + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]


def _ids(devices: str) -> tuple[str, ...]:
    """Of the learner; its processes are told apart by ";"."""
    return tuple(d.strip() for group in devices.split(";") for d in group.split(",")) if devices else ()
