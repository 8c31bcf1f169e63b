"""Machines that roles run on: how many of which kind, and how Kubernetes finds them. From their makers' pages.

A TPU slice is named by its chips here. Google's names of v5p slices count TensorCores, two a chip: 64 chips (4x4x4, 16
hosts of 4) are v5p-64 here and v5p-128 there. v5e and v6e have one core a chip.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

GKE_GPU, GFD_GPU = "cloud.google.com/gke-accelerator", "nvidia.com/gpu.product"
"""Labels of nodes with GPUs: Google's, and what NVIDIA's GPU feature discovery sets anywhere."""
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"} | {
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of one kind that a process each runs on, or a part of one."""

    count: int
    chips: int
    """Of each: TPU chips or GPUs."""
    resource: str
    """Kubernetes' name of a chip."""
    labels: Mapping[str, str]
    """Of the nodes."""
    cpus: int
    memory_gib: int
    """What a process may have of a host, by its share of the chips."""
    title: str
    """What it is, in words."""

    @property
    def is_tpu(self) -> bool:
        """Whether its chips are TPU's."""
        return self.resource == "google.com/tpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tpu:
    label: str
    topologies: Mapping[int, str]
    """The usual one of so many chips."""
    hosts: Mapping[int, tuple[int, int]]
    """CPUs and GiB of a host with so many chips."""
    google_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    gke: str
    product: str
    cpus: int
    memory_gib: int
    per_host: int = 8


_TPUS = {
    "v5e": _Tpu(
        label="tpu-v5-lite-podslice",
        topologies=_SQUARES,
        hosts={1: (24, 44), 4: (112, 178), 8: (224, 357)},
        google_name="v5litepod-{chips}",
    ),
    "v5p": _Tpu(label="tpu-v5p-slice", topologies=_CUBES, hosts={4: (208, 417)}, google_name="v5p-{cores}"),
    "v6e": _Tpu(
        label="tpu-v6e-slice",
        topologies=_SQUARES,
        hosts={1: (44, 163), 4: (180, 670), 8: (180, 1341)},
        google_name="v6e-{chips}",
    ),
}
_GPUS = {
    "h100": _Gpu(gke="nvidia-h100-80gb", product="NVIDIA-H100-80GB-HBM3", cpus=208, memory_gib=1743),
    "h200": _Gpu(gke="nvidia-h200-141gb", product="NVIDIA-H200", cpus=224, memory_gib=2749),
}
TPUS, GPUS = tuple(_TPUS), tuple(_GPUS)
_FREE = 0.85
"""Of a host's CPUs and memory: the rest is the system's and the cluster's."""


def tpu_slice(kind: str, *, num_chips: int, topology: str = "") -> Hosts:
    """The hosts of a slice.

    Raises:
      ValueError: there is no such slice.
    """
    tpu = _TPUS[kind]
    name = topology or tpu.topologies.get(num_chips, "")
    if not name:
        raise ValueError(
            f"the mesh has {num_chips} chips, {kind} slices have {', '.join(map(str, tpu.topologies))}; change mesh.*, "
            "or give --topology"
        )
    num_axes = 3 if kind == "v5p" else 2
    if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{num_axes - 1}}}", name):
        raise ValueError(f"--topology of {kind} has {num_axes} sides, as in {tpu.topologies[16]}, got {name!r}")
    if math.prod(map(int, name.split("x"))) != num_chips:
        raise ValueError(f"--topology={name} is not of the mesh's {num_chips} chips (mesh.*)")
    chips = num_chips if num_chips in tpu.hosts else 4
    if num_chips % chips:
        raise ValueError(f"{num_chips} chips of {kind} are no whole hosts of {chips}")
    cpus, memory = tpu.hosts[chips]
    count = num_chips // chips
    google = tpu.google_name.format(chips=num_chips, cores=2 * num_chips)
    return Hosts(
        count=count,
        chips=chips,
        resource="google.com/tpu",
        labels={"cloud.google.com/gke-tpu-accelerator": tpu.label, "cloud.google.com/gke-tpu-topology": name},
        cpus=int(cpus * _FREE),
        memory_gib=int(memory * _FREE),
        title=f"{kind}-{num_chips} by its chips, Google's name {google}: {name}, {count} hosts of {chips} chips",
    )


def gpu_hosts(kind: str, *, num_gpus: int, is_gke: bool) -> Hosts:
    """Whole hosts with so many GPUs together, or a part of one.

    Raises:
      ValueError: they are no whole hosts.
    """
    gpu = _GPUS[kind]
    count = max(1, num_gpus // gpu.per_host)
    if num_gpus != count * min(num_gpus, gpu.per_host):
        raise ValueError(f"{num_gpus} GPUs are no whole {kind} hosts of {gpu.per_host}; change mesh.*")
    each = num_gpus // count
    return Hosts(
        count=count,
        chips=each,
        resource="nvidia.com/gpu",
        labels={GKE_GPU: gpu.gke} if is_gke else {GFD_GPU: gpu.product},
        cpus=int(gpu.cpus * _FREE * each / gpu.per_host),
        memory_gib=int(gpu.memory_gib * _FREE * each / gpu.per_host),
        title=f"{num_gpus} {kind} GPU{'s' if num_gpus > 1 else ''} on {count} host{'s' if count > 1 else ''}",
    )


def gpus_of_a_host(kind: str) -> int:
    """How many GPUs one host has."""
    return _GPUS[kind].per_host


def cpu_hosts(*, count: int = 1, cpus: int = 2, memory_gib: int = 8) -> Hosts:
    """Any nodes, for a trial without accelerators: a process has one device there."""
    title = "a node's CPUs" if count == 1 else f"CPUs of {count} nodes"
    return Hosts(count=count, chips=0, resource="", labels={}, cpus=cpus, memory_gib=memory_gib, title=title)
