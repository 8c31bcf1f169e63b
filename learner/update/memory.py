"""How much memory a device of the mesh has for the learner."""

import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from learner.costs.flops import TPU_CHIPS

HOST_SHARE = 0.4
"""Of a machine's memory, for the CPU devices of a learner: an engine, its cache and the page cache live there too."""
DEVICE_SHARE = 0.85
"""Of an accelerator's: its estimate is of shapes, and programs and fragmentation take their part."""
_KINDS = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v6", "v6e"), ("v5", "v5p"))
"""Part of a TPU's `device_kind` -> its name in `TPU_CHIPS`; the first that fits."""
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


def usable_bytes(mesh: Mesh) -> float | None:
    """What the learner may use of one device; None where nobody says.

    Of the machine's whole memory, not of what is free just now: a restart must choose as the start did.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        here = [d for d in mesh.devices.flat if d.process_index == device.process_index]
        return HOST_SHARE * host_bytes() / len(here)
    limit = _stated_limit(device)
    if limit is None and device.platform == "tpu":  # compiled for, and not there
        kind = device.device_kind.lower()
        name = next((name for part, name in _KINDS if part in kind), None)
        limit = TPU_CHIPS[name].hbm_bytes if name else None
    return None if limit is None else DEVICE_SHARE * limit


def host_bytes(cgroup: pathlib.Path = _CGROUP) -> int:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(cgroup.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def _stated_limit(device: Any) -> int | None:
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # a device of a topology that is only compiled for
        return None
    return stats.get("bytes_limit") if stats else None
