"""How much memory a device of the mesh has for the learner: one answer for all of the learner's processes.

What follows from it is in the program that all run together, and a process can ask its own devices alone, and its own
host. So each tells the leader what it found, and hears what all go by.
"""

import collections
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from learner.costs.flops import TPU_CHIPS
from learner.hosts.hosts import Hosts

HOST_SHARE = 0.4
"""Of a machine's memory, for the CPU devices of a learner: an engine, its cache and the page cache live there too."""
DEVICE_SHARE = 0.85
"""Of an accelerator's: its estimate is of shapes, and programs and fragmentation take their part."""
_KINDS = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v6", "v6e"), ("v5", "v5p"))
"""Part of a TPU's `device_kind` -> its name in `TPU_CHIPS`; the first that fits."""
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


_CHANNEL = "memory"


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process found."""

    share_bytes: float | None
    """The learner's part of a device's memory, or of that which devices of one host share; None where nobody says."""
    host: str
    """Whose memory its devices share with those of other processes there; empty where each has its own."""
    num_devices: int
    """Its devices of the mesh."""


def usable_bytes(mesh: Mesh, hosts: Hosts, *, wait_s: float) -> float | None:
    """What the learner may use of any device, the same in all processes; None where one can't say.

    Of the machines' whole memory, not of what is free just now: a restart must choose as the start did.

    Args:
      mesh: of devices of all processes; or one that is only compiled for, in one process.
      hosts: the learner's processes, which all call it.
      wait_s: how long they wait for each other.

    Raises:
      HostLostError: one did not come.
      ValueError: there are several processes, and `hosts` knows of one.
    """
    if hosts.count == 1 and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            f"model.remat=auto is agreed on by the learner's {jax.process_count()} processes, and one was told of; "
            "give learner.update.step:build_steps the hosts of learner.hosts.connect"
        )
    channel = hosts.channel(_CHANNEL)
    told = channel.gather(msgspec.json.encode(_found(mesh, hosts.index)), timeout_s=wait_s)
    said = None
    if hosts.is_leader:
        said = msgspec.json.encode(smallest([msgspec.json.decode(one, type=Found) for one in told]))
    return msgspec.json.decode(channel.broadcast(said, timeout_s=wait_s), type=float | None)


def smallest(found: Sequence[Found]) -> float | None:
    """Of a device: the least that a process found, a host's memory shared out to all devices there."""
    on_host: collections.Counter[str] = collections.Counter()
    for one in found:
        on_host[one.host] += one.num_devices
    each = [
        None if one.share_bytes is None else one.share_bytes / (on_host[one.host] if one.host else 1) for one in found
    ]
    known = [usable for usable in each if usable is not None]
    return min(known) if len(known) == len(each) else None


def _found(mesh: Mesh, process: int) -> Found:
    """By a process's own devices; of a mesh that is only compiled for, by any."""
    own = [d for d in mesh.devices.flat if d.process_index == process] or list(mesh.devices.flat)
    device = own[0]
    if device.platform == "cpu":
        return Found(share_bytes=HOST_SHARE * host_bytes(), host=platform.node() or "?", num_devices=len(own))
    limit = _stated_limit(device)
    if limit is None and device.platform == "tpu":  # compiled for, and not there
        kind = device.device_kind.lower()
        name = next((name for part, name in _KINDS if part in kind), None)
        limit = TPU_CHIPS[name].hbm_bytes if name else None
    return Found(share_bytes=None if limit is None else DEVICE_SHARE * limit, host="", num_devices=len(own))


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
