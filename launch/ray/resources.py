"""Cluster resources of the run's processes, from flags and config; pure, without Ray."""

import dataclasses
import re
from typing import Literal

from configs.run_folder import is_remote_store
from configs.schema import Config

_TPU = re.compile(r"tpu:(v\d+\w*):(\d+(?:x\d+)+)")
_GPU = re.compile(r"gpu(?::([A-Za-z0-9][A-Za-z0-9_-]*))?")
_CPU = re.compile(r"cpu(?::(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Device kind of a process."""

    device: Literal["cpu", "gpu", "tpu"]
    accelerator: str = ""
    """Ray's type name of a GPU (H100; empty means any), or a TPU's generation (v5p)."""
    topology: str = ""
    """Chips of a TPU slice: 4x4x4."""
    num_cpus: int = 1
    """CPU cores per process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """Resources of one process on one node."""

    num_cpus: float
    num_gpus: float = 0.0
    accelerator: str = ""
    num_tpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        """Returns the resources in the format of a placement group bundle."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, "TPU": self.num_tpus}
        if self.accelerator:  # a small share of the resource that marks nodes with this accelerator
            named[f"accelerator_type:{self.accelerator}"] = 0.001
        return {name: value for name, value in named.items() if value}

    def __str__(self) -> str:
        return ", ".join(f"{value:g} {name}" for name, value in self.bundle().items() if ":" not in name) + (
            f" ({self.accelerator})" if self.accelerator else ""
        )


def parse(text: str, *, flag: str) -> DeviceKind:
    """Parses `cpu[:CORES]`, `gpu[:TYPE]` or `tpu:GENERATION:TOPOLOGY`; raises ValueError for another format."""
    if found := _CPU.fullmatch(text):
        return DeviceKind(device="cpu", num_cpus=max(1, int(found[1] or 1)))
    if found := _GPU.fullmatch(text):
        return DeviceKind(device="gpu", accelerator=found[1] or "")
    if found := _TPU.fullmatch(text):
        return DeviceKind(device="tpu", accelerator=found[1], topology=found[2])
    raise ValueError(f"--{flag} must be cpu[:CORES], gpu[:TYPE] (gpu:H100) or tpu:v5p:4x4x4, got {text!r}")


def of_learner(config: Config, kind: DeviceKind) -> ResourceRequest:
    """Returns the resources of each learner process; raises ValueError if the mesh does not match the slice's chips."""
    num_devices, num_processes = config.mesh.num_devices, config.learner.num_processes
    if kind.device == "tpu":
        num_chips = 1
        for side in kind.topology.split("x"):
            num_chips *= int(side)
        if num_chips != num_devices:
            raise ValueError(
                f"the mesh has {num_devices} devices, a {kind.topology} slice {num_chips} chips; change "
                "--learner_on or mesh.*"
            )
    each = num_devices // num_processes
    if kind.device == "cpu":
        return ResourceRequest(num_cpus=kind.num_cpus)
    if kind.device == "gpu":
        return ResourceRequest(num_cpus=kind.num_cpus, num_gpus=each, accelerator=kind.accelerator)
    return ResourceRequest(num_cpus=kind.num_cpus, num_tpus=each)


def of_actor(config: Config, kind: DeviceKind) -> ResourceRequest:
    """Returns the resources of each actor, for its engine's devices. Raises ValueError for a TPU."""
    if kind.device == "tpu":
        raise ValueError("--actors_on must be gpu[:TYPE] or cpu[:CORES]: engines sample on GPUs")
    size = config.actor.max_devices_per_engine
    if kind.device == "cpu":
        return ResourceRequest(num_cpus=max(kind.num_cpus, size))
    return ResourceRequest(num_cpus=kind.num_cpus, num_gpus=size, accelerator=kind.accelerator)


def check_spread(config: Config) -> None:
    """Raises ValueError if the run's processes cannot be on several machines."""
    if config.shares_devices:
        raise ValueError("actor.colocated and helpers.num_engines share devices of one machine; use launch.local")
    if not is_remote_store(config):
        raise ValueError("store.url: must be a database on a cluster; set store.url=postgresql://...")
    if not config.publish.leaves_the_machine:
        raise ValueError(
            "publish.serve: weights must be served to other machines on a cluster; set publish.serve=https (with "
            "publish.listen and publish.advertise), or publish.bucket"
        )
