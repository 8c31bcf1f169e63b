"""`model.remat=auto`: memory estimate and choice of policy.

An estimate from shapes, made to choose by and not to account with: XLA decides what really lives at once. It counts
what each policy of `learner.model.attention.xla` keeps of every layer, one layer's working set, the head's chunk of
logits, and the gradients before they are accumulated. tests/learner/update/test_choose_remat.py compares it with XLA's
own memory analysis.

What follows from it is in the program that all run together, and a process can ask its own devices alone, and its own
host. So each tells the leader what it found, and hears what all go by.
"""

import collections
import dataclasses
import math
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any, Literal

import jax
import msgspec
from absl import logging
from jax.sharding import Mesh

from configs.schema import Config
from learner.distributed.channel import Processes
from learner.distributed.sharding import BATCH_AXES, axes_size
from learner.metrics.flops import TPU_CHIPS
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params
from learner.model.lora import abstract_adapters
from learner.update.frozen_policies import frozen_bytes, num_bytes, width
from learner.update.optimizer import make_optimizer

Policy = Literal["full", "attention", "dots", "none"]


POLICIES: tuple[Policy, ...] = ("none", "dots", "attention", "full")
"""Those of `learner.model.decoder.REMAT`, the one that keeps most first."""
CHOICES: tuple[Policy, ...] = ("dots", "attention", "full")
"""What auto chooses from. Not `none`: a layer's elementwise values cost more to put away and fetch again than to make,
1.08 times the time of `dots` for 16M parameters on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What of a micro-batch and of the model one device has."""

    num_tokens: int
    """Slots of the micro-batch, padding too."""
    activation_bytes: int
    """Of a number of the compute dtype."""
    tensor: int = 1
    """Devices that split a layer's width, its heads and the vocabulary."""
    param_shards: int = 1
    """Devices that split a parameter."""
    logit_chunk: int = 128
    """Tokens whose logits exist at once."""


def kept_per_token(config: Architecture, policy: Policy, tensor: int = 1) -> float:
    """Numbers that one layer keeps of a token from its forward to its backward pass.

    Raises:
      ValueError: no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"remat: got {policy!r}, wanted one of {POLICIES}")
    width, heads, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.num_experts:
        copies, inner = config.num_experts_per_token, config.moe_intermediate_size
    else:
        copies, inner = 1, config.intermediate_size
    kept = float(width)
    if policy == "full":
        return kept
    kept += heads / tensor  # attention's output; its normaliser is one number a head
    if policy == "attention":
        return kept
    kept += (heads + 2 * keys) / tensor + width + copies * (2 * inner / tensor + width)
    if policy == "dots":
        return kept
    # Both norms' inputs and outputs, queries and keys before and after norm and rotation, gate, its sigmoid, product.
    return kept + 4 * width + 2 * (heads + keys) / tensor + copies * 3 * inner / tensor


def micro_batch_bytes(config: Architecture, policy: Policy, share: DeviceShare, *, num_params: int) -> float:
    """Bytes on one device at the fullest moment of `accumulate`, the state and its accumulator left out."""
    each = share.num_tokens * share.activation_bytes
    layers = config.num_layers * kept_per_token(config, policy, share.tensor) * each
    one_layer = 2 * kept_per_token(config, "none", share.tensor) * each
    words = -(-config.vocab_size // share.tensor)
    head = 4 * (4 * min(share.logit_chunk, share.num_tokens) * words + 2 * words * config.hidden_size)
    gradients = 4 * num_params / share.param_shards
    return layers + max(one_layer, head) + gradients


HOST_SHARE = 0.4
"""Of a machine's memory, for the CPU devices of a learner: an engine, its cache and the page cache live there too."""
DEVICE_SHARE = 0.85
"""Of an accelerator's: its estimate is of shapes, and programs and fragmentation take their part."""
_KINDS = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v6", "v6e"), ("v5", "v5p"))
"""Part of a TPU's `device_kind` -> its name in `TPU_CHIPS`; the first that fits."""
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


_CHANNEL = "memory"


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process found."""

    share_bytes: float | None
    """The learner's part of a device's memory, or of that which devices of one host share; None where nobody says."""
    host: str
    """Whose memory its devices share with those of other processes there; empty where each has its own."""
    num_devices: int
    """Its devices of the mesh."""


def usable_bytes(mesh: Mesh, hosts: Processes, *, wait_s: float) -> float | None:
    """What the learner may use of any device, the same in all processes; None where one can't say.

    Of the machines' whole memory, not of what is free just now: a restart must choose as the start did.

    Args:
      mesh: of devices of all processes; or one that is only compiled for, in one process.
      hosts: the learner's processes, which all call it.
      wait_s: how long they wait for each other.

    Raises:
      ProcessLostError: one did not come.
      ValueError: there are several processes, and `hosts` knows of one.
    """
    if hosts.count == 1 and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            f"model.remat=auto is agreed on by the learner's {jax.process_count()} processes, and one was told of; "
            "give learner.update.train_step:build_train_step the hosts of learner.distributed.initialize"
        )
    channel = hosts.channel(_CHANNEL)
    told = channel.gather(msgspec.json.encode(_found(mesh, hosts.index)), timeout_s=wait_s)
    said = None
    if hosts.is_leader:
        said = msgspec.json.encode(smallest([msgspec.json.decode(one, type=ProcessMemory) for one in told]))
    return msgspec.json.decode(channel.broadcast(said, timeout_s=wait_s), type=float | None)


def smallest(found: Sequence[ProcessMemory]) -> float | None:
    """Of a device: the least that a process found, a host's memory shared out to all devices there."""
    on_host: collections.Counter[str] = collections.Counter()
    for one in found:
        on_host[one.host] += one.num_devices
    each = [
        None if one.share_bytes is None else one.share_bytes / (on_host[one.host] if one.host else 1) for one in found
    ]
    known = [usable for usable in each if usable is not None]
    return min(known) if len(known) == len(each) else None


def _found(mesh: Mesh, process: int) -> ProcessMemory:
    """By a process's own devices; of a mesh that is only compiled for, by any."""
    own = [d for d in mesh.devices.flat if d.process_index == process] or list(mesh.devices.flat)
    device = own[0]
    if device.platform == "cpu":
        return ProcessMemory(share_bytes=HOST_SHARE * host_bytes(), host=platform.node() or "?", num_devices=len(own))
    limit = _stated_limit(device)
    if limit is None and device.platform == "tpu":  # compiled for, and not there
        kind = device.device_kind.lower()
        name = next((name for part, name in _KINDS if part in kind), None)
        limit = TPU_CHIPS[name].hbm_bytes if name else None
    return ProcessMemory(share_bytes=None if limit is None else DEVICE_SHARE * limit, host="", num_devices=len(own))


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


_WIDE = 512
"""Hidden size from which a CPU's learner keeps its projections."""


def choose_remat(
    architecture: Architecture, config: Config, mesh: Mesh, hosts: Processes, *, logit_chunk: int
) -> Policy:
    """The configured policy; for auto the first of `CHOICES` that fits beside the state, else the one that keeps least.

    It follows from the configuration and the kind of machines alone, so a restart computes as the run did, and is the
    same in all processes, which all call it. Where a device doesn't say how much memory it has, it is `attention`.

    Raises:
      ProcessLostError: another process did not come.
    """
    if config.model.remat != "auto":
        return config.model.remat
    usable = usable_bytes(mesh, hosts, wait_s=config.supervision.start_timeout_s)
    if usable is None:
        logging.info("remat=attention: the devices don't say how much memory they have")
        return "attention"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # A product's number costs 2 D FLOPs to make again, and the same few passes over memory to keep whatever D is: on a
    # CPU they cost as much at 256 (1.08 s an update with either), and at 576 making it again costs more.
    choices = CHOICES[1:] if on_cpu and architecture.hidden_size < _WIDE else CHOICES
    return first_that_fits(architecture, config, mesh, logit_chunk=logit_chunk, usable=usable, choices=choices)


def first_that_fits(
    architecture: Architecture,
    config: Config,
    mesh: Mesh,
    *,
    logit_chunk: int,
    usable: float,
    choices: Sequence[Policy] = CHOICES,
) -> Policy:
    """The first of `choices`, or the last, for a device of which the learner may use so many bytes."""
    params = abstract_params(architecture, config.model.param_dtype)
    trained = abstract_adapters(architecture, config.lora, config.model.param_dtype) if config.lora.is_on else params
    share = DeviceShare(
        num_tokens=-(-config.packing.rows * config.packing.row_tokens // axes_size(mesh, (*BATCH_AXES, "sequence"))),
        activation_bytes=width(config.model.compute_dtype),
        tensor=mesh.shape["tensor"],
        param_shards=mesh.size // mesh.shape["data"],
        logit_chunk=logit_chunk,
    )
    state = (state_bytes(trained, config) + frozen_bytes(params, trained, config)) / share.param_shards
    needs = {
        policy: state + micro_batch_bytes(architecture, policy, share, num_params=_size(trained)) for policy in choices
    }
    fitting: list[Policy] = [policy for policy in choices if needs[policy] <= usable]
    chosen = fitting[0] if fitting else choices[-1]
    estimates = " ".join(f"{policy}={need / 2**30:.2f}" for policy, need in needs.items())
    logging.info("remat=%s GiB a device: may use %.2f, estimated %s", chosen, usable / 2**30, estimates)
    return chosen


def state_bytes(trained: Params, config: Config) -> int:
    """Bytes of what is trained, of its optimizer's state as the optimizer makes it, and of the accumulator."""
    opt_state = jax.eval_shape(make_optimizer(config.optimizer, num_steps=config.run.num_updates).init, trained)
    return num_bytes((trained, opt_state)) + 4 * _size(trained)


def _size(params: Params) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
