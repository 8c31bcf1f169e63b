"""`model.remat=auto`: memory estimate and choice of a policy.

The estimate is from shapes and serves only this choice; XLA decides which arrays are live. It counts what each policy
of `learner.model.decoder` keeps of every layer, one layer's working set, the head's chunk of logits, and the gradients
of a micro-batch. tests/learner/update/test_choose_remat.py compares it with XLA's own memory analysis.

The policy is part of the common program, but a process can query only its own devices and host. Each process therefore
reports its memory to the leader, which broadcasts the smallest share.
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
from learner.model.value_head import abstract_critic, critic_architecture
from learner.update.frozen_policies import frozen_bytes, num_bytes, width
from learner.update.optimizer import make_optimizer

Policy = Literal["full", "attention", "gate", "dots", "none"]


POLICIES: tuple[Policy, ...] = ("none", "dots", "gate", "attention", "full")
"""Policies of `learner.model.decoder.REMAT`, from the one that keeps most to the one that keeps least."""
CHOICES: tuple[Policy, ...] = ("dots", "gate", "attention", "full")
"""Candidates of auto. `none` is excluded: storing and reading a layer's elementwise values costs more than computing
them again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """A device's share of a micro-batch and of the model."""

    num_tokens: int
    """Slots of the micro-batch, including padding."""
    activation_bytes: int
    """Bytes per number of the compute dtype."""
    tensor: int = 1
    """Number of devices that split a layer's width, its heads and the vocabulary."""
    param_shards: int = 1
    """Number of devices that split a parameter."""
    logit_chunk: int = 128
    """Tokens whose logits exist at the same time."""


def kept_per_token(config: Architecture, policy: Policy, tensor: int = 1) -> float:
    """Returns the numbers per token that one layer keeps from its forward to its backward pass."""
    if policy not in POLICIES:
        raise ValueError(f"remat: expected one of {POLICIES}, got {policy!r}")
    width, heads, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.num_experts:
        copies, inner = config.num_experts_per_token, config.moe_intermediate_size
    else:
        copies, inner = 1, config.intermediate_size
    kept = float(width)
    if policy == "full":
        return kept
    kept += heads / tensor  # attention's output; its normalizer is one number per head
    if policy == "attention":
        return kept
    kept += (heads + 2 * keys) / tensor + width + copies * inner / tensor
    if config.num_experts or config.family.out_norms:
        kept += copies * width  # what the MLP returns is needed only where it is weighted or normalized
    if policy == "gate":
        return kept
    kept += copies * inner / tensor
    if policy == "dots":
        return kept
    # Both norms' inputs and outputs, queries and keys before and after norm and rotation, gate, its sigmoid, product.
    return kept + 4 * width + 2 * (heads + keys) / tensor + copies * (3 * inner / tensor + width)


def micro_batch_bytes(config: Architecture, policy: Policy, share: DeviceShare, *, num_params: int) -> float:
    """Returns the peak bytes of `accumulate` on one device, without the state and its accumulator."""
    each = share.num_tokens * share.activation_bytes
    layers = config.num_layers * kept_per_token(config, policy, share.tensor) * each
    one_layer = 2 * kept_per_token(config, "none", share.tensor) * each
    words = -(-config.vocab_size // share.tensor)
    head = 4 * (4 * min(share.logit_chunk, share.num_tokens) * words + 2 * words * config.hidden_size)
    gradients = 4 * num_params / share.param_shards
    return layers + max(one_layer, head) + gradients


HOST_SHARE = 0.4
"""Share of a machine's memory for the learner's CPU devices; an engine, its cache and the page cache need the rest."""
DEVICE_SHARE = 0.85
"""Share of an accelerator's memory; programs and fragmentation need the rest."""
_KINDS = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v6", "v6e"), ("v5", "v5p"))
"""Part of a TPU's `device_kind` -> its name in `TPU_CHIPS`; the first match counts."""
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


_CHANNEL = "memory"


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that a process found."""

    share_bytes: float | None
    """Usable bytes of a device, or of all devices that share a host's memory; None if unknown."""
    host: str
    """Name of the host whose memory its devices share; empty if each device has its own."""
    num_devices: int
    """Number of its devices in the mesh."""


def usable_bytes(mesh: Mesh, hosts: Processes, *, wait_s: float) -> float | None:
    """Returns the usable bytes of any device, equal in all processes, which all call it; None if unknown.

    It counts the machines' total memory instead of the free memory, so that a restart chooses as the first start did.
    `mesh` has all processes' devices, or those of another machine that one process compiles for. Raises
    ProcessLostError if a process did not join, and ValueError if JAX has several processes, but `hosts` has only one.
    """
    if hosts.count == 1 and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            f"model.remat=auto: expected hosts of all {jax.process_count()} processes of the learner, got one; pass "
            "the hosts of learner.distributed.initialize to learner.update.train_step:build_train_step"
        )
    channel = hosts.channel(_CHANNEL)
    told = channel.gather(msgspec.json.encode(_found(mesh, hosts.index)), timeout_s=wait_s)
    said = None
    if hosts.is_leader:
        said = msgspec.json.encode(smallest([msgspec.json.decode(one, type=ProcessMemory) for one in told]))
    return msgspec.json.decode(channel.broadcast(said, timeout_s=wait_s), type=float | None)


def smallest(found: Sequence[ProcessMemory]) -> float | None:
    """Returns the smallest share of a device, a host's memory divided among its devices; None if unknown."""
    on_host: collections.Counter[str] = collections.Counter()
    for one in found:
        on_host[one.host] += one.num_devices
    each = [
        None if one.share_bytes is None else one.share_bytes / (on_host[one.host] if one.host else 1) for one in found
    ]
    known = [usable for usable in each if usable is not None]
    return min(known) if len(known) == len(each) else None


def _found(mesh: Mesh, process: int) -> ProcessMemory:
    """Returns the memory of a process's own devices; of any device of a mesh that is only compiled for."""
    own = [d for d in mesh.devices.flat if d.process_index == process] or list(mesh.devices.flat)
    device = own[0]
    if device.platform == "cpu":
        return ProcessMemory(share_bytes=HOST_SHARE * host_bytes(), host=platform.node() or "?", num_devices=len(own))
    limit = _stated_limit(device)
    if limit is None and device.platform == "tpu":  # compiled for, but not present
        kind = device.device_kind.lower()
        name = next((name for part, name in _KINDS if part in kind), None)
        limit = TPU_CHIPS[name].hbm_bytes if name else None
    return ProcessMemory(share_bytes=None if limit is None else DEVICE_SHARE * limit, host="", num_devices=len(own))


def host_bytes(cgroup: pathlib.Path = _CGROUP) -> int:
    """Returns the memory of the machine, or of the container if that is smaller."""
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
"""Hidden size from which a learner on CPU keeps its projections."""


def choose_remat(
    architecture: Architecture, config: Config, mesh: Mesh, hosts: Processes, *, logit_chunk: int
) -> Policy:
    """Returns the configured policy; for auto the first of `CHOICES` that fits in memory, else the last.

    The choice depends only on the configuration and the kind of machines. It is equal after a restart and in all
    processes, which all call this function. It is `attention` if a device does not report its memory. Raises
    ProcessLostError if another process did not join.
    """
    if config.model.remat != "auto":
        return config.model.remat
    usable = usable_bytes(mesh, hosts, wait_s=config.supervision.start_timeout_s)
    if usable is None:
        logging.info("remat chosen policy=attention: the devices do not report their memory")
        return "attention"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # Computing a number of a product again costs 2 D FLOPs; keeping it costs the same few memory passes for any D. On a
    # CPU keeping it pays off only for large D.
    choices = CHOICES[CHOICES.index("attention") :] if on_cpu and architecture.hidden_size < _WIDE else CHOICES
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
    """Returns the first of `choices` that fits in `usable` bytes of a device, or the last."""
    params = abstract_params(architecture, config.model.param_dtype)
    trained = abstract_adapters(architecture, config.lora, config.model.param_dtype) if config.lora.is_on else params
    # The memory of a head on the policy is negligible.
    critic = None if config.critic.backbone == "policy" else critic_architecture(config, architecture)
    value_params = None if critic is None else abstract_critic(critic, config)
    share = DeviceShare(
        num_tokens=-(-config.packing.rows * config.packing.row_tokens // axes_size(mesh, (*BATCH_AXES, "sequence"))),
        activation_bytes=width(config.model.compute_dtype),
        tensor=mesh.shape["tensor"],
        param_shards=mesh.size // mesh.shape["data"],
        logit_chunk=logit_chunk,
    )
    state = (state_bytes(trained, config) + frozen_bytes(params, trained, config)) / share.param_shards
    top_k = config.loss.teacher_top_k if config.loss.compares_distributions else 0
    state += 16 * top_k * share.num_tokens  # the teacher's ids and logprobs, as given and aligned with the targets
    needs = {
        policy: state + micro_batch_bytes(architecture, policy, share, num_params=_size(trained)) for policy in choices
    }
    if critic is not None and value_params is not None:
        # Both states stay; the micro-batch passes through one model after the other.
        state_of_critic = state_bytes(value_params, config) / share.param_shards
        headless = dataclasses.replace(critic, vocab_size=1)  # its one value has no logits
        of_critic = {p: micro_batch_bytes(headless, p, share, num_params=_size(value_params)) for p in choices}
        needs = {p: state_of_critic + max(need, state + of_critic[p]) for p, need in needs.items()}
    fitting: list[Policy] = [policy for policy in choices if needs[policy] <= usable]
    chosen = fitting[0] if fitting else choices[-1]
    estimates = " ".join(f"{policy}={need / 2**30:.2f}" for policy, need in needs.items())
    logging.info("remat chosen policy=%s usable_gib=%.2f estimated_gib: %s", chosen, usable / 2**30, estimates)
    return chosen


def state_bytes(trained: Params, config: Config) -> int:
    """Returns the bytes of the trained parameters, of the optimizer state and of the accumulator."""
    opt_state = jax.eval_shape(make_optimizer(config.optimizer, num_steps=config.run.num_updates).init, trained)
    return num_bytes((trained, opt_state)) + 4 * _size(trained)


def _size(params: Params) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
